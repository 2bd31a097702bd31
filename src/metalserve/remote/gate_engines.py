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

    """

    name: str
    checks_model_name: bool
    forced_finish_reasons: tuple[str, ...]
    tool_parser_setting: str


# Sources.
# Model name: vLLM 0.32.0 entrypoints/openai/models/serving.py (404, NotFoundError); SGLang 0.5.23 run with a
#   wrong name (200).
# Forced call: vLLM says "stop" since pull request 25054, as OpenAI did then, and "tool_calls" in other
#   versions (pull requests 32018, 49496); SGLang says "tool_calls". Both are accepted from both.
# Tool parser: the engines' own argument parsers; SGLang has no --enable-auto-tool-choice.
ENGINES: dict[str, EngineBehaviour] = {
    "vllm": EngineBehaviour(
        name="vllm",
        checks_model_name=True,
        forced_finish_reasons=("stop", "tool_calls"),
        tool_parser_setting="enable-auto-tool-choice and tool-call-parser",
    ),
    "sglang": EngineBehaviour(
        name="sglang",
        checks_model_name=False,
        forced_finish_reasons=("stop", "tool_calls"),
        tool_parser_setting="tool-call-parser",
    ),
}
