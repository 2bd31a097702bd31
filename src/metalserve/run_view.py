"""How a run is shown: a live table on a terminal, lines elsewhere, or a JSON object a line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from metalserve.run_board import DONE, FAILED, RUNNING, UNREACHABLE, Board, Notice

if TYPE_CHECKING:
    from rich.table import Table

# Steps are told in the table; a line for each would be all that one sees.
_QUIET_ON_A_TERMINAL = ("step", "changed", "progress", "gate")
_STYLES = {DONE: "green", FAILED: "bold red", UNREACHABLE: "bold red", RUNNING: "cyan"}
_ORDER = {FAILED: 0, UNREACHABLE: 0, RUNNING: 1}


class View(Protocol):
    """Something that shows a run."""

    def __enter__(self) -> View: ...

    def __exit__(self, *_error: object) -> None: ...

    def show(self, board: Board, notices: Sequence[Notice], seconds: float) -> None:
        """Tell what is new; `seconds` are those of the run."""


class PlainView:
    """A line for whatever happens; what has several lines is indented."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_error: object) -> None:
        self._out.flush()

    def show(self, board: Board, notices: Sequence[Notice], seconds: float) -> None:
        """Write the lines."""
        for notice in notices:
            self._out.write(f"{_clock(seconds)} {_line(notice)}\n")
        self._out.flush()


class JsonView(PlainView):
    """An object a line: `seconds`, `kind`, and as far as they are known `host`, `stage`, `text`."""

    def show(self, board: Board, notices: Sequence[Notice], seconds: float) -> None:
        """Write the objects."""
        for notice in notices:
            self._out.write(json.dumps({"seconds": round(seconds, 1), **notice.as_dict()}, ensure_ascii=False) + "\n")
        self._out.flush()


class LiveView:
    """A table that stays at the bottom of a terminal, with a row a host; messages and failures pass above it."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.live import Live

        self._clock = clock
        self._board, self._began = Board(), clock()
        self._console = Console(file=out)
        # Drawn by the clock: while an engine starts there is no event for minutes.
        self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=4)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._live.stop()

    def show(self, board: Board, notices: Sequence[Notice], seconds: float) -> None:
        """Print what passes above the table, and draw the table again."""
        self._board, self._began = board, self._clock() - seconds
        for notice in notices:
            if notice.kind not in _QUIET_ON_A_TERMINAL:
                # Text of hosts: nothing in it is markup.
                self._console.print(_line(notice), markup=False, highlight=False)

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, expand=True)
        for heading, ratio in (("host", 2), ("state", 1), ("stage", 2), ("step", 4), ("for", 1), ("weights, gate", 4)):
            table.add_column(heading, ratio=ratio, no_wrap=True, overflow="ellipsis")
        seconds = self._clock() - self._began
        hosts = sorted(self._board.hosts.items(), key=lambda item: _ORDER.get(item[1].state, 2))
        room = max(3, self._console.height - 6)
        for name, line in hosts[:room]:
            waited = _clock(seconds - line.since) if line.state == RUNNING else ""
            row = (name, line.state, line.stage, line.step, waited, line.gate or line.progress)
            table.add_row(*(Text(cell, style=_STYLES.get(line.state, "")) for cell in row))
        if len(hosts) > room:
            table.add_row(f"and {len(hosts) - room} more")
        return table


def choose(out: TextIO, *, as_json: bool, plain: bool) -> View:
    """The view for an output: JSON where it is asked for, live on a terminal if `rich` is installed, else lines."""
    if as_json:
        return JsonView(out)
    if plain or not out.isatty():
        return PlainView(out)
    try:
        return LiveView(out)
    except ImportError:
        out.write("Lines only: the live table needs rich (pip install 'metalserve[run]').\n")
        return PlainView(out)


def _line(notice: Notice) -> str:
    if notice.kind == "stage":
        return f"== {notice.text}"
    if notice.kind == "step":
        return f"-- {notice.text}"
    word = f"{notice.kind.upper()}: " if notice.kind in ("failed", "unreachable") else ""
    word = f"{notice.kind}: " if notice.kind in ("changed", "gate") else word
    text = f"{notice.host}: {word}{notice.text}" if notice.host else notice.text
    return text.rstrip().replace("\n", "\n         ")


def _clock(seconds: float) -> str:
    whole: Any = int(max(0.0, seconds))
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"
