"""Gives a bundle to hosts over HTTP for as long as another process lives; started by the role serving_bundle.

Only what the manifest names is given. Nothing has to be believed of it: Docker proves images by their digest, the
worker weights by their hashes, apt packages by the signature whose key came over ssh.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Collection, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from metalserve.bundle import MANIFEST
from metalserve.errors import Refusal
from metalserve.remote.file_answers import FileAnswers, FileServer

_READY = "ready"


def start_server(directory: Path, port: int, follow: int) -> int:
    """Start a server in a process of its own that ends with the process `follow`; returns its port.

    Raises:
        Refusal: the port is taken.
    """
    command = [sys.executable, "-m", "metalserve.bundle_server", str(directory), "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--follow", str(follow)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    if process.stdout is None:
        raise RuntimeError("Popen gave no pipe")
    said = process.stdout.readline().split()
    if said[:1] != [_READY]:
        raise Refusal(
            found=f"port {port} of this controller cannot be listened on ({' '.join(said)})",
            needed="a free port that the hosts reach, for as long as a run takes",
            change="serving_bundle_port, or end what listens there; two runs with a bundle need two ports",
        )
    return int(said[1])


def serve(directory: Path, port: int, follow: int) -> int:
    """Serve until the process `follow` has ended; says `ready PORT` when it listens."""
    manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    files = {str(entry["path"]) for entry in manifest["files"]} | {MANIFEST}
    ended = os.pidfd_open(follow)
    try:
        server = FileServer(("", port), _handler(directory, files))
    except OSError as error:
        _say(str(error))
        return 1
    _say(f"{_READY} {server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    select.select([ended], [], [])
    server.shutdown()
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _handler(directory: Path, files: Collection[str]) -> type[BaseHTTPRequestHandler]:
    class Handler(FileAnswers):
        def give(self) -> None:
            path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip("/").replace("/./", "/")
            if path not in files:
                self.answer(404)
                return
            with (directory / path).open("rb") as stream:
                self.send_file(stream, os.fstat(stream.fileno()).st_size)

    return Handler


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--follow", type=int, required=True, help="the process with which this one ends")
    options = parser.parse_args(arguments)
    return serve(options.directory, options.port, options.follow)


if __name__ == "__main__":
    sys.exit(main())
