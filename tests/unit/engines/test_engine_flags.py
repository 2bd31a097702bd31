import pytest

from metalserve.engines.flags import flags_for, known_versions
from metalserve.engines.info import engine_names
from metalserve.errors import Refusal

TABLES = [(engine, version) for engine in ("vllm", "sglang") for version in known_versions(engine)]


def test_versions_are_in_order_of_their_numbers():
    assert known_versions("vllm") == ("0.17.1", "0.20.2", "0.27.1", "0.32.0", "0.33.0")
    assert known_versions("sglang") == ("0.5.10", "0.5.23")


def test_an_exact_version_has_no_note():
    table = flags_for("vllm", "0.20.2")
    assert (table.table_version, table.note) == ("0.20.2", None)
    assert flags_for("vllm", "v0.32.0+cpu").table_version == "0.32.0"


@pytest.mark.parametrize(
    ("asked", "served", "word"),
    [("0.18.0", "0.17.1", "between"), ("0.32.5", "0.32.0", "between"), ("0.40.0", "0.33.0", "newer")],
)
def test_an_unknown_version_takes_the_newest_below_and_says_so(asked, served, word):
    table = flags_for("vllm", asked)
    assert (table.version, table.table_version) == (asked, served)
    assert word in table.note
    assert served in table.note


def test_a_version_older_than_every_table_is_refused():
    with pytest.raises(Refusal, match=r"vllm 0\.8\.2, whose flags are not known.*vllm 0\.17\.1 or newer"):
        flags_for("vllm", "0.8.2")


def test_an_unknown_engine_is_refused():
    with pytest.raises(Refusal, match=r"engine vllm or sglang"):
        flags_for("triton", "1.0.0")


@pytest.mark.parametrize("version", ["latest", "nightly", "0.33", "0.33.0rc1"])
def test_what_is_no_release_version_is_refused(version):
    with pytest.raises(Refusal, match=r"a release version of three numbers"):
        flags_for("vllm", version)


@pytest.mark.parametrize(
    ("flag", "first", "last"), [("swap-space", "0.17.1", "0.17.1"), ("spec-method", "0.27.1", "0.33.0")]
)
def test_flags_come_and_go_with_versions(flag, first, last):
    having = [version for version in known_versions("vllm") if flags_for("vllm", version).find(flag)]
    assert (having[0], having[-1]) == (first, last)


@pytest.mark.parametrize(("engine", "version"), TABLES)
def test_every_boolean_flag_has_both_spellings(engine, version):
    table = flags_for(engine, version)
    booleans = [flag for flag in table.flags.values() if flag.action == "boolean"]
    assert booleans
    for flag in booleans:
        positive = flag.dest.replace("_", "-")
        assert positive in flag.names
        assert not table.turns_off(positive)
        assert flag.negative != positive
        assert table.turns_off(flag.negative)


@pytest.mark.parametrize(
    ("version", "negative"),
    [
        ("0.17.1", "no-enable-prefix-caching"),
        ("0.32.0", "no-enable-prefix-caching"),
        ("0.33.0", "disable-prefix-caching"),
    ],
)
def test_the_opposite_spelling_follows_the_version(version, negative):
    assert flags_for("vllm", version).find("enable-prefix-caching").negative == negative


def test_0_33_still_takes_the_old_opposite_although_its_parser_does_not_list_it():
    table = flags_for("vllm", "0.33.0")
    assert table.find("no-enable-prefix-caching").dest == "enable_prefix_caching"
    assert table.turns_off("no-enable-prefix-caching")
    assert table.find("no-max-model-len") is None


def test_default_of_the_memory_share_differs_by_version():
    assert flags_for("vllm", "0.17.1").find("gpu-memory-utilization").default == 0.9
    assert flags_for("vllm", "0.20.2").find("gpu-memory-utilization").default == 0.92


def test_every_engine_of_the_catalogue_has_a_table():
    assert all(known_versions(engine) for engine in engine_names())
