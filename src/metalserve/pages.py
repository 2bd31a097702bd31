"""Pages of one file with plots and tables, for what was measured: bars with their spread, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jinja2

# Cells with one of these texts are coloured by it.
_VERDICTS = ("better", "worse", "failed", "refused")


@dataclass(frozen=True)
class Span:
    """A bar: its height, and the line on it from `low` to `high`."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Table:
    """Rows of texts under a header, and a sentence below."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def plot(title: str, note: str, labels: Sequence[str], series: Sequence[Sequence[Span | None]]) -> dict[str, Any]:
    """Bars by label and series, in the units of the drawing: 0 to 100 high, 24 wide each.

    Args:
        title: what is drawn.
        note: below it.
        labels: of the groups of bars.
        series: of each, one bar a label; None leaves its place empty.
    """
    spans = [span for bars in series for span in bars if span is not None]
    most = max((span.high for span in spans), default=0) or 1
    group = 24 * len(series) + 40
    return {
        "title": title,
        "note": note,
        "width": group * len(labels),
        "labels": [{"x": group * place + group / 2, "text": text} for place, text in enumerate(labels)],
        "bars": [
            {
                "x": group * place + 20 + 24 * number,
                "number": number,
                "height": 100 * span.middle / most,
                "low": 100 * span.low / most,
                "high": 100 * span.high / most,
                "text": f"{span.middle:.4g}",
            }
            for place in range(len(labels))
            for number, bars in enumerate(series)
            for span in [bars[place]]
            if span is not None
        ],
    }


def page(
    heading: str,
    texts: Sequence[str],
    names: Sequence[str],
    plots: Sequence[dict[str, Any]],
    tables: Sequence[Table] = (),
    snippet: str = "",
) -> str:
    """The page.

    Args:
        heading: its title.
        texts: paragraphs before the plots.
        names: of the series, in the order of their colours.
        plots: of `plot`.
        tables: below the plots.
        snippet: text to be copied, before the plots.
    """
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(files("metalserve").joinpath("page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        heading=heading,
        texts=texts,
        names=names,
        plots=plots,
        tables=[table for table in tables if table.rows],
        snippet=snippet,
        verdicts=_VERDICTS,
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of texts as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
