"""`metalserve plan`: size a model on a host shape, without a host."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from metalserve import catalogue
from metalserve.adapters import planned_adapters
from metalserve.engines.flags import flags_for
from metalserve.errors import DoesNotFit, Refusal
from metalserve.planner import Adapters, Draft, Plan, Wishes, make_plan, read_draft, read_measured, read_wishes
from metalserve.planner.inverse import smallest_gpus
from metalserve.planner.resolve import PlannedModel, resolve
from metalserve.planner.table import write_compared, write_sets, write_table
from metalserve.planner.versions import check_version

FITS, BAD_INPUT, DOES_NOT_FIT = 0, 1, 2
ANY = "any"


class BadInput:
    """Turns a refusal of what was typed into a sentence on stderr; `failed` then tells the caller to return 1."""

    def __init__(self) -> None:
        self.failed = False

    def __enter__(self) -> BadInput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.failed = isinstance(error, Refusal) and not isinstance(error, DoesNotFit)
        if self.failed:
            sys.stderr.write(f"metalserve: {error}\n")
        return self.failed


def end_usage_errors_with_1(parser: argparse.ArgumentParser) -> None:
    """Argparse ends with 2, which here means that the model does not fit."""

    def error(message: str) -> None:
        parser.print_usage(sys.stderr)
        parser.exit(BAD_INPUT, f"{parser.prog}: {message}\n")

    parser.error = error  # type: ignore[method-assign,assignment]


def whole(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, at least 1")
    return int(text)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `plan` command."""
    parser = subparsers.add_parser(
        "plan",
        help="size a model on GPUs: parallel sizes, share of memory, context, capacity",
        description="Size a model on a host. Exit status: 0 it fits, 2 it does not, 1 bad input (the reason is on "
        "stderr).",
    )
    parser.add_argument(
        "--model",
        required=True,
        help="catalogue key, or a directory with config.json (with --compare: several, by comma)",
    )
    host = parser.add_mutually_exclusive_group(required=True)
    host.add_argument(
        "--gpus",
        help="host shape: 8xH800, 1xL40S, 2xA100-SXM4-80GB, cpu-24GiB (with --compare: several, by comma); "
        "any: the fewest GPUs of each kind that hold the context",
    )
    host.add_argument("--host-facts", type=Path, metavar="FILE", help="JSON of a real host's facts (gpu_host)")
    parser.add_argument("--compare", action="store_true", help="one line for each model and shape")
    parser.add_argument("--engine", default="vllm", choices=catalogue.ENGINES)
    parser.add_argument("--engine-version", help="release number (default: the newest known)")
    parser.add_argument("--context", "--context-length", type=whole, help="tokens (default: as much as fits)")
    parser.add_argument("--concurrency", "--max-sequences", type=whole, help="requests that run at once")
    parser.add_argument(
        "--requests", type=whole, default=1, help="with --gpus any: requests of full length that must run at once"
    )
    parser.add_argument("--max-batched-tokens", type=whole)
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "bfloat16", "fp8"))
    parser.add_argument("--tensor-parallel", "--tensor-parallel-size", type=whole)
    parser.add_argument("--pipeline-parallel", "--pipeline-parallel-size", type=whole, default=1)
    parser.add_argument("--data-parallel", "--data-parallel-size", type=whole)
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts on each GPU")
    parser.add_argument("--memory-share", type=float, help="share of each GPU this engine may take, above 0 to 1")
    parser.add_argument("--speculative-tokens", type=int, default=0, help="tokens drafted in advance")
    parser.add_argument("--draft-model", metavar="MODEL", help="catalogue key or config.json of what drafts them")
    parser.add_argument("--lora-adapters", type=whole, metavar="N", help="LoRA adapters that run at once")
    parser.add_argument("--lora-rank", type=whole, default=16, help="the largest rank of them (default: 16)")
    parser.add_argument("--lora-modules", metavar="NAME,NAME", help="what they adapt (default: every module)")
    parser.add_argument("--text-only", action="store_true", help="without the vision tower")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="JSON list of records of earlier starts")
    parser.add_argument("--format", default="table", choices=("table", "json"))
    parser.add_argument("--json", action="store_const", const="json", dest="format", help="the same as --format json")
    end_usage_errors_with_1(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan and return 0; 1 on bad input; with --compare 2 when nothing fits.

    Raises:
        Refusal: it does not fit; the command line writes it on stderr and ends with status 2.
    """
    with BadInput() as reading:
        wishes = _wishes(args)
        models = [resolve(name) for name in _names(args, "model")]
        for model in models:
            check_version(args.engine, args.engine_version, model.key, model.minimum_versions.get(args.engine))
        hosts = _hosts(args)
        starts = read_measured(_json_list(args.measured) if args.measured else None)
        adapters, draft = _adapters(args, models), _draft(args)
    if reading.failed:
        return BAD_INPUT
    if args.gpus == ANY:
        sets = smallest_gpus(models[0], args.engine, args.engine_version, wishes, requests=args.requests)
        if args.format == "json":
            _print_json([{"gpus": f"{s.count}x{s.gpu}", "plan": s.plan.as_dict()} for s in sets])
        else:
            write_sets(sets, models[0].key, sys.stdout)
        return FITS

    def plan(model: PlannedModel, host: Mapping[str, Any]) -> Plan:
        return make_plan(
            model,
            host,
            args.engine,
            args.engine_version,
            wishes,
            measured=starts,
            adapters=adapters.get(model.key),
            draft=draft,
        )

    if args.compare:
        answers: list[tuple[str, str, Plan | Refusal]] = []
        for model in models:
            for name, host in hosts.items():
                try:
                    answers.append((model.key, name, plan(model, host)))
                except Refusal as refusal:
                    answers.append((model.key, name, refusal))
        if args.format == "json":
            _print_json([_compared(*answer) for answer in answers])
        else:
            write_compared(answers, sys.stdout)
        return FITS if any(isinstance(answer, Plan) for _, _, answer in answers) else DOES_NOT_FIT
    ((name, host),) = hosts.items()
    found = plan(models[0], host)
    if args.format == "json":
        _print_json(found.as_dict())
    else:
        write_table(found, f"{models[0].key} on {name}", sys.stdout)
    return FITS


def _wishes(args: argparse.Namespace) -> Wishes:
    return read_wishes(
        {
            "context_length": args.context,
            "max_sequences": args.concurrency,
            "max_batched_tokens": args.max_batched_tokens,
            "kv_cache_dtype": args.kv_cache_dtype,
            "tensor_parallel_size": args.tensor_parallel,
            "pipeline_parallel_size": args.pipeline_parallel,
            "data_parallel_size": args.data_parallel,
            "expert_parallel": args.expert_parallel,
            "memory_share": args.memory_share,
            "speculative_tokens": args.speculative_tokens,
            "text_only": args.text_only,
            "eager": args.eager,
        }
    )


def _adapters(args: argparse.Namespace, models: Iterable[PlannedModel]) -> dict[str, Adapters]:
    """The adapters of each model, as they would be with a deployment; empty without any.

    Raises:
        Refusal: a rank that the engine does not take, modules that a model does not have, or no shape of a host.
    """
    if not args.lora_adapters:
        return {}
    if args.gpus == ANY:
        raise _needs_a_shape("--lora-adapters")
    modules = sorted(filter(None, (args.lora_modules or "").split(","))) or None
    records = [{"name": "adapter", "rank": args.lora_rank, "modules": modules}] * args.lora_adapters
    found = {}
    for model in models:
        version = check_version(args.engine, args.engine_version, model.key, None)
        table = flags_for(args.engine, version)
        planned = planned_adapters({}, records, model.key, model.shape, table)
        if planned:
            found[model.key] = planned
    return found


def _draft(args: argparse.Namespace) -> Draft | None:
    """The draft model; None without one.

    Raises:
        Refusal: an unknown or unreadable model, one that cannot draft, or no shape of a host.
    """
    name = args.draft_model
    if not name:
        return None
    if args.gpus == ANY:
        raise _needs_a_shape("--draft-model")
    if name.endswith(".json"):
        file = Path(name)
        return read_draft(file.parent.name or name, _json(file, dict, "an object, the config.json of a model"))
    return read_draft(name, catalogue.model(name).shape)


def _needs_a_shape(option: str) -> Refusal:
    return Refusal(
        found=f"{option} with --gpus any",
        needed="a shape, whose room for it is then planned",
        change="--gpus 1xH200, or another shape",
    )


def _names(args: argparse.Namespace, option: str) -> list[str]:
    """The values of an option that may list several with --compare.

    Raises:
        Refusal: several without --compare, or an empty one.
    """
    names = [name.strip() for name in getattr(args, option).split(",")]
    if not all(names):
        raise Refusal(
            found=f"--{option} {getattr(args, option)!r} has an empty name",
            needed="names, separated by commas",
            change=f"correct --{option}",
        )
    if len(names) > 1 and not args.compare:
        raise Refusal(
            found=f"--{option} has {len(names)} values ({', '.join(names)})",
            needed="one, or --compare",
            change="add --compare to see them side by side",
        )
    return names


def _hosts(args: argparse.Namespace) -> dict[str, Mapping[str, Any]]:
    if args.host_facts:
        return {args.host_facts.name: _json(args.host_facts, dict, "an object, the facts of one host")}
    if args.gpus == ANY and args.compare:
        raise Refusal(
            found="--gpus any together with --compare",
            needed="shapes to compare",
            change="leave --compare out: any already gives one line for each kind of GPU",
        )
    if args.gpus == ANY:
        return {}
    return {name: catalogue.host_from_shape(name) for name in _names(args, "gpus")}


def _json_list(file: Path) -> list[Any]:
    found: list[Any] = _json(file, list, "a list of records of earlier starts")
    return found


def _json(file: Path, kind: type, needed: str) -> Any:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refusal(
            found=f"{file} cannot be read as JSON ({error})", needed=needed, change="correct the path or the file"
        ) from error
    if not isinstance(content, kind):
        raise Refusal(found=f"{file} holds a {type(content).__name__}", needed=needed, change="correct the file")
    return content


def _compared(model: str, host: str, answer: Plan | Refusal) -> dict[str, Any]:
    if isinstance(answer, Plan):
        return {"model": model, "gpus": host, "plan": answer.as_dict(), "refusal": None}
    return {"model": model, "gpus": host, "plan": None, "refusal": str(answer)}


def _print_json(value: Mapping[str, Any] | Iterable[Any]) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
