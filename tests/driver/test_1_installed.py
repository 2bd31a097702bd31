"""After a bare host with nouveau, a run killed before its reboot, and the run that healed it."""

import pytest
from conftest import OLD

HELD = ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "libcuda1", "libnvidia-ml1", "nvidia-fabricmanager-570")


def test_every_level_has_the_version(driver):
    assert driver.levels == (OLD, OLD, OLD, OLD)


def test_nouveau_is_gone_after_the_reboot(host):
    assert not host.file("/sys/module/nouveau").exists
    assert host.file("/sys/bus/pci/devices/0001:00:00.0/driver").linked_to == "/sys/bus/pci/drivers/nvidia"


def test_the_initramfs_keeps_nouveau_away(host):
    with host.sudo():
        assert "metalserve-nvidia.conf" in host.check_output("lsinitramfs /initrd.img")


def test_the_module_is_signed_by_dkms(host):
    with host.sudo():
        assert host.check_output("modinfo -F signer nvidia") == "DKMS module signing key"


def test_all_gpus_answer(driver):
    assert len(driver.gpus()) == 8
    assert driver.cuda_error() == 0


@pytest.mark.parametrize("unit", ["nvidia-persistenced", "nvidia-fabricmanager", "metalserve-driver-drift.timer"])
def test_services_run_and_come_back(host, unit):
    assert host.service(unit).is_enabled
    assert host.service(unit).is_running


@pytest.mark.parametrize("package", HELD)
def test_packages_are_held(host, package):
    assert package in host.check_output("apt-mark showhold").split()


def test_an_upgrade_that_nobody_asked_for_moves_nothing(host):
    """The repository has a newer driver; `apt-get upgrade` is what unattended upgrades do."""
    with host.sudo():
        answer = host.check_output("apt-get --simulate --option Debug::NoLocking=1 upgrade")
    assert "Inst nvidia" not in answer
    assert "Inst lib" not in answer
