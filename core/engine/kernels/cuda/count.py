"""Counting the set bits of rows on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..format import ceil_div
from .parameters import Address, Int32, Int64, Parameters
from .runner import Launch, Runner
from .source import Variant
from .tiles import aligned_to

THREADS = (32, 8, 1)  # of a block: chunks, rows
BLOCKS = 8  # of a multiprocessor


@dataclass(init=False)
class CountBits(Parameters):
    """Parameters of `count_bits`: rows of `chunks` chunks, int64 counts of each bit of each."""

    kernel = "count_bits"

    rows: Address
    n_rows: Int64
    chunks: Int32
    counts: Address


class CountKernels:
    """The kernel of count.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._launches: dict[int, Launch] = {}  # by chunk_bytes

    def count_bits(self, rows: torch.Tensor, chunk_bytes: int) -> torch.Tensor:
        """Count set bits per position; see `kernels.cpu.count_bits`."""
        n, row_bytes = rows.shape
        chunks = row_bytes // chunk_bytes
        counts = torch.zeros((chunks, 8 * chunk_bytes), dtype=torch.int64, device=rows.device)
        if n and chunks:
            rows = aligned_to(rows, chunk_bytes)
            launch = self._launches.get(chunk_bytes)
            if launch is None:
                launch = self._runner.bind(Variant("count", chunk_bytes), CountBits, THREADS)
                self._launches[chunk_bytes] = launch
            columns = ceil_div(chunks, 32)
            slices = min(ceil_div(n, 64), max(1, BLOCKS * self._runner.multiprocessors // columns))
            launch((columns, slices, 1), rows.data_ptr(), n, chunks, counts.data_ptr())
        return counts
