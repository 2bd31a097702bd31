"""What an operator sees of a fleet of one engine, and the alerts that come when it is hurt. In the order of the file:
the last test leaves the engine stopped."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from expressions import absent_without_gpus, all_expressions, metric_names, records

ENGINE = {"host": "metalserve-molecule-monitoring", "deployment": "tiny"}
WATCH = "metalserve-molecule-monitoring-watch"
# Frozen and thawed from the host: the processes behind the API server, which itself goes on to answer.
WORKERS = "docker top metalserve-tiny -eo pid,comm | awk '/EngineCor|Worker/ {print $1}' | xargs kill -%s"


def matching(samples, **labels):
    return [value for found, value in samples if labels.items() <= found.items()]


def wait_until_up(prometheus, expected):
    def up():
        return {
            (labels["job"], labels.get("host") or labels.get("gateway")): value
            for labels, value in prometheus.query("up")
        }

    end = time.monotonic() + 300
    while up() != expected and time.monotonic() < end:
        time.sleep(2)
    assert up() == expected


def test_everything_of_the_inventory_is_asked_and_answers(prometheus):
    wait_until_up(
        prometheus,
        {
            ("engines", ENGINE["host"]): 1,
            ("hosts", ENGINE["host"]): 1,
            ("hosts", WATCH): 1,
            ("gateways", WATCH): 1,
            ("prometheus", None): 1,
            ("alertmanager", None): 1,
        },
    )


def test_tokens_are_counted_with_the_release_that_made_them(prometheus, ask, serving):
    release = serving.check_output("readlink /etc/metalserve/tiny/current").rpartition("/")[2]
    expression = (
        "metalserve:generation_tokens:rate5m * on (host, deployment) group_left (release) metalserve_release_info > 0"
    )
    end = time.monotonic() + 200
    found = []
    while not found and time.monotonic() < end:
        ask(16)
        found = prometheus.query(expression)
    ((labels, _),) = found
    assert labels == {**ENGINE, "model": "lab-moe-tiny", "engine": "vllm", "release": release}


def test_what_only_the_host_knows_is_told(prometheus):
    (planned,) = matching(prometheus.query("metalserve_capacity_planned"), **ENGINE)
    (reported,) = matching(prometheus.query("metalserve_capacity_reported"), **ENGINE)
    assert reported == planned > 0
    assert matching(prometheus.query("metalserve_gate_passed"), **ENGINE) == [1]
    (days,) = matching(
        prometheus.query("(metalserve_certificate_expiry_timestamp_seconds - time()) / 86400"), host=WATCH
    )
    assert 28 < days < 31
    (share,) = matching(
        prometheus.query("metalserve_models_disk_available_bytes / metalserve_models_disk_size_bytes"),
        **{"host": ENGINE["host"]},
    )
    assert 0 < share < 1


def test_every_expression_is_understood_and_its_names_are_there(prometheus):
    known = set(prometheus.get("/api/v1/label/__name__/values")["data"])
    expressions = dict(all_expressions())
    assert len(expressions) > 80
    for where, expression in expressions.items():
        assert prometheus.get("/api/v1/query", query=expression)["status"] == "success", where
        missing = metric_names(expression) - known - records()
        missing = {name for name in missing if not absent_without_gpus(name)}
        assert missing == set(), where


def test_the_engines_logs_are_one_command_and_hold_no_text_of_requests(ask, serving, host):
    ask(4)
    said = serving.check_output("metalserve-host logs tiny --lines 2000")
    assert "POST /v1/chat/completions" in said
    assert "LogRateLimitBurst=100000" in serving.check_output("systemctl show vllm@tiny --property=LogRateLimitBurst")
    for place, unit in ((serving, "vllm@tiny"), (host, "haproxy")):
        assert "17 + 25" not in place.check_output("journalctl --no-pager --output=cat --unit=%s", unit)


def test_no_rule_has_failed_and_nothing_fires(prometheus):
    groups = prometheus.get("/api/v1/rules")["data"]["groups"]
    assert [rule["name"] for group in groups for rule in group["rules"] if rule["health"] == "err"] == []
    assert set(prometheus.alerts()) <= {"FirstTokenLateFast", "FirstTokenLateSlow"}  # a busy machine is slow


def test_a_second_run_changes_nothing(run_playbook):
    rc, text = run_playbook("playbooks/monitoring.yml")
    assert rc == 0, text
    assert text.count("changed=0") == 2, text[-600:]


def test_metrics_are_not_told_to_clients(host):
    address = host.check_output("hostname --all-ip-addresses").split()[0]
    ask = (
        "import ssl, sys, urllib.request as u\n"
        "trust = ssl.create_default_context(cafile='/root/gateway.crt')\n"
        "try: u.urlopen(sys.argv[1], context=trust)\nexcept u.HTTPError as error: print(error.code)"
    )
    assert host.check_output("python3 -c %s %s", ask, f"https://{address}:8443/metrics") == "404"
    for port in (9090, 9093):
        assert host.socket(f"tcp://127.0.0.1:{port}").is_listening
        assert not host.socket(f"tcp://0.0.0.0:{port}").is_listening
        assert not host.socket(f"tcp://{address}:{port}").is_listening


def test_grafana_gets_its_files(host):
    folder = "/etc/metalserve/grafana"
    names = host.check_output("ls %s/dashboards", folder).split()
    assert names == ["fleet.json", "host.json", "model.json", "rollout.json"]
    source = yaml.safe_load(host.file(f"{folder}/provisioning/datasources/metalserve.yml").content_string)
    assert source["datasources"][0]["uid"] == "metalserve"


def test_another_release_in_the_inventory_is_noticed(prometheus, run_playbook, inventory):
    variables = yaml.safe_load((inventory / "group_vars/all/main.yml").read_text(encoding="utf-8"))
    (wanted,) = variables["serving_deployments"]
    changed = {"serving_deployments": [{**wanted, "max_sequences": 12}]}
    rc, text = run_playbook("playbooks/monitoring.yml", changed)
    assert rc == 0, text
    assert prometheus.wait_for_alert("ReleaseDiffers")["labels"]["deployment"] == "tiny"
    rc, text = run_playbook("playbooks/monitoring.yml")
    assert rc == 0, text
    prometheus.wait_until_silent("ReleaseDiffers")


def test_a_deployment_is_measured_and_the_result_lies_with_its_release(run_playbook, serving, tmp_path):
    small = {"benchmark_runs": 1, "benchmark_prompts": 4, "benchmark_concurrency": 2}
    small["benchmark_workloads"] = ["chat_short", "tool_calls"]
    rc, text = run_playbook(
        "playbooks/ops/benchmark.yml",
        {**small, "serving_deployment": "tiny", "serving_benchmark_results": str(tmp_path)},
    )
    assert rc == 0, text
    (fetched,) = tmp_path.iterdir()
    result = json.loads(fetched.read_text(encoding="utf-8"))
    assert set(result["workloads"]) == {"chat_short", "tool_calls"}
    for workload in result["workloads"].values():
        assert [run["completed"] for run in workload["runs"]] == [4]
        median = workload["summary"]["median_ttft_ms"]
        assert 0 < median["least"] <= median["median"] <= median["greatest"]
    release = serving.check_output("readlink /etc/metalserve/tiny/current").rpartition("/")[2]
    assert result["release"] == release
    assert serving.check_output("ls /etc/metalserve/tiny/releases/%s/benchmarks", release).endswith(".json")


def test_nobody_is_disturbed_by_a_benchmark(run_playbook, ask, prometheus):
    ask(1500, behind="long-request")
    try:
        rc, text = run_playbook("playbooks/ops/benchmark.yml", {"serving_deployment": "tiny"})
        assert rc != 0
        assert "tiny works on 1 request(s) of others" in text
        assert "Change: drain the host first" in text
    finally:
        prometheus.host.run("systemctl stop long-request.service")


def test_a_tuning_ends_with_a_deployment_to_paste_and_the_former_release(run_playbook, serving, host, tmp_path):
    before = serving.check_output("readlink /etc/metalserve/tiny/current")
    small = {
        "serving_deployment": "tiny",
        "serving_tune_results": str(tmp_path),
        "tune_runs": 1,
        "tune_prompts": 4,
        "tune_concurrency": 2,
        "tune_candidates": 2,
        # A million is more than a step has tokens: the planner's word, and no start. A CPU has no graphs to turn off.
        "tune_space": {"max_sequences": [8, 1000000], "eager": [True]},
    }
    rc, text = run_playbook("playbooks/ops/tune.yml", small)
    assert rc != 0
    assert f"{ENGINE['host']}:tiny takes traffic of lab-moe-tiny" in text
    drained = {"gateway_drain_host": ENGINE["host"]}
    rc, text = run_playbook("playbooks/ops/drain.yml", drained)
    assert rc == 0, text
    try:
        rc, text = run_playbook("playbooks/ops/tune.yml", small)
        assert rc == 0, text
    finally:
        rc, _ = run_playbook("playbooks/ops/undrain.yml", drained)
    assert rc == 0
    (document,) = tmp_path.glob("*.json")
    tuned = json.loads(document.read_text(encoding="utf-8"))
    states = {each["name"]: each["state"] for each in tuned["candidates"]}
    assert states["present"] == states["max_sequences 8"] == "measured"
    assert states["max_sequences 1000000"] == "refused"
    assert "same" in states.values()
    assert tuned["present_again"]["runs"]
    assert yaml.safe_load(tuned["snippet"])[0]["name"] == "tiny"
    assert serving.check_output("readlink /etc/metalserve/tiny/current") == before
    assert serving.run("test -e /etc/metalserve/tiny/trial.json").rc != 0
    assert serving.check_output("systemctl is-active vllm@tiny") == "active"


def test_a_ladder_against_the_gateway_is_climbed(host, tmp_path):
    address = host.check_output("hostname --all-ip-addresses").split()[0]
    (tmp_path / "gateway.crt").write_text(host.file("/root/gateway.crt").content_string, encoding="utf-8")
    (tmp_path / "key").write_text("sk-first\n", encoding="utf-8")
    command = [sys.executable, "-m", "metalserve.cli", "load", f"https://{address}:8443", "--model", "lab-moe-tiny"]
    command += ["--ladder", "1,2", "--seconds", "5", "--prompt-words", "10", "--answer-tokens", "8", "--json"]
    done = subprocess.run(
        [*command, "--api-key-file", str(tmp_path / "key"), "--page", str(tmp_path / "load.html")],
        env={**os.environ, "SSL_CERT_FILE": str(tmp_path / "gateway.crt")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout)["steps"]
    assert [(step["concurrency"], step["errors"]) for step in steps] == [(1, {}), (2, {})]
    assert all(step["answered"] and step["ttft_ms"]["median"] > 0 for step in steps)
    assert all(step["tokens_per_second"] > 0 for step in steps)
    assert "Load" in (tmp_path / "load.html").read_text(encoding="utf-8")


def test_a_frozen_engine_is_noticed_though_it_answers(prometheus, ask, serving):
    """Frozen while nothing runs: its own gauges say zero, and its health route 200."""
    serving.check_output(WORKERS, "STOP")
    try:
        ask(8, behind="frozen-request")
        alert = prometheus.wait_for_alert("EngineStalled")
        assert ENGINE.items() <= alert["labels"].items()
        assert matching(prometheus.query('up{job="engines"}'), **ENGINE) == [1]
    finally:
        serving.check_output(WORKERS, "CONT")
    prometheus.wait_until_silent("EngineStalled")


def test_a_drained_engine_may_stop_and_another_one_may_not(prometheus, run_playbook, serving):
    host = {"gateway_drain_host": ENGINE["host"]}
    rc, text = run_playbook("playbooks/ops/drain.yml", host)
    assert rc == 0, text
    serving.check_output("systemctl stop vllm@tiny.service")
    # The pool has no other engine: that is said, and the engine's own silence is not.
    assert prometheus.wait_for_alert("PoolEmpty")["labels"]["proxy"] == "lab-moe-tiny"
    end = time.monotonic() + 60
    while matching(prometheus.query('up{job="engines"}'), **ENGINE) != [0] and time.monotonic() < end:
        time.sleep(1)
    time.sleep(30)  # three times as long as the alert waits
    assert matching(prometheus.query("metalserve:drained"), **ENGINE) == [1]
    assert "EngineDown" not in prometheus.alerts()
    rc, text = run_playbook("playbooks/ops/undrain.yml", host)
    assert rc == 0, text
    alert = prometheus.wait_for_alert("EngineDown")
    assert alert["annotations"]["summary"] == f"The engine of tiny on {ENGINE['host']} does not answer."
    assert "First: metalserve-host diagnose tiny" in alert["annotations"]["description"]
    told = prometheus.get("/api/v2/alerts", port=9093)
    assert "EngineDown" in {item["labels"]["alertname"] for item in told}, json.dumps(told)[:500]
