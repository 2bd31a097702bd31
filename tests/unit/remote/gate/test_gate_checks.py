"""Each check passes against a right server, and refuses each kind of wrong answer in the right words."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from gate_server import ALIAS, MODEL, GateServer

from metalserve.remote import gate_questions
from metalserve.remote.gate import CHECK_NAMES, GateRow, run_gate


def row_of(server: GateServer, check: str, **options: Any) -> GateRow:
    options.setdefault("timeout_seconds", 10)
    options.setdefault("burst_size", 4)
    result = run_gate(server.url, MODEL, checks=[check], **options)
    assert [row.name for row in result.rows] == [check]
    row = result.rows[0]
    assert result.passed is row.ok
    assert "\n" not in row.detail
    return row


def refused(server: GateServer, check: str, *words: str, **options: Any) -> str:
    row = row_of(server, check, **options)
    assert not row.ok, row
    for word in words:
        assert word in row.detail, f"{word!r} is not in {row.detail!r}"
    return row.detail


def set_content(text: str | None, reason: str = "stop") -> Any:
    def edit(answer: dict[str, Any]) -> None:
        answer["choices"][0]["message"] = {"role": "assistant", "content": text}
        answer["choices"][0]["finish_reason"] = reason

    return edit


def set_usage(**counts: Any) -> Any:
    return lambda answer: answer["usage"].update(counts)


def set_call(**fields: Any) -> Any:
    def edit(answer: dict[str, Any]) -> None:
        call = answer["choices"][0]["message"]["tool_calls"][0]
        if "id" in fields:
            call["id"] = fields["id"]
        call["function"].update({k: v for k, v in fields.items() if k != "id"})

    return edit


RIGHT = {
    "models": "serves tiny, tiny-alias",
    "chat": "answered 42; usage 20 + 3 = 23 tokens",
    "stream": "answered 42 in 2 chunk(s), the first after ",
    "tool_forced": 'called get_weather with {"city": "Berlin"}',
    "tool_auto": "called get_weather for Berlin",
    "json_schema": 'answered {"city": "Paris", "country": "France"}',
    "unknown_model": "refused with 404: The model `metalserve-gate-no-such-model` does not exist.",
    "names": "no further names",
    "usage": "20 prompt tokens, as /tokenize counts them",
    "unicode": "answered 你好！很高兴见到你。",
    "tools_parallel": "2 whole call(s): Berlin, Paris",
    "reasoning": "no thinking model: the content is free of its marks",
    "long_prompt": "39",
    "key": "no key is set: everybody who reaches this port is answered",
    "routes": "5 routes are hidden",
    "burst": "4 of 4 right at once: ",
}


def test_every_check_has_a_row_here() -> None:
    assert tuple(RIGHT) == CHECK_NAMES


@pytest.mark.parametrize("check", CHECK_NAMES)
def test_a_right_server_passes(server: GateServer, check: str) -> None:
    row = row_of(server, check)
    assert row.ok, row
    assert row.detail.startswith(RIGHT[check])


# Checks that ask more, or other things, than one question of their own have their own tests below.
OF_SEVERAL = ("names", "usage", "reasoning", "long_prompt", "key", "routes")
ONE_QUESTION = [name for name in CHECK_NAMES if name not in OF_SEVERAL]
ASKING = [name for name in ONE_QUESTION if name not in ("models", "unknown_model")]
KIND_OF_CHECK = {"burst": "stream"}


@pytest.mark.parametrize("check", ONE_QUESTION)
def test_http_500_with_its_body(server: GateServer, check: str) -> None:
    body = b'{"error": {"message": "EngineDeadError"}}'
    server.raw[KIND_OF_CHECK.get(check, check)] = (500, "application/json", body)
    expected = 404 if check == "unknown_model" else 200
    refused(
        server,
        check,
        f"found HTTP 500; expected HTTP {expected}",
        "Body: ",
        "EngineDeadError",
    )


@pytest.mark.parametrize("check", [name for name in ONE_QUESTION if name not in ("stream", "unknown_model", "burst")])
def test_garbage_instead_of_json(server: GateServer, check: str) -> None:
    server.raw[KIND_OF_CHECK.get(check, check)] = (200, "text/html", b"<html>It works!</html>" + b"x" * 500)
    detail = refused(server, check, "found a body that is not JSON; expected a JSON object", "<html>It works!</html>")
    shown = detail.split("Body: ")[1]
    assert shown.endswith(" ...")
    assert shown.count("x") == 200 - len("<html>It works!</html>")


@pytest.mark.parametrize("check", ONE_QUESTION)
def test_slower_than_the_limit(server: GateServer, check: str) -> None:
    server.delay_seconds[KIND_OF_CHECK.get(check, check)] = 3
    row = row_of(server, check, timeout_seconds=0.2)
    assert not row.ok
    assert "no complete answer within 0." in row.detail
    assert row.seconds < 1.5


@pytest.mark.parametrize("check", ASKING)
def test_no_choice_in_the_answer(server: GateServer, check: str) -> None:
    if KIND_OF_CHECK.get(check, check) == "stream":
        server.edit_events = lambda events: [events[-2], events[-1]]
        refused(server, check, "found a stream with the content ''; expected chunks with content")
        return
    server.edit_answer[KIND_OF_CHECK.get(check, check)] = lambda answer: answer.update(choices=[])
    refused(server, check, "found no choices[0].message; expected a chat completion with one choice")


@pytest.mark.parametrize("check", ASKING)
def test_cut_off_by_max_tokens(server: GateServer, check: str) -> None:
    server.edit_answer[KIND_OF_CHECK.get(check, check)] = set_content("Let me think about", "length")
    refused(server, check, "finish_reason 'length' after the content 'Let me think about'", "Look at: max_tokens")


# models


def test_models_without_the_served_name(server: GateServer) -> None:
    server.names = ["another"]
    refused(server, "models", "found the models another; expected also tiny", "served names of the deployment")


def test_models_without_one_of_the_served_names(server: GateServer) -> None:
    server.names = [MODEL]
    refused(server, "models", "found the models tiny; expected also tiny-alias", served_names=[MODEL, ALIAS])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"object": "list", "data": []}, "found no models in the list"),
        ({"detail": "hello"}, "found no models in the list"),
        ({"data": [{"object": "model"}]}, "found a model without an id"),
        ([], "found JSON of type array"),
        (None, "found JSON of type null"),
    ],
)
def test_models_in_a_wrong_form(server: GateServer, body: object, words: str) -> None:
    server.raw["models"] = (200, "application/json", json.dumps(body).encode())
    refused(server, "models", words)


def test_wrong_key(server: GateServer) -> None:
    server.api_key = "right-key"
    refused(server, "models", "found HTTP 401", "Look at: the API key (api_key_file)", api_key="wrong-key")
    assert row_of(server, "models", api_key="right-key").ok


def test_an_adapter_of_sglang_is_listed_by_its_own_name(server: GateServer) -> None:
    server.names = [MODEL, "sql"]
    asked = [MODEL, f"{MODEL}:sql"]
    assert row_of(server, "models", served_names=asked, engine="sglang").ok
    refused(server, "models", f"expected also {MODEL}:sql", served_names=asked)


# names


def test_every_further_name_is_asked_once(server: GateServer) -> None:
    server.names = [MODEL, ALIAS, "sql"]
    asked = []
    server.edit_answer["chat"] = lambda answer: asked.append(answer["model"])
    row = row_of(server, "names", served_names=[MODEL, ALIAS, "sql"])
    assert row.ok
    assert row.detail == f"{ALIAS}, sql answer"
    assert asked == [ALIAS, "sql"]
    assert row_of(server, "names", served_names=[MODEL, "sql"]).detail == "sql answers"


def test_what_an_adapter_says_is_its_own_matter(server: GateServer) -> None:
    server.names = [MODEL, "sql"]
    server.edit_answer["chat"] = set_content("SELECT 17 + 25", "length")
    assert row_of(server, "names", served_names=[MODEL, "sql"]).ok


def test_an_adapter_that_is_not_served_or_says_nothing(server: GateServer) -> None:
    server.names = [MODEL]
    refused(server, "names", "found HTTP 404; expected HTTP 200", served_names=[MODEL, "sql"])
    server.names = [MODEL, "sql"]
    server.edit_answer["chat"] = set_content("")
    wrong = "found nothing in the answer of sql; expected at least one token of text"
    refused(server, "names", wrong, "lora_adapters", served_names=[MODEL, "sql"])


# chat


@pytest.mark.parametrize("content", ["43", "", None, "142", "42.5", "-42", "forty-two"])
def test_chat_with_a_wrong_number(server: GateServer, content: str | None) -> None:
    server.edit_answer["chat"] = set_content(content)
    refused(
        server,
        "chat",
        f"found the content {content or ''!r}; expected the number 42 in the content",
        "Body: {",
    )


@pytest.mark.parametrize("content", ["42", "The answer is **42**.", "17 + 25 = 42"])
def test_chat_with_the_number_in_a_sentence(server: GateServer, content: str) -> None:
    server.edit_answer["chat"] = set_content(content)
    assert row_of(server, "chat").ok


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_chat_with_the_answer_lost_in_reasoning(server: GateServer, field: str) -> None:
    def edit(answer: dict[str, Any]) -> None:
        answer["choices"][0]["message"] = {"role": "assistant", "content": None, field: "It is 42."}

    server.edit_answer["chat"] = edit
    refused(server, "chat", "found no content, only reasoning 'It is 42.'")


def test_chat_with_a_wrong_finish_reason(server: GateServer) -> None:
    server.edit_answer["chat"] = set_content("42", "abort")
    refused(server, "chat", "finish_reason 'abort' after the content '42'; expected finish_reason 'stop'")


@pytest.mark.parametrize("check", ["chat", "tool_forced", "tool_auto", "json_schema", "stream"])
def test_usage_that_does_not_add_up(server: GateServer, check: str) -> None:
    server.edit_answer[check] = set_usage(total_tokens=40)
    refused(
        server,
        check,
        "found usage of 20 prompt + 3 completion tokens with a total of 40",
        "expected a total of 23",
    )


@pytest.mark.parametrize("count", [0, -1, None, "20", True, 2.5])
def test_usage_that_is_no_count(server: GateServer, count: object) -> None:
    server.edit_answer["chat"] = set_usage(prompt_tokens=count)
    refused(server, "chat", f"found usage.prompt_tokens = {count!r}; expected a whole number above 0")


def test_no_usage(server: GateServer) -> None:
    server.edit_answer["chat"] = lambda answer: answer.update(usage=None)
    refused(
        server,
        "chat",
        "found no usage; expected usage with prompt_tokens, completion_tokens and total_tokens",
    )


# stream


def test_stream_with_a_wrong_number(server: GateServer) -> None:
    server.edit_answer["stream"] = set_content("24")
    refused(server, "stream", "found the content '24'; expected the number 42", 'Body: data: {"id"')


def test_stream_with_a_wrong_finish_reason(server: GateServer) -> None:
    server.edit_answer["stream"] = set_content("42", "abort")
    refused(server, "stream", "found finish_reason 'abort'")


def test_stream_without_usage(server: GateServer) -> None:
    server.edit_events = lambda events: [event for event in events if "usage" not in event]
    refused(server, "stream", "found no usage in the last chunk; expected usage")


def test_stream_with_usage_before_the_last_chunk(server: GateServer) -> None:
    server.edit_events = lambda events: [*events[:-3], events[-2], events[-3], events[-1]]
    refused(server, "stream", "found no usage in the last chunk")


def test_stream_without_done(server: GateServer) -> None:
    server.edit_events = lambda events: events[:-1]
    refused(server, "stream", "found a stream that ends without [DONE] after 5 events; expected data: [DONE]")


def test_stream_that_goes_on_after_done(server: GateServer) -> None:
    server.edit_events = lambda events: [*events, events[0]]
    refused(server, "stream", "found data after [DONE]")


def test_stream_cut_in_the_middle(server: GateServer) -> None:
    server.cut_stream_after = 2
    refused(server, "stream", "the connection ended in the middle of the answer")


def test_stream_with_an_error_inside(server: GateServer) -> None:
    server.edit_events = lambda events: [events[0], '{"error": {"message": "out of blocks"}}', "[DONE]"]
    refused(server, "stream", "found an error inside the stream", "out of blocks")


@pytest.mark.parametrize(
    ("event", "words"), [("nonsense", "a chunk that is not JSON"), ("[1]", "a chunk that is not an object")]
)
def test_stream_with_a_chunk_of_garbage(server: GateServer, event: str, words: str) -> None:
    server.edit_events = lambda events: [events[0], event, *events[1:]]
    refused(server, "stream", words)


def test_stream_that_is_no_stream(server: GateServer) -> None:
    server.raw["stream"] = (200, "application/json", b'{"choices": []}')
    refused(
        server,
        "stream",
        "found the content type 'application/json'; expected text/event-stream",
        '{"choices"',
    )


# tools


@pytest.mark.parametrize("check", ["tool_forced", "tool_auto"])
def test_tool_call_as_plain_text(server: GateServer, check: str) -> None:
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nBerlin"
    server.edit_answer[check] = set_content(text)
    refused(
        server,
        check,
        "found no tool call but the content '<tool_call> <function=get_weather>",
        "expected one call of get_weather",
        "Look at: enable-auto-tool-choice and tool-call-parser and the chat template",
    )


def test_tool_parser_setting_of_sglang(server: GateServer) -> None:
    server.edit_answer["tool_auto"] = set_content("<tool_call>")
    detail = refused(server, "tool_auto", "Look at: tool-call-parser and", engine="sglang")
    assert "enable-auto-tool-choice" not in detail


@pytest.mark.parametrize("check", ["tool_forced", "tool_auto"])
@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"arguments": '{"city": "Ber'}, 'found arguments that are not JSON: \'{"city": "Ber\''),
        ({"arguments": {"city": "Berlin"}}, "found arguments of type object; expected arguments as a string"),
        ({"arguments": "[]"}, "arguments is of type array, not object"),
        ({"arguments": "{}"}, "arguments has no 'city'"),
        ({"arguments": '{"city": 7}'}, "arguments.city is of type integer, not string"),
        ({"arguments": json.dumps({"city": "B" * 41})}, "arguments.city has 41 characters, more than 40"),
        (
            {"arguments": '{"city": "Berlin", "day": "today"}'},
            "arguments has 'day', which the schema does not allow",
        ),
        ({"name": "get_time"}, "found a call of 'get_time'; expected a call of get_weather"),
        ({"id": ""}, "found a call with the id ''"),
    ],
)
def test_tool_call_in_a_wrong_form(server: GateServer, check: str, call: dict[str, Any], words: str) -> None:
    server.edit_answer[check] = set_call(**call)
    refused(server, check, words)


def test_tool_called_twice(server: GateServer) -> None:
    def edit(answer: dict[str, Any]) -> None:
        answer["choices"][0]["message"]["tool_calls"] *= 2

    server.edit_answer["tool_auto"] = edit
    refused(server, "tool_auto", "found 2 tool calls; expected one call of get_weather")


def test_tool_call_without_a_function(server: GateServer) -> None:
    def edit(answer: dict[str, Any]) -> None:
        answer["choices"][0]["message"]["tool_calls"] = [{"id": "1"}]

    server.edit_answer["tool_auto"] = edit
    refused(server, "tool_auto", "found a tool call without a function")


@pytest.mark.parametrize("city", ["Paris", "", "East Berlin"])
def test_tool_call_for_the_wrong_city(server: GateServer, city: str) -> None:
    server.edit_answer["tool_auto"] = set_call(arguments=json.dumps({"city": city}))
    refused(server, "tool_auto", f"found the city {city!r} in the call; expected 'Berlin'")


@pytest.mark.parametrize("city", ["berlin", "Berlin, Germany"])
def test_tool_call_for_the_right_city_in_other_words(server: GateServer, city: str) -> None:
    server.edit_answer["tool_auto"] = set_call(arguments=json.dumps({"city": city}))
    assert row_of(server, "tool_auto").ok


def test_tool_auto_must_end_with_tool_calls(server: GateServer) -> None:
    def edit(answer: dict[str, Any]) -> None:
        answer["choices"][0]["finish_reason"] = "stop"

    server.edit_answer["tool_auto"] = edit
    refused(server, "tool_auto", "found finish_reason 'stop'", "expected finish_reason 'tool_calls'")


@pytest.mark.parametrize("check", ["tool_forced", "tool_auto"])
def test_tool_call_that_does_not_end(server: GateServer, check: str) -> None:
    """vLLM gives the call that it could read although the model went on until there was no room."""

    def edit(answer: dict[str, Any]) -> None:
        answer["choices"][0]["finish_reason"] = "length"

    server.edit_answer[check] = edit
    refused(server, check, "found finish_reason 'length' after 1 tool call(s); expected finish_reason")


@pytest.mark.parametrize("reason", ["stop", "tool_calls"])
def test_tool_forced_may_end_with_either_reason(server: GateServer, reason: str) -> None:
    def edit(answer: dict[str, Any]) -> None:
        answer["choices"][0]["finish_reason"] = reason

    server.edit_answer["tool_forced"] = edit
    assert row_of(server, "tool_forced").ok


def test_tool_forced_does_not_judge_the_city(server: GateServer) -> None:
    server.edit_answer["tool_forced"] = set_call(arguments='{"city": "Paris"}')
    assert row_of(server, "tool_forced").ok


# json_schema


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("The capital is Paris.", "found the content 'The capital is Paris.', which is not JSON"),
        ('{"city": "Paris"}', "the answer has no 'country'; expected JSON that fits the schema"),
        ('{"city": "Paris", "country": 33}', "the answer.country is of type integer, not string"),
        (
            '{"city": "Paris", "country": "France", "x": 1}',
            "the answer has 'x', which the schema does not allow",
        ),
        (
            json.dumps({"city": "P" * 41, "country": "France"}),
            "the answer.city has 41 characters, more than 40",
        ),
        ('["Paris", "France"]', "the answer is of type array, not object"),
        ('{"city": "Lyon", "country": "France"}', "found city = 'Lyon'; expected 'Paris'"),
        ("[" * 100_000, "which is not JSON"),
    ],
)
def test_json_schema_violated(server: GateServer, content: str, words: str) -> None:
    server.edit_answer["json_schema"] = set_content(content)
    refused(server, "json_schema", words)


# unknown_model


def test_unknown_model_answered(server: GateServer) -> None:
    server.accepts_any_model = True
    refused(server, "unknown_model", "found HTTP 200; expected HTTP 404", "Body: {")


def test_unknown_model_answered_by_sglang(server: GateServer) -> None:
    server.accepts_any_model = True
    row = row_of(server, "unknown_model", engine="sglang")
    assert row.ok
    assert row.detail == "sglang answers to any model name; the gateway must check it"


@pytest.mark.parametrize("body", [b"{}", b'{"error": {}}', b'{"error": null}'])
def test_unknown_model_without_an_error_body(server: GateServer, body: bytes) -> None:
    server.raw["unknown_model"] = (404, "application/json", body)
    refused(server, "unknown_model", "found HTTP 404 without an error message; expected a body with error.message")


@pytest.mark.parametrize("body", [b'{"error": "no such model"}', b'{"object": "error", "message": "no such model"}'])
def test_unknown_model_with_other_forms_of_the_error(server: GateServer, body: bytes) -> None:
    server.raw["unknown_model"] = (404, "application/json", body)
    assert row_of(server, "unknown_model").detail == "refused with 404: no such model"


def test_unknown_model_with_garbage(server: GateServer) -> None:
    server.raw["unknown_model"] = (404, "text/plain", b"not found")
    refused(server, "unknown_model", "found a body that is not JSON")


# burst


def test_burst_asks_all_at_once(server: GateServer) -> None:
    server.delay_seconds["stream"] = 0.3
    row = row_of(server, "burst", burst_size=16)
    assert row.ok, row
    assert row.detail.startswith("16 of 16 right at once: ")
    # The delay is before the first byte, and the first token is counted from the request on.
    assert re.search(
        r" requests/s, [\d.]+ tokens/s; first token after 0\.[3-9]\d s \(median\), \d\.\d\d s \(slowest\); slowest ",
        row.detail,
    ), row.detail
    assert server.most_in_flight == 16


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda answer: {"status": 503, "error": "busy"}, "found HTTP 503"),
        (set_content("41"), "found the content '41'"),
        (set_usage(total_tokens=9), "with a total of 9"),
    ],
)
def test_burst_with_one_of_sixteen_wrong(server: GateServer, edit: Any, words: str) -> None:
    server.edit_nth_chat[9] = edit
    detail = refused(server, "burst", "found 15 of 16 requests answered right; ", words, burst_size=16)
    assert "; expected 16 of 16. First failure: request " in detail


# usage


def test_usage_that_the_tokenizer_does_not_confirm(server: GateServer) -> None:
    server.token_count = {"count": 27}
    refused(server, "usage", "found usage.prompt_tokens = 20; expected 27, as /tokenize counts the same messages")


@pytest.mark.parametrize("status", [403, 404])
def test_usage_where_the_tokenizer_cannot_be_reached(server: GateServer, status: int) -> None:
    server.raw["tokenize"] = (status, "application/json", b"{}")
    row = row_of(server, "usage")
    assert row.ok
    assert row.detail == f"not compared: /tokenize gives HTTP {status} here"


def test_usage_with_a_broken_tokenizer(server: GateServer) -> None:
    server.raw["tokenize"] = (500, "text/plain", b"boom")
    refused(server, "usage", "found HTTP 500; expected HTTP 200", "boom")


# unicode


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("Hello!", "found the content 'Hello!'; expected Chinese in answer to '你好'"),
        ("你\ufffd\ufffd", "found a broken character in the content"),
    ],
)
def test_an_answer_in_other_letters(server: GateServer, content: str, words: str) -> None:
    server.edit_answer["unicode"] = set_content(content)
    refused(server, "unicode", words)


# tools_parallel


def edit_calls(change: Any) -> Any:
    return lambda answer: change(answer["choices"][0]["message"]["tool_calls"])


def test_one_call_at_a_time_is_a_way_to_work_too(server: GateServer) -> None:
    server.edit_answer["tools_parallel"] = edit_calls(lambda calls: calls.__delitem__(1))
    row = row_of(server, "tools_parallel")
    assert (row.ok, row.detail) == (True, "1 whole call(s): Berlin")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda calls: calls.clear(), "found no tool call but"),
        (lambda calls: calls[1].update(id=calls[0]["id"]), "found calls with the ids call-Berlin, call-Berlin"),
        (lambda calls: calls[1]["function"].update(arguments='{"city": "Pa'), "found arguments that are not JSON"),
        (lambda calls: calls[1]["function"].update(arguments="{}"), "arguments has no 'city'"),
        (lambda calls: calls[1]["function"].update(arguments='{"city": "Rome"}'), "found calls for Berlin, Rome"),
        (lambda calls: calls.append({**calls[0], "id": "more"}), "found calls for Berlin, Paris, Berlin"),
    ],
)
def test_calls_that_are_not_whole(server: GateServer, change: Any, words: str) -> None:
    server.edit_answer["tools_parallel"] = edit_calls(change)
    refused(server, "tools_parallel", words)


# reasoning


def test_thoughts_beside_the_answer(server: GateServer) -> None:
    row = row_of(server, "reasoning", thinking="off")
    assert (row.ok, row.detail) == (True, "answered 42 after 14 characters of reasoning")
    assert server.requests[0]["chat_template_kwargs"] == {"enable_thinking": True}
    assert server.requests[0]["max_tokens"] == gate_questions.MAX_TOKENS_THINKING


def test_thoughts_in_the_content(server: GateServer) -> None:
    server.edit_answer["reasoning"] = set_content("<think>hm</think>42")
    refused(server, "reasoning", "found <think> in the content", "Look at: reasoning-parser", thinking="off")
    server.edit_answer["chat"] = set_content("hm</think>42")
    refused(server, "reasoning", "found </think> in the content", "Look at: reasoning-parser")


def test_no_thoughts_at_all(server: GateServer) -> None:
    server.edit_answer["reasoning"] = set_content("42")
    refused(server, "reasoning", "and no reasoning; expected reasoning beside the content", thinking="on")


# long_prompt


def test_a_prompt_that_nearly_fills_the_context(server: GateServer) -> None:
    row = row_of(server, "long_prompt")
    assert row.ok, row
    assert row.detail == "3965 prompt tokens of 4096 answered; more than that refused with 400"


def test_no_longer_than_wished(server: GateServer) -> None:
    row = row_of(server, "long_prompt", long_prompt_tokens=1000)
    assert row.ok, row
    assert row.detail == "955 prompt tokens of 4096 answered"
    longest = max(len(request["messages"][0]["content"].split()) for request in server.requests)
    assert longest < 1000


@pytest.mark.parametrize(
    ("length", "words"),
    [(None, "not asked: the model list does not tell"), (100, "not asked: a context of 100 tokens")],
)
def test_no_room_to_ask(server: GateServer, length: int | None, words: str) -> None:
    server.context_length = length
    row = row_of(server, "long_prompt")
    assert row.ok
    assert row.detail.startswith(words)


def test_a_prompt_that_was_cut_short(server: GateServer) -> None:
    server.prompt_tokens = lambda prompt: min(len(prompt.split()) + 5, 2000)
    refused(server, "long_prompt", "found 2000 prompt tokens for a prompt of about 3965; expected the whole prompt")


def test_a_prompt_that_is_too_long_and_answered(server: GateServer) -> None:
    server.prompt_tokens = lambda prompt: min(len(prompt.split()) + 5, 4000)
    refused(server, "long_prompt", "found HTTP 200; expected HTTP 400")


# key


def test_the_key_is_wanted(server: GateServer) -> None:
    server.api_key = "sk-right"
    row = row_of(server, "key", api_key="sk-right")
    assert (row.ok, row.detail) == (True, "refused without a key and with a wrong one")


def test_a_key_that_nobody_asks_for(server: GateServer) -> None:
    refused(server, "key", "found HTTP 200 with no key; expected HTTP 401", "api_key_file", api_key="sk-right")


# routes


@pytest.mark.parametrize("status", [200, 405])
def test_a_route_that_can_be_reached(server: GateServer, status: int) -> None:
    server.routes["/server_info"] = status
    refused(
        server, "routes", f"found /server_info (HTTP {status}) can be reached without a key", "VLLM_SERVER_DEV_MODE"
    )


def test_routes_of_one_s_own(server: GateServer) -> None:
    server.routes["/docs"] = 200
    assert row_of(server, "routes").ok
    refused(server, "routes", "/docs (HTTP 200)", hidden_routes=["/docs", "/none"])
    assert row_of(server, "routes", engine="sglang").detail == "none to hide"


# what is sent


def test_requests_are_deterministic_and_bounded(server: GateServer) -> None:
    run_gate(server.url, MODEL, timeout_seconds=10, burst_size=1)
    assert server.requests
    for request in server.requests:
        assert request["temperature"] == 0
        assert request["max_tokens"] in (1, 8, gate_questions.MAX_TOKENS)
        assert "chat_template_kwargs" not in request


@pytest.mark.parametrize(
    ("options", "kwargs", "max_tokens"),
    [
        ({"thinking": "off"}, {"enable_thinking": False}, gate_questions.MAX_TOKENS),
        ({"thinking": "on"}, {"enable_thinking": True}, gate_questions.MAX_TOKENS_THINKING),
        ({"thinking": "on", "max_tokens": 99}, {"enable_thinking": True}, 99),
        ({"chat_template_kwargs": {"style": "short"}}, {"style": "short"}, gate_questions.MAX_TOKENS),
        (
            {"thinking": "off", "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
            256,
        ),
    ],
)
def test_thinking_reaches_the_chat_template(
    server: GateServer, options: dict[str, Any], kwargs: dict[str, object], max_tokens: int
) -> None:
    assert row_of(server, "chat", **options).ok
    assert server.requests[0]["chat_template_kwargs"] == kwargs
    assert server.requests[0]["max_tokens"] == max_tokens
