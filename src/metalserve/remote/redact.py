"""Texts without their secrets: what leaves a host for somebody who is to help with it."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Callable

MARK = "[REDACTED]"
# Shorter ones would be found in ordinary words.
_SHORTEST_SECRET = 6
# What the name of a secret ends with, in variables, options, headers and keys of YAML or JSON. `max_tokens` and
# `api_key_file` end otherwise.
_NAMES = (
    r"(?:api[_-]?key|apikey|access[_-]?key|token|passw(?:or)?d|passphrase|secret|credentials?|key_sha256|authorization)"
)
_VALUE = r"(?:\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|[^\s,;\"'}\]&]+)"
_Replace = Callable[["re.Match[str]"], str]


def _kept(match: re.Match[str]) -> str:
    """What stands before the secret stays, with the quotes around it."""
    value = match.group("value")
    if value.lstrip("\"'").startswith(MARK.rstrip("]")):
        return match.group(0)
    quote = value[0] if value[0] in "\"'" else ""
    return f"{match.group('before')}{quote}{MARK}{quote}"


_RULES: tuple[tuple[re.Pattern[str], _Replace], ...] = (
    # A private key, also one whose end is cut off.
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
        lambda match: MARK,
    ),
    # https://user:password@host
    (re.compile(r"(?P<before>\b[a-z][a-z0-9+.-]*://)[^\s/@\"']+@", re.IGNORECASE), lambda m: f"{m['before']}{MARK}@"),
    # Authorization: Bearer x, with whatever stands between.
    (re.compile(r"(?P<before>\b(?:Bearer|Basic)\s+)(?P<value>[A-Za-z0-9._~+/=-]{6,})", re.IGNORECASE), _kept),
    # NAME=x, name: x, "name": "x"
    (
        re.compile(rf"(?P<before>{_NAMES}[\"']?\s*[:=]\s*)(?P<value>(?!(?:Bearer|Basic)\b){_VALUE})", re.IGNORECASE),
        _kept,
    ),
    # --name x, also as two items of a list, and HAProxy's `password x` and `stats auth user:x`
    (re.compile(rf"(?P<before>--[\w-]*{_NAMES}[\"']?(?:\s*,\s*|\s+))(?P<value>{_VALUE})", re.IGNORECASE), _kept),
    (re.compile(r"(?P<before>\bpassword\s+)(?P<value>(?!is\b|was\b|of\b)[^\s:=]\S{5,})"), _kept),
    (re.compile(r"(?P<before>\bauth\s+\S+?:)(?P<value>\S+)"), _kept),
    # Forms that are secrets wherever they stand: Hugging Face, OpenAI and this project's keys, GitHub, AWS, JSON Web
    # Tokens.
    (
        re.compile(
            r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}"
            r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)"
        ),
        lambda match: MARK,
    ),
)


def redact(text: str, secrets: Collection[str] = ()) -> tuple[str, int]:
    """The text without secrets, and how many places were redacted.

    Args:
        text: what is to leave the host.
        secrets: values that are known to be secret, such as the contents of key files. Wherever they stand they go.
    """
    count = 0
    for secret in sorted({each for each in secrets if len(each) >= _SHORTEST_SECRET}, key=len, reverse=True):
        count += text.count(secret)
        text = text.replace(secret, MARK)
    for pattern, replace in _RULES:
        # What is redacted already stays, and counts once.
        count += sum(replace(match) != match.group(0) for match in pattern.finditer(text))
        text = pattern.sub(replace, text)
    return text, count
