"""Dashboards for Grafana, made with its own SDK and checked in as JSON under roles/monitoring/files/dashboards.

    python -m metalserve.monitoring.dashboards roles/monitoring/files/dashboards      (make dashboards)

The SDK is needed for that only; no run of a playbook needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

_SOURCE = DataSourceRef(type_val="prometheus", uid="metalserve")
# A dashboard is 24 columns wide.
_WIDTH, _HEIGHT = 8, 7
# The release that a deployment runs, joined to what its engine tells.
_RELEASE = "* on (host, deployment) group_left (release) metalserve_release_info"
_MODEL = 'model=~"$model"'


@dataclass(frozen=True)
class Panel:
    """One panel: what it is called, in which unit, and expressions with their legends."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "lines"
    description: str = ""


def _lines(title: str, unit: str, *queries: tuple[str, str], description: str = "") -> Panel:
    return Panel(title, unit, queries, description=description)


def _number(title: str, unit: str, expression: str) -> Panel:
    return Panel(title, unit, ((expression, ""),), "number")


def _table(title: str, expression: str, description: str = "") -> Panel:
    return Panel(title, "short", ((expression, ""),), "table", description)


def _quantile(share: str, name: str, by: str = "deployment") -> str:
    """A quantile of a histogram that both engines have under their own prefix, by a label and the release."""
    parts = [
        f"sum by (le, {by}, release) (rate({engine}:{name}_bucket{{{_MODEL}}}[$__rate_interval]) {_RELEASE})"
        for engine in ("vllm", "sglang")
    ]
    return f"histogram_quantile({share}, {' or '.join(parts)})"


FLEET: dict[str, tuple[Panel, ...]] = {
    "Now": (
        _number("Hosts that answer", "short", 'count(up{job="hosts"} == 1)'),
        _number("Engines that answer", "short", 'count(up{job="engines"} == 1)'),
        _number("Engines drained", "short", "count(metalserve:drained) or vector(0)"),
        _number("Requests running", "short", "sum(metalserve:requests_running)"),
        _number("Requests waiting", "short", "sum(metalserve:requests_waiting)"),
        _number("Alerts", "short", 'count(ALERTS{alertstate="firing"}) or vector(0)'),
    ),
    "Requests": (
        _lines(
            "Answers of the gateways",
            "reqps",
            (
                "sum by (proxy, code) (rate(haproxy_backend_http_responses_total[$__rate_interval])) > 0",
                "{{proxy}} {{code}}",
            ),
        ),
        _lines(
            "Requests waiting in the gateways", "short", ("sum by (proxy) (haproxy_backend_current_queue)", "{{proxy}}")
        ),
        _lines(
            "Generated tokens",
            "short",
            ("sum by (model) (metalserve:generation_tokens:rate5m)", "{{model}}"),
            description="A second.",
        ),
    ),
    "Room": (
        _lines("GPU memory in use", "bytes", ("metalserve_gpu_memory_used_bytes", "{{host}} {{gpu}}")),
        _lines(
            "Used against planned GPU memory",
            "percentunit",
            (
                "metalserve_gpu_memory_used_bytes / on (host, gpu) "
                "sum by (host, gpu) (metalserve_plan_gpu_memory_bytes)",
                "{{host}} {{gpu}}",
            ),
        ),
        _lines(
            "KV capacity against the plan",
            "percent",
            ("metalserve_capacity_difference_percent", "{{host}} {{deployment}} {{release}}"),
        ),
    ),
    "What runs": (
        _table("Deployments", "metalserve_release_info"),
        _table("Alerts", 'ALERTS{alertstate="firing"}'),
    ),
}
MODEL: dict[str, tuple[Panel, ...]] = {
    "What a client feels, by release": (
        _lines(
            "Time to the first token",
            "s",
            (_quantile("0.5", "time_to_first_token_seconds"), "half {{deployment}} {{release}}"),
            (_quantile("0.95", "time_to_first_token_seconds"), "95 % {{deployment}} {{release}}"),
        ),
        _lines(
            "Between two tokens",
            "s",
            (_quantile("0.5", "inter_token_latency_seconds"), "half {{deployment}} {{release}}"),
            (_quantile("0.95", "inter_token_latency_seconds"), "95 % {{deployment}} {{release}}"),
        ),
        _lines(
            "Whole answer", "s", (_quantile("0.95", "e2e_request_latency_seconds"), "95 % {{deployment}} {{release}}")
        ),
        _lines("Late first tokens", "percentunit", (f"metalserve:ttft_late:ratio_rate5m{{{_MODEL}}}", "{{model}}")),
        _lines(
            "Waiting in the engine",
            "s",
            (
                "histogram_quantile(0.95, sum by (le, host, deployment) ("
                f"rate(vllm:request_queue_time_seconds_bucket{{{_MODEL}}}[$__rate_interval])"
                f" or rate(sglang:queue_time_seconds_bucket{{{_MODEL}}}[$__rate_interval])))",
                "95 % {{host}} {{deployment}}",
            ),
        ),
        _lines(
            "Answers",
            "reqps",
            (f"metalserve:finished:rate5m{{{_MODEL}}} {_RELEASE}", "{{host}} {{deployment}} {{release}}"),
        ),
    ),
    "Load": (
        _lines("Requests running", "short", (f"metalserve:requests_running{{{_MODEL}}}", "{{host}} {{deployment}}")),
        _lines("Requests waiting", "short", (f"metalserve:requests_waiting{{{_MODEL}}}", "{{host}} {{deployment}}")),
        _lines(
            "Why they wait",
            "short",
            (
                f"sum by (host, deployment, reason) (vllm:num_requests_waiting_by_reason{{{_MODEL}}})",
                "{{host}} {{deployment}} {{reason}}",
            ),
        ),
        _lines(
            "Generated tokens a second",
            "short",
            (f"metalserve:generation_tokens:rate5m{{{_MODEL}}} {_RELEASE}", "{{host}} {{deployment}} {{release}}"),
        ),
        _lines(
            "Prompt tokens a second",
            "short",
            (f"metalserve:prompt_tokens:rate5m{{{_MODEL}}} {_RELEASE}", "{{host}} {{deployment}} {{release}}"),
        ),
    ),
    "KV cache": (
        _lines("In use", "percentunit", (f"metalserve:kv_usage_ratio{{{_MODEL}}}", "{{host}} {{deployment}}")),
        _lines(
            "Preemptions a second", "short", (f"metalserve:preemptions:rate5m{{{_MODEL}}}", "{{host}} {{deployment}}")
        ),
        _lines(
            "Prompt tokens found in the prefix cache",
            "percentunit",
            (
                f"sum by (host, deployment) (rate(vllm:prefix_cache_hits_total{{{_MODEL}}}[5m])) / "
                f"(sum by (host, deployment) (rate(vllm:prefix_cache_queries_total{{{_MODEL}}}[5m])) > 0) "
                f"or avg by (host, deployment) (sglang:cache_hit_rate{{{_MODEL}}})",
                "{{host}} {{deployment}}",
            ),
        ),
    ),
}
_HOST = 'host=~"$host"'
HOST: dict[str, tuple[Panel, ...]] = {
    "Machine": (
        _lines(
            "Processor",
            "percentunit",
            (f'1 - avg by (host) (rate(node_cpu_seconds_total{{mode="idle",{_HOST}}}[$__rate_interval]))', "{{host}}"),
        ),
        _lines("Memory available", "bytes", (f"node_memory_MemAvailable_bytes{{{_HOST}}}", "{{host}}")),
        _lines(
            "Disk of the models, free",
            "percentunit",
            (f"metalserve_models_disk_available_bytes{{{_HOST}}} / metalserve_models_disk_size_bytes", "{{host}}"),
        ),
        _lines(
            "Disks, free",
            "percentunit",
            (
                f'node_filesystem_avail_bytes{{{_HOST},fstype!~"tmpfs|overlay|ramfs"}} / node_filesystem_size_bytes',
                "{{host}} {{mountpoint}}",
            ),
        ),
        _lines(
            "Network, received",
            "Bps",
            (
                f'rate(node_network_receive_bytes_total{{{_HOST},device!~"lo|veth.*|docker.*"}}[$__rate_interval])',
                "{{host}} {{device}}",
            ),
        ),
        _lines(
            "Units that failed",
            "short",
            (f'sum by (host) (node_systemd_unit_state{{{_HOST},state="failed"}})', "{{host}}"),
        ),
    ),
    "Driver": (
        _table("Versions", f"metalserve_driver_info{{{_HOST}}}"),
        _lines(
            "Something is wrong",
            "short",
            (f"metalserve_driver_mismatch{{{_HOST}}}", "{{host}} mismatch"),
            (f"metalserve_driver_drift{{{_HOST}}}", "{{host}} drift"),
        ),
        _table("Container toolkit", f"metalserve_container_toolkit_info{{{_HOST}}}"),
    ),
    "GPUs": (
        _lines("SM clock", "rotmhz", (f"DCGM_FI_DEV_SM_CLOCK{{{_HOST}}} * 1e6", "{{host}} {{gpu}}")),
        _lines("Power", "watt", (f"DCGM_FI_DEV_POWER_USAGE{{{_HOST}}}", "{{host}} {{gpu}}")),
        _lines(
            "Temperature",
            "celsius",
            (f"DCGM_FI_DEV_GPU_TEMP{{{_HOST}}}", "{{host}} {{gpu}}"),
            (f"DCGM_FI_DEV_MEMORY_TEMP{{{_HOST}}}", "{{host}} {{gpu}} memory"),
        ),
        _lines(
            "Tensor cores active", "percentunit", (f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{_HOST}}}", "{{host}} {{gpu}}")
        ),
        _lines("Memory bandwidth in use", "percentunit", (f"DCGM_FI_PROF_DRAM_ACTIVE{{{_HOST}}}", "{{host}} {{gpu}}")),
        _lines("Slowed down", "short", (f"metalserve_gpu_throttled{{{_HOST}}}", "{{host}} {{gpu}} {{reason}}")),
    ),
    "Errors": (
        _lines(
            "Xid since the boot",
            "short",
            (f"metalserve_xid_errors{{{_HOST}}}", "{{host}} {{pci_address}} Xid {{xid}}"),
            (f"metalserve_sxid_errors{{{_HOST}}}", "{{host}} {{pci_address}} SXid {{sxid}}"),
        ),
        _lines(
            "ECC errors since the driver was loaded",
            "short",
            (f"DCGM_FI_DEV_ECC_SBE_VOL_TOTAL{{{_HOST}}}", "{{host}} {{gpu}} corrected"),
            (f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{_HOST}}}", "{{host}} {{gpu}} not corrected"),
        ),
        _lines(
            "Remapped rows",
            "short",
            (f"metalserve_gpu_remapped_rows{{{_HOST}}}", "{{host}} {{gpu}} {{kind}}"),
            (f"metalserve_gpu_row_remap_pending{{{_HOST}}}", "{{host}} {{gpu}} pending"),
            (f"metalserve_gpu_row_remap_failed{{{_HOST}}}", "{{host}} {{gpu}} failed"),
        ),
        _lines(
            "NVLink errors a second",
            "short",
            (
                f"rate(DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL{{{_HOST}}}[$__rate_interval])",
                "{{host}} {{gpu}} CRC",
            ),
            (
                f"rate(DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL{{{_HOST}}}[$__rate_interval])",
                "{{host}} {{gpu}} replay",
            ),
            (
                f"rate(DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL{{{_HOST}}}[$__rate_interval])",
                "{{host}} {{gpu}} recovery",
            ),
        ),
        _lines(
            "PCIe: lanes, and retries a second",
            "short",
            (f"metalserve_gpu_pcie_width{{{_HOST}}}", "{{host}} {{gpu}} lanes"),
            (f"rate(DCGM_FI_DEV_PCIE_REPLAY_COUNTER{{{_HOST}}}[$__rate_interval])", "{{host}} {{gpu}} retries"),
        ),
        _lines(
            "NVLinks active, fabric joined",
            "short",
            (f"metalserve_gpu_nvlinks_active{{{_HOST}}}", "{{host}} {{gpu}} links"),
            (f"metalserve_gpu_fabric_completed{{{_HOST}}}", "{{host}} {{gpu}} fabric"),
        ),
    ),
}
ROLLOUT: dict[str, tuple[Panel, ...]] = {
    "Which host runs which release": (
        _table("Current releases", "metalserve_release_info"),
        _table(
            "Wanted and not current",
            "metalserve_release_wanted_info unless on (host, deployment, release) metalserve_release_info",
        ),
        _table(
            "Refused",
            "metalserve_release_refused_timestamp_seconds * 1000",
            "The value is the time, in milliseconds of the epoch.",
        ),
        _lines(
            "Hosts by release",
            "short",
            ("count by (deployment, release) (metalserve_release_info)", "{{deployment}} {{release}}"),
        ),
    ),
    "Gates": (
        _lines("Passed", "short", ("metalserve_gate_passed", "{{host}} {{deployment}} {{release}}")),
        _lines("Age of the gate", "s", ("time() - metalserve_gate_timestamp_seconds", "{{host}} {{deployment}}")),
        _lines("Proven and current", "short", ("metalserve_release_good", "{{host}} {{deployment}} {{release}}")),
    ),
    "The way of a rollout": (
        _lines("Drained", "short", ("metalserve:drained", "{{host}} {{deployment}}")),
        _lines("Engines that answer", "short", ('sum by (deployment) (up{job="engines"})', "{{deployment}}")),
        _lines(
            "Starts of engines within an hour",
            "short",
            ('changes(node_systemd_unit_start_time_seconds{name=~"(vllm|sglang)@.+"}[1h])', "{{host}} {{name}}"),
        ),
    ),
}
# File -> title, content, and the label by which it can be narrowed, with the metric that knows its values.
DASHBOARDS: dict[str, tuple[str, dict[str, tuple[Panel, ...]], tuple[str, str] | None]] = {
    "fleet": ("metalserve: fleet", FLEET, None),
    "model": ("metalserve: model", MODEL, ("model", "metalserve:requests_running")),
    "host": ("metalserve: host", HOST, ("host", 'up{job="hosts"}')),
    "rollout": ("metalserve: rollout", ROLLOUT, None),
}


def dashboards() -> dict[str, str]:
    """The dashboards as JSON text, by file name."""
    return {f"{name}.json": _json(name, *content) for name, content in DASHBOARDS.items()}


def _json(name: str, title: str, rows: dict[str, tuple[Panel, ...]], choice: tuple[str, str] | None) -> str:
    board = (
        dashboard.Dashboard(title)
        .uid(f"metalserve-{name}")
        .tags(["metalserve"])
        .refresh("30s")
        .time("now-3h", "now")
        .timezone("browser")
        .editable()
    )
    if choice is not None:
        label, metric = choice
        variable = dashboard.QueryVariable(label).datasource(_SOURCE).query(f"label_values({metric}, {label})")
        board = board.with_variable(
            variable.multi(True).include_all(True).all_value(".*").refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        )
    for heading, panels in rows.items():
        board = board.with_row(dashboard.Row(heading))
        for panel in panels:
            board = board.with_panel(_KINDS[panel.kind](panel))
    text: str = JSONEncoder(sort_keys=True, indent=1).encode(board.build())
    return text + "\n"


def _finish(builder: Any, panel: Panel, span: int) -> Any:
    builder = builder.title(panel.title).datasource(_SOURCE).height(_HEIGHT).span(span)
    if panel.description:
        builder = builder.description(panel.description)
    for place, (expression, legend) in enumerate(panel.queries):
        query = prometheus.Dataquery().expr(expression).ref_id("ABCDEFGH"[place]).datasource(_SOURCE)
        query = query.instant() if panel.kind == "table" else query.range()
        if panel.kind == "table":
            query = query.format(PromQueryFormat.TABLE)
        builder = builder.with_target(query.legend_format(legend) if legend else query)
    return builder


def _as_lines(panel: Panel) -> Any:
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    return _finish(timeseries.Panel().unit(panel.unit).min(0).legend(legend.show_legend(True)), panel, _WIDTH)


def _as_number(panel: Panel) -> Any:
    return _finish(stat.Panel().unit(panel.unit), panel, _WIDTH // 2)


def _as_table(panel: Panel) -> Any:
    return _finish(table.Panel(), panel, _WIDTH)


_KINDS: dict[str, Callable[[Panel], Any]] = {"lines": _as_lines, "number": _as_number, "table": _as_table}


def main(arguments: Sequence[str]) -> int:
    """Write the dashboards into a folder."""
    (folder,) = map(Path, arguments)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in dashboards().items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
