"""HostTable: rows in host memory, open in one process, and the locks that guard them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..devices import checked_device
from ..engine.advisor.advice import Advice, advisor_for
from ..engine.codecs import RowCodec
from ..engine.codecs.base import (
    bits_in_order,
    check_ids_argument,
    check_in_range,
    check_out_argument,
    on_codec_device,
    rows_as_bytes,
)
from ..engine.kernels.cpu.prepared import SlotMap
from ..engine.memory.locks import ReadersAndWriter, call_after_fork
from ..errors import BitslabError
from .arguments import Index, checked_target, row_ids
from .build import SAMPLE_BYTES
from .cache import Cache, Caches
from .changes import MappedFile, Ownership, checked_update, merged
from .counters import Counters
from .gathering import Gathers
from .gpu_writes import GpuWrites
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
    file : MappedFile, optional
        The file that the packed rows are read from as they are used; updates are refused.
    """

    def __init__(
        self,
        parts: TableParts,
        *,
        pin: bool,
        read_only: bool = False,
        file: MappedFile | None = None,
    ) -> None:
        self._rows = rows = HostRows(parts, pin=pin)
        self._closed = False
        self._ownership = Ownership(read_only=read_only, file=file)
        self._caches = Caches()
        self._lock = ReadersAndWriter()
        self._gathers = Gathers(rows, self._lock)
        call_after_fork(self)

    def after_fork(self) -> None:
        """Reset the state of one process: locks, copies on GPUs, counts."""
        self._lock = ReadersAndWriter()
        self._gathers.after_fork(self._lock)
        self._ownership.after_fork()

    @property
    def _parts(self) -> TableParts:
        return self._rows.parts

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
    def outgrown_bytes(self) -> int:
        """Bytes of the rows in the overflow area, which has room for more."""
        return self._rows.outgrown_bytes

    @property
    def ratio(self) -> float:
        """Raw bytes over `nbytes`; 1 when there are none."""
        return self._parts.raw_bytes / self.nbytes if self._parts.raw_bytes and self.nbytes else 1.0

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

    def gather(
        self,
        ids: torch.Tensor,
        out: torch.Tensor | None = None,
        device: torch.device | str | None = None,
        *,
        sort: bool | None = None,
        sm_budget: int | None = None,
    ) -> torch.Tensor:
        """Return rows chosen by id, decoded.

        Parameters
        ----------
        ids : torch.Tensor
            Integers ``[n]`` on a CPU or GPU, repeated or not; negative ones count from the end.
        out : torch.Tensor, optional
            ``[n, *row_shape]`` of the table's dtype to write to.
        device : torch.device or str, optional
            Where the rows go; the device of `out`, or else of `ids`, when left out.
        sort : bool, optional
            On a GPU: whether to read the rows in the order of their ids, which is faster for large
            tables; by the model of the link when left out (see `bitslab.engine.advisor`).
        sm_budget : int, optional
            On a GPU: multiprocessors that the kernels may use; all when left out.

        Returns
        -------
        torch.Tensor
            `out`, or a new tensor.

        Raises
        ------
        IndexRangeError
            When an id is out of range; `out` is untouched. For ids on a GPU the error comes from
            the next call on that GPU or from `bitslab.raise_pending_errors`, because a gather never
            waits for the GPU.
        ArgumentTypeError, ArgumentError
            When an argument is not accepted.
        CorruptedDataError
            When a row is damaged; what `out` holds is undefined then.
        BitslabError
            When the table is closed.

        Notes
        -----
        On torch's current stream. Nothing waits for the GPU, and once warm nothing is allocated but
        the result; with `out` and ids on the GPU a call can be captured in a CUDA graph.
        """
        return self.gather_with(None, ids, out, device, sort, sm_budget)

    def gather_with(
        self,
        cache: Cache | None,
        ids: torch.Tensor,
        out: torch.Tensor | None,
        device: torch.device | str | None,
        sort: bool | None,
        sm_budget: int | None,
    ) -> torch.Tensor:
        """Gather, reading cached rows from `cache` where there is one; see `SlabCache.gather`."""
        self._check_open()
        wanted = check_ids_argument(ids)
        target = ids.device
        if out is not None or device is not None:
            target = checked_target(ids, out, device)
        n, parts = wanted.shape[0], self._parts
        shape = (n, *parts.item_shape)
        if out is not None:
            check_out_argument(out, shape, parts.dtype, target, [ids])
        if target.type == "cpu":
            wanted = wanted.cpu()
        if wanted.device.type == "cpu":
            check_in_range(wanted, parts.n_items)
        if out is None:
            result = torch.empty(shape, dtype=parts.dtype, device=target)
            data = result.view(-1).view(torch.uint8).view(n, parts.item_bytes)
        else:
            result = out
            if not bits_in_order(out):
                # A copy of its contents, since bad ids leave `out` untouched.
                result = out.detach().resolve_conj().resolve_neg()
                result = result.clone(memory_format=torch.contiguous_format)
            data = rows_as_bytes(result, parts.item_bytes)
        if n and parts.item_bytes:
            with self._lock.reading():
                self._check_open()
                if target.type == "cpu":
                    self._gathers.on_cpu(wanted, data, cache)
                else:
                    if wanted.device.type == "cpu":
                        # A copy from pageable memory would make the host wait for the GPU.
                        wanted = wanted.pin_memory()
                    wanted = wanted.to(target, non_blocking=True)
                    self._gathers.on_gpu(wanted, data, cache, sort, sm_budget)
        self._gathers.count(gathers=1, rows=n)
        return result if out is None or out is result else out.copy_(result)

    def gather_checked(
        self,
        cache: Cache | None,
        ids: torch.Tensor,
        out: torch.Tensor,
        sort: bool | None = None,
    ) -> None:
        """Gather for callers that have checked the arguments; see `gather_with`.

        Parameters
        ----------
        cache : Cache or None
            As in `gather_with`.
        ids : torch.Tensor
            int32 or int64 ``[n]``, contiguous, on the device of `out`; on a CPU in range.
        out : torch.Tensor
            ``[n, *row_shape]`` of the table's dtype, contiguous.
        sort : bool, optional
            As in `gather`.
        """
        if out.numel():
            with self._reading():
                data = out.view(torch.uint8).view(out.shape[0], self.row_bytes)
                if data.device.type == "cpu":
                    self._gathers.on_cpu(ids, data, cache)
                else:
                    self._gathers.on_gpu(ids, data, cache, sort, None)
        self._gathers.count(gathers=1, rows=ids.shape[0])

    def look_up_bags(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        slots: SlotMap,
        resident: torch.Tensor,
        out: torch.Tensor,
    ) -> int | None:
        """Sum bags of one id each on the CPU: rows out of a cache, the others decoded, and 0 added.

        Parameters
        ----------
        ids, offsets : torch.Tensor
            int64 ``[n]`` on the CPU, contiguous: rows, and where bags begin.
        slots : SlotMap
            The slot of each row in `resident`.
        resident : torch.Tensor
            ``[slots, *row_shape]`` of the table's dtype, contiguous.
        out : torch.Tensor
            float32 or float64 ``[n, *row_shape]``, contiguous.

        Returns
        -------
        int or None
            Number of rows that were not resident. None where one pass cannot do it: an id
            is out of range or negative, bag n does not begin at id n, the table is raw or in
            place, or its rows share packed rows. What `out` holds is undefined then.
        """
        with self._reading():
            return self._gathers.look_up_bags(ids, offsets, slots, resident, out)

    def gather_on_gpu(
        self, cache: Cache | None, ids: torch.Tensor, out: torch.Tensor, sort: bool | None = None
    ) -> None:
        """Gather on a GPU for callers that have checked the arguments; see `gather_with`.

        Parameters
        ----------
        cache : Cache or None
            As in `gather_with`.
        ids : torch.Tensor
            int32 or int64 ``[n]``, contiguous, on the device of `out`. Negative ones are out of
            range.
        out : torch.Tensor
            ``[n, *row_shape]`` of the table's dtype, contiguous, on a GPU.
        sort : bool, optional
            As in `gather`.
        """
        n = ids.shape[0]
        if n and self.row_bytes:
            with self._reading():
                self._gathers.on_gpu(ids, out, cache, sort, None, from_end=False)
        self._gathers.count(gathers=1, rows=n)

    def readable_by_gpu(self) -> bool:
        """Return whether GPUs can read the packed rows in host memory; page-lock them if so."""
        with self._reading():
            return self._gathers.readable_by_gpu()

    def rows_for_gpu(self) -> torch.Tensor | None:
        """Return the raw rows in page-locked memory, for a GPU that reads and overwrites them.

        Returns
        -------
        torch.Tensor or None
            uint8 ``[N, row_bytes]``. None where rows are packed, or may not be changed, or have
            copies in a `SlabCache`: then `update` changes them, or says why not. Who writes asks
            `takes_gpu_writes` each time, and waits for the GPU before anybody else reads.
        """
        with self._reading():
            if not self.takes_gpu_writes or not self._gathers.readable_by_gpu():
                return None
            self._rows.dirty = True
            return self._parts.raw_rows()

    @property
    def takes_gpu_writes(self) -> bool:
        """Whether rows are raw, and may be overwritten by a GPU; see `rows_for_gpu`."""
        return self._rows.parts.raw and self._may_be_written

    @property
    def _may_be_written(self) -> bool:
        parts = self._rows.parts
        alone = not (self._closed or self._caches) and parts.items_per_row == 1
        return alone and self._ownership.allows_changes(parts)

    def writes_by_gpu(self, device: torch.device) -> GpuWrites | None:
        """Return what packs rows into the table by kernels of a GPU; None as for `rows_for_gpu`.

        None also where rows are raw, or their codec has no kernel for it. Ask each time.
        """
        with self._reading():
            reached = self._may_be_written and self._gathers.readable_by_gpu()
            return self._gathers.writes(device) if reached and not self._parts.raw else None

    def gather_some_on_gpu(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Gather on a GPU the rows of some ids, which the caller has checked; skip NO_ROW.

        Parameters
        ----------
        ids : torch.Tensor
            int64 ``[n]``, contiguous, on the GPU: 0 to N - 1, or ``kernels.format.NO_ROW``, whose
            row of `out` is left as it is.
        out : torch.Tensor
            As for `gather_on_gpu`; the table is `readable_by_gpu`.
        """
        with self._reading():
            self._gathers.some_on_gpu(ids, out)

    def __getitem__(self, index: Index) -> torch.Tensor:
        """Return rows by an int, a slice, integers of any shape, or a bool mask ``[N]``."""
        ids = row_ids(index, len(self))
        rows = self.gather(ids.reshape(-1))
        return rows.view(*ids.shape, *self.shape[1:])

    def check_ids(self, ids: torch.Tensor) -> None:
        """Raise IndexRangeError when one of the ids ``[n]`` on the CPU is out of range."""
        check_in_range(check_ids_argument(ids), len(self))

    @property
    def counters(self) -> Counters:
        """Rows and words that gathers with no cache have read."""
        return self._gathers.counters

    def counters_for(self, cache: Cache | None) -> Counters:
        """Return the counters of gathers through a cache, or of gathers with no cache."""
        return self._gathers.counters_for(cache)

    @contextlib.contextmanager
    def unchanging(self) -> Iterator[None]:
        """Block updates, not readers; reentrant."""
        with self._ownership.unchanging():
            self._check_open()
            yield

    def row_lengths(self, ids: torch.Tensor) -> tuple[np.ndarray[Any, Any], int]:
        """Return words of packed rows, by number, and of a raw row; see `HostRows.row_lengths`."""
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
                self._caches.forget(torch.from_numpy(numbers))
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
                    self._caches.forget(torch.arange(self._parts.n_rows))
                old, self._rows = self._rows, HostRows(fresh, pin=self._rows.pin)
                self._gathers.replace(self._rows)
        except BaseException:
            fresh.close()
            raise
        old.close()

    def add_cache(self, cache: Cache) -> None:
        """Invalidate updated rows in `cache` from now on; it is held weakly."""
        self._caches.add(cache)

    @property
    def token(self) -> str:
        """Identity of the table's memory, the same in every process that maps it."""
        file = self._ownership.file
        return self._parts.buffers["words"].token if file is None else file.checksum

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
            ``rows``, ``row_bytes``, ``rows_per_packed_row``, ``layout``, ``codec``, ``raw_bytes``,
            ``packed_bytes`` (words), ``metadata_bytes`` (with the profile), ``host_bytes`` (of it
            all), ``ratio`` (raw over host bytes), ``packed_rows``, ``moved_rows``, ``pinned``,
            ``overflow_bytes``; of this process's gathers, through caches too: ``gathers``,
            ``gathered_rows``, ``gathered_bytes`` (decoded), ``moved_bytes`` (words read for them);
            ``advice``, once a GPU was used: decisions of link and codec models, with reasons.
        """
        self._check_open()
        parts, rows = self._parts, self._rows
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
            **self._gathers.stats(self.row_bytes),
            "advice": {str(device): self.advice(device).as_dict() for device in self._gathers.gpus},
        }

    def close(self) -> None:
        """Free the memory, after the gathers under way; closing twice is fine."""
        if self._closed:
            return
        with self._lock.writing():
            self._closed = True
            self._gathers.close()
            self._rows.close()
