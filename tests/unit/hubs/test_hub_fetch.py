"""The hosts' downloader against the hubs' file addresses: redirects to storage, logins, throttling, wrong bytes."""

from __future__ import annotations

import pytest
from hub_server import COMMIT, FILES, MODELSCOPE_COMMIT, REPOSITORY, USED, sha256

from metalserve.hubs import hub_files_url
from metalserve.remote.weights import ensure_model
from metalserve.remote.weights_download import Transfer
from metalserve.remote.weights_manifest import WeightsError

MANIFEST = [{"path": path, "size_bytes": len(FILES[path]), "sha256": sha256(FILES[path])} for path in USED]
WEIGHT = "model-00001-of-00002.safetensors"


@pytest.fixture
def fetch(tmp_path):
    def run(*sources, **how):
        outcome = ensure_model(
            tmp_path, "tiny", COMMIT, MANIFEST, sources, reserve_bytes=0, transfer=Transfer(attempts=1, **how)
        )
        assert {path: (tmp_path / "tiny" / COMMIT / path).read_bytes() for path in USED} == {
            path: FILES[path] for path in USED
        }
        return outcome

    return run


@pytest.mark.parametrize(("name", "commit"), [("huggingface", COMMIT), ("modelscope", MODELSCOPE_COMMIT)])
def test_a_model_comes_from_a_hub_by_way_of_its_storage(hub, fetch, name, commit):
    fetch(hub_files_url(name, REPOSITORY, commit))
    assert hub.asked("storage") == [f"/blobs/{commit}/{path}" for path in USED if path.endswith("safetensors")]


def test_a_token_goes_to_the_hub_and_not_to_its_storage(hub, fetch):
    hub.token = "hf_secret"
    fetch(hub_files_url("huggingface", REPOSITORY, COMMIT), tokens={hub.url.removeprefix("http://"): "hf_secret"})
    assert hub.headers_of("hub", "authorization") == {"Bearer hf_secret"}
    assert hub.headers_of("storage", "authorization") == {None}


def test_a_token_of_another_host_is_not_sent(hub, fetch):
    fetch(hub_files_url("huggingface", REPOSITORY, COMMIT), tokens={"huggingface.co": "hf_secret"})
    assert hub.headers_of("hub", "authorization") == {None}


def test_a_gated_repository_without_a_token_says_what_is_missing(hub, fetch, tmp_path):
    hub.token = "hf_secret"
    with pytest.raises(WeightsError) as caught:
        fetch(hub_files_url("huggingface", REPOSITORY, COMMIT), tokens={"127.0.0.1": "hf_wrong"})
    assert "HTTP Error 401: Unauthorized (a gated or private repository: model_weights_tokens" in str(caught.value)
    assert "hf_wrong" not in str(caught.value)
    assert not (tmp_path / "tiny").exists()


def test_a_hub_that_throttles_is_waited_for(hub, fetch, monkeypatch):
    pauses = []
    monkeypatch.setattr("metalserve.remote.weights_download.time.sleep", pauses.append)
    hub.refuse = [(429, {"Retry-After": "11"}), (429, {"Retry-After": "12"})]
    fetch(hub_files_url("huggingface", REPOSITORY, COMMIT))
    assert pauses == [11.0, 12.0]


def test_wrong_bytes_of_one_hub_come_right_from_the_other(hub, fetch):
    from hub_server import HubServer

    with HubServer() as other:
        hub.spoiled[WEIGHT] = bytes(len(FILES[WEIGHT]))
        fetch(
            hub_files_url("huggingface", REPOSITORY, COMMIT),
            f"{other.url}/models/{REPOSITORY}/resolve/{MODELSCOPE_COMMIT}",
        )
        assert [path for path in other.asked("hub") if WEIGHT in path]


def test_wrong_bytes_everywhere_publish_nothing(hub, fetch, tmp_path):
    hub.spoiled[WEIGHT] = bytes(len(FILES[WEIGHT]))
    with pytest.raises(WeightsError, match=f"{WEIGHT} could not be had with the right content; nothing was published"):
        fetch(hub_files_url("huggingface", REPOSITORY, COMMIT))
    assert not (tmp_path / "tiny").exists()
