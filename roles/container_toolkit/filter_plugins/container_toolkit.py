"""What the role's tasks ask of the package manager's answers, of CDI specifications and of a signing key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from metalserve import toolkit
from metalserve.plain import plain


class FilterModule:
    """Thin: the functions are metalserve.toolkit's."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """The filters by name."""

        def face(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *arguments: function(*plain(list(arguments)))

        return {
            "container_toolkit_packages": face(toolkit.packages),
            "container_toolkit_locked": face(toolkit.locked),
            "container_toolkit_gpu_specs": face(toolkit.gpu_specs),
            "container_toolkit_stale": face(toolkit.stale),
            "container_toolkit_trusts": face(toolkit.trusts),
            "container_toolkit_fingerprints": face(toolkit.key_fingerprints),
        }
