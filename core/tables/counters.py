"""Counts of rows and words that the kernels add to, on each device."""

from __future__ import annotations

import threading

import torch

from ..engine.kernels.format import MAX_SLABS

#: Index of the host table in the counts, after those of the slabs.
HOST = MAX_SLABS


class Counters:
    """Rows and words that gathers read, by memory: each slab, or the host table.

    For each device int64 ``[2 * (MAX_SLABS + 1)]``: rows from each slab, rows from the host table,
    words from each slab, words from the host table. Threads may share one.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector may run code that gathers while the lock is held.
        self._lock = threading.RLock()
        self._on: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the counts that kernels on a device add to."""
        with self._lock:
            if device not in self._on:
                with torch.inference_mode(False):  # it is written outside of it too
                    counts = torch.zeros(2 * (MAX_SLABS + 1), dtype=torch.int64, device=device)
                if device.type == "cuda":
                    # Kernels on other streams may add to them at once.
                    torch.cuda.current_stream(device).synchronize()
                self._on[device] = counts
            return self._on[device]

    def add(self, counts: torch.Tensor) -> None:
        """Add counts of a gather on the CPU."""
        with self._lock:
            self.on(counts.device).add_(counts)

    def read(self) -> dict[torch.device, torch.Tensor]:
        """Wait for the GPUs and return int64 ``[2, MAX_SLABS + 1]`` on the CPU for each device."""
        with self._lock:
            found = dict(self._on)
        for device in found:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return {device: t.cpu().clone().view(2, MAX_SLABS + 1) for device, t in found.items()}
