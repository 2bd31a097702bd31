"""The engine's word on its capacity against the plan. The metric line is vLLM 0.32's own, shortened."""

import json

import pytest

from metalserve.remote.capacity import compare, parse_capacity, record

METRICS = (
    "# TYPE vllm:cache_config_info gauge\n"
    'vllm:cache_config_info{block_size="256",cache_dtype="auto",engine="0",kv_cache_max_concurrency="23.27",'
    'kv_cache_size_tokens="95325",num_gpu_blocks="512",num_cpu_blocks="None"} 1.0\n'
    'vllm:num_requests_running{engine="0"} 0.0\n'
)
PLANNED = {"num_blocks": 512, "block_size_tokens": 256, "kv_cache_tokens": 95325, "max_concurrency": 23.27}


def test_the_metric_is_read_under_the_names_of_the_plan():
    assert parse_capacity(METRICS) == PLANNED


def test_what_an_older_version_does_not_report_is_left_out():
    older = METRICS.replace('kv_cache_size_tokens="95325",', "").replace('kv_cache_max_concurrency="23.27",', "")
    reported = parse_capacity(older)
    assert reported == {"num_blocks": 512, "block_size_tokens": 256}
    assert compare(PLANNED, reported)["measure"] == "num_blocks"


# As SGLang 0.5.23 wrote it with max-total-tokens 16384; some labels are left out.
SGLANG = (
    'sglang:max_total_num_tokens{engine_type="unified",model_name="m",tp_rank="0"} 16384.0\n'
    'sglang:page_size{engine_type="unified",model_name="m",tp_rank="0"} 1.0\n'
    'sglang:num_pages{engine_type="unified",model_name="m",tp_rank="0"} 16384.0\n'
)


def test_sglang_has_a_gauge_for_each():
    assert parse_capacity(SGLANG) == {"kv_cache_tokens": 16384, "block_size_tokens": 1, "num_blocks": 16384}


def test_metrics_without_a_capacity():
    with pytest.raises(ValueError, match=r"neither vllm:cache_config_info nor sglang:max_total_num_tokens"):
        parse_capacity("sglang:num_running_reqs 0\n")


def test_the_difference_is_in_per_cent_of_the_plan():
    comparison = compare(PLANNED, {**parse_capacity(METRICS), "kv_cache_tokens": 94371.75})
    assert comparison["difference_percent"] == -1.0
    assert comparison["values"]["kv_cache_tokens"] == {"planned": 95325, "reported": 94371.75}


def test_the_record_is_written_once(tmp_path):
    path, comparison = tmp_path / "capacity.json", compare(PLANNED, parse_capacity(METRICS))
    assert record(path, comparison, dry_run=True)
    assert not path.exists()
    assert record(path, comparison, dry_run=False)
    assert json.loads(path.read_text(encoding="utf-8"))["difference_percent"] == 0.0
    assert not record(path, comparison, dry_run=False)
