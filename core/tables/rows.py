"""The rows of a table in host memory: its buffers, its overflow area, decoding and updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..engine.codecs import PackedRows
from ..engine.codecs.base import rows_as_bytes
from ..engine.kernels import cpu
from ..engine.kernels.cpu.items import without_items
from ..engine.kernels.format import BLOCK_ROWS, TableStorage
from ..errors import CorruptedDataError
from .build import rows_per_batch
from .cache import CacheView
from .overflow import Overflow, bits_at, set_bits
from .parts import TableParts, as_unsigned, widened

Array = np.ndarray[Any, Any]


class HostRows:
    """Rows in host memory; callers keep readers out while rows change.

    Parameters
    ----------
    parts : TableParts
        The packed rows.
    pin : bool
        Whether the rows are page-locked when a GPU first gathers, those that move included.
    """

    def __init__(self, parts: TableParts, *, pin: bool) -> None:
        self.parts = parts
        #: Of the codec, on the CPU.
        self.kernels = parts.codec.kernels(torch.device("cpu"))
        #: Whether the codec's kernels gather on GPUs.
        self.for_gpus = "cuda" in parts.codec.device_types
        self.overflow: Overflow | None = None
        #: How often the overflow area took other memory: what holds `storage` is out of date then.
        self.overflow_moves = 0
        #: Whether rows were updated since they were packed.
        self.dirty = False
        #: Whether the rows are page-locked for GPUs.
        self.pin = pin
        #: What tells the host of rows that a GPU has written by itself.
        self.pull: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of words, metadata, overflow area and profile."""
        own = sum(t.nbytes for t in self.parts.tensors.values())
        return own + self.overflow_bytes + self.parts.codec.profile_bytes

    @property
    def moved_rows(self) -> int:
        """Rows in the overflow area."""
        self.settle()
        return 0 if self.overflow is None else self.overflow.rows

    @property
    def packed_rows(self) -> int:
        """Rows that are not raw now."""
        moved_rows = self.moved_rows  # first: it hears of the others
        return self.parts.facts["packed_rows"] - moved_rows

    @property
    def packed_items(self) -> int:
        """Items in rows that are not raw now."""
        last = np.array([self.parts.n_rows - 1])
        return self._items_of(
            self.packed_rows, lambda: self.row_lengths(torch.from_numpy(last))[0][0] > 0
        )

    @property
    def moved_items(self) -> int:
        """Items of rows in the overflow area."""
        last, overflow = np.array([self.parts.n_rows - 1]), self.overflow
        return self._items_of(
            self.moved_rows, lambda: overflow is not None and bool(overflow.holds(last)[0])
        )

    def _items_of(self, n_rows: int, last_is_one: Callable[[], bool]) -> int:
        """Return the items of some rows, given whether the last of the table is one of them."""
        each = self.parts.items_per_row
        filler = self.parts.n_rows * each - self.parts.n_items
        return n_rows * each - (filler if n_rows and filler and last_is_one() else 0)

    @property
    def overflow_bytes(self) -> int:
        """Bytes of the overflow area."""
        return 0 if self.overflow is None else self.overflow.nbytes

    @property
    def outgrown_bytes(self) -> int:
        """Bytes of the rows in the overflow area; waits for a GPU that has written some."""
        self.settle()
        return 0 if self.overflow is None else 4 * self.parts.row_words * self.overflow.rows

    def settle(self) -> None:
        """Hear of rows that a GPU has written by itself, after it is done."""
        if self.pull is not None:
            self.pull()

    def storage(self) -> TableStorage:
        """Return the rows as CPU kernels read them."""
        self.settle()
        if self.overflow is None:
            return self.parts.storage()
        moved = {"moved": self.overflow.moved, "overflow": self.overflow.words}
        return self.parts.storage(moved, self.overflow.rows)

    def decode(self, ids: torch.Tensor, data: torch.Tensor, **more: Any) -> int:
        """Gather items to uint8 ``[n, item_bytes]`` on the CPU; see `RowKernels.gather`."""
        if self.parts.raw and not more:
            cpu.copy_rows(self.parts.raw_rows(), self.parts.row_bytes, ids, data)
            return -1
        cache: CacheView | None = more.get("cache")
        kernels = self.kernels if cache is None else cache.kernels or self.kernels
        return kernels.gather(self.storage(), ids, data, **more)

    def batches(self) -> Iterator[torch.Tensor]:
        """Return all rows ``[n, *row_shape]`` on the CPU, decoded, batch after batch.

        Raises
        ------
        CorruptedDataError
            When a row is damaged.
        """
        return map(self.decoded, self.batch_ids())

    def batch_ids(self) -> Iterator[torch.Tensor]:
        """Yield the ids of `batches`, int64 ``[n]``."""
        parts = self.parts
        step = rows_per_batch(parts.row_bytes) * parts.items_per_row
        for begin in range(0, parts.n_items, step):
            yield torch.from_numpy(np.arange(begin, min(begin + step, parts.n_items)))

    def decoded(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows ``[n, *row_shape]`` on the CPU by int64 ``[n]`` ids on the CPU, in range.

        Raises
        ------
        CorruptedDataError
            When a row is damaged.
        """
        rows = torch.empty((ids.shape[0], *self.parts.item_shape), dtype=self.parts.dtype)
        if self.parts.item_bytes:
            raise_damaged(self.decode(ids, rows_as_bytes(rows, self.parts.item_bytes)))
        return rows

    def decode_packed_rows(self, ids: torch.Tensor, data: torch.Tensor) -> int:
        """Decode rows to uint8 ``[m, row_bytes]``; return the number of a damaged one, or -1."""
        if self.parts.items_per_row == 1:
            return self.decode(ids, data)
        return self.kernels.gather(without_items(self.storage()), ids, data)

    def row_lengths(self, ids: torch.Tensor) -> tuple[Array, int]:
        """Return the words of packed rows, 0 for raw ones, and the words of a raw row.

        Parameters
        ----------
        ids : torch.Tensor
            int64 ``[n]`` on the CPU, in range.
        """
        row_words = self.parts.row_words
        if self.parts.raw:
            return np.zeros(ids.shape[0], np.int64), row_words
        _, lengths, _ = self.kernels.locate(self.storage(), ids)
        return lengths.to(torch.int64).numpy(), row_words

    def packed_words_of(self, ids: torch.Tensor, n_words: int) -> torch.Tensor:
        """Return the words of int64 ``[n]`` rows, back to back: int32 ``[n_words]``.

        The table is not raw: rows of such a table need not begin at words.
        """
        row_words = self.parts.row_words
        target = torch.empty(n_words, dtype=torch.int32)
        storage = self.storage()
        at, lengths, kind = self.kernels.locate(storage, ids)
        sizes = torch.where(lengths == 0, row_words, lengths).to(torch.int64)
        begin = sizes.cumsum(0) - sizes
        for number, source in enumerate((storage.words, storage.overflow)):
            if source is not None:
                here = kind == number
                cpu.move_rows(source, at[here], sizes[here], target, begin[here])
        return target

    def update(self, ids: Array, rows: torch.Tensor, packed: PackedRows | None) -> dict[str, Array]:
        """Overwrite rows.

        Parameters
        ----------
        ids : numpy.ndarray
            int64 ``[n]``, rows of the codec, in range, no two alike.
        rows : torch.Tensor
            ``[n, *codec.row_shape]``.
        packed : PackedRows or None
            The same rows, packed, on the CPU; None for a raw table.

        Returns
        -------
        dict of str to numpy.ndarray
            Changed entries of each metadata tensor, by its name in TableStorage.
        """
        self.settle()
        self.dirty = True
        row_bytes, row_words = self.parts.row_bytes, self.parts.row_words
        data = rows_as_bytes(rows, row_bytes).cpu()
        if packed is None:
            self.parts.raw_rows().numpy()[ids] = data.numpy()
            return {}
        if self.parts.layout == "inplace":
            return self._update_in_place(ids, packed)
        padded = torch.nn.functional.pad(data, (0, 4 * row_words - row_bytes)).contiguous()
        return self._update_compact(ids, packed, padded.numpy().view(np.uint32))

    def _update_in_place(self, ids: Array, packed: PackedRows) -> dict[str, Array]:
        tensors, row_words = self.parts.tensors, self.parts.row_words
        lengths = widened(packed.parts["lengths"])
        begin, sizes = _runs_of(lengths, row_words)
        _move(packed.parts["words"], begin, sizes, tensors["words"], ids * row_words)
        facts = self.parts.facts
        were_packed = bits_at(tensors["flags"], ids)
        facts["packed_rows"] += int(np.count_nonzero(lengths)) - int(were_packed.sum())
        facts["max_packed_words"] = max(facts["max_packed_words"], int(lengths.max()))
        set_bits(tensors["flags"], ids, lengths != 0)
        changed = {"flags": np.unique(ids >> 5)}
        if "row_clusters" in tensors:
            tensors["row_clusters"].numpy()[ids] = packed.parts["row_clusters"].numpy()
            changed["row_clusters"] = ids
        return changed

    def _update_compact(self, ids: Array, packed: PackedRows, raw: Array) -> dict[str, Array]:
        tensors, row_words = self.parts.tensors, self.parts.row_words
        words = tensors["words"].numpy().view(np.uint32)
        at, room = _table_ranges(self.parts, ids)
        lengths = widened(packed.parts["lengths"])
        # A length of 0 marks a row that is raw in the table: it has room, and never moves.
        raw_in_table = room == 0
        fits = (lengths > 0) & (lengths <= room)
        overflows = ~raw_in_table & ~fits
        stale = None
        if overflows.any():
            if self.overflow is None:
                self.overflow = Overflow(self.parts.n_rows, row_words, pin=self.pin)
            new = overflows & ~self.overflow.holds(ids)
            stale = self.overflow.reserve(int(new.sum()))
            self.overflow_moves += stale is not None
        if self.overflow is not None:
            self.overflow.release(ids[fits], words, at[fits])
            self.overflow.put(ids[overflows], raw[overflows], words, at[overflows])
        begin, sizes = _runs_of(lengths, row_words)
        fresh = packed.parts["words"]
        _move(fresh, begin[fits], sizes[fits], tensors["words"], at[fits])
        here = np.flatnonzero(raw_in_table)
        _move(
            torch.from_numpy(raw.view(np.int32)).view(-1),
            here * row_words,
            np.full(len(here), row_words),
            tensors["words"],
            at[here],
        )
        changed = {"moved": np.unique(ids >> 5)} if self.overflow is not None else {}
        if "row_clusters" in tensors:
            kept = ids[fits]
            tensors["row_clusters"].numpy()[kept] = packed.parts["row_clusters"].numpy()[fits]
            changed["row_clusters"] = kept
        if stale is not None:
            stale.close()
        return changed

    def close(self) -> None:
        """Free the memory."""
        self.parts.close()
        if self.overflow is not None:
            self.overflow.close()


def _table_ranges(parts: TableParts, ids: Array) -> tuple[Array, Array]:
    """Return the word offset of each row in a compact table, and its words, 0 for raw."""
    bases, lengths = parts.tensors["bases"].numpy(), as_unsigned(parts.tensors["lengths"])
    lane = np.arange(BLOCK_ROWS)
    at = np.empty(len(ids), np.int64)
    step = 1 << 14
    for begin in range(0, len(ids), step):
        some = ids[begin : begin + step]
        peers = np.minimum((some & -BLOCK_ROWS)[:, None] + lane, parts.n_rows - 1)
        sizes = lengths[peers].astype(np.int64)
        sizes = np.where(sizes == 0, parts.row_words, sizes)
        before = np.where(lane < (some & BLOCK_ROWS - 1)[:, None], sizes, 0).sum(1)
        at[begin : begin + step] = bases[some >> 5] + before
    return at, lengths[ids].astype(np.int64)


def _runs_of(lengths: Array, row_words: int) -> tuple[Array, Array]:
    """Return the offsets and words of rows of these lengths that are stored back to back."""
    sizes = np.where(lengths == 0, row_words, lengths)
    return np.cumsum(sizes) - sizes, sizes


def _move(
    source: torch.Tensor, at: Array, sizes: Array, target: torch.Tensor, target_at: Array
) -> None:
    """Copy runs of words; see `kernels.cpu.move_rows`."""
    runs = (torch.from_numpy(np.ascontiguousarray(run)) for run in (at, sizes, target_at))
    at_, sizes_, target_at_ = runs
    cpu.move_rows(source, at_, sizes_, target, target_at_)


def raise_damaged(row: int) -> None:
    """Raise CorruptedDataError for the damaged row that decoding found; -1 for none."""
    if row >= 0:
        raise CorruptedDataError(f"table: row {row} is damaged; `out` is undefined")
