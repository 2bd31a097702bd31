"""The errors that reach a user as a sentence."""

from __future__ import annotations


class MetalserveError(Exception):
    """Base of every error whose text is meant for the person who typed the command."""


class Refusal(MetalserveError):  # noqa: N818 (a refusal is an answer, not an accident)
    """Something that will not be done, said in three parts.

    Args:
        found: what was seen, with its numbers and names.
        needed: what would have been acceptable.
        change: the variable or the action that leads there.
    """

    def __init__(self, *, found: str, needed: str, change: str) -> None:
        self.found = found
        self.needed = needed
        self.change = change
        super().__init__(f"{found.rstrip('.')}. Needed: {needed.rstrip('.')}. Change: {change.rstrip('.')}.")


class DoesNotFit(Refusal):
    """The question makes sense; there is not enough memory."""
