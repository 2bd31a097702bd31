"""A file server over HTTP with switches for what goes wrong on the way, and a small model to serve."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

_RANDOM = random.Random(20)
MODEL = {
    "config.json": b'{"model_type": "tiny"}\n',
    "model-00001-of-00002.safetensors": _RANDOM.randbytes(40_000),
    "model-00002-of-00002.safetensors": _RANDOM.randbytes(30_000),
    "tokenizer/merges.txt": b"a b\n",
    "empty.txt": b"",
}
BIG = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
REVISION = "0123abcd"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest(files: Mapping[str, bytes] = MODEL) -> list[dict[str, Any]]:
    return [{"path": path, "size_bytes": len(data), "sha256": sha256(data)} for path, data in files.items()]


def flipped(data: bytes, position: int = 1000) -> bytes:
    """The same bytes with one of them wrong."""
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def write_files(directory: Path, files: Mapping[str, bytes] = MODEL) -> Path:
    for path, data in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    return directory


def read_files(directory: Path) -> dict[str, bytes]:
    """All files below a directory but hidden ones."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


@dataclass
class Faults:
    """What is wrong with the server; each by path of the file."""

    ignore_range: bool = False
    # The status that is answered instead of the file.
    status: dict[str, int] = field(default_factory=dict)
    # For each of the next requests, after how many bytes of its body the connection is cut.
    cut_after_bytes: dict[str, list[int]] = field(default_factory=dict)
    # Headers of the answers that `status` stands for.
    headers: dict[str, str] = field(default_factory=dict)
    # After how many bytes nothing comes any more while the connection stays open.
    silent_after_bytes: dict[str, int] = field(default_factory=dict)
    # Seconds of silence before each part of so many bytes, while the whole comes in the end.
    slow: dict[str, tuple[int, float]] = field(default_factory=dict)
    # Sent in chunks without Content-Length.
    chunked: set[str] = field(default_factory=set)
    # Sent as they are instead of an HTTP answer.
    raw: dict[str, bytes] = field(default_factory=dict)
    # Sent elsewhere by 302.
    redirect: dict[str, str] = field(default_factory=dict)
    # Called when a file is asked for, before anything is sent.
    before: Callable[[str], None] = lambda path: None


class WeightsServer:
    """Serves `files` on a free port of 127.0.0.1 until the `with` block ends."""

    def __init__(self, files: Mapping[str, bytes] = MODEL) -> None:
        self.files = dict(files)
        self.faults = Faults()
        # (path, Range header or None), in order.
        self.requests: list[tuple[str, str | None]] = []
        self.release = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(poll_interval=0.02), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/tiny"

    def requested(self, path: str) -> list[str | None]:
        """The Range headers of the requests for a file."""
        return [sent for asked, sent in self.requests if asked == path]

    def __enter__(self) -> WeightsServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves early is part of these tests."""


def _handler(server: WeightsServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.close_connection = True
            path, faults = self.path.removeprefix("/tiny/").removeprefix("/elsewhere/"), server.faults
            range_header = self.headers.get("Range")
            server.requests.append((path, range_header))
            faults.before(path)
            if path in faults.raw:
                self.wfile.write(faults.raw[path])
                return
            if path in faults.redirect and self.path.startswith("/tiny/"):
                self._head(302, Location=faults.redirect[path])
                return
            if path in faults.status or path not in server.files:
                self._head(faults.status.get(path, 404), **(faults.headers if path in faults.status else {}))
                return
            body, status, headers = server.files[path], 200, {}
            if range_header and not faults.ignore_range:
                start = int(range_header.removeprefix("bytes=").removesuffix("-"))
                if start >= len(body):
                    self._head(416)
                    return
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                body, status = body[start:], 206
            self._send(path, status, body, headers)

        def _head(self, status: int, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": "0", "Connection": "close", **headers}.items():
                self.send_header(name, value)
            self.end_headers()

        def _send(self, path: str, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            faults = server.faults
            chunked = path in faults.chunked
            length = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(len(body))}
            self.send_response(status)
            for name, value in {**length, "Connection": "close", **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            cuts = faults.cut_after_bytes.get(path)
            end = cuts.pop(0) if cuts else faults.silent_after_bytes.get(path, len(body))
            if chunked:
                self.wfile.write(f"{len(body):x}\r\n".encode())
            step, pause = faults.slow.get(path, (max(end, 1), 0.0))
            for start in range(0, end, step):
                server.release.wait(pause)
                self.wfile.write(body[start : min(start + step, end)])
                self.wfile.flush()
            if path in faults.silent_after_bytes:
                server.release.wait(20)
            elif chunked and end == len(body):
                self.wfile.write(b"\r\n0\r\n\r\n")

    return Handler
