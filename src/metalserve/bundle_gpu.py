"""What GPU hosts of a bundle's system need: the driver and the container toolkit, in the exact versions of their roles.

The same names that the roles ask for (`driver_packages`), and apt's preferences for what those depend on: NVIDIA's
packages ask their own dependencies for a minimum, so without a pin apt would bring those of a later branch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from metalserve.driver_packages import driver_packages
from metalserve.driver_state import driver_data
from metalserve.errors import Refusal
from metalserve.toolkit import PACKAGES

_FIELDS = {"driver", "flavour", "kernels", "nvswitch", "extra_packages", "toolkit"}
_DRIVER = re.compile(r"^\d+\.\d+(\.\d+)?$")


def gpu_packages(system: Mapping[str, Any]) -> tuple[list[str], str]:
    """The packages of a system's `nvidia`, as apt takes them, and the text of the preferences; nothing without one.

    Args:
        system: {name: ID-VERSION_ID, architecture, nvidia: {driver: complete version, flavour, kernels: [release as
            `uname -r` prints it], nvswitch: whether hosts have NVSwitches, extra_packages: [of the driver's version],
            toolkit: version}}. `driver` without `kernels` is for hosts that have their kernel's headers.

    Raises:
        Refusal: a field that is not known, a version that is not complete, or a system without apt.
    """
    wanted = system.get("nvidia") or {}
    if not wanted:
        return [], ""
    _check(system, wanted)
    names: list[str] = []
    preferences = ""
    identity, _, version = str(system["name"]).partition("-")
    if wanted.get("driver"):
        facts = {
            "os": {"id": identity, "version_id": version},
            "architecture": {"amd64": "x86_64", "arm64": "aarch64"}.get(str(system.get("architecture") or "amd64")),
            "nvswitch_count": int(bool(wanted.get("nvswitch"))),
        }
        found = driver_packages(
            facts,
            str(wanted["driver"]),
            flavour=str(wanted.get("flavour") or "open"),
            repository_url="",
            extra_packages=[str(name) for name in wanted.get("extra_packages") or ()],
        )
        names += [f"{name}={version}-*" for name, version in found["names"].items()]
        names += [f"linux-headers-{kernel}" for kernel in wanted.get("kernels") or ()]
        patterns = " ".join(driver_data()["patterns"])
        preferences = f"Package: {patterns}\nPin: version {wanted['driver']}-*\nPin-Priority: 1001\n"
    if wanted.get("toolkit"):
        names += [f"{name}={wanted['toolkit']}-1" for name in PACKAGES]
    return names, preferences


def _check(system: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    where = f"nvidia of {system['name']} in bundle_systems"
    unknown = sorted(set(wanted) - _FIELDS)
    if unknown:
        raise Refusal(found=f"{', '.join(unknown)} in {where}", needed=", ".join(sorted(_FIELDS)), change=where)
    if str(system["name"]).partition("-")[0] not in ("debian", "ubuntu"):
        raise Refusal(
            found=f"{where}, whose packages are not of apt",
            needed="a Debian or Ubuntu system",
            change="give these hosts NVIDIA's packages by a mirror (nvidia_driver_repository_url)",
        )
    if wanted.get("driver") and not _DRIVER.match(str(wanted["driver"])):
        raise Refusal(
            found=f"driver {wanted['driver']} in {where}",
            needed="a complete version, such as 580.178.04",
            change="the one of nvidia_driver_version",
        )
    toolkit = str(wanted.get("toolkit") or "")
    if toolkit and not re.match(r"^\d+\.\d+\.\d+$", toolkit):
        raise Refusal(
            found=f"toolkit {toolkit} in {where}",
            needed="a complete version, such as 1.20.0",
            change="the one of container_toolkit_version",
        )
