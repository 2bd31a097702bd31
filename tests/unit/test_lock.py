"""Tags to digests and revisions to manifests: the functions, and the module of the role serving_lock."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args

from metalserve.errors import Refusal
from metalserve.lock import DOCKER_HUB, lock_image, lock_model, split_reference

ROOT = Path(__file__).resolve().parents[2]
ROLE = ROOT / "roles/serving_lock"
MANIFEST_V2 = "application/vnd.docker.distribution.manifest.v2+json"
INDEX_OCI = "application/vnd.oci.image.index.v1+json"
MANIFEST_OCI = "application/vnd.oci.image.manifest.v1+json"
FILES = [{"path": "config.json", "size_bytes": 2, "sha256": "a" * 64}]
MANIFEST = json.dumps({"schema": 1, "files": FILES})


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


class Registry:
    """A registry that speaks the pull part of API v2, and a file server for manifests of models below /models/."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.manifests: dict[tuple[str, str], tuple[str, bytes]] = {}
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.config = b"config"
        self.requests: list[str] = []
        self.tells_digest = True
        self.needs_token = False
        self.scopes: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(poll_interval=0.02), daemon=True)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def push(self, repository: str, reference: str | None, media_type: str, content: dict) -> str:
        """Keep a manifest under its digest and, if given, a tag; returns the digest."""
        data = json.dumps(content).encode()
        for name in filter(None, (reference, digest_of(data))):
            self.manifests[repository, name] = (media_type, data)
        return digest_of(data)

    def push_image(self, repository: str, tag: str | None, *layer_bytes: int, oci: bool = False) -> str:
        layers = [{"digest": digest_of(bytes([size % 256])), "size": size} for size in layer_bytes]
        media_type = MANIFEST_OCI if oci else MANIFEST_V2
        content = {"schemaVersion": 2, "config": {"digest": digest_of(self.config), "size": 10}, "layers": layers}
        # OCI leaves the field out as often as not.
        return self.push(repository, tag, media_type, content if oci else {**content, "mediaType": media_type})

    def __enter__(self) -> Registry:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(registry: Registry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            registry.requests.append(path)
            if path == "/token":
                registry.scopes.append(self.path.split("?")[1])
                self.answer(200, {}, b'{"token": "secret"}')
            elif path.startswith("/models/"):
                found = registry.files.get(path.removeprefix("/models/"))
                self.answer(404 if found is None else 200, {}, found or b"")
            elif registry.needs_token and self.headers.get("Authorization") != "Bearer secret":
                realm = f'Bearer realm="https://{registry.host}/token",service="test"'
                self.answer(401, {"WWW-Authenticate": realm}, b"")
            elif "/blobs/" in path and path.rsplit("/", 1)[1] in registry.blobs:
                self.answer(200, {}, registry.blobs[path.rsplit("/", 1)[1]])
            else:
                self.manifest(path)

        def manifest(self, path: str) -> None:
            repository, _, reference = path.removeprefix("/v2/").partition("/manifests/")
            if (repository, reference) not in registry.manifests:
                self.answer(404, {}, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}')
                return
            media_type, data = registry.manifests[repository, reference]
            headers = {"Content-Type": media_type}
            if registry.tells_digest:
                headers["Docker-Content-Digest"] = digest_of(data)
            # A registry gives what the client says it can read.
            self.answer(200 if media_type in self.headers["Accept"] else 406, headers, data)

        def answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    return Handler


@pytest.fixture
def registry():
    with Registry() as listening:
        yield listening


def lock(registry, name):
    return lock_image(f"{registry.host}/{name}", [registry.host])


def refusal_of(function, *arguments):
    with pytest.raises(Refusal) as caught:
        function(*arguments)
    return caught.value


# ---- references ----


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("vllm/vllm-openai:v0.33.0", (DOCKER_HUB, "vllm/vllm-openai", "v0.33.0")),
        ("python:3.11", (DOCKER_HUB, "library/python", "3.11")),
        ("docker.io/vllm/vllm-openai:v0.33.0", (DOCKER_HUB, "vllm/vllm-openai", "v0.33.0")),
        ("docker.io/python:3.11", (DOCKER_HUB, "library/python", "3.11")),
        ("index.docker.io/vllm/vllm-openai:v1", (DOCKER_HUB, "vllm/vllm-openai", "v1")),
        ("registry:5000/vllm:1", ("registry:5000", "vllm", "1")),
        ("registry.example.com/a/b/c:1", ("registry.example.com", "a/b/c", "1")),
        ("localhost/vllm:1", ("localhost", "vllm", "1")),
        ("10.0.0.2:5000/metalserve/vllm-cpu:0.32.0", ("10.0.0.2:5000", "metalserve/vllm-cpu", "0.32.0")),
    ],
)
def test_a_reference_is_split_as_docker_does(reference, parts):
    assert split_reference(reference) == parts


@pytest.mark.parametrize(
    "reference",
    [
        "vllm/vllm-openai",
        "registry:5000/vllm",
        "vllm/vllm-openai:latest",
        "vllm/vllm-openai:",
        ":v1",
        "",
        "vllm/vllm-openai@sha256:" + "a" * 64,
        "vllm/vllm-openai:v1@sha256:" + "a" * 64,
    ],
)
def test_a_reference_without_a_tag_that_names_a_version(reference):
    refusal = refusal_of(split_reference, reference)
    assert refusal.found == f"the image {reference}"
    assert refusal.needed == "a tag that names a version, such as vllm/vllm-openai:v0.33.0"
    assert refusal.change == "`image` of the deployment or of serving_engines"


# ---- images ----


@pytest.mark.parametrize("oci", [False, True])
def test_an_image_of_one_platform(registry, oci):
    digest = registry.push_image("metalserve/vllm", "0.32.0", 1000, 200, oci=oci)
    assert lock(registry, "metalserve/vllm:0.32.0") == {"digest": digest, "compressed_bytes": 1200}


def push_index(registry, *platforms, media_type=INDEX_OCI, **content):
    entries = []
    for size, platform in enumerate(platforms, 1):
        digest = registry.push_image("vllm", None, size * 1000, oci=True)
        entries.append({"digest": digest, "mediaType": MANIFEST_OCI, **({"platform": platform} if platform else {})})
    return registry.push("vllm", "1", media_type, {"schemaVersion": 2, "manifests": entries, **content})


ARM = {"os": "linux", "architecture": "arm64", "variant": "v8"}
AMD = {"os": "linux", "architecture": "amd64"}
ATTESTATION = {"os": "unknown", "architecture": "unknown"}


@pytest.mark.parametrize("told", [{"mediaType": INDEX_OCI}, {}], ids=["with media type", "without"])
def test_an_image_of_many_platforms_is_locked_as_a_whole_and_sized_for_one(registry, told):
    digest = push_index(registry, ARM, AMD, ATTESTATION, **told)
    assert lock(registry, "vllm:1") == {"digest": digest, "compressed_bytes": 2000}


@pytest.mark.parametrize(
    ("config", "cuda"),
    [
        (b'{"config": {"Env": ["PATH=/bin", "CUDA_VERSION=13.0.2", "NVIDIA_REQUIRE_CUDA=cuda>=13.0"]}}', "13.0.2"),
        (b'{"config": {"Env": ["PATH=/bin"]}}', None),
        (b'{"config": {"Env": null}}', None),
        (b"no json", None),
    ],
)
def test_the_cuda_that_an_image_says_it_has_is_locked_with_it(registry, config, cuda):
    registry.config = config
    registry.blobs[digest_of(config)] = config
    registry.push_image("vllm", "1", 1000)
    assert lock(registry, "vllm:1").get("cuda") == cuda


def push_signature(registry, digest, data=b'{"critical": {}}', signature="c2lnbmF0dXJl"):
    """A signature as cosign lays it beside an image."""
    registry.blobs[digest_of(data)] = data
    layer = {
        "mediaType": "application/vnd.dev.cosign.simplesigning.v1+json",
        "size": len(data),
        "digest": digest_of(data),
        "annotations": {"dev.cosignproject.cosign/signature": signature},
    }
    content = {"schemaVersion": 2, "mediaType": MANIFEST_OCI, "config": {}, "layers": [layer, {"mediaType": "other"}]}
    registry.push("vllm", digest.replace(":", "-") + ".sig", MANIFEST_OCI, content)


def test_signatures_are_locked_with_the_image(registry):
    digest = registry.push_image("vllm", "1", 1000)
    push_signature(registry, digest)
    expected = {"payload": "eyJjcml0aWNhbCI6IHt9fQ==", "signature": "c2lnbmF0dXJl"}
    assert lock(registry, "vllm:1")["signatures"] == [expected]


def test_a_mirror_is_asked_before_the_registry(registry, nobody):
    digest = registry.push_image("hub/vllm", "1", 1000)
    mirrors = {nobody: [f"{registry.host}/hub"]}
    assert lock_image(f"{nobody}/vllm:1", [registry.host], mirrors)["digest"] == digest
    assert registry.requests[0] == "/v2/hub/vllm/manifests/1"


def test_a_mirror_without_the_image_is_passed_over(registry, nobody):
    digest = registry.push_image("vllm", "1", 1000)
    mirrors = {registry.host: nobody}
    assert lock_image(f"{registry.host}/vllm:1", [registry.host, nobody], mirrors)["digest"] == digest
    with pytest.raises(Refusal) as caught:
        lock_image(f"{registry.host}/vllm:2", [registry.host, nobody], mirrors)
    assert f"the registry {nobody} gives no vllm:2" in caught.value.found
    assert f"the registry {registry.host} gives no vllm:2" in caught.value.found


def test_an_index_entry_without_a_platform_is_passed_over(registry):
    push_index(registry, None, AMD)
    assert lock(registry, "vllm:1")["compressed_bytes"] == 2000


def test_an_image_for_other_platforms_only(registry):
    push_index(registry, ARM, ATTESTATION)
    refusal = refusal_of(lock, registry, "vllm:1")
    assert refusal.found == f"the image {registry.host}/vllm:1 for linux/arm64, unknown/unknown"
    assert refusal.needed == "an image for linux/amd64"


def test_a_registry_that_does_not_tell_the_digest(registry):
    registry.tells_digest = False
    digest = registry.push_image("vllm", "1", 5)
    assert lock(registry, "vllm:1")["digest"] == digest


def test_a_tag_that_moves_is_locked_to_what_it_names_now(registry):
    first = registry.push_image("vllm", "1", 5)
    assert lock(registry, "vllm:1")["digest"] == first
    second = registry.push_image("vllm", "1", 6)
    assert lock(registry, "vllm:1")["digest"] == second != first


def test_an_unknown_tag(registry):
    registry.push_image("vllm", "1", 5)
    refusal = refusal_of(lock, registry, "vllm:2")
    assert refusal.found.startswith(f"the registry {registry.host} gives no vllm:2 (404 Client Error: Not Found")
    assert refusal.needed == "a registry that this machine reaches and that has the tag"
    assert refusal.change == "`image` of the deployment or of serving_engines, or the network of this machine"


@pytest.fixture
def nobody():
    """An address where nothing listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{reserved.getsockname()[1]}"


def test_nobody_listens(nobody):
    refusal = refusal_of(lock_image, f"{nobody}/vllm:1", [nobody])
    assert refusal.found.startswith(f"the registry {nobody} gives no vllm:1 (")
    assert "Connection refused" in refusal.found


def test_a_registry_that_speaks_plain_http_has_to_be_named(registry):
    registry.push_image("vllm", "1", 5)
    refusal = refusal_of(lock_image, f"{registry.host}/vllm:1")
    assert "SSL" in refusal.found


def test_a_login_over_plain_http_is_refused(registry):
    registry.needs_token = True
    assert "(Auth requires HTTPS)" in refusal_of(lock, registry, "vllm:1").found


@pytest.mark.parametrize("content", [b"<html>", b"[]", b'{"schemaVersion": 1, "fsLayers": []}'])
def test_an_answer_that_is_no_manifest(registry, content):
    registry.manifests["vllm", "1"] = (MANIFEST_V2, content)
    assert refusal_of(lock, registry, "vllm:1").found.startswith(f"the registry {registry.host} gives no vllm:1 (")


def test_an_anonymous_token_is_fetched_where_one_is_asked_for(tmp_path, monkeypatch):
    if not shutil.which("openssl"):
        pytest.skip("this machine has no openssl to make a certificate with")
    command = "openssl req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2 -subj /CN=test"
    options = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*command.split(), *options], cwd=tmp_path, check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "cert.pem"))
    with Registry(tls) as registry:
        registry.needs_token = True
        digest = registry.push_image("vllm/vllm-openai", "1", 5)
        assert lock_image(f"{registry.host}/vllm/vllm-openai:1")["digest"] == digest
        assert registry.scopes[0] == "service=test&scope=repository%3Avllm%2Fvllm-openai%3Apull"


# ---- models ----


def request(*sources, revision=None):
    return {"key": "tiny", "revision": revision, "sources": list(sources)}


def test_a_manifest_beside_the_weights(registry):
    registry.files["tiny/0123/metalserve-manifest.json"] = MANIFEST.encode()
    source = f"http://{registry.host}/models/tiny/{{revision}}/"
    assert lock_model(request(source), "0123") == {"revision": "0123", "files": FILES}


def test_the_first_source_with_a_manifest_is_read(registry, tmp_path):
    (tmp_path / "metalserve-manifest.json").write_text(MANIFEST)
    sources = (f"http://{registry.host}/models/tiny", str(tmp_path))
    assert lock_model(request(*sources), "0123")["files"] == FILES
    assert registry.requests == ["/models/tiny/metalserve-manifest.json"]


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_manifest_that_is_named_wins_over_the_sources(tmp_path, form):
    (tmp_path / "tiny-0123.json").write_text(MANIFEST)
    place = form.format(tmp_path / "tiny-{revision}.json")
    assert lock_model(request("/nowhere"), "0123", place)["files"] == FILES


def test_a_manifest_from_a_url(registry):
    registry.files["tiny.json"] = MANIFEST.encode()
    assert lock_model(request("/nowhere"), "0123", f"http://{registry.host}/models/tiny.json")["files"] == FILES


def test_the_revision_of_the_catalogue_is_taken_when_none_is_named(tmp_path):
    (tmp_path / "metalserve-manifest.json").write_text(MANIFEST)
    wanted = request(str(tmp_path), revision="4567")
    assert lock_model(wanted, None)["revision"] == "4567"
    assert lock_model(wanted, "0123")["revision"] == "0123"


def test_no_revision_anywhere():
    refusal = refusal_of(lock_model, request("/nowhere"), None)
    assert refusal.found == "no revision of the model tiny"
    assert refusal.needed == "the commit of its repository, never a branch"
    assert refusal.change == "serving_model_revisions.tiny"


def test_no_manifest_anywhere_names_each_place(registry, nobody):
    sources = (f"http://{registry.host}/models/tiny", f"http://{nobody}/tiny", "/nowhere", "http://mirror:none/tiny")
    refusal = refusal_of(lock_model, request(*sources), "0123")
    assert refusal.found.startswith("no manifest of tiny at revision 0123 (")
    name = "metalserve-manifest.json"
    assert f"http://{registry.host}/models/tiny/{name}: HTTP Error 404: Not Found; " in refusal.found
    assert f"; http://{nobody}/tiny/{name}: <urlopen error [Errno 111] Connection refused>; " in refusal.found
    assert f"; /nowhere/{name}: [Errno 2] No such file or directory: '/nowhere/{name}'; " in refusal.found
    assert f"; http://mirror:none/tiny/{name}: nonnumeric port: 'none')" in refusal.found
    assert refusal.needed == "the size and SHA-256 of each of its files"
    assert refusal.change == (
        "make it with `metalserve manifest DIRECTORY > FILE` from a copy that you trust, and name the file in "
        "serving_model_manifests.tiny"
    )


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"files": []}', '{"files": ["config.json"]}', '{"files": 5}', '{"files": [{"path": "../x"}]}'],
)
def test_a_file_that_is_no_manifest(tmp_path, text):
    (tmp_path / "m.json").write_text(text)
    refusal = refusal_of(lock_model, request(), "0123", str(tmp_path / "m.json"))
    assert refusal.found.startswith(f"no manifest of tiny at revision 0123 ({tmp_path}/m.json: ")


# ---- LoRA adapters ----

ADAPTER_CONFIG = {"r": 16, "target_modules": ["model.layers.0.q_proj", "v_proj"], "base_model_name_or_path": "Org/Base"}
ADAPTER = {"rank": 16, "modules": ["q_proj", "v_proj"], "base_model": "Org/Base"}


def adapter_files(config=ADAPTER_CONFIG):
    """Manifest and configuration of an adapter, as texts."""
    text = json.dumps(config)
    entry = {
        "path": "adapter_config.json",
        "size_bytes": len(text),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    return json.dumps({"files": [entry]}), text


def test_what_an_adapter_says_is_locked_with_its_files(registry):
    manifest, config = adapter_files()
    registry.files["sql/0123/metalserve-manifest.json"] = manifest.encode()
    registry.files["sql/0123/adapter_config.json"] = config.encode()
    wanted = {**request(f"http://{registry.host}/models/sql/{{revision}}"), "key": "sql", "adapter": True}
    assert lock_model(wanted, "0123") == {
        "revision": "0123",
        "files": json.loads(manifest)["files"],
        "adapter": ADAPTER,
    }


def test_the_configuration_lies_beside_a_manifest_that_is_named(tmp_path):
    manifest, config = adapter_files()
    (tmp_path / "manifest.json").write_text(manifest)
    (tmp_path / "adapter_config.json").write_text(config)
    wanted = {**request("/on/the/host/only"), "key": "sql", "adapter": True}
    assert lock_model(wanted, "0123", f"{tmp_path}/manifest.json")["adapter"] == ADAPTER


def test_a_configuration_of_other_bytes_is_not_believed(tmp_path):
    manifest, _ = adapter_files()
    (tmp_path / "metalserve-manifest.json").write_text(manifest)
    (tmp_path / "adapter_config.json").write_text("{}")
    refusal = refusal_of(lock_model, {**request(str(tmp_path)), "key": "sql", "adapter": True}, "0123")
    assert refusal.found == (
        f"no adapter_config.json of the adapter sql ({tmp_path}: other bytes than the manifest names)"
    )
    assert refusal.change.startswith("lay it beside the manifest that serving_model_manifests.sql names")


def test_an_adapter_whose_manifest_names_no_configuration(tmp_path):
    (tmp_path / "metalserve-manifest.json").write_text(MANIFEST)
    refusal = refusal_of(lock_model, {**request(str(tmp_path)), "key": "sql", "adapter": True}, "0123")
    assert refusal.found == "no adapter_config.json of the adapter sql (its manifest does not name it)"


def test_an_adapter_that_no_engine_serves_right_is_not_locked(tmp_path):
    manifest, config = adapter_files({**ADAPTER_CONFIG, "use_dora": True})
    (tmp_path / "metalserve-manifest.json").write_text(manifest)
    (tmp_path / "adapter_config.json").write_text(config)
    refusal = refusal_of(lock_model, {**request(str(tmp_path)), "key": "sql", "adapter": True}, "0123")
    assert refusal.found == "adapter_config.json of the adapter sql with use_dora True"


# ---- the module of the role ----


def ansible(tmp_path, arguments, *options):
    """Run the module with Ansible; returns what it returned."""
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_LOAD_CALLBACK_PLUGINS": "true",
        "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
        "ANSIBLE_LOCAL_TEMP": str(tmp_path / "local"),
        "ANSIBLE_REMOTE_TEMP": str(tmp_path / "remote"),
    }
    command = [Path(sys.executable).with_name("ansible"), "localhost", "-M", ROLE / "library", "-m", "serving_lock"]
    run = subprocess.run(
        [*command, "-a", json.dumps(arguments), *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.stdout, run.stderr
    return json.loads(run.stdout)["plays"][0]["tasks"][0]["hosts"]["localhost"]


@pytest.fixture
def wanted(registry, tmp_path):
    """Arguments for one image and one model that can both be had."""
    registry.push_image("vllm", "1", 1000)
    (tmp_path / "tiny.json").write_text(MANIFEST)
    return {
        "path": str(tmp_path / "group_vars/all/lock.yml"),
        "images": [f"{registry.host}/vllm:1"],
        "models": [request("/nowhere")],
        "revisions": {"tiny": "0123"},
        "manifests": {"tiny": str(tmp_path / "tiny.json")},
        "insecure_registries": [registry.host],
    }


def test_the_module_writes_once_and_a_check_run_writes_nothing(wanted, registry, tmp_path):
    path = Path(wanted["path"])
    checked = ansible(tmp_path, wanted, "--check")
    assert checked["changed"] is True
    assert not path.exists()

    written = ansible(tmp_path, wanted)
    assert written["changed"] is True
    head, text = path.read_text().split("\n", 1)
    assert head == "---"
    assert text.startswith("# Written by playbooks/ops/lock.yml")
    digest = digest_of(registry.manifests["vllm", "1"][1])
    locked = {
        "images": {f"{registry.host}/vllm:1": {"digest": digest, "compressed_bytes": 1000}},
        "models": {"tiny": {"revision": "0123", "files": FILES}},
    }
    assert yaml.safe_load(text) == {"serving_lock": locked}
    assert written["lock"] == locked

    # The tag moves, the lock does not.
    registry.push_image("vllm", "1", 2000)
    registry.requests.clear()
    before = path.stat().st_mtime_ns
    again = ansible(tmp_path, wanted)
    assert again["changed"] is False
    assert path.stat().st_mtime_ns == before
    assert registry.requests == []
    assert os.listdir(path.parent) == ["lock.yml"]  # noqa: PTH208 (hidden ones too)


def test_the_module_fails_with_the_sentence_and_leaves_the_file(wanted, tmp_path):
    Path(wanted["path"]).parent.mkdir(parents=True)
    Path(wanted["path"]).write_text("serving_lock: {}\n")
    failed = ansible(tmp_path, {**wanted, "revisions": {}})
    assert failed["failed"] is True
    assert failed["msg"].startswith("no revision of the model tiny. Needed: ")
    assert Path(wanted["path"]).read_text() == "serving_lock: {}\n"


@pytest.fixture
def module(capsys):
    """The module in this process; gives what it would return to Ansible."""
    spec = importlib.util.spec_from_file_location("serving_lock_module", ROLE / "library/serving_lock.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)

    def run(arguments):
        with patch_module_args(arguments), pytest.raises(SystemExit):
            loaded.main()
        return json.loads(capsys.readouterr().out)

    return run


def test_a_refresh_follows_the_tag(module, wanted, registry):
    module(wanted)
    digest = registry.push_image("vllm", "1", 2000)
    refreshed = module({**wanted, "refresh": True})
    assert refreshed["changed"] is True
    assert refreshed["lock"]["images"] == {f"{registry.host}/vllm:1": {"digest": digest, "compressed_bytes": 2000}}


def test_another_revision_locks_the_model_again_and_nothing_else(module, wanted, registry, tmp_path):
    module(wanted)
    registry.requests.clear()
    (tmp_path / "tiny.json").write_text(json.dumps({"files": [{**FILES[0], "sha256": "b" * 64}]}))
    moved = module({**wanted, "revisions": {"tiny": "4567"}})
    assert moved["changed"] is True
    assert moved["lock"]["models"]["tiny"] == {"revision": "4567", "files": [{**FILES[0], "sha256": "b" * 64}]}
    assert registry.requests == []
    # A revision that is not named any more stays.
    assert module({**wanted, "revisions": {}})["changed"] is False


def test_what_is_locked_and_not_asked_for_stays(module, wanted, registry):
    module(wanted)
    registry.push_image("other", "1", 7)
    after = module({**wanted, "images": [f"{registry.host}/other:1"], "models": []})
    assert sorted(after["lock"]["images"]) == sorted([f"{registry.host}/vllm:1", f"{registry.host}/other:1"])
    assert list(after["lock"]["models"]) == ["tiny"]


def test_a_failure_half_way_writes_nothing(module, wanted, registry):
    failed = module({**wanted, "images": [*wanted["images"], f"{registry.host}/none:1"]})
    assert failed["failed"] is True
    assert "gives no none:1" in failed["msg"]
    assert not Path(wanted["path"]).exists()


@pytest.mark.parametrize("text", ["", "---\n", "serving_lock:\n", "serving_lock: {images: null}\n"])
def test_an_empty_lock_file_is_filled(module, wanted, text):
    Path(wanted["path"]).parent.mkdir(parents=True)
    Path(wanted["path"]).write_text(text)
    assert sorted(module(wanted)["lock"]["models"]) == ["tiny"]


def test_a_branch_that_is_allowed_stays_at_the_commit_of_its_lock(module, wanted):
    module(wanted)
    assert module({**wanted, "revisions": {"tiny": "main"}, "unpinned": ["tiny"]})["changed"] is False


def test_a_revision_by_hub_locks_again_when_one_of_them_moves(module, wanted):
    revisions = {"huggingface": "a" * 40, "modelscope": "b" * 40}
    hubs = ["huggingface:Org/Tiny", "modelscope:Org/Tiny"]
    asked = {**wanted, "models": [request(*hubs)], "revisions": {"tiny": revisions}}
    first = module(asked)
    assert first["lock"]["models"]["tiny"] == {"revision": "a" * 40, "files": FILES, "hub_revisions": revisions}
    assert module(asked)["changed"] is False
    moved = module({**asked, "revisions": {"tiny": {**revisions, "modelscope": "c" * 40}}})
    assert moved["lock"]["models"]["tiny"]["hub_revisions"]["modelscope"] == "c" * 40


def test_an_adapter_moves_with_the_revision_beside_its_name(module, tmp_path):
    manifest, config = adapter_files()
    (tmp_path / "metalserve-manifest.json").write_text(manifest)
    (tmp_path / "adapter_config.json").write_text(config)
    wanted = {"key": "sql", "adapter": True, "revision": "0123", "sources": [str(tmp_path)]}
    arguments = {"path": str(tmp_path / "lock.yml"), "models": [wanted]}
    first = module(arguments)["lock"]["models"]["sql"]
    assert (first["revision"], first["adapter"]) == ("0123", ADAPTER)
    assert module(arguments)["changed"] is False
    moved = module({**arguments, "models": [{**wanted, "revision": "4567"}]})
    assert moved["lock"]["models"]["sql"]["revision"] == "4567"


def test_what_was_locked_as_a_model_is_locked_again_as_an_adapter(module, tmp_path):
    manifest, config = adapter_files()
    (tmp_path / "metalserve-manifest.json").write_text(manifest)
    (tmp_path / "adapter_config.json").write_text(config)
    wanted = {"key": "sql", "revision": "0123", "sources": [str(tmp_path)]}
    arguments = {"path": str(tmp_path / "lock.yml"), "revisions": {"sql": "0123"}}
    assert "adapter" not in module({**arguments, "models": [wanted]})["lock"]["models"]["sql"]
    again = module({**arguments, "models": [{**wanted, "adapter": True}]})
    assert again["lock"]["models"]["sql"]["adapter"] == ADAPTER
