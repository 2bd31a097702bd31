"""Draws the pictures of the docs: the pages of this project, from the examples of its tests, in a real browser.

    python docs/pictures/make.py [NAME ...]        (make pictures)

Needs Debian's packages `chromium` and `fonts-dejavu-core`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "src"))

from metalserve import benchmarks  # noqa: E402 (the package of this checkout)
from metalserve.load import ladder  # noqa: E402
from metalserve.rollout.report import report_html  # noqa: E402
from metalserve.tuning import report as tuning  # noqa: E402

EXAMPLES = ROOT / "tests/unit/fixtures/pages"
MOST_BYTES = 150_000
WIDTH = 880
# The table of a rollout is wide.
WIDTHS = {"rollout": 1280}
# A picture shows the beginning of a page that is longer.
HIGHEST = 1040
# Told by the page itself, so that nothing is cut off and nothing is left empty.
_MEASURE = "<script>document.documentElement.dataset.height = document.body.scrollHeight</script>"


def example(name: str) -> dict:
    """One of the examples."""
    return json.loads((EXAMPLES / f"{name}.json").read_text(encoding="utf-8"))


PAGES: dict[str, Callable[[], str]] = {
    "benchmark": lambda: benchmarks.page([example("benchmark-old"), example("benchmark-new")]),
    "load": lambda: ladder.page(example("load")),
    "tune": lambda: tuning.page(example("tune")),
    "rollout": lambda: report_html(example("rollout")),
}


def browser() -> str:
    """The program; without one this ends with what to install."""
    found = shutil.which("chromium")
    if not found:
        sys.exit(
            "There is no program `chromium`. Needed: a browser that draws pages. Change: apt-get install "
            "--no-install-recommends chromium fonts-dejavu-core"
        )
    return found


def run(program: str, *words: str) -> str:
    """What the browser prints."""
    argv = [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-lcd-text", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        sys.exit(f"chromium ended with status {done.returncode}: {done.stderr.strip()[-800:]}")
    return done.stdout


def draw(program: str, name: str, folder: Path) -> Path:
    """Draw one page as high as it is."""
    page = folder / f"{name}.html"
    page.write_text(PAGES[name]() + _MEASURE, encoding="utf-8")
    width = WIDTHS.get(name, WIDTH)
    text = run(program, f"--window-size={width},800", "--dump-dom", page.as_uri())
    told = re.search(r'data-height="(\d+)"', text)
    if told is None:
        sys.exit(f"{page} does not say how high it is.")
    picture = HERE / f"{name}.png"
    # The margins of the body are not in it.
    run(program, f"--window-size={width},{min(HIGHEST, int(told[1]) + 64)}", f"--screenshot={picture}", page.as_uri())
    if picture.stat().st_size > MOST_BYTES:
        seen = f"{picture} has {picture.stat().st_size} bytes"
        sys.exit(f"{seen}. Needed: at most {MOST_BYTES}. Change: HIGHEST, or a smaller example.")
    return picture


def main() -> None:
    """Draw the pages that are named, or all."""
    program = browser()
    with tempfile.TemporaryDirectory(prefix="metalserve-pictures-") as folder:
        for name in sys.argv[1:] or PAGES:
            picture = draw(program, name, Path(folder))
            print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size} bytes")


if __name__ == "__main__":
    main()
