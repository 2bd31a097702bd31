"""Bad input gets a sentence and changes nothing, on a host that serves."""

import copy

import pytest

HUGE_BYTES = 10**16


@pytest.fixture(autouse=True)
def _the_engine_goes_on(host):
    """Whatever is refused, the container that serves is not touched."""
    before = host.check_output("docker inspect --format '{{.Id}} {{.State.StartedAt}}' metalserve-tiny")
    yield
    assert host.check_output("docker inspect --format '{{.Id}} {{.State.StartedAt}}' metalserve-tiny") == before


@pytest.fixture
def deployment(variables):
    return copy.deepcopy(variables["serving_deployments"][0])


@pytest.fixture
def lock(variables):
    return copy.deepcopy(variables["serving_lock"])


def refused(run_playbook, extra, *sentences):
    result = run_playbook("site.yml", extra)
    assert result.rc != 0, result.text
    assert not result.changed, result.text
    for sentence in sentences:
        assert sentence in result.text, result.text


def test_unknown_model(run_playbook, deployment):
    deployment["model"] = "lab-moe-tony"
    refused(
        run_playbook,
        {"serving_deployments": [deployment]},
        "model 'lab-moe-tony' is not in the catalogue",
        "lab-moe-tiny",
    )


def test_unknown_engine(run_playbook, deployment):
    deployment["engine"] = "vlm"
    refused(run_playbook, {"serving_deployments": [deployment]}, "engine 'vlm'", "one of vllm, sglang")


def test_flag_that_the_engine_does_not_have(run_playbook, deployment):
    deployment["engine_args"] = {"enable-cuda-graph": True}
    refused(
        run_playbook, {"serving_deployments": [deployment]}, "vllm 0.32.0 has no flag 'enable-cuda-graph'", "Change:"
    )


def test_two_deployments_on_one_port(run_playbook, deployment):
    second = {**deployment, "name": "second"}
    refused(run_playbook, {"serving_deployments": [deployment, second]}, "tiny and second both have port 8000")


def test_port_in_use_names_who_holds_it(host, run_playbook, deployment):
    pid = host.check_output("systemctl show ssh.service --property=MainPID --value")
    deployment["port"] = 22
    refused(
        run_playbook,
        {"serving_deployments": [deployment]},
        "port 22 of the deployment tiny is in use",
        "sshd",
        f"(pid {pid})",
    )


def test_image_without_a_locked_digest(run_playbook, lock):
    lock["images"] = {}
    refused(run_playbook, {"serving_lock": lock}, "no digest locked for", "playbooks/ops/lock.yml")


def test_digest_that_the_registry_does_not_have(host, run_playbook, lock):
    (image,) = lock["images"].values()
    image["digest"] = "sha256:" + "0" * 64
    image["compressed_bytes"] = 1
    refused(
        run_playbook, {"serving_lock": lock}, "could not be pulled by its digest sha256:0000", "playbooks/ops/lock.yml"
    )


def test_no_disk_space_for_the_image(run_playbook, lock):
    (image,) = lock["images"].values()
    image.update(digest="sha256:" + "1" * 64, compressed_bytes=HUGE_BYTES)
    refused(run_playbook, {"serving_lock": lock}, "The disk of /var/lib/docker has", "GiB free", "to pull and unpack")


def test_no_disk_space_for_the_weights(run_playbook, lock):
    model = lock["models"]["lab-moe-tiny"]
    model["revision"] = "huge"
    model["files"][0]["size_bytes"] = HUGE_BYTES
    refused(
        run_playbook,
        {"serving_lock": lock},
        "The disk of /var/lib/metalserve/models has",
        "GiB free",
        "model_weights_dir",
    )


def test_wrong_hash_in_one_weight_file(host, run_playbook, lock):
    """A source whose model.safetensors has one other byte: the file is named and nothing is published."""
    model = lock["models"]["lab-moe-tiny"]
    folder, models = "/var/tmp/corrupt-source", "/var/lib/metalserve/models/lab-moe-tiny"
    host.check_output("rm -rf %s && cp -r %s %s", folder, f"{models}/{model['revision']}", folder)
    host.check_output("printf X | dd of=%s/model.safetensors bs=1 seek=1000000 conv=notrunc status=none", folder)
    model["revision"] = "corrupt"
    refused(
        run_playbook,
        {"serving_lock": lock, "serving_weight_sources": {"lab-moe-tiny": [folder]}},
        "model.safetensors could not be had with the right content; nothing was published",
        folder,
    )
    assert not host.file(f"{models}/corrupt").exists
