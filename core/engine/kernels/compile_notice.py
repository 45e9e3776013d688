"""One line on a terminal for whoever waits while kernels are compiled."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

QUIET_VARIABLE = "BITSLAB_QUIET"
AFTER_S = 1.0  # of compiling in all


class CompileNotice:
    """Says once in a process that kernels of one kind are being compiled, if that takes long.

    Written to stderr where that is a terminal and BITSLAB_QUIET is not set. Threads may share it.

    Parameters
    ----------
    what : str
        What is compiled.
    load_s : float
        What takes no longer is not counted, since it may have been loaded from a cache. Seconds.
    """

    def __init__(self, what: str, load_s: float = 0.0) -> None:
        self._what = what
        self._load_s = load_s
        self._seconds = 0.0
        self._said = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count the time inside as compiling."""
        if self._said or not _wanted():
            yield
            return
        timer = threading.Timer(max(self._load_s, AFTER_S - self._seconds), self._say)
        timer.daemon = True
        begin = time.perf_counter()
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            seconds = time.perf_counter() - begin
            if seconds > self._load_s:
                self._seconds += seconds

    def _say(self) -> None:
        if self._said:
            return
        self._said = True
        with contextlib.suppress(OSError, ValueError):  # stderr was closed meanwhile
            print(
                f"bitslab: compiling {self._what}: some seconds, and kept for the next process "
                f"({QUIET_VARIABLE}=1 hides this line)",
                file=sys.stderr,
                flush=True,
            )


def _wanted() -> bool:
    if os.environ.get(QUIET_VARIABLE, "") not in ("", "0"):
        return False
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed
        return False
