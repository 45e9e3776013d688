"""Measurements: peak memory."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

import torch

#: Seconds between two looks at the process's memory.
LOOK_EVERY_S = 0.01


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
