"""The search against an engine with a known optimum, with noise, refusals, failures and budgets."""

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from played import BEST, PRESENT, SPACE, Engine, throughput

from metalserve.errors import Refusal
from metalserve.tuning.search import Budget, Search, StopSearchError, read_space

PLENTY = Budget(100, 1e9)


def search(engine, budget=PLENTY, space=SPACE, measure="output_throughput", say=lambda tried: None):
    return Search(
        PRESENT,
        read_space(space, PRESENT),
        measure,
        plan=engine.plan,
        measure=engine.measure,
        clock=engine.clock,
        say=say,
    ).run(budget)


def test_it_finds_the_optimum_and_measures_a_fraction_of_the_space():
    engine = Engine()
    found = search(engine)
    assert found.best.setting == BEST
    assert found.ended == "a whole round brought nothing better"
    everything = len(list(itertools.product(*SPACE.values())))
    # Two rounds: one finds it, the next finds nothing better around it.
    assert len(engine.measured) < everything / 3
    # Each of them once.
    assert len({repr(setting) for setting in engine.measured}) == len(engine.measured)


@pytest.mark.parametrize("measure", ["median_ttft_ms", "median_itl_ms"])
def test_of_times_less_is_better(measure):
    assert search(Engine(), measure=measure).best.setting == BEST


@pytest.mark.parametrize("seed", range(20))
def test_noise_within_the_spread_moves_nothing_and_real_gains_are_found(seed):
    flat = search(Engine(lambda setting: 1000.0, noise=0.0), space={"max_sequences": [64, 128, 512]})
    assert flat.best.name == "present"
    # 2 % of noise beside steps of 4 to 6 %.
    found = search(Engine(noise=0.02, seed=seed))
    assert throughput(found.best.setting) >= throughput(BEST) - 60
    assert found.best.setting["eager"] is False


def test_what_the_planner_refuses_is_never_started():
    engine = Engine(refuse=lambda setting: setting["max_batched_tokens"] > 4096)
    found = search(engine)
    assert all(setting["max_batched_tokens"] <= 4096 for setting in engine.measured)
    refused = [each for each in found.tried if each.state == "refused"]
    assert refused
    assert refused[0].reason == "too much. Needed: less. Change: max_batched_tokens."
    assert found.best.setting == {**BEST, "max_batched_tokens": 4096}


def test_a_candidate_that_fails_is_noted_and_the_search_goes_on():
    engine = Engine(fail=lambda setting: setting["max_batched_tokens"] == 8192)
    found = search(engine)
    assert {each.reason for each in found.tried if each.state == "failed"} == {"start: out of memory"}
    assert found.best.setting["max_batched_tokens"] in (4096, 16384)
    assert found.best.state == "measured"
    # It is the value's doing, so it costs one start and not one a round.
    assert len([each for each in found.tried if each.state == "failed"]) == 1


def test_two_settings_of_one_release_are_started_once():
    # On a CPU graphs are off whatever is asked.
    engine = Engine(lambda setting: 1000.0, alike=lambda setting: {**setting, "eager": True})
    found = search(engine, space={"eager": [False, True]})
    assert len(engine.measured) == 1
    assert [(each.name, each.state, each.reason) for each in found.tried[1:]] == [
        ("eager true", "same", "the same release as present")
    ]


def test_the_budget_of_candidates_counts_what_was_started():
    engine = Engine(refuse=lambda setting: setting["max_batched_tokens"] == 4096)
    found = search(engine, Budget(3, 1e9))
    assert len(engine.measured) == 1 + 3
    assert found.ended == "the budget of 3 candidates is spent"


def test_no_candidate_is_begun_that_would_not_fit_into_the_time():
    engine = Engine(seconds=100)
    found = search(engine, Budget(100, 350))
    assert engine.now == 300
    assert found.ended == "another candidate would not fit into the 5.83333 minutes"


def test_near_values_come_first():
    engine = Engine()
    search(engine, Budget(2, 1e9))
    assert [setting["max_batched_tokens"] for setting in engine.measured] == [2048, 1024, 4096]


def test_without_the_present_release_there_is_nothing_to_compare_with():
    with pytest.raises(Refusal, match=r"the present release cannot be measured: start: out of memory\. Needed"):
        search(Engine(fail=lambda setting: setting == PRESENT))


def test_a_host_that_cannot_go_on_leaves_what_was_measured():
    engine = Engine()
    whole = engine.measure

    def measure(release):
        if len(engine.measured) == 3:
            raise StopSearchError("the host is gone")
        return whole(release)

    engine.measure = measure
    stopped = Search(PRESENT, SPACE, "output_throughput", plan=engine.plan, measure=engine.measure, clock=engine.clock)
    with pytest.raises(StopSearchError):
        stopped.run(PLENTY)
    assert [each.state for each in stopped.tried] == ["measured"] * 3
    assert stopped.best.name == "max_batched_tokens 4096"


def test_each_candidate_is_told_when_it_is_done():
    told = []
    search(Engine(), Budget(2, 1e9), say=told.append)
    assert [(each.name, each.verdict) for each in told] == [
        ("present", ""),
        ("max_batched_tokens 1024", "worse"),
        ("max_batched_tokens 4096", "better"),
    ]


def test_what_is_tried_without_a_word_is_around_the_present_values():
    assert read_space({}, PRESENT) == {
        "max_batched_tokens": [2048, 1024, 4096, 8192],
        "max_sequences": [256, 128, 64, 512],
        "kv_cache_dtype": ["auto", "fp8"],
        "eager": [False, True],
    }
    # Only what is named, and the present value always.
    assert read_space({"max_sequences": [32]}, PRESENT) == {"max_sequences": [256, 32]}
    # From `-e` it comes as a text.
    assert read_space('{"max_sequences": [32]}', PRESENT) == {"max_sequences": [256, 32]}
    assert read_space("", PRESENT) == read_space({}, PRESENT)


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({"gpus": [1]}, "tune_space with 'gpus'. Needed: of max_batched_tokens, max_sequences"),
        ({"max_sequences": "64"}, "tune_space.max_sequences '64'. Needed: a list of values"),
        ({"eager": []}, "a list of values"),
        ("[64]", "tune_space '[64]'. Needed: fields with lists of values"),
        ("{", "tune_space '{'. Needed: fields with lists of values"),
    ],
)
def test_another_space_is_refused(space, said):
    with pytest.raises(Refusal) as refused:
        read_space(space, PRESENT)
    assert said in str(refused.value)
