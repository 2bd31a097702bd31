"""Who asks the source and who another host, and what is said while it comes."""

from __future__ import annotations

import pytest

from metalserve.weights_fanout import FetchPlan, FleetHost, fetch_plan, sharing_addresses
from metalserve.weights_progress import progress_line, summary_line

MODEL = "tiny@0123"


def host(number, *, site="", pending=True, wanted=(MODEL,), address=None):
    return FleetHost(
        f"h{number}",
        address or f"10.0.0.{number}",
        site,
        frozenset(wanted),
        frozenset(wanted) if pending else frozenset(),
    )


def numbers(plan):
    return [int(url.split("10.0.0.")[1].split(":")[0]) for url in plan.peers]


def test_the_first_asks_the_source_and_each_other_the_one_before_it():
    hosts = [host(number) for number in range(1, 9)]
    plans = [fetch_plan(hosts, item.name, MODEL, 1, 8747) for item in hosts]
    assert plans[0] == FetchPlan(True, ())
    assert plans[1] == FetchPlan(False, ("http://10.0.0.1:8747/tiny/0123",))
    assert [numbers(plan) for plan in plans[1:5]] == [[1], [2, 1], [3, 2, 1], [4, 3, 2]]
    assert [plan.seed for plan in plans].count(True) == 1


@pytest.mark.parametrize("at_once", [2, 3])
def test_some_ask_the_source_at_once_and_lead_a_chain_each(at_once):
    hosts = [host(number) for number in range(1, 9)]
    plans = [fetch_plan(hosts, item.name, MODEL, at_once, 8747) for item in hosts]
    assert [plan.seed for plan in plans] == [True] * at_once + [False] * (8 - at_once)
    assert [numbers(plan)[0] for plan in plans[at_once:]] == list(range(1, 9 - at_once))


def test_hosts_that_have_it_already_lead_and_nobody_asks_the_source():
    hosts = [host(1), host(2, pending=False), host(3), host(4, pending=False)]
    assert [numbers(fetch_plan(hosts, f"h{number}", MODEL, 1, 8747)) for number in (1, 3)] == [[2], [4]]
    assert not any(fetch_plan(hosts, name, MODEL, 1, 8747).seed for name in ("h1", "h3"))


def test_each_site_has_its_own_chain():
    hosts = [host(1, site="a"), host(2, site="b"), host(3, site="a"), host(4, site="b")]
    plans = [fetch_plan(hosts, item.name, MODEL, 1, 8747) for item in hosts]
    assert [plan.seed for plan in plans] == [True, True, False, False]
    assert [numbers(plan) for plan in plans[2:]] == [[1], [2]]


def test_hosts_of_other_models_are_not_asked():
    hosts = [host(1, wanted=["other@1"]), host(2), host(3)]
    assert fetch_plan(hosts, "h2", MODEL, 1, 8747).seed is True
    assert numbers(fetch_plan(hosts, "h3", MODEL, 1, 8747)) == [2]


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1", ""])
def test_a_host_that_others_cannot_mean_by_its_address_is_alone(address):
    alone = FleetHost("h1", address, "", frozenset([MODEL]), frozenset([MODEL]))
    hosts = [alone, host(2), host(3)]
    assert fetch_plan(hosts, "h1", MODEL, 1, 8747) == FetchPlan(True, ())
    assert fetch_plan(hosts, "h2", MODEL, 1, 8747).seed is True
    assert sharing_addresses(hosts, "h1") == []


def test_an_ipv6_address_is_bracketed():
    hosts = [host(1, address="fd00::1"), host(2)]
    assert fetch_plan(hosts, "h2", MODEL, 1, 8747).peers == ("http://[fd00::1]:8747/tiny/0123",)


def test_a_host_outside_the_list_asks_the_source():
    assert fetch_plan([], "h1", MODEL, 1, 8747) == FetchPlan(True, ())


def test_who_may_ask():
    hosts = [host(1), host(2), host(3, site="far"), host(4, wanted=["other@1"])]
    assert sharing_addresses(hosts, "h1") == ["10.0.0.2"]
    # Nobody lacks anything: nothing is started.
    assert sharing_addresses([host(1, pending=False), host(2, pending=False)], "h1") == []
    assert sharing_addresses([host(1, pending=False), host(2)], "h1") == ["10.0.0.2"]
    # Its own lack is no reason to share.
    assert sharing_addresses([host(1), host(2, pending=False)], "h1") == []


RUNNING = {"state": "running", "total_bytes": 37_450_000_000, "done_bytes": 11_600_000_000}


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (
            {**RUNNING, "bytes_per_second": 412_000_000, "eta_seconds": 62},
            "h1: tiny:  30 %, 11.6 GB of 37.5 GB, 412.0 MB/s, 1:02 left",
        ),
        (
            {**RUNNING, "bytes_per_second": 3, "eta_seconds": 8_000_000_000, "note": "hub asks to wait 30 s"},
            "h1: tiny:  30 %, 11.6 GB of 37.5 GB, 3 B/s, hub asks to wait 30 s",
        ),
        (
            {**RUNNING, "bytes_per_second": 1000, "eta_seconds": 7322},
            "h1: tiny:  30 %, 11.6 GB of 37.5 GB, 1.0 kB/s, 2:02:02 left",
        ),
        (
            {**RUNNING, "done_bytes": 37_450_000_000},
            "h1: tiny: 100 %, 37.5 GB of 37.5 GB, proving and publishing",
        ),
        ({"state": "starting"}, "h1: tiny: starting"),
        ({}, "h1: tiny: starting"),
    ],
)
def test_a_line_of_progress(state, line):
    assert progress_line("h1", "tiny", state) == line


def test_a_line_at_the_end():
    state = {
        "started_at": 1000.0,
        "updated_at": 1090.0,
        "received_bytes": 36_000_000_000,
        "by_source": {"http://h1:8747/tiny/0123": 30_000_000_000, "/mnt/models": 6_000_000_000, "http://bad": 0},
    }
    assert summary_line("h2", "tiny", state) == (
        "h2: tiny: published in 1:30, 400.0 MB/s (30.0 GB from h1:8747, 6.0 GB from /mnt/models)"
    )
    assert summary_line("h2", "tiny", {}) == "h2: tiny: published in 0:00"
