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


def plot(
    title: str, note: str, labels: Sequence[str], series: Sequence[Sequence[Span | None]], *, apart: bool = False
) -> dict[str, Any]:
    """Bars by label and series, in the units of the drawing: 0 to 100 high, 20 wide and 4 apart.

    Args:
        title: what is drawn.
        note: below it.
        labels: of the groups of bars.
        series: of each, one bar a label; None leaves its place empty.
        apart: each label has a scale of its own, where only the bars at one label are to be compared.
    """
    tops = [
        max((span.high for bars in series for span in [bars[place]] if span is not None), default=0)
        for place in range(len(labels))
    ]
    most = [(top if apart else max(tops)) or 1 for top in tops]
    bars_wide = 24 * len(series) - 4
    # A letter is about 5 wide.
    group = max(bars_wide + 16, 5 * max((len(text) for text in labels), default=0) + 12)
    return {
        "title": title,
        "note": note,
        "width": group * len(labels),
        "labels": [{"x": group * place + group / 2, "text": text} for place, text in enumerate(labels)],
        "bars": [
            {
                "x": group * place + (group - bars_wide) / 2 + 24 * number,
                "number": number,
                "height": 100 * span.middle / most[place],
                "low": 100 * span.low / most[place],
                "high": 100 * span.high / most[place],
                # Wider texts would touch those of the next bar.
                "text": f"{span.middle:.0f}" if span.middle >= 100 else f"{span.middle:.3g}",
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
