"""Counting zeros on a GPU; see zeros.cu."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..format import ceil_div
from .parameters import Address, Int64, Parameters
from .runner import Launch, Runner
from .source import zeros_variant

THREADS = 256  # of a block
THREAD_BYTES = 64  # that a thread has under way
BLOCKS = 8  # of a multiprocessor


@dataclass(init=False)
class CountZeros(Parameters):
    """Parameters of `count_zeros`: `n` elements at a multiple of their size; int64 `count`."""

    kernel = "count_zeros"

    x: Address
    n: Int64
    count: Address


class ZeroKernels:
    """The kernel of zeros.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._launches: dict[int, Launch] = {}  # by bytes of an element

    def count_zeros(self, data: torch.Tensor, unit_bytes: int) -> torch.Tensor:
        """Count units that are zero; see `kernels.cpu.count_zeros`."""
        count = torch.zeros((), dtype=torch.int64, device=data.device)
        n_bytes = data.shape[0]
        if n_bytes:
            launch = self._launches.get(unit_bytes)
            if launch is None:
                launch = self._runner.bind(zeros_variant(unit_bytes), CountZeros, THREADS)
                self._launches[unit_bytes] = launch
            blocks = min(
                ceil_div(n_bytes, THREADS * THREAD_BYTES), BLOCKS * self._runner.multiprocessors
            )
            launch(blocks, data.data_ptr(), n_bytes // unit_bytes, count.data_ptr())
        return count
