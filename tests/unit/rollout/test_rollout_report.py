"""What is told at the end of a rollout."""

from __future__ import annotations

from html.parser import HTMLParser

from metalserve.rollout.report import report_html, report_lines, report_rows, summary


def outcome(before, active, *, ok=True, serving=True, started=True, wanted="new", **more):
    return {
        "deployment": "tiny", "before": before, "active": active, "wanted": wanted, "ok": ok, "serving": serving,
        "started": started, "seconds": 61.26, "gate": "15 of 15",
        "capacity": {"planned": 100, "reported": 98.0}, **more,
    }  # fmt: skip


def plan(*names):
    return {"order": list(names), "hosts": {name: {"changing": [f"{name}:tiny"]} for name in names}}


SEEN = {
    "h1": {
        "outcomes": [outcome("old", "new")],
        "reached": True,
        "proofs": [{"server": "h1:tiny", "passed": True, "msg": ""}],
        "verdicts": [{"server": "h1:tiny", "ok": True, "text": "40 requests, 0 failed"}],
    },
    "h2": {"outcomes": [outcome("old", "old", ok=False)], "reached": True, "message": "tiny: refused <b>"},
    "h3": {"outcomes": [outcome("old", "old", seconds=0.0, gate="", capacity={})], "reached": False},
    "h4": {"outcomes": [outcome("old", "old")], "reached": False, "lost": True, "message": "gone"},
    "h5": {"outcomes": [outcome("old", "new", ok=False, serving=False)], "reached": True, "message": "dead"},
    "h6": {
        "outcomes": [outcome("old", "new")],
        "reached": True,
        "proofs": [{"server": "h6:tiny", "passed": False, "msg": "no"}],
        "back": [outcome("new", "old", started=True)],
        "message": "no",
    },
}
ROWS = report_rows(plan(*SEEN), SEEN)


def test_each_host_has_its_state():
    assert {row["host"]: row["state"] for row in ROWS} == {
        "h1": "changed", "h2": "back", "h3": "not begun", "h4": "lost", "h5": "failed", "h6": "back",
    }  # fmt: skip
    assert {row["host"]: row["to"] for row in ROWS} == {
        "h1": "new", "h2": "old", "h3": "old", "h4": "old", "h5": "new", "h6": "old",
    }  # fmt: skip


def test_a_host_without_a_change_is_unchanged():
    seen = {"h1": {"outcomes": [outcome("old", "old", started=False, wanted="old")], "reached": True}}
    (row,) = report_rows({"order": ["h1"], "hosts": {"h1": {"changing": []}}}, seen)
    assert (row["state"], summary([row], check=False)) == ("unchanged", "Rollout done: 1 unchanged")


def test_a_retired_deployment_is_stopped():
    seen = {"h1": {"outcomes": [outcome("old", "old", started=False, stopped=True, wanted=None)], "reached": True}}
    (row,) = report_rows(plan("h1"), seen)
    assert summary([row], check=False, action="retired") == "Retirement done: 1 stopped"


def test_the_table_is_aligned_and_leaves_out_what_nobody_has():
    lines = report_lines(ROWS)
    assert lines[0].split()[:4] == ["host", "deployment", "from", "to"]
    assert len({line.index("tiny") for line in lines[1:]}) == 1
    assert "61" in lines[1]
    assert "40 requests, 0 failed" in lines[1]
    bare = report_rows(plan("h3"), {"h3": SEEN["h3"]})
    assert report_lines(bare)[0].split() == ["host", "deployment", "from", "to", "state"]


def test_a_lost_gateway_is_no_lost_host():
    seen = {
        "h1": {**SEEN["h3"], "gateway_lost": "gw", "message": "the gateway gw"},
        "h2": {"outcomes": [outcome("old", "new")], "reached": True, "gateway_lost": "gw", "message": "the gateway gw"},
        # What was wrong with the host is told, whatever became of the gateway afterwards.
        "h3": {**SEEN["h5"], "gateway_lost": "gw"},
    }
    rows = report_rows(plan(*seen), seen)
    assert [row["state"] for row in rows] == ["gateway lost", "gateway lost", "failed"]
    assert summary(rows, check=False) == "Rollout stopped: 2 gateway lost, 1 failed"


def test_the_summary_says_that_it_stopped():
    assert summary(ROWS, check=False) == "Rollout stopped: 1 changed, 2 back, 1 not begun, 1 lost, 1 failed"
    assert summary(ROWS[:1], check=False) == "Rollout done: 1 changed"
    assert summary(ROWS[2:3], check=True) == "Check run: 1 not begun; nothing was changed"


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data.strip())


def test_the_page_stands_by_itself():
    document = {
        "when": "now",
        "who": "anna",
        "summary": "Rollout stopped",
        "seconds": 5.0,
        "batches": [["h1"], ["h2"]],
        "rows": ROWS,
    }
    page = Page()
    page.feed(report_html(document))
    assert page.links == []
    assert page.tags.count("tr") == 7
    # What a host said is text, not markup.
    assert "b" not in page.tags
    assert any("refused <b>" in text for text in page.text)
