"""The table of what differs from the inventory."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from metalserve import drift

ROOT = Path(__file__).resolve().parents[2]
DIGEST = "sha256:" + "d" * 64
RELEASES = [{"image": {"reference": "vllm:1", "digest": DIGEST}}]
FACTS = {
    "gpus": [{"index": 0, "source": "nvml", "mig_enabled": False}],
    "driver": {"loaded": "580.1"},
    "container_toolkit": {"version": "1.20.0"},
    "docker": {"images": [f"vllm@{DIGEST}"]},
    "cdi": {
        "specs": [{"path": drift.CDI_SPEC, "driver_version": "580.1", "devices": ["nvidia.com/gpu=0"]}],
    },
}
SEEN = {"release": [], "units": [], "driver": [], "weights": [], "strays": []}


def aspects(facts=FACTS, seen=SEEN, files=(), version="1.20.0"):
    return drift.host_aspects(facts, RELEASES, seen, files, toolkit_version=version)


def found(**hosts):
    return {name: {"trouble": None, "aspects": {}, **each} for name, each in hosts.items()}


def test_a_host_as_it_should_be_has_nothing_to_say():
    assert not any(aspects().values())
    assert set(aspects()) == set(drift.ASPECTS) - {"gateway"}


def test_what_is_nobody_s_matter_is_not_judged():
    assert aspects(version="")["toolkit"] is aspects(version="")["cdi"] is None
    bare = aspects({**FACTS, "gpus": []}, {**SEEN, "driver": None})
    assert (bare["toolkit"], bare["cdi"], bare["driver"]) == (None, None, None)


def test_each_aspect_names_what_it_found():
    facts = {
        **FACTS,
        "container_toolkit": {"version": None},
        "docker": {"images": []},
        "cdi": {"specs": []},
    }
    seen = {**SEEN, "units": ["vllm@tiny.service is stopped"]}
    differs = aspects(facts, seen, ["/etc/systemd/system/vllm@.service"])
    assert differs["toolkit"] == ["the container toolkit is missing, not 1.20.0"]
    assert differs["cdi"] == [f"there is no CDI specification {drift.CDI_SPEC}"]
    assert differs["image"] == ["vllm:1 (sha256:dddddddddddd) is not on the host"]
    assert differs["units"] == [
        "/etc/systemd/system/vllm@.service is not as it would be written", "vllm@tiny.service is stopped",
    ]  # fmt: skip


def test_the_table_has_a_line_for_each_host_and_the_columns_that_concern_somebody():
    fleet = found(
        h1={"aspects": {"release": [], "driver": None}},
        h2={"aspects": {"release": ["tiny is at the release a, planned is b"], "driver": None}},
        h3={"trouble": "it could not be reached"},
        g1={"aspects": {"gateway": []}},
    )
    assert drift.drift_table(fleet) == [
        "host  release  gateway",
        "h1    ok       -",
        "h2    DRIFT    -",
        "h3    ?        ?",
        "g1    -        ok",
    ]
    assert drift.drift_remarks(fleet) == [
        "h3: could not be looked at: it could not be reached",
        "h2: release: tiny is at the release a, planned is b",
    ]
    assert drift.drift_summary(fleet) == "4 hosts: 2 as the inventory wants them, 1 differ, 1 could not be looked at"


def test_what_hosts_have_in_common_stands_once():
    fleet = found(h1={"aspects": {"image": ["x"]}}, h2={"aspects": {"image": ["x"]}})
    assert drift.drift_remarks(fleet) == ["h1, h2: image: x"]


def test_a_run_that_is_to_fail_says_what_to_do():
    assert drift.drift_refusal(found(h1={"aspects": {"release": []}})) is None
    text = str(drift.drift_refusal(found(h1={"aspects": {"release": ["x"]}}, h2={"trouble": "gone"})))
    assert "2 of 2 hosts are not as the inventory wants them, or could not be looked at: h1, h2. Needed: none" in text
    assert "Change: bring them back with site.yml" in text


def test_the_report_is_for_machines():
    report = json.loads(drift.report_json(found(h1={"aspects": {"release": ["x"]}})))
    assert report == {"schema": 1, "hosts": {"h1": {"trouble": None, "aspects": {"release": ["x"]}}}}


def test_the_versions_that_are_wanted_are_those_of_their_roles():
    own = yaml.safe_load((ROOT / "roles/drift/defaults/main.yml").read_text())
    for role, name, mine in (
        ("nvidia_driver", "nvidia_driver_version", "drift_driver_version"),
        ("container_toolkit", "container_toolkit_version", "drift_toolkit_version"),
        ("model_weights", "model_weights_dir", "drift_models_dir"),
        ("serving_unit", "serving_unit_root", "drift_releases_dir"),
    ):
        default = yaml.safe_load((ROOT / "roles" / role / "defaults/main.yml").read_text())[name]
        assert f"{name} | default('{default}')" in own[mine]
