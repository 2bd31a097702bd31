"""May this host serve? One row for each check, from the host facts, the CUDA probe and what the inventory expects.

The checks are those that DCGM's software test, azurehpc-health-checks and gpud make before a job (NVIDIA/DCGM
nvvs/src/Software.cpp, Azure/azurehpc-health-checks customTests, leptonai/gpud components/accelerator/nvidia), as far as
NVML, the kernel's log and a container can answer them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from metalserve.health.gpus import check_gpus
from metalserve.health.probe import check_probes
from metalserve.health.software import check_diag, check_software
from metalserve.health.types import FAIL, OK, WARN, Expected, Row, fail, ok, read_expected

__all__ = ["FAIL", "OK", "WARN", "Expected", "Row", "check_health", "health_report", "health_table"]


def check_health(
    facts: Mapping[str, Any],
    expected: Expected,
    probes: Sequence[Mapping[str, Any]] = (),
    diag: Mapping[str, Any] | None = None,
) -> list[Row]:
    """All checks of one host; a host without GPUs passes unless it should have some.

    Args:
        facts: the host facts (`gpu_host`).
        expected: what the inventory and the plan say.
        probes: the CUDA probe of each image, see check_probes.
        diag: the answer of `dcgmi diag -r 1`, None where DCGM is not installed.
    """
    if not facts.get("gpus"):
        if expected.gpu_count:
            return [
                fail(
                    "gpu_count",
                    "no NVIDIA GPU on the PCI bus",
                    f"{expected.gpu_count} (gpu_health_expected.gpu_count)",
                    "look at lspci and the slots, or correct gpu_count",
                )
            ]
        return [ok("gpu_count", "no NVIDIA GPU: nothing to check")]
    return [
        *check_software(facts, expected),
        *check_gpus(facts, expected),
        *check_probes(facts, probes),
        *check_diag(diag),
    ]


def health_report(
    facts: Mapping[str, Any],
    expected: Mapping[str, Any] | None = None,
    probes: Sequence[Mapping[str, Any]] = (),
    diag: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The checks as plain types: {state, rows, table, refusals}; the state is that of the worst row.

    Raises:
        Refusal: the expectations cannot be read.
    """
    rows = check_health(facts, read_expected(expected), probes, diag)
    states = {row.state for row in rows}
    return {
        "state": next(state for state in (FAIL, WARN, OK) if state in states),
        "rows": [row.as_dict() for row in rows],
        "table": health_table(rows),
        "refusals": [
            f"{row.name}: {row.found}. Needed: {row.needed}. Change: {row.change}." for row in rows if row.state == FAIL
        ],
    }


def health_table(rows: Sequence[Row]) -> list[str]:
    """Aligned lines, the worst first; what was right is short."""
    order = {FAIL: 0, WARN: 1, OK: 2}
    lines = sorted(rows, key=lambda row: order[row.state])
    width = max(len(row.name) for row in rows)
    return [
        f"{row.state:<4}  {row.name:<{width}}  {row.found}" + (f" (needed: {row.needed})" if row.state != OK else "")
        for row in lines
    ]
