"""Packages of a driver: names for each system, exact versions, what apt would do."""

from __future__ import annotations

import pytest

from metalserve.driver_packages import (
    driver_packages,
    is_driver_package,
    package_changes,
    package_versions,
    packages_to_hold,
    simulated_packages,
    stray_packages,
    superseded_packages,
    system_key,
    upstream,
)
from metalserve.driver_state import driver_data
from metalserve.errors import Refusal

VERSION = "580.178.04"
URL = "https://mirror/debian13"


def facts(name="debian", version="13", like=(), **values):
    system = {"id": name, "version_id": version, "like": [name, *like]}
    return {"os": system, "kernel": "6.12.1", "architecture": "x86_64", "nvswitch_count": 0, **values}


ROCKY = ("rhel", "centos", "fedora")
SYSTEMS = {
    "debian12": facts(version="12"),
    "debian13": facts(),
    "ubuntu22.04": facts("ubuntu", "22.04", ["debian"]),
    "ubuntu24.04": facts("ubuntu", "24.04", ["debian"]),
    "el8": facts("rocky", "8.10", ROCKY),
    "el9": facts("almalinux", "9.6", ROCKY),
    "el10": facts("rhel", "10.1", ["fedora"]),
}


@pytest.mark.parametrize("key", SYSTEMS)
def test_each_system_has_its_packages(key):
    assert system_key(SYSTEMS[key]["os"]) == key
    for flavour in ("open", "proprietary"):
        found = driver_packages(SYSTEMS[key], VERSION, flavour=flavour)
        assert set(found["names"].values()) == {VERSION}
        assert found["manager"] == ("dnf" if key.startswith("el") else "apt")
        assert found["headers"] == ("kernel-devel-6.12.1" if key.startswith("el") else "linux-headers-6.12.1")
        assert found["repository"]["url"].endswith("/x86_64")


def test_all_systems_of_the_data_are_tried_here():
    assert set(driver_data()["systems"]) == set(SYSTEMS)


def test_names_are_those_of_the_system():
    debian = driver_packages(SYSTEMS["debian13"], VERSION)["names"]
    assert list(debian) == [
        "nvidia-driver-cuda",
        "libcuda1",
        "nvidia-persistenced",
        "nvidia-modprobe",
        "nvidia-kernel-open-dkms",
    ]
    assert list(driver_packages(SYSTEMS["ubuntu24.04"], VERSION)["names"]) == ["nvidia-open"]
    assert "kmod-nvidia-open-dkms" in driver_packages(SYSTEMS["el9"], VERSION)["names"]


@pytest.mark.parametrize(
    ("key", "flavour", "stream"),
    [
        ("el8", "open", "580-open"),
        ("el9", "proprietary", "580-dkms"),
        ("el10", "open", None),
        ("debian13", "open", None),
    ],
)
def test_el_8_and_9_have_module_streams(key, flavour, stream):
    assert driver_packages(SYSTEMS[key], VERSION, flavour=flavour)["stream"] == stream


@pytest.mark.parametrize(
    ("key", "version", "name"),
    [
        ("debian13", VERSION, "nvidia-fabricmanager"),
        ("debian13", "570.195.03", "nvidia-fabricmanager-570"),
        ("el9", VERSION, "nvidia-fabricmanager"),
        ("el9", "570.195.03", "nvidia-fabric-manager"),
    ],
)
def test_the_fabric_manager_is_there_by_the_switch(key, version, name):
    assert name not in driver_packages(SYSTEMS[key], version)["names"]
    assert driver_packages({**SYSTEMS[key], "nvswitch_count": 6}, version)["names"][name] == version


def test_nvlink_5_brings_the_subnet_manager_in_its_own_version():
    names = driver_packages(SYSTEMS["debian13"], VERSION, nvlink5=True, nvlsm_version="2025.10.9-1")["names"]
    assert names["nvlsm"] == "2025.10.9-1"
    assert names["nvidia-fabricmanager"] == VERSION


def test_a_mirror_replaces_the_address_and_keeps_the_keys():
    own = driver_packages(SYSTEMS["debian13"], VERSION)["repository"]
    assert own["url"] == "https://developer.download.nvidia.com/compute/cuda/repos/debian13/x86_64"
    mirror = driver_packages(SYSTEMS["debian13"], VERSION, repository_url="file:///srv/nvidia/")["repository"]
    assert mirror["key_url"] == "file:///srv/nvidia/8793F200.pub"
    assert mirror["fingerprints"] == own["fingerprints"]


def test_arm_servers_have_a_directory_of_their_own():
    arm = driver_packages(facts(architecture="aarch64"), VERSION)
    assert arm["repository"]["url"].endswith("/debian13/sbsa")


def test_the_distribution_s_own_has_no_repository():
    found = driver_packages(SYSTEMS["debian13"], "550.163.01", source="distribution")
    assert found["repository"] is None
    assert "nvidia-open-kernel-dkms" in found["names"]


@pytest.mark.parametrize(
    ("host", "options", "text"),
    [
        (facts("fedora", "42"), {}, "operating system fedora 42. Needed: Debian 12 or 13"),
        (facts("debian", "11"), {}, "operating system debian 11. Needed: Debian 12 or 13"),
        (facts("rocky", "7.9", ROCKY), {}, "operating system rocky 7.9"),
        (
            SYSTEMS["el9"],
            {"source": "distribution"},
            "nvidia_driver_source 'distribution' on el9. Needed: cuda. Change",
        ),
        (
            SYSTEMS["debian13"],
            {"source": "ppa"},
            "nvidia_driver_source 'ppa' on debian13. Needed: cuda or distribution",
        ),
        (
            facts(architecture="riscv64"),
            {},
            "architecture riscv64. Needed: x86_64 or aarch64. Change: nvidia_driver_rep",
        ),
        (
            SYSTEMS["debian13"],
            {"nvlink5": True},
            "Needed: the package nvlsm in an exact version. Change: nvidia_driver_nvl",
        ),
    ],
)
def test_what_has_no_packages_is_refused(host, options, text):
    with pytest.raises(Refusal) as refusal:
        driver_packages(host, VERSION, **options)
    assert text in str(refusal.value)


# ---- what is installed ----


def package(name, version, held=False):
    return {"name": name, "version": version, "held": held}


NAMES = {"nvidia-driver-cuda": VERSION, "nvidia-kernel-open-dkms": VERSION, "nvlsm": "2025.10.9-1"}
RIGHT = [
    package("nvidia-driver-cuda", f"{VERSION}-1"),
    package("nvidia-kernel-open-dkms", f"{VERSION}-1"),
    package("nvlsm", "2025.10.9-1"),
    package("libnvidia-ml1", f"{VERSION}-1"),
    package("nvidia-container-toolkit", "1.20.0-1"),
    package("linux-image-6.12.1", "6.12.1-1"),
    package("linux-image-amd64", "6.12.1-1"),
]


def test_versions_are_compared_without_epoch_and_revision():
    assert [upstream(text) for text in (VERSION, f"{VERSION}-1", f"3:{VERSION}-1.el9", f"{VERSION}-0ubuntu1")] == [
        VERSION
    ] * 4


def test_packages_of_the_toolkit_are_not_the_driver_s():
    names = [
        "nvidia-container-toolkit-base",
        "libnvidia-container1",
        "nvidia-driver-pinning-580",
        "nvlsm",
        "cuda-toolkit",
    ]
    assert [name for name in names if is_driver_package(name)] == []
    names = ["libcuda1", "nvidia-smi", "firmware-nvidia-gsp", "libnvsdm", "kmod-nvidia-open-dkms", "cuda-drivers-580"]
    assert [name for name in names if not is_driver_package(name)] == []


@pytest.mark.parametrize(
    ("installed", "changes"),
    [
        (RIGHT, []),
        (RIGHT[1:], ["nvidia-driver-cuda is missing"]),
        ([package("nvidia-driver-cuda", "570.195.03-1"), *RIGHT[1:]], ["nvidia-driver-cuda is 570.195.03-1"]),
        ([*RIGHT, package("nvidia-smi", "590.44.01-1")], ["nvidia-smi is 590.44.01-1"]),
        ([*RIGHT[:2], package("nvlsm", "2025.9.1-1")], ["nvlsm is 2025.9.1-1"]),
    ],
)
def test_differences_are_named(installed, changes):
    assert package_changes(NAMES, installed) == changes


def test_the_driver_and_the_kernel_s_meta_packages_are_held():
    driver = ["libnvidia-ml1", "nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvlsm"]
    assert packages_to_hold(RIGHT, NAMES, kernel=False) == driver
    # A kernel itself never moves: a newer one is another package, which the meta package would bring.
    assert packages_to_hold(RIGHT, NAMES, kernel=True) == sorted([*driver, "linux-image-amd64"])


@pytest.mark.parametrize(
    "name",
    [
        "linux-image-cloud-amd64",
        "linux-headers-amd64",
        "linux-generic",
        "linux-generic-hwe-24.04",
        "linux-aws",
        "kernel",
    ],
)
def test_a_meta_package_of_the_kernel_is_known(name):
    assert packages_to_hold([package(name, "1")], {}, kernel=True) == [name]


@pytest.mark.parametrize(
    "name", ["linux-base", "linux-libc-dev", "linux-image-6.12.1-amd64", "kernel-headers", "linux-perf"]
)
def test_other_packages_of_the_kernel_are_not_held(name):
    assert packages_to_hold([package(name, "1")], {}, kernel=True) == []


def test_companions_of_an_older_branch_are_known_by_their_old_names():
    installed = [
        *RIGHT,
        package("nvidia-fabricmanager-570", "570.195.03-1"),
        package("libnvidia-nscq-570", "570.195.03-1"),
    ]
    assert superseded_packages(NAMES, installed) == ["libnvidia-nscq-570", "nvidia-fabricmanager-570"]
    # On the older branch itself that is their name.
    names = {"nvidia-fabricmanager-570": "570.195.03"}
    assert superseded_packages(names, installed[-2:-1]) == []


def test_a_library_that_ran_ahead_is_asked_for_by_name():
    installed = [*RIGHT, package("libnvidia-ml1", "590.44.01-1"), package("libnvidia-cfg1", "580.178.04-1")]
    assert stray_packages(NAMES, installed) == ["libnvidia-ml1"]


def test_companions_of_another_branch_are_no_strays_but_make_way():
    old = {"nvidia-driver-cuda": "570.195.03", "nvidia-fabricmanager-570": "570.195.03"}
    assert stray_packages(old, [package("nvidia-fabricmanager", "580.178.04-1")]) == []
    assert stray_packages(NAMES, [*RIGHT, package("nvidia-fabricmanager-570", "570.195.03-1")]) == []


@pytest.mark.parametrize(
    "name",
    ["nvidia-support", "nvidia-installer-cleanup", "nvidia-kernel-common", "nvidia-modprobe", "glx-alternative-nvidia"],
)
def test_helpers_of_debian_have_versions_of_their_own(name):
    assert not is_driver_package(name)
    # Asked for by name they are compared all the same.
    assert package_changes({name: "580.178.04"}, [package(name, "570.133.07-1")]) == [f"{name} is 570.133.07-1"]


# ---- exact versions ----


def offer(name, version, source=URL):
    return (name, version, source)


ONLY = {"nvidia-driver-cuda": VERSION}


def test_the_complete_version_is_what_the_source_offers():
    offers = [offer("nvidia-driver-cuda", f"{VERSION}-1"), offer("nvidia-driver-cuda", "570.195.03-1")]
    assert package_versions(ONLY, [], offers, source=URL) == [f"nvidia-driver-cuda={VERSION}-1"]


def test_what_is_installed_stays_when_the_source_has_a_newer_revision():
    offers = [offer("nvidia-driver-cuda", f"{VERSION}-{revision}") for revision in (1, 2)]
    assert package_versions(ONLY, RIGHT, offers, source=URL) == [f"nvidia-driver-cuda={VERSION}-1"]


def test_several_revisions_need_a_word():
    offers = [offer("nvidia-driver-cuda", f"{VERSION}-{revision}") for revision in (1, 2)]
    with pytest.raises(Refusal) as refusal:
        package_versions(ONLY, [], offers, source=URL)
    assert f"offer nvidia-driver-cuda as {VERSION}-1, {VERSION}-2" in str(refusal.value)
    assert "Change: nvidia_driver_package_revision" in str(refusal.value)
    assert package_versions(ONLY, [], offers, source=URL, revision="2") == [f"nvidia-driver-cuda={VERSION}-2"]


@pytest.mark.parametrize(
    ("offers", "seen"),
    [
        ([], "nvidia-driver-cuda in no version"),
        ([offer("nvidia-driver-cuda", "570.195.03-1")], "nvidia-driver-cuda as 570.195.03-1"),
    ],
)
def test_a_version_that_nobody_offers_is_refused(offers, seen):
    with pytest.raises(Refusal) as refusal:
        package_versions(ONLY, [], offers, source=URL)
    assert seen in str(refusal.value)
    assert f"Needed: nvidia-driver-cuda {VERSION} in one revision" in str(refusal.value)
    assert "nvidia_driver_repository_url" in str(refusal.value)


def test_two_sources_of_the_driver_are_refused():
    offers = [
        offer("nvidia-driver-cuda", f"{VERSION}-1"),
        offer("nvidia-driver-cuda", f"{VERSION}-1", "http://other/debian"),
    ]
    with pytest.raises(Refusal) as refusal:
        package_versions(ONLY, [], offers, source=URL)
    assert f"offered by the package sources http://other/debian, {URL}" in str(refusal.value)
    assert "Change: remove the other" in str(refusal.value)


def test_the_distribution_s_own_may_be_spread_over_several_sources():
    offers = [offer("nvidia-driver-cuda", f"{VERSION}-1", source) for source in ("http://deb", "http://security")]
    assert package_versions(ONLY, [], offers) == [f"nvidia-driver-cuda={VERSION}-1"]


def test_a_single_source_that_is_not_the_chosen_one_is_refused():
    with pytest.raises(Refusal, match="only https://mirror/debian13 to offer it"):
        package_versions(ONLY, [], [offer("nvidia-driver-cuda", f"{VERSION}-1", "http://other")], source=URL)


# ---- what apt would do ----

SIMULATION = f"""\
NOTE: This is only a simulation!
Inst dkms (3.2.2-1 Debian:13.2/stable [all])
Inst libcuda1 [570.195.03-1] ({VERSION}-1 NVIDIA:/ [amd64])
Remv nvidia-kernel-dkms [{VERSION}-1]
Inst nvidia-kernel-open-dkms:amd64 ({VERSION}-1 NVIDIA:/ [amd64])
Conf libcuda1 ({VERSION}-1 NVIDIA:/ [amd64])
"""


def test_the_driver_s_part_of_a_simulation_is_read():
    assert simulated_packages(SIMULATION, VERSION) == [
        f"libcuda1={VERSION}-1",
        f"nvidia-kernel-open-dkms={VERSION}-1",
    ]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("Inst libnvidia-ml1 (590.44.01-1 NVIDIA:/ [amd64])", "apt would install libnvidia-ml1 590.44.01-1"),
        ("Inst linux-image-6.12.9-amd64 (6.12.9-1 Debian:13/stable [amd64])", "install the kernel linux-image-6.12.9"),
        ("Remv docker.io [26.1.5]", "apt would remove docker.io. Needed: nothing but the driver's own packages"),
    ],
)
def test_what_apt_must_not_do_is_refused(line, text):
    with pytest.raises(Refusal) as refusal:
        simulated_packages(SIMULATION + line + "\n", VERSION)
    assert text in str(refusal.value)
    assert "Change: the package sources" in str(refusal.value)
