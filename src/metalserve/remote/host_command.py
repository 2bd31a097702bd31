"""`metalserve-host`: what a person needs on a host when there is no time for a playbook. Standard library only."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from .benchmark import WORKLOADS, BenchmarkError, benchmark
from .benchmark import Settings as BenchmarkSettings
from .diagnose import diagnose
from .engine_start import prepare_start
from .host_facts import collect
from .host_lock import HostBusyError, host_lock
from .host_metrics import SETTINGS, write_metrics
from .release_list import UnknownReleaseError, diff_directories, find_release, list_releases, release_table
from .releases import deployment_names
from .rollout import Rollout
from .rollout_host import HostError, LocalHost
from .rollout_types import Outcome
from .watchdog import PROGRESS, Settings, Watchdog

DEFAULT_ROOT = Path("/etc/metalserve")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run one command. 0: done and good; 1: the deployment is not as it should be; 2: it could not be done."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (BenchmarkError, HostBusyError, HostError, UnknownReleaseError, OSError) as error:
        print(f"metalserve-host: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="metalserve-host", description="Releases and engines of this host.")
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT, help="where deployments keep their releases")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    listed = commands.add_parser("releases", help="list the releases and what is known about them")
    listed.add_argument("deployment", nargs="*", help="only these")
    listed.add_argument("--json", action="store_true", help="as JSON")
    listed.set_defaults(run=_releases)

    compared = commands.add_parser("diff", help="what changes from one release to another")
    compared.add_argument("old", help="DEPLOYMENT/ID, DEPLOYMENT/previous, or an id")
    compared.add_argument("new", help="the same")
    compared.set_defaults(run=_diff)

    diagnosed = commands.add_parser("diagnose", help="why a deployment does not serve")
    diagnosed.add_argument("deployment", nargs="*", help="only these")
    diagnosed.add_argument("--json", action="store_true", help="as JSON")
    diagnosed.set_defaults(run=_diagnose)

    back = commands.add_parser("rollback", help="make the last good release current and prove it by the gate")
    back.add_argument("deployment")
    back.add_argument("release", nargs="?", help="its id; without it the last good one before the current one")
    back.add_argument("--reason", default="rolled back by hand", help="for the record")
    back.set_defaults(run=_rollback)

    again = commands.add_parser("restart", help="start the current release again and prove it by the gate")
    again.add_argument("deployment")
    again.set_defaults(run=_restart)
    prepared = commands.add_parser("prepare", help="what a unit does before its engine starts (called by systemd)")
    prepared.add_argument("deployment")
    prepared.add_argument("--seconds", type=float, default=120.0, help="limit of the wait for GPU memory")
    prepared.add_argument("--runtime", type=Path, required=True, help="directory that goes with the unit")
    prepared.set_defaults(run=_prepare)

    watched = commands.add_parser("watch", help="start engines again that live but produce nothing (called by systemd)")
    watched.add_argument("--stall", type=float, default=300.0, help="seconds without a token while requests wait")
    watched.add_argument("--budget", type=int, default=2, help="restarts of a deployment within an hour")
    watched.add_argument("--pause", type=float, default=15.0, help="seconds between two looks")
    watched.add_argument("--start", type=float, default=1800.0, help="seconds of a start, beside reading the weights")
    watched.add_argument(
        "--read", type=float, default=200e6, help="bytes per second at which weights are read at worst"
    )
    watched.add_argument("--follow", type=Path, action="append", default=[], help="end when this file changes")
    watched.set_defaults(run=_watch)

    read = commands.add_parser("logs", help="what the engine of a deployment, and the watchdog about it, have said")
    read.add_argument("deployment")
    read.add_argument("--lines", type=int, default=200, help="how many of the last ones")
    read.add_argument("--follow", action="store_true", help="go on as more come")
    read.add_argument("--errors", action="store_true", help="only what looks like an error")
    read.set_defaults(run=_logs)

    measured = commands.add_parser("bench", help="measure a deployment with vllm bench serve out of its own image")
    measured.add_argument("deployment")
    measured.add_argument("--workload", action="append", choices=list(WORKLOADS), help="only this; may be given again")
    measured.add_argument("--runs", type=int, default=3, help="runs of each, after one for warming up")
    measured.add_argument("--prompts", type=int, help="requests of a run, instead of the workload's own")
    measured.add_argument("--concurrency", type=int, help="requests at a time, instead of the workload's own")
    measured.add_argument("--force", action="store_true", help="also while others use the deployment")
    measured.set_defaults(run=_bench)

    told = commands.add_parser("metrics", help="write what is known here for Prometheus (called by systemd)")
    told.add_argument(
        "--output", type=Path, required=True, help="the file that node exporter's textfile collector reads"
    )
    told.add_argument("--settings", type=Path, default=SETTINGS, help="what the last run of the playbook wrote down")
    told.set_defaults(run=_metrics)
    for command in (back, again):
        command.add_argument("--ready-timeout", type=float, default=1800.0, help="seconds for a unit that lives")
    return parser


def _print(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _releases(options: argparse.Namespace) -> int:
    rows = list_releases(options.root, options.deployment)
    _print([json.dumps(rows, ensure_ascii=False, indent=2)] if options.json else release_table(rows))
    return 0


def _diff(options: argparse.Namespace) -> int:
    directories = [find_release(options.root, name) for name in (options.old, options.new)]
    _print(diff_directories(*directories))
    return 0


def _diagnose(options: argparse.Namespace) -> int:
    names = options.deployment or deployment_names(options.root)
    found = [diagnose(options.root, name) for name in names]
    if options.json:
        _print([json.dumps(found, ensure_ascii=False, indent=2)])
    else:
        _print([line for each in found for line in each["lines"]] or ["no deployment has releases here"])
    return 0 if all(each["healthy"] for each in found) else 1


def _rollback(options: argparse.Namespace) -> int:
    with host_lock(options.root, _holder(), 10):
        return _tell(_rollout(options).roll_back(options.deployment, options.release, options.reason))


def _restart(options: argparse.Namespace) -> int:
    with host_lock(options.root, _holder(), 10):
        return _tell(_rollout(options).restart(options.deployment))


def _prepare(options: argparse.Namespace) -> int:
    current = options.root / options.deployment / "current"
    try:
        ready, sentences = prepare_start(current, options.runtime, options.seconds)
    except ValueError as error:
        ready, sentences = False, [f"{error}. Needed: the key on one line. Change: api_key_file of the deployment."]
    _print([f"{options.deployment}: {sentence}" for sentence in sentences])
    return 0 if ready else 1


def _watch(options: argparse.Namespace) -> int:
    def say(sentence: str) -> None:
        _print([sentence])
        sys.stdout.flush()

    settings = Settings(
        options.stall,
        options.budget,
        pause_seconds=options.pause,
        ready_timeout_seconds=options.start,
        slowest_read_bytes_per_second=options.read,
    )
    Watchdog(options.root, settings, say=say).run(options.follow)
    return 0


def _metrics(options: argparse.Namespace) -> int:
    write_metrics(options.root, options.output, options.settings, collect)
    return 0


def _logs(options: argparse.Namespace) -> int:
    name = options.deployment
    if name not in deployment_names(options.root):
        known = ", ".join(deployment_names(options.root)) or "none"
        raise UnknownReleaseError(f"no deployment is called '{name}' here. Needed: one of {known}. Change: the name.")
    argv = ["journalctl", "--no-pager", "--output=short-iso", f"--lines={options.lines}"]
    # Of every engine that has served it.
    argv += [f"SYSLOG_IDENTIFIER={engine}-{name}" for engine in PROGRESS]
    argv += ["SYSLOG_IDENTIFIER=metalserve-watchdog"]
    argv += ["--follow"] if options.follow else []
    argv += ["--grep=error|exception|traceback|fatal|killed|out of memory|xid|watchdog"] if options.errors else []
    sys.stdout.flush()
    return subprocess.run(argv, check=False).returncode


def _bench(options: argparse.Namespace) -> int:
    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    settings = BenchmarkSettings(
        options.workload or tuple(WORKLOADS), options.runs, options.prompts, options.concurrency, options.force
    )
    path, _result = benchmark(options.root, options.deployment, settings, say=say)
    _print([str(path)])
    return 0


def _rollout(options: argparse.Namespace) -> Rollout:
    return Rollout(options.root, LocalHost(ready_timeout_seconds=options.ready_timeout))


def _tell(outcome: Outcome) -> int:
    _print([*outcome.lines, outcome.message])
    return 0 if outcome.ok else 1


def _holder() -> str:
    return f"metalserve-host of {os.environ.get('SUDO_USER') or getpass.getuser()} on this host"


if __name__ == "__main__":
    sys.exit(main())
