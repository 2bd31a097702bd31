"""The weights on a host: published whole, proven again on demand and by timer, and no worker left behind."""

import json

MODELS = "/var/lib/metalserve/models"
WORKER = "/usr/local/lib/metalserve/weights.pyz"


def published(host):
    return host.check_output(f"ls -d {MODELS}/*/*/").split()


def test_a_published_model_has_its_record_and_nothing_half(host):
    directories = published(host)
    assert directories
    for directory in directories:
        record = json.loads(host.file(f"{directory}.metalserve.json").content_string)
        assert record["files"]
        assert record["content"].startswith("1:")
        assert host.check_output(f"find {directory} -name '*.part'") == ""


def test_no_worker_is_left(host):
    units = host.check_output("systemctl list-units --no-legend --all 'metalserve-weights@*'")
    assert units == ""


def test_the_timer_waits_for_its_time(host):
    timer = host.service("metalserve-weights-verify.timer")
    assert timer.is_enabled
    assert timer.is_running


def test_everything_is_proven_by_the_unit_that_the_timer_starts(host):
    host.check_output("systemctl start metalserve-weights-verify.service")
    journal = host.check_output("journalctl --unit=metalserve-weights-verify --output=cat --no-pager --lines=50")
    for directory in published(host):
        assert f"{directory.rstrip('/')}: proven in" in journal


def test_a_fetch_is_a_unit_that_outlives_whoever_started_it(host):
    """A fetch that cannot succeed: the unit's own state tells it, without the controller."""
    request = {
        "models_dir": "/var/tmp/models", "key": "tiny", "revision": "0", "sources": ["/nonexistent"], "peers": [],
        "files": [{"path": "config.json", "size_bytes": 1, "sha256": "0" * 64}], "seed": True, "format": "bf16",
        "require_chat_template": True, "reserve_bytes": 0, "full_hash": False, "connections": 1, "attempts": 1,
        "rate_limit_bytes_per_second": 0, "patience_seconds": 1, "read_timeout_seconds": 1,
        "tokens_path": "/nonexistent",
    }  # fmt: skip
    host.check_output("rm -rf /var/tmp/models && mkdir /var/tmp/models")
    host.check_output("printf %%s %s > /var/tmp/models/request.json", json.dumps(request))
    unit = "metalserve-weights@tiny:0.service"
    options = f"--quiet --wait --collect --unit={unit}"
    assert host.run(f"systemd-run {options} /usr/bin/python3 {WORKER} fetch /var/tmp/models/request.json").rc == 1
    state = json.loads(host.file("/var/tmp/models/.incoming/tiny@0.state.json").content_string)
    assert state["state"] == "failed"
    assert "config.json could not be had with the right content; nothing was published" in state["message"]
