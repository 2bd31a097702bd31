"""Sizes: constants, and how they are written for people."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30


def ceil_div(value: int, divisor: int) -> int:
    """The quotient rounded up."""
    return -(-value // divisor)


def gib(size_bytes: int | float) -> str:
    """`65.4 GiB`; small sizes in MiB."""
    if abs(size_bytes) < GIB / 10:
        return f"{size_bytes / MIB:.1f} MiB"
    return f"{size_bytes / GIB:.1f} GiB"


def floor_power_of_two(value: int) -> int:
    """The largest power of two that is not above the value (at least 1)."""
    return 1 << max(value.bit_length() - 1, 0)
