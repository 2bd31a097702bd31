"""The docs' pictures: what they are drawn from can be drawn, they are there, and they are small."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "docs/pictures/make.py"
# Says how high a page is, and leaves a picture of so many bytes.
PLAYED = """#!/bin/sh
for word in "$@"; do
  case "$word" in
    --screenshot=*) head -c "$PLAYED_BYTES" /dev/zero > "${word#--screenshot=}"; echo "$@" >> "$PLAYED_CALLS" ;;
    --dump-dom) echo "$PLAYED_DOM" ;;
  esac
done
exit "${PLAYED_STATUS:-0}"
"""


@pytest.fixture
def make():
    spec = importlib.util.spec_from_file_location("make_pictures", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def draw(tmp_path, make, monkeypatch):
    """Draw the page `load` with a browser that is played; the words of its call."""
    monkeypatch.setattr(make, "HERE", tmp_path)
    (tmp_path / "chromium").write_text(PLAYED, encoding="utf-8")
    (tmp_path / "chromium").chmod(0o755)
    monkeypatch.setenv("PLAYED_CALLS", str(tmp_path / "calls"))

    def run(dom='<html data-height="700">', size="1000", status="0"):
        for name, value in (("DOM", dom), ("BYTES", size), ("STATUS", status)):
            monkeypatch.setenv(f"PLAYED_{name}", value)
        make.draw(str(tmp_path / "chromium"), "load", tmp_path)
        return (tmp_path / "calls").read_text(encoding="utf-8")

    return run


def test_each_page_has_its_picture_and_the_docs_show_it(make):
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    for name, page in make.PAGES.items():
        assert page().rstrip().endswith("</html>")
        picture = ROOT / f"docs/pictures/{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size <= make.MOST_BYTES
        assert f"](pictures/{name}.png)" in text
    assert set(re.findall(r"\]\(pictures/([a-z]+)\.png\)", text)) == set(make.PAGES)


def test_a_picture_is_as_high_as_its_page_up_to_a_limit(draw):
    assert "--window-size=880,764 " in draw()
    assert "--window-size=880,1040 " in draw('<html data-height="9000">')


@pytest.mark.parametrize(
    ("played", "said"),
    [
        ({"dom": "<html>"}, "does not say how high it is"),
        ({"size": "200000"}, "200000 bytes. Needed: at most 150000. Change: HIGHEST"),
        ({"status": "3"}, "chromium ended with status 3"),
    ],
)
def test_a_picture_that_does_not_come_out_is_said(draw, played, said):
    with pytest.raises(SystemExit, match=re.escape(said)):
        draw(**played)


def test_without_a_browser_it_names_the_packages(tmp_path):
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "Change: apt-get install --no-install-recommends chromium fonts-dejavu-core" in done.stderr
