"""The role's own refusals, each tripped: its assertions as they stand, on facts of hosts that are not in order."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from metalserve.driver_state import driver_data

ROOT = Path(__file__).resolve().parents[2]
ROLE = ROOT / "roles/nvidia_driver"
VERSION = "580.178.04"
GPUS = [
    {"pci_address": address, "source": "nvml", "fabric_state": None} for address in ("0000:10:00.0", "0000:20:00.0")
]
HOST = {
    "boot_id": "bbbb",
    "kernel": "6.12.1",
    "gpus": GPUS,
    "nvswitch_count": 0,
    "services": {"nvidia-fabricmanager": "missing"},
    "driver": {"loaded": VERSION, "on_disk": VERSION, "userland": VERSION, "fabric_manager": None},
}
SWITCHED = {
    **HOST,
    "nvswitch_count": 6,
    "services": {"nvidia-fabricmanager": "active"},
    "driver": {**HOST["driver"], "fabric_manager": VERSION},
}
BEFORE = {"boot_id": "aaaa", "gpus": ["0000:10:00.0", "0000:20:00.0"]}
NOTHING = {"action": "nothing", "reasons": ["driver 580.178.04 is loaded"], "packages": []}


def changed(host, **driver):
    host = copy.deepcopy(host)
    host["driver"].update(driver)
    return host


def with_gpu(**values):
    return {**SWITCHED, "gpus": [{**GPUS[0], **values}, GPUS[1]]}


VERIFY, REBOOT = "verify | Refuse a driver", "reboot | Refuse a host"
UNLOAD, SETTLE = "unload | Refuse to pull", "settle | Refuse an installation"
SOURCE, ASK = "source | Refuse a second", "ask | Refuse half"
# name: task, facts, variables, words of the refusal (None: it passes)
CASES = {
    "in order": (VERIFY, HOST, {}, None),
    "in order with switches": (VERIFY, SWITCHED, {}, None),
    "fabric completed": (VERIFY, with_gpu(fabric_state="completed"), {}, None),
    "old module loaded": (VERIFY, changed(HOST, loaded="570.1.2"), {}, "Driver loaded 570.1.2, on disk 580.178.04"),
    "no module on disk": (VERIFY, changed(HOST, on_disk=None), {}, f"Needed: {VERSION} on all levels, and every GPU"),
    "newer userland": (VERIFY, changed(HOST, userland="590.44.01"), {}, "userland 590.44.01"),
    "fabric manager off by a digit": (VERIFY, changed(SWITCHED, fabric_manager="580.178.05"), {}, "manager 580.178.05"),
    "fabric manager down": (
        VERIFY,
        {**SWITCHED, "services": {"nvidia-fabricmanager": "failed"}},
        {},
        "(failed); GPUs that the driver does not know: none",
    ),
    "fabric in progress": (VERIFY, with_gpu(fabric_state="in_progress"), {}, "fabric is not complete: 0000:10:00.0"),
    "GPU missing in NVML": (VERIFY, with_gpu(source="pci"), {}, "the driver does not know: 0000:10:00.0"),
    "came back": (REBOOT, HOST, {"step": NOTHING}, None),
    "did not restart": (REBOOT, {**HOST, "boot_id": "aaaa"}, {"step": NOTHING}, "the boot is aaaa (before: aaaa)"),
    "lost a GPU": (REBOOT, {**HOST, "gpus": GPUS[:1]}, {"step": NOTHING}, "the GPUs are 0000:10:00.0 (before: "),
    "needs another restart": (
        REBOOT,
        HOST,
        {"step": {**NOTHING, "action": "reboot", "reasons": ["nouveau drives the GPUs"]}},
        "needs: reboot (nouveau drives the GPUs)",
    ),
    "only our modules": (UNLOAD, HOST, {"modules": ["nvidia", "nvidia_uvm"]}, None),
    "somebody's module": (UNLOAD, HOST, {"modules": ["nvidia", "nvidia_fs"]}, "The modules nvidia_fs use the loaded"),
    "a key and its certificate": (ASK, HOST, {"key": "/k", "certificate": "/c"}, None),
    "neither of them": (ASK, HOST, {}, None),
    "a key alone": (
        ASK,
        HOST,
        {"key": "/k"},
        "nvidia_driver_signing_key is /k and nvidia_driver_signing_certificate is",
    ),
    "one description": (SOURCE, HOST, {"files": []}, None),
    "cuda-keyring": (
        SOURCE,
        HOST,
        {"files": ["/etc/apt/sources.list.d/cuda-debian13-x86_64.list"]},
        "The package source https://mirror/nvidia is in /etc/apt/sources.list.d/cuda-debian13-x86_64.list already",
    ),
    "installed": (SETTLE, HOST, {"step": NOTHING}, None),
    "not built": (
        SETTLE,
        HOST,
        {"step": {**NOTHING, "packages": ["the module on disk for kernel 6.12.1 is missing"]}, "words": "bad\nheaders"},
        "After the installation: the module on disk for kernel 6.12.1 is missing. bad headers Needed: 580.178.04",
    ),
}


def role_task(beginning):
    """The task of the role whose name begins so."""
    file = ROLE / "tasks" / f"{beginning.partition(' ')[0]}.yml"
    (task,) = [task for task in yaml.safe_load(file.read_text()) if task["name"].startswith(beginning)]
    return task


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("role")
    tasks = []
    for name, (beginning, facts, values, _words) in CASES.items():
        tasks.append({"name": "facts", "ansible.builtin.set_fact": {"gpu_host": facts, "cacheable": True}})
        task = role_task(beginning)
        variables = {
            "__nvidia_driver": {
                "plan": {
                    "step": values.get("step", NOTHING),
                    "packages": {"repository": {"url": "https://mirror/nvidia"}},
                }
            },
            "__nvidia_driver_descriptions": {"files": [{"path": path} for path in values.get("files", [])]},
            "nvidia_driver_signing_key": values.get("key"),
            "nvidia_driver_signing_certificate": values.get("certificate"),
            "__nvidia_driver_before": BEFORE,
            "__nvidia_driver_host": {"modules": [{"name": module} for module in values.get("modules", [])]},
            "__nvidia_driver_build": {"stderr": values.get("words", "")},
        }
        tasks.append({**task, "name": name, "ignore_errors": True, "vars": {**variables, **task.get("vars", {})}})
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars_files": [str(ROLE / "defaults/main.yml"), str(ROLE / "vars/main.yml")],
        "tasks": tasks,
    }
    (folder / "play.yml").write_text(yaml.safe_dump([play]))
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_LOAD_CALLBACK_PLUGINS": "true",
        "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
        "ANSIBLE_LOCAL_TEMP": str(folder / "local"),
    }
    command = [Path(sys.executable).with_name("ansible-playbook"), "-i", "localhost,", folder / "play.yml"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert run.stdout.startswith("{"), run.stdout + run.stderr
    return {task["task"]["name"]: task["hosts"]["localhost"] for task in json.loads(run.stdout)["plays"][0]["tasks"]}


@pytest.mark.parametrize("name", CASES)
def test_a_state_passes_or_is_refused_with_its_sentence(results, name):
    words = CASES[name][3]
    result = results[name]
    assert bool(result.get("failed")) == (words is not None), result
    if words is not None:
        text = " ".join(result["msg"].split())
        assert words in text
        assert "Needed: " in text
        assert "Change: " in text


def test_every_assertion_of_the_role_is_tripped_here():
    tripped = {CASES[name][0] for name in CASES if CASES[name][3]}
    there = [
        task["name"]
        for file in sorted((ROLE / "tasks").glob("*.yml"))
        for task in yaml.safe_load(file.read_text())
        if "ansible.builtin.assert" in task
    ]
    assert [name for name in there if not any(name.startswith(beginning) for beginning in tripped)] == []
    assert len(there) == len(tripped)


def test_the_role_and_the_data_name_the_same_services_and_modules():
    constants = yaml.safe_load((ROLE / "vars/main.yml").read_text())
    assert constants["__nvidia_driver_services"] == [service["unit"] for service in driver_data()["services"]]
    assert constants["__nvidia_driver_modules"] == driver_data()["modules"]


def test_the_default_version_is_the_data_s():
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
    assert defaults["nvidia_driver_version"] == driver_data()["default_version"]
