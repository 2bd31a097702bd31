"""The life of releases on a host whose engines are played: what is activated, proven, refused, and gone back to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from metalserve.remote.releases import (
    activate_release,
    active_release,
    link_target,
    mark_good,
    refusal_of,
    release_ids,
    stage_release,
)
from metalserve.remote.retire import retire
from metalserve.remote.rollout import Rollout
from metalserve.remote.rollout_types import Outcome, Proof, Wanted

A, B, C = "aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc"
UNIT = "vllm@tiny.service"


class PlayedHost:
    """Engines that start at once; `verdicts` says of each release how it fails, None when it passes."""

    def __init__(self) -> None:
        self.verdicts: dict[str, tuple[str, str] | None] = {}
        self.running: dict[str, str] = {}
        self.states: dict[str, str] = {}
        self.enabled: set[str] = set()
        self.root: Any = None
        self.facts: dict[str, Any] = {"unit": "u1", "weights": "w1", "driver": None, "boot": "b1", "gate": "g1"}
        self.did: list[str] = []
        self.die_at = ""

    def running_release(self, deployment):
        return self.running.get(deployment)

    def unit_state(self, unit):
        return self.states.get(unit, "stopped")

    def other_units(self, deployment, engine):
        units = [f"{other}@{deployment}.service" for other in ("vllm", "sglang") if other != engine]
        return [unit for unit in units if unit in self.enabled or self.unit_state(unit) != "stopped"]

    def start(self, unit):
        self._note(f"start {unit}")
        deployment = unit.split("@")[1].split(".")[0]
        self.enabled.add(unit)
        self.running[deployment] = active_release(self.root, deployment)
        verdict = self.verdicts.get(self.running[deployment])
        self.states[unit] = "failing" if verdict and verdict[0] == "start" else "running"

    def enable(self, unit):
        if unit in self.enabled:
            return False
        self.enabled.add(unit)
        return True

    def stop(self, unit):
        self._note(f"stop {unit}")
        self.enabled.discard(unit)
        self.states[unit] = "stopped"
        self.running.pop(unit.split("@")[1].split(".")[0], None)

    def prove(self, deployment, release_id, directory, endpoint):
        self._note(f"prove {release_id[0]}")
        assert (directory / "release.json").is_file()
        stage, reason = self.verdicts.get(release_id) or ("gate", "")
        return Proof(not reason, stage, reason, reason or "passed", (f"table of {release_id[0]}",))

    def circumstances(self, directory, unit):
        return dict(self.facts)

    def now(self):
        return "2027-01-02T03:04:05Z"

    def _note(self, what):
        if self.die_at and what.startswith(self.die_at):
            raise KeyboardInterrupt
        self.did.append(what)


def wanted(release_id: str, deployment: str = "tiny", engine: str = "vllm") -> Wanted:
    endpoint = {"engine": engine, "unit": f"{engine}@{deployment}.service", "url": "http://h", "model": "m"}
    return Wanted(deployment, release_id, {"release.json": "{}\n", "endpoint.json": json.dumps(endpoint)})


class World:
    def __init__(self, root):
        self.root = root
        self.host = PlayedHost()
        self.host.root = root

    def run(self, *items: Wanted, dry_run: bool = False, keep: int = 5, **options) -> list[Outcome]:
        self.host.did = []
        return Rollout(self.root, self.host, dry_run=dry_run, keep=keep).roll_out(items, **options)

    def one(self, release_id: str, **options) -> Outcome:
        (outcome,) = self.run(wanted(release_id), **options)
        return outcome

    def back(self, release_id=None, reason="slow") -> Outcome:
        self.host.did = []
        return Rollout(self.root, self.host).roll_back("tiny", release_id, reason)

    @property
    def links(self):
        targets = {name: link_target(self.root, "tiny", name) for name in ("current", "good", "previous")}
        return {name: target[0] for name, target in targets.items() if target}


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def fail_gate(reason="tool_auto: no tool call"):
    return ("gate", reason)


def test_a_first_release_becomes_good(world):
    outcome = world.one(A)
    assert (outcome.ok, outcome.changed, outcome.started, outcome.active) == (True, True, True, A)
    assert world.links == {"current": "a", "good": "a"}
    assert world.host.did == [f"start {UNIT}", "prove a"]
    assert "table of a" in outcome.lines


def test_the_second_run_changes_nothing_and_proves_again(world):
    world.one(A)
    outcome = world.one(A)
    assert (outcome.ok, outcome.changed, outcome.started) == (True, False, False)
    assert world.host.did == ["prove a"]


def test_a_release_that_passes_makes_the_one_before_previous(world):
    for release_id in (A, B, C):
        assert world.one(release_id).ok
    assert world.links == {"current": "c", "good": "c", "previous": "b"}


@pytest.mark.parametrize("stage", ["gate", "start"])
def test_a_refused_release_is_left_for_the_last_good_one(world, stage):
    world.one(A)
    world.host.verdicts[B] = (stage, "wrong parser")
    outcome = world.one(B)
    assert world.host.did == [f"start {UNIT}", "prove b", f"start {UNIT}", "prove a"]
    assert (outcome.ok, outcome.active) == (False, A)
    assert world.links == {"current": "a", "good": "a"}
    # Both facts in one message.
    assert f"the release {B} was refused: wrong parser" in outcome.message
    assert f"The release {A} is current again, has passed the gate and answers" in outcome.message
    assert "Needed: " in outcome.message
    assert "Change: " in outcome.message
    refused = refusal_of(world.root, "tiny", B)
    assert (refused.stage, refused.reason, refused.when) == (stage, "wrong parser", "2027-01-02T03:04:05Z")


def test_going_back_keeps_the_way_further_back(world):
    world.one(A)
    world.one(B)
    world.host.verdicts[C] = fail_gate()
    world.one(C)
    assert world.links == {"current": "b", "good": "b", "previous": "a"}


def test_the_run_after_a_refusal_keeps_away_and_says_why(world):
    world.one(A)
    world.host.verdicts[B] = fail_gate("wrong parser")
    world.one(B)
    texts = []
    for _ in range(2):
        outcome = world.one(B)
        assert world.host.did == ["prove a"]
        assert (outcome.ok, outcome.changed, outcome.started, outcome.active) == (False, False, False, A)
        texts.append(outcome.message)
    assert texts[0] == texts[1]
    assert "refused by the gate on this host at 2027-01-02T03:04:05Z: wrong parser" in texts[0]
    assert f"The release {A} is current, has passed the gate and answers" in texts[0]
    assert "serving_unit_retry_refused=true" in texts[0]


def test_a_check_run_tells_of_the_standing_refusal(world):
    world.one(A)
    world.host.verdicts[B] = fail_gate("wrong parser")
    world.one(B)
    outcome = world.one(B, dry_run=True)
    assert (outcome.ok, outcome.changed) == (False, False)
    assert world.host.did == []
    assert "wrong parser" in outcome.message


def test_a_refused_release_is_tried_again_when_the_operator_asks(world):
    world.one(A)
    world.host.verdicts[B] = fail_gate()
    world.one(B)
    world.host.verdicts[B] = None
    outcome = world.one(B, retry_refused=True)
    assert outcome.ok
    assert world.links == {"current": "b", "good": "b", "previous": "a"}
    assert refusal_of(world.root, "tiny", B) is None
    assert world.one(B).changed is False


@pytest.mark.parametrize(
    ("stage", "fact", "again"),
    [
        ("start", "weights", True),
        ("start", "boot", True),
        ("start", "unit", True),
        ("start", "driver", True),
        ("start", "gate", False),
        ("gate", "gate", True),
        ("gate", "weights", True),
        # A restart of the host mends no parser, and each try costs the good release its uptime.
        ("gate", "boot", False),
    ],
)
def test_a_refused_release_is_tried_again_when_what_it_depends_on_has_changed(world, stage, fact, again):
    world.one(A)
    world.host.verdicts[B] = (stage, "no")
    world.one(B)
    world.host.facts[fact] = "other"
    outcome = world.one(B)
    assert ("prove b" in world.host.did) is again
    assert any(fact in line for line in outcome.lines) is again


def test_another_release_is_tried_although_one_was_refused(world):
    world.one(A)
    world.host.verdicts[B] = fail_gate()
    world.one(B)
    assert world.one(C).ok
    assert world.links == {"current": "c", "good": "c", "previous": "a"}


def test_without_a_way_back_the_refused_engine_is_stopped(world):
    world.host.verdicts[A] = fail_gate("chat: found 41")
    outcome = world.one(A)
    assert world.host.did == [f"start {UNIT}", "prove a", f"stop {UNIT}"]
    assert not outcome.ok
    assert "There is no release to go back to" in outcome.message
    assert "chat: found 41" in outcome.message
    assert UNIT not in world.host.enabled


def test_without_a_way_back_the_next_run_tries_again(world):
    world.host.verdicts[A] = fail_gate()
    world.one(A)
    world.host.verdicts[A] = None
    assert world.one(A).ok
    assert world.links == {"current": "a", "good": "a"}


def test_a_proven_release_that_fails_now_is_not_rolled_back(world):
    world.one(A)
    world.one(B)
    world.host.verdicts[B] = fail_gate("burst: 3 of 16")
    outcome = world.one(B)
    assert world.host.did == ["prove b"]
    assert (outcome.ok, outcome.active) == (False, B)
    assert "has passed the gate here before, fails now: burst: 3 of 16" in outcome.message
    assert f"go back to {A}" in outcome.message
    assert refusal_of(world.root, "tiny", B) is None


def test_a_good_release_that_fails_after_the_way_back_is_said(world):
    world.one(A)
    world.host.verdicts = {B: ("start", "no GPU"), A: ("start", "no GPU either")}
    outcome = world.one(B)
    assert f"The last good release {A} was made current again and fails as well: no GPU either" in outcome.message
    assert world.links == {"current": "a", "good": "a"}


def test_one_refused_deployment_does_not_keep_the_other_from_its_release(world):
    world.run(wanted(A), wanted(A, "other"))
    world.host.verdicts[B] = fail_gate()
    tiny, other = world.run(wanted(B), wanted(C, "other"))
    assert (tiny.ok, other.ok) == (False, True)
    assert active_release(world.root, "other") == C
    # Both are started before the first is waited for.
    assert world.host.did[:3] == [f"start {UNIT}", "start vllm@other.service", "prove b"]


# ---- runs that are killed ----


@pytest.mark.parametrize("moment", ["start", "prove b"])
@pytest.mark.parametrize("good", [True, False])
def test_a_run_killed_after_the_activation_heals(world, moment, good):
    world.one(A)
    world.host.verdicts[B] = None if good else fail_gate()
    world.host.die_at = moment
    with pytest.raises(KeyboardInterrupt):
        world.one(B)
    assert world.links == {"current": "b", "good": "a"}
    world.host.die_at = ""
    outcome = world.one(B)
    assert "prove b" in world.host.did
    assert outcome.ok is good
    assert world.links == ({"current": "b", "good": "b", "previous": "a"} if good else {"current": "a", "good": "a"})


def test_a_run_killed_on_the_way_back_heals(world):
    world.one(A)
    world.host.verdicts[B] = ("start", "no")
    world.host.die_at = "prove a"
    with pytest.raises(KeyboardInterrupt):
        world.one(B)
    world.host.die_at = ""
    # Killed a moment earlier: the refusal is known, the link still names the refused release.
    activate_release(world.root, "tiny", B, dry_run=False)
    outcome = world.one(B)
    assert world.host.did == [f"start {UNIT}", "prove a"]
    assert outcome.changed
    assert world.links == {"current": "a", "good": "a"}
    assert "was refused at its start" in outcome.message


def test_a_killed_run_and_then_another_wish(world):
    """The unproven release in between is no way back: the one that was proven is."""
    world.one(A)
    world.host.die_at = "prove b"
    with pytest.raises(KeyboardInterrupt):
        world.one(B)
    world.host.die_at = ""
    world.host.verdicts[C] = fail_gate()
    world.one(C)
    assert world.links == {"current": "a", "good": "a"}


def test_an_engine_that_does_not_run_is_started(world):
    world.one(A)
    world.host.states[UNIT] = "failing"
    outcome = world.one(A)
    assert world.host.did == [f"start {UNIT}", "prove a"]
    assert outcome.ok


def test_a_unit_that_would_not_start_at_boot_is_enabled(world):
    world.one(A)
    world.host.enabled.clear()
    assert world.one(A).changed
    assert UNIT in world.host.enabled


def test_a_damaged_good_release_is_no_way_back(world):
    world.one(A)
    (world.root / "tiny" / "releases" / A / "endpoint.json").write_text("{")
    world.host.verdicts[B] = fail_gate()
    assert "There is no release to go back to" in world.one(B).message


def test_a_check_run_changes_nothing(world):
    outcome = world.one(A, dry_run=True)
    assert (outcome.ok, outcome.changed, outcome.started) == (True, True, True)
    assert list(world.root.iterdir()) == []
    world.one(A)
    before = world.links
    assert world.one(B, dry_run=True).started
    assert world.links == before
    assert world.host.did == []


def test_another_engine_takes_over_and_hands_back(world):
    world.one(A)
    (outcome,) = world.run(wanted(B, engine="sglang"))
    assert outcome.ok
    assert world.host.did == [f"stop {UNIT}", "start sglang@tiny.service", "prove b"]
    world.host.verdicts[A] = None
    assert world.back().ok
    assert world.host.did == ["stop sglang@tiny.service", f"start {UNIT}", "prove a"]


def test_old_releases_go_and_ways_back_stay(world):
    names = [character * 12 for character in "abcdefg"]
    for release_id in names:
        assert world.one(release_id, keep=2).ok
    assert sorted(release_ids(world.root, "tiny")) == [names[-2], names[-1]]
    outcome = world.one("h" * 12, keep=0)
    assert outcome.pruned == [names[-2]]
    assert sorted(release_ids(world.root, "tiny")) == [names[-1], "h" * 12]


def test_nothing_is_removed_when_a_release_was_refused(world):
    world.one(A, keep=1)
    world.host.verdicts[B] = fail_gate()
    world.one(B, keep=1)
    assert sorted(release_ids(world.root, "tiny")) == [A, B]


# ---- by hand ----


def test_rolling_back_by_hand_goes_to_previous_and_is_remembered(world):
    world.one(A)
    world.one(B)
    outcome = world.back()
    assert outcome.ok
    assert world.host.did == [f"start {UNIT}", "prove a"]
    assert world.links == {"current": "a", "good": "a", "previous": "b"}
    assert refusal_of(world.root, "tiny", B).reason == "slow"
    standing = world.one(B)
    assert (standing.ok, standing.changed) == (False, False)
    assert f"{B} was taken back by hand on this host at 2027-01-02T03:04:05Z: slow" in standing.message
    # A reboot or a new gate is no reason; the operator is.
    world.host.facts = dict.fromkeys(world.host.facts, "other")
    assert not world.one(B).ok
    assert world.one(B, retry_refused=True).ok


def test_rolling_back_an_unproven_release_goes_to_the_good_one(world):
    world.one(A)
    stage_release(world.root, "tiny", B, wanted(B).files, dry_run=False)
    activate_release(world.root, "tiny", B, dry_run=False)
    assert world.back().ok
    assert world.links == {"current": "a", "good": "a"}


def test_rolling_back_to_a_release_that_fails_ends_on_the_good_one(world):
    world.one(A)
    world.one(B)
    world.host.verdicts[A] = ("start", "weights are gone")
    outcome = world.back()
    assert not outcome.ok
    assert "weights are gone" in outcome.message
    assert f"The release {B} is current again" in outcome.message
    assert world.links["current"] == "b"


def test_nothing_to_go_back_to(world):
    world.one(A)
    outcome = world.back()
    assert (outcome.ok, world.host.did) == (False, [])
    assert "has no release to go back to" in outcome.message
    assert "Needed: " in outcome.message


def test_a_release_that_is_not_here(world):
    world.one(A)
    outcome = world.back("dddddddddddd")
    assert (outcome.ok, world.host.did) == (False, [])
    assert "the release dddddddddddd of tiny is not on this host" in outcome.message


def test_a_restart_proves_what_is_current(world):
    world.one(A)
    world.host.did = []
    outcome = Rollout(world.root, world.host).restart("tiny")
    assert outcome.ok
    assert world.host.did == [f"start {UNIT}", "prove a"]
    assert "has no current release" in Rollout(world.root, world.host).restart("none").message


def test_a_retired_deployment_stops_and_can_be_purged(world):
    world.one(A)
    assert retire(world.root, world.host, "tiny", purge=False, dry_run=True).changed
    assert UNIT in world.host.enabled
    assert retire(world.root, world.host, "tiny", purge=False, dry_run=False).changed
    assert (UNIT in world.host.enabled, (world.root / "tiny").is_dir()) == (False, True)
    assert retire(world.root, world.host, "tiny", purge=False, dry_run=False).changed is False
    assert retire(world.root, world.host, "tiny", purge=True, dry_run=False).changed
    assert not (world.root / "tiny").exists()


def test_marking_again_is_no_news(tmp_path):
    stage_release(tmp_path, "tiny", A, wanted(A).files, dry_run=False)
    assert mark_good(tmp_path, "tiny", A) is True
    assert mark_good(tmp_path, "tiny", A) is False


def test_an_outcome_says_what_was_there_before_and_whether_something_serves_now(world):
    first = world.one(A)
    assert (first.before, first.active, first.serving) == (None, A, True)
    world.host.verdicts[B] = fail_gate()
    back = world.one(B)
    assert (back.before, back.active, back.ok, back.serving) == (A, A, False, True)
    world.host.verdicts[A] = fail_gate("broken host")
    world.host.verdicts[C] = fail_gate()
    nothing = world.one(C)
    assert (nothing.before, nothing.ok, nothing.serving) == (A, False, False)
    assert world.one(C, dry_run=True).serving is False


# ---- what a rollout took up, for the way back of all hosts ----


def test_a_rollout_says_what_was_current_before_where_it_changed_that(world):
    assert world.one(A).replaced is None, "there was nothing"
    assert world.one(B).replaced == A
    assert world.one(B).replaced is None, "nothing changed"


def test_a_release_that_was_refused_has_replaced_nothing(world):
    world.one(A)
    world.host.verdicts[B] = ("gate", "broken")
    outcome = world.one(B)
    assert (outcome.ok, outcome.active, outcome.replaced) == (False, A, None)


def test_a_check_run_replaces_nothing(world):
    world.one(A)
    assert world.one(B, dry_run=True).replaced is None


# ---- a rollback that was killed is run again ----


def test_going_back_a_second_time_goes_no_further(world):
    world.one(A)
    world.one(B)
    world.one(C)
    assert world.back().active == B
    again = world.back()
    assert (again.ok, again.changed, again.started, again.active) == (True, False, False, B)
    assert world.host.did == ["prove b"]
    assert "is back on the release bbbbbbbbbbbb already" in again.message
    assert world.back(A).active == A


@pytest.mark.parametrize(("moment", "current"), [("start", "b"), ("prove", "b")])
def test_a_rollback_killed_in_between_goes_on_to_where_it_went(world, moment, current):
    world.one(A)
    world.one(B)
    world.one(C)
    world.host.die_at = moment
    with pytest.raises(KeyboardInterrupt):
        world.back()
    assert world.links["current"] == current
    world.host.die_at = ""
    assert world.back().active == B
    assert refusal_of(world.root, "tiny", C).stage == "operator"
    assert world.links == {"current": "b", "good": "b", "previous": "c"}


def test_a_rollback_killed_before_anything_is_activated_goes_on_too(world):
    world.one(A)
    world.one(B)
    rollout = Rollout(world.root, world.host)
    rollout._take_back("tiny", B, A, "slow")
    assert rollout.roll_back("tiny", None, "slow").active == A


def test_a_rollback_that_fails_leaves_no_word_of_it(world):
    world.one(A)
    world.one(B)
    world.host.verdicts[A] = ("start", "weights are gone")
    assert world.back().active == B
    assert refusal_of(world.root, "tiny", B) is None


def test_a_check_run_of_a_rollback_says_what_would_start(world):
    world.one(A)
    world.one(B)
    outcome = Rollout(world.root, world.host, dry_run=True).roll_back("tiny", None, "slow")
    assert (outcome.started, outcome.active, outcome.wanted) == (True, B, A)
    assert world.links["current"] == "b"


def test_an_outcome_says_how_what_was_proven_is_asked(world):
    endpoint = world.one(A).endpoint
    assert (endpoint["name"], endpoint["model"]) == ("tiny", "m")
    assert world.one(B, dry_run=True).endpoint == {}


def test_retiring_says_whether_an_engine_stops(world):
    world.one(A)
    assert retire(world.root, world.host, "tiny", purge=False, dry_run=True).stopped
    retire(world.root, world.host, "tiny", purge=False, dry_run=False)
    assert not retire(world.root, world.host, "tiny", purge=False, dry_run=False).stopped
