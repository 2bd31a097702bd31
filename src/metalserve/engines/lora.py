"""What the LoRA adapters of a deployment mean in the flags of each engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metalserve.engines.flags import FlagTable

# Where the unit mounts an adapter: /adapters/<key>.
CONTAINER_DIRECTORY = "/adapters"


def vllm_adapters(deployment: Mapping[str, Any], table: FlagTable) -> dict[str, Any]:
    """VLLM's flags; all adapters stay in the host's memory, and as many as there are slots in the GPU's.

    Naming the modules keeps the engine from reserving buffers for every other one, experts above all.
    """
    lora = deployment.get("lora")
    if lora is None:
        return {}
    settings: dict[str, Any] = {
        "enable-lora": True,
        "lora-modules": _paths(deployment),
        "max-loras": lora.adapters.slots,
        "max-lora-rank": lora.adapters.rank,
        "max-cpu-loras": len(lora.records),
    }
    if lora.adapters.modules is not None and table.find("lora-target-modules") is not None:
        settings["lora-target-modules"] = sorted(lora.adapters.modules)
    return settings


def sglang_adapters(deployment: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's flags but for the adapters themselves, which it does not read from a file: `command_words`."""
    lora = deployment.get("lora")
    if lora is None:
        return {}
    return {
        "enable-lora": True,
        "max-lora-rank": lora.adapters.rank,
        "max-loras-per-batch": lora.adapters.slots,
    }


def command_words(deployment: Mapping[str, Any]) -> tuple[str, ...]:
    """What has to stand on the engine's command line, because its file cannot say it."""
    if deployment.get("lora") is None or deployment["engine"] != "sglang":
        return ()
    return ("--lora-paths", *_paths(deployment))


def _paths(deployment: Mapping[str, Any]) -> list[str]:
    return [f"{record['name']}={CONTAINER_DIRECTORY}/{record['key']}" for record in deployment["lora"].records]
