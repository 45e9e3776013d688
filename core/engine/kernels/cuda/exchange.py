"""Rows of a batch, with their optimizer state, between a cache and the host; see exchange.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..format import ceil_div
from .parameters import Address, Parameters
from .runner import Launch, Runner
from .source import EXCHANGE

THREADS = 256  # of a block
THREAD_UNITS = 4  # that a thread has under way each way
BLOCKS = 4  # of a multiprocessor, for each array
UNITS = (16, 4, 2, 1)  # bytes that are copied at once
FIELDS = 6  # numbers that describe an array


@dataclass(init=False)
class ExchangeRows(Parameters):
    """Parameters of `exchange_rows`: int64 ``[A, FIELDS]`` arrays, the others int64 too."""

    kernel = "exchange_rows"

    arrays: Address
    slots: Address
    leaving: Address
    wanted: Address
    coming: Address


class ExchangedArray(NamedTuple):
    """Rows that lie by slot in a cache, and by number, or by their position in a batch, elsewhere.

    Parameters
    ----------
    cached : torch.Tensor
        ``[slots, ...]`` on the device, contiguous.
    stored : torch.Tensor or None
        ``[rows, ...]``, rows of as many bytes, contiguous, in memory that the GPU reads and writes.
        None where rows that leave go nowhere; then there is `incoming`.
    incoming : torch.Tensor, optional
        As `stored`, where rows that come are elsewhere than those that leave.
    by_position : bool
        Whether both have the rows of the batch, one after another.
    """

    cached: torch.Tensor
    stored: torch.Tensor | None
    incoming: torch.Tensor | None = None
    by_position: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.cached[:1].numel() * self.cached.element_size()

    def description(self) -> tuple[int, ...]:
        """Return the numbers that the kernel reads."""
        row_bytes = self.row_bytes
        out = 0 if self.stored is None else self.stored.data_ptr()
        addresses = (
            self.cached.data_ptr(),
            out,
            out if self.incoming is None else self.incoming.data_ptr(),
        )
        places = row_bytes | addresses[0] | addresses[1] | addresses[2]
        unit = next(unit for unit in UNITS if places % unit == 0)
        return (*addresses, row_bytes, unit, int(self.by_position))


class ExchangeKernels:
    """The kernel of exchange.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._most_blocks = BLOCKS * runner.multiprocessors
        self._launch: Launch | None = None

    def described(self, arrays: Sequence[ExchangedArray], device: torch.device) -> torch.Tensor:
        """Return arrays as `exchange` takes them: int64 ``[A, FIELDS]`` on the device."""
        described = torch.tensor([array.description() for array in arrays], dtype=torch.int64)
        if device.type == "cuda":
            described = described.pin_memory()
        return described.to(device, non_blocking=True)

    def exchange(
        self,
        arrays: torch.Tensor,
        slots: torch.Tensor,
        leaving: torch.Tensor,
        wanted: torch.Tensor,
        coming: torch.Tensor,
        most_units: int,
    ) -> None:
        """Copy rows of a batch from slots to the host, and others from there to the slots.

        Parameters
        ----------
        arrays : torch.Tensor
            What `described` returns; the arrays live until the GPU is done.
        slots, leaving, wanted : torch.Tensor
            int64 on the device, with at least as many entries as there are slots: each slot, the
            number of the row that leaves it, and of the one that comes there, NO_ROW for none. No
            row does both.
        coming : torch.Tensor
            int64 ``[2]`` on the device: how many slots; the second becomes 1 once rows are moved.
        most_units : int
            Units of all rows of an array together, at most.
        """
        if self._launch is None:
            self._launch = self._runner.bind(EXCHANGE, ExchangeRows, THREADS)
        blocks = min(ceil_div(most_units, THREADS * THREAD_UNITS), self._most_blocks)
        self._launch(
            (max(1, blocks), arrays.shape[0], 1),
            arrays.data_ptr(),
            slots.data_ptr(),
            leaving.data_ptr(),
            wanted.data_ptr(),
            coming.data_ptr(),
        )
