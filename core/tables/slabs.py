"""SlabCache: packed rows of a table in the memory of up to eight GPUs."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..devices import checked_device
from ..engine.codecs import RowCodec
from ..engine.codecs.base import check_indices_argument
from ..engine.kernels.format import (
    MAX_CACHED_ROW_WORDS,
    MAX_SLABS,
    OFFSET_SHIFT,
    PAD_WORDS,
    SLAB_SHIFT,
    ceil_div,
)
from ..engine.kernels.typed_products import PackedRows
from ..engine.memory.host import HostBuffer
from ..engine.memory.locks import call_after_fork
from ..errors import ArgumentError, ArgumentTypeError, BitslabError
from .arguments import Index, row_ids
from .build import MIN_SAMPLE_ROWS, SAMPLE_BYTES, choose_codec
from .cache import CacheView
from .counters import HOST, Counters
from .slab_handles import handle_of_cache, parts_of_cache_handle, slabs_on_cpu
from .snapshot import SlabAllocator, Snapshot, fill
from .table import CompressedTable

MAX_SLAB_BYTES = 1 << SLAB_SHIFT - OFFSET_SHIFT  # the offsets that a location can hold


class SlabCache:
    """Packed copies of a table's hot rows in GPU memory: one slab a GPU, up to eight.

    A gather takes the rows that are cached from the slabs, its own GPU's or, over NVLink,
    another's, and the others from the table in host memory, in one launch. Because rows are packed,
    a slab holds as many times more of them as they are smaller (IBP, section 5, Table 7); raw rows
    take exactly their bytes. Rows of a raw table can be packed for the cache alone: IBP(C) of IBP,
    section 6.2. Narrow rows that the table packs together are cached together, if there is room for
    all of them.

    Parameters
    ----------
    table : CompressedTable
        The table of the rows; compact, in place or raw.
    capacity_bytes : int
        Bytes of rows in each slab. The map from ids to locations takes another 32 to 64
        bytes a cached row on every GPU (see `stats`).
    devices : sequence of torch.device or str, optional
        GPUs, one slab each; the current GPU when left out, or the CPU where there is no GPU.
        ``["cpu", "cpu"]`` makes two slabs in host memory, to try things without a GPU.
    codec : str or RowCodec, optional
        Codec for the cached rows of a raw table: ``"auto"`` (invariant bit packing with a plan for
        these rows, or nothing where it does not make them smaller), the name of a codec, which is
        fitted to these rows, or a codec. When left out, rows are stored
        as in the table.

    Raises
    ------
    ArgumentError
        When there is no such device, a GPU cannot read another's memory, a slab could not hold a
        single row, or `codec` is given for a table that is packed: its own codec is the cache's.

    Attributes
    ----------
    codec : RowCodec
        Codec of the cached rows; RawCodec when they are raw.
    devices : tuple of torch.device
        Devices that rows can be gathered to.

    Notes
    -----
    Threads: any number may gather while one fills or refreshes; a gather sees the old set of rows
    or the new one. The old slabs are kept until the new ones are ready, so a refresh needs room
    for both.
    An update of the table drops the rows in question from the cache. A CUDA graph that captured a
    gather must be captured again after a fill or refresh. Clusters of a codec that packs for the
    cache alone take one byte for each row of the table in addition to the map.

    Processes: one fills a cache, the others of the machine read the same slabs by `handle` and
    `attach`, each from its own GPU.

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
        *,
        codec: str | RowCodec | None = None,
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
        raw_row_bytes = least_capacity_bytes(table)
        if not raw_row_bytes <= capacity_bytes <= MAX_SLAB_BYTES:
            raise ArgumentError(
                f"capacity_bytes: {capacity_bytes}, accepted are {raw_row_bytes}, which a row of "
                f"this table may take, to {MAX_SLAB_BYTES}"
            )
        if ceil_div(table.codec.row_bytes, 4) > MAX_CACHED_ROW_WORDS:
            raise ArgumentError(
                f"table: rows of {table.row_bytes} bytes, accepted are {4 * MAX_CACHED_ROW_WORDS}"
            )
        where = _checked_devices(devices)
        packer = None if codec is None else _packer(table, codec, len(where) * capacity_bytes)
        if packer is not None and where[0].type not in packer.device_types:
            accepted = ", ".join(packer.device_types)
            raise ArgumentError(
                f"devices: {where[0]}, codec {packer.name!r} has kernels for {accepted}"
            )
        allocator = SlabAllocator(where)
        self._begin(table, capacity_bytes, packer, allocator, Snapshot.empty(allocator))

    def _begin(
        self,
        table: CompressedTable,
        capacity_bytes: int,
        packer: RowCodec | None,
        allocator: SlabAllocator,
        snapshot: Snapshot,
        *,
        attached: bool = False,
    ) -> None:
        self.table = table
        self.capacity_bytes = capacity_bytes
        self.codec: RowCodec = packer or table.codec
        self.devices = allocator.devices
        self._slab_devices = snapshot.slabs.devices
        self._packer = packer
        self._allocator = allocator
        self._snapshot = snapshot
        self._attached = attached
        self._shared_buffers: list[HostBuffer] = []  # memory that handles refer to
        self._closed = False
        table.add_cache(self)
        self.after_fork()
        call_after_fork(self)

    def after_fork(self) -> None:
        """Reset the state of one process: locks and counts."""
        # A child cannot free the parent's GPU memory, so it keeps the references.
        self._inherited = [self.__dict__.get(name) for name in ("counters", "_inherited")]
        self._fill_lock = threading.RLock()
        self.counters = Counters()

    # Filling

    def fill(self, ids_by_hotness: torch.Tensor) -> int:
        """Cache as many rows as fit, the hottest first, in place of the rows cached before.

        Parameters
        ----------
        ids_by_hotness : torch.Tensor
            Integers ``[n]``, rows of the table, the hottest first; see `bitslab.hotness`.
            Repeated ids count once. Rows are assigned to the slabs in turn.

        Returns
        -------
        int
            Rows that are cached now.

        Raises
        ------
        BitslabError
            When the cache is closed, or other processes read it too.
        """
        self._check_open()
        self._check_own()
        ids = check_indices_argument(ids_by_hotness, "ids_by_hotness").cpu()
        self.table.check_ids(ids)
        numbers = ids.numpy()
        numbers = np.where(numbers < 0, numbers + len(self.table), numbers)
        numbers = numbers // self.table.rows_per_packed_row
        _, first = np.unique(numbers, return_index=True)
        with self._fill_lock, self.table.unchanging():
            # Waits for no reader: gathers use the old rows until the new ones are ready.
            chosen = numbers[np.sort(first)]
            fresh = fill(self.table, self._packer, chosen, self.capacity_bytes, self._allocator)
            self._check_open()
            self._check_own()
            self._snapshot = fresh
            return self._cached_rows

    @property
    def _cached_rows(self) -> int:
        """Rows of the table that are cached; looks up the last packed row, which may hold fewer."""
        each, snapshot = self.table.rows_per_packed_row, self._snapshot
        last, in_last = divmod(len(self.table), each)
        short = snapshot.n_rows and in_last and snapshot.has(last)
        return snapshot.n_rows * each - (each - in_last if short else 0)

    def refresh(self, ids_by_hotness: torch.Tensor) -> int:
        """Fill again with the rows that are hot now, while readers run; see `fill`.

        Gathers use the old rows until the new ones are ready.
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
            As in `CompressedTable.gather`.
        sort : bool, optional
            On a GPU: whether to sort the ids first; not when left out. Sorting pays where many rows
            of a large table miss, and only the GPU knows how many do.

        Raises
        ------
        ArgumentError
            When rows are requested on a GPU that has no slab.
        """
        self._check_open()
        return self.table.gather_with(self, ids, out, device, sort, sm_budget)

    def read_by_products(
        self, device: torch.device
    ) -> contextlib.AbstractContextManager[PackedRows | torch.Tensor | None]:
        """Give rows, cached or not, to typed products; see `CompressedTable.read_by_products`."""
        self._check_open()
        return self.table.read_by_products(device, self)

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
    def ndim(self) -> int:
        """Number of dimensions of the table."""
        return self.table.ndim

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows' elements."""
        return self.table.dtype

    # Interface for the table; see `Cache`

    def storage(self, device: torch.device) -> CacheView | None:
        """Return the cached rows as kernels on a device read them; None when it has none."""
        return self._snapshot.on(device)

    def forget(self, ids: torch.Tensor) -> None:
        """Drop the copies of packed rows int64 ``[n]``, which the table is about to overwrite."""
        self._snapshot.forget(ids)

    # Statistics and end

    def stats(self) -> dict[str, Any]:
        """Return sizes and counts; reading them waits for the GPUs.

        Returns
        -------
        dict
            ``cached_rows``, ``codec``, ``capacity_bytes`` (of a slab), ``slab_bytes`` (used, a
            list), ``map_bytes`` (on each device), ``hits``, ``misses``, ``hit_rate``, and the bytes
            read by source, in their stored form: ``local_bytes`` (slab of the GPU that gathers),
            ``peer_bytes`` (slabs of other GPUs), ``host_bytes`` (the table).
        """
        self._check_open()
        snapshot = self._snapshot
        hits = misses = local = peer = host = 0
        for device, counts in self.counters.read().items():
            rows, words = counts.tolist()
            hits += sum(rows[:HOST])
            misses += rows[HOST]
            host += 4 * words[HOST]
            for slab, n_words in zip(self._slab_devices, words[:HOST], strict=False):
                if slab == device:
                    local += 4 * n_words
                else:
                    peer += 4 * n_words
        return {
            "cached_rows": self._cached_rows,
            "codec": self.codec.describe(),
            "capacity_bytes": self.capacity_bytes,
            "slab_bytes": [4 * (slab.numel() - PAD_WORDS) for slab in snapshot.slabs.words],
            "map_bytes": snapshot.map_bytes,
            "hits": hits,
            "misses": misses,
            "hit_rate": hits / (hits + misses) if hits + misses else 0.0,
            "local_bytes": local,
            "peer_bytes": peer,
            "host_bytes": host,
        }

    # Other processes

    def handle(self) -> str:
        """Return a text by which other processes of this user on this machine can `attach`.

        The cache and its table are read-only from now on. This process owns the slabs: it must
        live, and keep the cache open, as long as the others use it.

        Raises
        ------
        BitslabError
            When the cache is closed, or itself attached to another process's.
        """
        self._check_open()
        if self._attached:
            raise BitslabError("handle: this cache is attached; ask the process that filled it")
        with self._fill_lock:
            text, buffers = handle_of_cache(
                self._snapshot, self.table.freeze(), self._packer, self.capacity_bytes
            )
            self._shared_buffers += buffers
            return text

    @classmethod
    def attach(
        cls, table: CompressedTable, handle: str, device: torch.device | str | None = None
    ) -> SlabCache:
        """Open a cache of another process by its `handle`: the same slabs, read-only.

        Parameters
        ----------
        table : CompressedTable
            That process's table: attached by its handle, or inherited.
        handle : str
            The text that `handle` returned in that process.
        device : torch.device or str, optional
            The GPU that this process gathers to, the current one when left out. It keeps a copy of
            the map and reads its own slab, if it has one, and over NVLink those of other GPUs. The
            CPU for slabs on the CPU.

        Raises
        ------
        ArgumentError
            When the handle is not valid, is of another table's cache, its process is gone, or the
            GPU cannot read one of the slabs.
        """
        if not isinstance(table, CompressedTable):
            raise ArgumentTypeError(
                f"table: expected a CompressedTable, got {type(table).__name__}"
            )
        if device is None:
            device = "cpu" if slabs_on_cpu(handle) else "cuda"
        allocator = SlabAllocator((checked_device(device),))
        snapshot, packer, capacity_bytes = parts_of_cache_handle(handle, table, allocator)
        table.freeze()
        made = cls.__new__(cls)
        made._begin(table, capacity_bytes, packer, allocator, snapshot, attached=True)
        return made

    def _check_own(self) -> None:
        if self._attached or self._shared_buffers:
            raise BitslabError(
                "fill: this cache is shared with other processes, which would not see the change; "
                "make a new one"
            )

    def close(self) -> None:
        """Free the slabs, after the gathers under way; the table is left open."""
        if not self._closed:
            with self._fill_lock:
                self._closed = True
                if self._attached and self.devices[0].type == "cuda":
                    # Torch records no streams for the memory of another process.
                    torch.cuda.synchronize(self.devices[0])
                self._snapshot = Snapshot.empty(self._allocator)
                self._shared_buffers = []

    def __enter__(self) -> SlabCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        """Refuse to be pickled or copied."""
        raise ArgumentTypeError(
            "cache: cannot be pickled or copied; make one over the table in each process, or use "
            "handle and attach"
        )

    def __repr__(self) -> str:
        """Return table, devices and number of cached rows as text."""
        if self._closed:
            return "SlabCache(closed)"
        where = ", ".join(str(d) for d in self.devices)
        return f"SlabCache({self._cached_rows} rows of {self.table!r} on {where})"

    def _check_open(self) -> None:
        if self._closed:
            raise BitslabError("cache: is closed")


def _checked_devices(
    devices: Sequence[torch.device | str] | None,
) -> tuple[torch.device, ...]:
    """Return the devices of the slabs, or refuse them."""
    if devices is None:
        devices = ["cuda" if torch.cuda.is_available() else "cpu"]
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Iterable):
        devices = [devices]
    found = tuple(checked_device(d, "devices") for d in devices)
    if not 1 <= len(found) <= MAX_SLABS:
        raise ArgumentError(f"devices: {len(found)}, accepted are 1 to {MAX_SLABS}")
    kinds = {d.type for d in found}
    if len(kinds) > 1:
        raise ArgumentError(f"devices: {', '.join(map(str, found))}; either GPUs or the CPU")
    if kinds == {"cuda"}:
        if len(set(found)) < len(found):
            raise ArgumentError(f"devices: {', '.join(map(str, found))}; one slab for each GPU")
        for reader, other in _pairs(found):
            _enable_peer_access(reader, other)
    return found


def _pairs(
    devices: tuple[torch.device, ...],
) -> Iterator[tuple[torch.device, torch.device]]:
    return ((a, b) for a in devices for b in devices if a != b)


def _enable_peer_access(reader: torch.device, other: torch.device) -> None:
    """Enable kernels of one GPU to read the memory of another."""
    if not torch.cuda.can_device_access_peer(reader, other):
        raise ArgumentError(f"devices: {reader} cannot read the memory of {other}")
    # Torch enables peer access at its first copy.
    torch.zeros(1, device=reader).copy_(torch.zeros(1, device=other))


def raw_bytes_in_slab(table: CompressedTable) -> int:
    """Return the bytes in a slab of a row that the table keeps raw."""
    if table.codec.keeps_raw:
        return table.row_bytes
    return 4 * ceil_div(table.codec.row_bytes, 4)


def least_capacity_bytes(table: CompressedTable) -> int:
    """Return the smallest accepted size of a slab: the most that a row of the table may take."""
    # Rows that are packed together are cached together, which takes less where they pack.
    return max(1, raw_bytes_in_slab(table) // table.rows_per_packed_row)


def _packer(table: CompressedTable, codec: str | RowCodec, capacity_bytes: int) -> RowCodec | None:
    """Return the codec for cached rows of a raw table; None when packing saves nothing."""
    if not table.codec.keeps_raw:
        raise ArgumentError(
            f"codec: {codec!r:.60}, but the table is packed by {table.codec.describe()}; accepted "
            "is None, since its cached rows are packed as they are"
        )
    row_bytes = max(1, table.row_bytes)
    n_sample = min(len(table), max(MIN_SAMPLE_ROWS, SAMPLE_BYTES // row_bytes))
    picked = np.sort(np.random.default_rng(0).choice(len(table), n_sample, replace=False))
    # Weighs the size of the profile: the slabs hold at least this many rows.
    n_rows = min(len(table), capacity_bytes // row_bytes)
    fitted = choose_codec(table.rows_of(torch.from_numpy(picked)), codec, n_rows, {})
    return None if fitted.keeps_raw else fitted
