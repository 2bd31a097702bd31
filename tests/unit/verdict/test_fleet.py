"""The verdicts of a fleet: the table, the remarks, the files."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

from verdict_hosts import a_driver, a_host, bare, judge

from metalserve.deployments import plan_table
from metalserve.verdict.fleet import (
    fleet_plan,
    fleet_refusal,
    fleet_remarks,
    fleet_summary,
    fleet_table,
    report_json,
    report_junit,
)
from metalserve.verdict.host import refused_host

HOSTS = {
    "good": judge(a_host()),
    "bare": judge(bare(nouveau_bound=True)),
    "slow": judge(a_host("4xL40S", iommu="on")),
    "broken": judge(a_host(driver=a_driver(holders=[{"pid": 7, "process": "train\x1b", "deployment": None}]))),
    "silent": refused_host(""),
}
VERDICTS = {host: verdict.as_dict() for host, verdict in HOSTS.items()}


def test_one_line_a_host_and_one_column_a_group():
    assert fleet_table(VERDICTS) == [
        "host    verdict  host     gpus  driver  cuda  toolkit  health   links  disk  plan",
        "good    ok       ok       ok    ok      ok    ok       ok       ok     ok    ok",
        "bare    after    ok       ok    after   ok    after    -        -      ok    ok",
        "slow    ok       ok       ok    ok      ok    ok       ok       warn   ok    ok",
        "broken  REFUSED  ok       ok    ok      ok    ok       REFUSED  ok     ok    ok",
        "silent  REFUSED  REFUSED  -     -       -     -        -        -      -     -",
    ]


def test_remarks_come_with_the_worst_first_and_name_the_remedy():
    lines = fleet_remarks(VERDICTS)
    assert [line.split()[0] for line in lines] == ["REFUSED"] * 2 + ["after"] * 3 + ["warn"]
    assert lines[0].startswith("REFUSED  broken: processes: GPUs are open in train")
    assert lines[1] == (
        "REFUSED  silent: facts: the host gave no facts. Needed: a host that answers, with Python 3.9 or newer. "
        "Change: the connection (ansible HOST -m ping), the login, ansible_python_interpreter."
    )
    assert lines[2].startswith("after    bare: driver: driver install and reboot. nouveau drives the GPUs")
    assert "Change: iommu=pt" in lines[-1]


def test_what_hosts_have_in_common_stands_once():
    many = {f"host-{number}": VERDICTS["silent"] for number in range(1, 8)}
    (line,) = fleet_remarks(many)
    assert line.startswith("REFUSED  host-1, host-2, host-3, host-4, host-5 and 2 more: facts: ")


def test_plans_that_are_the_same_stand_once():
    lines = plan_table(HOSTS["good"].releases)
    assert fleet_plan({"a": lines, "b": list(lines), "refused": plan_table([])}) == [
        "a, b:",
        f"  {lines[0]}",
        f"  {lines[1]}",
    ]


def test_the_summary_and_the_sentence_at_the_end():
    assert fleet_summary(VERDICTS) == "5 hosts: 2 ok, 1 ok after the playbooks have run, 2 refused"
    refusal = fleet_refusal(VERDICTS)
    assert refusal is not None
    assert refusal.found == "2 of 5 hosts are refused: broken, silent"
    assert refusal.needed == "no refused host; nothing has been changed on any of them"
    assert "--limit" in refusal.change
    assert fleet_refusal({"good": VERDICTS["good"], "bare": VERDICTS["bare"]}) is None


def test_json():
    report = json.loads(report_json(VERDICTS))
    assert report["schema"] == 1
    assert report["hosts"] == VERDICTS


def test_junit():
    root = ElementTree.fromstring(report_junit(VERDICTS))
    suites = {suite.get("name"): suite for suite in root}
    assert list(suites) == list(VERDICTS)
    for host, suite in suites.items():
        assert int(suite.get("tests")) == len(suite) == len(VERDICTS[host]["checks"])
        assert int(suite.get("failures")) == len(suite.findall("testcase/failure"))
    (failure,) = suites["broken"].findall("testcase/failure")
    assert "GPUs are open in train" in failure.get("message")
    outputs = [case.findtext("system-out") for case in suites["bare"]]
    assert any(text and text.startswith("ok_after: driver install and reboot. ") for text in outputs)
    assert suites["bare"].get("failures") == "0"
