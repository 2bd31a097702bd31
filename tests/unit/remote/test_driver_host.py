"""What the role reads of a host, on trees of files with answers of real commands; and the drift check on top of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from metalserve.remote.driver_drift import drift
from metalserve.remote.driver_host import read_driver_host
from metalserve.remote.host_probe import CommandMissingError, Output

KERNEL, NEWER = "6.12.1-amd64", "6.12.9-amd64"
VERSION = "580.178.04"


class Tree:
    """A root file system that is written file by file, and what its commands answer."""

    def __init__(self, root):
        self.root = Path(root)
        self.answers = {("dpkg-query",): "", ("dpkg", "--audit"): "", ("systemctl",): ""}

    def write(self, path, text="", age=0):
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        os.utime(file, (1_000_000 - age, 1_000_000 - age))

    def kernel(self, name, module=None):
        self.write(f"/lib/modules/{name}/modules.dep", "updates/dkms/nvidia.ko.xz:\n" if module else "")
        if module:
            self.write(f"/lib/modules/{name}/updates/dkms/nvidia.ko.xz")
            path = f"{self.root}/lib/modules/{name}/updates/dkms/nvidia.ko.xz"
            self.answers["modinfo", path] = f"version:        {module}\nsigner:         DKMS key\n"
            self.answers["modinfo", "-k", name] = f"version:        {module}\nlicense:        Dual MIT/GPL\n"

    def run(self, argv, _limit):
        for length in range(len(argv), 0, -1):
            if tuple(argv[:length]) in self.answers:
                return Output(0, self.answers[tuple(argv[:length])], "")
        raise CommandMissingError(f"{argv[0]}: not installed")

    def read(self, **options):
        return read_driver_host(str(self.root), run=self.run, **options)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_an_empty_host_has_nothing(tree):
    found = tree.read()
    assert found["packages"] == []
    assert (found["interrupted"], found["runfile"], found["nvlink5"], found["next_kernel"]) == (
        False,
        False,
        False,
        None,
    )
    assert found["errors"] == []


def test_debian_packages_are_read_with_their_hold(tree):
    tree.answers["dpkg-query",] = (
        f"libnvidia-ml1\t{VERSION}-1\thold\tinstalled\n"
        f"nvidia-driver-cuda\t{VERSION}-1\tinstall\tinstalled\n"
        "nvidia-smi\t550.163.01-2\tdeinstall\tconfig-files\n"
        "linux-image-amd64\t6.12.1-1\tinstall\tinstalled\n"
        "bash\t5.2\tinstall\tinstalled\n"
    )
    assert tree.read()["packages"] == [
        {"name": "libnvidia-ml1", "version": f"{VERSION}-1", "held": True},
        {"name": "linux-image-amd64", "version": "6.12.1-1", "held": False},
        {"name": "nvidia-driver-cuda", "version": f"{VERSION}-1", "held": False},
    ]


def test_rpm_packages_are_read_with_their_lock(tree):
    tree.answers["rpm",] = (
        f"nvidia-driver-cuda\t3:{VERSION}-1.el9\nkernel\t0:5.14.0-1.el9\nnvidia-driver\t3:{VERSION}-1.el9\nbash\t0:5.1-9\n"
    )
    tree.write("/etc/dnf/plugins/versionlock.list", f"# comment\nnvidia-driver-cuda-3:{VERSION}-1.el9.*\n")
    assert tree.read(manager="dnf")["packages"] == [
        {"name": "kernel", "version": "0:5.14.0-1.el9", "held": False},
        {"name": "nvidia-driver", "version": f"3:{VERSION}-1.el9", "held": False},
        {"name": "nvidia-driver-cuda", "version": f"3:{VERSION}-1.el9", "held": True},
    ]


def test_a_host_without_its_package_manager_says_so(tree):
    found = tree.read(manager="dnf")
    assert found["packages"] is None
    assert found["errors"] == [{"probe": "packages", "error": "rpm: not installed"}]


def test_an_interrupted_installation_shows(tree):
    tree.answers["dpkg", "--audit"] = "The following packages are only half configured ...\n nvidia-kernel-open-dkms\n"
    assert tree.read()["interrupted"] is True


def test_the_run_file_leaves_a_trace(tree):
    tree.write("/usr/bin/nvidia-uninstall")
    assert tree.read()["runfile"] is True


def test_active_units_are_named(tree):
    tree.answers["systemctl",] = "vllm@chat.service loaded active running vllm engine of the deployment chat\n"
    found = tree.read(services=["nvidia-persistenced"])
    assert found["engines"] == ["vllm@chat.service"]


def test_modules_on_top_of_the_driver_are_followed(tree):
    for name, holders, count in (("nvidia", ["nvidia_uvm", "other"], 5), ("nvidia_uvm", [], 2), ("other", [], 0)):
        tree.write(f"/sys/module/{name}/refcnt", f"{count}\n")
        for holder in holders:
            tree.write(f"/sys/module/{name}/holders/{holder}")
    assert tree.read()["modules"] == [
        {"name": "nvidia", "users": ["nvidia_uvm", "other"], "references": 3},
        {"name": "nvidia_uvm", "users": [], "references": 2},
        {"name": "other", "users": [], "references": 0},
    ]


def test_the_next_kernel_is_the_newest_with_its_module(tree):
    tree.kernel(KERNEL, VERSION)
    tree.kernel("6.12.10-amd64", VERSION)
    tree.kernel(NEWER)
    # A removed kernel leaves a directory.
    tree.write("/lib/modules/6.13.0-amd64/updates/dkms/nvidia.ko.xz")
    assert tree.read()["next_kernel"] == {"kernel": "6.12.10-amd64", "version": VERSION, "signer": "DKMS key"}


def test_a_next_kernel_without_a_module_shows(tree):
    tree.kernel(KERNEL, VERSION)
    tree.kernel(NEWER)
    assert tree.read()["next_kernel"] == {"kernel": NEWER, "version": None, "signer": None}


CONFIGURATION = "/etc/modprobe.d/metalserve-nvidia.conf"


@pytest.mark.parametrize("image", [f"/boot/initrd.img-{KERNEL}", f"/boot/initramfs-{KERNEL}.img"])
def test_an_initramfs_older_than_its_configuration_is_stale(tree, image):
    tree.kernel(KERNEL)
    tree.write(CONFIGURATION)
    assert tree.read(newer_than=[CONFIGURATION])["initramfs_stale"] == []
    tree.write(image, age=60)
    assert tree.read(newer_than=[CONFIGURATION])["initramfs_stale"] == [KERNEL]
    tree.write(image, age=-60)
    assert tree.read(newer_than=[CONFIGURATION])["initramfs_stale"] == []


@pytest.mark.parametrize(
    ("content", "stale"), [("usr/lib/modules/6/updates/dkms/nvidia.ko.xz", True), ("bin/sh", False)]
)
def test_an_initramfs_with_an_older_module_is_stale(tree, content, stale):
    tree.kernel(KERNEL, VERSION)
    tree.write(f"/boot/initrd.img-{KERNEL}", age=60)
    tree.answers["lsinitramfs",] = content
    assert tree.read()["initramfs_stale"] == ([KERNEL] if stale else [])


@pytest.mark.parametrize(("text", "expected"), [("x SW_MNG y", True), ("ConnectX-7", False)])
def test_connectx_functions_that_manage_switches_are_known_by_their_own_word(tree, text, expected):
    tree.write("/sys/class/infiniband/mlx5_0/device/vpd", text)
    assert tree.read()["nvlink5"] is expected


# ---- drift ----


def in_order(tree):
    tree.kernel(KERNEL, VERSION)
    tree.write("/proc/sys/kernel/osrelease", KERNEL)
    tree.write("/sys/module/nvidia/version", VERSION)
    tree.write(f"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{VERSION}")
    link = tree.root / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
    link.symlink_to(f"libnvidia-ml.so.{VERSION}")
    tree.write("/usr/bin/nv-fabricmanager")
    tree.answers["/usr/bin/nv-fabricmanager",] = f"Fabric Manager version is : {VERSION}"
    tree.answers["dpkg-query",] = f"libcuda1\t{VERSION}-1\thold\tinstalled\n"
    return {"version": VERSION, "fabric_manager": True, "manager": "apt", "packages": {"libcuda1": f"{VERSION}-1"}}


def found(tree, expected):
    return drift(expected, root=str(tree.root), run=tree.run)


def test_a_host_in_order_has_no_drift(tree):
    assert found(tree, in_order(tree)) == []


def test_an_upgrade_of_one_package_is_seen(tree):
    expected = in_order(tree)
    tree.answers["dpkg-query",] = "libcuda1\t590.44.01-1\tinstall\tinstalled\n"
    assert found(tree, expected) == [f"the package libcuda1 is 590.44.01-1, not {VERSION}-1"]


def test_each_level_is_compared(tree):
    expected = in_order(tree)
    tree.write("/sys/module/nvidia/version", "570.195.03")
    shutil.rmtree(tree.root / "lib")
    (tree.root / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").unlink()
    tree.answers["/usr/bin/nv-fabricmanager",] = "Fabric Manager version is : 575.1.2"
    assert found(tree, expected) == [
        f"the loaded module is 570.195.03, not {VERSION}",
        f"the module on disk is missing, not {VERSION}",
        f"the userland is missing, not {VERSION}",
        f"the fabric manager is 575.1.2, not {VERSION}",
    ]


def test_a_fabric_manager_counts_only_where_it_is_needed(tree):
    expected = in_order(tree)
    (tree.root / "usr/bin/nv-fabricmanager").unlink()
    assert found(tree, expected) == [f"the fabric manager is missing, not {VERSION}"]
    assert found(tree, {**expected, "fabric_manager": False}) == []


def test_a_kernel_that_waits_for_the_next_boot_without_a_module_is_seen(tree):
    expected = in_order(tree)
    tree.kernel(NEWER)
    assert found(tree, expected) == [f"the module of {NEWER}, which the next boot takes, is missing, not {VERSION}"]
