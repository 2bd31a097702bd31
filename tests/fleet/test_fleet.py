"""Rollouts over three hosts behind a gateway while clients ask without pause, in the order in which they run.

Around each test it is checked that no request has failed, and that all engines serve at its end.
"""

import copy
import json
import subprocess
import tarfile
import urllib.error
import urllib.request

import yaml
from conftest import HOSTS, Watcher, current, on
from gateway_client import states, wait_for

DRAIN = "roll | Wait until their requests have ended"
ACTIVATE = "service | Bring the releases up"


def addresses(inventory):
    hosts = yaml.safe_load((inventory / "hosts.yml").read_text(encoding="utf-8"))["serving_hosts"]["hosts"]
    return {name: entry["ansible_host"] for name, entry in hosts.items()}


def status(url):
    """The status of an answer, or why there was none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        return opener.open(url, timeout=10).status
    except urllib.error.URLError as error:
        return type(error.reason).__name__


def test_engines_are_reached_from_the_gateway_and_from_nowhere_else(host, inventory):
    for name, address in addresses(inventory).items():
        assert status(f"http://{address}:8000/health") == "ConnectionRefusedError"
        probe = f"exec 3<>/dev/tcp/{address}/8000 && echo open"
        assert host.check_output("bash -c %s", probe) == "open"
        assert on(name, "bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8000 && echo open") == "open"
        # What is somebody else's stays; it is looked for again at the end.
        on(name, "nft", "add", "table", "inet", "somebody")


def test_a_good_release_rolls_through_and_nobody_else_may_roll_meanwhile(host, start, deployments, report):
    before = {name: current(name) for name in HOSTS}
    wanted = deployments(max_sequences=12)
    with Watcher(host) as watcher:
        run = start(wanted)
        run.reach(ACTIVATE, HOSTS[0])
        # A reload in the middle of it, under load, with a host drained.
        host.check_output("systemctl reload haproxy.service")
        wait_for(lambda: states(host).get(f"{HOSTS[0]}:tiny") in ("DRAIN", "DOWN"), 60)
        other = start(deployments(max_sequences=14))
        assert other.end() != 0
        assert "Another rollout is at work: " in other.text
        assert f"process {run.process.pid}, since" in other.text
        assert "changes 3 of 3 hosts" in other.text
        assert "rollout_take_lock=true" in other.text
        assert run.end() == 0, run.text
    assert watcher.drained == HOSTS
    assert watcher.least >= 2
    after = {name: current(name) for name in HOSTS}
    assert len(set(after.values())) == 1
    assert set(after.values()).isdisjoint(before.values())
    rows = report()
    assert {name: (row["state"], row["from"], row["to"]) for name, row in rows.items()} == {
        name: ("changed", before[name], after[name]) for name in HOSTS
    }
    assert {row["gateway"] for row in rows.values()} == {"passed"}
    assert all(row["seconds"] > 0 and row["gate"] and row["measured"] and row["watched"] for row in rows.values())


def test_a_context_that_is_too_long_is_refused_before_any_host_is_drained(host, start, deployments):
    before = {name: current(name) for name in HOSTS}
    with Watcher(host) as watcher:
        run = start(deployments(max_sequences=12, context_length=8192))
        assert run.end() != 0
    assert "8192" in run.text
    assert watcher.drained == []
    assert {name: current(name) for name in HOSTS} == before


def test_more_than_may_be_away_is_refused_before_any_host_is_drained(host, start, deployments):
    with Watcher(host) as watcher:
        run = start({**deployments(max_sequences=10), "rollout_min_serving": 3})
        assert run.end() != 0
    assert "Needed: 3 that serve at any time" in run.text
    assert watcher.drained == []


def test_a_wrong_parser_stops_at_the_first_host_which_is_back(host, start, variables, deployments, report):
    before = {name: current(name) for name in HOSTS}
    models = copy.deepcopy(variables["serving_models"])
    models["lab-moe-tiny"]["parsers"]["vllm"]["tool_call"] = "hermes"
    with Watcher(host) as watcher:
        run = start({**deployments(max_sequences=12), "serving_models": models})
        assert run.end() != 0
    assert "tool_auto: found no tool call" in run.text
    assert f"The release {before[HOSTS[0]]} is current again, has passed the gate and answers" in run.text
    assert watcher.drained == HOSTS[:1]
    assert watcher.least >= 2
    assert {name: current(name) for name in HOSTS} == before
    assert {name: row["state"] for name, row in report().items()} == {
        HOSTS[0]: "back",
        HOSTS[1]: "not begun",
        HOSTS[2]: "not begun",
    }


def test_killed_runs_and_a_lost_host_are_healed_by_the_next_run(host, start, deployments, report):
    wanted = deployments(max_sequences=10)
    with Watcher(host) as watcher:
        # In the middle of the drain, and of the activation: the hosts and the gateway know where it stood.
        for task in (DRAIN, ACTIVATE):
            run = start(wanted)
            run.reach(task, HOSTS[0])
            run.kill()
        # A host is lost while its engine is started; the lock of the killed run is nobody's.
        run = start(wanted)
        run.reach(ACTIVATE, HOSTS[1])
        assert "The lock was taken over from" in run.text
        subprocess.run(["docker", "kill", HOSTS[1]], check=True, capture_output=True)
        assert run.end() != 0
        rows = report()
        # The step that the killed run left at work has brought the first host up, or this run has.
        assert rows[HOSTS[0]]["state"] in ("changed", "unchanged")
        assert [rows[name]["state"] for name in HOSTS[1:]] == ["lost", "not begun"]
        assert f"{HOSTS[1]}:tiny stays out of the gateways" in run.text
        subprocess.run(["docker", "start", HOSTS[1]], check=True, capture_output=True)
        wait_for(lambda: on(HOSTS[1], "systemctl", "is-active", "ssh.service") == "active", 120)
        # It comes back with an engine that nobody has proven, so it gets no request.
        run = start(wanted)
        assert run.end() == 0, run.text
    assert len({current(name) for name in HOSTS}) == 1
    # While the lost host was away one of the others must not have been touched.
    assert watcher.least >= 2
    assert watcher.drained == HOSTS


def test_a_host_that_a_person_drained_stays_theirs(host, start, deployments):
    wanted = deployments(max_sequences=10)
    drain = {"gateway_drain_host": HOSTS[2]}
    assert start(drain, playbook="playbooks/ops/drain.yml").end() == 0
    run = start(wanted)
    assert run.end() == 0, run.text
    assert f"{HOSTS[2]}:tiny was drained by a person and stays out." in run.text
    assert "changed=0" in run.text
    assert states(host)[f"{HOSTS[2]}:tiny"] == "DRAIN"
    assert start(drain, playbook="playbooks/ops/undrain.yml").end() == 0


def test_a_restart_and_a_rollback_lose_no_request(host, start, report):
    before = {name: current(name) for name in HOSTS}
    started = {
        name: on(name, "docker", "inspect", "--format", "{{ .State.StartedAt }}", "metalserve-tiny") for name in HOSTS
    }
    one = {"serving_deployment": "tiny"}
    with Watcher(host) as watcher:
        run = start(one, f"--limit={HOSTS[0]}", playbook="playbooks/ops/restart.yml")
        assert run.end() == 0, run.text
        assert "Restart done: 1 started" in run.text
        run = start({**one, "serving_reason": "test"}, f"--limit={HOSTS[1]}", playbook="playbooks/ops/rollback.yml")
        assert run.end() == 0, run.text
    assert watcher.drained == HOSTS[:2]
    assert watcher.least >= 2
    after = {name: current(name) for name in HOSTS}
    assert [name for name in HOSTS if after[name] != before[name]] == [HOSTS[1]]
    again = on(HOSTS[0], "docker", "inspect", "--format", "{{ .State.StartedAt }}", "metalserve-tiny")
    assert again != started[HOSTS[0]]
    assert report()[HOSTS[1]]["to"] == after[HOSTS[1]]
    # A second time it goes no further back, and starts nothing.
    run = start(one, f"--limit={HOSTS[1]}", playbook="playbooks/ops/rollback.yml")
    assert run.end() == 0, run.text
    assert f"is back on the release {after[HOSTS[1]]} already" in run.text
    assert current(HOSTS[1]) == after[HOSTS[1]]


def test_a_restart_that_was_killed_in_the_drain_is_run_again(host, start):
    one = {"serving_deployment": "tiny"}
    run = start(one, f"--limit={HOSTS[2]}", playbook="playbooks/ops/restart.yml")
    run.reach(DRAIN, HOSTS[2])
    run.kill()
    run = start(one, f"--limit={HOSTS[2]}", playbook="playbooks/ops/restart.yml")
    assert run.end() == 0, run.text


def test_drift_names_the_file_that_somebody_changed(start, tmp_path):
    unit = "/etc/systemd/system/metalserve-watchdog.service"
    on(HOSTS[2], "sh", "-c", f"echo '# by hand' >> {unit}")
    found = {"drift_report_json": str(tmp_path / "drift.json")}
    run = start({**found, "drift_fail": True}, playbook="playbooks/ops/drift.yml")
    assert run.end() != 0
    assert "hosts are not as the inventory wants them, or could not be looked at" in run.text
    hosts = json.loads((tmp_path / "drift.json").read_text(encoding="utf-8"))["hosts"]
    assert hosts[HOSTS[2]]["aspects"]["units"] == [f"{unit} is not as it would be written"]
    assert hosts[HOSTS[0]]["aspects"]["units"] == []
    assert {name: each["trouble"] for name, each in hosts.items()} == dict.fromkeys(hosts)
    (gateway,) = (name for name in hosts if name not in HOSTS)
    assert hosts[gateway]["aspects"]["gateway"] == []
    assert on(HOSTS[2], "tail", "-n", "1", unit) == "# by hand"
    on(HOSTS[2], "sed", "-i", "$ d", unit)


def test_a_support_bundle_has_the_engine_s_journal_and_no_key(start, inventory, tmp_path):
    run = start({"support_bundle_dir": str(tmp_path / "support")}, playbook="playbooks/ops/support_bundle.yml")
    assert run.end() == 0, run.text
    archives = {path.name.removesuffix(".tar.gz"): path for path in (tmp_path / "support").iterdir()}
    assert set(HOSTS) < set(archives)
    texts = {}
    for name, path in archives.items():
        with tarfile.open(path) as archive:
            texts[name] = {each: archive.extractfile(each).read().decode() for each in archive.getnames()}
    for name in HOSTS:
        assert "journal/vllm@tiny.service.txt" in texts[name]
        assert f"releases/tiny/{current(name)}/engine.yaml" in texts[name]
        assert json.loads(texts[name]["verdict.json"])["verdict"]
    (gateway,) = set(archives) - set(HOSTS)
    assert "files/etc/haproxy/haproxy.cfg" in texts[gateway]
    everything = "".join(text for inside in texts.values() for text in inside.values())
    clients = yaml.safe_load((inventory / "main.yml").read_text(encoding="utf-8"))["gateways"]["vars"][
        "gateway_clients"
    ]
    assert not [each["name"] for each in clients if each["key_sha256"] in everything]


def test_what_is_somebody_elses_in_the_firewall_is_there_still(host):
    for name in HOSTS[:1]:
        assert "table inet somebody" in on(name, "nft", "list", "tables")
        assert "table inet metalserve" in on(name, "nft", "list", "tables")
