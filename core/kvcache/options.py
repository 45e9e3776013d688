"""Options of histories, checked."""

from __future__ import annotations

from ..errors import ArgumentError, ArgumentTypeError


def check_options(window: int, block_tokens: int, reserve_tokens: int = 0, sinks: int = 0) -> None:
    """Raise for options that a history does not accept."""
    for name, value in (
        ("window", window),
        ("block_tokens", block_tokens),
        ("reserve_tokens", reserve_tokens),
        ("sinks", sinks),
    ):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ArgumentTypeError(f"{name}: expected an int, got {value!r:.60}")
        if value < 0:
            raise ArgumentError(f"{name}: {value}, accepted are numbers from 0")
    if not 1 <= block_tokens <= 4096 or block_tokens & (block_tokens - 1):
        raise ArgumentError(
            f"block_tokens: {block_tokens}, accepted are powers of two from 1 to 4096"
        )
