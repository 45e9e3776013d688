"""CompressedTable: rows packed in host memory, gathered by id to a CPU or a GPU."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ..advisor.advice import Advice, advisor_for
from ..codecs import InvariantCodec, RawCodec, RowCodec
from ..codecs.base import (
    bits_in_order,
    check_out_argument,
    check_rows_argument,
    check_tensor_argument,
    raise_bad_index,
    rows_as_bytes,
)
from ..container import PathLike, load
from ..dtypes import dtype_name
from ..errors import ArgumentError, BitslabError, CorruptedDataError
from ..kernels import cpu
from ..kernels.cpu.prepared import PreparedTable
from ..kernels.format import MAX_SLABS
from ..tensor import CompressedTensor
from ..transfer.gather import gather_copied_rows, gather_packed_rows
from .arguments import Index, checked_device, checked_ids, row_ids, target_device
from .build import (
    SAMPLE_BYTES,
    Rows,
    build_parts,
    check_layout,
    choose_codec,
    peek,
    rows_per_batch,
    sample_rows,
    slices_of,
    take_rows,
)
from .cache import Cache
from .counters import Counters
from .device import DeviceCopies
from .locks import ReadersAndWriter, call_after_fork
from .parts import Layout, TableParts
from .progress import Progress, ProgressFunction
from .rows import HostRows
from .sharing import checksum_of_file, handle_of, parts_of_handle

CPU = torch.device("cpu")
POPULATED_BYTES = 4 << 30  # up to which all pages are mapped at the first gather: about a second


class CompressedTable:
    """A table of rows that lie packed in host memory; any rows are gathered by id, decoded.

    On a GPU one kernel reads the packed rows over the link (zero-copy) and decodes them; the
    packed bytes are all that crosses. On the CPU the same rows come from Numba kernels.

    Make one with `from_tensor`, `from_file` or `attach`.

    Attributes
    ----------
    shape : torch.Size
        ``[N, *row_shape]``.
    dtype : torch.dtype
        Dtype of the rows' elements.
    layout : {"compact", "inplace"}
        ``"compact"``: packed rows back to back; host memory shrinks, and a GPU keeps 1.25 bytes a
        row to find them (2.25 for rows over 1 KiB, 4.25 over 256 KiB; one more for a codec with
        clusters). ``"inplace"``: row i stays at i * row_bytes
        (rounded up to 4), host memory does not shrink, and a GPU keeps one bit a row (IBP,
        section 5).
    codec : RowCodec
        What packed the rows; RawCodec when packing gains nothing, and then no gather pays for it.

    Notes
    -----
    Threads: any number may gather at once. `update` and `compact` wait for gathers under way, those
    on GPUs included, and hold off new ones, so that a gather sees the old or the new value of a
    row, never a mix. Replays of a CUDA graph that captured a gather are not seen: no update may run
    beside them, and after an update or `compact` the graph must be captured again.

    Processes: a table reaches a worker process (fork, spawn, ``torch.multiprocessing``) as the same
    memory, and an unrelated process of the same user by `handle` and `attach`; each page-locks it
    for its own GPUs. A table that was handed out so is read-only from then on. Forked children
    share the memory too: they cannot change it, and must not read rows that their parent updates
    after the fork. Plain pickling and the `copy` module copy.

    Examples
    --------
    >>> import torch, bitslab
    >>> features = torch.randn(1000, 64).round()
    >>> table = bitslab.CompressedTable.from_tensor(features)
    >>> torch.equal(table[[3, 1, 3]], features[[3, 1, 3]])
    True
    >>> table.stats()["ratio"] > 2
    True
    """

    def __init__(self, parts: TableParts, *, pin: bool, read_only: bool = False) -> None:
        self._begin(HostRows(parts, pin=pin), pin=pin, read_only=read_only)

    def _begin(self, rows: HostRows, *, pin: bool, read_only: bool) -> None:
        self._rows = rows
        self._pin = pin
        self._read_only = read_only
        self._path: str | None = None  # of the file that is mapped, and its checksum
        self._checksum = ""
        self._pid = os.getpid()
        self._closed = False
        self._populated = False
        self._caches: weakref.WeakSet[Cache] = weakref.WeakSet()
        # What gathers on the CPU read, with the rows and the overflow's size that it was made for.
        self._prepared: tuple[HostRows, int, PreparedTable | None] | None = None
        self.after_fork()
        call_after_fork(self)

    def after_fork(self) -> None:
        """Set up what belongs to one process: locks, copies on GPUs, counts."""
        # A child cannot let go what its parent has on GPUs, so it keeps that.
        inherited = ("_lock", "_device_copies", "counters", "_inherited")
        self._inherited = [self.__dict__.get(name) for name in inherited]
        self._lock = ReadersAndWriter()
        # Held by whoever changes the table and by whoever must not see it change. Reentrant, so
        # that a function that `compact` calls can save the table.
        self._update_lock = threading.RLock()
        self._busy = ""  # what changes the table: "update", "compact"
        self._device_copies = DeviceCopies()
        self._gpus: set[torch.device] = set()  # that gathered from this table
        self._totals_lock = threading.RLock()
        self._totals = {"gathers": 0, "rows": 0, "copied_words": 0}
        self.counters = Counters()

    @property
    def _parts(self) -> TableParts:
        return self._rows.parts

    # Making one

    @classmethod
    def from_tensor(
        cls,
        t: Rows | Iterable[Rows],
        layout: Layout = "compact",
        codec: str | RowCodec = "auto",
        pin: bool = True,
        *,
        device: torch.device | str | None = None,
        seed: int = 0,
        progress: ProgressFunction | bool | None = None,
        **options: Any,
    ) -> CompressedTable:
        """Pack a table.

        Parameters
        ----------
        t : torch.Tensor, numpy.ndarray, or iterable of them
            ``[N, *row_shape]`` of any dtype, on a CPU or GPU; a memory-mapped array is read piece
            by piece. An iterable gives batches ``[n, *row_shape]`` of any number of rows each; the
            codec is fitted on the first of them, up to 8 MiB of rows.
        layout : {"compact", "inplace"}
            How rows lie; see `CompressedTable`.
        codec : str or RowCodec
            ``"auto"``: invariant bit packing with a plan for these rows, or raw where packing does
            not make them smaller. A name: that codec, fitted to these rows. A codec: that one.
        pin : bool
            Whether the packed rows are page-locked, as a GPU needs to read them itself. Without a
            GPU nothing is locked until one is used.
        device : torch.device or str, optional
            Where rows are packed: a GPU does it at the link's rate. Where they are when left out.
        seed : int
            Seed of the choice of sample rows, and of the codec's `fit`.
        progress : callable, bool, optional
            Called with the rows done and all rows (or None) after each batch. When left out, a bar
            is shown on a terminal after two seconds; False for none. Where packing turns out to
            gain nothing, rows are counted from 0 again while they are kept raw.
        **options
            For the codec's `fit`.

        Returns
        -------
        CompressedTable

        Raises
        ------
        ArgumentTypeError, ArgumentError
            When an argument is not accepted. Nothing is kept of a table that could not be finished.

        Notes
        -----
        Extra memory: a few times 32 MiB, or 32 rows if those are more, whatever the size of the
        table.
        """
        check_layout(layout)
        where = None if device is None else checked_device(device)
        if isinstance(t, (torch.Tensor, np.ndarray)):
            if t.ndim < 1:
                raise ArgumentError("t: has no dimension; a table needs rows")
            if isinstance(t, torch.Tensor):
                check_tensor_argument("t", t)
            n_rows: int | None = t.shape[0]
            sample = sample_rows(t, seed)
            batches: Iterable[torch.Tensor] = slices_of(t)
        else:
            n_rows = None
            sample, batches = peek(t, seed)
        if not isinstance(codec, RowCodec) and codec in ("auto", "ibp"):
            options = {"seed": seed, **options}
        fitted = choose_codec(sample, codec, n_rows, options)
        with Progress("packing", n_rows, progress) as shown:
            parts = build_parts(batches, fitted, layout, pin=pin, progress=shown, device=where)
            if codec == "auto" and not parts.raw and parts.gains_nothing():
                # The sample promised more than all rows keep.
                shown.restart()
                with cls(parts, pin=False) as packed:
                    raw = RawCodec(parts.row_shape, parts.dtype)
                    parts = build_parts(packed._batches(), raw, layout, pin=pin, progress=shown)
        return cls(parts, pin=pin)

    @classmethod
    def from_file(
        cls, path: PathLike, layout: Layout = "compact", pin: bool = True
    ) -> CompressedTable:
        """Open a table that `save` wrote.

        Parameters
        ----------
        path : str or os.PathLike
            A file of one compressed tensor whose rows are the items of its first dimension.
        layout : {"compact", "inplace"}
            How rows are to lie.
        pin : bool
            With a GPU: read the packed rows into page-locked memory. Without a GPU, or when False,
            a compact table of packed rows stays memory-mapped and is read as it is used: the file
            may be replaced, but must not be written to.

        Raises
        ------
        CorruptedDataError
            When the file is truncated, altered, or not by bitslab.
        ArgumentError
            When the file holds something else than one table.
        OSError
            When the file cannot be read.
        """
        check_layout(layout)
        ct = load(path)
        if len(ct.shape) < 1 or tuple(ct.codec.row_shape) != tuple(ct.shape[1:]):
            raise ArgumentError(
                f"{os.fspath(path)}: holds a tensor {list(ct.shape)} in rows of "
                f"{list(ct.codec.row_shape)}, expected one row for each item, as "
                "CompressedTable.save writes them"
            )
        with Progress("reading", len(ct), None) as shown:
            if isinstance(ct.codec, RawCodec):
                batches = slices_of(ct.packed.parts["rows"])
                return cls(build_parts(batches, ct.codec, layout, pin=pin, progress=shown), pin=pin)
            if not isinstance(ct.codec, InvariantCodec):
                raise ArgumentError(
                    f"{os.fspath(path)}: packed by {ct.codec.name!r}; tables hold rows of 'ibp' "
                    "and 'raw'"
                )
            mapped = cls(TableParts.from_compressed(ct), pin=False)
            if layout == "inplace":
                with mapped:
                    batches = mapped._batches()
                    parts = build_parts(batches, ct.codec, layout, pin=pin, progress=shown)
                return cls(parts, pin=pin)
            if pin and torch.cuda.is_available():
                return cls(mapped._parts.copy(pin=pin, progress=shown), pin=pin)
            mapped._path = os.path.abspath(path)
            mapped._checksum = checksum_of_file(path)
            return mapped

    def save(self, path: PathLike) -> None:
        """Write the table to a file that `from_file` and `bitslab.load` read.

        Parameters
        ----------
        path : str or os.PathLike
            The file appears whole or not at all: a crash or a full disk leaves an old one as is.

        Raises
        ------
        OSError
            When the file cannot be written.

        Notes
        -----
        Readers go on, updates wait. A table in place, or one with updated rows, is packed anew for
        the file, which takes memory for one more compact copy; so does a raw table whose rows are
        no multiple of 4 bytes.
        """
        with self.unchanging():
            parts, fresh = self._parts, None
            if not parts.raw and (parts.layout == "inplace" or self._rows.dirty):
                with Progress("packing", len(self), None) as shown:
                    fresh = parts = build_parts(
                        self._batches(), parts.codec, "compact", pin=False, progress=shown
                    )
            try:
                with self._reading():
                    packed = parts.as_packed()
                CompressedTensor(parts.codec, packed, self.shape).save(path)
            finally:
                if fresh is not None:
                    fresh.close()

    # What it is

    @property
    def shape(self) -> torch.Size:
        """``[N, *row_shape]``."""
        return torch.Size((self._parts.n_rows, *self._parts.row_shape))

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
        """How rows lie."""
        return self._parts.layout

    @property
    def codec(self) -> RowCodec:
        """What packed the rows."""
        return self._parts.codec

    @property
    def row_bytes(self) -> int:
        """Bytes of a row before packing."""
        return self._parts.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of host memory: words, what finds rows in them, and rows that have moved."""
        return self._rows.nbytes

    @property
    def overflow_bytes(self) -> int:
        """Bytes of rows that updates have moved; see `compact`."""
        return self._rows.overflow_bytes

    @property
    def ratio(self) -> float:
        """Bytes of the rows over `nbytes`; 1 when there are none."""
        raw_bytes = len(self) * self.row_bytes
        return raw_bytes / self.nbytes if raw_bytes and self.nbytes else 1.0

    @property
    def pinned(self) -> bool:
        """Whether GPUs of this process can read the packed rows by themselves."""
        buffer = self._parts.buffers.get("words")
        return buffer is not None and buffer.pinned

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._parts.n_rows

    def __repr__(self) -> str:
        """Name shape, dtype, layout, plan and ratio."""
        if self._closed:
            return "CompressedTable(closed)"
        return (
            f"CompressedTable({list(self.shape)}, {dtype_name(self.dtype)}, {self.layout}, "
            f"{self.codec.describe()}, {self.ratio:.2f}x)"
        )

    # Gathering

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
            Where the rows are wanted; that of `out`, or else of `ids`, when left out.
        sort : bool, optional
            On a GPU: whether to take the rows in the order in which they lie, which large tables
            gain from; by the model of the link when left out (see `bitslab.advisor`).
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
        return self._gather(ids, out, device, None, sort, sm_budget)

    def gather_with(
        self,
        cache: Cache,
        ids: torch.Tensor,
        out: torch.Tensor | None,
        device: torch.device | str | None,
        sort: bool | None,
        sm_budget: int | None,
    ) -> torch.Tensor:
        """Gather, but take what `cache` has from there; see `SlabCache.gather`."""
        return self._gather(ids, out, device, cache, sort, sm_budget)

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
            As there.
        ids : torch.Tensor
            int32 or int64 ``[n]``, contiguous, on the device of `out`; on a CPU in range.
        out : torch.Tensor
            ``[n, *row_shape]`` of the table's dtype, contiguous.
        sort : bool, optional
            As in `gather`.
        """
        if out.numel():
            with self._lock.reading():
                self._check_open()
                data = out.view(torch.uint8).view(out.shape[0], self.row_bytes)
                if data.device.type == "cpu":
                    self._gather_on_cpu(ids, data, cache)
                else:
                    self._gather_on_gpu(ids, data, cache, sort, None)
        if cache is None:
            self._count(gathers=1, rows=ids.shape[0])

    def look_up_bags(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        slot_of: np.ndarray[Any, Any],
        resident: torch.Tensor,
        out: torch.Tensor,
    ) -> int | None:
        """Sum bags of one id each on the CPU: rows out of a cache, the others decoded, and 0 added.

        Parameters
        ----------
        ids, offsets : torch.Tensor
            int64 ``[n]`` on the CPU, contiguous: rows, and where bags begin.
        slot_of : numpy.ndarray
            int32 ``[N]``, contiguous: the slot of each row in `resident`, negative for none.
        resident : torch.Tensor
            ``[slots, *row_shape]`` of the table's dtype, contiguous.
        out : torch.Tensor
            float32 or float64 ``[n, *row_shape]``, contiguous.

        Returns
        -------
        int or None
            How many of the rows were not resident. None where that cannot be done in one go: an id
            is out of range or negative, bag n does not begin at id n, or the table is raw or in
            place. What `out` holds is undefined then.
        """
        with self._lock.reading():
            self._check_open()
            prepared = None if self._parts.raw or not out.numel() else self._prepared_rows()
            if prepared is None:
                return None
            self._populate()
            found = prepared.look_up(ids, offsets, slot_of, resident, out)
            if found is None:
                return None
            damaged, words, missing = found
            _raise_damaged(damaged)
        if missing:
            self._count(gathers=1, rows=missing, copied_words=words)
        return missing

    def gather_on_gpu(
        self, cache: Cache | None, ids: torch.Tensor, out: torch.Tensor, sort: bool | None = None
    ) -> None:
        """Gather on a GPU for callers that have checked the arguments; see `gather_with`.

        Parameters
        ----------
        cache : Cache or None
            As there.
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
            with self._lock.reading():
                self._check_open()
                self._gather_on_gpu(ids, out, cache, sort, None, from_end=False)
        if cache is None:
            self._count(gathers=1, rows=n)

    def __getitem__(self, index: Index) -> torch.Tensor:
        """Return rows by an int, a slice, integers of any shape, or a bool mask ``[N]``."""
        ids = row_ids(index, len(self))
        rows = self.gather(ids.reshape(-1))
        return rows.view(*ids.shape, *self.shape[1:])

    def _gather(
        self,
        ids: torch.Tensor,
        out: torch.Tensor | None,
        device: torch.device | str | None,
        cache: Cache | None,
        sort: bool | None,
        sm_budget: int | None,
    ) -> torch.Tensor:
        self._check_open()
        wanted = checked_ids(ids)
        if out is not None:
            check_tensor_argument("out", out)
        target = target_device(ids, out, device)
        n = wanted.shape[0]
        if out is not None:
            check_out_argument(out, (n, *self._parts.row_shape), self.dtype, target, [ids])
        if target.type == "cpu":
            wanted = wanted.cpu()
        if wanted.device.type == "cpu":
            self._check_ids(wanted)
        result = out
        if result is not None and not bits_in_order(result):
            # A copy of what it holds, since bad ids leave `out` untouched.
            result = result.detach().resolve_conj().resolve_neg()
            result = result.clone(memory_format=torch.contiguous_format)
        if result is None:
            result = torch.empty((n, *self._parts.row_shape), dtype=self.dtype, device=target)
        if n and self.row_bytes:
            with self._lock.reading():
                self._check_open()
                if target.type == "cpu":
                    self._gather_on_cpu(wanted, rows_as_bytes(result, self.row_bytes), cache)
                else:
                    if wanted.device.type == "cpu":
                        # A copy from pageable memory would make the host wait for the GPU.
                        wanted = wanted.pin_memory()
                    wanted = wanted.to(target, non_blocking=True)
                    self._gather_on_gpu(wanted, result, cache, sort, sm_budget)
        if cache is None:
            self._count(gathers=1, rows=n)
        return result if out is None or out is result else out.copy_(result)

    def _gather_on_cpu(self, ids: torch.Tensor, data: torch.Tensor, cache: Cache | None) -> None:
        self._populate()
        if self._parts.raw and cache is None:
            self._rows.decode(ids, data)
            self._count(copied_words=ids.shape[0] * self._parts.row_words)
            return
        prepared = self._prepared_rows() if cache is None else None
        if prepared is not None:
            damaged, words = prepared.gather(ids, data)
            _raise_damaged(damaged)
            self._count(copied_words=words)
            return
        storage = None if cache is None else cache.storage(CPU)
        counts = torch.zeros(2 * (MAX_SLABS + 1), dtype=torch.int64)
        _raise_damaged(self._rows.decode(ids, data, cache=storage, counters=counts))
        (self if cache is None else cache).counters.add(counts)

    def _populate(self) -> None:
        """Map the pages of the rows, once."""
        if not self._populated:
            self._populated = True
            buffer = self._parts.buffers.get("words")
            if buffer is not None and buffer.nbytes <= POPULATED_BYTES:
                buffer.populate()

    def _prepared_rows(self) -> PreparedTable | None:
        """Return the rows made ready for gathers on the CPU, or None where that cannot be."""
        rows, overflow_bytes = self._rows, self._rows.overflow_bytes
        found = self._prepared
        # Updates write to memory in place, but for an overflow that has to grow.
        if found is None or found[0] is not rows or found[1] != overflow_bytes:
            storage = rows.storage()
            serves = PreparedTable.serves(storage, rows.layout)
            prepared = PreparedTable(storage, rows.layout) if serves else None
            found = self._prepared = (rows, overflow_bytes, prepared)
        return found[2]

    def _gather_on_gpu(
        self,
        ids: torch.Tensor,
        out: torch.Tensor,
        cache: Cache | None,
        sort: bool | None,
        sm_budget: int | None,
        *,
        from_end: bool = True,
    ) -> None:
        device, parts = out.device, self._parts
        buffer = parts.buffers.get("words")
        if not (self._pin and buffer is not None and buffer.ensure_pinned()):
            # The GPU cannot read the rows itself: the CPU gathers them, and a copy brings them.
            on_host = torch.empty(out.shape, dtype=out.dtype)
            wanted = ids.cpu()
            self._check_ids(wanted)
            if not from_end and bool((wanted < 0).any()):
                position = int((wanted < 0).nonzero()[0])
                raise_bad_index(int(wanted[position]), position, len(self), "ids")
            self._gather_on_cpu(wanted, rows_as_bytes(on_host, self.row_bytes), cache)
            out.copy_(on_host)
            return
        self._gpus.add(device)
        try:
            if parts.raw and cache is None:
                gather_copied_rows(
                    self._device_copies.raw_rows(self._rows),
                    parts.row_bytes,
                    ids,
                    out,
                    sort=sort,
                    sm_budget=sm_budget,
                    from_end=from_end,
                )
                self._count(copied_words=ids.shape[0] * parts.row_words)
                return
            storage, layout = self._device_copies.get(device, self._rows)
            gather_packed_rows(
                storage,
                layout,
                ids,
                out,
                cache=None if cache is None else cache.storage(device),
                counters=(self if cache is None else cache).counters.on(device),
                sort=sort,
                sm_budget=sm_budget,
                from_end=from_end,
            )
        finally:
            self._lock.mark_gpu_read(device)

    def _count(self, **more: int) -> None:
        with self._totals_lock:
            for name, n in more.items():
                self._totals[name] += n

    def check_ids(self, ids: torch.Tensor) -> None:
        """Raise IndexRangeError when one of the ids ``[n]`` on the CPU is out of range."""
        self._check_ids(checked_ids(ids))

    def _check_ids(self, ids: torch.Tensor) -> None:
        position = cpu.check_ids(ids, len(self))
        if position >= 0:
            raise_bad_index(int(ids[position]), position, len(self), "ids")

    # For caches

    @contextlib.contextmanager
    def unchanging(self) -> Iterator[None]:
        """Hold off updates, not readers; a thread may enter again."""
        with self._update_lock:
            self._check_open()
            yield

    def row_lengths(self, ids: torch.Tensor) -> tuple[np.ndarray[Any, Any], int]:
        """Return words of packed rows and of a raw row; see `HostRows.row_lengths`."""
        with self._reading():
            return self._rows.row_lengths(ids)

    def packed_words_of(self, ids: torch.Tensor, n_words: int) -> torch.Tensor:
        """Return the packed words of rows; see `HostRows.packed_words_of`."""
        with self._reading():
            return self._rows.packed_words_of(ids, n_words)

    def _batches(self) -> Iterator[torch.Tensor]:
        """Yield all rows, decoded, batch after batch; these gathers are not counted."""
        step = rows_per_batch(self.row_bytes)
        for begin in range(0, len(self), step):
            yield self.decoded(begin, min(begin + step, len(self)))

    def decoded(self, begin: int, end: int) -> torch.Tensor:
        """Return rows ``[end - begin, *row_shape]`` on the CPU; `stats` does not count them."""
        return self.rows_of(torch.from_numpy(np.arange(begin, end)))

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Do the same for int64 ``[n]`` ids on the CPU, in range."""
        rows = torch.empty((ids.shape[0], *self.shape[1:]), dtype=self.dtype)
        with self._reading():
            if self.row_bytes:
                _raise_damaged(self._rows.decode(ids, rows_as_bytes(rows, self.row_bytes)))
        return rows

    # On a GPU

    def advice(self, device: torch.device | str, batch_rows: int = 100_000) -> Advice:
        """Return what the models of link and decoder say about gathers from this table.

        Parameters
        ----------
        device : torch.device or str
            Where rows are wanted. Its link, and its rate of decoding such rows, are measured once.
        batch_rows : int
            Rows of a gather.
        """
        self._check_open()
        parts = self._parts
        n_sample = min(len(self), 4096, max(1, SAMPLE_BYTES // max(1, self.row_bytes)))
        sample = None if parts.raw else lambda: self.decoded(0, n_sample)
        return advisor_for(checked_device(device)).advise(
            codec=None if parts.raw else self.codec,
            sample=sample,
            n_rows=len(self),
            row_bytes=max(1, self.row_bytes),
            packed_bytes=4 * parts.facts["packed_words"],
            packed_span_bytes=parts.tensors["words"].nbytes,
            batch_rows=batch_rows,
        )

    # Changing rows

    def update(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Give rows new values.

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
            When the table is closed, read-only, memory-mapped, or was handed to other processes.

        Notes
        -----
        Returns when the change is made. A packed row that fits its old place goes there; one that
        does not is kept raw in an overflow area until `compact`. In place every row fits.
        """
        self._check_open()
        self._check_writable("update")
        check_rows_argument(self.codec, rows)
        wanted = checked_ids(ids).cpu()
        if wanted.shape[0] != rows.shape[0]:
            raise ArgumentError(f"ids, rows: {wanted.shape[0]} ids for {rows.shape[0]} rows")
        self.check_ids(wanted)
        numbers = wanted.numpy().astype(np.int64)
        numbers = np.where(numbers < 0, numbers + len(self), numbers)
        last = len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1]
        if len(last) < len(numbers):
            numbers = numbers[last]
            rows = take_rows(rows, last)
        if not len(numbers) or not self.row_bytes:
            return
        with self._changing("update"):
            packed = None if self._parts.raw else self.codec.encode(rows).to(CPU)
            with self._lock.writing():
                self._check_open()
                # Once more: it may have been handed out since.
                self._check_writable("update")
                for cache in list(self._caches):
                    cache.forget(torch.from_numpy(numbers))
                try:
                    changed = self._rows.update(numbers, rows, packed)
                    self._device_copies.refresh(self._rows, changed)
                except BaseException:
                    self._device_copies.clear()  # made anew from what the host has
                    raise

    def compact(
        self, progress: ProgressFunction | bool | None = None, *, refit: bool = False
    ) -> None:
        """Pack the table anew: every row lies in its place again and takes no more than it needs.

        Readers go on while the new copy is made beside the old one; updates wait.

        Parameters
        ----------
        progress : callable, bool, optional
            As in `from_tensor`. What it calls may gather from the table and save it, not change it.
        refit : bool
            Whether to fit the codec to the rows as they are now, or to keep them raw if packing
            gains nothing any more. A cache over the table then has to be filled again.

        Raises
        ------
        BitslabError
            As in `update`.
        """
        self._check_open()
        if self._parts.raw or not self._rows.dirty:
            return
        with self._changing("compact"):
            self._check_writable("compact")
            with Progress("packing", len(self), progress) as shown:
                codec = self._fitted_again() if refit else self.codec
                fresh = build_parts(
                    self._batches(), codec, self.layout, pin=self._pin, progress=shown
                )
            try:
                with self._lock.writing():
                    self._check_open()
                    self._check_writable("compact")
                    if codec is not self.codec:
                        for cache in list(self._caches):
                            cache.forget(torch.arange(len(self)))
                        self._device_copies = DeviceCopies()
                    old, self._rows = self._rows, HostRows(fresh, pin=self._pin)
                    self._prepared = None
                    self._device_copies.clear()
            except BaseException:
                fresh.close()
                raise
            old.close()

    def _fitted_again(self) -> RowCodec:
        n_sample = min(len(self), max(1, SAMPLE_BYTES // max(1, self.row_bytes)))
        picked = np.sort(np.random.default_rng(0).choice(len(self), n_sample, replace=False))
        return choose_codec(self.rows_of(torch.from_numpy(picked)), "auto", len(self), {})

    @contextlib.contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """Be the only one that changes the table."""
        with self._update_lock:
            if self._busy:
                raise BitslabError(f"{what}: called from inside {self._busy} of the same table")
            self._busy = what
            try:
                yield
            finally:
                self._busy = ""

    def _check_writable(self, what: str) -> None:
        if self._path is not None:
            raise BitslabError(
                f"{what}: this table is memory-mapped from {self._path}; open it with "
                "layout='inplace', or make one with from_tensor"
            )
        if self._pid != os.getpid():
            raise BitslabError(f"{what}: this table belongs to process {self._pid}, the parent")
        if self._read_only or any(buffer.shared for buffer in self._parts.buffers.values()):
            raise BitslabError(
                f"{what}: this table's memory is shared with other processes, which would not see "
                "the change whole; change it before it is handed out"
            )

    def add_cache(self, cache: Cache) -> None:
        """Tell `cache` of every update from now on; it is held weakly."""
        self._caches.add(cache)

    # Other processes

    def handle(self) -> str:
        """Return a text by which another process of this user on this machine can `attach`.

        For processes that are no children of this one, such as the ranks of torchrun. This process
        must live, and hold the table, until the others have attached. The table is read-only from
        now on.
        """
        with self._reading():
            if self._path is not None:
                raise BitslabError(
                    "handle: this table is memory-mapped; open the file in each process"
                )
            if self._rows.overflow is not None:
                raise BitslabError("handle: rows have moved; call compact() first")
            return handle_of(self._parts)

    @property
    def token(self) -> str:
        """What tells the table's memory from any other, in every process that has it."""
        return self._checksum or self._parts.buffers["words"].token

    def hand_out(self) -> str:
        """Let the table change no more, and return its `token`."""
        with self._reading():
            self._read_only = True
            return self.token

    @classmethod
    def attach(cls, handle: str, pin: bool = True) -> CompressedTable:
        """Open a table of another process by its `handle`: the same memory, read-only.

        Raises
        ------
        ArgumentError
            When the handle is none, or the process that gave it is gone.
        """
        return cls(parts_of_handle(handle), pin=pin, read_only=True)

    def __getstate__(self) -> dict[str, Any]:
        """Describe the table for another process; plain pickle copies its memory."""
        with self._reading():
            if self._path is not None:
                return {"path": self._path, "checksum": self._checksum}
            if self._rows.overflow is not None:
                raise BitslabError("pickle: rows have moved; call compact() first")
            state = self._parts.describe()
            return state | {"buffers": dict(self._parts.buffers), "pin": self._pin}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "path" in state:
            opened = CompressedTable.from_file(state["path"], pin=False)
            if opened._checksum != state["checksum"]:
                raise BitslabError(f"{state['path']}: holds another table than when it was opened")
            self._begin(opened._rows, pin=False, read_only=False)
            self._path, self._checksum = opened._path, opened._checksum
            return
        buffers = state["buffers"]
        read_only = any(buffer.shared for buffer in buffers.values())
        parts = TableParts.from_description(state, buffers)
        self._begin(HostRows(parts, pin=state["pin"]), pin=state["pin"], read_only=read_only)

    def __copy__(self) -> CompressedTable:
        """Copy the memory too: two tables over one would not hear of each other's changes."""
        return copy.deepcopy(self)

    # Statistics and end

    def stats(self) -> dict[str, Any]:
        """Return sizes and counts; reading them waits for the GPUs.

        Returns
        -------
        dict
            ``rows``, ``row_bytes``, ``layout``, ``codec``, ``raw_bytes``, ``packed_bytes`` (the
            words), ``metadata_bytes`` (what finds rows in them, and the profile), ``host_bytes``
            (all of it), ``ratio`` (raw over host bytes), ``packed_rows``, ``moved_rows``,
            ``overflow_bytes``, ``pinned``; of the gathers of this process so far, but for those
            through a cache: ``gathers``, ``gathered_rows``, ``gathered_bytes`` (decoded),
            ``moved_bytes`` (words read for them); ``advice``, once a GPU was used: what the models
            of link and codec say, with reasons.
        """
        self._check_open()
        parts = self._parts
        raw_bytes = len(self) * self.row_bytes
        words = self._totals["copied_words"]
        words += sum(int(counts[1].sum()) for counts in self.counters.read().values())
        on_gpu = self._gpus
        return {
            "rows": len(self),
            "row_bytes": self.row_bytes,
            "layout": parts.layout,
            "codec": self.codec.describe(),
            "raw_bytes": raw_bytes,
            "packed_bytes": parts.tensors["words"].nbytes,
            "metadata_bytes": parts.metadata_bytes + self.codec.profile_bytes,
            "host_bytes": self.nbytes,
            "ratio": self.ratio,
            "packed_rows": self._rows.packed_rows,
            "moved_rows": self._rows.moved_rows,
            "overflow_bytes": self._rows.overflow_bytes,
            "pinned": self.pinned,
            "gathers": self._totals["gathers"],
            "gathered_rows": self._totals["rows"],
            "gathered_bytes": self._totals["rows"] * self.row_bytes,
            "moved_bytes": 4 * words,
            "advice": {str(device): self.advice(device).as_dict() for device in on_gpu},
        }

    def close(self) -> None:
        """Let the memory go, after the gathers under way; closing twice is fine."""
        if self._closed:
            return
        with self._lock.writing():
            self._closed = True
            self._prepared = None
            self._device_copies.clear()
            self._rows.close()

    def __enter__(self) -> CompressedTable:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise BitslabError("table: is closed")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock.reading():
            self._check_open()
            yield


def _raise_damaged(row: int) -> None:
    if row >= 0:
        raise CorruptedDataError(f"table: row {row} is damaged; `out` is undefined")
