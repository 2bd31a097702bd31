"""Routes of vLLM for developers: who reaches them rules the engine, so only its own host may."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any

from metalserve.engines.arguments import flag_name
from metalserve.errors import Refusal

# Variable -> what it opens (vLLM 0.32, entrypoints/launchers/api_server/routers.py and entrypoints/serve/lora;
# a key guards only what entrypoints/serve/middleware/authenticate.py names: /v1, /v2, /inference, /cohere).
VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "/collective_rpc, which calls any method of the workers, /sleep, /server_info and others, "
    "all without a key",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "/v1/load_lora_adapter, which loads any directory that the engine can read",
}
SLEEP = "enable-sleep-mode"
_OFF = ("", "0", "false")


def check_developer_routes(name: str, item: Mapping[str, Any]) -> None:
    """Refuse such routes on an address that others reach, and a sleep mode without the route that would use it.

    Args:
        name: of the deployment.
        item: the deployment, with its defaults.

    Raises:
        Refusal: naming the variable or flag, and the address.
    """
    if item["engine"] != "vllm":
        return
    opened = [
        variable
        for variable in VARIABLES
        if str((item.get("environment") or {}).get(variable, "")).strip().lower() not in _OFF
    ]
    address = str(item["bind_address"])
    for variable in opened:
        if not ip_address(address).is_loopback:
            raise Refusal(
                found=f"{variable} in environment of the deployment {name}, which listens on {address}",
                needed=f"bind_address 127.0.0.1: it opens {VARIABLES[variable]}",
                change=f"`bind_address` of {name} in serving_deployments, or remove environment.{variable}",
            )
    wants_sleep = any(flag_name(flag) == SLEEP and value for flag, value in (item.get("engine_args") or {}).items())
    if wants_sleep and "VLLM_SERVER_DEV_MODE" not in opened:
        raise Refusal(
            found=f"engine_args.{SLEEP} of the deployment {name}",
            needed="an engine that can be asked to sleep: its route exists only with VLLM_SERVER_DEV_MODE=1, which "
            f"opens {VARIABLES['VLLM_SERVER_DEV_MODE']}; so with bind_address 127.0.0.1 only",
            change=f"remove engine_args.{SLEEP}: stopping the unit frees the GPU as well",
        )
