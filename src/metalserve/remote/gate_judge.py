"""Judges answers of an OpenAI-compatible API: pure functions that return what they found or raise."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

EXCERPT_CHARACTERS = 200


class WrongAnswerError(Exception):
    """An answer that is not right, said as found and expected, with what to look at.

    Args:
        found: what was seen.
        expected: what a right answer has.
        change: the setting to look at, where one is known.
        cause: a whole sentence on where it was seen, when that is not the answer itself.
        body: the raw answer; its first 200 characters are shown.

    """

    def __init__(
        self, found: str, expected: str, *, change: str = "", cause: str = "", body: bytes | str = b""
    ) -> None:
        self.found = found
        self.expected = expected
        self.change = change
        self.cause = cause
        self.body = body
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"found {self.found}; expected {self.expected}"
        if self.change:
            text += f". Look at: {self.change}"
        if self.cause:
            text += f". {self.cause}"
        shown = excerpt(self.body)
        if shown:
            text += f". Body: {shown}"
        return text


def excerpt(body: bytes | str, characters: int = EXCERPT_CHARACTERS) -> str:
    """The first characters of a body on one line, without control characters."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    text = " ".join(text.split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= characters else text[:characters] + " ..."


@dataclass(frozen=True)
class Usage:
    """The token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    def __str__(self) -> str:
        return f"{self.prompt_tokens} + {self.completion_tokens} = {self.total_tokens} tokens"


@dataclass(frozen=True)
class Answer:
    """The first choice of one chat answer, streamed or not."""

    content: str
    reasoning: str
    finish_reason: str
    tool_calls: Sequence[object]

    def seen(self) -> str:
        """What the model said, for a sentence."""
        if self.tool_calls:
            return f"{len(self.tool_calls)} tool call(s)"
        if self.content.strip() or not self.reasoning:
            return f"the content {excerpt(self.content)!r}"
        return f"no content, only reasoning {excerpt(self.reasoning)!r}"


def json_object(body: bytes | str) -> dict[str, object]:
    """The JSON object in a body.

    Raises:
        WrongAnswerError: the body is not JSON, or not an object.

    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise WrongAnswerError("a body that is not JSON", "a JSON object", body=body) from None
    if not isinstance(value, dict):
        raise WrongAnswerError(f"JSON of type {_type_name(value)}", "a JSON object", body=body)
    return value


def status_is(status: int, expected: int, body: bytes) -> None:
    """Compare the HTTP status.

    Raises:
        WrongAnswerError: another status.

    """
    if status == expected:
        return
    change = {
        401: "the API key (api_key_file): it is missing or not the engine's",
        404: "the model name and the base URL",
        503: "the engine's journal: it is loading, draining or dead",
    }.get(status, "")
    raise WrongAnswerError(f"HTTP {status}", f"HTTP {expected}", change=change, body=body)


def first_answer(data: Mapping[str, object], body: bytes) -> Answer:
    """The first choice of a chat completion.

    Raises:
        WrongAnswerError: there is no choice or no message in it.

    """
    choices = data.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise WrongAnswerError("no choices[0].message", "a chat completion with one choice", body=body)
    calls = message.get("tool_calls")
    return Answer(
        content=_text(message.get("content")),
        # vLLM says `reasoning`, SGLang and older vLLM say `reasoning_content`.
        reasoning=_text(message.get("reasoning") or message.get("reasoning_content")),
        finish_reason=_text(choice.get("finish_reason")),
        tool_calls=calls if isinstance(calls, list) else [],
    )


def usage_of(data: Mapping[str, object], body: bytes | str) -> Usage:
    """The usage of an answer, checked: whole numbers above zero that add up.

    Raises:
        WrongAnswerError: usage is missing, a count is not above zero, or the total is not the sum.

    """
    usage = data.get("usage")
    if not isinstance(usage, dict):
        raise WrongAnswerError("no usage", "usage with prompt_tokens, completion_tokens and total_tokens", body=body)
    counts = []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        count = usage.get(name)
        if not isinstance(count, int) or isinstance(count, bool) or count <= 0:
            raise WrongAnswerError(f"usage.{name} = {count!r}", "a whole number above 0", body=body)
        counts.append(count)
    prompt, completion, total = counts
    if prompt + completion != total:
        raise WrongAnswerError(
            f"usage of {prompt} prompt + {completion} completion tokens with a total of {total}",
            f"a total of {prompt + completion}",
            body=body,
        )
    return Usage(prompt, completion, total)


def finish_reason_is(answer: Answer, accepted: Sequence[str], body: bytes | str) -> None:
    """Compare the finish reason.

    Raises:
        WrongAnswerError: another one; `length` names the setting that gives more room.

    """
    if answer.finish_reason in accepted:
        return
    change = ""
    if answer.finish_reason == "length":
        change = "max_tokens (more room), or thinking: off for a model that reasons first"
    wanted = " or ".join(repr(reason) for reason in accepted)
    found = f"finish_reason {answer.finish_reason!r} after {answer.seen()}"
    raise WrongAnswerError(found, f"finish_reason {wanted}", change=change, body=body)


def number_is(answer: Answer, expected: str, body: bytes | str) -> None:
    """Look for the number, standing alone, in the content.

    Raises:
        WrongAnswerError: it is not there.

    """
    if re.search(rf"(?<![\d.,-]){re.escape(expected)}(?![\d]|[.,]\d)", answer.content):
        return
    raise WrongAnswerError(answer.seen(), f"the number {expected} in the content", body=body)


def tool_call(answer: Answer, function: Mapping[str, object], *, parser_setting: str, body: bytes) -> dict[str, object]:
    """The arguments of the one call of `function` in an answer; arguments and errors as for `tool_calls`.

    Raises:
        WrongAnswerError: also more than one call.

    """
    if len(answer.tool_calls) > 1:
        raise WrongAnswerError(f"{len(answer.tool_calls)} tool calls", f"one call of {function['name']}", body=body)
    (arguments,) = tool_calls(answer, function, parser_setting=parser_setting, body=body)
    return arguments


def tool_calls(
    answer: Answer, function: Mapping[str, object], *, parser_setting: str, body: bytes
) -> list[dict[str, object]]:
    """The arguments of each call in an answer, all of them of `function`.

    Args:
        answer: the answer.
        function: the function's definition: name and parameters (a JSON schema).
        parser_setting: named when there is no call.
        body: the raw answer.

    Raises:
        WrongAnswerError: no call, a call of another function, without an id or with that of another call, or with
            arguments that are not JSON or do not fit.

    """
    name = function["name"]
    if not answer.tool_calls:
        raise WrongAnswerError(
            f"no tool call but {answer.seen()}",
            f"one call of {name}",
            change=f"{parser_setting} and the chat template",
            body=body,
        )
    ids = [call.get("id") for call in answer.tool_calls if isinstance(call, dict)]
    if len(set(map(str, ids))) != len(ids):
        raise WrongAnswerError(f"calls with the ids {', '.join(map(str, ids))}", "an id for each call", body=body)
    return [_call_arguments(call, function, parser_setting, body) for call in answer.tool_calls]


def _call_arguments(
    call: object, function: Mapping[str, object], parser_setting: str, body: bytes
) -> dict[str, object]:
    name = function["name"]
    called = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(called, dict):
        raise WrongAnswerError("a tool call without a function", f"a call of {name}", body=body)
    if called.get("name") != name:
        raise WrongAnswerError(f"a call of {called.get('name')!r}", f"a call of {name}", body=body)
    if not isinstance(call.get("id"), str) or not call["id"]:
        raise WrongAnswerError(
            f"a call with the id {call.get('id')!r}", "an id that the tool's result can refer to", body=body
        )
    raw = called.get("arguments")
    if not isinstance(raw, str):
        raise WrongAnswerError(
            f"arguments of type {_type_name(raw)}", "arguments as a string that holds JSON", body=body
        )
    try:
        arguments = json.loads(raw)
    except (ValueError, RecursionError):
        raise WrongAnswerError(
            f"arguments that are not JSON: {excerpt(raw)!r}",
            "a JSON object",
            change=parser_setting,
            body=body,
        ) from None
    parameters = function["parameters"]
    if not isinstance(parameters, Mapping):
        raise TypeError("the parameters of a function are a JSON schema")
    fault = schema_fault(arguments, parameters, "arguments")
    if fault:
        raise WrongAnswerError(
            f"arguments {excerpt(raw)!r}: {fault}", "arguments that fit the function's schema", body=body
        )
    # A schema of a function is always that of an object.
    return dict(arguments)


def same_city(value: object, expected: str) -> bool:
    """Whether a city is the expected one; "Berlin, Germany" is Berlin."""
    return isinstance(value, str) and value.split(",")[0].strip().casefold() == expected.casefold()


_KEYWORDS = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "maxLength",
    "items",
    "enum",
    "description",
}
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def schema_fault(value: object, schema: Mapping[str, object], where: str = "the answer") -> str:
    """What keeps a value from fitting a JSON schema; empty when it fits.

    The part of JSON Schema that the questions use: type, properties, required, additionalProperties as a
    boolean, maxLength, items, enum.

    Raises:
        ValueError: the schema uses a keyword or a type outside that part; it must not pass unread.

    """
    strange = sorted(set(schema) - _KEYWORDS)
    wanted = schema.get("type")
    if strange or not isinstance(wanted, str) or wanted not in _TYPES:
        raise ValueError(f"schema of {where} cannot be checked: type {wanted!r}, unknown keywords {strange}")
    is_wanted = isinstance(value, _TYPES[wanted]) and (wanted == "boolean" or not isinstance(value, bool))
    if not is_wanted:
        return f"{where} is of type {_type_name(value)}, not {wanted}"
    allowed = schema.get("enum")
    if isinstance(allowed, Sequence) and value not in allowed:
        return f"{where} is {value!r}, not one of {list(allowed)!r}"
    if isinstance(value, str):
        longest = schema.get("maxLength")
        if isinstance(longest, int) and len(value) > longest:
            return f"{where} has {len(value)} characters, more than {longest}"
    if isinstance(value, list):
        items = schema.get("items")
        if isinstance(items, Mapping):
            return next(filter(None, (schema_fault(v, items, f"{where}[{i}]") for i, v in enumerate(value))), "")
    if isinstance(value, dict):
        return _object_fault(value, schema, where)
    return ""


def _object_fault(value: Mapping[str, object], schema: Mapping[str, object], where: str) -> str:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    for name in required if isinstance(required, Sequence) else ():
        if name not in value:
            return f"{where} has no {name!r}"
    if schema.get("additionalProperties") is False:
        extra = sorted(set(value) - set(properties))
        if extra:
            return f"{where} has {extra[0]!r}, which the schema does not allow"
    for name, part in properties.items():
        if name in value:
            fault = schema_fault(value[name], part, f"{where}.{name}")
            if fault:
                return fault
    return ""


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _type_name(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {dict: "object", list: "array", str: "string", int: "integer", float: "number"}
    return names.get(type(value), type(value).__name__)
