"""The checks that look deeper: counts, other scripts, several calls, thinking, long prompts, keys, hidden routes."""

from __future__ import annotations

import re

from . import gate_questions, http_client
from .gate_checks import CHAT_PATH, MODELS_PATH, Check, Session
from .gate_judge import (
    Answer,
    Usage,
    WrongAnswerError,
    excerpt,
    finish_reason_is,
    first_answer,
    json_object,
    number_is,
    same_city,
    status_is,
    tool_calls,
    usage_of,
)

TOKENIZE_PATH = "/tokenize"
FILLER = " one two three four five six seven eight nine ten"
# Room that a long prompt leaves for its answer, in tokens.
LONG_ANSWER_TOKENS = 8
# The filler is measured, not counted: so much of the wanted length is good enough.
LONG_SHARE = 0.97
SHORTEST_CONTEXT_TOKENS = 1024
THOUGHT_MARKS = ("<think>", "</think>")


def _asked(session: Session, prompt: str, **more: object) -> tuple[Answer, Usage, http_client.Response]:
    response = session.post_chat(session.chat_payload(prompt, **more))
    status_is(response.status, 200, response.body)
    data = json_object(response.body)
    return first_answer(data, response.body), usage_of(data, response.body), response


def check_usage(session: Session) -> str:
    """The prompt tokens of the usage are those that the engine's own tokenizer counts."""
    prompt = session.questions.arithmetic_prompt
    payload: dict[str, object] = {
        "model": session.model,
        "messages": [{"role": "user", "content": prompt}],
        "add_generation_prompt": True,
    }
    if session.chat_template_kwargs:
        payload["chat_template_kwargs"] = dict(session.chat_template_kwargs)
    response = http_client.request(
        session.endpoint,
        "POST",
        TOKENIZE_PATH,
        deadline=session.request_deadline(),
        payload=payload,
        api_key=session.api_key,
    )
    if response.status in (401, 403, 404, 405) or not session.engine.tokenizes_chats:
        return f"not compared: {TOKENIZE_PATH} gives HTTP {response.status} here"
    status_is(response.status, 200, response.body)
    count = json_object(response.body).get("count")
    _, usage, answer = _asked(session, prompt, max_tokens=1)
    if count != usage.prompt_tokens:
        raise WrongAnswerError(
            f"usage.prompt_tokens = {usage.prompt_tokens}",
            f"{count}, as {TOKENIZE_PATH} counts the same messages",
            change="the chat template, and what stands between this port and the engine",
            body=answer.body,
        )
    return f"{count} prompt tokens, as {TOKENIZE_PATH} counts them"


def check_unicode(session: Session) -> str:
    """Chinese is understood and answered in Chinese, without a broken character."""
    prompt = session.questions.greeting_prompt
    answer, _, response = _asked(session, prompt)
    finish_reason_is(answer, ("stop",), response.body)
    if "\ufffd" in answer.content:
        raise WrongAnswerError(
            f"a broken character in {answer.seen()}", "whole characters", change="the tokenizer's files"
        )
    if not re.search("[\u4e00-\u9fff]", answer.content):
        raise WrongAnswerError(answer.seen(), f"Chinese in answer to {prompt!r}", body=response.body)
    return f"answered {excerpt(answer.content, 60)}"


def check_tools_parallel(session: Session) -> str:
    """Asked for two cities, each call is whole: an id of its own, and arguments that fit the schema."""
    questions = session.questions
    answer, _, response = _asked(session, questions.parallel_prompt, tools=[questions.weather_tool], tool_choice="auto")
    if answer.finish_reason == "length":
        finish_reason_is(answer, ("tool_calls",), response.body)
    calls = tool_calls(
        answer, questions.weather_function, parser_setting=session.engine.tool_parser_setting, body=response.body
    )
    finish_reason_is(answer, ("tool_calls",), response.body)
    asked = [str(arguments.get("city")) for arguments in calls]
    strange = [city for city in asked if not any(same_city(city, known) for known in questions.parallel_cities)]
    if strange or len(asked) > len(questions.parallel_cities):
        raise WrongAnswerError(
            f"calls for {', '.join(asked)}", f"for {' and '.join(questions.parallel_cities)}", body=response.body
        )
    # Some models ask for one thing at a time; whether its calls come back whole is what counts here.
    return f"{len(calls)} whole call(s): {', '.join(asked)}"


def check_reasoning(session: Session) -> str:
    """A model that thinks has its thoughts in `reasoning` and only its answer in the content."""
    if session.thinking == "absent":
        answer, _, response = _asked(session, session.questions.arithmetic_prompt)
        _without_marks(answer, response)
        return "no thinking model: the content is free of its marks"
    answer, _, response = _asked(
        session,
        session.questions.arithmetic_prompt,
        chat_template_kwargs={**session.chat_template_kwargs, "enable_thinking": True},
        max_tokens=max(session.max_tokens, gate_questions.MAX_TOKENS_THINKING),
    )
    finish_reason_is(answer, ("stop",), response.body)
    _without_marks(answer, response)
    number_is(answer, session.questions.arithmetic_answer, response.body)
    if not answer.reasoning.strip():
        raise WrongAnswerError(
            f"{answer.seen()} and no reasoning",
            "reasoning beside the content",
            change="reasoning-parser of the engine (the catalogue's entry of the model)",
            body=response.body,
        )
    return f"answered {session.questions.arithmetic_answer} after {len(answer.reasoning)} characters of reasoning"


def _without_marks(answer: Answer, response: http_client.Response) -> None:
    found = [mark for mark in THOUGHT_MARKS if mark in answer.content]
    if found:
        raise WrongAnswerError(
            f"{found[0]} in {answer.seen()}",
            "thoughts outside the content",
            change="reasoning-parser of the engine (the catalogue's entry of the model)",
            body=response.body,
        )


def check_long_prompt(session: Session) -> str:
    """A prompt that nearly fills the context is answered, and one that passes it is refused with 400."""
    limit = _context_length(session)
    if limit is None:
        return "not asked: the model list does not tell max_model_len"
    if limit < SHORTEST_CONTEXT_TOKENS:
        return f"not asked: a context of {limit} tokens leaves no room for a long prompt"
    # The template and a question of one line, then the filler alone.
    few, many = (_asked(session, FILLER * times, max_tokens=1)[1].prompt_tokens for times in (2, 12))
    per_filler = (many - few) / 10
    base = few - 2 * per_filler
    wanted = min(limit, session.long_prompt_tokens) - LONG_ANSWER_TOKENS
    times = int((wanted * LONG_SHARE - base) / per_filler)
    _, usage, response = _asked(session, FILLER * times, max_tokens=LONG_ANSWER_TOKENS)
    if usage.prompt_tokens < wanted * LONG_SHARE * 0.9:
        raise WrongAnswerError(
            f"{usage.prompt_tokens} prompt tokens for a prompt of about {wanted * LONG_SHARE:.0f}",
            "the whole prompt, not the end of it",
            body=response.body,
        )
    told = f"{usage.prompt_tokens} prompt tokens of {limit} answered"
    if session.long_prompt_tokens < limit:
        return told
    over = session.post_chat(session.chat_payload(FILLER * int(limit / per_filler + 2), max_tokens=1))
    status_is(over.status, 400, over.body)
    return f"{told}; more than that refused with 400"


def _context_length(session: Session) -> int | None:
    response = http_client.request(
        session.endpoint, "GET", MODELS_PATH, deadline=session.request_deadline(), api_key=session.api_key
    )
    status_is(response.status, 200, response.body)
    data = json_object(response.body).get("data")
    for entry in data if isinstance(data, list) else []:
        if isinstance(entry, dict) and entry.get("id") == session.model:
            length = entry.get("max_model_len")
            return length if isinstance(length, int) and not isinstance(length, bool) and length > 0 else None
    return None


def check_key(session: Session) -> str:
    """With a key, nobody is answered without it or with another one."""
    if not session.api_key:
        return "no key is set: everybody who reaches this port is answered"
    payload = session.chat_payload(session.questions.arithmetic_prompt, max_tokens=1)
    for words, key in (("no key", None), ("a wrong key", f"not-{session.api_key}")):
        response = http_client.request(
            session.endpoint, "POST", CHAT_PATH, deadline=session.request_deadline(), payload=payload, api_key=key
        )
        if response.status not in (401, 403):
            raise WrongAnswerError(
                f"HTTP {response.status} with {words}",
                "HTTP 401",
                change="api_key_file of the deployment, and a restart of its engine",
                body=response.body,
            )
    return "refused without a key and with a wrong one"


def check_routes(session: Session) -> str:
    """Routes that must not be reachable are not. They are only ever asked with GET, which changes nothing."""
    routes = session.hidden_routes
    found = []
    for route in routes:
        response = http_client.request(session.endpoint, "GET", route, deadline=session.request_deadline())
        # 405: the route is there and wants another method.
        if response.status not in (401, 403, 404):
            found.append(f"{route} (HTTP {response.status})")
    if found:
        raise WrongAnswerError(
            f"{', '.join(found)} can be reached without a key",
            "HTTP 404, 401 or 403",
            change="VLLM_SERVER_DEV_MODE and VLLM_ALLOW_RUNTIME_LORA_UPDATING in environment, or the gateway's routes",
        )
    return f"{len(routes)} routes are hidden" if routes else "none to hide"


def check_names(session: Session) -> str:
    """Every further name answers: aliases, and LoRA adapters, of which nobody knows what they say."""
    names = [name for name in session.served_names if name != session.model]
    for name in names:
        response = session.post_chat(session.chat_payload(session.questions.arithmetic_prompt, model=name))
        status_is(response.status, 200, response.body)
        data = json_object(response.body)
        answer = first_answer(data, response.body)
        if not (answer.content or answer.reasoning or answer.tool_calls):
            raise WrongAnswerError(
                f"nothing in the answer of {name}",
                "at least one token of text",
                change="the adapter of that name in lora_adapters",
                body=response.body,
            )
        usage_of(data, response.body)
    return f"{', '.join(names)} answer{'s' * (len(names) == 1)}" if names else "no further names"


DEEP_CHECKS: dict[str, Check] = {
    "names": check_names,
    "usage": check_usage,
    "unicode": check_unicode,
    "tools_parallel": check_tools_parallel,
    "reasoning": check_reasoning,
    "long_prompt": check_long_prompt,
    "key": check_key,
    "routes": check_routes,
}
