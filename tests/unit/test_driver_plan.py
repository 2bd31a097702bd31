"""The plan of the role: what only shows when facts, packages, keys and permissions come together."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_driver import ENGINE, OLD, WANTED, bare, host

from metalserve.driver_plan import Seen, Stop, Wishes, driver_plan
from metalserve.errors import Refusal

KEY = (Path(__file__).parent / "fixtures/openpgp/one.asc").read_text()
FINGERPRINT = "4106DD03B2D78DD09A23A08CCDBAA6682FFE28CF"
SYSTEM = {"os": {"id": "debian", "version_id": "13", "like": ["debian"]}, "architecture": "x86_64"}
NAMES = ["nvidia-driver-cuda", "libcuda1", "nvidia-persistenced", "nvidia-modprobe", "nvidia-kernel-open-dkms"]
URL = "file:///srv/nvidia"


def facts(made):
    return {**made, **SYSTEM}


def packages(version=WANTED, names=NAMES, held=True):
    return [{"name": name, "version": f"{version}-1", "held": held} for name in names]


def seen(installed=(), kernel=WANTED, signer=None, **values):
    next_kernel = {"kernel": "6.12.1", "version": kernel, "signer": signer}
    beside = {"runfile": False, "nvlink5": False, "next_kernel": next_kernel}
    for key in beside:
        beside[key] = values.pop(key, beside[key])
    return Seen(host={"packages": list(installed), **beside}, **values)


def test_a_host_without_gpus_is_left_alone_whatever_it_runs():
    plan = driver_plan({"gpus": [], "os": {"id": "nixos"}}, Wishes(WANTED), Seen(host={}))
    assert plan["gpu_count"] == 0
    assert plan["step"]["action"] == "nothing"


def test_a_host_in_order_has_nothing_to_do():
    plan = driver_plan(facts(host()), Wishes(WANTED), seen(packages()))
    assert (plan["step"]["action"], plan["step"]["packages"], plan["hold"]) == ("nothing", [], [])
    assert plan["installed"]["libcuda1"] == f"{WANTED}-1"


def test_a_hold_that_is_not_there_is_named():
    plan = driver_plan(facts(host()), Wishes(WANTED), seen(packages(held=False)))
    assert sorted(plan["hold"]) == sorted(NAMES)
    assert plan["held"] == []


def test_packages_count_although_all_levels_agree():
    ahead = [*packages(), {"name": "libnvidia-cfg1", "version": "590.44.01-1", "held": False}]
    plan = driver_plan(facts(host()), Wishes(WANTED), seen(ahead))
    assert plan["step"]["packages"] == ["libnvidia-cfg1 is 590.44.01-1"]
    assert plan["step"]["action"] == "nothing"


def test_what_apt_says_becomes_exact_versions():
    offers = "\n".join(f"{name:>24} | {WANTED}-1 | file:/srv/nvidia  Packages" for name in NAMES)
    simulated = "\n".join(f"Inst {name} ({WANTED}-1 NVIDIA:/ [amd64])" for name in [*NAMES, "libnvidia-ml1"])
    wishes = Wishes(WANTED, repository_url=URL)
    plan = driver_plan(facts(bare()), wishes, seen(offers=offers, simulated=simulated))
    assert plan["exact"] == [f"{name}={WANTED}-1" for name in NAMES]
    assert f"libnvidia-ml1={WANTED}-1" in plan["install"]


def test_what_dnf_says_becomes_exact_versions():
    system = {"os": {"id": "rocky", "version_id": "9.6", "like": ["rocky", "rhel"]}, "architecture": "x86_64"}
    names = ["nvidia-driver-cuda", "nvidia-driver-cuda-libs", "nvidia-persistenced", "kmod-nvidia-open-dkms"]
    offers = "\n".join(f"{name} 3:{WANTED}-1.el9 metalserve-nvidia" for name in names)
    plan = driver_plan({**bare(), **system}, Wishes(WANTED), seen(offers=offers))
    assert plan["exact"] == [f"{name}=3:{WANTED}-1.el9" for name in names]
    assert plan["packages"]["stream"] == "580-open"


@pytest.mark.parametrize("when", ["present", "offers"])
def test_a_second_source_on_the_host_is_refused(when):
    offers = f"nvidia-driver-cuda | {WANTED}-1 | http://ppa.example/ubuntu noble/main amd64 Packages"
    with pytest.raises(
        Refusal, match=r"offered by the package sources http://ppa.example/ubuntu\. Needed: only file:/srv"
    ):
        driver_plan(facts(bare()), Wishes(WANTED, repository_url=URL), seen(**{when: offers}))


def test_a_driver_of_the_run_file_is_refused():
    with pytest.raises(Refusal, match=r"\.run file .* Change: run nvidia-uninstall"):
        driver_plan(facts(host()), Wishes(WANTED), seen(runfile=True))


def test_nvidia_s_own_fingerprint_is_the_default():
    with pytest.raises(Refusal, match=f"{FINGERPRINT}. Needed: 02182E60104FCDC26EAE1B8597A5D4CB8793F200"):
        driver_plan(facts(bare()), Wishes(WANTED), seen(key=KEY))


def test_a_mirror_may_sign_with_a_key_of_its_own():
    wishes = Wishes(WANTED, repository_key_fingerprints=[FINGERPRINT])
    assert driver_plan(facts(bare()), wishes, seen(key=KEY))["step"]["action"] == "load"


@pytest.mark.parametrize("made", [bare(nouveau_bound=True), host(OLD, holders=[ENGINE])], ids=["reboot", "reload"])
def test_what_the_operator_has_to_decide_stops_the_run(made):
    with pytest.raises(Stop, match=r"Needed: .*Change: nvidia_driver_re(boot|load)_allowed: true"):
        driver_plan(facts(made), Wishes(WANTED), seen(packages()))


def test_what_is_refused_stops_the_run():
    with pytest.raises(Stop, match="no headers of the running kernel"):
        driver_plan(facts(bare(kernel_headers=False)), Wishes(WANTED), seen(headers_offered=False))


ALLOWED = Wishes(WANTED, reboot_allowed=True)
WAITING = host(None, nouveau_bound=True)


def test_a_reboot_into_a_kernel_with_the_module_goes_on():
    plan = driver_plan(facts(WAITING), ALLOWED, seen(packages()))
    assert (plan["step"]["action"], plan["step"]["decision"]) == ("reboot", "go")


@pytest.mark.parametrize(("version", "word"), [(None, "missing"), (OLD, OLD)])
def test_a_reboot_into_a_kernel_without_the_module_is_refused(version, word):
    with pytest.raises(Refusal, match=f"kernel 6.12.1, whose driver module is {word}.*Change: install the headers"):
        driver_plan(facts(WAITING), ALLOWED, seen(packages(), kernel=version))


def test_under_secure_boot_the_next_module_must_be_signed():
    secure = {**WAITING, "secure_boot": True, "mok_enrolled": True}
    with pytest.raises(Refusal, match=r"kernel 6.12.1 is not signed.*Change: sign it .*nvidia_driver_signing_key"):
        driver_plan(facts(secure), ALLOWED, seen(packages()))
    assert driver_plan(facts(secure), ALLOWED, seen(packages(), signer="DKMS"))["step"]["decision"] == "go"


def test_before_the_packages_nobody_asks_for_the_next_module():
    made = bare(nouveau_bound=True)
    assert driver_plan(facts(made), ALLOWED, seen(kernel=None))["step"]["decision"] == "go"
