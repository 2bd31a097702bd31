"""Answers of a small HTTP server that gives files: whole, from a point on, and with a length that is always said."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Optional

_RANGE = re.compile(r"bytes=([0-9]+)-")
_STEP_BYTES = 1 << 26


class FileServer(ThreadingHTTPServer):
    """A server with a thread for each connection."""

    daemon_threads = True
    # A host of the fleet opens some connections at once.
    request_queue_size = 64


class FileAnswers(BaseHTTPRequestHandler):
    """A handler whose connections stay open, and that logs nothing."""

    protocol_version = "HTTP/1.1"
    # A receiver that takes nothing for so long ends its connection, and its thread.
    timeout = 60

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Ask the handler of the server at hand."""
        self.give()

    def do_HEAD(self) -> None:
        """As GET, without the content."""
        self.give()

    def give(self) -> None:
        """Answer the request; each server has its own way."""
        raise NotImplementedError

    def answer(self, status: int, headers: Optional[Mapping[str, str]] = None, content: bytes = b"") -> None:
        """An answer as a whole."""
        self.begin(status, headers, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def begin(self, status: int, headers: Optional[Mapping[str, str]], length: int) -> None:
        """Status and headers; the content is to follow."""
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def range_start(self) -> Optional[int]:
        """Where the receiver wants to go on; None when it asks for the whole."""
        asked = _RANGE.fullmatch(self.headers.get("Range") or "")
        return int(asked[1]) if asked else None

    def send_file(
        self,
        stream: Any,
        size: int,
        *,
        offset: int = 0,
        headers: Optional[Mapping[str, str]] = None,
        sent: Callable[[], None] = lambda: None,
    ) -> None:
        """Give `size` bytes of an open file that begin at `offset`; `sent` is called after each part."""
        asked = self.range_start()
        start = asked or 0
        if start and start >= size:
            self.answer(416)
            return
        partial = {"Content-Range": f"bytes {start}-{size - 1}/{size}"} if asked is not None else {}
        self.begin(206 if asked is not None else 200, {**(headers or {}), **partial}, size - start)
        if self.command == "HEAD":
            return
        self.wfile.flush()
        position = start
        while position < size:
            count = self.connection.sendfile(stream, offset + position, min(size - position, _STEP_BYTES))
            if not count:
                self.close_connection = True
                return
            position += count
            sent()
