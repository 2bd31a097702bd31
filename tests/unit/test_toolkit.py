"""What the role container_toolkit asks: packages, versions that are locked, the specification, the signing key."""

from __future__ import annotations

import base64
import hashlib

import pytest

from metalserve import toolkit

PATH = "/var/run/cdi/nvidia.yaml"


def key(body=b"\x04" + b"\x00" * 20):
    """An armored file with one primary key (RFC 9580: tag 6, two-octet length), and its fingerprint."""
    packet = b"\x99" + len(body).to_bytes(2, "big") + body
    text = base64.b64encode(packet).decode()
    armored = f"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n{text}\n-----END PGP PUBLIC KEY BLOCK-----\n"
    return armored, hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper()


def spec(path=PATH, version="580.178.04", devices=("nvidia.com/gpu=0", "nvidia.com/gpu=1", "nvidia.com/gpu=all")):
    return {"path": path, "driver_version": version, "devices": list(devices)}


def facts(loaded="580.178.04", **gpu):
    gpus = [{"index": index, "source": "nvml", "mig_enabled": False, **gpu} for index in range(2)]
    return {"driver": {"loaded": loaded}, "gpus": gpus}


def test_packages_as_dpkg_writes_them():
    lines = [
        "nvidia-container-toolkit 1.20.0-1 installed hold",
        "nvidia-container-toolkit-base 1.17.8-1 installed install",
        "libnvidia-container1 1.20.0-1 config-files deinstall",
        "dpkg-query: no packages found matching libnvidia-container-tools",
        "",
    ]
    assert toolkit.packages(lines) == {
        "nvidia-container-toolkit": {"version": "1.20.0-1", "held": True},
        "nvidia-container-toolkit-base": {"version": "1.17.8-1", "held": False},
    }


def test_packages_as_rpm_writes_them():
    lines = ["nvidia-container-toolkit 1.20.0-1 installed install", "package libnvidia-container1 is not installed"]
    assert toolkit.packages(lines) == {"nvidia-container-toolkit": {"version": "1.20.0-1", "held": False}}


def test_locked_versions():
    lines = [
        "Last metadata expiration check: 0:01:02 ago",
        "",
        "nvidia-container-toolkit-0:1.20.0-1.*",
        "libnvidia-container1-1.20.0-1.*",
    ]
    assert [name for name in toolkit.locked(lines) if "nvidia" in name] == [
        "nvidia-container-toolkit",
        "libnvidia-container1",
    ]


def test_specifications_of_other_devices_do_not_count():
    other = {"path": "/etc/cdi/net.yaml", "driver_version": None, "devices": ["vendor.com/net=0"]}
    assert toolkit.gpu_specs([other, spec()]) == [spec()]


@pytest.mark.parametrize(
    ("specs", "loaded", "text"),
    [
        ([spec()], "580.178.04", ""),
        ([], "580.178.04", f"there is no CDI specification {PATH}."),
        ([spec(path="/etc/cdi/nvidia.yaml")], "580.178.04", "there is no CDI specification"),
        ([spec(version="570.195.03")], "580.178.04", "is of driver 570.195.03, loaded is 580.178.04."),
        ([spec(version=None)], "580.178.04", "is of driver None"),
        ([spec(devices=["nvidia.com/gpu=0", "nvidia.com/gpu=all"])], "580.178.04", "does not describe GPU 1."),
    ],
)
def test_what_is_wrong_with_a_specification(specs, loaded, text):
    found = toolkit.stale(specs, PATH, facts(loaded))
    assert text in found
    assert bool(text) == bool(found)


@pytest.mark.parametrize("gpu", [{"source": "pci", "index": None}, {"mig_enabled": True}])
def test_only_whole_gpus_that_the_driver_knows_must_be_described(gpu):
    assert toolkit.stale([spec(devices=["nvidia.com/gpu=all"])], PATH, facts(**gpu)) == ""


def test_a_key_with_the_right_fingerprint_in_any_spelling():
    text, fingerprint = key()
    assert toolkit.trusts(text, [fingerprint])
    assert toolkit.trusts(text, [" ".join(fingerprint.lower())])
    assert toolkit.key_fingerprints(text) == f"the fingerprints {fingerprint}"


def test_another_key():
    assert not toolkit.trusts(key()[0], ["0" * 40])


def test_a_second_key_beside_the_right_one():
    text, fingerprint = key()
    other, _ = key(b"\x04" + b"\x01" * 20)
    assert not toolkit.trusts(text + other, [fingerprint])


@pytest.mark.parametrize("text", ["", "<html>404</html>", "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nAAAA\n"])
def test_something_that_is_no_key(text):
    assert not toolkit.trusts(text, ["0" * 40])
    assert "no readable key" in toolkit.key_fingerprints(text)
