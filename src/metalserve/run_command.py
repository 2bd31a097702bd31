"""`metalserve run`: a playbook of this project on ansible-runner, with a line for each host."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metalserve.errors import Refusal
from metalserve.run_board import Board, Notice
from metalserve.run_view import View, choose

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_BROKEN = 3
EXIT_STOPPED = 130
# ansible-playbook: 2 a host failed, 4 one was not reached, 6 both.
_HOSTS_FAILED = (2, 4, 6)
_DESCRIPTION = """
WHAT is the name of a playbook: site, one of playbooks/, or one of playbooks/ops/. Ctrl-C lets the hosts end that are
being changed, and stops before the next ones (the next batch of the play, or the next play); a second one stops at
once, and the next run mends what that left. Exit status: 0 done, 1 a host failed or was not reached, 2 nothing was
begun, 3 Ansible itself could not go on, 130 stopped.
"""


def add_parser(subparsers: SubParsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser("run", help="run a playbook, with a line for each host", description=_DESCRIPTION)
    parser.add_argument("what", metavar="WHAT", help="for example preflight, stage, rollout, verify, rollback")
    parser.add_argument("-i", "--inventory", required=True, metavar="PATH", help="a path, or a name in inventories/")
    parser.add_argument("-l", "--limit", metavar="PATTERN", help="only these hosts")
    parser.add_argument(
        "-e", "--extra-vars", action="append", default=[], metavar="NAME=VALUE", help="as Ansible takes it"
    )
    parser.add_argument("-C", "--check", action="store_true", help="change nothing")
    parser.add_argument("-D", "--diff", action="store_true", help="show what changes")
    parser.add_argument("--json", action="store_true", help="a JSON object a line: seconds, kind, host, stage, text")
    parser.add_argument("--plain", action="store_true", help="lines, on a terminal too")
    parser.add_argument("--project", type=Path, metavar="DIR", help="where site.yml lies; without it here or above")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the playbook; gives the exit status."""
    runner_of = _ansible_runner()
    project = find_project(options.project)
    playbook = find_playbook(project, options.what)
    inventory = find_inventory(project, options.inventory)
    # What lies in it (facts, events) is of no use afterwards; the environment would be in it as well.
    with tempfile.TemporaryDirectory(prefix="metalserve-run-") as folder:
        stop = Stop()
        board, began = Board(), time.monotonic()
        with (
            choose(sys.stdout, as_json=options.json, plain=options.plain) as view,
            stop.on_interrupt(view, board, began),
        ):

            def on_event(event: dict[str, Any]) -> bool:
                stop.look(event)
                seconds = time.monotonic() - began
                view.show(board, board.take(event, seconds), seconds)
                return False

            runner = runner_of(
                private_data_dir=folder,
                project_dir=str(project),
                playbook=str(playbook),
                inventory=[str(inventory)],
                cmdline=arguments(options),
                envvars={"ANSIBLE_CONFIG": str(project / "ansible.cfg"), "ANSIBLE_NOCOLOR": "true"},
                settings={"pexpect_timeout": 0.25},
                quiet=True,
                event_handler=on_event,
                cancel_callback=lambda: stop.now,
            )
            status, code = runner.run()
            told = Notice("end", f"{options.what}: {'stopped' if status == 'canceled' else status}")
            view.show(board, [told], time.monotonic() - began)
    if status == "canceled":
        return EXIT_STOPPED
    if code == 0:
        return EXIT_DONE
    # A playbook that cannot be read ends with one of these numbers, too.
    return EXIT_FAILED if board.ended and code in _HOSTS_FAILED else EXIT_BROKEN


class Stop:
    """The way from Ctrl-C to an end between hosts.

    Attributes:
        asked: somebody wants it to end.
        now: it may end at this point.
    """

    def __init__(self) -> None:
        self.asked = False
        self.now = False

    def look(self, event: dict[str, Any]) -> None:
        """A play or a batch of one begins with reading facts: there nothing is half done."""
        if self.asked and event.get("event") == "playbook_on_play_start":
            self.now = True

    @contextmanager
    def on_interrupt(self, view: View, board: Board, began: float) -> Iterator[None]:
        """Take SIGINT and SIGTERM as the wish to end."""

        def handle(_number: int, _frame: object) -> None:
            self.now = self.asked
            self.asked = True
            text = "stopping at once" if self.now else "stopping before the next hosts; once more stops at once"
            view.show(board, [Notice("message", text)], time.monotonic() - began)

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def arguments(options: argparse.Namespace) -> str:
    """The options of ansible-playbook, as one line for ansible-runner, which splits it like a shell."""
    words = [*(["--check"] if options.check else []), *(["--diff"] if options.diff else [])]
    words += ["--limit", options.limit] if options.limit else []
    for each in options.extra_vars:
        # A file is found from where the command was typed, not from the project.
        words += ["-e", f"@{Path(each[1:]).resolve()}" if each.startswith("@") else each]
    return shlex.join(words)


def find_project(given: Path | None) -> Path:
    """The directory of site.yml: the one given, or this one or one above, or that of this very package.

    Raises:
        Refusal: there is none.
    """
    here = Path.cwd()
    places = [given] if given else [here, *here.parents, Path(__file__).resolve().parents[2]]
    for place in places:
        if (place / "site.yml").is_file() and (place / "roles").is_dir():
            return place.resolve()
    raise Refusal(
        found=f"no site.yml in {given or here}" + ("" if given else " or above"),
        needed="a checkout of this project",
        change="the directory, or --project",
    )


def find_playbook(project: Path, what: str) -> Path:
    """The playbook of a name.

    Raises:
        Refusal: there is none.
    """
    known = {"site": project / "site.yml"}
    for folder in ("playbooks/ops", "playbooks"):
        known |= {path.stem: path for path in sorted((project / folder).glob("*.yml"))}
    if what not in known:
        raise Refusal(
            found=f"no playbook {what!r} in {project}", needed=f"one of {', '.join(sorted(known))}", change="WHAT"
        )
    return known[what]


def find_inventory(project: Path, given: str) -> Path:
    """The inventory: a name in the project's inventories/, or a path from here or from the project.

    Raises:
        Refusal: there is none.
    """
    places = [project / "inventories" / given, Path(given), project / given]
    for place in places:
        if place.exists():
            return place.resolve()
    raise Refusal(
        found=f"no inventory {given!r}", needed=f"one of {', '.join(map(str, dict.fromkeys(places)))}", change="-i"
    )


def _ansible_runner() -> Any:
    try:
        from ansible_runner.interface import init_runner
    except ImportError as error:
        raise Refusal(
            found="ansible-runner is not installed",
            needed="ansible-runner, and ansible-core with the collections",
            change="pip install 'metalserve[ansible,run]', or make venv in a checkout",
        ) from error
    # ansible-playbook lies beside the Python that runs this, in the path or not.
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    return init_runner
