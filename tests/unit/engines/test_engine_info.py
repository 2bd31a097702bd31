import pytest

from metalserve.engines.flags import flags_for, known_versions
from metalserve.engines.info import engine_info, engine_names, engine_of
from metalserve.errors import Refusal


def test_pinned_images():
    assert engine_info("vllm").image == "vllm/vllm-openai:v0.33.0"
    assert engine_info("sglang").image == "lmsysorg/sglang:v0.5.23"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_pinned_version_has_its_own_table_and_the_oldest_is_the_oldest_table(engine):
    info = engine_info(engine)
    assert flags_for(engine, info.version).note is None
    assert info.oldest_version == known_versions(engine)[0]


@pytest.mark.parametrize(("version", "cuda"), [("0.17.1", "12.9"), ("0.20.2", "13.0"), ("0.33.0", "13.0")])
def test_cuda_of_the_image_follows_the_version(version, cuda):
    assert engine_info("vllm", version).image_cuda == cuda


def test_a_deployment_may_name_version_and_image():
    info = engine_of({"engine": "vllm", "engine_version": "0.32.0", "image": "site.example/vllm:0.32.0-cpu"})
    assert (info.version, info.image) == ("0.32.0", "site.example/vllm:0.32.0-cpu")
    assert engine_of({"engine": "vllm", "engine_version": "0.32.0"}).image == "vllm/vllm-openai:v0.32.0"


def test_sglang_is_given_the_model_path_on_its_command_line():
    # Its start command looks for it before it reads the file.
    arguments = engine_info("sglang").arguments
    assert arguments[arguments.index("--model-path") + 1] == "{model}"
    assert arguments[arguments.index("--config") + 1] == "{config}"


@pytest.mark.parametrize(
    ("version", "route", "cuda"),
    [("0.5.10", "/health", "12.9"), ("0.5.20", "/health", "13.0"), ("0.5.23", "/ready", "13.0")],
)
def test_the_readiness_route_and_cuda_of_sglang_follow_the_version(version, route, cuda):
    info = engine_info("sglang", version)
    assert (info.ready_route, info.image_cuda) == (route, cuda)


def test_an_unknown_engine_is_refused():
    with pytest.raises(Refusal, match=r"engine 'tgi'.*one of vllm, sglang.*set engine"):
        engine_info("tgi")


def test_a_version_older_than_the_oldest_known_is_refused():
    with pytest.raises(Refusal, match=r"sglang 0\.5\.9.*0\.5\.10 or newer.*engine_version"):
        engine_info("sglang", "0.5.9")


def test_every_engine_has_routes_and_sources():
    for engine in engine_names():
        info = engine_info(engine)
        assert all(route.startswith("/") for route in (info.health_route, info.ready_route, info.metrics_route))
        assert info.sources
