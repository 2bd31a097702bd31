"""What an engine's unit does before it starts: find its image and the CPUs near its GPUs, and wait for free memory.

The last engine's memory may not be released yet when systemd starts the next one. What does not go away is named, never
killed: it is somebody's work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from .files import read_json_object, read_text, write_text
from .gate_key import read_api_key
from .image_list import local_name
from .readiness import run_command

MIB = 1024 * 1024
PLACEMENT_FILE = "placement.env"
# For `docker run --env-file`: in a directory that only root reads and that goes with the unit, never on a command line.
SECRET_FILE = "secret.env"  # noqa: S105 (a file name)
KEY_FILE_VARIABLE = "METALSERVE_API_KEY_FILE"
Runner = Callable[[Sequence[str]], str]
_GPUS = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id,memory.free", "--format=csv,noheader,nounits"]
_PROCESSES = [
    "nvidia-smi",
    "--query-compute-apps=gpu_uuid,pid,process_name,used_memory",
    "--format=csv,noheader,nounits",
]


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi tells of it."""

    index: int
    uuid: str
    pci_address: str
    free_bytes: int


def read_gpus(run: Runner = run_command) -> list[Gpu]:
    """The GPUs of this host; none when nvidia-smi is missing or says nothing."""
    gpus = []
    for line in run(_GPUS).splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[0].isdigit() and cells[3].isdigit():
            # nvidia-smi writes eight digits of domain, sysfs four.
            address = cells[2].lower()[-12:]
            gpus.append(Gpu(int(cells[0]), cells[1], address, int(cells[3]) * MIB))
    return gpus


def needed_bytes(release: Mapping[str, Any]) -> int:
    """What the engine will ask for on each of its GPUs before it loads anything, in bytes; 0 where that is not known.

    vLLM refuses to start with less than its share of the whole memory free (v1/worker/utils.py, request_memory).
    """
    plan = release.get("plan") or {}
    share, total = plan.get("gpu_memory_utilization"), plan.get("gpu_memory_bytes")
    return int(share * total) if share and total else 0


def wait_for_memory(
    release: Mapping[str, Any],
    timeout_seconds: float,
    *,
    run: Runner = run_command,
    pause_seconds: float = 2.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[bool, str]:
    """Wait until each GPU of a release has the memory free that its engine asks for.

    Returns:
        Whether it has, and a sentence; with a GPU that stays full, the processes that hold it.
    """
    wanted = set((release.get("plan") or {}).get("gpus_used") or [])
    needed = needed_bytes(release)
    if not wanted or not needed:
        return True, "no GPU memory to wait for"
    started = clock()
    while True:
        gpus = read_gpus(run)
        if not gpus:
            return True, "nvidia-smi tells of no GPU; the engine will say what is wrong"
        full = [gpu for gpu in gpus if gpu.index in wanted and gpu.free_bytes < needed]
        if not full:
            return True, f"{_gib(needed)} GiB are free on each GPU of the release after {clock() - started:.0f} s"
        if clock() - started >= timeout_seconds:
            return False, _full(full, needed, timeout_seconds, run)
        sleep(pause_seconds)


def _full(full: Sequence[Gpu], needed: int, timeout_seconds: float, run: Runner) -> str:
    states = ", ".join(f"GPU {gpu.index} has {_gib(gpu.free_bytes)} GiB free" for gpu in full)
    uuids = {gpu.uuid: gpu.index for gpu in full}
    holders = []
    for line in run(_PROCESSES).splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[0] in uuids:
            holders.append(f"process {cells[2]} (pid {cells[1]}) holds {cells[3]} MiB of GPU {uuids[cells[0]]}")
    held = "; ".join(holders) or "no process is known to hold it"
    return (
        f"{states} after {timeout_seconds:.0f} s: {held}. Needed: {_gib(needed)} GiB free on each. Change: end that "
        "process (nothing here kills it), or lower memory_share of the deployment."
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**3:.1f}"


def placement(release: Mapping[str, Any], *, run: Runner = run_command, sysfs: Path = Path("/sys")) -> Optional[str]:
    """The CPUs of the NUMA node that all GPUs of a release hang on, as Linux writes them (`0-31,64-95`).

    None on a host with one node, or when the GPUs hang on several. Memory follows from where the threads run.
    """
    wanted = set((release.get("plan") or {}).get("gpus_used") or [])
    nodes = sorted((sysfs / "devices/system/node").glob("node[0-9]*"))
    if not wanted or len(nodes) < 2:
        return None
    near = {
        (read_text(sysfs / "bus/pci/devices" / gpu.pci_address / "numa_node") or "-1").strip()
        for gpu in read_gpus(run)
        if gpu.index in wanted
    }
    if len(near) != 1 or "-1" in near:
        return None
    cpus = (read_text(sysfs / "devices/system/node" / f"node{near.pop()}" / "cpulist") or "").strip()
    return cpus or None


def prepare_start(
    directory: Path, runtime: Path, timeout_seconds: float, *, run: Runner = run_command, sysfs: Path = Path("/sys")
) -> tuple[bool, list[str]]:
    """Get ready to start the release in `directory`; GPU memory is waited for.

    Its placement, the name of its image on this host and its key go into `runtime`.

    Returns whether the engine may start, and what to say.

    Raises:
        OSError: a file cannot be written.
        ValueError: the release names a key file that holds no key.
    """
    release = read_json_object(directory / "release.json")
    key_file = (release.get("environment") or {}).get(KEY_FILE_VARIABLE)
    key = f"VLLM_API_KEY={read_api_key(key_file)}\n" if key_file else ""
    write_text(runtime / SECRET_FILE, key, mode=0o600)
    cpus = placement(release, run=run, sysfs=sysfs)
    lines = f"METALSERVE_PLACEMENT={f'--cpuset-cpus={cpus}' if cpus else ''}\n"
    # The release names its image by digest; the name under which it is here may be that of a mirror.
    image = str(release.get("image") or "")
    here = local_name(image, run) if image else None
    if here and here != image:
        lines += f"METALSERVE_IMAGE={here}\n"
    write_text(runtime / PLACEMENT_FILE, lines)
    free, sentence = wait_for_memory(release, timeout_seconds, run=run)
    near = [f"the CPUs {cpus} are near its GPUs"] if cpus else []
    return free, [*near, sentence]
