"""Progress of long work, reported to a function of the caller or shown on the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..errors import load_optional

#: Called with what is done and the total, None where that is not known, in units of the work: rows,
#: raw bytes of a model.
ProgressFunction = Callable[[int, "int | None"], None]

SHOW_AFTER_S = 2.0


class Progress:
    """Counts what is done; after two seconds a bar shows it, when stderr is a terminal.

    Parameters
    ----------
    title : str
        The work; the title of the bar.
    total : int or None
        What there is in all; None where that is not known.
    report : callable, bool or None
        A function to call instead; False for silence.
    """

    def __init__(
        self, title: str, total: int | None, report: ProgressFunction | bool | None
    ) -> None:
        self._title = title
        self._total = total
        self._report = report
        self._done = 0
        self._began = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        return self

    def restart(self) -> None:
        """Count from 0 again, for a second pass."""
        self._done = 0

    def advance(self, amount: int) -> None:
        """Add to what is done, and report it."""
        self._done += amount
        if callable(self._report):
            self._report(self._done, self._total)
        elif self._report is not False:
            self._show()

    def _show(self) -> None:
        if self._bar is None:
            if not sys.stderr.isatty() or time.monotonic() - self._began < SHOW_AFTER_S:
                return
            load_optional("rich", extra=None, purpose="showing progress")
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._title, total=self._total)
            self._bar.start()
        self._bar.update(self._task, completed=self._done)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
