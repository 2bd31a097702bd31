"""A small OpenAI-compatible server that knows the gate's questions, with switches for wrong behaviour."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from metalserve.remote import gate_questions as q

MODEL = "tiny"
ALIAS = "tiny-alias"

Fault = Callable[[dict[str, Any]], Any]


class GateServer:
    """Serves on a free port of 127.0.0.1 until the `with` block ends.

    Args:
        api_key: answers 401 without it.
        accepts_any_model: answers 200 to every model name, as SGLang does.
    """

    def __init__(self, *, api_key: str | None = None, accepts_any_model: bool = False) -> None:
        self.api_key = api_key
        self.accepts_any_model = accepts_any_model
        self.names = [MODEL, ALIAS]
        self.context_length: int | None = 4096
        self.prompt_tokens: Callable[[str], int] = lambda prompt: len(prompt.split()) + 5
        self.token_count: dict[str, Any] = {"count": 20}
        self.routes: dict[str, int] = {}
        self.requests: list[dict[str, Any]] = []
        # kind of question -> what to do with the right answer; the kinds are those of `kind_of`.
        self.edit_answer: dict[str, Fault] = {}
        self.edit_events: Callable[[list[str]], list[str]] | None = None
        self.raw: dict[str, tuple[int, str, bytes]] = {}
        self.cut_stream_after: int | None = None
        self.delay_seconds: dict[str, float] = {}
        self.trickle_seconds: float | None = None
        self.edit_nth_chat: dict[int, Fault] = {}
        self.lock = threading.Lock()
        self.chats = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(poll_interval=0.02), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> GateServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A burst must not wait for the kernel's second try of a connection.
    request_queue_size = 128


def kind_of(request: dict[str, Any], names: list[str]) -> str:
    if request["model"] not in names:
        return "unknown_model"
    if request.get("tools") and request["messages"][-1]["content"] == q.PARALLEL_PROMPT:
        return "tools_parallel"
    if request.get("tools"):
        return "tool_auto" if request["tool_choice"] == "auto" else "tool_forced"
    if request.get("response_format"):
        return "json_schema"
    if request["messages"][-1]["content"] == q.GREETING_PROMPT:
        return "unicode"
    if request["messages"][-1]["content"].startswith(" one two"):
        return "long_prompt"
    if (request.get("chat_template_kwargs") or {}).get("enable_thinking") and not request.get("stream"):
        return "reasoning"
    return "stream" if request.get("stream") else "chat"


def right_answer(kind: str, request: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    reason = "stop"
    prompt = request["messages"][-1]["content"]
    if kind in ("tool_auto", "tool_forced") and prompt == q.WEATHER_PROMPT:
        arguments = json.dumps({"city": q.WEATHER_CITY})
        function = {"name": "get_weather", "arguments": arguments}
        message["tool_calls"] = [{"id": "call-1", "type": "function", "function": function}]
        # vLLM ends a forced call with "stop".
        reason = "tool_calls" if kind == "tool_auto" else "stop"
    elif kind == "tools_parallel":
        message["tool_calls"] = [
            {
                "id": f"call-{city}",
                "type": "function",
                "function": {"name": "get_weather", "arguments": json.dumps({"city": city})},
            }
            for city in q.PARALLEL_CITIES
        ]
        reason = "tool_calls"
    elif kind == "unicode":
        message["content"] = "你好！很高兴见到你。"
    elif kind == "reasoning":
        message["content"], message["reasoning"] = q.ARITHMETIC_ANSWER, "17 + 25 is 42."
    elif kind == "json_schema" and prompt == q.CAPITAL_PROMPT:
        message["content"] = json.dumps(q.CAPITAL_ANSWER)
    elif prompt == q.ARITHMETIC_PROMPT:
        message["content"] = q.ARITHMETIC_ANSWER
    else:
        message["content"] = "I do not know."
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": request["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 23},
    }


def stream_events(answer: dict[str, Any], *, include_usage: bool) -> list[str]:
    def chunk(choices: list[dict[str, Any]], **more: object) -> str:
        return json.dumps({"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": choices, **more})

    choice = answer["choices"][0]
    events = [chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])]
    events += [
        chunk([{"index": 0, "delta": {"content": letter}, "finish_reason": None}])
        for letter in choice["message"]["content"]
    ]
    events.append(chunk([{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]))
    if include_usage:
        events.append(chunk([], usage=answer["usage"]))
    return [*events, "[DONE]"]


def _handler(server: GateServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def reply(self, status: int, body: bytes, content_type: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if server.trickle_seconds is None:
                self.wfile.write(body)
                return
            for position in range(len(body)):
                self.wfile.write(body[position : position + 1])
                time.sleep(server.trickle_seconds)

        def reply_json(self, status: int, value: object) -> None:
            self.reply(status, json.dumps(value).encode())

        def allowed(self) -> bool:
            if server.api_key is None or self.headers.get("Authorization") == f"Bearer {server.api_key}":
                return True
            self.reply_json(401, {"error": "Unauthorized"})
            return False

        def disturbed(self, kind: str) -> bool:
            time.sleep(server.delay_seconds.get(kind, 0))
            if kind not in server.raw:
                return False
            status, content_type, body = server.raw[kind]
            self.reply(status, body, content_type)
            return True

        def do_GET(self) -> None:
            if not self.allowed():
                return
            if self.path in server.routes:
                self.reply_json(server.routes[self.path], {})
            elif self.path != "/v1/models":
                self.reply_json(404, {"detail": "Not Found"})
            elif not self.disturbed("models"):
                more = {} if server.context_length is None else {"max_model_len": server.context_length}
                data = [{"id": n, "object": "model", **more} for n in server.names]
                self.reply_json(200, {"object": "list", "data": data})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.allowed():
                return
            if self.path == "/tokenize" and not self.disturbed("tokenize"):
                self.reply_json(200, server.token_count)
                return
            if self.path == "/tokenize":
                return
            if self.path != "/v1/chat/completions":
                self.reply_json(404, {"detail": "Not Found"})
                return
            names = [request["model"]] if server.accepts_any_model else server.names
            kind = kind_of(request, names)
            with server.lock:
                server.requests.append(request)
                server.chats += kind in ("chat", "stream")
                number = server.chats if kind in ("chat", "stream") else 0
                server.in_flight += 1
                server.most_in_flight = max(server.most_in_flight, server.in_flight)
            try:
                self.answer(kind, request, number)
            except (BrokenPipeError, ConnectionResetError):
                # The client gave up at its deadline.
                self.close_connection = True
            finally:
                with server.lock:
                    server.in_flight -= 1

        def answer(self, kind: str, request: dict[str, Any], number: int) -> None:
            if self.disturbed(kind):
                return
            if kind == "unknown_model":
                message = f"The model `{request['model']}` does not exist."
                error = {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
                self.reply_json(404, {"error": error})
                return
            answer = right_answer(kind, request)
            if kind == "long_prompt":
                # As many tokens as words, and five of the template.
                count = server.prompt_tokens(request["messages"][-1]["content"])
                if server.context_length is not None and count + request["max_tokens"] > server.context_length:
                    self.reply_json(400, {"error": {"message": "This model's maximum context length is exceeded."}})
                    return
                answer["usage"] = {"prompt_tokens": count, "completion_tokens": 1, "total_tokens": count + 1}
            edit = server.edit_nth_chat.get(number) or server.edit_answer.get(kind)
            if edit is not None:
                answer = edit(answer) or answer
            if kind == "stream" and "status" not in answer:
                include_usage = bool((request.get("stream_options") or {}).get("include_usage"))
                self.send_events(stream_events(answer, include_usage=include_usage))
            else:
                self.reply_json(answer.pop("status", 200), answer)

        def send_events(self, events: list[str]) -> None:
            if server.edit_events is not None:
                events = server.edit_events(events)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number, event in enumerate(events):
                if number == server.cut_stream_after:
                    self.close_connection = True
                    return
                line = f"data: {event}\n\n".encode()
                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

    return Handler
