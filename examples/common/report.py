"""Output of the scripts: progress, a console, JSON, what a device is called."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

#: Means the standard output where a file is expected.
OUTPUT = Path("-")

#: Takes the amount done and the total.
Report = Callable[[int, int], None]


class Result(Protocol):
    """What a script found of one way, for JSON."""

    def as_dict(self) -> dict[str, Any]: ...


class Steps:
    """Shows on a terminal how far the present step has come."""

    def __init__(self, shown: bool = True) -> None:
        # Few refreshes, because they are drawn while steps are timed.
        self._bar = Progress(
            console=Console(stderr=True),
            transient=True,
            refresh_per_second=4,
            disable=not (shown and sys.stderr.isatty()),
        )

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    @contextmanager
    def step(self, title: str) -> Iterator[Callable[[int, int | None], None]]:
        """Show a step; yield a function that takes the amount done and the total, if known."""
        task = self._bar.add_task(title, total=None)
        try:
            yield lambda done, total: self._bar.update(task, completed=done, total=total)
        finally:
            self._bar.remove_task(task)


def make_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def describe(device: torch.device) -> str:
    """Return a device's name, with that of a GPU's model."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


def same_bits(losses: Sequence[float], others: Sequence[float]) -> bool:
    """Compare to the last bit; a NaN, as of a training that diverged, is the same as itself."""
    return np.array(losses).tobytes() == np.array(others).tobytes()


def write_json(path: Path, summary: dict[str, Any], results: Sequence[Result]) -> None:
    """Write everything to a file, or to the output for ``-``; NaN and infinity as null."""

    def finite(value: Any) -> Any:
        # JSON has neither NaN nor infinity, and readers refuse what Python writes for them.
        if isinstance(value, dict):
            return {key: finite(part) for key, part in value.items()}
        if isinstance(value, list):
            return [finite(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    content = finite({**summary, "runs": [result.as_dict() for result in results]})
    text = json.dumps(content, indent=1, allow_nan=False)
    if path == OUTPUT:
        print(text)
    else:
        path.write_text(text + "\n")
