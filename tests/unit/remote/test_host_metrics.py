"""The text for node exporter's textfile collector: what is known is told, what is not is left out."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from metalserve.remote.host_metrics import METRICS, render, samples, write_metrics
from metalserve.remote.releases import Refused, activate_release, mark_good, refuse, stage_release

FACTS = json.loads((Path(__file__).parents[1] / "fixtures/h200_x2_host_facts.json").read_text(encoding="utf-8"))
OLD, NEW = "a" * 12, "b" * 12
WHERE = {"deployment": "qwen", "release": OLD}
RECORD = {
    "engine": "vllm",
    "engine_version": "0.33.0",
    "model": "m",
    "port": 8000,
    "plan": {"gpus_used": [0, 1], "predicted_bytes": {"weights": 60, "kv": 40}},
}
CAPACITY = {
    "measure": "kv_cache_tokens",
    "difference_percent": -2.5,
    "values": {"kv_cache_tokens": {"planned": 1000, "reported": 975.0}},
}


@pytest.fixture
def root(tmp_path):
    """A deployment with a current, good release and a newer, refused one."""
    for release in (OLD, NEW):
        files = {"release.json": json.dumps({**RECORD, "id": release})}
        stage_release(tmp_path, "qwen", release, files, dry_run=False)
    activate_release(tmp_path, "qwen", OLD, dry_run=False)
    mark_good(tmp_path, "qwen", OLD)
    directory = tmp_path / "qwen/releases" / OLD
    gate = {"passed": True, "when": "2026-11-30T12:00:00Z"}
    (directory / "gate.json").write_text(json.dumps(gate), encoding="utf-8")
    (directory / "capacity.json").write_text(json.dumps(CAPACITY), encoding="utf-8")
    refuse(tmp_path, "qwen", NEW, Refused("2026-11-30T13:00:00Z", "gate", "no", {}))
    return tmp_path


def told(root, facts=None, settings=None, run=lambda argv: ""):
    """Values by name and labels."""
    return {
        (name, tuple(sorted(labels.items()))): value
        for name, labels, value in samples(root, facts or {}, settings or {}, now=1.0, run=run)
    }


def key(name, /, **labels):
    return (f"metalserve_{name}", tuple(sorted(labels.items())))


def seconds(*when):
    return datetime(*when, tzinfo=UTC).timestamp()


def test_releases_gates_and_refusals_are_told(root):
    found = told(root, settings={"wanted": {"qwen": NEW}})
    assert found[key("release_info", **WHERE, engine="vllm", engine_version="0.33.0", model="m", port="8000")] == 1
    assert found[key("release_good", **WHERE)] == 1
    assert found[key("release_wanted_info", deployment="qwen", release=NEW)] == 1
    assert found[key("gate_passed", **WHERE)] == 1
    assert found[key("gate_timestamp_seconds", **WHERE)] == seconds(2026, 11, 30, 12)
    refused = {"deployment": "qwen", "release": NEW, "stage": "gate"}
    assert found[key("release_refused_timestamp_seconds", **refused)] == seconds(2026, 11, 30, 13)


def test_plan_and_report_stand_side_by_side(root):
    found = told(root)
    assert found[key("capacity_planned", **WHERE, measure="tokens")] == 1000
    assert found[key("capacity_reported", **WHERE, measure="tokens")] == 975
    assert found[key("capacity_difference_percent", **WHERE)] == -2.5
    assert [found[key("plan_gpu_memory_bytes", **WHERE, gpu=gpu)] for gpu in "01"] == [100, 100]


def test_the_gpus_of_a_real_host_are_told(tmp_path):
    found = told(tmp_path, FACTS, {"gpu_count": 8})
    assert found[key("gpus", source="driver")] == found[key("gpus", source="pci")] == 2
    assert found[key("gpus_expected")] == 8
    first = FACTS["gpus"][0]
    about = {"gpu": "0", "uuid": first["uuid"], "pci_address": first["pci_address"], "name": first["name"]}
    assert found[key("gpu_info", **about)] == 1
    assert found[key("gpu_memory_total_bytes", gpu="0")] == first["memory_total_bytes"]
    assert found[key("gpu_row_remap_pending", gpu="0")] == found[key("gpu_row_remap_failed", gpu="0")] == 0
    assert found[key("gpu_remapped_rows", gpu="1", kind="uncorrectable")] == 0
    assert found[key("gpu_recovery_action", gpu="0", action="none")] == 0
    assert found[key("driver_mismatch")] == 0
    assert found[key("gpu_fabric_completed", gpu="0")] == 1


def changed(**values):
    return {**FACTS, "gpus": [{**FACTS["gpus"][0], **values}]}


@pytest.mark.parametrize(
    ("facts", "sample", "value"),
    [
        (changed(fabric_state="completed"), key("gpu_fabric_completed", gpu="0"), 1),
        (changed(fabric_state="in_progress"), key("gpu_fabric_completed", gpu="0"), 0),
        (changed(throttle_reasons=["hw_slowdown"]), key("gpu_throttled", gpu="0", reason="hw_slowdown"), 1),
        (changed(throttle_reasons=["gpu_idle"]), key("gpu_throttled", gpu="0", reason="gpu_idle"), None),
        (changed(recovery_action="reset"), key("gpu_recovery_action", gpu="0", action="reset"), 1),
        (changed(source="pci", index=None), key("gpus", source="driver"), 0),
        (changed(nvlink_active=17), key("gpu_nvlinks_active", gpu="0"), 17),
        (changed(sram_threshold_exceeded=True), key("gpu_sram_threshold_exceeded", gpu="0"), 1),
        ({"driver": {"loaded": "535.1", "on_disk": "550.2"}}, key("driver_mismatch"), 1),
        ({"container_toolkit": {"version": "1.17.8"}}, key("container_toolkit_below_floor"), 0),
        ({"container_toolkit": {"version": "1.9.0"}}, key("container_toolkit_below_floor"), 1),
        ({"probe_errors": [{"probe": "x", "error": "y"}]}, key("probe_errors"), 1),
        (
            {"xid_errors": [{"code": 79, "pci_address": "0000:18:00.0", "message": "", "count": 2}]},
            key("xid_errors", pci_address="0000:18:00.0", xid="79"),
            2,
        ),
        (
            {"sxid_errors": [{"code": 12028, "pci_address": "0000:05:00.0", "message": "", "count": 1}]},
            key("sxid_errors", pci_address="0000:05:00.0", sxid="12028"),
            1,
        ),
    ],
)
def test_a_fact_is_told(tmp_path, facts, sample, value):
    assert told(tmp_path, facts, {"toolkit_floor": "1.17.8"}).get(sample) == value


@pytest.mark.parametrize(
    ("version", "value"), [("580.1", seconds(2028, 6, 30)), ("545.1", 0), ("999.1", None)], ids=["day", "ended", "new"]
)
def test_a_driver_branch_has_an_end(tmp_path, version, value):
    settings = {"driver_branches": {"580": "2028-06-30", "545": None}}
    found = told(tmp_path, {"driver": {"loaded": version}}, settings)
    assert found.get(key("driver_end_of_life_timestamp_seconds", branch=version.partition(".")[0])) == value


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("LoadState=loaded\nResult=success\nExecMainExitTimestamp=Mon 2026-11-30 12:00:00 UTC\n", 0),
        ("LoadState=loaded\nResult=exit-code\nExecMainExitTimestamp=Mon 2026-11-30 12:00:00 UTC\n", 1),
        ("LoadState=loaded\nResult=success\nExecMainExitTimestamp=\n", None),
        ("LoadState=not-found\nResult=success\nExecMainExitTimestamp=\n", None),
        ("", None),
    ],
    ids=["as wanted", "drift", "not run yet", "no such unit", "no systemd"],
)
def test_drift_is_what_its_unit_found_last(tmp_path, said, value):
    assert told(tmp_path, run=lambda argv: said if "systemctl" in argv else "").get(key("driver_drift")) == value


def test_a_certificate_and_the_models_disk_are_told(tmp_path):
    facts = {"disks": [{"path": "/models", "mount": "/", "free_bytes": 5, "total_bytes": 50}]}
    settings = {"certificates": ["/tls.pem", "/gone.pem"], "models_dir": "/models"}
    found = told(tmp_path, facts, settings, lambda argv: "notAfter=Dec  1 10:00:00 2027 GMT\n" * ("/tls.pem" in argv))
    assert found[key("certificate_expiry_timestamp_seconds", path="/tls.pem")] == seconds(2027, 12, 1, 10)
    assert key("certificate_expiry_timestamp_seconds", path="/gone.pem") not in found
    assert found[key("models_disk_available_bytes", path="/models")] == 5
    assert found[key("models_disk_size_bytes", path="/models")] == 50


def test_the_text_is_prometheus_own_form():
    rows = [("metalserve_gpus", {"source": 'a "b"\\\n'}, 2), ("metalserve_probe_errors", {}, 0)]
    assert render(rows) == (
        "# HELP metalserve_gpus Number of GPUs (source: pci, or driver).\n"
        "# TYPE metalserve_gpus gauge\n"
        'metalserve_gpus{source="a \\"b\\"\\\\\\n"} 2\n'
        "# HELP metalserve_probe_errors Questions about the host that got no answer.\n"
        "# TYPE metalserve_probe_errors gauge\n"
        "metalserve_probe_errors 0\n"
    )


def test_every_name_that_is_told_is_described(root):
    source = Path(samples.__code__.co_filename).read_text(encoding="utf-8")
    used = set(re.findall(r'"(metalserve_\w+)"', source.partition("}\n# A GPU's")[2]))
    assert used == set(METRICS)


def test_the_file_is_written_for_the_collector(root, tmp_path):
    settings, output = tmp_path / "metrics.json", tmp_path / "metalserve.prom"
    settings.write_text(json.dumps({"models_dir": "/models", "wanted": {"qwen": OLD}}), encoding="utf-8")
    asked = []

    def collect(place, disks):
        asked.append((place, disks))
        return FACTS

    write_metrics(root, output, settings, collect)
    assert asked == [("/", ["/models"])]
    text = output.read_text(encoding="utf-8")
    assert f'metalserve_release_wanted_info{{deployment="qwen",release="{OLD}"}} 1\n' in text
    assert output.stat().st_mode & 0o777 == 0o644
