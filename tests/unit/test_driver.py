"""The state table of the driver, row by row, and what holds for all of its combinations."""

from __future__ import annotations

import copy
import itertools

import pytest

from metalserve.driver import driver_action
from metalserve.driver_state import driver_branch, driver_data
from metalserve.errors import Refusal

OLD, WANTED = "570.211.01", "580.178.04"
A100, H800, B200 = "10de:20b2", "10de:2324", "10de:2901"
PYTHON = {"pid": 900, "process": "python3", "deployment": None}
ENGINE = {"pid": 800, "process": "VLLM::Worker", "deployment": "chat"}
PERSISTENCED = {"pid": 70, "process": "nvidia-persiste", "deployment": None}


def gpu(address="0000:10:00.0", pci_id=A100, **values):
    return {"pci_address": address, "pci_id": pci_id, "pci_driver": "nvidia", **values}


def host(loaded=WANTED, on_disk=WANTED, userland=WANTED, **values):
    """A host in order; arguments say what is not."""
    driver = {
        "loaded": loaded,
        "on_disk": on_disk,
        "userland": userland,
        "fabric_manager": None,
        "flavour": "open",
        "flavour_on_disk": "open" if on_disk else None,
        "on_disk_newest_kernel": None,
        "holders": [],
    }
    facts = {
        "kernel": "6.12.1",
        "kernel_headers": True,
        "secure_boot": False,
        "mok_enrolled": None,
        "nouveau_bound": False,
        "nvswitch_count": 0,
        "gpus": [gpu(), gpu("0000:20:00.0")],
        "xid_errors": [],
    }
    for key, value in values.items():
        (driver if key in driver else facts)[key] = value
    return {**facts, "driver": driver}


def bare(**values):
    return host(None, None, None, **values)


NEXT_HAS = {"kernel": "6.12.9", "version": WANTED}
NEXT_LACKS = {"kernel": "6.12.9", "version": None}

# name: facts, action, decision (asked of nobody), packages differ
TABLE = {
    "all levels are the wanted one": (host(), "nothing", "go", False),
    "no GPU": (bare(gpus=[], nouveau_bound=False), "nothing", "go", False),
    "nothing installed": (bare(), "load", "go", True),
    "nothing installed, nouveau bound": (bare(nouveau_bound=True), "reboot", "stop", True),
    "installed, not loaded": (host(None), "load", "go", False),
    "installed, nouveau bound": (host(None, nouveau_bound=True), "reboot", "stop", False),
    "installed by half: module only": (host(None, userland=None), "load", "go", True),
    "installed by half: userland only": (host(None, on_disk=None), "load", "go", True),
    "old on all levels": (host(OLD, OLD, OLD), "reload", "go", True),
    "packages changed, old one still loaded": (host(OLD), "reload", "go", False),
    "old one loaded, services hold it": (host(OLD, holders=[PERSISTENCED]), "reload", "go", False),
    "old one loaded, an engine holds it": (host(OLD, holders=[ENGINE]), "reload", "stop", False),
    "old one loaded, somebody else holds it": (host(OLD, holders=[PYTHON]), "reload", "stop", False),
    "an engine holds the wanted one": (host(holders=[ENGINE]), "nothing", "go", False),
    "userland upgraded by somebody else": (host(userland="590.44.01", holders=[ENGINE]), "nothing", "go", True),
    "module on disk upgraded by somebody else": (host(on_disk="590.44.01"), "nothing", "go", True),
    "proprietary on disk": (host(flavour_on_disk="proprietary"), "nothing", "go", True),
    "proprietary loaded and on disk": (
        host(flavour="proprietary", flavour_on_disk="proprietary"),
        "reload",
        "go",
        True,
    ),
    "fabric manager missing": (host(nvswitch_count=6), "nothing", "go", True),
    "fabric manager of another version": (host(nvswitch_count=6, fabric_manager=OLD), "nothing", "go", True),
    "fabric manager of this version": (host(nvswitch_count=6, fabric_manager=WANTED), "nothing", "go", False),
    "fabric manager without a switch": (host(fabric_manager=OLD), "nothing", "go", False),
    "only the newer kernel has the module, no headers for this one": (
        host(None, None, kernel_headers=False, on_disk_newest_kernel=NEXT_HAS),
        "reboot",
        "stop",
        False,
    ),
    "only the newer kernel has the module, headers are there": (
        host(None, None, on_disk_newest_kernel=NEXT_HAS),
        "load",
        "go",
        True,
    ),
    "fallen off the bus": (host(xid_errors=[{"code": 79, "pci_address": "0000:10:00.0"}]), "reboot", "stop", False),
    "another Xid": (host(xid_errors=[{"code": 31, "pci_address": "0000:10:00.0"}]), "nothing", "go", False),
    "recovery by reboot": (host(gpus=[gpu(recovery_action="reboot")]), "reboot", "stop", False),
    "recovery by system reboot": (host(gpus=[gpu(recovery_action="system_reboot")]), "reboot", "stop", False),
    "recovery by reset": (host(gpus=[gpu(recovery_action="reset")]), "nothing", "go", False),
    "Secure Boot, key enrolled": (bare(secure_boot=True, mok_enrolled=True), "load", "go", True),
    "Secure Boot, all is loaded": (host(secure_boot=True, mok_enrolled=None), "nothing", "go", False),
    "headers missing, nothing to build": (host(None, kernel_headers=False), "load", "go", False),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_state_decides(name):
    facts, action, decision, packages = TABLE[name]
    answer = driver_action(facts, WANTED)
    assert (answer["action"], answer["decision"], bool(answer["packages"])) == (action, decision, packages)
    assert answer["reasons"] != []
    assert (answer["message"] == "") == (decision == "go")


# ---- refusals: one for each message ----

REFUSED = {
    "no headers": (
        bare(kernel_headers=False),
        {"headers_available": False},
        "there are no headers of the running kernel 6.12.1 on this host or in its package sources",
        "This project never changes the kernel",
    ),
    "Secure Boot, key not enrolled": (
        bare(secure_boot=True, mok_enrolled=False),
        {},
        "signs modules built on this host is not enrolled",
        "nvidia_driver_signing_key",
    ),
    "Secure Boot, nobody can tell": (
        bare(secure_boot=True),
        {},
        "cannot be shown to be enrolled",
        "nvidia_driver_signing_key",
    ),
    "the next boot has no module": (
        host(None, nouveau_bound=True, on_disk_newest_kernel=NEXT_LACKS),
        {},
        "the next boot takes kernel 6.12.9, whose driver module is missing",
        "install the headers of 6.12.9",
    ),
    "the next boot has an old module": (
        host(None, nouveau_bound=True, on_disk_newest_kernel={**NEXT_LACKS, "version": OLD}),
        {},
        f"the next boot takes kernel 6.12.9, whose driver module is {OLD}",
        "remove that kernel",
    ),
    "bound elsewhere": (
        bare(gpus=[gpu(pci_driver="vfio-pci")]),
        {},
        "GPUs bound to another driver: 0000:10:00.0 to vfio-pci",
        "/etc/modprobe.d",
    ),
    "proprietary modules for Blackwell": (
        bare(gpus=[gpu(pci_id=B200, compute_capability="10.0")]),
        {"flavour": "proprietary"},
        "10de:2901 at 0000:10:00.0 has compute capability 10.0, for which there are no proprietary modules",
        "nvidia_driver_flavour: open",
    ),
    "open modules for Volta": (
        bare(gpus=[gpu(compute_capability="7.0")]),
        {},
        "compute capability 7.0, for which there are no open modules",
        "nvidia_driver_flavour: proprietary",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_any_change(name):
    facts, options, found, change = REFUSED[name]
    answer = driver_action(facts, WANTED, reboot_allowed=True, reload_allowed=True, **options)
    assert (answer["action"], answer["decision"], answer["change_packages"]) == ("refuse", "stop", False)
    assert found in answer["message"]
    assert change in answer["message"].split("Change: ")[1]


@pytest.mark.parametrize(
    ("version", "flavour", "text"),
    [
        ("535.309.01", "open", "driver branch 535 (nvidia_driver_version 535.309.01) gets no more fixes"),
        ("599.10.01", "open", "driver branch 599 (nvidia_driver_version 599.10.01) is not known here"),
        ("595.91.07", "proprietary", "proprietary modules of branch 595. Needed: branch 580 or older"),
        ("470.256.02", "open", "open modules of branch 470. Needed: branch 515 or newer"),
    ],
)
def test_a_version_that_must_not_be_installed_is_refused(version, flavour, text):
    answer = driver_action(bare(), version, flavour=flavour)
    assert answer["action"] == "refuse"
    assert text in answer["message"]


def test_a_branch_without_fixes_is_taken_when_asked_for():
    assert driver_action(bare(), "535.309.01", end_of_life_allowed=True)["action"] == "load"


@pytest.mark.parametrize("version", ["580", "580-open", "latest", "580.178.04-1", ""])
def test_an_incomplete_version_is_refused(version):
    with pytest.raises(Refusal, match=r"Needed: a complete version.*Change: nvidia_driver_version"):
        driver_action(bare(), version)


def test_an_unknown_flavour_is_refused():
    with pytest.raises(Refusal, match=r"flavour 'closed'. Needed: open or proprietary. Change: nvidia_driver_flavour"):
        driver_action(bare(), WANTED, flavour="closed")


def test_all_refusals_are_told_at_once():
    facts = bare(kernel_headers=False, secure_boot=True, gpus=[gpu(pci_driver="vfio-pci")])
    message = driver_action(facts, "535.309.01", headers_available=False)["message"]
    assert message.count("Needed: ") == 4


def test_prebuilt_modules_need_neither_headers_nor_a_key():
    facts = bare(kernel_headers=False, secure_boot=True, mok_enrolled=False)
    assert driver_action(facts, WANTED, headers_available=False, prebuilt=True)["action"] == "load"


def test_a_named_key_counts_for_the_fact():
    facts = bare(secure_boot=True, mok_enrolled=False)
    assert driver_action(facts, WANTED, key_enrolled=True)["action"] == "load"


# ---- permissions ----


def decided(facts, **options):
    answer = driver_action(facts, WANTED, **options)
    return answer["action"], answer["decision"], answer["change_packages"]


BARE_NOUVEAU, SERVING = bare(nouveau_bound=True), host(OLD, OLD, OLD, holders=[PERSISTENCED, ENGINE])


@pytest.mark.parametrize(
    ("facts", "options", "expected"),
    [
        (BARE_NOUVEAU, {}, ("reboot", "stop", False)),
        (BARE_NOUVEAU, {"reboot_allowed": True}, ("reboot", "go", True)),
        # Nothing of NVIDIA's runs: the packages harm nobody, only the restart is left.
        (BARE_NOUVEAU, {"reboot_allowed": False}, ("reboot", "report", True)),
        (SERVING, {}, ("reload", "stop", False)),
        (SERVING, {"reload_allowed": True}, ("reload", "go", True)),
        # New libraries over the old module would break whatever starts next.
        (SERVING, {"reload_allowed": False}, ("reload", "report", False)),
        (SERVING, {"reboot_allowed": True}, ("reload", "stop", False)),
        (host(OLD, OLD, OLD), {"reload_allowed": False}, ("reload", "report", False)),
        (host(OLD), {"unload_failed": "busy"}, ("reboot", "stop", False)),
        (host(OLD), {"unload_failed": "busy", "reboot_allowed": True}, ("reboot", "go", False)),
        (host(), {"package_changes": ["nvidia-persistenced is missing"]}, ("nothing", "go", True)),
    ],
)
def test_permissions_have_three_values(facts, options, expected):
    assert decided(facts, **options) == expected


def test_engines_are_named_with_what_may_be_done_about_them():
    message = driver_action(SERVING, WANTED)["message"]
    assert f"driver {OLD} is loaded, {WANTED} is wanted" in message
    assert "VLLM::Worker (deployment chat, pid 800)" in message
    assert "a reload of the driver, which stops chat and starts them again" in message
    assert "nvidia_driver_reload_allowed: true" in message
    assert "nvidia-persiste" not in message


@pytest.mark.parametrize("allowed", [None, True])
def test_a_process_of_somebody_else_is_named_and_no_permission_reaches_it(allowed):
    facts = host(OLD, holders=[PYTHON, PERSISTENCED])
    answer = driver_action(facts, WANTED, reload_allowed=allowed, reboot_allowed=True)
    assert (answer["decision"], answer["foreign"]) == ("stop", ["python3 (pid 900)"])
    assert "no process is ever killed" in answer["message"]
    assert "end python3 (pid 900)" in answer["message"]


def test_holders_are_told_apart():
    answer = driver_action(host(holders=[PERSISTENCED, ENGINE, {**ENGINE, "pid": 801}, PYTHON]), WANTED)
    assert [holder["unit"] for holder in answer["holders"]] == ["nvidia-persistenced", None, None, None]
    assert answer["deployments"] == ["chat"]
    assert answer["foreign"] == ["python3 (pid 900)"]


# ---- what holds for all combinations ----

VERSIONS = (None, OLD, WANTED)
HOLDERS = ([], [PERSISTENCED], [ENGINE], [PYTHON])


def combinations():
    for loaded, on_disk, userland in itertools.product(VERSIONS, repeat=3):
        for nouveau, headers, enrolled, following, holders, switches in itertools.product(
            (False, True), (False, True), (None, True), (None, NEXT_HAS, NEXT_LACKS), HOLDERS, (0, 4)
        ):
            if loaded is None and holders:
                continue
            yield host(
                loaded,
                on_disk,
                userland,
                nouveau_bound=nouveau and loaded is None,
                kernel_headers=headers,
                secure_boot=enrolled is not None,
                mok_enrolled=enrolled,
                on_disk_newest_kernel=following,
                holders=holders,
                nvswitch_count=switches,
            )


def with_packages(facts, answer):
    """The host after its packages were changed."""
    facts = copy.deepcopy(facts)
    driver = facts["driver"]
    if answer["change_packages"]:
        built = facts["kernel_headers"] or driver["on_disk"] is not None
        driver.update(userland=WANTED, fabric_manager=WANTED, on_disk=WANTED if built else None, flavour_on_disk="open")
        if driver["on_disk_newest_kernel"]:
            driver["on_disk_newest_kernel"] = NEXT_HAS
    return facts


def after(facts, answer):
    """The host after the action."""
    facts = copy.deepcopy(facts)
    driver = facts["driver"]
    if answer["decision"] != "go":
        return facts
    if answer["action"] == "reboot" and driver["on_disk_newest_kernel"]:
        facts.update(kernel=driver["on_disk_newest_kernel"]["kernel"], kernel_headers=True)
        driver.update(on_disk=driver["on_disk_newest_kernel"]["version"], on_disk_newest_kernel=None)
    if answer["action"] in ("load", "reload", "reboot"):
        driver.update(loaded=driver["on_disk"], holders=[], flavour="open")
        facts["nouveau_bound"] = False
    return facts


def test_no_combination_breaks_a_promise():
    for facts in combinations():
        for reboot, reload in itertools.product((None, True, False), repeat=2):
            options = {"reboot_allowed": reboot, "reload_allowed": reload, "headers_available": False}
            answer = driver_action(facts, WANTED, **options)
            disruptive = answer["action"] in ("reload", "reboot")
            if answer["decision"] == "go":
                assert not (disruptive and answer["foreign"]), facts
                assert not (answer["action"] == "reload" and answer["deployments"] and not reload), facts
                assert not (answer["action"] == "reboot" and not reboot), facts
            else:
                assert "Needed: " in answer["message"], facts
                assert "Change: " in answer["message"], facts
            if answer["decision"] == "stop":
                assert not answer["change_packages"], facts
            assert (answer["action"] == "refuse") <= (answer["decision"] == "stop"), facts
            if facts["driver"]["loaded"] == facts["driver"]["on_disk"] == facts["driver"]["userland"] == WANTED:
                assert answer["action"] == "nothing", facts


def test_every_way_ends_at_the_wanted_driver_or_in_a_sentence():
    """Packages, action, again: two rounds at most, and a run that dies between the two steps goes on."""
    allowed = {"reboot_allowed": True, "reload_allowed": True, "headers_available": False}
    for start in combinations():
        first = driver_action(start, WANTED, **allowed)
        if first["decision"] == "stop":
            continue
        facts = with_packages(start, first)
        for _round in range(2):
            answer = driver_action(facts, WANTED, **allowed)
            assert answer["decision"] == "go", (start, answer)
            facts = after(with_packages(facts, answer), answer)
        last = driver_action(facts, WANTED, **allowed)
        assert (last["action"], last["packages"]) == ("nothing", []), (start, facts)


# ---- data ----


def test_the_default_version_is_of_a_living_branch():
    data = driver_data()
    assert data["branches"][driver_branch(data["default_version"])]["ended"] is False


def test_names_of_processes_are_as_the_kernel_cuts_them():
    assert [s["process"] for s in driver_data()["services"] if len(s["process"]) > 15] == []
