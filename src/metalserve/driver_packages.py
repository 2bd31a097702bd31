"""Which packages make up a driver on a system, in which exact version, and what is wrong with those that are there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from metalserve.driver_state import driver_branch, driver_data
from metalserve.errors import Refusal

_EPOCH_AND_REVISION = re.compile(r"^(?:\d+:)?(.+?)(?:-[^-]*)?$")
# One line of `apt-get install --simulate`: Inst NAME [OLD] (NEW SOURCE [ARCHITECTURE]), or Remv NAME [OLD].
_SIMULATED = re.compile(r"^(Inst|Remv) (\S+)(?: \[[^\]]*\])?(?: \((\S+))?")
# What the role calls NVIDIA's repository on a host.
REPOSITORY_NAME = "metalserve-nvidia"
# The branch since which the companions' names are without a branch.
_NEW_NAMES = 580
_KERNEL = re.compile(r"^(linux-image|kernel-core|kernel-modules)")
# Meta packages that move the kernel: without a version in the name.
_KERNEL_META = re.compile(
    r"^(linux-(image|headers|generic|virtual|lowlatency|aws|azure|gcp|oracle|kvm)\b(?!.*\d\.\d+\.\d)|kernel(-core)?$)"
)


def upstream(version: str) -> str:
    """The version without epoch and revision: 580.178.04 of 3:580.178.04-1.el9."""
    match = _EPOCH_AND_REVISION.match(version)
    return match[1] if match else version


def is_driver_package(name: str) -> bool:
    """Whether a package is versioned as the driver is."""
    data = driver_data()
    return bool(re.search(data["driver_package"], name)) and not re.search(data["other_package"], name)


def system_key(os: Mapping[str, Any]) -> str:
    """The key of a system in drivers.yaml, from the fact `os`.

    Raises:
        Refusal: a system that is not known.
    """
    version = str(os.get("version_id") or "")
    family = [str(name) for name in os.get("like") or ()] or [str(os.get("id"))]
    if os.get("id") in ("debian", "ubuntu"):
        key = f"{os['id']}{version}"
    elif {"rhel", "centos", "rocky", "almalinux"} & set(family):
        key = f"el{version.partition('.')[0]}"
    else:
        key = f"{os.get('id')}{version}"
    if key in driver_data()["systems"]:
        return key
    raise Refusal(
        found=f"operating system {os.get('id')} {version}",
        needed="Debian 12 or 13, Ubuntu 22.04 or 24.04, or RHEL, Rocky Linux or AlmaLinux 8, 9 or 10",
        change="the operating system; or install the driver yourself and leave this host out of the role nvidia_driver",
    )


def driver_packages(
    facts: Mapping[str, Any],
    version: str,
    *,
    flavour: str = "open",
    source: str = "cuda",
    repository_url: str | None = None,
    extra_packages: Sequence[str] = (),
    nvlink5: bool = False,
    nvlsm_version: str | None = None,
) -> dict[str, Any]:
    """The packages of a driver on a host.

    Args:
        facts: the fact `gpu_host`.
        version: complete driver version.
        flavour: `open` or `proprietary`.
        source: `cuda` (NVIDIA's repository or a mirror of it) or `distribution`.
        repository_url: of a mirror; None takes NVIDIA's own, empty the sources that the host has.
        extra_packages: further packages of the driver's version.
        nvlink5: the host's switches are managed through ConnectX functions (HGX B200 and newer).
        nvlsm_version: complete package version of the subnet manager, which has versions of its own.

    Returns:
        Of plain types: `manager` (apt or dnf), `names` (name -> version without revision, of nvlsm the complete one),
        `headers`, `stream` (of the module nvidia-driver, or None), `patterns`, `repository` (`url`, `key_url`,
        `fingerprints`; None where the host has its sources already).

    Raises:
        Refusal: unknown system, source or architecture; a subnet manager without a version.
    """
    key = system_key(facts.get("os") or {})
    system = driver_data()["systems"][key]
    if source not in ("cuda", "distribution") or source not in system:
        raise Refusal(
            found=f"nvidia_driver_source {source!r} on {key}",
            needed=" or ".join(name for name in ("cuda", "distribution") if name in system),
            change="nvidia_driver_source",
        )
    entry = system[source]
    listed = [*entry["packages"], *entry["flavours"][flavour], *extra_packages]
    if facts.get("nvswitch_count") or nvlink5:
        listed += entry["switch"]
    branch = driver_branch(version)
    older = driver_data()["names_before_580"][system["manager"]] if branch < _NEW_NAMES else {}
    names = {older.get(name, name).format(branch=branch): version for name in listed}
    if nvlink5:
        if not nvlsm_version:
            raise Refusal(
                found="the switches of this host are managed through ConnectX functions (NVLink 5)",
                needed=f"the package {entry['nvlink5']} in an exact version",
                change="nvidia_driver_nvlsm_version",
            )
        names[entry["nvlink5"]] = nvlsm_version
    stream = system.get("stream")
    own = source == "cuda" and repository_url != ""
    return {
        "manager": system["manager"],
        "names": names,
        "headers": system["headers"].format(kernel=facts.get("kernel")),
        "stream": stream[flavour].format(branch=branch) if stream else None,
        "patterns": list(driver_data()["patterns"]),
        "repository": _repository(facts, system, repository_url) if own else None,
    }


def _repository(facts: Mapping[str, Any], system: Mapping[str, Any], url: str | None) -> dict[str, Any]:
    data = driver_data()["repositories"]
    kind = data["deb" if system["manager"] == "apt" else "rpm"]
    machine = str(facts.get("architecture"))
    if url is None:
        if machine not in data["architectures"]:
            raise Refusal(
                found=f"architecture {machine}",
                needed=" or ".join(data["architectures"]),
                change="nvidia_driver_repository_url, if you have packages for it",
            )
        url = f"{kind['url']}/{system['directory']}/{data['architectures'][machine]}"
    url = url.rstrip("/")
    return {"url": url, "key_url": f"{url}/{kind['key']}", "fingerprints": list(kind["fingerprints"])}


def package_changes(names: Mapping[str, str], installed: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with the installed packages, each a phrase; none: nothing to install.

    Args:
        names: as `driver_packages` gives them.
        installed: `name` and `version` of the installed packages.
    """
    there = {str(package["name"]): str(package["version"]) for package in installed}
    changes = [f"{name} is missing" for name in names if name not in there]
    for name, wanted in names.items():
        if name in there and wanted not in (there[name], upstream(there[name])):
            changes.append(f"{name} is {there[name]}")
    changes += [f"{name} is {there[name]}" for name in _others(names, there)]
    return changes


def _others(names: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Installed packages of the driver that are not asked for by name, and are of another version."""
    versions = set(names.values())
    return [
        name
        for name, version in there.items()
        if name not in names and is_driver_package(name) and upstream(version) not in versions
    ]


def stray_packages(names: Mapping[str, str], installed: Sequence[Mapping[str, Any]]) -> list[str]:
    """Installed parts of the driver of another version that no named package brings back, such as a library run ahead.

    Named packages ask their dependencies for a minimum: a newer one would stay. Companions under their name of another
    branch are not among them: they make way for those of this one.
    """
    there = {str(package["name"]): str(package["version"]) for package in installed}
    companions = {name for kind in driver_data()["names_before_580"].values() for name in kind}
    leaving = companions.union(superseded_packages(names, installed))
    return sorted(name for name in _others(names, there) if name not in leaving)


def package_versions(
    names: Mapping[str, str],
    installed: Sequence[Mapping[str, Any]],
    offers: Iterable[Sequence[str]],
    *,
    revision: str | None = None,
    source: str | None = None,
) -> list[str]:
    """The exact versions to ask the package manager for, as name=version.

    Args:
        names: as `driver_packages` gives them.
        installed: `name` and `version` of the installed packages.
        offers: (name, complete version, source) of each package that the sources offer.
        revision: the part after the version, such as 1; only needed where several are offered.
        source: the one source that may offer them, as `offers` names it; None accepts any.

    Raises:
        Refusal: a version that is not offered, offered in several revisions, or by two sources.
    """
    there = {str(package["name"]): str(package["version"]) for package in installed}
    listed = [(str(name), str(version), str(source)) for name, version, source in offers]
    refuse_two_sources(names, listed, source)
    exact = []
    for name, wanted in names.items():
        if name in there and wanted in (there[name], upstream(there[name])):
            exact.append(f"{name}={there[name]}")
            continue
        known = [version for offered, version, _source in listed if offered == name]
        fitting = sorted({version for version in known if wanted in (version, upstream(version))})
        if revision is not None:
            fitting = [version for version in fitting if version == wanted or version.endswith(f"{wanted}-{revision}")]
        if len(fitting) != 1:
            several = len(fitting) > 1
            seen = ", ".join(fitting if several else sorted(set(known))) or "in no version"
            raise Refusal(
                found=f"the package sources offer {name} {f'as {seen}' if known else seen}",
                needed=f"{name} {wanted} in one revision" + (f", {revision}" if revision else ""),
                change="nvidia_driver_package_revision"
                if several
                else "nvidia_driver_version, or the package source (nvidia_driver_repository_url)",
            )
        exact.append(f"{name}={fitting[0]}")
    return exact


def refuse_two_sources(names: Mapping[str, str], offers: Iterable[Sequence[str]], own: str | None) -> None:
    """Only the chosen source may offer the driver; None, the distribution's own, may be spread over several.

    Raises:
        Refusal: another source offers one of the packages.
    """
    sources = sorted({source.rstrip("/") for name, _version, source in offers if name in names})
    if own is None or all(source == own for source in sources):
        return
    raise Refusal(
        found=f"this driver is offered by the package sources {', '.join(sources)}",
        needed=f"only {own} to offer it, or packages get mixed",
        change="remove the other from the host's package sources, or name it in nvidia_driver_repository_url",
    )


def simulated_packages(text: str, version: str) -> list[str]:
    """What apt would install of the driver, as name=version, from the output of a simulation.

    Raises:
        Refusal: the driver's packages would get different versions, the kernel would change, or packages
            that are not the driver's would be removed.
    """
    found: list[str] = []
    for line in text.splitlines():
        match = _SIMULATED.match(line)
        if not match:
            continue
        verb, name, new = match[1], match[2].partition(":")[0], match[3]
        if verb == "Remv" and not is_driver_package(name):
            raise _unwanted(f"remove {name}", "nothing but the driver's own packages to be removed")
        if verb == "Inst" and _KERNEL.match(name):
            raise _unwanted(f"install the kernel {name}", "the kernel to stay as it is")
        if verb == "Inst" and is_driver_package(name):
            if upstream(new) != version:
                raise _unwanted(f"install {name} {new}", f"{version} for every package of the driver")
            found.append(f"{name}={new}")
    return found


def _unwanted(found: str, needed: str) -> Refusal:
    return Refusal(
        found=f"apt would {found}",
        needed=needed,
        change="the package sources of this host; `apt-get install --simulate` with the same packages shows why",
    )


def driver_versions(names: Mapping[str, str], installed: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Name and complete version of the installed packages that make up the driver."""
    return {
        str(package["name"]): str(package["version"])
        for package in installed
        if package["name"] in names or is_driver_package(str(package["name"]))
    }


def packages_to_hold(installed: Sequence[Mapping[str, Any]], names: Mapping[str, str], *, kernel: bool) -> list[str]:
    """The installed packages that must not move by themselves: the driver's and, where asked, the kernel's own."""
    metas = {str(package["name"]) for package in installed if _KERNEL_META.match(str(package["name"]))}
    return sorted({*driver_versions(names, installed), *(metas if kernel else ())})


def superseded_packages(names: Mapping[str, str], installed: Sequence[Mapping[str, Any]]) -> list[str]:
    """Installed companions of an older branch, under the names that they had then."""
    older = {name for kind in driver_data()["names_before_580"].values() for name in kind.values()}
    patterns = [re.compile(name.format(branch=r"\d{3}")) for name in sorted(older)]
    return sorted(
        str(package["name"])
        for package in installed
        if package["name"] not in names and any(pattern.fullmatch(str(package["name"])) for pattern in patterns)
    )
