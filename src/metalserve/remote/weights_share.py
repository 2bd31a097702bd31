"""Give proven files to other hosts over HTTP, also while the model is still coming: a file is given when it is whole.

    GET /<model>/<revision>/<path>    200, 206   the file: published, or finished and proven in .incoming
                                      503        it is being fetched here: come again (Retry-After)
                                      404        nobody fetches it here: ask somewhere else

Only the addresses of the configuration are answered. The receiver proves every byte against its own manifest, so that
nothing is believed here. The server ends by itself when nobody has asked for a while.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any, Optional

from .file_answers import FileAnswers, FileServer
from .weights import incoming_directory
from .weights_job import read_json, state_path, write_json
from .weights_manifest import RECORD_NAME

UNIT = "metalserve-weights-share.service"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# How long a host may have said that it will fetch, or have lost its worker, before others stop waiting for it.
_QUEUED_SECONDS = 300.0
_LOST_SECONDS = 60.0


def config_path(models_dir: Path) -> Path:
    """Where the configuration lies: {models_dir, port, addresses, idle_seconds}."""
    return models_dir / ".incoming" / "share.json"


def share(config_file: Path) -> int:
    """Serve until nobody has asked for `idle_seconds`."""
    server = ShareServer(config_file)
    server.serve_until_idle()
    return 0


def write_config(config: dict[str, Any]) -> bool:
    """Write the configuration; returns whether the port is another than before. Addresses are read at each request."""
    path = config_path(Path(config["models_dir"]))
    before = read_json(path)
    if before != config:
        write_json(path, config)
    return bool(before.get("port") != config["port"])


class ShareServer:
    """The server; `port` is where it listens."""

    def __init__(self, config_file: Path) -> None:
        self._config_file = config_file
        config = json.loads(config_file.read_text(encoding="utf-8"))
        self.models_dir = Path(config["models_dir"])
        self.last_asked = time.monotonic()
        self._server = FileServer((config.get("bind", ""), config["port"]), _handler(self))

    def asked(self) -> None:
        """Take note that somebody takes files now."""
        self.last_asked = time.monotonic()

    @property
    def port(self) -> int:
        """The port that was taken."""
        return int(self._server.server_port)

    def serve_until_idle(self) -> None:
        """Serve; a thread looks whether anybody still asks."""
        threading.Thread(target=self._end_when_idle, daemon=True).start()
        self._server.serve_forever(poll_interval=0.5)
        self._server.server_close()

    def stop(self) -> None:
        """End `serve_until_idle`."""
        self._server.shutdown()

    def allowed(self, address: str) -> bool:
        """Whether an address is one of those that may ask; names are looked up."""
        plain = address.replace("::ffff:", "")
        for name in read_json(self._config_file).get("addresses") or []:
            if name == plain:
                return True
            try:
                if plain in {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}:
                    return True
            except OSError:
                continue
        return False

    def find(self, key: str, revision: str, path: str) -> Optional[Path]:
        """The file, when it is whole and proven here."""
        final = self.models_dir / key / revision
        if path in (read_json(final / RECORD_NAME).get("files") or {}):
            return final / path
        incoming = incoming_directory(self.models_dir, key, revision) / path
        return incoming if incoming.is_file() and not path.endswith(".part") else None

    def is_coming(self, key: str, revision: str) -> bool:
        """Whether the revision is being fetched here, or will be in a moment."""
        state = read_json(state_path(self.models_dir, key, revision))
        age = time.time() - float(state.get("updated_at") or 0)
        if state.get("state") in ("queued", "starting"):
            return age < _QUEUED_SECONDS
        if state.get("state") != "running":
            return False
        incoming = incoming_directory(self.models_dir, key, revision)
        return _is_held(incoming.with_name(incoming.name + ".lock")) or age < _LOST_SECONDS

    def _end_when_idle(self) -> None:
        idle = float(read_json(self._config_file).get("idle_seconds") or 0)
        while time.monotonic() - self.last_asked < idle:
            time.sleep(min(1.0, idle / 4))
        self.stop()


def _handler(share_server: ShareServer) -> type[FileAnswers]:
    class Handler(FileAnswers):
        def give(self) -> None:
            share_server.asked()
            if not share_server.allowed(self.client_address[0]):
                self.answer(403)
                return
            parts = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip("/").split("/", 2)
            if len(parts) != 3 or not _plain(*parts):
                self.answer(404)
                return
            found = share_server.find(*parts)
            if found is None:
                coming = share_server.is_coming(parts[0], parts[1])
                self.answer(503 if coming else 404, {"Retry-After": "1"} if coming else {})
                return
            with found.open("rb") as stream:
                self.send_file(stream, os.fstat(stream.fileno()).st_size, sent=share_server.asked)

    return Handler


def _plain(key: str, revision: str, path: str) -> bool:
    hidden = any(part.startswith(".") or not part for part in path.split("/"))
    return bool(_NAME.fullmatch(key) and _NAME.fullmatch(revision)) and not hidden and "\0" not in path


def _is_held(lock: Path) -> bool:
    """Whether a process holds the revision's lock; it is only asked, and given back at once."""
    try:
        with lock.open("a", encoding="utf-8") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    except OSError:
        pass
    return False
