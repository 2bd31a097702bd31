"""A whole tuning with the host played: it always ends where it began, and says what it found."""

import html
import json
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from played import BEST, SPACE, Engine

from metalserve.errors import MetalserveError, Refusal
from metalserve.tuning import report
from metalserve.tuning.drive import Tuning, choose_item, write_report
from metalserve.tuning.search import Budget, CandidateFailedError

ITEM = {"name": "qwen", "engine": "vllm", "model": "m", "port": 8000}
TOLD = {"when": "2027-01-02T03:04:05Z", "host": "gpu-1"}


class PlayedHost:
    """Answers like the module serving_trial; `answers` replaces the answer to a state."""

    def __init__(self, engine, **answers):
        self.engine, self.answers, self.calls, self.releases = engine, answers, [], {}

    def plan(self, changed):
        release = self.engine.plan(changed)
        self.releases[release["release_id"]] = release
        return release

    def __call__(self, arguments):
        self.calls.append(arguments["state"])
        given = self.answers.get(arguments["state"])
        if given is not None:
            answer = given(self, arguments) if callable(given) else given
            if answer is not None:
                return answer
        if arguments["state"] == "begun":
            return {}
        if arguments["state"] == "tried":
            assert set(arguments["release"]) == {"release_id", "files"}
            try:
                found = self.engine.measure(self.releases[arguments["release"]["release_id"]])
            except CandidateFailedError as error:
                stage, _, reason = str(error).partition(": ")
                return {"ok": False, "stage": stage, "reason": reason, "result": None}
            return {"ok": True, "result": {"workloads": {"chat_short": found}}}
        result = None
        if arguments["measure"]:
            result = {"workloads": {"chat_short": self.engine.result(self.engine.measured[0])}}
        return {"ok": True, "release": "former", "result": result, "reason": ""}


def tune(host, item=ITEM, budget=None, **changes):
    given = {"objective": "throughput", "workload": "chat_short", "space": SPACE, **changes}
    tuning = Tuning(item, host.plan, budget=budget or Budget(100, 1e9), **given)
    said = []
    document, broken = tuning.run(host, force=False, clock=host.engine.clock, say=said.append, told=TOLD)
    return document, broken, said


def test_the_best_sizes_are_found_and_the_former_release_comes_back():
    host = PlayedHost(Engine())
    tuned, broken, said = tune(host)
    assert (broken, host.calls[0], host.calls[-1]) == ("", "begun", "ended")
    assert set(host.calls[1:-1]) == {"tried"}
    assert said[0].startswith("present: median_ttft_ms ")
    assert said[-1] == "former is back, proven by its gate"
    (chosen,) = [each for each in tuned["candidates"] if each["chosen"]]
    assert chosen["setting"] == BEST
    # Only what differs is written; the rest stays the planner's.
    assert yaml.safe_load(tuned["snippet"]) == [
        {**ITEM, "max_batched_tokens": 8192, "max_sequences": 128, "kv_cache_dtype": "fp8"}
    ]
    assert "generated tokens a second: 790.00 -> 1000.00 (+26.6 %)." in tuned["judged"][0]
    assert tuned["judged"][-1] == "Ended, because a whole round brought nothing better."
    json.dumps(tuned)


def test_a_candidate_must_beat_the_present_release_at_the_end_too():
    def drifted(host, arguments):
        host.engine.rate = lambda setting: 1010.0

    tuned, _, _ = tune(PlayedHost(Engine(), ended=drifted))
    (chosen,) = [each for each in tuned["candidates"] if each["chosen"]]
    assert chosen["name"] == "present"
    assert yaml.safe_load(tuned["snippet"]) == [ITEM]
    assert tuned["judged"][0].startswith("The present sizes stay: max_batched_tokens 8192")
    assert "The host drifted: the present release itself changed by +27.8 %" in tuned["judged"][1]


def test_nothing_better_is_said():
    tuned, _, _ = tune(PlayedHost(Engine(lambda setting: 1000.0)), space={"max_sequences": [64]})
    assert tuned["judged"][0].startswith("Nothing is better than the present sizes for throughput")


def test_a_host_that_fails_meanwhile_still_gets_its_release_back():
    def gone(host, arguments):
        return {"failed": True, "msg": "Docker does not answer"} if len(host.engine.measured) == 3 else None

    host = PlayedHost(Engine(), tried=gone)
    tuned, broken, _ = tune(host)
    assert broken == "Docker does not answer"
    assert host.calls[-1] == "ended"
    assert "it was broken off: Docker does not answer" in tuned["ended"]
    assert "The present release was not measured again" in tuned["judged"][1]
    assert len(tuned["candidates"]) == 3


def test_a_present_release_that_cannot_be_measured_ends_it_without_a_document():
    host = PlayedHost(Engine(fail=lambda setting: True))
    tuned, broken, _ = tune(host)
    assert tuned is None
    assert "the present release cannot be measured: start: out of memory" in broken
    assert host.calls == ["begun", "tried", "ended"]


def test_whatever_breaks_here_ends_the_trial_there():
    def interrupted(host, arguments):
        raise KeyboardInterrupt

    host = PlayedHost(Engine(), tried=interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(host)
    assert host.calls == ["begun", "tried", "ended"]


def test_a_host_that_does_not_come_back_is_said_with_the_way_out_and_the_evidence_is_kept():
    tuned, broken, _ = tune(PlayedHost(Engine(), ended={"failed": True, "msg": "unit failed"}))
    assert broken.startswith("The host has not come back to the release former: unit failed")
    assert broken.endswith("playbooks/rollout.yml: either brings the former release back.")
    assert any(each["chosen"] for each in tuned["candidates"])


def test_what_another_run_has_made_current_is_said_and_not_called_back():
    other = {"release": "other", "ok": False, "reason": "another run has made other current", "result": None}
    _, broken, said = tune(PlayedHost(Engine(), tried={"failed": True, "msg": "no trial"}, ended=other))
    assert broken == "no trial"
    assert said == ["another run has made other current"]


def test_production_traffic_is_left_alone():
    host = PlayedHost(Engine(), begun={"failed": True, "msg": "qwen works on 3 request(s) of others"})
    with pytest.raises(MetalserveError, match=r"works on 3 request\(s\) of others"):
        tune(host)
    assert host.calls == ["begun"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": "speed"}, "tune_objective 'speed'. Needed: one of first_token, between_tokens, throughput"),
        ({"workload": "chess"}, "tune_workload 'chess'. Needed: one of chat_short"),
        ({"budget": Budget(0, 60)}, "a budget of 0 candidates and 1 minutes. Needed: at least one candidate"),
        ({"budget": Budget(1, 0)}, "Change: tune_candidates, tune_minutes"),
        ({"item": {**ITEM, "engine": "sglang"}}, "served by sglang, whose image has no `vllm bench serve`"),
        ({"space": {"port": [1]}}, "tune_space with 'port'"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_begins(changes, said):
    host = PlayedHost(Engine())
    with pytest.raises(Refusal) as refused:
        tune(host, **changes)
    assert said in str(refused.value)
    assert host.calls == []


def test_a_deployment_that_is_not_there_is_refused():
    assert choose_item([ITEM], "qwen", {"gpus": [{}]}) == (ITEM, ["qwen"])
    assert choose_item([ITEM], "qwen", {"gpus": []}) == (ITEM, [])
    with pytest.raises(Refusal, match=r"no deployment 'x' on this host\. Needed: one of qwen\. Change: -e serving"):
        choose_item([ITEM], "x", {})


def test_a_check_run_tells_what_would_be_tried():
    host = PlayedHost(Engine(refuse=lambda setting: setting["max_batched_tokens"] > 8192))
    tuning = Tuning(
        {**ITEM, "eager": "first_start"},
        host.plan,
        objective="throughput",
        workload="chat_short",
        space=SPACE,
        budget=Budget(5, 60),
    )
    lines = tuning.preview()
    assert len(lines) == 1 + 4 + 3 + 1 + 1
    assert "max_batched_tokens 16384: too much. Needed: less. Change: max_batched_tokens." in lines
    assert any(line.startswith("eager true: ") for line in lines)
    assert host.engine.measured == []


def test_the_evidence_is_a_table_a_page_and_two_files(tmp_path):
    tuned, _, _ = tune(PlayedHost(Engine(refuse=lambda setting: setting["max_batched_tokens"] == 16384)))
    lines = report.lines(tuned)
    assert lines[0] == "qwen on gpu-1, 2027-01-02T03:04:05Z: throughput of chat_short (prompts 64)"
    assert lines[2].split()[:3] == ["0", "present", "790.00"]
    assert "  max_batched_tokens 8192, max_sequences 128, kv_cache_dtype fp8  " in next(
        line for line in lines if " chosen " in line
    )
    assert "max_batched_tokens 16384: refused: too much. Needed: less. Change: max_batched_tokens." in lines
    assert lines[-1] == "  kv_cache_dtype: fp8"
    files = write_report(str(tmp_path / "new"), tuned)
    assert [Path(name).name for name in files] == [
        "tune-gpu-1-qwen-2027-01-02T030405Z.json",
        "tune-gpu-1-qwen-2027-01-02T030405Z.html",
    ]
    text = Path(files[1]).read_text(encoding="utf-8")
    assert html.escape(tuned["snippet"], quote=False) in text
    measured = [each for each in tuned["candidates"] if each["state"] == "measured"]
    assert text.count('<rect class="n0" x=') == 7 * len(measured)
    assert json.loads(Path(files[0]).read_text(encoding="utf-8")) == json.loads(json.dumps(tuned))
    assert write_report("", tuned) == []
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(Refusal, match=r"cannot be written to .* Change: tune_results_dir"):
        write_report(str(tmp_path / "file"), tuned)
