import pytest
from engine_examples import CUDA_PLAN, SGLANG_CPU_PLAN, VLLM_CPU_PLAN, deployment

from metalserve.engines.claims import claims
from metalserve.engines.environment import check_environment, engine_environment
from metalserve.engines.owners import owned_variables
from metalserve.errors import Refusal

VARIABLES = [claim for claim in claims() if claim.kind == "variable"]


def test_the_engine_stays_off_the_network_and_keeps_its_caches():
    got = engine_environment(deployment(), CUDA_PLAN)
    assert got == {
        "CUDA_CACHE_PATH": "/root/.cache/nv",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "METALSERVE_DEPLOYMENT": "qwen",
        "TRITON_CACHE_DIR": "/root/.cache/triton",
        "VLLM_NO_USAGE_STATS": "1",
    }
    assert list(got) == sorted(got)


def test_what_a_cpu_host_needs():
    assert engine_environment(deployment(), VLLM_CPU_PLAN)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert engine_environment(deployment(engine="sglang"), SGLANG_CPU_PLAN)["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "CUDA_CACHE_PATH" not in engine_environment(deployment(), VLLM_CPU_PLAN)


def test_the_deployment_adds_and_overrides():
    own = {"NCCL_P2P_DISABLE": 1, "VLLM_NO_USAGE_STATS": "0"}
    got = engine_environment(deployment(environment=own), CUDA_PLAN)
    assert (got["NCCL_P2P_DISABLE"], got["VLLM_NO_USAGE_STATS"]) == ("1", "0")


@pytest.mark.parametrize("name", ["1ABC", "A-B", "A B", "", "A=B", "É"])
def test_an_impossible_name_is_refused(name):
    with pytest.raises(Refusal, match=r"as the name of a variable.*letters, digits and underscores"):
        check_environment("vllm", {name: "1"})


@pytest.mark.parametrize("value", ["a'b", 'a"b', "a\\b", "a\nb", "a\rb", "a\tb", "a\0b"])
def test_a_value_that_systemd_and_docker_read_differently_is_refused(value):
    with pytest.raises(
        Refusal, match=r"the value of X holds a quote.*systemd and docker read them differently.*environment\.X"
    ):
        check_environment("vllm", {"X": value})


@pytest.mark.parametrize("value", [" a", "a "])
def test_white_space_at_an_end_is_refused(value):
    with pytest.raises(Refusal, match=r"begins or ends with white space.*systemd strips it and docker keeps it"):
        check_environment("vllm", {"X": value})


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "HF_TOKEN", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "my_secret"])
def test_a_secret_is_refused_without_being_shown(name):
    with pytest.raises(Refusal, match=rf"{name}, which looks like a secret.*no secret in the inventory") as refusal:
        check_environment("vllm", {name: "hunter2"})
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "SSL_CERT_FILE", "API_KEY_FILE", "KEYRING", "MAX_TOKENS"])
def test_what_only_sounds_like_a_secret_passes(name):
    assert check_environment("vllm", {name: "x"}) == {name: "x"}


@pytest.mark.parametrize("value", [True, None, ["a"]])
def test_a_value_that_is_no_text_is_refused(value):
    with pytest.raises(Refusal, match=rf"X with a value of type {type(value).__name__}.*such as '1'"):
        check_environment("vllm", {"X": value})


def test_a_name_of_the_release_is_refused():
    with pytest.raises(Refusal, match=r"METALSERVE_PORT.*those belong to the release"):
        check_environment("vllm", {"METALSERVE_PORT": "1"})


@pytest.mark.parametrize("name", sorted(owned_variables()))
def test_a_variable_with_an_owner_is_refused_with_its_field(name):
    with pytest.raises(Refusal, match=rf"the variable {name} in environment") as refusal:
        check_environment("vllm", {name: "1"})
    assert refusal.value.change.startswith(owned_variables()[name])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("claim", VARIABLES, ids=lambda claim: claim.name)
def test_a_variable_that_does_nothing_is_refused_with_its_equivalent(engine, claim):
    with pytest.raises(Refusal, match=rf"the variable {claim.name}") as refusal:
        check_environment(engine, {claim.name: "1"})
    assert refusal.value.needed == claim.instead[engine]
