"""Ctrl-C over and over, at whatever line the main thread is."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable


def interrupt_often(work: Callable[[], object], seconds: float, step_s: float) -> int:
    """Call ``work()`` for some seconds, each time for a little longer before it is interrupted.

    Parameters
    ----------
    work : callable
        Takes a small part of `seconds`.
    seconds : float
        How long.
    step_s : float
        What is added to the time before the next interrupt, up to 97 times.

    Returns
    -------
    int
        How many interrupts came through to here.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handler, hook = signal.signal(signal.SIGALRM, interrupt), sys.unraisablehook
    # One that comes in a finaliser is not raised, but shown; pytest would keep its frames.
    sys.unraisablehook = lambda _: None
    interrupts, end = 0, time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + interrupts % 97 * step_s)
                for _ in range(1000):  # one that is not raised is not waited for
                    work()
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        sys.unraisablehook = hook
    return interrupts
