"""What the CUDA probe in a container means (remote/container_probe.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from metalserve.health.types import Row, data, fail, join, ok, warn

_WHEN = {"start": "in a new container", "daemon_reload": "after systemctl daemon-reload in a running container"}


def check_probes(facts: Mapping[str, Any], probes: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row for each image that was probed: {image, steps, postponed, proven}.

    `steps` are those of container_probe; `postponed` names the deployments that hold the GPUs, `proven` says that the
    same image, driver and specification have passed before in this boot.
    """
    return [_one(facts, probe) for probe in probes]


def _one(facts: Mapping[str, Any], probe: Mapping[str, Any]) -> Row:
    image = str(probe["image"])
    name = "cuda_probe"
    if probe.get("postponed"):
        return warn(
            name,
            f"not run: {', '.join(probe['postponed'])} hold the GPUs (image {image})",
            "a CUDA initialisation in a container",
            "it runs when the engines are stopped; a running engine has initialised CUDA itself",
        )
    if probe.get("proven"):
        return ok(name, f"{image} has passed with this driver and specification in this boot")
    gpus = [gpu for gpu in facts.get("gpus") or [] if gpu.get("source") != "pci"]
    for step in probe["steps"]:
        bad = _step(step, gpus, facts, image)
        if bad:
            return bad
    if [step["when"] for step in probe["steps"]] != ["start", "daemon_reload"]:
        return fail(
            name, f"the probe in {image} ended early", "a run at the start and one after a daemon-reload", "run again"
        )
    return ok(name, f"{image}: CUDA works on {len(gpus)} GPUs, also after a daemon-reload")


def _step(
    step: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], image: str
) -> Row | None:
    name = "cuda_probe"
    where = f"{_WHEN[step['when']]} of {image}"
    answer = step.get("answer")
    if answer is None:
        return fail(
            name,
            f"{where}: {step.get('error')}",
            "a container with python3 and the GPUs of the CDI specification",
            "the cause is in the sentence: image, CDI specification or Docker",
        )
    if not answer["ok"]:
        return _cuda_error(answer, where, step["when"], facts)
    broken = [f"GPU {device['index']}" for device in answer["devices"] if not device["memory_works"]]
    if broken:
        return fail(
            name,
            f"{where}: what was read back differs from what was written on {join(broken)}",
            "the same bytes",
            "take the GPU out of service and run dcgmi diag -r 3",
        )
    seen = sorted(device["uuid"] for device in answer["devices"])
    wanted = sorted(gpu["uuid"] for gpu in gpus if gpu.get("uuid"))
    if wanted and not any(gpu.get("mig_enabled") for gpu in gpus) and seen != wanted:
        missing = sorted(set(wanted) - set(seen))
        strange = sorted(set(seen) - set(wanted))
        return fail(
            name,
            f"{where}: {len(seen)} GPUs"
            + (f", without {', '.join(missing)}" if missing else "")
            + (f", with {', '.join(strange)}" if strange else ""),
            f"the {len(wanted)} GPUs of the host",
            "refresh the CDI specification (systemctl restart metalserve-cdi.service)",
        )
    return None


def _cuda_error(answer: Mapping[str, Any], where: str, when: str, facts: Mapping[str, Any]) -> Row:
    error = answer["error"]
    if error["code"] is None:
        return fail(
            "cuda_probe",
            f"{where}: the CUDA library could not be used: {error.get('text')}",
            "libcuda.so.1 of the host's driver in the container",
            "refresh the CDI specification; its mounts bring the library",
        )
    known = data("cuda_errors.yaml")["codes"].get(error["code"])
    cause = known["cause"] if known else "no known cause"
    remedy = known["remedy"] if known else "look at the kernel's log of the host (journalctl -k -b)"
    library = answer.get("library") or ""
    if error["code"] == 803 and "compat" in library:
        cause = f"the image's own {library} was loaded instead of the host's driver"
    if when == "daemon_reload":
        cause = (
            "the container lost its GPUs when systemd applied its device rules again"
            if error["code"] in (100, 999)
            else cause
        )
    driver = (facts.get("driver") or {}).get("loaded")
    said = f"{error['call']} returned {error['code']} ({error['name']})"
    return fail(
        "cuda_probe",
        f"{where}: {said}: {cause} (library {library or 'unknown'}, driver {driver})",
        "CUDA initialised on every GPU",
        remedy,
    )
