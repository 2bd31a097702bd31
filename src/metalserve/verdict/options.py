"""What the inventory says of a host beside its deployments, as far as its verdict depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from metalserve.driver_state import driver_data
from metalserve.errors import Refusal
from metalserve.plain import truths
from metalserve.verdict.check import GROUP_OF


@dataclass(frozen=True)
class DriverOptions:
    """The variables of the role that installs the driver.

    Attributes:
        manage: whether the playbooks bring the driver to `version`; where not, what is there must do.
        version: the complete version that is wanted.
        flavour: `open` or `proprietary` kernel modules.
        reboot_allowed: may the host be restarted? None asks, True does it, False leaves the driver as it is.
        reload_allowed: may engines be stopped for a reload? As above.
        end_of_life_allowed: take a branch that gets no more fixes.
        key_enrolled: the inventory names a key that the firmware knows; None: the fact decides.
        prebuilt: the packages bring signed modules.
        refusal: what the role nvidia_driver said against this host, empty where nothing.
    """

    manage: bool = True
    version: str = field(default_factory=lambda: str(driver_data()["default_version"]))
    flavour: str = "open"
    reboot_allowed: bool | None = None
    reload_allowed: bool | None = None
    end_of_life_allowed: bool = False
    key_enrolled: bool | None = None
    prebuilt: bool = False
    refusal: str = ""


@dataclass(frozen=True)
class ToolkitOptions:
    """Whether the playbooks bring the container toolkit, and which version."""

    manage: bool = True
    version: str | None = None


@dataclass(frozen=True)
class DockerOptions:
    """The variables of the roles docker_engine and engine_image.

    Attributes:
        minimum_version: the oldest Docker that resolves CDI devices.
        minimum_systemd: the oldest systemd that verifies template units, as the role asks for.
        directory: where Docker keeps its images.
        unpack_factor: disk that an image takes in all, as a multiple of its compressed size.
        refusal: what the role docker_engine said against this host, empty where nothing.
    """

    minimum_version: str = "26.0"
    minimum_systemd: int = 252
    directory: str = "/var/lib/docker"
    unpack_factor: float = 3.5
    refusal: str = ""


@dataclass(frozen=True)
class Options:
    """Everything beside facts and deployments.

    Attributes:
        expected: the GPUs that the host should have: gpu_count, gpu_pci_ids, mig (see the role gpu_health).
        accept: names of checks whose refusal the operator takes as a warning.
        weights_reserve_bytes: disk that must remain free beside the weights.
    """

    driver: DriverOptions = DriverOptions()
    toolkit: ToolkitOptions = ToolkitOptions()
    docker: DockerOptions = DockerOptions()
    expected: Mapping[str, Any] = field(default_factory=dict)
    accept: tuple[str, ...] = ()
    weights_reserve_bytes: int = 1 << 30


def read_options(given: Mapping[str, Any] | None) -> Options:
    """Options of plain types, as a playbook gives them; what is left out or null has its default.

    Raises:
        Refusal: an unknown name, also among the checks to accept.
    """
    values = dict(given or {})
    parts = {"driver": DriverOptions, "toolkit": ToolkitOptions, "docker": DockerOptions}
    built: dict[str, Any] = {
        name: _build(kind, values.pop(name, None) or {}, f"{name}.") for name, kind in parts.items()
    }
    values["accept"] = _accept(values.get("accept") or ())
    options: Options = _build(Options, {**values, **built}, "")
    return options


def _accept(names: Any) -> tuple[str, ...]:
    given = f"a text, {names!r}" if isinstance(names, str) else None
    unknown = [] if given else [str(name) for name in names if name not in GROUP_OF]
    if given or unknown:
        raise Refusal(
            found=f"checks to accept that are {given or repr(unknown[0])}",
            needed=f"a list of names out of {', '.join(GROUP_OF)}",
            change="preflight_accept",
        )
    return tuple(names)


def _build(kind: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    known = [entry.name for entry in fields(kind)]
    unknown = [name for name in values if name not in known]
    if unknown:
        raise Refusal(
            found=f"the option {prefix}{unknown[0]} of a verdict",
            needed=f"one of {', '.join(prefix + name for name in known)}",
            change="the options of compatibility_verdict",
        )
    return kind(**truths(kind, {name: value for name, value in values.items() if value is not None}))
