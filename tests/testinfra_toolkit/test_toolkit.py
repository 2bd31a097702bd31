"""The toolkit on a host with simulated GPUs: what is there, what heals, and every refusal with its sentence."""

import json
import re

from conftest import PROJECT, SCENARIO

SIMULATE = (SCENARIO / "simulate_gpus").read_text(encoding="utf-8")
PACKAGES = [
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
]
SPEC = "/var/run/cdi/nvidia.yaml"
# Enough of a host for what is refused before anything is looked at.
GPU_HOST = {
    "gpus": [{"index": 0}],
    "os": {"id": "debian", "version_id": "13", "like": ["debian"]},
    "docker": {"version": "26.1.5"},
}
REPOSITORY = "http://127.0.0.1:8081"


def refused(run, extra, *sentences):
    result = run(extra)
    assert result.rc != 0, result.text
    assert not result.changed, result.text
    for sentence in sentences:
        assert sentence in result.text, result.text


def healed(run, extra, *sentences):
    result = run(extra)
    assert result.rc == 0, result.text
    assert result.changed, result.text
    for sentence in sentences:
        assert sentence in result.text, result.text


def versions(host):
    return {host.package(name).version for name in PACKAGES}


# ---- what is there ----


def test_four_packages_of_one_version_are_held(host):
    assert versions(host) == {"1.20.0-1"}
    assert sorted(host.check_output("apt-mark showhold").split()) == sorted(PACKAGES)


def test_unattended_upgrades_leave_them_alone(host):
    dump = host.check_output("apt-config dump Unattended-Upgrade::Package-Blacklist")
    assert '"^nvidia-container-toolkit"' in dump
    assert '"^libnvidia-container"' in dump


def test_one_source_with_its_own_key_and_nothing_of_the_old_way(host):
    assert not host.file("/etc/apt/sources.list.d/nvidia-container-toolkit.list").exists
    source = host.file("/etc/apt/sources.list.d/metalserve-container-toolkit.sources").content_string
    assert "Signed-By: /etc/apt/keyrings/metalserve-container-toolkit.asc" in source
    assert "experimental" not in source.splitlines()[2]
    assert host.run("apt-get update").rc == 0


def test_the_specification_is_of_the_loaded_driver(host):
    text = host.file(SPEC).content_string
    assert "libcuda.so.580.178.04" in text
    assert not host.file("/etc/cdi/nvidia.yaml").exists


def test_it_is_written_at_boot_and_when_modules_change(host):
    assert host.service("metalserve-cdi.service").is_enabled
    assert (
        "docker.service" in host.check_output("systemctl show metalserve-cdi.service --property=Before --value").split()
    )
    assert host.service("nvidia-cdi-refresh.path").is_running
    assert host.service("nvidia-cdi-refresh.path").is_enabled
    assert host.service("nvidia-cdi-refresh.service").is_enabled


def cycles(host, after):
    """What systemd says of the boot with an engine's unit that is ordered so."""
    lines = ["[Unit]", f"After={after}", "[Service]", "ExecStart=/bin/true", "[Install]", "WantedBy=multi-user.target"]
    unit = "\n".join(lines)
    host.check_output("printf %s > /etc/systemd/system/engine-order.service", unit)
    host.check_output("systemctl enable engine-order.service")
    said = host.run("systemd-analyze --man=no verify multi-user.target").stderr
    host.check_output("systemctl disable engine-order.service && rm /etc/systemd/system/engine-order.service")
    host.check_output("systemctl daemon-reload")
    return [line for line in said.splitlines() if "cycle" in line or "Found dependency on" in line]


def test_engines_start_at_boot_beside_nvidias_unit(host):
    """An engine that waits for nvidia-cdi-refresh.service is not started at all; the units of this project do not."""
    # With which unit systemd begins its account of the cycle differs from call to call.
    assert "engine-order.service" in " ".join(cycles(host, "nvidia-cdi-refresh.service"))
    template = (PROJECT / "roles/serving_unit/templates/engine@.service.j2").read_text(encoding="utf-8")
    (after,) = re.findall("^After=(.*)$", template, re.MULTILINE)
    assert cycles(host, after) == []


def test_docker_has_no_default_runtime_and_no_other_one(host):
    daemon = json.loads(host.file("/etc/docker/daemon.json").content_string)
    assert daemon["features"] == {"cdi": True}
    assert "default-runtime" not in daemon
    assert "runtimes" not in daemon


def test_a_container_gets_the_gpus_that_are_named_and_no_other(host):
    image = host.check_output("docker images --digests --format '{{.Repository}}@{{.Digest}}' | head -n 1")
    ls = "docker run --rm --network=none --device=nvidia.com/gpu=%s --entrypoint=sh %s -c 'ls -d /dev/nvidia?'"
    assert host.check_output(ls, "1", image) == "/dev/nvidia1"
    assert host.check_output(ls, "all", image).split() == ["/dev/nvidia0", "/dev/nvidia1"]
    assert host.run(ls, "7", image).rc != 0


def test_the_probe_has_passed_and_is_not_repeated(host):
    proofs = json.loads(host.file("/var/lib/metalserve/cuda_proofs.json").content_string)
    assert [image for image in proofs if "/metalserve/python@sha256:" in image]
    assert "metalserve-gpu-probe" not in host.check_output("docker ps --all --format '{{.Names}}'")


# ---- what is refused ----


def test_a_version_below_the_security_floor(host, run):
    refused(
        run,
        {"container_toolkit_version": "1.17.4", "lab_facts": GPU_HOST},
        "container_toolkit_version is 1.17.4",
        "CVE-2025-23266",
    )
    assert versions(host) == {"1.20.0-1"}


def test_a_version_that_is_not_offered(host, run):
    refused(run, {"container_toolkit_version": "1.21.0"}, "is offered as 1.20.0-1, 1.17.8-1", "Needed: 1.21.0-1")
    assert sorted(host.check_output("apt-mark showhold").split()) == sorted(PACKAGES)


def test_a_key_that_nobody_vouches_for(host, run):
    host.check_output("mv /etc/apt/keyrings/metalserve-container-toolkit.asc /root/right.asc")
    other = f"{REPOSITORY}/compute/cuda/repos/debian13-other-key/x86_64/8793F200.pub"
    try:
        refused(
            run, {"container_toolkit_repository_key_url": other}, f"signing key from {other}", "Nothing was written"
        )
        assert not host.file("/etc/apt/keyrings/metalserve-container-toolkit.asc").exists
    finally:
        host.check_output("mv /root/right.asc /etc/apt/keyrings/metalserve-container-toolkit.asc")


def test_a_key_file_that_is_not_there(run):
    wanted = {"container_toolkit_repository_key_file": "/nowhere/key.asc", "lab_facts": GPU_HOST}
    refused(run, wanted, "There is no file /nowhere/key.asc")


def test_a_second_source_of_the_same_packages(host, run):
    path = "/etc/apt/sources.list.d/site.list"
    host.check_output("echo '# deb https://nvidia.github.io/libnvidia-container/stable/deb/amd64 /' > %s", path)
    try:
        refused(run, None, path, "one source of its packages")
    finally:
        host.check_output("rm %s", path)


def test_a_docker_that_cannot_read_the_specification(run):
    refused(
        run,
        {"lab_facts": {**GPU_HOST, "docker": {"version": "26.0.2"}}},
        "Docker 26.0.2 is installed",
        "Needed: 26.1 or newer",
    )


def test_a_docker_that_runs_without_cdi(host, run):
    host.check_output("cp /etc/docker/daemon.json /root/daemon.json")
    host.check_output('sed -i \'s/"cdi": true/"cdi": false/\' /etc/docker/daemon.json')
    host.check_output("systemctl restart docker")
    try:
        refused(run, None, "runs without CDI", "docker_engine")
    finally:
        host.check_output("cp /root/daemon.json /etc/docker/daemon.json")
        host.check_output("systemctl restart docker")


def test_a_system_whose_packages_are_not_known(run):
    system = {"id": "arch", "version_id": None, "like": ["arch"]}
    refused(run, {"lab_facts": {**GPU_HOST, "os": system}}, "This host runs arch", "Needed: Debian 12 or 13")


def test_a_host_without_gpus_is_left_alone(run):
    result = run({"lab_facts": {"gpus": [], "os": {"like": ["arch"]}}})
    assert result.rc == 0, result.text
    assert not result.changed


def test_a_second_specification_waits_for_a_decision(host, run):
    host.check_output("mkdir -p /etc/cdi && cp %s /etc/cdi/nvidia.yaml", SPEC)
    refused(
        run, None, "/etc/cdi/nvidia.yaml of this host is a CDI specification", "container_toolkit_remove_other_specs"
    )
    healed(run, {"container_toolkit_remove_other_specs": True})
    assert not host.file("/etc/cdi/nvidia.yaml").exists


# ---- what heals ----


def test_one_package_that_was_moved_is_named_brought_back_and_held_again(host, run):
    package = "/srv/nvidia/libnvidia-container/stable/deb/amd64/nvidia-container-toolkit-base_1.17.8-1_amd64.deb"
    host.check_output("dpkg --force-depends --force-downgrade --force-hold --install %s", package)
    host.check_output("apt-mark unhold nvidia-container-toolkit-base libnvidia-container1")
    healed(run, None, "nvidia-container-toolkit-base is 1.17.8-1, wanted is 1.20.0-1")
    test_four_packages_of_one_version_are_held(host)


def test_a_driver_that_changed_gets_a_new_specification(host, run):
    """As after a reload of the driver that nobody followed with a refresh."""
    host.check_output("sh -c %s simulate_gpus 570.195.03", SIMULATE)
    result = run()
    assert result.rc == 0, result.text
    assert f"{SPEC} is of driver 580.178.04, loaded is 570.195.03" in result.text
    assert "libcuda.so.570.195.03" in host.file(SPEC).content_string


def test_a_refresh_that_cannot_work_is_told_with_the_units_last_words(host, run):
    host.check_output("rm -f /usr/lib/x86_64-linux-gnu/libcuda.so.570.195.03 %s", SPEC)
    result = run()
    assert result.rc != 0
    assert f"After a refresh, there is no CDI specification {SPEC}" in result.text
    assert "could not locate libcuda.so.570.195.03" in result.text
    # The driver of the scenario again, for whoever comes after.
    host.check_output("sh -c %s simulate_gpus 580.178.04", SIMULATE)
    healed(run, None, f"there is no CDI specification {SPEC}")


def test_an_unhealthy_host_is_refused_with_all_its_failed_checks(host, run):
    tree = "/var/lib/metalserve-lab/devices/sys"
    host.check_output("echo 17 > %s/module/lab_gpus/parameters/nvlinks", tree)
    host.check_output("echo 1 > %s/module/lab_gpus/parameters/recovery_action", tree)
    try:
        result = run(playbook="health.yml")
        assert result.rc != 0, result.text
        assert "Failed checks of this host: 2." in result.text
        assert "has 17 of 18 links" in result.text
        assert "asks for reset" in result.text
    finally:
        host.check_output("echo 18 > %s/module/lab_gpus/parameters/nvlinks", tree)
        host.check_output("echo 0 > %s/module/lab_gpus/parameters/recovery_action", tree)


def test_expectations_that_cannot_be_read(run):
    result = run({"gpu_health_expected": {"gpus": 2}}, playbook="health.yml")
    assert result.rc != 0
    assert "gpu_health_expected has the unknown field 'gpus'" in result.text


def test_an_image_that_is_not_there_is_a_failed_probe(run):
    image = {"reference": "registry.invalid/none:1", "digest": "sha256:" + "0" * 64}
    result = run({"gpu_health_probe_images": [image]}, playbook="health.yml")
    assert result.rc != 0
    assert "cuda_probe: in a new container of registry.invalid/none@sha256:0000" in result.text
    assert "No such image" in result.text
