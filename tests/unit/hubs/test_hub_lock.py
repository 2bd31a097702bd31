"""Locking a model from a hub's metadata, with the hubs' real clients against a server on this machine."""

from __future__ import annotations

import json

import pytest
from hub_server import COMMIT, FILES, MODELSCOPE_COMMIT, OTHER_COMMIT, REPOSITORY, USED, git_id, sha256

from metalserve.errors import Refusal
from metalserve.hubs import hub_files_url, read_hub, used_files
from metalserve.lock import lock_model

MANIFEST = [{"path": path, "size_bytes": len(FILES[path]), "sha256": sha256(FILES[path])} for path in USED]
HUGGINGFACE, MODELSCOPE = f"huggingface:{REPOSITORY}", f"modelscope:{REPOSITORY}"


def request(*sources):
    return {"key": "tiny", "revision": None, "sources": list(sources)}


def refusal_of(*arguments, **options):
    with pytest.raises(Refusal) as caught:
        lock_model(*arguments, **options)
    return caught.value


# ---- the server is held against the hubs' own download functions ----


def test_the_server_satisfies_hugging_face_s_own_client(hub, tmp_path):
    from huggingface_hub import snapshot_download

    folder = snapshot_download(REPOSITORY, revision=COMMIT, endpoint=hub.url, local_dir=tmp_path / "copy", token=False)
    assert {path: (tmp_path / "copy" / path).read_bytes() for path in FILES} == FILES
    assert folder


def test_the_server_satisfies_modelscope_s_own_client(hub, tmp_path):
    from modelscope_hub import HubApi

    folder = HubApi(endpoint=hub.url).download_repo(
        REPOSITORY, "model", revision=MODELSCOPE_COMMIT, local_dir=str(tmp_path / "copy")
    )
    assert {path: (tmp_path / "copy" / path).read_bytes() for path in USED} == {path: FILES[path] for path in USED}
    assert folder


# ---- the lock ----


def test_hugging_face_s_metadata_make_the_manifest_and_no_weight_is_fetched(hub):
    locked = lock_model(request(HUGGINGFACE), COMMIT)
    assert locked == {"revision": COMMIT, "files": MANIFEST, "hub_revisions": {"huggingface": COMMIT}}
    assert hub.asked("storage") == []
    assert [path for path in hub.asked("hub") if "safetensors" in path] == []


def test_modelscope_s_metadata_make_the_manifest_and_no_file_is_fetched(hub):
    locked = lock_model(request(MODELSCOPE), MODELSCOPE_COMMIT)
    assert locked == {
        "revision": MODELSCOPE_COMMIT,
        "files": MANIFEST,
        "hub_revisions": {"modelscope": MODELSCOPE_COMMIT},
    }
    assert {path.split("?")[0].rsplit("/", 1)[1] for path in hub.asked("hub")} == {"files"}


def test_two_hubs_with_the_same_bytes_keep_a_revision_each(hub):
    revisions = {"huggingface": COMMIT, "modelscope": MODELSCOPE_COMMIT}
    assert lock_model(request(HUGGINGFACE, MODELSCOPE), revisions) == {
        "revision": COMMIT,
        "files": MANIFEST,
        "hub_revisions": revisions,
    }


def test_two_hubs_with_other_bytes_are_refused(hub):
    hub.revisions[MODELSCOPE_COMMIT]["tokenizer.json"] = b"{ }\n"
    refusal = refusal_of(request(HUGGINGFACE, MODELSCOPE), {"huggingface": COMMIT, "modelscope": MODELSCOPE_COMMIT})
    assert refusal.found == (
        f"ModelScope has other content or none for 1 of 4 files of tiny (tokenizer.json) than Hugging Face at {COMMIT}"
    )
    assert refusal.needed == "the same bytes at every source"


def test_the_second_hub_locks_when_the_first_cannot_be_asked(hub):
    hub.refuse = [(403, {})]
    locked = lock_model(request(HUGGINGFACE, MODELSCOPE), {"huggingface": None, "modelscope": MODELSCOPE_COMMIT})
    # The first one is asked again, because hosts would ask it as well.
    assert locked["hub_revisions"] == {"modelscope": MODELSCOPE_COMMIT, "huggingface": COMMIT}


def test_a_branch_is_refused_with_the_commit_that_it_is_now(hub):
    refusal = refusal_of(request(HUGGINGFACE), "main")
    assert refusal.found == f"'main' as the revision of {REPOSITORY} on Hugging Face, which is no commit"
    assert refusal.needed == f"40 hexadecimal digits: a branch names other bytes tomorrow; now it is {COMMIT}"
    assert refusal.change == "serving_model_revisions.tiny, or name tiny in serving_unpinned_models"


def test_a_branch_that_is_allowed_by_name_is_locked_to_its_commit(hub):
    assert lock_model(request(HUGGINGFACE), "main", unpinned=True)["revision"] == COMMIT


def test_a_branch_of_modelscope_is_refused_though_allowed(hub):
    refusal = refusal_of(request(MODELSCOPE), "master", unpinned=True)
    assert refusal.found == f"'master' as the revision of {REPOSITORY} on ModelScope, which is no commit"
    assert refusal.change == "serving_model_revisions.tiny"


def test_a_revision_that_the_hub_does_not_have(hub):
    refusal = refusal_of(request(HUGGINGFACE), OTHER_COMMIT)
    assert (
        f"Hugging Face ({hub.url}) gives no {REPOSITORY} at {OTHER_COMMIT} (RevisionNotFoundError: 404" in refusal.found
    )


def test_a_gated_repository_wants_a_token_from_the_environment(hub, monkeypatch):
    hub.token = "hf_secret"
    refusal = refusal_of(request(HUGGINGFACE), COMMIT)
    assert "GatedRepoError: 401" in refusal.found
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert lock_model(request(HUGGINGFACE), COMMIT)["files"] == MANIFEST


def test_a_gated_modelscope_repository(hub, monkeypatch):
    hub.token = "ms_secret"
    assert f"ModelScope ({hub.url}) gives no {REPOSITORY}" in refusal_of(request(MODELSCOPE), MODELSCOPE_COMMIT).found
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "ms_secret")
    from modelscope_hub import config

    # Read once when the client's own default configuration is made.
    monkeypatch.setattr(config, "_default_config", None, raising=False)
    assert lock_model(request(MODELSCOPE), MODELSCOPE_COMMIT)["files"] == MANIFEST


def test_a_small_file_that_a_proxy_changes_is_refused(hub):
    hub.spoiled["config.json"] = b'{"model_type": "tony"}\n'
    with pytest.raises(Refusal) as caught:
        read_hub("huggingface", REPOSITORY, COMMIT)
    assert caught.value.found == (
        "Hugging Face gives 23 bytes that do not have git's object id "
        f"{git_id(FILES['config.json'])} for config.json of {REPOSITORY}"
    )


def test_a_modelscope_without_hashes_is_refused(hub):
    hub.forgets_hashes = True
    refusal = refusal_of(request(MODELSCOPE), MODELSCOPE_COMMIT)
    assert f"ModelScope tells no SHA-256 of config.json in {REPOSITORY} at {MODELSCOPE_COMMIT}" in refusal.found


def test_a_repository_of_gguf_is_refused_with_the_reason(hub):
    hub.revisions[COMMIT] = {"tiny-q4.gguf": b"GGUF", "config.json": b"{}"}
    refusal = refusal_of(request(HUGGINGFACE), COMMIT)
    assert refusal.found == f"{REPOSITORY} on Hugging Face has no *.safetensors (config.json)"
    assert refusal.needed == (
        "a checkpoint in safetensors: GGUF is for llama.cpp and its kin, and pickles are code that runs"
    )


def test_a_mirror_before_the_hub_is_asked_first_and_the_hub_s_commit_kept(hub, tmp_path):
    files = [{"path": "a", "size_bytes": 1, "sha256": "0" * 64}]
    (tmp_path / "metalserve-manifest.json").write_text(json.dumps({"files": files}))
    locked = lock_model(request(str(tmp_path), HUGGINGFACE), {"huggingface": COMMIT})
    assert locked["files"] == files
    assert locked["hub_revisions"] == {"huggingface": COMMIT}
    assert hub.requests == []


def test_what_no_engine_reads_is_left_out():
    files = dict.fromkeys(
        ["config.json", "README.md", "LICENSE", ".gitattributes", "original/consolidated.00.pth", "onnx/model.onnx",
         "model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json", "tiny.gguf", "assets/plot.png",
         "merges.txt", "tokenizer.model", "chat_template.jinja", "configuration.json"]
    )  # fmt: skip
    wanted = ["LICENSE", "chat_template.jinja", "config.json", "merges.txt", "model.safetensors", "tokenizer.model"]
    assert used_files(files) == wanted
    assert "pytorch_model.bin" in used_files({"pytorch_model.bin": None})


def test_the_addresses_follow_the_clients_own_variables(hub, monkeypatch):
    assert hub_files_url("huggingface", "a/b", "0") == f"{hub.url}/a/b/resolve/0"
    assert hub_files_url("modelscope", "a/b", "0") == f"{hub.url}/models/a/b/resolve/0"
    monkeypatch.delenv("HF_ENDPOINT")
    monkeypatch.delenv("MODELSCOPE_ENDPOINT")
    assert hub_files_url("huggingface", "a/b", "0") == "https://huggingface.co/a/b/resolve/0"
    assert hub_files_url("modelscope", "a/b", "0") == "https://modelscope.cn/models/a/b/resolve/0"
