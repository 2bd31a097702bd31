"""The lock of a rollout: who has it, until when, and how it is lost."""

from __future__ import annotations

import json

import pytest

from metalserve.remote.rollout_lock import RolloutLockedError, hold, release

ANNA = {"token": "a", "who": "anna on desk", "process": "7", "what": "changes 2 of 3 hosts"}
BERT = {"token": "b", "who": "bert on cron", "process": "8", "what": "changes 1 of 3 hosts"}


def test_one_rollout_at_a_time_and_the_other_is_told_who(tmp_path):
    assert hold(tmp_path, ANNA, 60, now=1000) == {}
    with pytest.raises(RolloutLockedError) as refused:
        hold(tmp_path, BERT, 60, now=1059)
    text = str(refused.value)
    assert "anna on desk, process 7, since 1970-01-01 00:16:40 UTC, changes 2 of 3 hosts" in text
    assert "ends by itself at 1970-01-01 00:17:40 UTC, or is taken with -e rollout_take_lock=true" in text
    assert refused.value.holder["token"] == "a"


def test_it_is_renewed_and_keeps_its_beginning(tmp_path):
    hold(tmp_path, ANNA, 60, now=1000)
    hold(tmp_path, ANNA, 60, now=1050)
    record = json.loads((tmp_path / "rollout.json").read_text())
    assert (record["since"], record["until"]) == (1000, 1110)


def test_a_lease_that_is_over_is_nobodys(tmp_path):
    hold(tmp_path, ANNA, 60, now=1000)
    assert hold(tmp_path, BERT, 60, now=1060)["who"] == "anna on desk"
    # The first one notices at its next step.
    with pytest.raises(RolloutLockedError, match="bert"):
        hold(tmp_path, ANNA, 60, now=1061)


@pytest.mark.parametrize("how", [{"take": True}, {"take_from": "a"}])
def test_it_is_taken_when_told(tmp_path, how):
    hold(tmp_path, ANNA, 60, now=1000)
    assert hold(tmp_path, BERT, 60, now=1001, **how)["token"] == "a"


def test_it_is_not_taken_from_somebody_else_than_the_dead_one(tmp_path):
    hold(tmp_path, ANNA, 60, now=1000)
    with pytest.raises(RolloutLockedError):
        hold(tmp_path, BERT, 60, now=1001, take_from="c")


def test_only_its_holder_gives_it_back(tmp_path):
    assert not release(tmp_path, "a")
    hold(tmp_path, ANNA, 60)
    assert not release(tmp_path, "b")
    assert release(tmp_path, "a")
    assert hold(tmp_path, BERT, 60) == {}


def test_a_record_that_cannot_be_read_locks_nobody_out(tmp_path):
    (tmp_path / "rollout.json").write_text("{")
    assert hold(tmp_path, ANNA, 60) == {}
