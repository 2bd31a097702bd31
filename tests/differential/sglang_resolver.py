"""Runs inside SGLang's image: SGLang's own code answers what it would do on a GPU that is only pretended.

Reads {"gpus": {name: {memory_mib, capability}}, "configs": {name: config.json}, "cases": [...]} on standard input and
writes one answer for each case. The engine's parts that are used as they are: the argument parser, ServerArgs with its
whole resolution and validation, ModelConfig, and KVCacheConfigurator with its pool configurators.
What is put in their place: nvidia-smi and torch.cuda answer for the pretended GPU; the free memory before and after
loading is given with the case; the layers are counted from the configuration instead of a loaded model.
"""

import contextlib
import json
import os
import stat
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

GIB = 1 << 30
SMI = """#!/bin/sh
case "$*" in
  *memory.total*) i=0; while [ $i -lt 8 ]; do echo {memory_mib}; i=$((i+1)); done;;
  *compute_cap*) echo {capability};;
  *driver_version*) echo 580.178.04;;
  *) echo "not pretended: $*" >&2; exit 1;;
esac
"""


def pretend(gpu, folder):
    """Make this process see eight such GPUs; SGLang is imported afterwards."""
    import torch

    smi = Path(folder) / "nvidia-smi"
    smi.write_text(SMI.format(**gpu))
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    major, minor = (int(part) for part in gpu["capability"].split("."))
    total = gpu["memory_mib"] << 20
    properties = SimpleNamespace(
        name=gpu["name"], major=major, minor=minor, total_memory=total, multi_processor_count=gpu["processors"]
    )
    torch.version.cuda = "13.0"
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (major, minor),
        "get_device_name": lambda *_: gpu["name"],
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (total, total),
    }.items():
        setattr(torch.cuda, name, value)


def draft_layers(text):
    """Layers of the model's own draft head, as SGLang's draft ModelConfig counts them."""
    return getattr(text, "mtp_num_hidden_layers", None) or getattr(text, "num_nextn_predict_layers", None)


def pools(server_args, case):
    """What KVCacheConfigurator makes of the given free memory."""
    import torch
    from sglang.srt import runtime_context
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig
    from sglang.srt.mem_cache import kv_cache_configurator as module
    from sglang.srt.model_executor.model_runner_components.layer_setup import ModelLayerInfo
    from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import SpecAuxHiddenStateConfig
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    runtime_context.reset_context()
    runtime_context.publish(server_args, role="scheduler", ranks=None)
    resolved = runtime_context.get_server_args()
    model = ModelConfig.from_server_args(resolved)
    layers = model.num_hidden_layers
    full, swa = model.full_attention_layer_ids, model.swa_attention_layer_ids
    spec = runtime_context.get_spec()
    algorithm = SpeculativeAlgorithm.from_string(spec.speculative_algorithm)
    drafts = None if spec.speculative_algorithm is None else draft_layers(model.hf_text_config)
    kv_dtype = {"auto": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}[runtime_context.get_model().kv_cache_dtype]
    with (
        patch.object(module, "get_available_gpu_memory", lambda *_, **__: case["free_after"] / GIB),
        runtime_context.get_parallel().override(world_group=SimpleNamespace(cpu_group=None)),
    ):
        made = module.KVCacheConfigurator(
            device="cuda",
            gpu_id=0,
            attn_dp_size=1,
            pp_size=1,
            pp_group=None,
            model=None,
            model_config=model,
            server_args=resolved,
            kv_cache_dtype=kv_dtype,
            kv_cache_dtype_str=runtime_context.get_model().kv_cache_dtype,
            model_dtype=torch.bfloat16,
            page_size=runtime_context.get_schedule().page_size,
            sliding_window_size=model.sliding_window_size,
            spec_algorithm=algorithm,
            is_draft_worker=False,
            post_capture_kv_active=False,
            spec_aux_config=SpecAuxHiddenStateConfig(eagle_draft_num_layers=drafts),
            is_hybrid_swa=model.is_hybrid_swa,
            is_hybrid_swa_compress=model.is_hybrid_swa_compress,
            use_mla_backend=model.attention_arch == AttentionArch.MLA,
            layer_info=ModelLayerInfo(
                start_layer=0,
                end_layer=layers,
                num_effective_layers=layers,
                swa_attention_layer_ids=swa,
                full_attention_layer_ids=full,
            ),
            forward_stream=None,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            memory_pool_config=None,
        )
        found = made._resolve_memory_pool_config(case["free_before"] / GIB)
    return {
        "tokens": found.max_total_num_tokens,
        "running": found.max_running_requests,
        "sliding_tokens": found.swa_max_total_num_tokens,
        "slots": runtime_context.get_schedule().max_mamba_cache_size if mambaish_config(model) else None,
    }


def answer(case, folders, environment):
    """The resolved arguments and, where memory is given, the pools; or SGLang's refusal."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args

    # SGLang hands some of its arguments on as variables of its own process.
    os.environ.clear()
    os.environ.update(environment)
    argv = ["--model-path", folders[case["name"]], "--trust-remote-code", *case["arguments"]]
    try:
        arguments = prepare_server_args(argv)
        arguments.resolve_once()
        arguments.check_server_args()
        view = resolving_view(arguments)
        graphs = view.cuda_graph_config
        found = {
            "fraction": view.mem_fraction_static,
            "chunk": view.chunked_prefill_size,
            "decode_batch": graphs.decode.max_bs,
            "page": view.page_size,
            "running": view.max_running_requests,
            "strategy": view.mamba_radix_cache_strategy,
            "overlap": not view.disable_overlap_schedule,
            "backend": view.attention_backend,
            "draft": [view.speculative_num_steps, view.speculative_eagle_topk, view.speculative_num_draft_tokens],
        }
        if "free_before" in case:
            try:
                found["pools"] = pools(arguments, case)
            except RuntimeError as error:
                # Its way of saying that nothing fits; the planner's is None.
                if "too small to serve any requests" not in str(error):
                    raise
                found["pools"] = None
        return found
    except (Exception, SystemExit) as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def ask(gpu, configs, cases):
    """Answers for the cases of one GPU, in this process."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        pretend(gpu, folder)
        folders = {}
        for name, config in configs.items():
            folders[name] = f"{folder}/{name}"
            Path(folders[name]).mkdir()
            Path(folders[name], "config.json").write_text(json.dumps(config))
        environment = dict(os.environ)
        return [answer(case, folders, environment) for case in cases]


def main():
    asked = json.load(sys.stdin)
    answers = [None] * len(asked["cases"])
    # SGLang remembers the device it has seen: one process for each.
    for name, gpu in asked["gpus"].items():
        mine = [place for place, case in enumerate(asked["cases"]) if case["gpu"] == name]
        read, write = os.pipe()
        if os.fork() == 0:
            os.close(read)
            found = ask({"name": name, **gpu}, asked["configs"], [asked["cases"][place] for place in mine])
            with os.fdopen(write, "w") as pipe:
                json.dump(found, pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            for place, found in zip(mine, json.load(pipe), strict=True):
                answers[place] = found
        os.wait()
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
