"""Snapshot: slabs of cached rows and the map from ids to them; `fill` makes one from a table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..engine.codecs import RowCodec
from ..engine.codecs.base import rows_as_bytes
from ..engine.kernels import cpu
from ..engine.kernels.cuda import kernels_on
from ..engine.kernels.cuda.stream import stream_pointer
from ..engine.kernels.format import (
    BUCKET_ENTRIES,
    MAX_CACHED_ROW_WORDS,
    MAX_SLABS,
    NO_ID,
    NOT_CACHED,
    OFFSET_SHIFT,
    PACKED_BIT,
    PAD_WORDS,
    SLAB_SHIFT,
    ceil_div,
)
from ..engine.memory.host import HostBuffer
from ..engine.transfer.lanes import StreamLane
from ..errors import ArgumentError, BitslabError
from .cache import CacheView
from .parts import staged_words
from .table import CompressedTable

STAGE_BYTES = 32 << 20  # rows that are copied to the slabs at once

Array = np.ndarray[Any, Any]


class _MapKernels(NamedTuple):
    """Operations of both backends on maps from ids to locations.

    Parameters
    ----------
    insert : callable
        Insert ids with their locations; return the number of ids that did not fit.
    find : callable
        Return locations, NOT_CACHED for ids that are not in the map.
    """

    insert: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], int | torch.Tensor]
    find: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _map_kernels(device: torch.device) -> _MapKernels:
    if device.type != "cuda":
        return _MapKernels(cpu.map_insert, cpu.map_find)
    # A pending error of another call must not stop a change half-way.
    kernels = kernels_on(device, raise_errors=False).map
    return _MapKernels(kernels.insert, kernels.find)


class SlabAllocator:
    """Allocates slabs on their devices, on each GPU on a stream of its own.

    Torch reuses memory once the streams that were recorded for it have passed. It identifies a
    stream by its handle, which is the same for the default streams of all GPUs. Memory that belongs
    to a stream of its own is not confused with that of another GPU's default stream.
    """

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self.devices = devices
        self._lanes = {d: StreamLane(d) for d in devices if d.type == "cuda"}

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Make a device and its stream current."""
        if device.type == "cpu":
            yield
            return
        with self._lanes[device].on():
            yield

    def allocate(self, words: Sequence[int]) -> Slabs:
        """Return a slab of zeros for each device: its number of words and PAD_WORDS more."""
        slabs, buffers = [], []
        for device, n in zip(self.devices, words, strict=True):
            if device.type == "cpu":
                # Shared memory, which other processes can map.
                buffers.append(HostBuffer.allocate(4 * (n + PAD_WORDS), pin=False))
                slabs.append(buffers[-1].tensor.view(torch.int32))
                continue
            with self.on(device):
                slabs.append(torch.zeros(n + PAD_WORDS, dtype=torch.int32, device=device))
        return Slabs(tuple(slabs), self.devices, tuple(buffers))

    def finish(self) -> None:
        """Wait for all writes; any stream may read the slabs from then on."""
        for lane in self._lanes.values():
            lane.synchronize()


@dataclass(frozen=True, eq=False)
class Slabs:
    """Words of cached rows.

    Parameters
    ----------
    words : tuple of torch.Tensor
        int32, one a slab, readable on the devices that gather.
    devices : tuple of torch.device
        The device of each slab.
    buffers : tuple of HostBuffer
        The memory of the slabs on the CPU.
    """

    words: tuple[torch.Tensor, ...]
    devices: tuple[torch.device, ...]
    buffers: tuple[HostBuffer, ...] = ()

    def addresses(self) -> torch.Tensor:
        """Return int64 ``[MAX_SLABS]`` on the CPU: where each slab starts, 0 for none."""
        starts = [slab.data_ptr() for slab in self.words]
        return torch.tensor(starts + [0] * (MAX_SLABS - len(starts)), dtype=torch.int64)


@dataclass(eq=False)
class Snapshot:
    """One set of cached rows, immutable except that rows are dropped.

    Parameters
    ----------
    slabs : Slabs
        The rows.
    storages : dict of torch.device to CacheView
        The rows as kernels read them, on each device that may gather.
    n_rows : int
        Packed rows that are cached: rows of the table, unless several of these share one.
    """

    slabs: Slabs
    storages: dict[torch.device, CacheView]
    n_rows: int
    _seen: set[tuple[torch.device, int]] = field(default_factory=set)

    @classmethod
    def empty(cls, allocator: SlabAllocator) -> Snapshot:
        """Return a snapshot of no rows."""
        return cls.of(allocator, allocator.allocate([0] * len(allocator.devices)))

    @classmethod
    def of(
        cls,
        allocator: SlabAllocator,
        slabs: Slabs,
        ids: Array | None = None,
        locations: Array | None = None,
        max_words: int = 0,
        packer: RowCodec | None = None,
        row_clusters: Array | None = None,
    ) -> Snapshot:
        """Build the map of some slabs on every device that has one; `packer` packed their rows."""
        n = 0 if ids is None else len(ids)
        # A power of two of buckets, at most half full.
        buckets = 1 << (ceil_div(2 * n, BUCKET_ENTRIES) - 1).bit_length() if n else 1
        storages = {}
        for device in dict.fromkeys(allocator.devices):
            with allocator.on(device):
                entries = torch.full(
                    (buckets * BUCKET_ENTRIES, 2), NO_ID, dtype=torch.int64, device=device
                )
                if ids is not None and locations is not None and n:
                    failed = _map_kernels(device).insert(
                        entries,
                        torch.from_numpy(ids).to(device),
                        torch.from_numpy(locations).to(device),
                    )
                    if int(failed):
                        raise BitslabError(
                            f"cache: {int(failed)} of {n} ids did not fit into the map"
                        )
                storages[device] = CacheView(
                    entries,
                    slabs.words,
                    slabs.addresses().to(device),
                    max_words,
                    None if row_clusters is None else torch.from_numpy(row_clusters).to(device),
                    kernels=None if packer is None else packer.kernels(device),
                )
        allocator.finish()
        return cls(slabs, storages, n)

    @property
    def map_bytes(self) -> int:
        """Bytes of the map and the clusters, on one device."""
        storage = next(iter(self.storages.values()))
        clusters = 0 if storage.row_clusters is None else storage.row_clusters.nbytes
        return storage.entries.nbytes + clusters

    def on(self, device: torch.device) -> CacheView | None:
        """Return the storage for kernels on a device; None for the CPU when slabs are on GPUs."""
        storage = self.storages.get(device)
        if storage is None and device.type == "cuda":
            raise ArgumentError(
                f"device: {device} has no slab of this cache, which is on "
                f"{', '.join(map(str, self.storages))}"
            )
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            # Callers cannot see these tensors, so the streams that read them are recorded here.
            key = (device, stream_pointer(device))
            if key not in self._seen:
                assert storage is not None
                stream = torch.cuda.current_stream(device)
                for t in _tensors_of(storage):
                    t.record_stream(stream)
                self._seen.add(key)
        return storage

    def has(self, row: int) -> bool:
        """Return whether a packed row is cached; waits for a GPU."""
        device, storage = next(iter(self.storages.items()))
        found = _map_kernels(device).find(storage.entries, torch.tensor([row]).to(device))
        return int(found) != NOT_CACHED

    def forget(self, ids: torch.Tensor) -> None:
        """Drop int64 ``[n]`` packed rows from the maps."""
        dropped = 0
        for device, storage in self.storages.items():
            kernels = _map_kernels(device)
            there = ids.to(device)
            cached = there[kernels.find(storage.entries, there) != NOT_CACHED]
            if cached.numel():
                kernels.insert(storage.entries, cached, torch.full_like(cached, NOT_CACHED))
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            dropped = cached.numel()
        self.n_rows -= dropped


def _tensors_of(storage: CacheView) -> Iterator[torch.Tensor]:
    yield from storage.slabs
    yield storage.entries
    yield storage.addresses
    if storage.kernels is not None:
        yield from storage.kernels.tensors
    if storage.row_clusters is not None:
        yield storage.row_clusters


class _RawRows:
    """Rows of a raw table that a cache stores raw, each in exactly its bytes."""

    row_clusters = None

    def __init__(self, table: CompressedTable) -> None:
        self._table = table
        self.raw_row_bytes = table.row_bytes

    def lengths(self, ids: Array) -> tuple[Array, int]:
        """Return 0 for each row, and the words of a raw row."""
        return np.zeros(len(ids), np.int64), ceil_div(self.raw_row_bytes, 4)

    def data(self, ids: Array, n_bytes: int, device: torch.device) -> torch.Tensor:
        """Return the bytes of rows, back to back: uint8 ``[n_bytes]`` on a device."""
        rows = self._table.rows_of(torch.from_numpy(ids))
        return rows_as_bytes(rows, self.raw_row_bytes).view(-1).to(device)


class _PackedTableRows:
    """Packed rows that a cache stores in the packed form of the table."""

    row_clusters = None

    def __init__(self, table: CompressedTable) -> None:
        self._table = table
        self.raw_row_bytes = 4 * ceil_div(table.codec.row_bytes, 4)

    def lengths(self, ids: Array) -> tuple[Array, int]:
        """Return words of packed rows, 0 for raw ones, and the words of a raw row."""
        return self._table.row_lengths(torch.from_numpy(ids))

    def data(self, ids: Array, n_bytes: int, device: torch.device) -> torch.Tensor:
        """Return the bytes of rows, back to back: uint8 ``[n_bytes]`` on a device."""
        words = self._table.packed_words_of(torch.from_numpy(ids), n_bytes // 4)
        return words.view(torch.uint8).to(device)


class _RowsPackedForCache:
    """Rows of a raw table that a cache packs, on the GPU if its slabs are on GPUs.

    Rows are packed twice: once for their lengths and, those that fit, once to store them. So no
    more than one stage of them takes memory in addition to the slabs.
    """

    def __init__(self, table: CompressedTable, codec: RowCodec, allocator: SlabAllocator) -> None:
        self._table = table
        self._codec = codec
        self._allocator = allocator
        clusters = codec.kernels(torch.device("cpu")).clusters
        self.row_clusters = np.zeros(len(table), np.uint8) if clusters > 1 else None
        self.raw_row_bytes = 4 * ceil_div(codec.row_bytes, 4)

    def lengths(self, ids: Array) -> tuple[Array, int]:
        device = self._allocator.devices[0]
        with self._allocator.on(device):
            sizes = self._codec.packed_bytes(self._rows(ids, device)).cpu().numpy()
        row_bytes = self._table.row_bytes
        return np.where(sizes < row_bytes, sizes // 4, 0), ceil_div(row_bytes, 4)

    def data(self, ids: Array, n_bytes: int, device: torch.device) -> torch.Tensor:
        packed = self._codec.encode(self._rows(ids, device))
        if self.row_clusters is not None:
            self.row_clusters[ids] = packed.parts["row_clusters"].cpu().numpy()
        return packed.parts["words"].view(torch.uint8)[:n_bytes]

    def _rows(self, ids: Array, device: torch.device) -> torch.Tensor:
        return self._table.rows_of(torch.from_numpy(ids)).to(device)


def fill(
    table: CompressedTable,
    codec: RowCodec | None,
    ids: Array,
    capacity_bytes: int,
    allocator: SlabAllocator,
) -> Snapshot:
    """Copy the first rows that fit to new slabs and map them.

    Parameters
    ----------
    table : CompressedTable
        The table, which must not change meanwhile.
    codec : RowCodec or None
        Packs rows of a raw table; None to keep the form that rows have in the table.
    ids : numpy.ndarray
        int64 ``[n]``, packed rows in range, no two alike; they are assigned to the slabs in turn.
    capacity_bytes : int
        Bytes of rows in each slab.
    allocator : SlabAllocator
        Allocates the slabs.
    """
    rows: _RawRows | _PackedTableRows | _RowsPackedForCache
    if codec is not None:
        rows = _RowsPackedForCache(table, codec, allocator)
    else:
        rows = (_RawRows if table.codec.keeps_raw else _PackedTableRows)(table)
    n_slabs = len(allocator.devices)
    used = np.zeros(n_slabs, np.int64)
    taken: list[tuple[Array, Array, Array]] = []  # ids, locations, bytes of each batch
    open_slabs = np.ones(n_slabs, bool)
    step = max(n_slabs, STAGE_BYTES // max(1, table.codec.row_bytes) // n_slabs * n_slabs)
    row_words = 0
    for begin in range(0, len(ids), step):
        some = ids[begin : begin + step]
        lengths, row_words = rows.lengths(some)
        sizes = np.where(lengths == 0, rows.raw_row_bytes, 4 * lengths)
        slab = np.arange(begin, begin + len(some)) % n_slabs
        offsets = np.empty(len(some), np.int64)
        fits = np.zeros(len(some), bool)
        for s in range(n_slabs):
            mine = slab == s
            ends = used[s] + np.cumsum(sizes[mine])
            offsets[mine] = ends - sizes[mine]
            fits[mine] = (ends <= capacity_bytes) & open_slabs[s]
            open_slabs[s] &= bool(fits[mine].all())
            used[s] = max([used[s], *ends[fits[mine]][-1:]])
        locations = (
            (slab.astype(np.uint64) << np.uint64(SLAB_SHIFT))
            | (offsets.astype(np.uint64) << np.uint64(OFFSET_SHIFT))
            | ((lengths != 0).astype(np.uint64) << np.uint64(PACKED_BIT))
            | np.where(lengths == 0, row_words, lengths).astype(np.uint64)
        ).view(np.int64)
        taken.append((some[fits], locations[fits], sizes[fits]))
        if not open_slabs.any():
            break
    slabs = allocator.allocate([ceil_div(n_bytes, 4) for n_bytes in used.tolist()])
    for some, locations, sizes in taken:
        for s, slab_words in enumerate(slabs.words):
            mine = (locations.view(np.uint64) >> np.uint64(SLAB_SHIFT)) == s
            if mine.any():
                begin = int(_offset_bytes(locations[mine][:1])[0])
                with allocator.on(slab_words.device):
                    data = rows.data(some[mine], int(sizes[mine].sum()), slab_words.device)
                    slab_words.view(torch.uint8)[begin : begin + len(data)] = data
    if not taken:
        return Snapshot.empty(allocator)
    all_ids, all_locations, _ = (np.concatenate(parts) for parts in zip(*taken, strict=True))
    packed = (all_locations >> PACKED_BIT & 1).astype(bool)
    max_words = staged_words(
        int((all_locations[packed] & MAX_CACHED_ROW_WORDS).max(initial=0)),
        row_words,
        int(np.count_nonzero(~packed)),
        len(all_ids),
    )
    return Snapshot.of(
        allocator, slabs, all_ids, all_locations, max_words, codec, rows.row_clusters
    )


def _offset_bytes(locations: Array) -> Array:
    """Return the byte in its slab at which each location's row starts."""
    shifted = locations.view(np.uint64) << np.uint64(64 - SLAB_SHIFT)
    return (shifted >> np.uint64(64 - SLAB_SHIFT + OFFSET_SHIFT)).view(np.int64)
