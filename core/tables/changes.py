"""Updates of a table's rows: permission to write, checks, and merging into packed rows."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..engine.codecs import RawCodec, RowCodec
from ..engine.codecs.base import check_ids_argument, check_in_range, rows_as_bytes
from ..errors import ArgumentError, BitslabError
from .build import SAMPLE_BYTES, check_items, choose_codec, shrinks, take_rows
from .parts import TableParts

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class MappedFile:
    """A file that is memory-mapped: where it is, and the checksum of what it held when opened."""

    path: str
    checksum: str


class Ownership:
    """Owner of a table's memory: whether this process may write to it, and one writer at a time.

    Parameters
    ----------
    read_only : bool
        Whether other processes use the same memory.
    file : MappedFile, optional
        The file that the memory maps; such a table is never written to.

    Attributes
    ----------
    file : MappedFile or None
        As given.
    read_only : bool
        As given; True once the table is shared with another process.
    """

    def __init__(self, *, read_only: bool, file: MappedFile | None = None) -> None:
        self.file = file
        self.read_only = read_only
        self._pid = os.getpid()
        self.after_fork()

    def after_fork(self) -> None:
        """Reset the lock in a forked child, where no writer is active."""
        # Reentrant, so that a function that `compact` calls can save the table.
        self._lock = threading.RLock()
        self._busy = ""  # the method that is writing: "update", "compact"

    def unchanging(self) -> contextlib.AbstractContextManager[object]:
        """Return a reentrant lock that blocks writers, not readers."""
        return self._lock

    @contextlib.contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Hold the write lock for the method `what`; it is not reentrant."""
        with self._lock:
            if self._busy:
                raise BitslabError(f"{what}: called from inside {self._busy} of the same table")
            self._busy = what
            try:
                yield
            finally:
                self._busy = ""

    def allows_changes(self, parts: TableParts) -> bool:
        """Return whether `check` raises nothing."""
        if self.read_only or self.file is not None or self._pid != os.getpid():
            return False
        # No generator: lookups on a GPU ask each time.
        for buffer in parts.buffers.values():  # noqa: SIM110
            if buffer.shared:
                return False
        return True

    def check(self, what: str, parts: TableParts) -> None:
        """Raise BitslabError when `what` must not change the table."""
        if self.file is not None:
            raise BitslabError(
                f"{what}: this table is memory-mapped from {self.file.path}; open it with "
                "layout='inplace', or make one with from_tensor"
            )
        if self._pid != os.getpid():
            raise BitslabError(f"{what}: this table belongs to process {self._pid}, the parent")
        if not self.allows_changes(parts):
            raise BitslabError(
                f"{what}: this table's memory is shared with other processes, which would not see "
                "the change whole; change it before it is shared"
            )


def checked_update(
    ids: torch.Tensor, rows: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Array, torch.Tensor]:
    """Return the ids and rows of an update of a table of this shape and dtype, or refuse them.

    Returns
    -------
    ids : numpy.ndarray
        int64 ``[n]``, in range, not negative, no two alike.
    rows : torch.Tensor
        ``[n, *row_shape]``, the last of those given for each id.
    """
    check_items(rows, shape[1:], dtype)
    wanted = check_ids_argument(ids).cpu()
    if wanted.shape[0] != rows.shape[0]:
        raise ArgumentError(f"ids, rows: {wanted.shape[0]} ids for {rows.shape[0]} rows")
    check_in_range(wanted, shape[0])
    numbers = wanted.numpy().astype(np.int64)
    numbers = np.where(numbers < 0, numbers + shape[0], numbers)
    last = len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1]
    if len(last) < len(numbers):
        return numbers[last], take_rows(rows, last)
    return numbers, rows


def merged(
    packed_rows_of: Callable[[torch.Tensor], torch.Tensor],
    parts: TableParts,
    ids: Array,
    items: torch.Tensor,
) -> tuple[Array, torch.Tensor]:
    """Return the packed rows that hold some items, decoded, with the new values in place.

    Parameters
    ----------
    packed_rows_of : callable
        Takes numbers of packed rows, int64 ``[m]``, and returns these rows on the CPU, decoded:
        ``[m, *codec.row_shape]``.
    parts : TableParts
        The buffers of a table in which several rows share a packed row.
    ids : numpy.ndarray
        int64 ``[n]``, in range, no two alike.
    items : torch.Tensor
        ``[n, *row_shape]``, their new values.

    Returns
    -------
    ids : numpy.ndarray
        int64 ``[m]``, ascending: packed rows.
    rows : torch.Tensor
        ``[m, *codec.row_shape]`` on the CPU, decoded.
    """
    each, item_bytes = parts.items_per_row, parts.item_bytes
    picked, at = np.unique(ids // each, return_inverse=True)
    rows = packed_rows_of(torch.from_numpy(picked))
    data = rows_as_bytes(rows, parts.row_bytes).view(-1)[: len(picked) * each * item_bytes]
    data.view(-1, item_bytes).numpy()[at * each + ids % each] = (
        rows_as_bytes(items, item_bytes).cpu().numpy()
    )
    return picked, rows


def fitted_again(
    packed_rows_of: Callable[[torch.Tensor], torch.Tensor], parts: TableParts
) -> RowCodec:
    """Return a codec fitted to the current rows; RawCodec where packing saves nothing."""
    n_sample = min(parts.n_rows, max(1, SAMPLE_BYTES // max(1, parts.row_bytes)))
    picked = np.sort(np.random.default_rng(0).choice(parts.n_rows, n_sample, replace=False))
    sample = packed_rows_of(torch.from_numpy(picked))
    fitted = choose_codec(sample, parts.codec.name, parts.n_rows, {})
    if fitted.keeps_raw or not shrinks(fitted, sample):
        return RawCodec(parts.item_shape, parts.dtype)
    return fitted
