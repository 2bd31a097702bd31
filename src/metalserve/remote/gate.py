"""The gate: decides by behaviour whether a release may take traffic.

`run_gate` asks an OpenAI-compatible endpoint a few questions with known answers and gives one row per
check. It changes nothing and may run at any time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import gate_questions, http_client
from .gate_checks import BASIC_CHECKS, Check, Questions, Session, check_burst, fetch_models
from .gate_deep import DEEP_CHECKS
from .gate_engines import ENGINES
from .gate_judge import WrongAnswerError, excerpt

DEFAULT_QUESTIONS = Questions()
DEFAULT_BURST_SIZE = 16
DEFAULT_TIMEOUT_SECONDS = 300.0
DEFAULT_REQUEST_TIMEOUT_SECONDS = 120.0
DEFAULT_LONG_PROMPT_TOKENS = 32768
# In the order they run: the cheap ones that explain later failures come first.
CHECKS: dict[str, Check] = {**BASIC_CHECKS, **DEEP_CHECKS, "burst": check_burst}
CHECK_NAMES = tuple(CHECKS)
ENGINE_NAMES = tuple(ENGINES)

# What `thinking` sends to the chat template. A template without the variable ignores it.
THINKING: dict[str, dict[str, object]] = {
    "absent": {},
    "off": {"enable_thinking": False},
    "on": {"enable_thinking": True},
}


@dataclass(frozen=True)
class GateRow:
    """The outcome of one check; `detail` is one line about what was seen."""

    name: str
    ok: bool
    seconds: float
    detail: str

    def as_dict(self) -> dict[str, object]:
        """The row as plain types."""
        return {"name": self.name, "ok": self.ok, "seconds": self.seconds, "detail": self.detail}


@dataclass(frozen=True)
class GateResult:
    """The outcome of the gate.

    Args:
        url: the endpoint as it was asked.
        model: the served name that was asked; empty when none could be found.
        engine: the engine whose behaviour was expected.
        rows: one per check, in the order they ran.
        seconds: how long all of it took.

    """

    url: str
    model: str
    engine: str
    rows: tuple[GateRow, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every check passed; false when none ran."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def failed_rows(self) -> tuple[GateRow, ...]:
        """The rows of the checks that did not pass."""
        return tuple(row for row in self.rows if not row.ok)

    def as_dict(self) -> dict[str, object]:
        """The result as plain types."""
        return {
            "url": self.url,
            "model": self.model,
            "engine": self.engine,
            "passed": self.passed,
            "seconds": self.seconds,
            "rows": [row.as_dict() for row in self.rows],
        }

    def table(self) -> list[str]:
        """The rows as aligned lines, with a line of verdict at the end."""
        width = max([len("check"), *(len(row.name) for row in self.rows)])
        lines = [f"{'check':<{width}}  {'':<6}  {'seconds':>7}  detail"]
        for row in self.rows:
            outcome = "ok" if row.ok else "FAILED"
            lines.append(f"{row.name:<{width}}  {outcome:<6}  {row.seconds:>7.2f}  {row.detail}")
        return [*lines, self.verdict()]

    def verdict(self) -> str:
        """One sentence: passed, or how many checks refused."""
        model = self.model or "(no model)"
        if self.passed:
            return f"passed: {model} at {self.url}, {len(self.rows)} checks in {self.seconds:.1f} s"
        return f"refused: {model} at {self.url}, {len(self.failed_rows)} of {len(self.rows)} checks failed"

    def refusal(self) -> str:
        """The verdict with the failed rows, for an error message."""
        return "\n".join([self.verdict(), *(f"  {row.name}: {row.detail}" for row in self.failed_rows)])


def run_gate(
    base_url: str,
    model: str | None,
    *,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    request_timeout_seconds: float = DEFAULT_REQUEST_TIMEOUT_SECONDS,
    api_key: str | None = None,
    checks: Sequence[str] | None = None,
    served_names: Sequence[str] = (),
    engine: str = "vllm",
    thinking: str = "absent",
    chat_template_kwargs: Mapping[str, object] | None = None,
    max_tokens: int | None = None,
    burst_size: int = DEFAULT_BURST_SIZE,
    hidden_routes: Sequence[str] = (),
    long_prompt_tokens: int = DEFAULT_LONG_PROMPT_TOKENS,
    questions: Questions = DEFAULT_QUESTIONS,
) -> GateResult:
    """Check an endpoint. Never raises: what goes wrong is a failed row.

    Args:
        base_url: `http://host:port`, with or without `/v1`.
        model: the served name to ask; None takes the first of the model list.
        timeout_seconds: limit of the whole gate; what has not run by then fails.
        request_timeout_seconds: limit of one request.
        api_key: bearer token; never part of a detail.
        checks: names out of `CHECK_NAMES`, run in its order; None or empty runs all.
        served_names: further names that the model list must hold.
        engine: `vllm` or `sglang`; tells which differences are expected.
        thinking: `absent` sends nothing, `off` and `on` send enable_thinking to the chat template.
        chat_template_kwargs: further variables of the chat template; they win over `thinking`.
        max_tokens: room for one answer, in tokens; None is 256, or 4096 with thinking on.
        burst_size: concurrent requests of the burst.
        hidden_routes: routes that must not answer without a key; none takes those of the engine.
        long_prompt_tokens: the longest prompt that is asked, in tokens; the context length where that is shorter.
        questions: what is asked.

    """
    started = time.monotonic()
    unknown = [name for name in checks or () if name not in CHECKS]
    names = [name for name in CHECKS if not checks or name in checks]

    def result(rows: Sequence[GateRow], url: str, asked: str) -> GateResult:
        seconds = round(time.monotonic() - started, 3)
        return GateResult(url=url, model=asked, engine=engine, rows=tuple(rows), seconds=seconds)

    reason = ""
    if unknown:
        reason = f"no check is named {', '.join(unknown)}; there are {', '.join(CHECKS)}"
    elif engine not in ENGINES:
        reason = f"the engine {engine!r} is not known; there are {', '.join(ENGINES)}"
    elif thinking not in THINKING:
        reason = f"thinking is {thinking!r}; it can be {', '.join(THINKING)}"
    elif burst_size < 1:
        reason = f"burst_size is {burst_size}; it must be 1 or more"
    try:
        endpoint = http_client.parse_base_url(base_url)
    except ValueError as error:
        reason = reason or str(error)
    if reason:
        return result([_not_run(name, reason) for name in names or unknown], base_url, model or "")

    deadline = started + timeout_seconds
    if model is None:
        try:
            model = fetch_models(endpoint, deadline=deadline, api_key=api_key)[0]
        except Exception as error:
            reason = _one_line(f"no model name: {_said(error)}", api_key)
            return result([_not_run(name, reason) for name in names], endpoint.url, "")

    session = Session(
        endpoint=endpoint,
        model=model,
        served_names=tuple(dict.fromkeys([model, *served_names])),
        engine=ENGINES[engine],
        questions=questions,
        max_tokens=max_tokens or _default_max_tokens(thinking),
        chat_template_kwargs={**THINKING[thinking], **(chat_template_kwargs or {})},
        burst_size=burst_size,
        deadline=deadline,
        request_timeout_seconds=request_timeout_seconds,
        api_key=api_key,
        thinking=thinking,
        hidden_routes=tuple(hidden_routes) or ENGINES[engine].hidden_routes,
        long_prompt_tokens=long_prompt_tokens,
    )
    rows: list[GateRow] = []
    unreachable = ""
    for name in names:
        if unreachable:
            rows.append(_not_run(name, unreachable))
        elif time.monotonic() >= deadline:
            rows.append(_not_run(name, f"the limit of {timeout_seconds:g} s for the whole gate had passed"))
        else:
            row, unreachable = _run_check(name, session)
            rows.append(row)
    return result(rows, endpoint.url, model)


def _run_check(name: str, session: Session) -> tuple[GateRow, str]:
    """Run one check; also why no further check can run, empty when they can."""
    started = time.monotonic()
    ok, unreachable = False, ""
    try:
        detail = CHECKS[name](session)
        ok = True
    except http_client.UnreachableError as error:
        detail = unreachable = str(error)
    except Exception as error:
        # A gate that breaks must refuse, and say so in its row, not end the play with a traceback.
        detail = _said(error)
    seconds = round(time.monotonic() - started, 3)
    return GateRow(name, ok, seconds, _one_line(detail, session.api_key)), unreachable


def _default_max_tokens(thinking: str) -> int:
    return gate_questions.MAX_TOKENS_THINKING if thinking == "on" else gate_questions.MAX_TOKENS


def _not_run(name: str, reason: str) -> GateRow:
    return GateRow(name, False, 0.0, f"not run: {reason}")


def _said(error: Exception) -> str:
    if isinstance(error, (WrongAnswerError, http_client.HttpError)):
        return str(error)
    return f"the check itself broke: {type(error).__name__}: {error}"


def _one_line(detail: str, api_key: str | None) -> str:
    """A detail that is safe to print and to store: one line, without the key that a server may echo."""
    if api_key:
        detail = detail.replace(api_key, "***")
    return excerpt(detail, 1000)
