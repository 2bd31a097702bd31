"""The endpoint on a host with no way out, and what on the host came from where."""

import json

NAME = "127.0.0.1:8749/metalserve/vllm-cpu"


def test_the_host_has_no_way_out(host):
    assert host.check_output("ip -4 route show default") == ""
    assert host.check_output("ip -6 route show default") == ""
    refused = host.run("ip route get 1.1.1.1")
    assert refused.rc != 0
    assert "Network is unreachable" in refused.stderr


def test_it_reaches_neither_the_registry_nor_the_mirror_that_its_inventory_names(host):
    code = "import socket; socket.create_connection(('%s', %s), 5)"
    for address, port in (("10.213.40.2", "5000"), ("10.213.40.3", "8080")):
        refused = host.run("python3 -c %s", code % (address, port))
        assert refused.rc != 0
        assert "unreachable" in refused.stderr


def test_the_endpoint_is_proven(host, release, run_playbook):
    kept = json.loads(host.file("/etc/metalserve/tiny/current/gate.json").content_string)
    assert kept["passed"] is True
    assert kept["release"] == release["id"]
    again = run_playbook("playbooks/verify.yml")
    assert again.rc == 0, again.text[-2000:]


def test_the_image_came_from_the_bundle_by_its_digest(host, lock):
    (locked,) = lock["images"].values()
    names = host.check_output("docker image ls --digests --format '{{.Repository}}@{{.Digest}}'").split()
    assert f"{NAME}@{locked['digest']}" in names
    assert {name.partition("@")[0] for name in names} == {NAME, "metalserve/derived"}


def test_the_engine_runs_in_the_image_with_the_package(host, release):
    repository, _, digest = release["image"].partition("@sha256:")
    assert repository == "metalserve/derived"
    container = json.loads(host.check_output("docker inspect metalserve-tiny"))[0]
    assert container["Config"]["Image"] == f"metalserve/derived:{digest}"
    code = "import iniconfig, importlib.metadata as m; print(m.version('iniconfig'))"
    assert host.check_output("docker exec metalserve-tiny python3 -c %s", code) == "2.3.1"


def test_the_image_with_the_package_starts_as_the_one_below_it(host, lock):
    (locked,) = lock["images"].values()
    names = host.check_output("docker image ls --format '{{.Repository}}:{{.Tag}}' metalserve/derived").split()
    below, derived = (
        json.loads(host.check_output("docker image inspect --format '{{json .Config}}' %s", name))
        for name in (f"{NAME}@{locked['digest']}", names[0])
    )
    for field in ("Entrypoint", "Env", "WorkingDir"):
        assert derived[field] == below[field]
    assert (derived["Cmd"] or []) == (below["Cmd"] or [])


def test_docker_came_from_the_bundle_and_the_hosts_own_sources_are_as_they_were(host):
    policy = host.check_output("APT_CONFIG=/run/metalserve/bundle/apt.conf apt-cache policy docker.io")
    assert ":8748/packages/debian-13" in policy
    assert host.run("grep -rl 8748 /etc/apt").stdout == ""
    assert ":8748" not in host.check_output("apt-cache policy docker.io")


def test_the_weights_came_from_the_bundle(host):
    state = json.loads(host.check_output("cat /var/lib/metalserve/models/.incoming/*.state.json"))
    assert list(state["by_source"]) == ["http://10.213.44.1:8748/weights/" + "/".join(state["path"].split("/")[-2:])]


def test_nothing_listens_when_the_run_is_over(host):
    code = "import socket; socket.create_connection(('10.213.44.1', 8748), 5)"
    refused = host.run("python3 -c %s", code)
    assert "Connection refused" in refused.stderr
