"""What AWX 24.6 does with surveys: which it takes, which answers it takes, and which variables a job gets from them.

Written after its views (JobTemplateSurveySpec) and its models (SurveyJobTemplateMixin), in words of our own.
"""

from __future__ import annotations

from typing import Any

TYPES = {
    "text": str,
    "textarea": str,
    "password": str,
    "multiplechoice": str,
    "multiselect": str,
    "integer": int,
    "float": float,
}


def survey_error(survey: dict[str, Any]) -> str | None:
    """Why the API would refuse a survey."""
    for field, kind in (("name", str), ("description", str), ("spec", list)):
        if not isinstance(survey.get(field), kind):
            return f"Field '{field}' is missing from survey spec."
    if not survey["spec"]:
        return "'spec' doesn't contain any items."
    seen = set()
    for index, item in enumerate(survey["spec"]):
        for field, kind in (("type", str), ("question_name", str), ("variable", str), ("required", bool)):
            if not isinstance(item.get(field), kind):
                return f"'{field}' in survey question {index} expected to be {kind.__name__}."
        if item["variable"] in seen:
            return f"'variable' '{item['variable']}' duplicated in survey question {index}."
        seen.add(item["variable"])
        if item["type"] not in TYPES:
            return f"'{item['type']}' in survey question {index} is not one of '{', '.join(TYPES)}'."
        for bound in ("min", "max"):
            if item.get(bound) is not None and type(item[bound]) is not int:
                return f"The {bound} limit in survey question {index} expected to be integer."
        default = item.get("default", "")
        if default != "" and not isinstance(default, TYPES[item["type"]]):
            return f"Default value in survey question {index} has the wrong type."
        if item["type"].startswith("multi") and not choices(item):
            return f"Survey question {index} of type {item['type']} must specify choices."
    return None


def choices(item: dict[str, Any]) -> list[str]:
    """A question's choices."""
    given = item.get("choices") or []
    return [line for line in given.splitlines() if line.strip()] if isinstance(given, str) else list(given)


def answer_errors(survey: dict[str, Any], answers: dict[str, Any]) -> list[str]:
    """What the API would say against a launch with these answers."""
    errors = []
    for item in survey.get("spec", []):
        name = item["variable"]
        if name not in answers:
            errors += [f"'{name}' value missing"] if item["required"] else []
            continue
        value, low, high = answers[name], item.get("min"), item.get("max")
        if item["type"] == "multiselect":
            if type(value) is not list or any(each not in choices(item) for each in value):
                errors.append(f"Value {value} for '{name}' expected to be a list out of {choices(item)}.")
        elif item["type"] == "multiplechoice":
            if value not in choices(item):
                errors.append(f"Value {value} for '{name}' expected to be one of {choices(item)}.")
        elif type(value) is not TYPES[item["type"]] and not (item["type"] == "float" and type(value) is int):
            errors.append(f"Value {value} for '{name}' expected to be {item['type']}.")
        else:
            size = len(value) if isinstance(value, str) else value
            if (low is not None and size < low) or (high is not None and size > high):
                errors.append(f"'{name}' value {value} must be between {low} and {high}.")
    unknown = sorted(set(answers) - {item["variable"] for item in survey.get("spec", [])})
    if unknown:
        errors.append(f"Variables {', '.join(unknown)} are not allowed on launch.")
    return errors


def job_variables(survey: dict[str, Any], answers: dict[str, Any]) -> dict[str, Any]:
    """The extra variables of a job: the defaults of all questions, and over them the answers.

    Raises:
        ValueError: the launch would be refused.
    """
    errors = answer_errors(survey, answers)
    if errors:
        raise ValueError("; ".join(errors))
    defaults = {
        item["variable"]: item["default"]
        for item in survey.get("spec", [])
        if item.get("default") is not None and not answer_errors({"spec": [item]}, {item["variable"]: item["default"]})
    }
    return {**defaults, **answers}
