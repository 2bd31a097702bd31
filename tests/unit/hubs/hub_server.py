"""A server that speaks as much of the two hubs' APIs as their real clients and a downloader ask for.

Hugging Face: model_info with blobs, tree, resolve with a redirect to a storage host for LFS files. ModelScope:
repo/files, repo?FilePath, revisions, and resolve. The hubs' own download functions prove that this is enough.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

REPOSITORY = "Org/Tiny-MoE"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "fedcba9876543210fedcba9876543210fedcba98"
MODELSCOPE_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
FILES = {
    ".gitattributes": b"*.safetensors filter=lfs\n",
    "README.md": b"# Tiny\n",
    "config.json": b'{"model_type": "tiny"}\n',
    "model-00001-of-00002.safetensors": bytes(range(256)) * 200,
    "model-00002-of-00002.safetensors": bytes(reversed(range(256))) * 100,
    "tokenizer.json": b"{}\n",
}
USED = [path for path in sorted(FILES) if not path.startswith(".") and not path.endswith(".md")]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_id(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def is_lfs(path: str) -> bool:
    return path.endswith((".safetensors", ".bin", ".gguf"))


class HubServer:
    """Both hubs on one free port of 127.0.0.1, and their storage on another one."""

    def __init__(self, files: Mapping[str, bytes] = FILES) -> None:
        self.revisions = {COMMIT: dict(files), MODELSCOPE_COMMIT: dict(files)}
        self.branches = {"main": COMMIT, "master": MODELSCOPE_COMMIT}
        self.token: str | None = None
        # Answered instead of anything else: (status, headers), one a request.
        self.refuse: list[tuple[int, dict[str, str]]] = []
        # What the wire does to a file's bytes on the way.
        self.spoiled: dict[str, bytes] = {}
        self.forgets_hashes = False
        # (host header's port is of the storage, path, headers)
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, role)) for role in ("hub", "storage")]
        for server in self._servers:
            server.daemon_threads = True
        self._threads = [
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
            for server in self._servers
        ]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def storage(self) -> str:
        # Another name for the same address, so that it is another host to every client.
        return f"http://localhost:{self._servers[1].server_port}"

    def asked(self, role: str) -> list[str]:
        return [path for who, path, _ in self.requests if who == role]

    def headers_of(self, role: str, name: str) -> set[str | None]:
        return {headers.get(name) for who, _, headers in self.requests if who == role}

    def __enter__(self) -> HubServer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()


def _handler(hub: HubServer, role: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            hub.requests.append((role, self.path, {name.lower(): value for name, value in self.headers.items()}))
            if hub.refuse:
                status, headers = hub.refuse.pop(0)
                self.answer(status, b"", headers)
                return
            path = unquote(parts.path)
            if role == "storage":
                # As a presigned address: a login is an error there.
                if "authorization" in {name.lower() for name in self.headers}:
                    self.answer(400, b"only one auth mechanism allowed")
                else:
                    self.file(*path.removeprefix("/blobs/").split("/", 1))
                return
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self.answer(401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
            elif path.startswith("/api/models/"):
                self.huggingface_api(path.removeprefix("/api/models/"))
            elif path.startswith("/api/v1/models/"):
                self.modelscope_api(path.removeprefix("/api/v1/models/"), query)
            elif "/resolve/" in path:
                repository, _, rest = path.removeprefix("/models/").strip("/").partition("/resolve/")
                self.resolve(repository, *rest.split("/", 1))
            else:
                self.answer(404, b"{}")

        def files_of(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
            commit = hub.branches.get(revision, revision)
            if repository != REPOSITORY or commit not in hub.revisions:
                code = "RepoNotFound" if repository != REPOSITORY else "RevisionNotFound"
                self.answer(404, b"{}", {"X-Error-Code": code})
                return None
            return commit, hub.revisions[commit]

        def huggingface_api(self, rest: str) -> None:
            repository, kind, revision = rest, "info", "main"
            for word in ("revision", "tree"):
                if f"/{word}/" in rest:
                    repository, _, revision = rest.partition(f"/{word}/")
                    kind = word
            found = self.files_of(repository, revision)
            if found is None:
                return
            commit, files = found
            if kind == "tree":
                rows = []
                for path, data in files.items():
                    lfs = {"oid": sha256(data), "size": len(data), "pointerSize": 130}
                    rows.append({"type": "file", "path": path, "size": len(data), "oid": git_id(data)})
                    rows[-1].update({"lfs": lfs} if is_lfs(path) else {})
                self.json(rows)
                return
            siblings: list[dict[str, Any]] = []
            for path, data in files.items():
                siblings.append({"rfilename": path, "size": len(data), "blobId": git_id(data)})
                if is_lfs(path):
                    siblings[-1]["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 130}
            self.json({"id": repository, "modelId": repository, "sha": commit, "siblings": siblings, "tags": []})

        def modelscope_api(self, rest: str, query: Mapping[str, str]) -> None:
            repository = "/".join(rest.split("/")[:2])
            found = self.files_of(repository, query.get("Revision", "master"))
            if found is None:
                return
            commit, files = found
            if rest.endswith("/repo/files"):
                rows = [
                    {"Path": path, "Type": "blob", "Size": len(data), "Revision": commit, "Sha256": sha256(data)}
                    for path, data in files.items()
                ]
                if hub.forgets_hashes:
                    rows = [{**row, "Sha256": ""} for row in rows]
                self.json({"Code": 200, "Success": True, "Data": {"Files": rows, "LatestCommitter": {"Id": ""}}})
            elif rest.endswith("/revisions"):
                branches = [{"Revision": "master", "CreatedAt": 1}]
                self.json({"Code": 200, "Success": True, "Data": {"RevisionMap": {"Branches": branches, "Tags": []}}})
            elif rest.endswith("/repo"):
                self.file(commit, query["FilePath"])
            else:
                self.json({"Code": 200, "Success": True, "Data": {"Name": repository}})

        def resolve(self, repository: str, revision: str, path: str) -> None:
            found = self.files_of(repository, revision)
            if found is None:
                return
            commit, files = found
            if path not in files:
                self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            data = files[path]
            headers = {"X-Repo-Commit": commit, "ETag": f'"{git_id(data)}"', "Accept-Ranges": "bytes"}
            if is_lfs(path):
                headers |= {"X-Linked-Etag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data))}
                self.answer(302, b"", {**headers, "Location": f"{hub.storage}/blobs/{commit}/{path}"})
            else:
                self.file(commit, path, headers)

        def file(self, commit: str, path: str, headers: Mapping[str, str] | None = None) -> None:
            if path not in hub.revisions[commit]:
                self.answer(404, b"")
                return
            data, status = hub.spoiled.get(path, hub.revisions[commit][path]), 200
            more = dict(headers or {})
            asked = self.headers.get("Range")
            if asked:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                end = int(last) + 1 if last else len(data)
                more["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
                data, status = data[int(first) : end], 206
            self.answer(status, data, more)

        def json(self, content: Any) -> None:
            self.answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

        def answer(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    return Handler
