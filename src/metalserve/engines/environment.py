"""The container environment of a deployment: defaults, what a CPU host needs, and the deployment's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from metalserve.engines.claims import claim_of_name
from metalserve.engines.owners import owned_variables
from metalserve.errors import Refusal

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_WORDS = {"KEY", "KEYS", "TOKEN", "PASSWORD", "PASSWD", "SECRET", "CREDENTIAL", "CREDENTIALS"}
# Names that end like this hold a place, not a secret.
_PLACES = ("_FILE", "_PATH", "_DIR")

# systemd's EnvironmentFile treats quotes and backslashes as syntax, docker's --env-file takes them literally;
# neither can hold a line break. Without these characters both read the same value.
_DIFFERENT = re.compile(r"[\"'\\\n\r\0]")


def _refuse(name: str, found: str, needed: str) -> Refusal:
    return Refusal(found=found, needed=needed, change=f"environment.{name} of the deployment")


def check_line_value(name: str, value: str) -> str:
    """A value that systemd's ``EnvironmentFile=`` and docker's ``--env-file`` read alike.

    Raises:
        Refusal: quotes, backslashes, control characters, or white space at an end.

    """
    if _DIFFERENT.search(value) or not value.isprintable():
        raise _refuse(
            name,
            f"the value of {name} holds a quote, a backslash, a line break or a control character",
            "a value without them, because systemd and docker read them differently",
        )
    if value != value.strip():
        raise _refuse(
            name,
            f"the value of {name} begins or ends with white space",
            "a value without it, because systemd strips it and docker keeps it",
        )
    return value


def check_environment(engine: str, mapping: Mapping[str, Any]) -> dict[str, str]:
    """Check the environment a deployment adds to its engine's container.

    Returns:
        The same variables with their values as text.

    Raises:
        Refusal: an impossible name or value, a secret, a variable with an owner, or one that does nothing.

    """
    checked = {}
    for key, value in mapping.items():
        name = str(key)
        if _NAME.fullmatch(name) is None:
            raise _refuse(name, f"'{name}' as the name of a variable", "letters, digits and underscores")
        claim = claim_of_name(engine, name)
        if claim is not None:
            raise _refuse(name, f"the variable {name}. {claim.truth}", claim.instead[engine])
        if name.startswith("DOCKER_") or name in ("HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH"):
            raise _refuse(
                name,
                f"the variable {name}, which the docker command on the host would read as well",
                "a variable of the engine; the container's own paths come with its image",
            )
        if name.startswith("METALSERVE_"):
            raise _refuse(name, f"the variable {name}", "a name without METALSERVE_; those belong to the release")
        if name in owned_variables():
            raise Refusal(
                found=f"the variable {name} in environment",
                needed="that setting follows from the deployment's own fields",
                change=f"{owned_variables()[name]}, instead of environment.{name}",
            )
        if _SECRET_WORDS & set(name.upper().split("_")) and not name.upper().endswith(_PLACES):
            raise _refuse(
                name,
                f"the variable {name}, which looks like a secret",
                "no secret in the inventory's plain variables or in a release, which everyone on the host can read",
            )
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise _refuse(
                name, f"{name} with a value of type {type(value).__name__}", "a text or a number, such as '1'"
            )
        checked[name] = check_line_value(name, str(value))
    return checked


def engine_environment(deployment: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, str]:
    """Environment of the engine's container, sorted by name.

    The defaults keep the engine from the network (weights are staged, nothing is reported) and put its
    compile caches under ``/root/.cache``, which outlives the container. The deployment's own variables win.

    Raises:
        Refusal: as ``check_environment``.

    """
    engine = deployment["engine"]
    environment = {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "METALSERVE_DEPLOYMENT": check_line_value("METALSERVE_DEPLOYMENT", deployment["name"]),
        "TRITON_CACHE_DIR": "/root/.cache/triton",
    }
    if engine == "vllm":
        environment["VLLM_NO_USAGE_STATS"] = "1"
        if deployment.get("log_level"):
            environment["VLLM_LOGGING_LEVEL"] = deployment["log_level"].upper()
    if plan["device"] == "cpu":
        if engine == "vllm":
            # Several engines share a lab host's few cores; pinning each to all of them would serialise both.
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        else:
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
    else:
        environment["CUDA_CACHE_PATH"] = "/root/.cache/nv"
    environment.update(check_environment(engine, deployment.get("environment") or {}))
    return dict(sorted(environment.items()))
