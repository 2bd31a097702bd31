import json
import re
from pathlib import Path

import pytest
from engine_examples import parser_from

from metalserve.engines.arguments import check_arguments, check_value
from metalserve.engines.claims import claims
from metalserve.engines.flags import flags_for, known_versions
from metalserve.engines.owners import owned_flags, secret_flags, text_flags
from metalserve.engines.rendering import cli_arguments
from metalserve.errors import Refusal

NEWEST = {engine: known_versions(engine)[-1] for engine in ("vllm", "sglang")}
# A flag that the newest version has again is no claim against that version.
BACK = {("vllm", "disable-log-requests")}
CLAIMS = [
    pytest.param(engine, claim, id=f"{engine}-{claim.name}")
    for claim in claims()
    for engine in claim.instead
    if (engine, claim.name) not in BACK
]


def check(engine="vllm", version=None, **arguments):
    named = {name.replace("_", "-"): value for name, value in arguments.items()}
    return check_arguments(engine, version or NEWEST[engine], named)


@pytest.mark.parametrize(("engine", "claim"), CLAIMS)
def test_what_circulates_is_refused_with_its_true_equivalent(engine, claim):
    values = claim.values or ("1",)
    for value in values:
        with pytest.raises(Refusal) as refusal:
            check_arguments(engine, NEWEST[engine], {claim.name: value})
        assert claim.instead[engine] == refusal.value.needed
        assert claim.truth.rstrip(".") in str(refusal.value)


@pytest.mark.parametrize(("engine", "claim"), CLAIMS)
def test_every_flag_named_as_the_equivalent_exists(engine, claim):
    table = flags_for(engine, NEWEST[engine])
    for word in re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)+", claim.instead[engine]):
        assert table.find(word) is not None, word


def test_a_removed_flag_passes_where_it_still_exists():
    assert check_arguments("vllm", "0.17.1", {"swap-space": 16}) == {"swap-space": 16}
    assert check_arguments("vllm", "0.33.0", {"disable-log-requests": True}) == {"disable-log-requests": True}
    with pytest.raises(Refusal, match=r"Requests are not logged unless"):
        check_arguments("vllm", "0.32.0", {"disable-log-requests": True})


def test_the_qwen_parser_is_wrong_for_vllm_and_real_for_sglang():
    assert check("sglang", tool_call_parser="qwen") == {"tool-call-parser": "qwen"}


def test_an_unknown_flag_is_refused_with_the_nearest():
    with pytest.raises(
        Refusal, match=r"no flag 'max-logprob'.*the nearest is 'max-logprobs'.*engine_args\.max-logprob"
    ):
        check(max_logprob=5)


def test_an_unknown_flag_without_a_near_one_is_refused():
    with pytest.raises(Refusal, match=r"no flag 'zzz'\. Needed: a flag of that version\."):
        check(zzz=1)


def test_a_flag_of_another_version_is_named_as_such():
    with pytest.raises(
        Refusal, match=r"vllm 0\.20\.2 has no flag 'spec-method'; it exists in 0\.27\.1, 0\.32\.0, 0\.33\.0"
    ):
        check(version="0.20.2", spec_method="mtp")


def test_an_unknown_flag_of_an_unknown_version_tells_which_table_was_used():
    with pytest.raises(
        Refusal, match=r"vllm 0\.40\.0 is newer than every known version; .* against 0\.33\.0.*dump_flags\.py"
    ):
        check(version="0.40.0", brand_new=1)


def test_an_abbreviation_is_refused_although_the_engine_takes_it():
    with pytest.raises(Refusal, match=r"'enable-prefix'.*'enable-prefix-caching'"):
        check(enable_prefix=True)


def test_underscores_and_leading_dashes_are_brought_into_form():
    assert check_arguments("vllm", "0.33.0", {"--max_logprobs": 5}) == {"max-logprobs": 5}


def test_a_wrong_choice_is_refused_with_the_nearest():
    with pytest.raises(
        Refusal, match=r"'kv-offloading-backend: natve'.*one of lmcache, native; the nearest is 'native'"
    ):
        check(kv_offloading_backend="natve")


def test_a_wrong_choice_without_a_near_one_is_refused():
    with pytest.raises(Refusal, match=r"'mamba-cache-mode: all'.*one of align, none\. Change"):
        check(mamba_cache_mode="all")


def test_a_number_is_compared_with_choices_as_text():
    table = flags_for("vllm", "0.33.0")
    assert check_value(table, "max-lora-rank", 64) == ("max-lora-rank", 64)
    with pytest.raises(Refusal, match=r"'max-lora-rank: 24', which vllm 0\.33\.0 does not take.*one of 1, "):
        check_value(table, "max-lora-rank", 24)


def test_a_parser_that_is_not_registered_is_refused():
    with pytest.raises(
        Refusal, match=r"'tool-call-parser: qwen3_code'.*not registered in vllm 0\.33\.0.*nearest is 'qwen3_coder'"
    ):
        check(tool_call_parser="qwen3_code")
    with pytest.raises(Refusal, match=r"'reasoning-parser: x'.*registered are"):
        check(reasoning_parser="x")


def test_a_plugin_brings_its_own_parser():
    own = {"tool-call-parser": "mine", "tool-parser-plugin": "/plugins/mine.py"}
    assert check_arguments("vllm", "0.33.0", own) == own


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.17.1", "no-enable-prefix-caching"),
        ("0.32.0", "no-enable-prefix-caching"),
        ("0.33.0", "disable-prefix-caching"),
    ],
)
def test_false_becomes_the_opposite_flag_of_the_version(version, expected):
    assert check(version=version, enable_prefix_caching=False) == {expected: True}


def test_false_of_an_opposite_flag_becomes_the_flag_itself():
    assert check(no_enable_prefix_caching=False) == {"enable-prefix-caching": True}
    assert check(disable_cascade_attn=False) == {"enable-cascade-attn": True}
    assert check(no_enable_prefix_caching=True) == {"disable-prefix-caching": True}


@pytest.mark.parametrize(("engine", "flag"), [("vllm", "disable-log-stats"), ("sglang", "enable-metrics")])
def test_false_of_a_plain_switch_is_refused(engine, flag):
    with pytest.raises(Refusal, match=rf"'{flag}: false', which {engine} drops silently, and the flag has no opposite"):
        check_arguments(engine, NEWEST[engine], {flag: False})


@pytest.mark.parametrize("flag", ["max-logprobs", "enable-prefix-caching", "disable-log-stats"])
def test_null_is_refused(flag):
    with pytest.raises(Refusal, match=rf"'{flag}: null', which the engine would read as the text None"):
        check_arguments("vllm", "0.33.0", {flag: None})


def test_a_truth_value_for_a_flag_with_a_value_is_refused():
    with pytest.raises(Refusal, match=r"'max-logprobs: true', but the flag takes a value"):
        check(max_logprobs=True)


def test_a_value_for_a_flag_without_one_is_refused():
    with pytest.raises(Refusal, match=r"'enable-prefix-caching: yes', but the flag takes no value"):
        check(enable_prefix_caching="yes")


def test_a_value_of_another_type_is_refused():
    with pytest.raises(Refusal, match=r"'max-logprobs' with a value of type set"):
        check(max_logprobs={1})


@pytest.mark.parametrize("value", ["--port", "-tp", "-", "-1e3", "-a b"])
def test_a_value_that_looks_like_a_flag_is_refused(value):
    with pytest.raises(Refusal, match=rf"'chat-template: {value}', which the parser would read as another flag"):
        check(chat_template=value)


@pytest.mark.parametrize("value", [-1, "-1", -0.5])
def test_a_negative_number_passes(value):
    assert check(stream_interval=value) == {"stream-interval": value}


def test_a_mapping_becomes_json_text():
    got = check(speculative_config={"num_speculative_tokens": 2, "method": "mtp"})
    assert json.loads(got["speculative-config"]) == {"method": "mtp", "num_speculative_tokens": 2}


def test_a_list_follows_the_parser():
    assert check(cudagraph_capture_sizes=[1, 2, 4]) == {"cudagraph-capture-sizes": [1, 2, 4]}
    assert check(allowed_origins=["https://a.example"]) == {"allowed-origins": '["https://a.example"]'}


def test_a_list_for_a_flag_with_one_value_is_refused():
    with pytest.raises(Refusal, match=r"'max-logprobs' with a list of 2.*the flag takes no list"):
        check(max_logprobs=[1, 2])
    with pytest.raises(Refusal, match=r"'middleware' with a list of 1"):
        check(middleware=["a.b"])


def test_an_empty_list_is_refused():
    with pytest.raises(Refusal, match=r"'cudagraph-capture-sizes' with an empty list, which would be dropped silently"):
        check(cudagraph_capture_sizes=[])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("flag", sorted(owned_flags()))
def test_a_flag_with_an_owner_is_refused_with_its_field(engine, flag):
    with pytest.raises(Refusal, match=rf"engine_args sets '{flag}'") as refusal:
        check_arguments(engine, NEWEST[engine], {flag: 1})
    assert refusal.value.change.startswith(owned_flags()[flag])


@pytest.mark.parametrize("flag", sorted(text_flags()))
def test_the_text_of_requests_is_never_logged(flag):
    engine = "vllm" if flag.startswith("enable-") else "sglang"
    with pytest.raises(Refusal, match=rf"'{flag}', which writes the text of requests down.*remove engine_args\.{flag}"):
        check_arguments(engine, NEWEST[engine], {flag: True})


@pytest.mark.parametrize("flag", sorted(secret_flags()))
def test_a_secret_is_refused_and_never_repeated(flag):
    with pytest.raises(Refusal, match=rf"'{flag}'\).*no secret in a release.*remove engine_args\.{flag}") as refusal:
        check_arguments("sglang", "0.5.23", {flag: "hunter2"})
    assert "hunter2" not in str(refusal.value)


def test_two_spellings_of_one_flag_are_refused():
    with pytest.raises(Refusal, match=r"'no-enable-prefix-caching' and 'enable-prefix-caching' set the same flag"):
        check_arguments("vllm", "0.33.0", {"enable-prefix-caching": True, "no_enable_prefix_caching": True})


@pytest.mark.parametrize(
    ("flag", "value", "instead"),
    [
        ("enable-dp-attention", True, "use attn-dp-size"),
        ("lora-strict-loading", True, "leave it out"),
    ],
)
def test_what_sglang_does_not_read_from_a_file_is_refused(flag, value, instead):
    with pytest.raises(Refusal, match=rf"'{flag}', which SGLang 0.5.23 does not read from a config file.*{instead}"):
        check_arguments("sglang", "0.5.23", {flag: value})


EVERY_FLAG = [(engine, version) for engine in ("vllm", "sglang") for version in known_versions(engine)]


@pytest.mark.parametrize(("engine", "version"), EVERY_FLAG)
def test_every_flag_that_passes_is_taken_by_the_parser_of_its_table(engine, version):
    """Each flag of the table with a fitting value, checked, written and parsed again."""
    table = flags_for(engine, version)
    parser = parser_from(table)
    passed, refused = 0, {}
    for flag in {id(item): item for item in table.flags.values()}.values():
        if flag.names[0] in owned_flags() or set(flag.names) & (set(owned_flags()) | secret_flags() | text_flags()):
            continue
        value = True if flag.action in ("switch", "boolean") else (flag.choices[0] if flag.choices else "1")
        if flag.takes_list and flag.action != "LoRAPathAction":
            value = [value]
        try:
            checked = check_arguments(engine, version, {flag.name: value})
        except Refusal as refusal:
            refused[flag.name] = str(refusal)
            continue
        parsed = vars(parser.parse_args(cli_arguments(engine, version, checked)))
        assert parsed[flag.dest] in (value, [value])
        passed += 1
    assert passed > 0.8 * len({id(item) for item in table.flags.values()})
    reasons = ("does not read from a config file", "is not registered", "takes a JSON object here")
    assert [text for text in refused.values() if not any(reason in text for reason in reasons)] == []


def test_the_documentation_lists_every_claim_in_the_words_of_the_message():
    path = Path(__file__).parents[3] / "docs" / "engines.md"
    rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    for claim in claims():
        cells = [claim.truth, *claim.instead.values()]
        assert [
            row for row in rows if claim.name in row.split("|")[1] and all(f"| {cell} |" in row for cell in cells)
        ], claim.name
