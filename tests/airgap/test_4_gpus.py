"""What a host with GPUs gets from the bundle. The GPUs are simulated: files stand for devices and the loaded driver.

The driver's packages are only resolved here: a container has no kernel of its own to load a module into.
"""

import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
APT = "APT_CONFIG=/run/metalserve/bundle/apt.conf apt-get --quiet --quiet --option=Dir::Etc::PreferencesParts=/tmp/none"
DRIVER = "580.178.04"
HOST = "metalserve-molecule-airgap"


@pytest.fixture(scope="module")
def gpus(cache):
    """Two H200s on the scenario's host, as the scenario `toolkit` simulates them."""
    for source, target in (
        (cache / "airgap/nvidia", "/srv/nvidia"),
        (PROJECT / "molecule/toolkit/simulate_gpus", "/root/simulate_gpus"),
    ):
        subprocess.run(["docker", "cp", str(source), f"{HOST}:{target}"], check=True, capture_output=True)
    subprocess.run(["docker", "exec", HOST, "sh", "/root/simulate_gpus", DRIVER], check=True, capture_output=True)


def test_the_drivers_packages_are_all_in_the_bundle_in_one_version(host):
    """Asked as the role nvidia_driver asks."""
    names = ["nvidia-driver-cuda", "libcuda1", "nvidia-persistenced", "nvidia-modprobe", "nvidia-kernel-open-dkms"]
    asked = " ".join(f"{name}={DRIVER}-1" for name in [*names, "nvidia-fabricmanager"])
    planned = host.check_output(f"{APT} install --simulate --no-install-recommends {asked}").splitlines()
    versions = {line.split()[1]: line.split("(")[1].split()[0] for line in planned if line.startswith("Inst ")}
    ours = {name: version for name, version in versions.items() if "nvidia" in name or name == "libcuda1"}
    assert set(names) < set(ours)
    assert "libnvidia-ml1" in ours
    assert set(ours.values()) == {f"{DRIVER}-1"}
    assert "dkms" in versions


def test_the_container_toolkit_is_installed_from_the_bundle(gpus, host, run_playbook):
    """By its role, with nothing said of a repository."""
    given = {
        "gpu_facts_device_root": "/var/lib/metalserve-lab/devices",
        "nvidia_driver_manage": False,
        "gpu_health_expected": {"gpu_count": 2, "gpu_pci_ids": ["10de:2335", "10de:2335"], "driver_version": DRIVER},
    }
    done = run_playbook("playbooks/prepare.yml", given)
    assert done.rc == 0, done.text[-3000:]
    policy = host.check_output("APT_CONFIG=/run/metalserve/bundle/apt.conf apt-cache policy nvidia-container-toolkit")
    assert "Installed: 1.20.0-1" in policy
    assert ":8748/packages/debian-13" in policy
    assert host.run("grep -rl 'nvidia.github.io\\|8748' /etc/apt/sources.list.d").stdout == ""
    assert host.check_output("apt-mark showhold").split().count("nvidia-container-toolkit") == 1
    assert host.file("/var/run/cdi/nvidia.yaml").exists
    again = run_playbook("playbooks/prepare.yml", given)
    assert (again.rc, "changed=0" in again.text) == (0, True), again.text[-3000:]
