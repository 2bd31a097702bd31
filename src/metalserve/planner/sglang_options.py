"""The field `sglang` of a deployment: what only SGLang can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from metalserve.errors import Refusal

SCHEDULE_POLICIES = (
    "lpm", "random", "fcfs", "dfs-weight", "lof", "priority", "routing-key", "hrrn", "shortest-prefill-first",
)  # fmt: skip
_CHOICES: dict[str, tuple[str, ...]] = {
    "radix_strategy": ("no_buffer", "extra_buffer", "extra_buffer_lazy"),
    "state_dtype": ("float32", "bfloat16"),
    "schedule_policy": SCHEDULE_POLICIES,
    "disaggregation_mode": ("prefill", "decode"),
    "disaggregation_transfer": ("mooncake", "nixl", "mori", "mooncake_tcp"),
}
_RANGES: dict[str, tuple[float, float]] = {
    "static_fraction": (0.05, 0.99),
    "state_memory_ratio": (0.01, 100.0),
    "schedule_conservativeness": (0.01, 10.0),
}
_COUNTS: dict[str, tuple[int, int]] = {
    "max_queued_requests": (1, 1 << 30),
    "disaggregation_bootstrap_port": (1, 65535),
}


@dataclass(frozen=True)
class SglangOptions:
    """What a deployment says to SGLang alone; None: SGLang's own default.

    `static_fraction`: share of the free memory for weights and pools, in place of the planned one.
    `state_memory_ratio`: state pool : KV pool of a hybrid model. `state_dtype`: type of its recurrent state.
    `radix_strategy`: how a hybrid's states are kept for the prefix cache; decides the state slots of a request.
    """

    static_fraction: float | None = None
    state_memory_ratio: float | None = None
    state_dtype: str | None = None
    radix_strategy: str | None = None
    schedule_policy: str | None = None
    schedule_conservativeness: float | None = None
    max_queued_requests: int | None = None
    disaggregation_mode: str | None = None
    disaggregation_transfer: str | None = None
    disaggregation_bootstrap_port: int | None = None


def read_options(given: Mapping[str, Any] | None) -> SglangOptions:
    """Check the field `sglang` of a deployment.

    Raises:
        Refusal: an unknown name, a value of the wrong kind or out of range, or two that SGLang does not take together.
    """
    if given is not None and not isinstance(given, Mapping):
        raise _refuse("sglang", f"sglang {given!r}", "a mapping")
    known = [field.name for field in fields(SglangOptions)]
    values = {name: value for name, value in (given or {}).items() if value is not None}
    for name, value in values.items():
        if name not in known:
            close = get_close_matches(str(name), known, n=1)
            raise _refuse(
                name,
                f"sglang.{name}, which is not known",
                f"one of {', '.join(known)}" + (f"; the nearest is {close[0]}" if close else ""),
            )
        if name in _CHOICES and value not in _CHOICES[name]:
            raise _refuse(name, f"sglang.{name} {value!r}", f"one of {', '.join(_CHOICES[name])}")
        limits = _RANGES.get(name) or _COUNTS.get(name)
        kinds = (int,) if name in _COUNTS else (int, float)
        if limits and (isinstance(value, bool) or not isinstance(value, kinds) or not limits[0] <= value <= limits[1]):
            raise _refuse(name, f"sglang.{name} {value!r}", f"a number from {limits[0]} to {limits[1]}")
    options = SglangOptions(**values)
    if options.disaggregation_mode is None and (
        options.disaggregation_transfer or options.disaggregation_bootstrap_port
    ):
        raise _refuse(
            "disaggregation_mode",
            "settings of disaggregation without sglang.disaggregation_mode",
            "prefill on one group of hosts, decode on the other",
        )
    return options


def _refuse(name: str, found: str, needed: str) -> Refusal:
    return Refusal(found=found, needed=needed, change=f"`sglang.{name}` of the deployment")
