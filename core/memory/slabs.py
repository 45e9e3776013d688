"""SlabCache: packed rows of a table in the memory of up to eight GPUs."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import torch

from ..codecs.base import check_indices_argument
from ..errors import ArgumentError, ArgumentTypeError, BitslabError
from ..kernels import kernels_for
from ..kernels.cuda import kernels_on
from ..kernels.cuda.stream import stream_pointer
from ..kernels.format import (
    BUCKET_ENTRIES,
    MAX_CACHED_ROW_WORDS,
    MAX_SLABS,
    NO_ID,
    NOT_CACHED,
    OFFSET_SHIFT,
    PACKED_BIT,
    PAD_WORDS,
    SLAB_SHIFT,
    CacheStorage,
    ceil_div,
)
from .arguments import Index, checked_device, row_ids
from .counters import HOST, Counters
from .locks import call_after_fork
from .parts import staged_words
from .table import CompressedTable

MAX_SLAB_BYTES = 1 << SLAB_SHIFT - OFFSET_SHIFT  # what a location can tell
STAGE_BYTES = 32 << 20  # rows that go to the slabs at once

Array = np.ndarray[Any, Any]


class SlabCache:
    """Packed copies of a table's hot rows in GPU memory: one slab a GPU, up to eight.

    A gather takes the rows that are cached from the slabs, its own GPU's or, over NVLink,
    another's, and the others from the table in host memory, in one launch. Because rows lie packed,
    a slab holds as many times more of them as they are smaller (IBP, section 5, Table 7).

    Parameters
    ----------
    table : CompressedTable
        Where the rows come from; compact, in place or raw.
    capacity_bytes : int
        Bytes of rows in each slab. The map from ids to places takes 32 to 64 bytes a cached row on
        every GPU beside it (see `stats`).
    devices : sequence of torch.device or str, optional
        GPUs, one slab each; the current GPU when left out, or the CPU where there is no GPU.
        ``["cpu", "cpu"]`` makes two slabs in host memory, to try things without a GPU.

    Raises
    ------
    ArgumentError
        When there is no such device, a GPU cannot read another's memory, or a slab could not hold a
        single row.

    Notes
    -----
    Threads: any number may gather while one fills or refreshes; a gather sees the old set of rows
    or the new one. Until the new slabs are ready the old ones stay, so a refresh needs room for
    both.
    An update of the table drops the rows in question from the cache. A CUDA graph that captured a
    gather must be captured again after a fill or refresh.

    Examples
    --------
    >>> import torch, bitslab
    >>> features = torch.randn(1000, 64).round()
    >>> table = bitslab.CompressedTable.from_tensor(features)
    >>> cache = bitslab.SlabCache(table, 5000, devices=["cpu"])
    >>> cache.fill(torch.arange(1000)) > 5000 // 256  # as many as fit uncompressed
    True
    >>> torch.equal(cache.gather(torch.tensor([1, 999])), features[[1, 999]])
    True
    """

    def __init__(
        self,
        table: CompressedTable,
        capacity_bytes: int,
        devices: Sequence[torch.device | str] | None = None,
    ) -> None:
        if not isinstance(table, CompressedTable):
            raise ArgumentTypeError(
                f"table: expected a CompressedTable, got {type(table).__name__}"
            )
        try:
            capacity_bytes = operator.index(capacity_bytes)
        except TypeError:
            raise ArgumentTypeError(
                f"capacity_bytes: expected an int, got {capacity_bytes!r:.60}"
            ) from None
        raw_row_bytes = max(1, 4 * ceil_div(table.row_bytes, 4))
        if not raw_row_bytes <= capacity_bytes <= MAX_SLAB_BYTES:
            raise ArgumentError(
                f"capacity_bytes: {capacity_bytes}, accepted are {raw_row_bytes}, which a row of "
                f"this table may take, to {MAX_SLAB_BYTES}"
            )
        if ceil_div(table.row_bytes, 4) > MAX_CACHED_ROW_WORDS:
            raise ArgumentError(
                f"table: rows of {table.row_bytes} bytes, accepted are {4 * MAX_CACHED_ROW_WORDS}"
            )
        self.table = table
        self.capacity_bytes = capacity_bytes
        self.devices = _checked_devices(devices)
        self._places = _Places(self.devices)
        self._closed = False
        self._snapshot = _Snapshot.empty(self._places)
        table.add_cache(self)
        self.after_fork()
        call_after_fork(self)

    def after_fork(self) -> None:
        """Set up what belongs to one process: locks and counts."""
        # A child cannot let go what its parent has on GPUs, so it keeps that.
        self._inherited = [self.__dict__.get(name) for name in ("counters", "_inherited")]
        self._fill_lock = threading.RLock()
        self.counters = Counters()

    # Filling

    def fill(self, ids_by_hotness: torch.Tensor) -> int:
        """Cache as many rows as fit, the hottest first; what was cached before goes.

        Parameters
        ----------
        ids_by_hotness : torch.Tensor
            Integers ``[n]``, rows of the table, the hottest first; see `bitslab.hotness`.
            Repeated ids count once. They go to the slabs in turn.

        Returns
        -------
        int
            Rows that are cached now.
        """
        self._check_open()
        ids = check_indices_argument(ids_by_hotness, "ids_by_hotness").cpu()
        self.table.check_ids(ids)
        numbers = ids.numpy()
        numbers = np.where(numbers < 0, numbers + len(self.table), numbers)
        _, first = np.unique(numbers, return_index=True)
        with self._fill_lock, self.table.unchanging():
            # Waits for no reader: they go on with the old rows until the new ones are there.
            fresh = _fill(self.table, numbers[np.sort(first)], self.capacity_bytes, self._places)
            self._check_open()
            self._snapshot = fresh
            return fresh.n_rows

    def refresh(self, ids_by_hotness: torch.Tensor) -> int:
        """Fill again, for rows that are hot by now; the name says that readers may be under way.

        Everything that `fill` says holds: readers go on with the old rows until the new ones are
        there.
        """
        return self.fill(ids_by_hotness)

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
        """Return rows chosen by id, cached or not; see `CompressedTable.gather`.

        Parameters
        ----------
        ids, out, device, sm_budget
            As there.
        sort : bool, optional
            On a GPU: whether to order the ids first. Not when left out: how many miss, which the
            order is for, only the GPU knows. It pays where many rows of a large table do.

        Raises
        ------
        ArgumentError
            When the rows are wanted on a GPU that has no slab.
        """
        self._check_open()
        return self.table.gather_with(self, ids, out, device, sort, sm_budget)

    def __getitem__(self, index: Index) -> torch.Tensor:
        """Return rows by an int, a slice, integers of any shape, or a bool mask ``[N]``."""
        ids = row_ids(index, len(self))
        return self.gather(ids.reshape(-1)).view(*ids.shape, *self.shape[1:])

    def check_ids(self, ids: torch.Tensor) -> None:
        """Raise IndexRangeError when one of the ids ``[n]`` on the CPU is out of range."""
        self.table.check_ids(ids)

    def __len__(self) -> int:
        """Return the number of rows of the table."""
        return len(self.table)

    @property
    def shape(self) -> torch.Size:
        """Shape of the table."""
        return self.table.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows' elements."""
        return self.table.dtype

    # What the table asks for

    def storage(self, device: torch.device) -> CacheStorage | None:
        """Return the cached rows as the kernels of a device read them; None for none there."""
        return self._snapshot.on(device, self.devices)

    def forget(self, ids: torch.Tensor) -> None:
        """Drop the copies of int64 ``[n]`` rows, which are about to change in the table."""
        self._snapshot.forget(ids)

    # Statistics and end

    def stats(self) -> dict[str, Any]:
        """Return sizes and counts; reading them waits for the GPUs.

        Returns
        -------
        dict
            ``cached_rows``, ``capacity_bytes`` (of a slab), ``slab_bytes`` (used, a list),
            ``map_bytes`` (on each device), ``hits``, ``misses``, ``hit_rate``, and the bytes read
            by source, packed: ``local_bytes`` (slab of the GPU that asked), ``peer_bytes`` (slabs
            of others), ``host_bytes`` (the table).
        """
        self._check_open()
        snapshot = self._snapshot
        hits = misses = local = peer = host = 0
        for device, counts in self.counters.read().items():
            rows, words = counts.tolist()
            hits += sum(rows[:HOST])
            misses += rows[HOST]
            host += 4 * words[HOST]
            for slab, n_words in zip(self.devices, words[:HOST], strict=False):
                if slab == device:
                    local += 4 * n_words
                else:
                    peer += 4 * n_words
        return {
            "cached_rows": snapshot.n_rows,
            "capacity_bytes": self.capacity_bytes,
            "slab_bytes": [4 * (slab.numel() - PAD_WORDS) for slab in snapshot.slabs],
            "map_bytes": snapshot.map_bytes,
            "hits": hits,
            "misses": misses,
            "hit_rate": hits / (hits + misses) if hits + misses else 0.0,
            "local_bytes": local,
            "peer_bytes": peer,
            "host_bytes": host,
        }

    def close(self) -> None:
        """Let the slabs go, after the gathers under way; the table stays."""
        if not self._closed:
            with self._fill_lock:
                self._closed = True
                self._snapshot = _Snapshot.empty(self._places)

    def __enter__(self) -> SlabCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        """Refuse to go to another process."""
        raise ArgumentTypeError(
            "cache: cannot be pickled or copied; make one over the table in each process"
        )

    def __repr__(self) -> str:
        """Name the table, the devices and how full the slabs are."""
        if self._closed:
            return "SlabCache(closed)"
        where = ", ".join(str(d) for d in self.devices)
        return f"SlabCache({self._snapshot.n_rows} rows of {self.table!r} on {where})"

    def _check_open(self) -> None:
        if self._closed:
            raise BitslabError("cache: is closed")


class _MapKernels(Protocol):
    """What both backends can do to maps from ids to locations."""

    def map_insert(
        self, entries: torch.Tensor, ids: torch.Tensor, locations: torch.Tensor
    ) -> int | torch.Tensor:
        """Insert ids; return how many found no place."""

    def map_find(self, entries: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return locations, NOT_CACHED for ids that are not there."""


def _map_kernels(device: torch.device) -> _MapKernels:
    if device.type == "cuda":
        # Nobody's bad ids may stop a change half-way.
        return kernels_on(device, tell=False)
    return cast(_MapKernels, kernels_for(device))


class _Places:
    """The devices of the slabs, and a stream on each GPU that their memory belongs to.

    Torch hands memory out again once the streams that it was told of have passed; it knows them by
    their handles, and that of every GPU's default stream is the same. Memory of a stream of its own
    is safe from a neighbour's default stream.
    """

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self.devices = devices
        self._streams = {
            d: torch.cuda.Stream(device=d)  # type: ignore[no-untyped-call]
            for d in devices
            if d.type == "cuda"
        }

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Work on a device, on its stream."""
        if device.type == "cpu":
            yield
            return
        with torch.cuda.stream(self._streams[device]):
            yield

    def allocate(self, words: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return a slab of zeros for each device, of so many words and PAD_WORDS behind them."""
        slabs = []
        for device, n in zip(self.devices, words, strict=True):
            with self.on(device):
                slabs.append(torch.zeros(n + PAD_WORDS, dtype=torch.int32, device=device))
        return tuple(slabs)

    def finish(self) -> None:
        """Wait for what was written, which any stream may read from now on."""
        for stream in self._streams.values():
            stream.synchronize()


@dataclass(eq=False)
class _Snapshot:
    """One set of cached rows; it never changes, but for rows that are dropped."""

    slabs: tuple[torch.Tensor, ...]
    storages: dict[torch.device, CacheStorage]
    n_rows: int
    seen: set[tuple[torch.device, int]] = field(default_factory=set)

    @classmethod
    def empty(cls, places: _Places) -> _Snapshot:
        return cls.of(places, places.allocate([0] * len(places.devices)))

    @classmethod
    def of(
        cls,
        places: _Places,
        slabs: tuple[torch.Tensor, ...],
        ids: Array | None = None,
        locations: Array | None = None,
        max_words: int = 0,
    ) -> _Snapshot:
        """Put slabs and a map together, on every device that has a slab."""
        n = 0 if ids is None else len(ids)
        # A power of two of buckets, at most half full.
        buckets = 1 << (ceil_div(2 * n, BUCKET_ENTRIES) - 1).bit_length() if n else 1
        addresses = [slab.data_ptr() for slab in slabs]
        addresses += [0] * (MAX_SLABS - len(addresses))
        storages = {}
        for device in dict.fromkeys(places.devices):
            with places.on(device):
                entries = torch.full(
                    (buckets * BUCKET_ENTRIES, 2), NO_ID, dtype=torch.int64, device=device
                )
                if ids is not None and locations is not None and n:
                    failed = _map_kernels(device).map_insert(
                        entries,
                        torch.from_numpy(ids).to(device),
                        torch.from_numpy(locations).to(device),
                    )
                    if int(failed):
                        raise BitslabError(
                            f"cache: {int(failed)} of {n} ids found no place in the map"
                        )
                where = torch.tensor(addresses, dtype=torch.int64).to(device)
            storages[device] = CacheStorage(entries, slabs, where, max_words)
        places.finish()
        return cls(slabs, storages, n)

    @property
    def map_bytes(self) -> int:
        return next(iter(self.storages.values())).entries.nbytes

    def on(self, device: torch.device, devices: tuple[torch.device, ...]) -> CacheStorage | None:
        storage = self.storages.get(device)
        if storage is None and device.type == "cuda":
            raise ArgumentError(
                f"device: {device} has no slab of this cache, which is on "
                f"{', '.join(map(str, devices))}"
            )
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            # Callers cannot see these tensors: tell the allocator itself which streams read them.
            key = (device, stream_pointer(device))
            if key not in self.seen:
                assert storage is not None
                stream = torch.cuda.current_stream(device)
                for t in (*self.slabs, storage.entries, storage.addresses):
                    t.record_stream(stream)
                self.seen.add(key)
        return storage

    def forget(self, ids: torch.Tensor) -> None:
        dropped = 0
        for device, storage in self.storages.items():
            kernels = _map_kernels(device)
            there = ids.to(device)
            cached = there[kernels.map_find(storage.entries, there) != NOT_CACHED]
            if cached.numel():
                kernels.map_insert(storage.entries, cached, torch.full_like(cached, NOT_CACHED))
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            dropped = cached.numel()
        self.n_rows -= dropped


def _fill(table: CompressedTable, ids: Array, capacity_bytes: int, places: _Places) -> _Snapshot:
    """Copy the first rows that fit to new slabs and map them."""
    n_slabs = len(places.devices)
    capacity_words = capacity_bytes // 4
    used = np.zeros(n_slabs, np.int64)
    taken: list[tuple[Array, Array, Array]] = []  # ids, locations, words of each batch
    open_slabs = np.ones(n_slabs, bool)
    step = max(n_slabs, STAGE_BYTES // max(1, table.row_bytes) // n_slabs * n_slabs)
    for begin in range(0, len(ids), step):
        some = ids[begin : begin + step]
        lengths, row_words = table.row_lengths(torch.from_numpy(some))
        sizes = np.where(lengths == 0, row_words, lengths)
        slab = np.arange(begin, begin + len(some)) % n_slabs
        offsets = np.empty(len(some), np.int64)
        fits = np.zeros(len(some), bool)
        for s in range(n_slabs):
            mine = slab == s
            ends = used[s] + np.cumsum(sizes[mine])
            offsets[mine] = ends - sizes[mine]
            fits[mine] = (ends <= capacity_words) & open_slabs[s]
            open_slabs[s] &= bool(fits[mine].all())
            used[s] = max([used[s], *ends[fits[mine]][-1:]])
        locations = (
            (slab.astype(np.uint64) << np.uint64(SLAB_SHIFT))
            | ((4 * offsets).astype(np.uint64) << np.uint64(OFFSET_SHIFT))
            | ((lengths != 0).astype(np.uint64) << np.uint64(PACKED_BIT))
            | sizes.astype(np.uint64)
        ).view(np.int64)
        taken.append((some[fits], locations[fits], sizes[fits]))
        if not open_slabs.any():
            break
    slabs = places.allocate(used.tolist())
    for some, locations, sizes in taken:
        for s, slab_words in enumerate(slabs):
            mine = (locations.view(np.uint64) >> np.uint64(SLAB_SHIFT)) == s
            if mine.any():
                begin = int(_offset_words(locations[mine][:1])[0])
                rows = table.packed_words_of(torch.from_numpy(some[mine]), int(sizes[mine].sum()))
                with places.on(slab_words.device):
                    slab_words[begin : begin + len(rows)] = rows.to(slab_words.device)
    if not taken:
        return _Snapshot.empty(places)
    all_ids, all_locations, all_sizes = (
        np.concatenate(parts) for parts in zip(*taken, strict=True)
    )
    packed = (all_locations >> PACKED_BIT & 1).astype(bool)
    max_words = staged_words(
        int(all_sizes[packed].max(initial=0)),
        ceil_div(table.row_bytes, 4),
        int(np.count_nonzero(~packed)),
        len(all_ids),
    )
    return _Snapshot.of(places, slabs, all_ids, all_locations, max_words)


def _offset_words(locations: Array) -> Array:
    """Return the word in its slab at which each location's row starts."""
    shifted = locations.view(np.uint64) << np.uint64(64 - SLAB_SHIFT)
    return (shifted >> np.uint64(64 - SLAB_SHIFT + OFFSET_SHIFT)).view(np.int64) // 4


def _checked_devices(
    devices: Sequence[torch.device | str] | None,
) -> tuple[torch.device, ...]:
    """Return the devices of the slabs, or refuse them."""
    if devices is None:
        devices = ["cuda" if torch.cuda.is_available() else "cpu"]
    if isinstance(devices, (str, torch.device)):
        devices = [devices]
    found = tuple(checked_device(d) for d in devices)
    if not 1 <= len(found) <= MAX_SLABS:
        raise ArgumentError(f"devices: {len(found)}, accepted are 1 to {MAX_SLABS}")
    kinds = {d.type for d in found}
    if len(kinds) > 1:
        raise ArgumentError(f"devices: {', '.join(map(str, found))}; either GPUs or the CPU")
    if kinds == {"cuda"}:
        if len(set(found)) < len(found):
            raise ArgumentError(f"devices: {', '.join(map(str, found))}; one slab for each GPU")
        for reader, other in _pairs(found):
            _let_read(reader, other)
    return found


def _pairs(
    devices: tuple[torch.device, ...],
) -> Iterator[tuple[torch.device, torch.device]]:
    return ((a, b) for a in devices for b in devices if a != b)


def _let_read(reader: torch.device, other: torch.device) -> None:
    """Let kernels of one GPU read another's memory."""
    if not torch.cuda.can_device_access_peer(reader, other):
        raise ArgumentError(f"devices: {reader} cannot read the memory of {other}")
    # Torch opens the way when it first copies.
    torch.zeros(1, device=reader).copy_(torch.zeros(1, device=other))
