"""Results of benchmarks as people see them."""

import copy
import html.parser
import json
import re

import pytest

from metalserve.benchmarks import comparison, page, read_result, table
from metalserve.cli import main
from metalserve.errors import Refusal
from metalserve.remote.benchmark import MEASURES, summary


def result(factor=1.0, *, release="a" * 12, prompts=64, workload="chat_short"):
    runs = [dict.fromkeys(MEASURES, (100 + step) * factor) for step in (0, 2, 1)]
    return {
        "schema": 1,
        "when": "2026-11-30T12:00:00Z",
        "deployment": "qwen",
        "release": release,
        "host": "gpu-1",
        "engine": "vllm",
        "engine_version": "0.33.0",
        "model": "m <b>",
        "beside_others": False,
        "workloads": {workload: {"asked": {"prompts": prompts}, "runs": runs, "summary": summary(runs)}},
    }


def test_medians_and_their_spread_are_shown():
    lines = table(result())
    assert lines[0].startswith("qwen on gpu-1: release aaaaaaaaaaaa, vllm 0.33.0")
    assert re.search(
        r"chat_short +generated tokens a second +101\.00 +100\.00 +102\.00$", "\n".join(lines), re.MULTILINE
    )
    assert len(lines) == 2 + len(MEASURES)


@pytest.mark.parametrize(
    ("factor", "latency", "throughput"), [(1.5, "worse", "better"), (0.5, "better", "worse"), (1.01, "same", "same")]
)
def test_a_difference_counts_when_it_is_larger_than_the_spread(factor, latency, throughput):
    lines = comparison(result(), result(factor))
    verdicts = {re.split(r" {2,}", line)[1]: line.split()[-1] for line in lines[3:]}
    assert verdicts["time to the first token, half of them, ms"] == latency
    assert verdicts["generated tokens a second"] == throughput
    assert f"{100 * (factor - 1):+.1f} %" in lines[3]


def test_what_was_asked_differently_is_not_compared():
    with pytest.raises(Refusal, match="chat_short was prompts 64 first and prompts 8 then"):
        comparison(result(), result(prompts=8))
    with pytest.raises(Refusal, match="Needed: a workload that was measured in both"):
        comparison(result(), result(workload="tool_calls"))


class Reader(html.parser.HTMLParser):
    """Notes what a page draws, and what it would load."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loads, self.open = [], [], []
        self.feed(text)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.loads += [value for name, value in attributes if name in ("src", "href")]

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_one_file_with_a_bar_for_each_median():
    new = result(2.0, release="b" * 12)
    text = page([result(), new])
    read = Reader(text)
    assert (read.loads, read.open) == ([], [])
    assert "m &lt;b&gt;" in text
    assert "m <b>" not in text
    bars = [attributes for tag, attributes in read.tags if tag == "rect" and "x" in attributes]
    assert len(bars) == 2 * len(MEASURES)
    heights = {attributes["height"] for attributes in bars}
    # The greatest run of both is the top: 204, so the medians 101 and 202 are drawn as 49.51 and 99.02.
    assert heights == {"49.51", "99.02"}
    assert text.count('class="worse"') == sum(not more for more in MEASURES.values())


def test_a_workload_that_one_result_lacks_is_left_out_of_its_bars():
    both = copy.deepcopy(result())
    both["workloads"]["tool_calls"] = both["workloads"]["chat_short"]
    bars = [tag for tag, attributes in Reader(page([both])).tags if tag == "rect" and "x" in attributes]
    assert len(bars) == 2 * len(MEASURES)


def test_the_command_shows_compares_and_draws(tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(result()), encoding="utf-8")
    new.write_text(json.dumps(result(2.0)), encoding="utf-8")
    assert main(["bench", str(old)]) == 0
    assert capsys.readouterr().out.splitlines() == table(result())
    assert main(["bench", str(old), str(new)]) == 0
    assert capsys.readouterr().out.splitlines() == comparison(result(), result(2.0))
    assert main(["bench", str(old), str(new), "--page", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page([result(), result(2.0)])
    assert main(["bench", str(old), str(old), str(old)]) == 2
    assert "3 results. Needed: at most 2" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "{", "[]", '{"schema": 2}'])
def test_a_file_that_is_no_result_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(Refusal, match="is no result of a benchmark"):
        read_result(path)
