"""A clock that a test moves: decisions by measured time come out the same on every machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

#: What each reading takes: no part of the work takes no time at all.
READING_S = 1e-6


class Clock:
    """`time.perf_counter` of this process, which nothing but `pass_by` and readings move."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def pass_by(self, seconds: float) -> None:
        """Let so much time pass."""
        self._now_s += seconds

    def slowed(self, work: Callable[..., Any], seconds: Callable[..., float]) -> Callable[..., Any]:
        """Return `work`, which takes ``seconds(*args)`` by this clock, and no other time."""

        def slow(*args: Any, **options: Any) -> Any:
            done = work(*args, **options)
            self.pass_by(seconds(*args))
            return done

        return slow

    def _read(self) -> float:
        self._now_s += READING_S
        return self._now_s

    @contextmanager
    def running(self) -> Iterator[None]:
        """Read this clock, and no other one, inside."""
        with mock.patch.object(time, "perf_counter", self._read):
            yield
