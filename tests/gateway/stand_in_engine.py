"""A stand-in for an engine behind the gateway. It says that it is one, and computes nothing.

It answers each POST with what it was sent, so that a test sees what the gateway let through. The field `stand_in` of
the request's body tells it how: {"seconds": 2} waits before the answer, {"events": 5, "pause": 0.1} streams so many
events, {"status": 503} answers with that status, {"usage": [7, 3]} names token counts.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        status = 200 if self.server.healthy and self.path in ("/health", "/ready") else 503
        self._answer(status, b"{}")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        asked = json.loads(body)
        told = asked.get("stand_in", {})
        with self.server.lock:
            self.server.seen.append(
                {
                    "path": self.path,
                    "headers": {name.lower(): value for name, value in self.headers.items()},
                    "body": asked,
                    "raw": body,
                }
            )
            self.server.running += 1
            self.server.most_running = max(self.server.most_running, self.server.running)
        try:
            time.sleep(told.get("seconds", 0))
            if "events" in told and not self.server.always:
                self._stream(told)
                return
        finally:
            # Before the answer ends: after it the gateway may send the next one at once.
            with self.server.lock:
                self.server.running -= 1
        prompt, completion = told.get("usage", [1, 1])
        usage = {"prompt_tokens": prompt, "completion_tokens": completion}
        answer = {"object": "stand-in", "engine": self.server.name, "usage": usage, "got": asked}
        self._answer(self.server.always or told.get("status", 200), json.dumps(answer).encode())

    def _stream(self, told):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(told["events"]):
            event = {"engine": self.server.name, "number": number}
            if number == told["events"] - 1:
                event["usage"] = {"prompt_tokens": 11, "completion_tokens": told["events"]}
            self._chunk(f"data: {json.dumps(event)}\n\n".encode())
            time.sleep(told.get("pause", 0))
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _answer(self, status, data):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle(self):
        # The gateway gave up on its client, or a health check has seen enough.
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, *_):
        pass


class StandInEngine(ThreadingHTTPServer):
    """One engine on an address and a port; `seen` holds what reached it."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, name, address, port):
        super().__init__((address, port), Handler)
        self.name = name
        self.healthy = True
        self.always = None  # a status for every request
        self.lock = threading.Lock()
        self.forget()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def forget(self):
        self.seen = []
        self.running = self.most_running = 0

    def reopen(self):
        """Listen again after `socket.close()`."""
        self.shutdown()
        self.socket = socket.socket(self.address_family, self.socket_type)
        self.server_bind()
        self.server_activate()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self):
        self.shutdown()
        self.server_close()
