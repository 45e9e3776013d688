"""Measurements: time to each token, and peak memory."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

#: Seconds between two looks at the process's memory.
LOOK_EVERY_S = 0.01


class Clock(BaseStreamer):  # type: ignore[misc, unused-ignore]
    """Records the time of each token of `generate`; the first call is for the prompt.

    Parameters
    ----------
    on_token : callable
        Called with the number of tokens so far, 0 for the prompt. Its time is not counted.
    """

    def __init__(self, on_token: Callable[[int], None] = lambda n: None) -> None:
        self.times: list[float] = []
        self._on_token = on_token
        self._lost = 0.0

    def put(self, value: Any) -> None:
        now = time.perf_counter()
        self.times.append(now - self._lost)
        self._on_token(len(self.times) - 1)
        self._lost += time.perf_counter() - now

    def end(self) -> None:
        """Do nothing."""

    @property
    def prefill_seconds(self) -> float:
        """From the beginning to the first token."""
        return self.times[1] - self.times[0]

    @property
    def token_seconds(self) -> float | None:
        """The median of the tokens after the first; None where there is only one."""
        if len(self.times) < 3:
            return None
        steps = zip(self.times[1:], self.times[2:], strict=False)
        return statistics.median(after - before for before, after in steps)


def resident_bytes() -> tuple[int, int]:
    """Return the bytes of host memory that this process has: its own, and of files it maps."""
    own = mapped = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            own += int(line.split()[1]) << 10
        elif line.startswith("RssFile:"):
            mapped += int(line.split()[1]) << 10
    return own, mapped


class MemoryPeak:
    """Measures the most memory that was in use, on the host beyond what was there before.

    Weights that transformers maps from a checkpoint count as `mapped_bytes`, which the system may
    evict between reads, unlike `host_bytes`.

    Parameters
    ----------
    device : torch.device
        Whose memory counts as device memory; none for a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory peak", daemon=True)
        self.host_bytes = self.mapped_bytes = 0
        self.device_bytes = 0

    def __enter__(self) -> MemoryPeak:
        self._begin = resident_bytes()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._done.wait(LOOK_EVERY_S):
            self._take()

    def _take(self) -> None:
        own, mapped = resident_bytes()
        self.host_bytes = max(self.host_bytes, own - self._begin[0])
        self.mapped_bytes = max(self.mapped_bytes, mapped - self._begin[1])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        self._take()
        if self._device.type == "cuda":
            self.device_bytes = torch.cuda.max_memory_allocated(self._device)
