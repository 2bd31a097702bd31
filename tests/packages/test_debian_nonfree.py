"""NVIDIA's real packages, as Debian 13 has them in non-free, against what the role decides about packages.

Installs 550.163.01 (open modules) for real in a container of the lab VM's image, less the compilation of the modules:
the headers are taken away, so DKMS registers them and builds none. What apt offers, resolves, installs and lists is
real. Not part of the usual tests, because it loads some 200 MB from Debian: make test-packages.
"""

import json
import subprocess
from pathlib import Path

import pytest

from metalserve.driver_packages import (
    driver_packages,
    is_driver_package,
    package_changes,
    package_versions,
    packages_to_hold,
    simulated_packages,
)
from metalserve.driver_plan import _offers

PROJECT = Path(__file__).resolve().parents[2]
VERSION = "550.163.01"
FACTS = {"os": {"id": "debian", "version_id": "13", "like": ["debian"]}, "kernel": "6.12", "architecture": "x86_64"}
LOOK = """
import json, sys
sys.path.insert(0, "/src/metalserve")
from remote.driver_host import installed_packages
from remote.host_driver import read_driver
from remote.host_probe import Host, Tree, run_command
host = Host(Tree("/"), Tree("/"), run_command, 60)
print(json.dumps({"packages": installed_packages(host, "apt"), "driver": read_driver(host).value}))
"""


def run(*argv):
    process = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=1800)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    return process.stdout


@pytest.fixture(scope="module")
def names():
    return driver_packages(FACTS, VERSION, source="distribution")["names"]


@pytest.fixture(scope="module")
def container():
    image = run("bash", "-c", f". {PROJECT}/lab/vm/lib.sh && build_vm_image && echo $VM_IMAGE").strip()
    name = run("docker", "run", "-d", "-v", f"{PROJECT}/src:/src:ro", image, "sleep", "infinity").strip()
    try:

        def execute(*argv):
            return run("docker", "exec", "-e", "DEBIAN_FRONTEND=noninteractive", "-e", "LC_ALL=C", name, *argv)

        execute("sed", "-i", "s/ main$/ main contrib non-free non-free-firmware/", "/etc/apt/sources.list")
        execute("sh", "-c", "rm /lib/modules/*/build")
        execute("apt-get", "update", "--quiet", "-oAcquire::Languages=none")
        yield execute
    finally:
        run("docker", "rm", "--force", name)


@pytest.fixture(scope="module")
def exact(container, names):
    """What the role would ask apt for, from what Debian offers."""
    offers = _offers(container("apt-cache", "madison", *names))
    return package_versions(names, [], offers)


@pytest.fixture(scope="module")
def seen(container, exact):
    """The host after a real installation."""
    container("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *exact)
    return json.loads(container("python3", "-c", LOOK))


def test_one_revision_of_each_is_offered(exact, names):
    assert {entry.partition("=")[0] for entry in exact} == set(names)
    assert all(f"={VERSION}-" in entry for entry in exact)


def test_apt_resolves_to_one_version_and_leaves_the_kernel(container, exact):
    text = container("apt-get", "install", "--simulate", "--no-install-recommends", *exact)
    assert set(exact) <= set(simulated_packages(text, VERSION))


def test_nothing_is_left_to_do_after_the_installation(seen, names):
    assert package_changes(names, seen["packages"]) == []


def test_another_version_would_be_a_change(seen, names):
    assert package_changes(dict.fromkeys(names, "580.178.04"), seen["packages"])


def test_the_userland_is_found_where_debian_puts_it(seen):
    assert seen["driver"]["userland"] == VERSION
    assert seen["driver"]["loaded"] is None


def test_every_part_of_the_driver_would_be_held(seen, names):
    versioned = {entry["name"] for entry in seen["packages"] if str(entry["version"]).startswith(VERSION)}
    assert versioned
    assert all(is_driver_package(name) for name in versioned)
    assert versioned | set(names) <= set(packages_to_hold(seen["packages"], names, kernel=False))
