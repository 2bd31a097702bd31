"""The gate as a whole: order, limits, endpoints that are not there, and what it prints."""

from __future__ import annotations

import ast
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from gate_server import MODEL, GateServer

from metalserve.remote import gate, gate_checks, gate_questions
from metalserve.remote.gate import CHECK_NAMES, GateResult, GateRow, run_gate


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def silent_url() -> Iterator[str]:
    """A server that takes connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_all_checks_in_order(server: GateServer) -> None:
    result = run_gate(server.url, MODEL, timeout_seconds=20)
    assert result.passed, result.table()
    assert tuple(row.name for row in result.rows) == CHECK_NAMES
    assert result.table()[-1] == f"passed: tiny at {server.url}, {len(CHECK_NAMES)} checks in {result.seconds:.1f} s"


def test_chosen_checks_run_in_the_order_of_the_gate(server: GateServer) -> None:
    result = run_gate(server.url, MODEL, checks=["chat", "models"])
    assert [row.name for row in result.rows] == ["models", "chat"]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_base_url_with_and_without_v1(server: GateServer, suffix: str) -> None:
    result = run_gate(server.url + suffix, MODEL, checks=["models"])
    assert result.passed
    assert result.url == server.url


def test_model_left_out_takes_the_first_of_the_list(server: GateServer) -> None:
    result = run_gate(server.url, None, checks=["chat"])
    assert result.passed
    assert result.model == MODEL
    assert server.requests[0]["model"] == MODEL


def test_model_left_out_and_no_list(closed_port: int) -> None:
    result = run_gate(f"http://127.0.0.1:{closed_port}", None, checks=["chat"])
    assert result.rows[0].detail.startswith("not run: no model name: no connection to http://127.0.0.1:")
    assert result.model == ""


def test_connection_refused(closed_port: int) -> None:
    result = run_gate(f"http://127.0.0.1:{closed_port}", MODEL)
    assert not result.passed
    assert len(result.rows) == len(CHECK_NAMES)
    reason = f"no connection to http://127.0.0.1:{closed_port}: Connection refused"
    assert [row.detail for row in result.rows] == [reason] + [f"not run: {reason}"] * (len(CHECK_NAMES) - 1)


def test_silent_server_ends_at_the_limit(silent_url: str) -> None:
    started = time.monotonic()
    result = run_gate(silent_url, MODEL, timeout_seconds=0.5)
    assert time.monotonic() - started < 2
    assert result.rows[0].detail == "no complete answer within 0.5 s"
    assert {row.detail for row in result.rows[1:]} == {"not run: the limit of 0.5 s for the whole gate had passed"}


def test_one_slow_request_leaves_time_for_the_others(server: GateServer) -> None:
    server.delay_seconds["chat"] = 2
    result = run_gate(
        server.url,
        MODEL,
        checks=["models", "chat", "json_schema"],
        timeout_seconds=20,
        request_timeout_seconds=0.3,
    )
    assert [row.ok for row in result.rows] == [True, False, True]
    assert result.rows[1].detail == "no complete answer within 0.3 s"


def test_answer_that_trickles_ends_at_the_limit(server: GateServer) -> None:
    # Each byte comes in time; only a limit on the whole answer ends it.
    server.trickle_seconds = 0.05
    started = time.monotonic()
    result = run_gate(server.url, MODEL, checks=["chat"], timeout_seconds=0.5)
    assert time.monotonic() - started < 2
    assert result.rows[0].detail == "no complete answer within 0.5 s"


def _serve_once(answer: bytes) -> tuple[str, threading.Thread]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1)

    def serve() -> None:
        with listener:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", thread


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "the server closed the connection without an answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "the connection failed: BadStatusLine"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}", "the connection ended 98 bytes before the end"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            "the connection ended in the middle",
        ),
        (
            b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
            "HTTP 307",
        ),
        (b"HTTP/1.1 200 OK\r\n\r\n\x00\xff\xfe", "found a body that is not JSON"),
    ],
)
def test_a_server_of_another_kind(answer: bytes, words: str) -> None:
    url, thread = _serve_once(answer)
    result = run_gate(url, MODEL, checks=["models"], timeout_seconds=5)
    thread.join(5)
    assert words in result.rows[0].detail
    assert not result.passed


def test_tls_asked_of_a_plain_server(server: GateServer) -> None:
    url = server.url.replace("http://", "https://")
    result = run_gate(url, MODEL, checks=["models"], timeout_seconds=5)
    assert result.rows[0].detail.startswith(f"no TLS connection to {url}")


def test_a_body_without_end_is_refused(server: GateServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metalserve.remote.http_client.MAX_BODY_BYTES", 1000)
    server.raw["models"] = (200, "application/json", b" " * 2000)
    result = run_gate(server.url, MODEL, checks=["models"], timeout_seconds=5)
    assert result.rows[0].detail == "the answer is longer than 1000 bytes"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost:8000", "is not of the form http://host:port"),
        ("", "is not of the form http://host:port"),
        ("http://host:80000", "cannot be read: Port out of range"),
        ("http://user:secret@host", "must have no user, query or fragment"),
    ],
)
def test_unusable_url(url: str, words: str) -> None:
    result = run_gate(url, MODEL, checks=["models"])
    assert words in result.rows[0].detail
    assert "secret" not in result.rows[0].detail


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"checks": ["models", "nonsense"]}, "no check is named nonsense; there are models, chat"),
        ({"checks": ["nonsense"]}, "no check is named nonsense; there are models, chat"),
        ({"engine": "triton"}, "the engine 'triton' is not known; there are vllm, sglang"),
        ({"thinking": "maybe"}, "thinking is 'maybe'; it can be absent, off, on"),
        ({"burst_size": 0}, "burst_size is 0; it must be 1 or more"),
    ],
)
def test_wrong_arguments_refuse_and_never_raise(options: dict[str, object], words: str) -> None:
    result = run_gate("http://127.0.0.1:1", MODEL, **options)  # type: ignore[arg-type]
    assert result.rows
    assert not result.passed
    assert all(row.detail.startswith("not run: ") and words in row.detail for row in result.rows)


def test_a_check_that_breaks_is_a_failed_row(server: GateServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(session: gate_checks.Session) -> str:
        raise KeyError("boom")

    monkeypatch.setitem(gate.CHECKS, "chat", broken)
    result = run_gate(server.url, MODEL, checks=["models", "chat"])
    assert result.rows[0].ok
    assert result.rows[1].detail == "the check itself broke: KeyError: 'boom'"


def test_the_key_is_sent_and_never_shown(server: GateServer) -> None:
    key = "sk-very-secret"
    server.api_key = key
    server.raw["chat"] = (400, "application/json", b'{"error": "bad key sk-very-secret"}')
    result = run_gate(server.url, MODEL, api_key=key, checks=["models", "chat"])
    assert result.rows[0].ok
    assert "bad key ***" in result.rows[1].detail
    assert key not in str(result.as_dict())


def test_terminal_codes_of_a_body_are_not_shown(server: GateServer) -> None:
    server.raw["models"] = (500, "text/plain", b"\x1b[31mred\x1b[0m\r\nnext")
    result = run_gate(server.url, MODEL, checks=["models"])
    assert "?[31mred?[0m next" in result.rows[0].detail


RESULT = GateResult(
    url="http://h:8000",
    model="m",
    engine="vllm",
    rows=(
        GateRow("models", True, 0.012, "serves m"),
        GateRow("unknown_model", False, 12.5, "found HTTP 200"),
    ),
    seconds=12.6,
)


def test_table_is_aligned() -> None:
    assert RESULT.table() == [
        "check                  seconds  detail",
        "models         ok         0.01  serves m",
        "unknown_model  FAILED    12.50  found HTTP 200",
        "refused: m at http://h:8000, 1 of 2 checks failed",
    ]


def test_refusal_holds_the_failed_rows_only() -> None:
    assert RESULT.refusal() == "refused: m at http://h:8000, 1 of 2 checks failed\n  unknown_model: found HTTP 200"


def test_no_row_is_not_a_pass() -> None:
    assert not GateResult(url="u", model="m", engine="vllm", rows=(), seconds=0).passed


def test_questions_are_constants_without_imports() -> None:
    tree = ast.parse(Path(gate_questions.__file__).read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef))]


def test_the_gate_asks_over_a_unix_socket_too(server, tmp_path):
    """As a rollout asks one host through a gateway: the socket's path is the host of the URL."""
    path = tmp_path / "proof.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def pass_on():
        while True:
            inside, _ = listener.accept()
            outside = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
            for source, target in ((inside, outside), (outside, inside)):
                threading.Thread(target=pump, args=(source, target), daemon=True).start()

    def pump(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data.replace(b" /host:tiny/v1", b" /v1"))
            target.shutdown(socket.SHUT_WR)

    threading.Thread(target=pass_on, daemon=True).start()
    url = f"http+unix://{quote(str(path), safe='')}/host:tiny"
    result = run_gate(url, "tiny", checks=["models", "chat", "stream"])
    assert result.passed, result.refusal()
    assert result.url == url
    nobody = run_gate(f"http+unix://{quote(str(tmp_path / 'none'), safe='')}/x", "tiny", checks=["models"])
    assert "no connection to http+unix://" in nobody.rows[0].detail
