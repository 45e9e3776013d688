"""HostTable: rows in host memory, open in one process, and the locks that guard them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..devices import checked_device
from ..engine.advisor.advice import Advice, advisor_for
from ..engine.codecs import RowCodec
from ..engine.codecs.base import (
    bits_in_order,
    check_out_argument,
    on_codec_device,
    rows_as_bytes,
)
from ..engine.kernels.format import ceil_div
from ..engine.memory.locks import ReadersAndWriter, call_after_fork
from ..errors import BitslabError
from .arguments import check_ids_in_range, checked_ids, checked_target
from .build import SAMPLE_BYTES
from .cache import Cache
from .changes import Ownership, checked_update, merged
from .counters import Counters
from .gathering import Gathers
from .parts import Layout, TableParts
from .rows import HostRows, raise_damaged

BATCH_ROWS = 100_000  # rows of a gather that `advice` assumes by default


class HostTable:
    """Rows packed in host memory, open in one process: reading, changing and counting them.

    `CompressedTable` adds construction, files and sharing.

    Parameters
    ----------
    parts : TableParts
        The packed rows.
    pin : bool
        Whether the rows, those in the overflow area included, are page-locked for GPUs.
    read_only : bool
        Whether updates are refused.
    """

    def __init__(self, parts: TableParts, *, pin: bool, read_only: bool = False) -> None:
        self._begin(HostRows(parts, pin=pin), pin=pin, read_only=read_only)

    def _begin(self, rows: HostRows, *, pin: bool, read_only: bool) -> None:
        self._rows = rows
        self._pin = pin
        self._closed = False
        self._ownership = Ownership(read_only=read_only)
        self._caches: weakref.WeakSet[Cache] = weakref.WeakSet()
        self._lock = ReadersAndWriter()
        self._gathers = Gathers(rows, self._lock, pin=pin)
        call_after_fork(self)

    def after_fork(self) -> None:
        """Reset the state of one process: locks, copies on GPUs, counts."""
        self._lock = ReadersAndWriter()
        self._gathers.after_fork(self._lock)
        self._ownership.after_fork()

    @property
    def _parts(self) -> TableParts:
        return self._rows.parts

    # Properties

    @property
    def shape(self) -> torch.Size:
        """``[N, *row_shape]``."""
        return torch.Size(self._parts.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows' elements."""
        return self._parts.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def layout(self) -> Layout:
        """How rows are stored."""
        return self._parts.layout

    @property
    def codec(self) -> RowCodec:
        """Codec of the packed rows."""
        return self._parts.codec

    @property
    def rows_per_packed_row(self) -> int:
        """Number of rows in a packed row: 1, or more where narrow rows share a packed row."""
        return self._parts.items_per_row

    @property
    def row_bytes(self) -> int:
        """Bytes of a row before packing."""
        return self._parts.item_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of host memory: words, metadata, overflow area and profile."""
        return self._rows.nbytes

    @property
    def overflow_bytes(self) -> int:
        """Bytes of the overflow area, which holds rows that updates moved; see `compact`."""
        return self._rows.overflow_bytes

    @property
    def ratio(self) -> float:
        """Raw bytes over `nbytes`; 1 when there are none."""
        raw_bytes = len(self) * self.row_bytes
        return raw_bytes / self.nbytes if raw_bytes and self.nbytes else 1.0

    @property
    def pinned(self) -> bool:
        """Whether GPUs of this process can read the packed rows in host memory."""
        buffer = self._parts.buffers.get("words")
        return buffer is not None and buffer.pinned

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._parts.n_items

    # Reading

    def _check_open(self) -> None:
        if self._closed:
            raise BitslabError("table: is closed")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock.reading():
            self._check_open()
            yield

    def gather_through(
        self,
        cache: Cache | None,
        ids: torch.Tensor,
        out: torch.Tensor | None,
        device: torch.device | str | None,
        sort: bool | None,
        sm_budget: int | None,
    ) -> torch.Tensor:
        """Gather through a cache or, for None, without; see `CompressedTable.gather`."""
        self._check_open()
        wanted = checked_ids(ids)
        target = checked_target(ids, out, device)
        n, parts = wanted.shape[0], self._parts
        if out is not None:
            check_out_argument(out, (n, *parts.item_shape), parts.dtype, target, [ids])
        if target.type == "cpu":
            wanted = wanted.cpu()
        if wanted.device.type == "cpu":
            check_ids_in_range(wanted, parts.n_items)
        result = out
        if result is not None and not bits_in_order(result):
            # A copy of its contents, since bad ids leave `out` untouched.
            result = result.detach().resolve_conj().resolve_neg()
            result = result.clone(memory_format=torch.contiguous_format)
        if result is None:
            result = torch.empty((n, *parts.item_shape), dtype=parts.dtype, device=target)
        if n and parts.item_bytes:
            with self._reading():
                if target.type == "cpu":
                    data = rows_as_bytes(result, parts.item_bytes)
                    self._gathers.on_cpu(wanted, data, cache)
                else:
                    if wanted.device.type == "cpu":
                        # A copy from pageable memory would make the host wait for the GPU.
                        wanted = wanted.pin_memory()
                    wanted = wanted.to(target, non_blocking=True)
                    self._gathers.on_gpu(wanted, result, cache, sort, sm_budget)
        self._gathers.count(gathers=1, rows=n)
        return result if out is None or out is result else out.copy_(result)

    def check_ids(self, ids: torch.Tensor) -> None:
        """Raise IndexRangeError when one of the ids ``[n]`` on the CPU is out of range."""
        check_ids_in_range(checked_ids(ids), len(self))

    @property
    def counters(self) -> Counters:
        """Rows and words that gathers with no cache have read."""
        return self._gathers.counters

    def counters_for(self, cache: Cache | None) -> Counters:
        """Return the counters of gathers through a cache, or of gathers with no cache."""
        return self._gathers.counters_for(cache)

    def read_words(self) -> int:
        """Return the words of the table that were read by gathers; waits for the GPUs."""
        return self._gathers.read_words()

    @contextlib.contextmanager
    def unchanging(self) -> Iterator[None]:
        """Block updates, not readers; reentrant."""
        with self._ownership.unchanging():
            self._check_open()
            yield

    def row_lengths(self, ids: torch.Tensor) -> tuple[np.ndarray[Any, Any], int]:
        """Return words of packed rows and of a raw row, by their numbers among packed rows.

        See `HostRows.row_lengths`.
        """
        with self._reading():
            return self._rows.row_lengths(ids)

    def packed_words_of(self, ids: torch.Tensor, n_words: int) -> torch.Tensor:
        """Return the words of packed rows; see `HostRows.packed_words_of`."""
        with self._reading():
            return self._rows.packed_words_of(ids, n_words)

    def decoded(self, begin: int, end: int) -> torch.Tensor:
        """Return rows ``[end - begin, *row_shape]`` on the CPU; `stats` does not count them."""
        return self.rows_of(torch.from_numpy(np.arange(begin, end)))

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows ``[n, *row_shape]`` on the CPU by int64 ``[n]`` ids on the CPU, in range."""
        with self._reading():
            return self._rows.decoded(ids)

    def batches(self) -> Iterator[torch.Tensor]:
        """Return all rows, decoded, batch after batch; updates may run between batches."""
        return map(self.rows_of, self._rows.batch_ids())

    def packed_rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return packed rows by their numbers int64 ``[m]``: ``[m, *codec.row_shape]``, decoded."""
        parts = self._parts
        rows = torch.empty((ids.shape[0], *parts.codec.row_shape), dtype=parts.dtype)
        with self._reading():
            if parts.row_bytes:
                bad = self._rows.decode_packed_rows(ids, rows_as_bytes(rows, parts.row_bytes))
                raise_damaged(bad if bad < 0 else bad * parts.items_per_row)
        return rows

    # Updates

    def update(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite rows.

        Parameters
        ----------
        ids : torch.Tensor
            Integers ``[n]`` on a CPU or GPU. Of rows with one id the last counts.
        rows : torch.Tensor
            ``[n, *row_shape]`` of the table's dtype, on a CPU or GPU.

        Raises
        ------
        IndexRangeError
            When an id is out of range; nothing is changed.
        BitslabError
            When the table is closed, read-only, memory-mapped, or shared with other processes.

        Notes
        -----
        Returns when the change is made. A packed row that fits where the old one was is written
        there; one that does not is kept raw in an overflow area until `compact`. In place every row
        fits.
        """
        self._check_open()
        self._ownership.check("update", self._parts)
        numbers, rows = checked_update(ids, rows, tuple(self.shape), self.dtype)
        if not len(numbers) or not self.row_bytes:
            return
        with self._ownership.changing("update"):
            parts = self._parts
            if parts.items_per_row > 1:
                numbers, rows = merged(self.packed_rows_of, parts, numbers, rows)
            packed = None
            if not parts.raw:
                packed = parts.codec.encode(on_codec_device(parts.codec, rows)).to("cpu")
            with self._lock.writing():
                self._check_open()
                # Again: the table may have been shared since.
                self._ownership.check("update", parts)
                for cache in list(self._caches):
                    cache.forget(torch.from_numpy(numbers))
                try:
                    self._gathers.refresh(self._rows.update(numbers, rows, packed))
                except BaseException:
                    self._gathers.forget_copies()  # the next gather copies them again
                    raise

    def _replace(self, fresh: TableParts) -> None:
        """Switch to other buffers, inside `Ownership.changing`; a failure closes the new ones."""
        try:
            with self._lock.writing():
                self._check_open()
                self._ownership.check("compact", self._parts)
                if fresh.codec is not self.codec:
                    packed_rows = ceil_div(len(self), self.rows_per_packed_row)
                    for cache in list(self._caches):
                        cache.forget(torch.arange(packed_rows))
                old, self._rows = self._rows, HostRows(fresh, pin=self._pin)
                self._gathers.replace(self._rows)
        except BaseException:
            fresh.close()
            raise
        old.close()

    # Caches and other processes

    def add_cache(self, cache: Cache) -> None:
        """Invalidate updated rows in `cache` from now on; it is held weakly."""
        self._caches.add(cache)

    @property
    def token(self) -> str:
        """Identity of the table's memory, the same in every process that maps it."""
        return self._ownership.checksum or self._parts.buffers["words"].token

    def freeze(self) -> str:
        """Make the table read-only, and return its `token`."""
        with self._reading():
            self._ownership.read_only = True
            return self.token

    # Advice, statistics, end

    def advice(self, device: torch.device | str, batch_rows: int = BATCH_ROWS) -> Advice:
        """Return the advice of the models of link and decoder for gathers from this table.

        Parameters
        ----------
        device : torch.device or str
            Where rows go. Its link, and its rate of decoding such rows, are measured once.
        batch_rows : int
            Rows of a gather.
        """
        self._check_open()
        parts = self._parts
        n_sample = min(parts.n_rows, 4096, max(1, SAMPLE_BYTES // max(1, parts.row_bytes)))
        sample = None if parts.raw else lambda: self.packed_rows_of(torch.arange(n_sample))
        return advisor_for(checked_device(device)).advise(
            codec=None if parts.raw else self.codec,
            sample=sample,
            n_rows=len(self),
            row_bytes=max(1, self.row_bytes),
            rows_per_packed_row=self.rows_per_packed_row,
            packed_bytes=4 * parts.facts["packed_words"],
            packed_span_bytes=parts.tensors["words"].nbytes,
            batch_rows=batch_rows,
        )

    def stats(self) -> dict[str, Any]:
        """Return sizes and counts; reading them waits for the GPUs.

        Returns
        -------
        dict
            ``rows``, ``row_bytes``, ``rows_per_packed_row``, ``layout``, ``codec``,
            ``raw_bytes``, ``packed_bytes`` (the words), ``metadata_bytes`` (with the profile),
            ``host_bytes`` (all of it), ``ratio`` (raw over host bytes),
            ``packed_rows``, ``moved_rows``, ``overflow_bytes``, ``pinned``; of the gathers of this
            process so far, those through a cache included: ``gathers``, ``gathered_rows``,
            ``gathered_bytes`` (decoded), ``moved_bytes`` (words of this table read for them,
            through caches too); ``advice``, once a GPU was used: the decisions of the models
            of link and codec, with reasons.
        """
        self._check_open()
        parts, rows, gathers = self._parts, self._rows, self._gathers
        words = self.read_words()
        return {
            "rows": len(self),
            "row_bytes": self.row_bytes,
            "rows_per_packed_row": self.rows_per_packed_row,
            "layout": parts.layout,
            "codec": self.codec.describe(),
            "raw_bytes": parts.raw_bytes,
            "packed_bytes": parts.tensors["words"].nbytes,
            "metadata_bytes": parts.metadata_bytes + self.codec.profile_bytes,
            "host_bytes": self.nbytes,
            "ratio": self.ratio,
            "packed_rows": rows.packed_items,
            "moved_rows": rows.moved_items,
            "overflow_bytes": rows.overflow_bytes,
            "pinned": self.pinned,
            "gathers": gathers.total_gathers,
            "gathered_rows": gathers.total_rows,
            "gathered_bytes": gathers.total_rows * self.row_bytes,
            "moved_bytes": 4 * words,
            "advice": {str(device): self.advice(device).as_dict() for device in gathers.gpus},
        }

    def close(self) -> None:
        """Free the memory, after the gathers under way; closing twice is fine."""
        if self._closed:
            return
        with self._lock.writing():
            self._closed = True
            self._gathers.close()
            self._rows.close()
