"""Overflow area of a compact table, for updated rows that no longer fit where they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..engine.kernels.format import PAD_WORDS, ceil_div
from ..engine.memory.growing import GrowingBuffer

FIRST_BYTES = 64 << 10  # initial capacity for rows

Array = np.ndarray[Any, Any]


class Overflow:
    """Raw rows outside their table, and which rows they are.

    The first word at a row's offset in the table is its index in the overflow area. The area has
    addresses for all rows of the table, and takes memory as it grows; rows in it never move.

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
        self._row_words = row_words
        self._moved = torch.zeros(ceil_div(n_rows, 32), dtype=torch.int32)
        self._n_rows = n_rows
        self._buffer = GrowingBuffer(self._bytes_of(n_rows), pin=pin)
        self._used = 0
        self._free: list[int] = []

    def _bytes_of(self, rows: int) -> int:
        return 4 * (rows * self._row_words + PAD_WORDS)

    def _allocate(self, rows: int) -> None:
        self._buffer.grow(self._bytes_of(rows))

    @property
    def moved(self) -> torch.Tensor:
        """int32 ``[ceil(N / 32)]``, a bit for each row of the table."""
        return self._moved

    @property
    def words(self) -> torch.Tensor:
        """int32, the rows that there is memory for."""
        return self.all_words[: self.capacity * self._row_words + PAD_WORDS]

    @property
    def all_words(self) -> torch.Tensor:
        """int32, the rows that there may be memory for one day, for who may not ask again."""
        return self._buffer.tensor.view(torch.int32)

    @property
    def capacity(self) -> int:
        """Rows that the memory has room for; it grows by itself after `reserve_soon`."""
        return max(0, self._buffer.nbytes // 4 - PAD_WORDS) // self._row_words

    @property
    def growing(self) -> bool:
        """Whether the memory grows in the background."""
        return self._buffer.growing

    @property
    def refused(self) -> bool:
        """Whether memory in the background was refused lately."""
        return self._buffer.refused

    @property
    def pinned(self) -> bool:
        """Whether GPUs of this process can read all rows."""
        return self._buffer.pinned

    def ensure_pinned(self) -> bool:
        """Page-lock what is not; return whether GPUs can read all rows."""
        return self._buffer.ensure_pinned()

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

    def reserve(self, rows: int) -> None:
        """Make room for more rows.

        Raises
        ------
        BitslabError
            When the memory cannot be had.
        """
        capacity = self.capacity
        missing = self._used - len(self._free) + rows - capacity
        if missing > 0:
            least = FIRST_BYTES // (4 * self._row_words)
            wanted = max(capacity + missing, 2 * capacity, least)
            self._allocate(min(wanted, self._n_rows))

    def reserve_soon(self, rows: int, device: torch.device) -> None:
        """Make room for so many rows in all, in the background, which a device can read.

        See `GrowingBuffer.grow_soon`.
        """
        self._buffer.grow_soon(self._bytes_of(min(rows, self._n_rows)), device)

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
        area = self.words.numpy().view(np.uint32)[: self.capacity * self._row_words]
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
