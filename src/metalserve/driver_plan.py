"""All that the role nvidia_driver decides about a host, in one structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metalserve.driver import REBOOT, STOP, driver_action
from metalserve.driver_packages import (
    REPOSITORY_NAME,
    driver_packages,
    driver_versions,
    package_changes,
    package_versions,
    packages_to_hold,
    refuse_two_sources,
    simulated_packages,
    stray_packages,
    superseded_packages,
)
from metalserve.errors import MetalserveError, Refusal
from metalserve.openpgp import check_key


class Stop(MetalserveError):  # noqa: N818 (a question to the operator is not an accident)
    """A step that the operator has to allow, or that something on the host stands in the way of."""


@dataclass(frozen=True)
class Wishes:
    """What the operator wants; the fields are the role's variables without their prefix."""

    version: str
    flavour: str = "open"
    source: str = "cuda"
    repository_url: str | None = None
    repository_key_fingerprints: Sequence[str] | None = None
    package_revision: str | None = None
    extra_packages: Sequence[str] = ()
    nvlsm_version: str | None = None
    hold_kernel: bool = True
    end_of_life_allowed: bool = False
    reboot_allowed: bool | None = None
    reload_allowed: bool | None = None


@dataclass(frozen=True)
class Seen:
    """What was seen on the host beside its facts; None stands for not looked at yet.

    `present` is what the package sources of the host offer before this project adds its own, `offers` what they offer
    with it: the output of `apt-cache madison` or of `dnf repoquery` in the same columns, `simulated` that of
    `apt-get install --simulate`, `key` the text of the package signing key.
    """

    host: Mapping[str, Any]
    present: str | None = None
    offers: str | None = None
    simulated: str | None = None
    key: str | None = None
    key_origin: str = "nvidia_driver_repository_key"
    key_enrolled: bool | None = None
    headers_offered: bool | None = None
    unload_failed: str | None = None


def driver_plan(facts: Mapping[str, Any], wishes: Wishes, seen: Seen) -> dict[str, Any]:
    """Decide everything that can be decided from what has been seen so far.

    Returns:
        Of plain types: `gpu_count` (0: the host is left alone, and nothing else is there), `step` (see
        `driver_action`), `packages` (see `driver_packages`), `exact` and `install` (name=version: those asked for, and
        those that apt would install for them), `superseded` (companions of an older branch, to be removed), `strays`
        (parts of another version that have to be asked for by name as well), `hold` (names that are to be held and are
        not) and `held`, `installed` (name -> version of the driver's packages).

    Raises:
        Refusal: what cannot work, and what the operator has to decide first.
    """
    gpu_count = len(facts.get("gpus") or ())
    if gpu_count == 0:
        return {"gpu_count": 0, "step": driver_action(facts, wishes.version)}
    installed: Sequence[Mapping[str, Any]] = seen.host["packages"]
    packages = driver_packages(
        facts,
        wishes.version,
        flavour=wishes.flavour,
        source=wishes.source,
        repository_url=wishes.repository_url,
        extra_packages=wishes.extra_packages,
        nvlink5=bool(seen.host.get("nvlink5")),
        nvlsm_version=wishes.nvlsm_version,
    )
    if seen.host.get("runfile"):
        raise Refusal(
            found="a driver of NVIDIA's .run file is installed on this host, which no package manager knows",
            needed="one source of the driver",
            change="run nvidia-uninstall on the host",
        )
    repository = packages["repository"]
    if seen.key is not None and repository:
        allowed = wishes.repository_key_fingerprints or repository["fingerprints"]
        check_key(seen.key, list(allowed), origin=seen.key_origin)
    names = packages["names"]
    step = driver_action(
        facts,
        wishes.version,
        flavour=wishes.flavour,
        reboot_allowed=wishes.reboot_allowed,
        reload_allowed=wishes.reload_allowed,
        key_enrolled=seen.key_enrolled,
        headers_available=seen.headers_offered,
        package_changes=package_changes(names, installed),
        unload_failed=seen.unload_failed,
        end_of_life_allowed=wishes.end_of_life_allowed,
    )
    if step["decision"] == STOP:
        raise Stop(step["message"])
    if step["action"] == REBOOT and not step["packages"]:
        _check_next_kernel(facts, wishes, seen.host.get("next_kernel"))
    if seen.present is not None:
        refuse_two_sources(names, _offers(seen.present), _source(packages))
    exact = None
    if seen.offers is not None:
        exact = package_versions(
            names,
            installed,
            _offers(seen.offers),
            revision=wishes.package_revision,
            source=_source(packages),
        )
    install = None if seen.simulated is None else simulated_packages(seen.simulated, wishes.version)
    held = {str(package["name"]) for package in installed if package.get("held")}
    hold = packages_to_hold(installed, names, kernel=wishes.hold_kernel)
    return {
        "gpu_count": gpu_count,
        "step": step,
        "packages": packages,
        "exact": exact,
        "install": install,
        "superseded": superseded_packages(names, installed),
        "strays": stray_packages(names, installed),
        "hold": [name for name in hold if name not in held],
        "held": [name for name in hold if name in held],
        "installed": driver_versions(names, installed),
    }


def _offers(text: str) -> list[tuple[str, str, str]]:
    """Package, version and source of each line: `name | version | URL ...` (apt) or `name version repository` (dnf)."""
    lines = [line.split("|") if "|" in line else line.split() for line in text.splitlines() if line.strip()]
    return [(line[0].strip(), line[1].strip(), line[2].split()[0]) for line in lines if len(line) > 2]


def _source(packages: Mapping[str, Any]) -> str | None:
    """How the package manager names the one source that may offer the driver."""
    repository = packages["repository"]
    if not repository:
        return None
    # apt writes file:///srv/x as file:/srv/x.
    url = str(repository["url"]).replace("file:///", "file:/")
    return url if packages["manager"] == "apt" else REPOSITORY_NAME


def _check_next_kernel(facts: Mapping[str, Any], wishes: Wishes, kernel: Mapping[str, Any] | None) -> None:
    """Before a restart: the kernel that comes up has the module, signed where the firmware asks for that."""
    name = kernel["kernel"] if kernel else "unknown"
    version = kernel["version"] if kernel else None
    if version != wishes.version:
        raise Refusal(
            found=f"the next boot takes kernel {name}, whose driver module is {version or 'missing'}",
            needed=f"a module of {wishes.version} for it, or the host comes back without GPUs",
            change=f"install the headers of {name} so that its module is built, or remove that kernel",
        )
    if facts.get("secure_boot") and not (kernel or {}).get("signer"):
        raise Refusal(
            found=f"Secure Boot is on, and the driver module of the next boot's kernel {name} is not signed",
            needed="a signed module, or the host comes back without GPUs",
            change="sign it with an enrolled key (nvidia_driver_signing_key, nvidia_driver_signing_certificate)",
        )
