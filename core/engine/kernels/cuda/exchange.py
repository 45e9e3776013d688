"""Rows of a batch, with their optimizer state, between a cache and the host; see exchange.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..format import ceil_div
from .parameters import Address, Int32, Parameters
from .runner import Launch, Runner
from .source import EXCHANGE

THREADS = 256  # of a block
THREAD_UNITS = 4  # that a thread has under way
BLOCKS = 4  # of a multiprocessor, for each array
UNITS = (16, 4, 2, 1)  # bytes that are copied at once
FIELDS = 5  # numbers that describe an array


@dataclass(init=False)
class ExchangeRows(Parameters):
    """Parameters of `exchange_rows`: int64 ``[A, FIELDS]`` arrays, the others int64 too."""

    kernel = "exchange_rows"

    arrays: Address
    slots: Address
    rows: Address
    coming: Address
    to_host: Int32


class ExchangedArray(NamedTuple):
    """Rows that lie by slot in a cache, and by number, or by their position in a batch, elsewhere.

    Parameters
    ----------
    cached : torch.Tensor
        ``[slots, ...]`` on the device, contiguous.
    stored : torch.Tensor
        ``[rows, ...]``, rows of as many bytes, contiguous, in memory that the GPU reads and writes.
    by_position : bool
        Whether `stored` has the rows of the batch, one after another.
    """

    cached: torch.Tensor
    stored: torch.Tensor
    by_position: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.cached[:1].numel() * self.cached.element_size()

    def description(self) -> tuple[int, ...]:
        """Return the numbers that the kernel reads."""
        row_bytes = self.row_bytes
        places = row_bytes | self.cached.data_ptr() | self.stored.data_ptr()
        unit = next(unit for unit in UNITS if places % unit == 0)
        addresses = self.cached.data_ptr(), self.stored.data_ptr()
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
        rows: torch.Tensor,
        coming: torch.Tensor,
        most_units: int,
        *,
        to_host: bool,
    ) -> None:
        """Copy the rows of a batch from their slots to the host, or from there.

        Parameters
        ----------
        arrays : torch.Tensor
            What `described` returns; the arrays live until the GPU is done.
        slots, rows : torch.Tensor
            int64 on the device, with at least as many entries as there are rows: the slot of each,
            and its number, or NO_ROW for none.
        coming : torch.Tensor
            int64 on the device, the number of rows first.
        most_units : int
            Units of all rows of an array together, at most.
        to_host : bool
            The direction.
        """
        if self._launch is None:
            self._launch = self._runner.bind(EXCHANGE, ExchangeRows, THREADS)
        blocks = min(ceil_div(most_units, THREADS * THREAD_UNITS), self._most_blocks)
        self._launch(
            (max(1, blocks), arrays.shape[0], 1),
            arrays.data_ptr(),
            slots.data_ptr(),
            rows.data_ptr(),
            coming.data_ptr(),
            int(to_host),
        )
