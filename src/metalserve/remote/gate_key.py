"""Reads the API key that the gate sends."""

from __future__ import annotations

from pathlib import Path


def read_api_key(path: str | Path) -> str:
    """The key in a file: its only line, without the spaces around it.

    Raises:
        ValueError: the file cannot be read, or does not hold one printable ASCII word. The content is never
            quoted.

    """
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"the API key file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"the API key file {path} is not text") from None
    if not key:
        raise ValueError(f"the API key file {path} is empty; it must hold the key on one line")
    # A header carries no more than this, and a key with a line break would be two headers.
    if len(key.split()) > 1:
        raise ValueError(f"the API key file {path} holds more than one word; it must hold the key on one line")
    if not key.isascii() or not key.isprintable():
        raise ValueError(f"the API key file {path} holds a character outside printable ASCII")
    return key
