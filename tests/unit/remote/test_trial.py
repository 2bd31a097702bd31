"""Releases on trial on a host whose engines are played: killed at every step, the former one comes back."""

from __future__ import annotations

import json

import pytest
from test_rollout import UNIT, A, B, C, PlayedHost

from metalserve.remote.benchmark import BenchmarkError, OthersUseItError, Settings
from metalserve.remote.releases import (
    activate_release,
    active_release,
    link_target,
    mark_good,
    release_ids,
    stage_release,
)
from metalserve.remote.rollout import Rollout
from metalserve.remote.rollout_types import Wanted
from metalserve.remote.trial import NOTE, Trial, TrialError

NAMES = ("current", "good", "previous")


def wanted(release_id):
    endpoint = {"engine": "vllm", "unit": UNIT, "url": "http://h:1"}
    files = {"release.json": json.dumps({"id": release_id}), "endpoint.json": json.dumps(endpoint)}
    return Wanted("tiny", release_id, files)


class Measure:
    """The benchmark: notes which release was current, and fails where it is told to."""

    def __init__(self):
        self.seen, self.error = [], None

    def __call__(self, root, deployment, settings):
        self.seen.append(active_release(root, deployment))
        if self.error:
            raise self.error
        return root / "x.json", {"release": self.seen[-1]}


@pytest.fixture
def host(tmp_path):
    """A host that serves the release A, proven, after B."""
    played = PlayedHost()
    played.root = tmp_path
    for release in (B, A):
        Rollout(tmp_path, played).roll_out([wanted(release)])
    played.did.clear()
    return played


@pytest.fixture
def measure():
    return Measure()


def trial(host, measure, requests=0):
    def unused(deployment, endpoint, *, force):
        if requests and not force:
            raise OthersUseItError("tiny works on 2 request(s) of others")
        return requests

    return Trial(host.root, host, "tiny", measure=measure, unused=unused)


def links(host):
    return [link_target(host.root, "tiny", name) for name in NAMES]


def test_a_candidate_is_proven_and_measured_and_leaves_nothing_behind(host, measure):
    on = trial(host, measure)
    assert on.heal() is None
    on.begin(A)
    assert on.attempt(wanted(A), Settings())["result"] == {"release": A}
    assert f"start {UNIT}" not in host.did  # it runs already
    assert on.attempt(wanted(C), Settings()) == {"ok": True, "stage": None, "reason": "", "result": {"release": C}}
    # Whatever it has passed: nothing goes back to it.
    assert links(host) == [C, A, B]
    assert on.end(Settings()) == {"release": A, "ok": True, "stage": None, "reason": "", "result": {"release": A}}
    assert links(host) == [A, A, B]
    assert sorted(release_ids(host.root, "tiny")) == [A, B]
    assert not (host.root / "tiny" / NOTE).exists()
    assert host.running["tiny"] == A
    assert on.end() == {"release": None, "ok": True, "stage": None, "reason": "", "result": None}


@pytest.mark.parametrize("stage", ["start", "gate"])
def test_a_candidate_that_fails_is_an_answer_and_is_not_measured(host, measure, stage):
    on = trial(host, measure)
    on.begin(A)
    host.verdicts[C] = (stage, "no tools")
    assert on.attempt(wanted(C), Settings()) == {"ok": False, "stage": stage, "reason": "no tools", "result": None}
    assert measure.seen == []
    on.end()
    assert (links(host), host.running["tiny"]) == ([A, A, B], A)


def test_a_benchmark_that_fails_is_an_answer_and_others_who_use_it_are_none(host, measure):
    on = trial(host, measure)
    on.begin(A)
    measure.error = BenchmarkError("2 of 64 requests failed")
    assert on.attempt(wanted(C), Settings())["stage"] == "benchmark"
    measure.error = OthersUseItError("tiny works on 1 request(s) of others")
    with pytest.raises(OthersUseItError):
        on.attempt(wanted(C), Settings())
    # The former release comes back all the same.
    assert on.end(Settings())["reason"] == "tiny works on 1 request(s) of others"
    assert links(host) == [A, A, B]


def test_a_release_that_was_there_before_stays(host, measure):
    on = trial(host, measure)
    on.begin(A)
    on.attempt(wanted(B), Settings())
    on.end()
    assert sorted(release_ids(host.root, "tiny")) == [A, B]


def test_others_who_use_it_stop_it_before_it_begins(host, measure):
    with pytest.raises(OthersUseItError, match=r"works on 2 request\(s\) of others"):
        trial(host, measure, requests=2).begin(A)
    assert not (host.root / "tiny" / NOTE).exists()
    trial(host, measure, requests=2).begin(A, force=True)
    assert (host.root / "tiny" / NOTE).exists()


def test_it_begins_and_ends_with_what_the_inventory_asks_for(host, measure):
    with pytest.raises(TrialError, match=f"has the release {A} here, and the inventory asks for {C}. Needed: the same"):
        trial(host, measure).begin(C)
    stage_release(host.root, "tiny", C, wanted(C).files, dry_run=False)
    activate_release(host.root, "tiny", C, dry_run=False)
    with pytest.raises(TrialError, match=f"the release {C} of tiny has not passed its gate here"):
        trial(host, measure).begin(C)


class KilledError(BaseException):
    """The process is gone at this point."""


@pytest.mark.parametrize("step", range(1, 8))
def test_killed_at_any_step_the_next_run_heals(host, measure, step, monkeypatch):
    done = 0

    def die_at_step():
        nonlocal done
        done += 1
        if done == step:
            raise KilledError

    for name in ("stop", "start", "prove"):
        whole = getattr(host, name)

        def stepped(*words, whole=whole):
            die_at_step()
            return whole(*words)

        monkeypatch.setattr(host, name, stepped)
    measured = measure.__call__

    def killed_measure(*words):
        die_at_step()
        return measured(*words)

    on = trial(host, killed_measure)
    try:
        on.begin(A)
        for release in (A, C):
            on.attempt(wanted(release), Settings())
        on.end(Settings())
    except KilledError:
        killed = True
    else:
        killed = False
    assert killed, "the trial was over before this step"
    healed = trial(host, measure).heal()
    assert healed is None or "a trial was killed" in healed
    assert links(host) == [A, A, B]
    assert (host.running["tiny"], host.states[UNIT]) == (A, "running")
    assert sorted(release_ids(host.root, "tiny")) == [A, B]
    trial(host, measure).begin(A)


def test_a_rollout_heals_as_well_and_the_next_trial_cleans_up_after_it(host, measure):
    on = trial(host, measure)
    on.begin(A)
    on.attempt(wanted(C), Settings())
    Rollout(host.root, host).roll_out([wanted(B)])
    with pytest.raises(TrialError, match=f"the release {B} of tiny is current, and no trial has made it so"):
        on.attempt(wanted(C), Settings())
    assert (
        trial(host, measure).heal()
        == f"a trial was killed while {C} was current; another run has made {B} current since"
    )
    assert active_release(host.root, "tiny") == B
    assert C not in release_ids(host.root, "tiny")
    mark_good(host.root, "tiny", B)
    trial(host, measure).begin(B)


def test_what_another_run_has_made_current_stays(host, measure):
    on = trial(host, measure)
    on.begin(A)
    on.attempt(wanted(C), Settings())
    Rollout(host.root, host).roll_out([wanted(B)])
    ended = on.end(Settings())
    assert (ended["release"], ended["ok"], ended["result"]) == (B, False, None)
    assert ended["reason"] == f"another run has made {B} current meanwhile, which stays"
    assert host.running["tiny"] == B
    assert C not in release_ids(host.root, "tiny")


def test_a_former_release_that_does_not_come_back_is_said_and_tried_again(host, measure):
    on = trial(host, measure)
    on.begin(A)
    on.attempt(wanted(C), Settings())
    host.verdicts[A] = ("start", "no GPU")
    with pytest.raises(TrialError, match=f"the former release {A} of tiny is current again and fails: no GPU"):
        on.end()
    assert (host.root / "tiny" / NOTE).exists()
    host.verdicts[A] = None
    host.states[UNIT] = "failing"
    assert "is back" in trial(host, measure).heal()
    assert links(host) == [A, A, B]
