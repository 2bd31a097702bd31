"""The planner against the metric of the real engine, started on the CPU with three tiny models.

    METALSERVE_REQUIRE_ENGINE=1 pytest tests/differential/test_live_capacity.py

Each model is a config.json with dummy weights. Needs Docker, about 4 GiB of memory and two minutes.
"""

import json
import re
import subprocess
import uuid

import pytest

from metalserve.planner import make_plan
from metalserve.remote import host_facts

MIB = 1 << 20
# A start takes 30 to 60 s on two free cores.
LIMIT_SECONDS = 420

HYBRID = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "tie_word_embeddings": False,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 320,
        "max_position_embeddings": 4096,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "mamba_ssm_dtype": "float32",
        "attn_output_gate": True,
        "dtype": "bfloat16",
    },
    "vision_config": {
        "model_type": "qwen3_5_moe",
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
    },
}
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "tie_word_embeddings": False,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
SLIDING = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "tie_word_embeddings": True,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "sliding_window": 256,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "torch_dtype": "bfloat16",
}
# Sizes other than those of the starts in the planner's own tests.
MODELS = {
    "hybrid": (HYBRID, {"kv_cache_memory_bytes": 80 * MIB, "max_sequences": 12, "context_length": 3000}),
    "dense": (DENSE, {"kv_cache_memory_bytes": 48 * MIB + 12345, "max_sequences": 8, "context_length": 2500}),
    "sliding": (SLIDING, {"kv_cache_memory_bytes": 40 * MIB, "max_sequences": 8, "context_length": 4096}),
}
BATCHED_TOKENS = 1024

# Waits inside the container, which has no network, until the metric is there; ends with the container.
ASK = f"""
import time, urllib.error, urllib.request
until = time.monotonic() + {LIMIT_SECONDS}
while True:
    try:
        metrics = urllib.request.urlopen("http://127.0.0.1:8000/metrics", timeout=10).read().decode()
        if "vllm:cache_config_info{{" in metrics:
            break
    except (urllib.error.URLError, OSError):
        pass
    if time.monotonic() > until:
        raise SystemExit("the engine was not ready within {LIMIT_SECONDS} s")
    time.sleep(1)
print(urllib.request.urlopen("http://127.0.0.1:8000/version", timeout=10).read().decode())
print(metrics)
"""


def docker(*arguments, timeout=60):
    return subprocess.run(
        ["docker", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=timeout,
    )


def engine_reports(image, folder, wishes):
    """The engine's version and the labels of its cache metric; the container is gone afterwards."""
    name = f"metalserve-capacity-{uuid.uuid4().hex[:12]}"
    arguments = [
        "--load-format=dummy",
        "--skip-tokenizer-init",
        "--enforce-eager",
        f"--kv-cache-memory-bytes={wishes['kv_cache_memory_bytes']}",
        f"--max-model-len={wishes['context_length']}",
        f"--max-num-seqs={wishes['max_sequences']}",
        f"--max-num-batched-tokens={wishes['max_batched_tokens']}",
        *(["--language-model-only"] if wishes["text_only"] else []),
    ]
    place = ["--network=none", "--shm-size=1g", f"--volume={folder}:/model:ro"]
    try:
        started = docker("run", "--detach", "--name", name, *place, image, "/model", *arguments)
        assert started.returncode == 0, started.stdout
        answer = docker("exec", name, "python3", "-c", ASK, timeout=LIMIT_SECONDS + 60)
        assert answer.returncode == 0, answer.stdout + docker("logs", "--tail", "80", name).stdout
    finally:
        docker("rm", "--force", "--volumes", name)
    version, _, metrics = answer.stdout.partition("\n")
    labels = re.search(r"^vllm:cache_config_info\{(.*)\} 1\.0$", metrics, re.MULTILINE)
    return json.loads(version)["version"], dict(re.findall(r'(\w+)="([^"]*)"', labels[1]))


@pytest.mark.parametrize("name", MODELS)
def test_plan_equals_what_the_engine_reports(engine_image, tmp_path, name):
    config, sizes = MODELS[name]
    wishes = {**sizes, "max_batched_tokens": BATCHED_TOKENS, "text_only": "vision_config" in config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tmp_path.chmod(0o755)
    version, labels = engine_reports(engine_image, tmp_path, wishes)
    # The image's engine runs on the CPU, whatever else the machine has.
    facts = {**host_facts.collect(), "gpus": []}
    plan = make_plan(config, facts, "vllm", version, wishes)
    planned = (plan.block_size_tokens, plan.num_blocks, plan.kv_cache_tokens, plan.max_concurrency)
    reported = (
        int(labels["block_size"]),
        int(labels["num_gpu_blocks"]),
        int(labels["kv_cache_size_tokens"]),
        round(float(labels["kv_cache_max_concurrency"]), 2),
    )
    assert planned == reported
    assert str(plan.prefix_caching) == labels["enable_prefix_caching"]
