"""Somebody moves single packages of the driver: seen at once, told, and mended by the next run."""

import pytest
from conftest import NEW, OLD


@pytest.fixture(scope="module", autouse=True)
def _moved(machine, installed):
    """What an upgrade without pins and holds does to a host: NVML and the fabric manager run ahead of the module."""
    packages = f"libnvidia-ml1={NEW}-1 nvidia-fabricmanager={NEW}-1 nvidia-fabricmanager-570-"
    machine(
        "ssh",
        "sudo env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends "
        f"--allow-change-held-packages {packages} && (sudo systemctl restart nvidia-fabricmanager || true)",
    )


def test_nvml_and_fabric_manager_refuse(host, driver):
    assert driver.levels == (OLD, OLD, NEW, NEW)
    assert "Driver/library version mismatch" in host.run("nvidia-smi").stdout
    assert not host.service("nvidia-fabricmanager").is_running
    with host.sudo():
        assert f"version {NEW} don't match with driver version {OLD}" in host.check_output(
            "journalctl --boot --unit nvidia-fabricmanager --output cat"
        )
    # CUDA's own library is still the old one; without a fabric the system is not ready.
    assert driver.cuda_error() == 802


def test_the_host_reports_the_drift(host):
    with host.sudo():
        assert host.run("systemctl start metalserve-driver-drift.service").rc != 0
        text = host.check_output("journalctl --boot --unit metalserve-driver-drift.service --output cat")
    assert f"driver drift: the userland is {NEW}, not {OLD}" in text
    assert f"driver drift: the fabric manager is {NEW}, not {OLD}" in text


def test_the_next_run_mends_it(run_playbook, driver, host):
    boot = driver.boot
    result = run_playbook()
    assert result.rc == 0, result.end
    assert driver.levels == (OLD, OLD, OLD, OLD)
    assert driver.boot == boot
    assert driver.cuda_error() == 0
    assert host.service("nvidia-fabricmanager").is_running
