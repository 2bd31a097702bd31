"""The life of releases on a host with two real engines. The tests stand in the order in which they run.

Each of them ends with the deployment `tiny` on a good release that answers, and with `second` untouched.
"""

import base64
import copy
import hashlib
import json
import re
import subprocess
import time

import pytest
import yaml

from metalserve.remote import gate_questions as questions

PORTS = {"tiny": 8000, "second": 8001}
ROOT = "/etc/metalserve"
ASK = """
import json, sys, urllib.request
body = json.dumps({"model": "lab-moe-tiny", "temperature": 0, "max_tokens": 20,
                   "messages": [{"role": "user", "content": sys.argv[2]}]}).encode()
request = urllib.request.Request("http://127.0.0.1:%s/v1/chat/completions" % sys.argv[1], data=body,
                                 headers={"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request, timeout=300))["choices"][0]["message"]["content"])
"""


@pytest.fixture(scope="module")
def deployments(inventory):
    path = inventory / "group_vars" / "serving_hosts" / "main.yml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))["serving_deployments"]


@pytest.fixture
def tiny(deployments):
    """The deployments with `tiny` to be changed, and that one."""
    wanted = copy.deepcopy(deployments)
    return wanted, wanted[0]


@pytest.fixture
def lock(variables):
    return copy.deepcopy(variables["serving_lock"])


@pytest.fixture(autouse=True)
def _second_goes_on(host, request):
    """Whatever happens to one deployment, the container of the other is not touched."""
    look = "docker inspect --format '{{.Id}} {{.State.StartedAt}}' metalserve-second"
    before = host.check_output(look)
    yield
    if "restarts_the_host" not in request.keywords:
        assert host.check_output(look) == before


def link(host, name, deployment="tiny"):
    result = host.run("readlink %s", f"{ROOT}/{deployment}/{name}")
    return result.stdout.strip().rpartition("/")[2] or None


def answers(host, deployment="tiny"):
    return host.run("python3 -c %s %s %s", ASK, str(PORTS[deployment]), questions.ARITHMETIC_PROMPT)


def assert_answers(host, deployment="tiny"):
    result = answers(host, deployment)
    assert result.rc == 0, result.stderr
    assert result.stdout.strip() == questions.ARITHMETIC_ANSWER


def wait_for(condition, seconds=900):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(1)


def reachable(host):
    try:
        return host.run("systemctl is-active ssh.service").rc == 0
    except RuntimeError:
        # What the ssh backend says of a host that is down.
        return False


def running_release(host, deployment="tiny"):
    label = '{{ index .Config.Labels "metalserve.release" }}'
    return host.run("docker inspect --format %s %s", label, f"metalserve-{deployment}").stdout.strip()


def test_two_engines_serve_side_by_side(host):
    for deployment in PORTS:
        assert host.service(f"vllm@{deployment}.service").is_enabled
        assert_answers(host, deployment)
        assert link(host, "current", deployment) == link(host, "good", deployment) is not None
        assert link(host, "previous", deployment) is None


def test_the_host_lists_its_releases(host):
    lines = host.check_output("metalserve-host releases").splitlines()
    assert len(lines) == 3
    for line in lines[1:]:
        assert re.search(r"current,good  +vllm 0\.32\.0 +lab-moe-tiny .* passed ", line), line
    assert "second: serves" in host.check_output("metalserve-host diagnose second")


@pytest.mark.parametrize(
    ("unit", "exposure"), [("vllm@tiny.service", 30), ("metalserve-watchdog.service", 20)], ids=["engine", "watchdog"]
)
def test_the_units_are_hardened(host, unit, exposure):
    """In tenths, as systemd counts; 96 is a unit without any hardening."""
    checked = host.run("systemd-analyze security --no-pager --threshold=%s %s", str(exposure), unit)
    assert checked.rc == 0, checked.stdout[-300:]
    assert host.run("systemd-analyze security --no-pager --threshold=1 %s", unit).rc != 0


def test_the_watchdog_watches(host):
    assert host.service("metalserve-watchdog.service").is_running
    assert host.service("metalserve-watchdog.service").is_enabled


def test_a_context_that_the_model_does_not_have_is_refused_before_any_change(host, run_playbook, tiny):
    wanted, changed = tiny
    changed["context_length"] = 8192
    before = running_release(host)
    result = run_playbook("site.yml", {"serving_deployments": wanted})
    assert result.rc != 0
    assert not result.changed, result.text
    assert "8192" in result.text
    assert (running_release(host), link(host, "current")) == (before, before)


def test_a_changed_release_takes_over_and_the_one_before_is_the_way_back(host, run_playbook, tiny):
    wanted, changed = tiny
    changed["max_sequences"] = 12
    before = link(host, "current")
    result = run_playbook("playbooks/rollout.yml", {"serving_deployments": wanted})
    assert result.rc == 0, result.text
    after = link(host, "current")
    assert after != before
    assert (link(host, "good"), link(host, "previous"), running_release(host)) == (after, before, after)
    assert_answers(host)
    difference = host.check_output("metalserve-host diff tiny/previous tiny/current")
    assert "config.max-num-seqs: 16 -> 12" in difference.splitlines()


def test_back_by_hand_and_the_next_run_keeps_away(host, run_playbook, tiny):
    left, target = link(host, "current"), link(host, "previous")
    result = run_playbook("playbooks/ops/rollback.yml", {"serving_deployment": "tiny", "serving_reason": "a trial"})
    assert result.rc == 0, result.text
    assert f"tiny is back on the release {target}" in result.text
    assert (link(host, "current"), link(host, "good"), link(host, "previous")) == (target, target, left)
    assert_answers(host)
    wanted, changed = tiny
    changed["max_sequences"] = 12
    again = run_playbook("playbooks/rollout.yml", {"serving_deployments": wanted})
    assert again.rc != 0
    assert not again.changed, again.text
    assert f"the release {left} was taken back by hand" in again.text
    assert f"The release {target} is current, has passed the gate and answers" in again.text


def with_another_tokenizer(host, variables, deployments, name, change):
    """Variables that serve the small model with a changed tokenizer, under the manifest that fits it."""
    folder = f"/var/tmp/{name}-tokenizer"
    host.check_output("rm -rf %s && cp -r %s %s", folder, lab_model_folder(variables), folder)
    text = change(host.file(f"{folder}/tokenizer.json").content_string)
    encoded = base64.b64encode(text.encode()).decode()
    host.check_output("echo %s | base64 --decode > %s", encoded, f"{folder}/tokenizer.json")
    files = copy.deepcopy(variables["serving_lock"]["models"]["lab-moe-tiny"]["files"])
    (entry,) = (each for each in files if each["path"] == "tokenizer.json")
    entry.update({"size_bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()})
    return with_another_model(variables, deployments, f"lab-{name}", folder, revision=name, files=files)


def with_another_model(variables, deployments, name, source, *, parser=None, revision=None, files=None):
    """Variables in which `tiny` serves a model of another name and the lab model's shape, from a folder of the host."""
    model = copy.deepcopy(variables["serving_models"]["lab-moe-tiny"])
    if parser:
        model["parsers"]["vllm"]["tool_call"] = parser
    locked = copy.deepcopy(variables["serving_lock"]["models"]["lab-moe-tiny"])
    locked.update({"revision": revision or locked["revision"], "files": files or locked["files"]})
    lock = copy.deepcopy(variables["serving_lock"])
    lock["models"][name] = locked
    wanted = copy.deepcopy(deployments)
    wanted[0].update({"model": name, "served_names": ["lab-moe-tiny"]})
    return {
        "serving_models": {**variables["serving_models"], name: model},
        "serving_lock": lock,
        "serving_weight_sources": {**variables["serving_weight_sources"], name: [source]},
        "serving_deployments": wanted,
    }


def lab_model_folder(variables):
    return f"/var/lib/metalserve/models/lab-moe-tiny/{variables['serving_lock']['models']['lab-moe-tiny']['revision']}"


def test_a_wrong_parser_is_refused_by_the_gate_and_rolled_back(host, run_playbook, variables, deployments):
    before = link(host, "current")
    extra = with_another_model(variables, deployments, "lab-hermes", lab_model_folder(variables), parser="hermes")
    result = run_playbook("site.yml", extra)
    assert result.rc != 0
    assert "was refused: refused: lab-moe-tiny at http://127.0.0.1:8000" in result.text, result.text
    assert "tool_auto: found no tool call" in result.text
    assert f"The release {before} is current again, has passed the gate and answers" in result.text
    assert (link(host, "current"), link(host, "good"), running_release(host)) == (before, before, before)
    assert_answers(host)
    # The run after it: the same answer, and nothing is touched.
    again = run_playbook("playbooks/rollout.yml", extra)
    assert again.rc != 0
    assert not again.changed, again.text
    assert "was refused by the gate on this host at" in again.text
    assert f"The release {before} is current, has passed the gate and answers" in again.text


def test_a_tokenizer_that_is_cut_off_is_refused_before_an_engine_is_touched(host, run_playbook, variables, deployments):
    """Its hash is the manifest's, so it came from the source like that; no engine could read it."""
    before = (link(host, "current"), host.check_output("docker inspect --format '{{.Id}}' metalserve-tiny"))
    extra = with_another_tokenizer(host, variables, deployments, "cut", lambda text: text[:3000])
    result = run_playbook("site.yml", extra)
    assert result.rc != 0
    assert "tokenizer.json is no JSON: Unterminated string" in result.text, result.text
    assert not host.file("/var/lib/metalserve/models/lab-cut/cut").exists
    assert (link(host, "current"), host.check_output("docker inspect --format '{{.Id}}' metalserve-tiny")) == before


def test_a_corrupt_tokenizer_does_not_start_and_is_rolled_back_with_its_cause(
    host, run_playbook, variables, deployments
):
    """It is JSON, and its hash is the manifest's, so only the start can tell."""
    before = link(host, "current")

    def without_model(text):
        return json.dumps({**json.loads(text), "model": {"type": "None"}})

    extra = with_another_tokenizer(host, variables, deployments, "corrupt", without_model)
    result = run_playbook("site.yml", extra)
    assert result.rc != 0
    assert "vllm@tiny.service died" in result.text, result.text
    assert "(bad_weights). Remedy: " in result.text
    assert "data did not match any variant of untagged enum" in result.text
    assert f"The release {before} is current again, has passed the gate and answers" in result.text
    assert (link(host, "current"), running_release(host)) == (before, before)
    assert_answers(host)
    assert "refused (start) at" in host.check_output("metalserve-host releases tiny")


def test_a_full_disk_stops_the_run_before_the_engine(host, run_playbook, deployments):
    """The disk of the releases is full: no release is half there, and nobody is restarted."""
    before = (link(host, "current"), host.check_output("docker inspect --format '{{.Id}}' metalserve-tiny"))
    releases = f"{ROOT}/tiny/releases"
    host.check_output("cp -r %s /var/tmp/kept && mount -t tmpfs -o size=1m full %s", releases, releases)
    try:
        host.check_output("cp -r /var/tmp/kept/. %s", releases)
        host.run("dd if=/dev/zero of=%s bs=1k", f"{releases}/.filler")
        wanted = copy.deepcopy(deployments)
        wanted[0]["max_sequences"] = 9
        result = run_playbook("playbooks/rollout.yml", {"serving_deployments": wanted})
        assert result.rc != 0
        assert "No space left on device" in result.text, result.text
        assert len(host.check_output("ls %s", releases).split()) == len(host.check_output("ls /var/tmp/kept").split())
    finally:
        host.check_output("umount %s && rm -r /var/tmp/kept", releases)
    assert (link(host, "current"), host.check_output("docker inspect --format '{{.Id}}' metalserve-tiny")) == before
    assert_answers(host)


def test_a_second_run_at_the_same_time_is_told_who_is_at_it(host, run_playbook):
    holder = "from fcntl import *; import time; f = open('/etc/metalserve/.lock', 'r+'); flock(f, LOCK_EX)"
    write = "; f.truncate(0); f.write('ann on controller, process 7'); f.flush(); time.sleep(600)"
    unit = "metalserve-test-holder.service"
    host.check_output("systemd-run --unit=%s python3 -c %s", unit, holder + write)
    try:
        wait_for(lambda: "ann" in host.file("/etc/metalserve/.lock").content_string, 20)
        refused = host.run("metalserve-host restart tiny")
        assert refused.rc == 2
        assert "Another run is at work on the deployments of this host: ann on controller, process 7" in refused.stderr
    finally:
        host.run("systemctl stop %s", unit)
    assert run_playbook("playbooks/ops/releases.yml").rc == 0


def test_a_daemon_reload_under_traffic_disturbs_nobody(host):
    """A reload can take devices away from running containers; requests must not even notice."""
    started = host.check_output("docker inspect --format '{{.Id}} {{.State.StartedAt}}' metalserve-tiny")
    ask = f"import sys\nsys.argv = ['', '8000', {questions.ARITHMETIC_PROMPT!r}]\nfor _ in range(10):\n"
    ask += "".join(f"    {line}\n" for line in ASK.strip().splitlines())
    unit = "metalserve-test-traffic.service"
    host.check_output("systemd-run --unit=%s --remain-after-exit python3 -c %s", unit, ask)
    try:
        for _ in range(5):
            host.check_output("systemctl daemon-reload")
            time.sleep(0.5)
        look = "systemctl show %s --property=SubState --value"
        wait_for(lambda: host.check_output(look, unit) in ("exited", "failed"), 600)
        assert host.check_output(look, unit) == "exited"
        lines = host.check_output("journalctl --unit %s --output cat --no-pager", unit).splitlines()
        assert lines.count(questions.ARITHMETIC_ANSWER) == 10
    finally:
        host.run("systemctl stop %s", unit)
    assert host.check_output("docker inspect --format '{{.Id}} {{.State.StartedAt}}' metalserve-tiny") == started


def test_a_killed_engine_comes_back_by_itself(host):
    release = running_release(host)
    pid = host.check_output("docker inspect --format '{{.State.Pid}}' metalserve-tiny")
    host.check_output("kill -9 %s", pid)
    wait_for(lambda: answers(host).rc != 0, 30)
    wait_for(lambda: answers(host).rc == 0)
    assert_answers(host)
    assert running_release(host) == release
    assert int(host.check_output("systemctl show vllm@tiny.service --property=NRestarts --value")) >= 1


def status(host, path, key=""):
    """Status of a route of `tiny`, asked inside the host."""
    code = (
        "import http.client, sys\n"
        "connection = http.client.HTTPConnection('127.0.0.1', 8000, timeout=60)\n"
        "key = {'Authorization': 'Bearer ' + sys.argv[2]} if sys.argv[2] else {}\n"
        "connection.request('GET', sys.argv[1], headers=key)\n"
        "print(connection.getresponse().status)\n"
    )
    return int(host.check_output("python3 -c %s %s %s", code, path, key))


def test_a_key_is_asked_for_and_stands_in_no_file_of_the_release(host, run_playbook, tiny):
    wanted, changed = tiny
    changed["api_key_file"] = "/etc/metalserve-test-key"
    host.check_output("umask 077 && echo sk-lab-secret > %s", changed["api_key_file"])
    result = run_playbook("playbooks/rollout.yml", {"serving_deployments": wanted})
    assert result.rc == 0, result.text
    assert "sk-lab-secret" not in result.text
    assert status(host, "/v1/models") == 401
    assert status(host, "/v1/models", "sk-lab-secret") == 200
    assert host.run("grep --recursive sk-lab-secret %s /etc/systemd", ROOT).rc == 1
    assert "sk-lab-secret" not in host.check_output("ps -ewwo args")
    back = run_playbook("playbooks/ops/rollback.yml", {"serving_deployment": "tiny", "serving_reason": "without a key"})
    assert back.rc == 0, back.text
    assert_answers(host)


def core_of(host, deployment):
    """Process ids of the core of an engine, the process that computes."""
    rows = host.check_output("docker top %s -o pid,args", f"metalserve-{deployment}").splitlines()
    return [row.split()[0] for row in rows if "EngineCore" in row]


def test_an_engine_that_hangs_while_it_is_idle_is_started_again(host):
    """Its health route goes on to answer 200. The core is stopped by a signal, as if it waited for a device."""
    folder = "/run/systemd/system/metalserve-watchdog.service.d"
    command = "/usr/local/bin/metalserve-host --root=/etc/metalserve watch --stall=30 --pause=2"
    host.check_output(
        "mkdir -p %s && printf '[Service]\\nExecStart=\\nExecStart=%%s\\n' %s > %s",
        folder,
        command,
        folder + "/quick.conf",
    )
    host.check_output("systemctl daemon-reload && systemctl restart metalserve-watchdog.service")
    look = "docker inspect --format '{{.Id}}' metalserve-tiny"
    before = host.check_output(look)
    try:
        cores = core_of(host, "tiny")
        assert cores
        host.check_output(f"kill -STOP {' '.join(cores)}")
        assert status(host, "/health") == 200
        said = "journalctl --unit metalserve-watchdog.service --output cat --no-pager"
        wait_for(lambda: "tiny: 1 request(s) wait and no token was made" in host.check_output(said), 300)
        wait_for(lambda: host.run(look).stdout.strip() not in ("", before))
        wait_for(lambda: answers(host).rc == 0)
    finally:
        host.check_output(
            "rm -r %s && systemctl daemon-reload && systemctl restart metalserve-watchdog.service", folder
        )
    assert_answers(host)
    assert "second:" not in host.check_output(said)


@pytest.mark.restarts_the_host
def test_after_a_restart_of_the_host_both_serve_what_they_served(host, run_playbook, inventory):
    before = {deployment: running_release(host, deployment) for deployment in PORTS}
    name = host.backend.get_pytest_id().rpartition("://")[2]
    subprocess.run(["docker", "restart", name], check=True, capture_output=True, timeout=300)
    wait_for(lambda: reachable(host), 300)
    for deployment in PORTS:
        wait_for(lambda deployment=deployment: answers(host, deployment).rc == 0)
        assert_answers(host, deployment)
        assert running_release(host, deployment) == before[deployment]


@pytest.mark.restarts_the_host
def test_what_left_the_inventory_is_named_and_can_be_retired(host, run_playbook, deployments):
    told = run_playbook("playbooks/preflight.yml", {"serving_deployments": deployments[:1]})
    assert told.rc == 0, told.text
    assert "second is not in the inventory, and vllm@second.service runs or starts at boot" in told.text
    assert "playbooks/ops/retire.yml -e serving_deployment=second" in told.text
    assert_answers(host, "second")
    assert run_playbook("playbooks/ops/retire.yml", {"serving_deployment": "second"}).rc == 0
    assert not host.service("vllm@second.service").is_enabled
    assert not host.service("vllm@second.service").is_running
    again = run_playbook("playbooks/ops/retire.yml", {"serving_deployment": "second", "serving_purge": True})
    assert again.rc == 0
    assert not host.file(f"{ROOT}/second").exists
    assert not run_playbook("playbooks/ops/retire.yml", {"serving_deployment": "second"}).changed
