"""Overflow area of a compact table, for updated rows that no longer fit where they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..engine.kernels.format import PAD_WORDS, ceil_div
from ..engine.memory.host import HostBuffer
from ..errors import BitslabError

FIRST_BYTES = 64 << 10  # initial capacity for rows

Array = np.ndarray[Any, Any]


class Overflow:
    """Raw rows outside their table, and which rows they are.

    The first word at a row's offset in the table is its index in the overflow area.

    Parameters
    ----------
    n_rows : int
        Rows of the table.
    row_words : int
        Words of a row kept raw.
    pin : bool
        Whether the memory is page-locked.
    """

    def __init__(self, n_rows: int, row_words: int, *, pin: bool) -> None:
        self._n_rows = n_rows
        self._row_words = row_words
        self._pin = pin
        self._moved = torch.zeros(ceil_div(n_rows, 32), dtype=torch.int32)
        self._buffer = self._allocate(0)
        self._used = 0
        self._free: list[int] = []

    def _allocate(self, rows: int) -> HostBuffer:
        return HostBuffer.allocate(4 * (rows * self._row_words + PAD_WORDS), pin=self._pin)

    @property
    def moved(self) -> torch.Tensor:
        """int32 ``[ceil(N / 32)]``, a bit for each row of the table."""
        return self._moved

    @property
    def words(self) -> torch.Tensor:
        """int32, the rows; a new tensor whenever `reserve` reallocates."""
        return self._buffer.tensor.view(torch.int32)

    @property
    def buffer(self) -> HostBuffer:
        """The memory of the rows."""
        return self._buffer

    @property
    def capacity(self) -> int:
        """Rows that the memory has room for."""
        return (self._buffer.nbytes // 4 - PAD_WORDS) // self._row_words

    @property
    def used(self) -> int:
        """Rows up to the last one that has moved, those between that are free included."""
        return self._used

    @property
    def free(self) -> torch.Tensor:
        """int32, the free indices below `used`."""
        return torch.tensor(self._free, dtype=torch.int32)

    @property
    def rows(self) -> int:
        """Rows that have moved."""
        return self._used - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and the bits."""
        return self._buffer.nbytes + self._moved.nbytes

    def holds(self, ids: Array) -> Array:
        """Return which of the rows int64 ``[n]`` have moved."""
        return bits_at(self._moved, ids)

    def reserve(self, rows: int) -> HostBuffer | None:
        """Make room for more rows, for all of the table at most.

        Returns
        -------
        HostBuffer or None
            The old buffer, to be closed later, if it is replaced.

        Raises
        ------
        BitslabError
            When memory cannot be had, or not page-locked where the old buffer is: GPUs read it.
            Nothing has changed then.
        """
        capacity = self.capacity
        needed = min(self._n_rows, self._used - len(self._free) + rows)
        if needed <= capacity:
            return None
        old = self._buffer
        least = FIRST_BYTES // (4 * self._row_words)
        wanted = max(needed, min(self._n_rows, max(2 * capacity, least)))
        try:
            fresh = self._allocate(wanted)
        except BitslabError:
            if wanted == needed:
                raise
            fresh = self._allocate(needed)
        if old.pinned and not fresh.ensure_pinned():
            nbytes = fresh.nbytes
            fresh.close()
            raise BitslabError(
                f"table: {nbytes} bytes for rows that outgrow their place could not be "
                "page-locked; raise the limit of locked memory"
            )
        fresh.tensor[: 4 * self._used * self._row_words] = old.tensor[
            : 4 * self._used * self._row_words
        ]
        self._buffer = fresh
        return old

    def reserve_behind(self, rows: int) -> HostBuffer | None:
        """Make room for more rows, none of which takes a free index; see `reserve`."""
        return self.reserve(rows + len(self._free))

    def follow(self, moved: torch.Tensor, used: int, free: torch.Tensor) -> None:
        """Take over what others have put here and released.

        Parameters
        ----------
        moved, used, free
            As the properties; `moved` may be on a device.
        """
        self._moved.numpy()[:] = moved.cpu().numpy()
        self._used, self._free = used, free.tolist()

    def put(self, ids: Array, rows: Array, words: Array, at: Array) -> None:
        """Add rows, or overwrite rows that are in the overflow area already.

        Parameters
        ----------
        ids : numpy.ndarray
            int64 ``[n]``, no two alike.
        rows : numpy.ndarray
            uint32 ``[n, row_words]``.
        words : numpy.ndarray
            uint32, the table's words.
        at : numpy.ndarray
            int64 ``[n]``: offset of each row in `words`.
        """
        indices = np.empty(len(ids), np.int64)
        inside = self.holds(ids)
        indices[inside] = words[at[inside]]
        new = np.flatnonzero(~inside)
        reused = [self._free.pop() for _ in range(min(len(self._free), len(new)))]
        indices[new[: len(reused)]] = reused
        fresh = len(new) - len(reused)
        indices[new[len(reused) :]] = np.arange(self._used, self._used + fresh)
        self._used += fresh
        capacity = self._buffer.nbytes // 4 - PAD_WORDS
        area = self.words.numpy().view(np.uint32)[: capacity // self._row_words * self._row_words]
        area.reshape(-1, self._row_words)[indices] = rows
        words[at[new]] = indices[new]
        set_bits(self._moved, ids[new], True)

    def release(self, ids: Array, words: Array, at: Array) -> None:
        """Free the overflow entries of rows that are about to be written to the table again."""
        inside = self.holds(ids)
        self._free.extend(words[at[inside]].tolist())
        set_bits(self._moved, ids[inside], False)

    def close(self) -> None:
        """Free the memory."""
        self._buffer.close()


def bits_at(bits: torch.Tensor, ids: Array) -> Array:
    """Return bit ``id & 31`` of word ``id >> 5`` of int32 `bits` as bools ``[n]``."""
    words: Array = bits.numpy().view(np.uint32)
    found: Array = words[ids >> 5] >> (ids & 31).astype(np.uint32) & 1
    return found.astype(bool)


def set_bits(bits: torch.Tensor, ids: Array, value: bool | Array) -> None:
    """Set or clear bit ``id & 31`` of word ``id >> 5`` of int32 `bits`, for ids no two alike."""
    words = bits.numpy().view(np.uint32)
    masks = np.uint32(1) << (ids & 31).astype(np.uint32)
    on = np.broadcast_to(value, ids.shape)
    np.bitwise_or.at(words, ids[on] >> 5, masks[on])
    np.bitwise_and.at(words, ids[~on] >> 5, ~masks[~on])
