"""From the old driver to the new one by a reload of its modules, in the whole stage `prepare`: the host stays up."""

import pytest
from conftest import NEW, OLD

WANTED = {"nvidia_driver_version": NEW, "nvidia_driver_end_of_life_allowed": False}


@pytest.fixture(scope="module", autouse=True)
def _start(machine, installed):
    machine("load", installed)


def test_a_process_in_the_way_is_named_and_left_alone(host, driver, run_playbook):
    with host.sudo():
        host.check_output("systemd-run --unit=lab-holder sh -c 'exec 3</dev/nvidia0; exec sleep infinity'")
        pid = host.check_output("systemctl show lab-holder --property=MainPID --value")
    result = run_playbook(WANTED)
    assert result.rc != 0, result.end
    assert f"pid {pid}" in result.text
    assert not result.changed, result.end
    assert host.service("lab-holder").is_running
    assert driver.levels == (OLD, OLD, OLD, OLD)


def test_the_upgrade_reloads_and_does_not_reboot(host, driver, run_playbook_file):
    with host.sudo():
        host.run("systemctl stop lab-holder")
    boot = driver.boot
    result = run_playbook_file("playbooks/prepare.yml", {**WANTED, "nvidia_driver_reboot_allowed": None})
    assert result.rc == 0, result.end
    assert driver.boot == boot
    assert driver.levels == (NEW, NEW, NEW, NEW)
    assert len(driver.gpus()) == 8
    assert driver.cuda_error() == 0
    for unit in ("nvidia-persistenced", "nvidia-fabricmanager"):
        assert host.service(unit).is_running
        assert host.service(unit).is_enabled


def test_the_companion_has_its_new_name(host):
    assert not host.package("nvidia-fabricmanager-570").is_installed
    assert host.package("nvidia-fabricmanager").version == f"{NEW}-1"
