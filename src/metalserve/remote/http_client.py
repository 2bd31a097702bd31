"""A small HTTP client whose every request ends at a deadline.

`http.client` limits single socket operations only: a server that sends one byte now and then holds it for
ever. Here a watchdog closes the connection at the deadline, whatever the server does. Proxies of the
environment are not used and redirects are not followed: what is asked is what answers.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

MAX_BODY_BYTES = 8 * 1024 * 1024
CONNECT_SECONDS = 10.0


class HttpError(Exception):
    """A request that got no whole answer; the text says what happened."""


class UnreachableError(HttpError):
    """No connection could be made."""


class DeadlinePassedError(HttpError):
    """The answer was not complete at the deadline."""


@dataclass(frozen=True)
class Endpoint:
    """Where an OpenAI-compatible API is served: `prefix` comes before every path; with `path` on a Unix socket."""

    scheme: str
    host: str
    port: int
    prefix: str
    path: str = ""

    @property
    def url(self) -> str:
        """The address as one string, without a slash at its end."""
        if self.path:
            return f"{self.scheme}://{quote(self.path, safe='')}{self.prefix}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"


@dataclass(frozen=True)
class Response:
    """A whole answer."""

    status: int
    content_type: str
    body: bytes


def parse_base_url(url: str) -> Endpoint:
    """Read the base URL of an API; a `/v1` at its end is taken off, because every path adds it.

    A Unix socket is `http+unix://` with the path of the socket in percent-encoding for its host.

    Raises:
        ValueError: the text is not an http or https URL with a host; the message says what it needs.

    """
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError as error:
        raise ValueError(f"the URL {url!r} cannot be read: {error}") from None
    if parts.scheme == "http+unix" and parts.netloc:
        return Endpoint(parts.scheme, "localhost", 0, parts.path.rstrip("/"), unquote(parts.netloc))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"the URL {url!r} is not of the form http://host:port or https://host:port")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(f"the URL {parts.hostname!r} must have no user, query or fragment; give the key as a file")
    prefix = parts.path.rstrip("/")
    if prefix.endswith("/v1"):
        prefix = prefix[: -len("/v1")]
    default_port = 443 if parts.scheme == "https" else 80
    return Endpoint(parts.scheme, parts.hostname, port or default_port, prefix)


def why_unreachable(endpoint: Endpoint, seconds: float = CONNECT_SECONDS) -> str:
    """Why no connection can be made within `seconds`; empty when one can."""
    try:
        if endpoint.path:
            _unix_socket(endpoint.path, seconds).close()
        else:
            socket.create_connection((endpoint.host, endpoint.port), timeout=seconds).close()
    except socket.timeout:  # noqa: UP041 - two classes in Python 3.9
        return f"no connection to {endpoint.url} within {seconds:.0f} s"
    except OSError as error:
        return f"no connection to {endpoint.url}: {error.strerror or error}"
    return ""


def _unix_socket(path: str, seconds: float | None) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path, self._seconds = path, timeout

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = _unix_socket(self._path, self._seconds)


class _Exchange:
    """One request on its own connection, closed by a watchdog at the deadline."""

    def __init__(self, endpoint: Endpoint, deadline: float) -> None:
        self._started = time.monotonic()
        self._deadline = deadline
        self._passed = threading.Event()
        self._socket: socket.socket | None = None
        self._watchdog: threading.Timer | None = None
        self._answered = False
        self.response: http.client.HTTPResponse
        connect_seconds = max(0.001, min(CONNECT_SECONDS, self._left()))
        if endpoint.path:
            self._connection: http.client.HTTPConnection = _UnixConnection(endpoint.path, connect_seconds)
        elif endpoint.scheme == "https":
            self._connection = http.client.HTTPSConnection(
                endpoint.host, endpoint.port, timeout=connect_seconds, context=ssl.create_default_context()
            )
        else:
            self._connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=connect_seconds)
        self._endpoint = endpoint

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _too_late(self) -> DeadlinePassedError:
        return DeadlinePassedError(f"no complete answer within {self._deadline - self._started:.1f} s")

    def _connect(self) -> None:
        if self._left() <= 0:
            raise DeadlinePassedError("no time left before the request was sent")
        where = self._endpoint.url
        try:
            self._connection.connect()
        except ssl.SSLError as error:
            raise UnreachableError(f"no TLS connection to {where}: {error}") from None
        except socket.timeout:  # noqa: UP041 - two classes in Python 3.9
            if self._left() <= 0:
                raise self._too_late() from None
            raise UnreachableError(f"no connection to {where} within {CONNECT_SECONDS:.0f} s") from None
        except OSError as error:
            raise UnreachableError(f"no connection to {where}: {error.strerror or error}") from None
        self._socket = self._connection.sock
        self._socket.settimeout(None)
        self._watchdog = threading.Timer(max(0.0, self._left()), self._cut)
        self._watchdog.daemon = True
        self._watchdog.start()

    def _cut(self) -> None:
        self._passed.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # shutdown, not close: it wakes a thread that is blocked in recv.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def send(self, method: str, path: str, payload: object | None, api_key: str | None) -> None:
        headers: dict[str, str] = {"Accept": "application/json, text/event-stream", "Connection": "close"}
        body: bytes | None = None
        if payload is not None:
            body = json.dumps(payload, ensure_ascii=False).encode("utf-8")
            headers["Content-Type"] = "application/json"
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        with self.errors():
            self._connect()
            self._connection.request(method, self._endpoint.prefix + path, body=body, headers=headers)
            self.response = self._connection.getresponse()
            self._answered = True

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn every error of the connection into one HttpError, told apart by the deadline."""
        try:
            yield
        except HttpError:
            raise
        except (http.client.HTTPException, OSError, ValueError) as error:
            if self._passed.is_set():
                raise self._too_late() from None
            if isinstance(error, http.client.RemoteDisconnected):
                raise HttpError("the server closed the connection without an answer") from None
            if isinstance(error, http.client.IncompleteRead):
                raise HttpError("the connection ended in the middle of the answer") from None
            raise HttpError(f"the connection failed: {type(error).__name__}: {error}") from None

    def pieces(self) -> Iterator[bytes]:
        """The body as it arrives.

        Raises:
            HttpError: the connection failed, the deadline passed, or the body passed `MAX_BODY_BYTES`.

        """
        # Counted here: in older Pythons read1 does not lower `length` and waits for bytes after the body.
        body_bytes = self.response.length
        read_bytes = 0
        while body_bytes is None or read_bytes < body_bytes:
            with self.errors():
                piece = self.response.read1(65536)
            if not piece:
                if self._passed.is_set():
                    # A body without a length that the watchdog cut looks like a normal end.
                    raise self._too_late()
                if body_bytes is not None:
                    raise HttpError(
                        f"the connection ended {body_bytes - read_bytes} bytes before the end of the answer"
                    )
                return
            read_bytes += len(piece)
            if read_bytes > MAX_BODY_BYTES:
                raise HttpError(f"the answer is longer than {MAX_BODY_BYTES} bytes")
            yield piece

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._answered:
            self.response.close()
        self._connection.close()


class EventStream:
    """An open answer, read line by line."""

    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange
        self.status = exchange.response.status
        self.content_type = exchange.response.getheader("Content-Type") or ""

    def lines(self) -> Iterator[str]:
        """The lines without their ends; a last line without an end is given too.

        Raises:
            HttpError: as for the body of a plain request.

        """
        rest = b""
        for piece in self._exchange.pieces():
            rest += piece
            *whole, rest = rest.split(b"\n")
            for line in whole:
                yield line.rstrip(b"\r").decode("utf-8", "replace")
        if rest:
            yield rest.decode("utf-8", "replace")

    def read(self) -> bytes:
        """The whole rest of the body."""
        return b"".join(self._exchange.pieces())


def request(
    endpoint: Endpoint,
    method: str,
    path: str,
    *,
    deadline: float,
    payload: Mapping[str, object] | None = None,
    api_key: str | None = None,
) -> Response:
    """Send one request and read the whole answer.

    Args:
        endpoint: where to send it.
        method: GET or POST.
        path: path after the endpoint's prefix.
        deadline: the moment on `time.monotonic()`, in seconds, at which the request ends.
        payload: sent as JSON.
        api_key: sent as a bearer token.

    Raises:
        HttpError: there was no whole answer. Any status is an answer.

    """
    exchange = _Exchange(endpoint, deadline)
    try:
        exchange.send(method, path, payload, api_key)
        body = b"".join(exchange.pieces())
        return Response(exchange.response.status, exchange.response.getheader("Content-Type") or "", body)
    finally:
        exchange.close()


@contextlib.contextmanager
def stream(
    endpoint: Endpoint,
    path: str,
    *,
    deadline: float,
    payload: Mapping[str, object],
    api_key: str | None = None,
) -> Iterator[EventStream]:
    """Send one POST request and give the answer while it arrives; arguments and errors as for `request`."""
    exchange = _Exchange(endpoint, deadline)
    try:
        exchange.send("POST", path, payload, api_key)
        yield EventStream(exchange)
    finally:
        exchange.close()
