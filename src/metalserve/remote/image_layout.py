"""An OCI image layout as a registry: Docker pulls from it by digest, and proves every byte itself.

A layout is a directory with blobs/sha256/<hex>, a tar file of one (`skopeo copy ... oci-archive:FILE`, `docker save` of
Docker 25 and newer), or the URL of one. Docker loads archives, too, but then it forgets the digest; a pull keeps it.
Docker needs no setting for a registry on the loopback.
"""

from __future__ import annotations

import json
import tarfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Optional

from .file_answers import FileAnswers, FileServer

_TIMEOUT_SECONDS = 60.0
_CHUNK_BYTES = 1 << 20
_LARGEST_MANIFEST_BYTES = 4 << 20
_INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"


class LayoutError(Exception):
    """A place that is no layout, or a layout without the image; the text names it."""


@dataclass(frozen=True)
class Layout:
    """Where a layout is.

    Attributes:
        place: the directory, file or URL.
        members: of a tar file: path -> (offset, size) of each blob.
    """

    place: str
    members: Optional[dict[str, tuple[int, int]]] = None

    @property
    def is_remote(self) -> bool:
        """Whether blobs come over the network."""
        return "://" in self.place

    @contextmanager
    def open(self, digest: str, start: int = 0) -> Iterator[tuple[Any, int, int]]:
        """An open blob, where it begins in the stream, and its size in bytes; of a remote one the stream is at `start`.

        Raises:
            LayoutError: the blob is not there.
        """
        path = f"blobs/{digest.replace(':', '/')}"
        try:
            if self.is_remote:
                request = urllib.request.Request(
                    f"{self.place.rstrip('/')}/{path}", headers={"Range": f"bytes={start}-"} if start else {}
                )
                with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as stream:
                    yield stream, 0, start + int(stream.headers["Content-Length"])
            elif self.members is not None:
                offset, size = self.members[path]
                with Path(self.place).open("rb") as stream:
                    yield stream, offset, size
            else:
                file = Path(self.place, path)
                with file.open("rb") as stream:
                    yield stream, 0, file.stat().st_size
        except (OSError, KeyError, TypeError) as error:
            raise LayoutError(f"{self.place} has no {path} ({error})") from error

    def manifest(self, digest: str) -> bytes:
        """The bytes of a manifest or an index.

        Raises:
            LayoutError: there is none.
        """
        with self.open(digest) as (stream, offset, size):
            if size > _LARGEST_MANIFEST_BYTES:
                raise LayoutError(f"{self.place}: {digest} has {size} bytes and is no manifest")
            if offset:
                stream.seek(offset)
            data: bytes = stream.read(size)
        return data


def open_layout(place: str, digest: str) -> Layout:
    """A layout that has the image of this digest.

    Raises:
        LayoutError: the place cannot be read, is no layout, or does not have the image.
    """
    layout = Layout(place)
    if not layout.is_remote and not Path(place).is_dir():
        layout = Layout(place, _members(place))
    layout.manifest(digest)
    return layout


def _members(place: str) -> dict[str, tuple[int, int]]:
    try:
        with tarfile.open(place, "r:") as archive:
            members = {item.name.lstrip("./"): (item.offset_data, item.size) for item in archive if item.isfile()}
    except (OSError, tarfile.TarError) as error:
        raise LayoutError(f"{place} is no tar file that can be read from any point on ({error})") from error
    if "index.json" not in members:
        raise LayoutError(
            f"{place} is no OCI layout: no index.json is in it. What Docker before 25 saves has no digest"
        )
    return members


@contextmanager
def layout_registry(layout: Layout, port: int) -> Iterator[str]:
    """A registry on the loopback that gives what the layout has; yields its address.

    Raises:
        OSError: the port is taken.
    """
    server = FileServer(("127.0.0.1", port), _handler(layout))
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.1), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(layout: Layout) -> type[BaseHTTPRequestHandler]:
    class Handler(FileAnswers):
        def give(self) -> None:
            parts = self.path.partition("?")[0].split("/")
            if parts == ["", "v2", ""]:
                self.answer(200, {"Docker-Distribution-Api-Version": "registry/2.0"}, b"{}")
                return
            kind, digest = parts[-2] if len(parts) > 1 else "", parts[-1]
            try:
                if kind == "manifests" and digest.startswith("sha256:"):
                    data = layout.manifest(digest)
                    self.answer(200, {"Content-Type": _media_type(data), "Docker-Content-Digest": digest}, data)
                elif kind == "blobs":
                    self._blob(digest)
                else:
                    self.answer(404)
            except LayoutError:
                self.answer(404)

        def _blob(self, digest: str) -> None:
            headers = {"Content-Type": "application/octet-stream", "Docker-Content-Digest": digest}
            if not layout.is_remote:
                with layout.open(digest) as (stream, offset, size):
                    self.send_file(stream, size, offset=offset, headers=headers)
                return
            start = self.range_start() or 0
            with layout.open(digest, start) as (stream, _, size):
                partial = {"Content-Range": f"bytes {start}-{size - 1}/{size}"} if start else {}
                self.begin(206 if start else 200, {**headers, **partial}, size - start)
                if self.command == "HEAD":
                    return
                left = size - start
                while left:
                    chunk = stream.read(min(_CHUNK_BYTES, left))
                    if not chunk:
                        # Docker sees an answer that is too short, and asks for the rest.
                        self.close_connection = True
                        return
                    self.wfile.write(chunk)
                    left -= len(chunk)

    return Handler


def _media_type(data: bytes) -> str:
    try:
        content = json.loads(data)
        told = content.get("mediaType")
        return str(told or (_INDEX_TYPE if "manifests" in content else _MANIFEST_TYPE))
    except (ValueError, AttributeError):
        return _MANIFEST_TYPE


def layout_places(places: Sequence[str], digest: str) -> tuple[list[Layout], list[str]]:
    """The layouts that have an image, and why the others have not."""
    layouts, reasons = [], []
    for place in places:
        try:
            layouts.append(open_layout(place, digest))
        except LayoutError as error:
            reasons.append(str(error))
    return layouts, reasons
