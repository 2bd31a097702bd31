"""The checks of the gate. Each returns a sentence about what it saw, or raises."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from . import gate_questions, http_client
from .gate_engines import EngineBehaviour
from .gate_judge import (
    Usage,
    WrongAnswerError,
    excerpt,
    finish_reason_is,
    first_answer,
    json_object,
    number_is,
    same_city,
    schema_fault,
    status_is,
    tool_call,
    usage_of,
)
from .gate_stream import StreamedAnswer, read_stream

CHAT_PATH = "/v1/chat/completions"
MODELS_PATH = "/v1/models"


@dataclass(frozen=True)
class Questions:
    """What is asked, and the right answers."""

    arithmetic_prompt: str = gate_questions.ARITHMETIC_PROMPT
    arithmetic_answer: str = gate_questions.ARITHMETIC_ANSWER
    weather_prompt: str = gate_questions.WEATHER_PROMPT
    weather_city: str = gate_questions.WEATHER_CITY
    weather_tool: Mapping[str, object] = field(default_factory=lambda: gate_questions.WEATHER_TOOL)
    capital_prompt: str = gate_questions.CAPITAL_PROMPT
    capital_answer: Mapping[str, str] = field(default_factory=lambda: gate_questions.CAPITAL_ANSWER)
    capital_schema_name: str = gate_questions.CAPITAL_SCHEMA_NAME
    capital_schema: Mapping[str, object] = field(default_factory=lambda: gate_questions.CAPITAL_SCHEMA)
    unknown_model: str = gate_questions.UNKNOWN_MODEL
    greeting_prompt: str = gate_questions.GREETING_PROMPT
    parallel_prompt: str = gate_questions.PARALLEL_PROMPT
    parallel_cities: Sequence[str] = gate_questions.PARALLEL_CITIES

    @property
    def weather_function(self) -> Mapping[str, object]:
        """The definition inside the weather tool: name, description, parameters."""
        function = self.weather_tool["function"]
        if not isinstance(function, Mapping):
            raise TypeError("a tool holds its function as a mapping")
        return function


@dataclass(frozen=True)
class Session:
    """One endpoint under test and how it is asked.

    Args:
        endpoint: where the API is.
        model: the served name that is asked.
        served_names: every name that the model list must hold.
        engine: how the engine behind it behaves.
        questions: what is asked.
        max_tokens: room for one answer, in tokens.
        chat_template_kwargs: sent with every chat request when not empty.
        burst_size: concurrent requests of the burst.
        deadline: moment on `time.monotonic()`, in seconds, at which the whole gate ends.
        request_timeout_seconds: limit of one request.
        api_key: bearer token.
        thinking: `absent`, `off` or `on`; not absent means that the model has a reasoning parser.
        hidden_routes: routes that must not answer without a key.
        long_prompt_tokens: the longest prompt that is asked, in tokens.

    """

    endpoint: http_client.Endpoint
    model: str
    served_names: Sequence[str]
    engine: EngineBehaviour
    questions: Questions
    max_tokens: int
    chat_template_kwargs: Mapping[str, object]
    burst_size: int
    deadline: float
    request_timeout_seconds: float
    api_key: str | None
    thinking: str = "absent"
    hidden_routes: Sequence[str] = ()
    long_prompt_tokens: int = 32768

    def request_deadline(self) -> float:
        """When a request that starts now must have ended."""
        return min(self.deadline, time.monotonic() + self.request_timeout_seconds)

    def chat_payload(self, prompt: str, **more: object) -> dict[str, object]:
        """The body of a chat request."""
        payload: dict[str, object] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        if self.chat_template_kwargs:
            payload["chat_template_kwargs"] = dict(self.chat_template_kwargs)
        payload.update(more)
        return payload

    def post_chat(self, payload: Mapping[str, object]) -> http_client.Response:
        """Send a chat request and give the answer, whatever its status."""
        return http_client.request(
            self.endpoint,
            "POST",
            CHAT_PATH,
            deadline=self.request_deadline(),
            payload=payload,
            api_key=self.api_key,
        )


def fetch_models(endpoint: http_client.Endpoint, *, deadline: float, api_key: str | None) -> list[str]:
    """The ids of the model list, in its order.

    Raises:
        WrongAnswerError: the answer is not a list of models.
        http_client.HttpError: there was no whole answer.

    """
    response = http_client.request(endpoint, "GET", MODELS_PATH, deadline=deadline, api_key=api_key)
    status_is(response.status, 200, response.body)
    data = json_object(response.body).get("data")
    if not isinstance(data, list) or not data:
        raise WrongAnswerError("no models in the list", "at least one in data", body=response.body)
    ids = [entry.get("id") if isinstance(entry, dict) else None for entry in data]
    names = [name for name in ids if isinstance(name, str) and name]
    if len(names) != len(ids):
        raise WrongAnswerError("a model without an id", "an id for each model", body=response.body)
    return names


def check_models(session: Session) -> str:
    """The model list holds every served name."""
    names = fetch_models(session.endpoint, deadline=session.request_deadline(), api_key=session.api_key)
    # SGLang lists an adapter by its own name, and answers with it to MODEL:ADAPTER alone.
    known = {*names, *(f"{session.model}:{name}" for name in names if not session.engine.checks_model_name)}
    missing = [name for name in session.served_names if name not in known]
    if missing:
        raise WrongAnswerError(
            f"the models {', '.join(names)}",
            f"also {', '.join(missing)}",
            change="the served names of the deployment, and what listens on this port",
        )
    return f"serves {', '.join(names)}"


def _ask_arithmetic(session: Session) -> Usage:
    payload = session.chat_payload(session.questions.arithmetic_prompt)
    response = session.post_chat(payload)
    status_is(response.status, 200, response.body)
    data = json_object(response.body)
    answer = first_answer(data, response.body)
    finish_reason_is(answer, ("stop",), response.body)
    number_is(answer, session.questions.arithmetic_answer, response.body)
    return usage_of(data, response.body)


def check_chat(session: Session) -> str:
    """An arithmetic question is answered right, ended by the model, with usage that adds up."""
    usage = _ask_arithmetic(session)
    return f"answered {session.questions.arithmetic_answer}; usage {usage}"


def _stream_arithmetic(session: Session) -> StreamedAnswer:
    payload = session.chat_payload(
        session.questions.arithmetic_prompt, stream=True, stream_options={"include_usage": True}
    )
    with http_client.stream(
        session.endpoint,
        CHAT_PATH,
        deadline=session.request_deadline(),
        payload=payload,
        api_key=session.api_key,
    ) as events:
        if events.status != 200:
            status_is(events.status, 200, events.read())
        if events.content_type.split(";")[0].strip().lower() != "text/event-stream":
            raise WrongAnswerError(f"the content type {events.content_type!r}", "text/event-stream", body=events.read())
        streamed = read_stream(events.lines())
    finish_reason_is(streamed.answer, ("stop",), streamed.raw)
    number_is(streamed.answer, session.questions.arithmetic_answer, streamed.raw)
    return streamed


def check_stream(session: Session) -> str:
    """The same question streamed: right when put together, usage in the last chunk, [DONE] at the end."""
    streamed = _stream_arithmetic(session)
    return (
        f"answered {session.questions.arithmetic_answer} in {streamed.chunks} chunk(s), "
        f"the first after {streamed.first_content_seconds:.2f} s; usage {streamed.usage}"
    )


def _ask_weather(session: Session, tool_choice: object, finish_reasons: Sequence[str]) -> dict[str, object]:
    questions = session.questions
    payload = session.chat_payload(questions.weather_prompt, tools=[questions.weather_tool], tool_choice=tool_choice)
    response = session.post_chat(payload)
    status_is(response.status, 200, response.body)
    data = json_object(response.body)
    answer = first_answer(data, response.body)
    # Before the call itself: an answer that ran out of room has no whole call, and its reason says why.
    if answer.finish_reason == "length":
        finish_reason_is(answer, finish_reasons, response.body)
    arguments = tool_call(
        answer,
        questions.weather_function,
        parser_setting=session.engine.tool_parser_setting,
        body=response.body,
    )
    finish_reason_is(answer, finish_reasons, response.body)
    usage_of(data, response.body)
    return arguments


def check_tool_forced(session: Session) -> str:
    """With the function named by tool_choice there is one call whose arguments fit its schema."""
    name = session.questions.weather_function["name"]
    choice = {"type": "function", "function": {"name": name}}
    arguments = _ask_weather(session, choice, session.engine.forced_finish_reasons)
    return f"called {name} with {excerpt(json.dumps(arguments, ensure_ascii=False))}"


def check_tool_auto(session: Session) -> str:
    """Left to choose, the model calls the function for the city that was asked for."""
    questions = session.questions
    arguments = _ask_weather(session, "auto", ("tool_calls",))
    if not same_city(arguments.get("city"), questions.weather_city):
        raise WrongAnswerError(f"the city {arguments.get('city')!r} in the call", f"{questions.weather_city!r}")
    return f"called {questions.weather_function['name']} for {arguments['city']}"


def check_json_schema(session: Session) -> str:
    """An answer bound to a JSON schema parses, fits the schema, and is right."""
    questions = session.questions
    response_format = {
        "type": "json_schema",
        "json_schema": {
            "name": questions.capital_schema_name,
            "strict": True,
            "schema": questions.capital_schema,
        },
    }
    payload = session.chat_payload(questions.capital_prompt, response_format=response_format)
    response = session.post_chat(payload)
    status_is(response.status, 200, response.body)
    data = json_object(response.body)
    answer = first_answer(data, response.body)
    finish_reason_is(answer, ("stop",), response.body)
    try:
        value = json.loads(answer.content)
    except (ValueError, RecursionError):
        raise WrongAnswerError(
            f"{answer.seen()}, which is not JSON", "JSON that fits the schema", body=response.body
        ) from None
    fault = schema_fault(value, questions.capital_schema)
    if fault:
        raise WrongAnswerError(f"{answer.seen()}: {fault}", "JSON that fits the schema", body=response.body)
    for name, expected in questions.capital_answer.items():
        if str(value[name]).strip().casefold() != expected.casefold():
            raise WrongAnswerError(f"{name} = {value[name]!r}", f"{expected!r}", body=response.body)
    usage_of(data, response.body)
    return f"answered {excerpt(answer.content)}"


def check_unknown_model(session: Session) -> str:
    """A model name that is not served is refused with 404 and an error body."""
    unknown = session.questions.unknown_model
    payload = session.chat_payload(session.questions.arithmetic_prompt, model=unknown, max_tokens=1)
    response = session.post_chat(payload)
    if response.status == 200 and not session.engine.checks_model_name:
        return f"{session.engine.name} answers to any model name; the gateway must check it"
    status_is(response.status, 404, response.body)
    data = json_object(response.body)
    error = data.get("error")
    message = error.get("message") if isinstance(error, dict) else error or data.get("message")
    if not isinstance(message, str) or not message:
        raise WrongAnswerError("HTTP 404 without an error message", "a body with error.message", body=response.body)
    return f"refused with 404: {excerpt(message, 100)}"


def check_burst(session: Session) -> str:
    """Many streamed requests at once are all answered right; the times are noted, not judged."""
    size = session.burst_size

    def one(number: int) -> tuple[float, float, int, str]:
        started = time.monotonic()
        try:
            streamed = _stream_arithmetic(session)
        except (WrongAnswerError, http_client.HttpError) as error:
            return time.monotonic() - started, 0.0, 0, f"request {number}: {error}"
        took = time.monotonic() - started
        # From the request to the first token: what came before the stream was read counts as well.
        first = took - streamed.seconds + streamed.first_content_seconds
        return took, first, streamed.usage.completion_tokens, ""

    started = time.monotonic()
    with ThreadPoolExecutor(max_workers=size) as pool:
        results = list(pool.map(one, range(1, size + 1)))
    seconds = time.monotonic() - started
    faults = [fault for *_, fault in results if fault]
    if faults:
        found = f"{size - len(faults)} of {size} requests answered right"
        raise WrongAnswerError(found, f"{size} of {size}", cause=f"First failure: {faults[0]}")
    firsts = sorted(first for _, first, _, _ in results)
    tokens = sum(count for *_, count, _ in results)
    return (
        f"{size} of {size} right at once: {size / seconds:.1f} requests/s, {tokens / seconds:.1f} tokens/s; "
        f"first token after {firsts[size // 2]:.2f} s (median), {firsts[-1]:.2f} s (slowest); "
        f"slowest answer {max(took for took, *_ in results):.2f} s"
    )


Check = Callable[[Session], str]

# In the order they run: the cheap ones that explain later failures come first.
BASIC_CHECKS: dict[str, Check] = {
    "models": check_models,
    "chat": check_chat,
    "stream": check_stream,
    "tool_forced": check_tool_forced,
    "tool_auto": check_tool_auto,
    "json_schema": check_json_schema,
    "unknown_model": check_unknown_model,
}
