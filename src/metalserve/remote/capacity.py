"""What the engine says it can hold, against what was planned; kept beside the release."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import read_text, write_text

RECORD_NAME = "capacity.json"
_METRIC = re.compile(r"^vllm:cache_config_info\{(?P<labels>.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# SGLang has one gauge for each (0.5.23: observability/metrics_collector.py); a page is its block.
_SGLANG = {
    "kv_cache_tokens": "sglang:max_total_num_tokens",
    "block_size_tokens": "sglang:page_size",
    "num_blocks": "sglang:num_pages",
}
# Label of the engine's metric -> field of the plan.
_FIELDS = {
    "num_gpu_blocks": "num_blocks",
    "block_size": "block_size_tokens",
    "kv_cache_size_tokens": "kv_cache_tokens",
    "kv_cache_max_concurrency": "max_concurrency",
}


def parse_capacity(metrics: str) -> dict[str, float]:
    """The capacity in the text of an engine's `/metrics`, under the plan's names.

    Of the first replica where there are more. vLLM before 0.24 reports blocks only: what is not there is left out.

    Raises:
        ValueError: the text holds neither vllm:cache_config_info nor sglang:max_total_num_tokens.
    """
    found = _METRIC.search(metrics)
    if found is None:
        return _sglang_capacity(metrics)
    labels = dict(_LABEL.findall(found["labels"]))
    values = {}
    for label, field in _FIELDS.items():
        try:
            values[field] = float(labels[label])
        except (KeyError, ValueError):
            continue
    return values


def _sglang_capacity(metrics: str) -> dict[str, float]:
    values = {}
    for field, gauge in _SGLANG.items():
        sample = re.search(rf"^{gauge}(?:\{{.*\}})? (\S+)$", metrics, re.MULTILINE)
        if sample:
            values[field] = float(sample[1])
    if "kv_cache_tokens" not in values:
        raise ValueError("the metrics hold neither vllm:cache_config_info nor sglang:max_total_num_tokens")
    return values


def compare(planned: Mapping[str, Any], reported: Mapping[str, float]) -> dict[str, Any]:
    """Both side by side, and the difference of the KV tokens (else the blocks) in per cent of the plan.

    The plan's `start` is the record of such a start without its blocks; it is kept with them, for the next plan, unless
    the engine runs with other blocks than planned.
    """
    both = {field: {"planned": planned[field], "reported": value} for field, value in reported.items()}
    measure = "kv_cache_tokens" if "kv_cache_tokens" in both else "num_blocks"
    wanted = float(planned[measure])
    percent = round(100 * (reported[measure] - wanted) / wanted, 2) if measure in both and wanted else None
    start = planned.get("start")
    record = {"schema": 1, "measure": measure, "difference_percent": percent, "values": both}
    if start and "num_blocks" in reported and reported.get("block_size_tokens") == start["block_size_tokens"]:
        record["start"] = {**start, "num_blocks": int(reported["num_blocks"]), "used_bytes": None}
    return record


def read_metrics(url: str, timeout_seconds: float = 30.0) -> str:
    """The text at the engine's metrics route.

    Raises:
        OSError: no answer.
    """
    with urllib.request.urlopen(url, timeout=timeout_seconds) as response:
        text: str = response.read().decode()
        return text


def record(path: Path, comparison: Mapping[str, Any], *, dry_run: bool) -> bool:
    """Write the comparison when it is not there as given; returns whether that was (or would be) a change.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps(comparison, indent=1, sort_keys=True) + "\n"
    if read_text(path) == text:
        return False
    if not dry_run:
        write_text(path, text)
    return True
