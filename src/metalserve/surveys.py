"""Surveys of AWX, made from the roles' argument specifications, so that a question cannot ask what no role takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from metalserve.errors import Refusal

# AWX keeps every choice as a text, and hands the chosen text on.
_TRUTH = ("true", "false")
_TYPES = {"int": "integer", "float": "float", "str": "text", "path": "text"}
_QUESTION_KEYS = {"variable", "option", "question", "required", "min", "max"}
_LONGEST_TEXT, _LARGEST_NUMBER = 1024, 2**53


def read_options(roles: Path) -> dict[str, dict[str, Any]]:
    """The options that all roles below a directory take, by their names, which begin with the role's.

    Raises:
        Refusal: there is no role.
    """
    options: dict[str, dict[str, Any]] = {}
    for path in sorted(roles.glob("*/meta/argument_specs.yml")):
        options.update(yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]["main"].get("options") or {})
    if not options:
        raise Refusal(
            found=f"no role with argument specifications in {roles}",
            needed="the roles of this project",
            change="the path",
        )
    return options


def awx_survey(
    questions: Sequence[Mapping[str, Any]], name: str, options: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The survey of one job template as AWX takes it; an empty mapping, which removes one, for no questions.

    No question has a default: AWX hands defaults on as extra variables, and they would win over the inventory. What is
    not answered is not handed on either, as a text has at least one character.

    Args:
        questions: each with `question` and `variable`, and where they are needed `option` (the role's option that the
            variable becomes), `required`, `min` and `max`.
        name: the survey's name.
        options: what the roles take (`read_options`).

    Raises:
        Refusal: an option that no role has, that is secret, or whose type no question of AWX can ask.
    """
    if not questions:
        return {}
    return {
        "name": name,
        "description": "Unanswered questions leave it to the inventory.",
        "spec": [_question(each, options) for each in questions],
    }


def _question(given: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    unknown = sorted(set(given) - _QUESTION_KEYS)
    variable, option = str(given.get("variable")), str(given.get("option", given.get("variable")))
    if unknown or option not in options:
        raise Refusal(
            found=f"the question about {variable}: "
            + (f"unknown {unknown[0]}" if unknown else f"no role takes {option}"),
            needed=f"{', '.join(sorted(_QUESTION_KEYS))}, with an option of meta/argument_specs.yml",
            change="awx/data/job_templates.yml",
        )
    spec = options[option]
    question = {
        "question_name": given["question"],
        "question_description": str(spec["description"])
        if isinstance(spec["description"], str)
        else " ".join(spec["description"]),
        "required": bool(given.get("required", False)),
        "variable": variable,
        **_answer(variable, spec),
    }
    for bound in ("min", "max"):
        if bound in given:
            question[bound] = int(given[bound])
    return question


def _answer(variable: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Type, choices and bounds of the answer."""
    kind, choices = spec["type"], spec.get("choices")
    if spec.get("no_log"):
        raise Refusal(
            found=f"{variable} is secret",
            needed="a variable that may be read",
            change="a credential instead of a question",
        )
    if kind == "bool":
        return _choice("multiplechoice", _TRUTH)
    if kind == "str" and choices:
        return _choice("multiplechoice", choices)
    if kind == "list" and spec.get("elements") == "str" and choices:
        return _choice("multiselect", choices)
    if kind in _TYPES:
        low, high = (1, _LONGEST_TEXT) if _TYPES[kind] == "text" else (0, _LARGEST_NUMBER)
        return {"type": _TYPES[kind], "choices": "", "min": low, "max": high}
    raise Refusal(
        found=f"{variable} is a {kind}",
        needed="a boolean, a number, a text, or a list of texts with choices",
        change="the inventory; a survey cannot ask for it",
    )


def _choice(kind: str, choices: Sequence[str]) -> dict[str, Any]:
    return {"type": kind, "choices": "\n".join(choices), "min": None, "max": None}
