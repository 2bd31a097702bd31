"""What the engines are known to do differently over HTTP, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineBehaviour:
    """The behaviour of one engine that the checks must know.

    Args:
        name: the engine.
        checks_model_name: false when the engine answers 200 to a model name it does not serve.
        forced_finish_reasons: finish reasons accepted with a call that `tool_choice` named.
        tool_parser_setting: what to change when a call comes back as text.
        tokenizes_chats: whether `/tokenize` takes messages.
        hidden_routes: routes that must not answer without a key; each is safe to ask with GET.

    """

    name: str
    checks_model_name: bool
    forced_finish_reasons: tuple[str, ...]
    tool_parser_setting: str
    tokenizes_chats: bool
    hidden_routes: tuple[str, ...]


# Sources.
# Model name: vLLM 0.32.0 entrypoints/openai/models/serving.py (404, NotFoundError); SGLang 0.5.23 run with a
#   wrong name (200).
# Forced call: vLLM says "stop" since pull request 25054, as OpenAI did then, and "tool_calls" in other
#   versions (pull requests 32018, 49496); SGLang says "tool_calls". Both are accepted from both.
# Routes: vLLM 0.33.0 entrypoints/serve (those of VLLM_SERVER_DEV_MODE, and of VLLM_ALLOW_RUNTIME_LORA_UPDATING); GET on
#   them is 404 where they are off, 405 or 200 where they are on. SGLang's /server_info shows every argument, keys too,
#   and is part of it: a gateway must hide it, so nothing is asked of SGLang by default.
# Tool parser: the engines' own argument parsers; SGLang has no --enable-auto-tool-choice.
ENGINES: dict[str, EngineBehaviour] = {
    "vllm": EngineBehaviour(
        name="vllm",
        checks_model_name=True,
        forced_finish_reasons=("stop", "tool_calls"),
        tool_parser_setting="enable-auto-tool-choice and tool-call-parser",
        tokenizes_chats=True,
        hidden_routes=("/server_info", "/collective_rpc", "/is_sleeping", "/pause", "/v1/load_lora_adapter"),
    ),
    "sglang": EngineBehaviour(
        name="sglang",
        checks_model_name=False,
        forced_finish_reasons=("stop", "tool_calls"),
        tool_parser_setting="tool-call-parser",
        tokenizes_chats=False,
        hidden_routes=(),
    ),
}
