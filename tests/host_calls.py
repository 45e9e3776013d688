"""Calls of Python functions of the library: what it costs the host, which varies with nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def calls_of(run: Callable[[], object], counted: tuple[str, ...] = ("bitslab.",)) -> int:
    """Return how many functions of modules with these prefixes a call enters, in this thread."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        if event == "call" and str(frame.f_globals.get("__name__")).startswith(counted):
            calls += 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls
