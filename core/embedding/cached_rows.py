"""CachedRows: a table packed on the host, its hot rows on the device as a parameter that trains."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..devices import device_or_default
from ..engine.codecs import RowCodec
from ..engine.memory.locks import call_after_fork
from ..engine.progress import ProgressFunction
from ..errors import BitslabError
from ..tables.build import Rows
from ..tables.parts import Layout
from ..tables.slabs import SlabCache
from ..tables.table import CompressedTable
from ..tracing import not_traced
from . import plain_lookups, warm, whole
from .arguments import CacheKind, check_options, check_table, checked_pins, checked_rows
from .device_lookup import LookedUp
from .eviction import EvictionStrategy
from .gradients import NONE, to_device, track_result
from .lookup import cache_on_gpu, fetch, host_ids, look_up, prefetch, read
from .parameter_watch import ParameterWatch
from .resident_bags import ResidentBags
from .resident_cache import MissRate, ResidentCache, with_spare
from .row_state import RowState
from .slots import SlotTable
from .state import CacheState, WantedSlots
from .statistics import Statistics
from .store import RowStore, packed_table
from .training import Training


class CachedRows(CacheState):
    """Rows of an embedding table: all packed in host memory, the hot ones resident on a device.

    `lookup` fetches the rows of a batch to the device, where they train as part of `parameter`, and
    rows that leave are packed again on the way back. Only rows that may have changed go back.

    Parameters
    ----------
    table : CompressedTable
        ``[N, D]`` floating-point rows. With ``trainable=True`` nobody else may change it.
    cache_rows : int
        Rows that are resident, 1 to N; 0 is accepted with ``cache="packed"``.
    device : torch.device or str, optional
        Where lookups happen; the current GPU, or the CPU where there is none, when left out.
    cache : {"rows", "packed"}
        ``"rows"``: resident rows lie uncompressed in `parameter`. ``"packed"``: they lie packed in
        a `SlabCache` that takes no more bytes than so many raw rows; rows that train are then
        fetched for each batch and written back after each step.
    evict : EvictionStrategy
        Which row leaves first.
    trainable : bool
        Whether rows may change. If not, nothing is ever written back.
    counts : torch.Tensor, sequence or None
        ``[N]``, how often each row is used in the data set: the most used are resident at first.
    warmup_ratio : float
        Share of the resident rows that is filled at first, 0 to 1.
    pinned_ids : sequence of int
        Rows that are always resident, such as the padding row.
    buffer_rows : int
        The most rows that are fetched at once, which bounds the memory for that; 0 for no bound.

    Attributes
    ----------
    parameter : torch.nn.Parameter
        ``[cache_rows, D]`` on the device, for the optimizer. When the rows of a step do not fit it
        grows, and shrinks at the next lookup. With ids on a GPU it has at least as many rows as
        there are ids in lookups whose gradient has not been applied: where that is more than the
        cache, those behind are the miss buffer.

    Notes
    -----
    A step of an optimizer gives exactly what it would give on the whole table, if the optimizer
    leaves rows without gradient alone. Others are refused: those of `torch.optim` when they are
    made, the rest at their first step. Gradients must be cleared between steps, as usual
    (`zero_grad`); what could not be distinguished raises.

    float16 and bfloat16: torch's dense SGD rounds the last ``numel % 64`` elements of a parameter,
    and of the share of each thread, otherwise than the others, so that a step may differ there by
    one unit in the last place. `torch.nn.utils.clip_grad_norm_` sums in the order of the slots: a
    norm may differ in the last bit.

    Threads: lookups of several threads wait for each other.

    Examples
    --------
    >>> import torch
    >>> from bitslab.embedding import CachedRows
    >>> rows = CachedRows.from_tensor(torch.randn(1000, 16), cache_rows=50, device="cpu")
    >>> weight, index = rows.lookup(torch.tensor([3, 999, 3]), train=True)
    >>> weight[index].shape
    torch.Size([3, 16])
    """

    training: Training

    def __init__(
        self,
        table: CompressedTable,
        *,
        cache_rows: int,
        device: torch.device | str | None = None,
        cache: CacheKind = "rows",
        evict: EvictionStrategy = EvictionStrategy.LFU,
        trainable: bool = True,
        counts: torch.Tensor | Sequence[int] | None = None,
        warmup_ratio: float = 0.7,
        pinned_ids: Sequence[int] = (),
        buffer_rows: int = 0,
    ) -> None:
        check_table(table)
        check_options(buffer_rows, cache, evict)
        n_rows = len(table)
        cache_rows = checked_rows(cache_rows, n_rows, 0 if cache == "packed" else 1)
        self.device = device_or_default(device)
        self.trainable = trainable
        self.buffer_rows = buffer_rows
        self.cache = cache
        packed_rows = cache_rows if cache == "packed" else 0
        self.row_store = RowStore(table, self.device, packed_rows, "auto", True, NONE)
        self.pinned_ids = checked_pins(pinned_ids, n_rows) if cache == "rows" else ()
        # Besides pinned rows there is at least one slot whose row can change.
        resident = 0 if cache == "packed" else min(n_rows, cache_rows + len(self.pinned_ids))
        self.slot_table = SlotTable(n_rows, resident, evict)
        data = torch.zeros(resident, self.row_dim, dtype=table.dtype, device=self.device)
        self.parameter = torch.nn.Parameter(with_spare(data), requires_grad=trainable)
        self._begin([])
        self.warm_up(counts, warmup_ratio)

    def _begin(self, stores: list[dict[str, RowState]]) -> None:
        self.watch = ParameterWatch(self)
        self.statistics = Statistics()
        self.device_slots = self.device_uses = self.exchange = None
        self.wanted_slots = WantedSlots()
        self.resident_bags = ResidentBags()
        self.all_hit = False
        self.resident_cache = None
        cached = self.row_store.packed_rows or self.cache_rows
        self.miss_rate = MissRate(1 - cached / len(self))
        self._numbers = self._first_numbers = None
        self.closed = False
        self.after_fork()
        call_after_fork(self)
        self.training = Training(self, stores)

    def after_fork(self) -> None:
        """Make a new lock, and drop prefetched rows: both belong to one process."""
        self.lock = threading.RLock()
        self.row_store.prefetched = None

    @classmethod
    def from_tensor(
        cls,
        weight: Rows | Iterable[Rows],
        *,
        codec: str | RowCodec = "auto",
        layout: Layout = "compact",
        pin: bool = True,
        progress: ProgressFunction | bool | None = None,
        **options: Any,
    ) -> CachedRows:
        """Pack a table and cache some of it.

        Parameters
        ----------
        weight : torch.Tensor, numpy.ndarray, or iterable of them
            ``[N, D]``, or batches of its rows.
        codec, layout, pin, progress
            As in `CompressedTable.from_tensor`.
        **options
            As for the class.
        """
        if isinstance(weight, torch.Tensor):
            weight = weight.detach()
        device = device_or_default(options.get("device"))
        trains = options.get("trainable", True) and options.get("cache", "rows") == "rows"
        slots = options.get("cache_rows") if trains else None
        table, notes = packed_table(weight, layout, codec, pin, device, progress, slots)
        try:
            made = cls(table, **options)
        except BaseException:
            table.close()
            raise
        made.row_store.packed_as(codec, pin, notes, slots)
        return made

    # Attributes

    def __repr__(self) -> str:
        """Name the table and the cache."""
        if self.closed:
            return "CachedRows(closed)"
        return f"CachedRows({self.cache_rows} rows of {self.table!r} on {self.device})"

    # Lookups

    def lookup(
        self,
        ids: torch.Tensor,
        *,
        train: bool,
        sparse: bool = False,
        max_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a matrix that holds the rows of some ids, and where.

        Parameters
        ----------
        ids : torch.Tensor
            int32 or int64 of any shape, on a CPU or GPU, 0 to N - 1.
        train : bool
            Whether rows of the batch become resident. If not, they bypass the cache.
        sparse : bool
            Whether the gradient is going to be sparse.
        max_norm, norm_type : float
            Rows that are looked up and longer than that are scaled down first, for good, as by
            `torch.nn.Embedding`.

        Returns
        -------
        weight : torch.Tensor
            ``[M, D]`` on the device. Gradients that reach it reach `parameter`.
        index : torch.Tensor
            int64 of the shape of `ids`, on the device: ``weight[index]`` are the rows.

        Raises
        ------
        IndexRangeError
            When an id is out of range; nothing was changed. For ids on a GPU the next call there or
            `bitslab.raise_pending_errors` raises it, since nothing waits for the GPU.
        ArgumentTypeError
            When the ids are no int32 or int64.
        BitslabError
            When the rows are closed, or are frozen and asked for a gradient.
        """
        weight, index, _ = self.lookup_padded(
            ids, train=train, sparse=sparse, max_norm=max_norm, norm_type=norm_type
        )
        return weight, index

    @not_traced
    def lookup_padded(
        self,
        ids: torch.Tensor,
        *,
        train: bool,
        sparse: bool = False,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Return what `lookup` returns, and the index of the padding row.

        Parameters
        ----------
        ids, train, sparse, max_norm, norm_type
            As there.
        padding_idx : int, optional
            One of `pinned_ids`, or a row of a packed cache.

        Returns
        -------
        weight, index
            As there.
        padding : int or None
            Index of that row in `weight`; if the batch has none, that of a row that no index names,
            or None.
        """
        with self.lock:
            self._check_open()
            found = look_up(
                self,
                ids,
                train=train,
                sparse=sparse,
                padding_idx=padding_idx,
                max_norm=max_norm,
                norm_type=norm_type,
            )
            return found[:3]

    def lookup_to_follow(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        *,
        include_last: bool = False,
        train: bool,
        sparse: bool = False,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> LookedUp:
        """Look rows up for one operation of torch, whose result the caller gives to `follow`.

        Parameters
        ----------
        ids, train, sparse, padding_idx, max_norm, norm_type
            As for `lookup_padded`.
        offsets : torch.Tensor, optional
            int32 or int64 ``[B]``: where bags begin in ``[n]`` ids.
        include_last : bool
            Whether the last one is the end of the last bag.

        Returns
        -------
        LookedUp
            Weight, indices and padding as there; the indices are not to be written to. And offsets
            as `sound_offsets` returns them.
        """
        with self.lock:
            self._check_open()
            return look_up(
                self,
                ids,
                train=train,
                sparse=sparse,
                padding_idx=padding_idx,
                max_norm=max_norm,
                norm_type=norm_type,
                offsets=offsets,
                include_last=include_last,
                follows=True,
            )

    def follow(self, found: LookedUp, result: torch.Tensor) -> None:
        """Report the gradient of a result when it comes.

        Parameters
        ----------
        found : LookedUp
            Of `lookup_to_follow`.
        result : torch.Tensor
            What an operation of torch made of its weight, the first argument with a gradient.
        """
        if found.pinned is not None:
            track_result(result, self.training, found.pinned)

    @not_traced
    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of some ids, without gradient; the cache is left as it is.

        Parameters
        ----------
        ids : torch.Tensor
            As for `lookup`.

        Returns
        -------
        torch.Tensor
            ``[*ids.shape, D]`` on the device, new memory.
        """
        with self.lock:
            self._check_open()
            return read(self, ids)

    def plain_lookup(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        *,
        include_last: bool,
        one_each: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Look bags up in inference on a CPU, in the plainest case.

        Parameters
        ----------
        ids : torch.Tensor
            int64 ``[n]`` on the CPU, contiguous.
        offsets : torch.Tensor
            int64 on the CPU, contiguous: where bags begin.
        include_last : bool
            Whether the last one is the number of ids.
        one_each : bool
            Whether bags may be of one id each, and their sum or mean be that id's row, so that
            nothing needs pooling where they are.

        Returns
        -------
        tuple or None
            The parameter and slots int64 ``[n]``, if all rows are resident. With `one_each` else
            rows ``[n, D]`` and None. None where an argument is bad, or there is more to do: then
            `lookup_padded` does that.
        """
        with self.lock:
            if self.closed:
                return None
            return plain_lookups.plain_lookup(self, ids, offsets, include_last, one_each)

    def fetch(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Make the rows of some ids resident.

        Parameters
        ----------
        ids : torch.Tensor
            As for `lookup`.

        Returns
        -------
        torch.Tensor or None
            int64 slots of the shape of `ids`; None when the rows do not fit.
        """
        with self.lock:
            self._check_open()
            self.training.retire_steps()
            found = fetch(self, host_ids(self, ids), wants_grad=False, sparse=False)
            return to_device(found.index, self.device).view(ids.shape) if found.whole else None

    @not_traced
    def lookup_slots(
        self, slots: torch.Tensor, padding_idx: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Return what `lookup_padded` returns, for rows that `fetch` has made resident.

        Parameters
        ----------
        slots : torch.Tensor
            int64 of any shape.
        padding_idx : int, optional
            As there.
        """
        with self.lock:
            self._check_open()
            return plain_lookups.look_up_slots(self, slots, padding_idx)

    def cache_on_gpu(self) -> SlabCache | ResidentCache | None:
        """Return the cache that gather kernels read rows in the GPU's memory from, if any."""
        return cache_on_gpu(self)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Start to fetch the rows of a later lookup, and return.

        A hint: results never depend on it. One is kept, the last.

        Parameters
        ----------
        ids : torch.Tensor
            As for `lookup`. With those on a GPU nothing is done: their lookup runs on the
            GPU, which fetches rows that miss; the host reads ids back only with `max_norm` or where
            memory is short.
        """
        with self.lock:
            self._check_open()
            prefetch(self, ids)

    def warm_up(
        self, counts: torch.Tensor | Sequence[int] | None = None, warmup_ratio: float = 1.0
    ) -> None:
        """Choose the resident rows again, before training or for inference.

        Parameters
        ----------
        counts : torch.Tensor, sequence or None
            ``[N]``, how often each row is used: the most used become resident. Without it the first
            rows of the table do.
        warmup_ratio : float
            Share of the cache to fill, 0 to 1. A table that fits is resident whole.
        """
        with self.lock, torch.no_grad():
            self._check_open()
            warm.warm_up(self, counts, warmup_ratio)

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, *, row_wise: bool = False) -> None:
        """Attach an optimizer before its first step, so that its state follows the rows.

        At its first step it is found and attached anyway.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            It has `parameter`.
        row_wise : bool
            Whether the caller guarantees that a step leaves rows without gradient, and their state,
            alone.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            When it is no optimizer, does not have `parameter`, or moves rows without gradient.
        """
        with self.lock:
            self._check_open()
            self.training.adapters.attach(optimizer, row_wise=row_wise)

    def flush(self, *, evict: bool = False) -> None:
        """Pack every row that may have changed back into the table.

        Parameters
        ----------
        evict : bool
            Whether the resident rows are evicted too, but for `pinned_ids`.
        """
        with self.lock, torch.no_grad():
            self._check_open()
            whole.flush(self, evict=evict)

    # All rows

    def decoded(self, begin: int, end: int) -> torch.Tensor:
        """Return rows ``[end - begin, D]`` on the CPU by id, as they are now."""
        with self.lock:
            self._check_open()
            return whole.decoded(self, begin, end)

    def whole(self) -> torch.Tensor:
        """Return all rows ``[N, D]`` on the CPU in the order of their ids, as they are now."""
        out = torch.empty(self.shape, dtype=self.dtype)
        for begin, end in self.ranges(0, len(self)):
            out[begin:end] = self.decoded(begin, end)
        return out

    def load(self, weight: torch.Tensor | Iterable[torch.Tensor], begin: int = 0) -> None:
        """Give rows new values, and keep their optimizers' state.

        Parameters
        ----------
        weight : torch.Tensor or iterable of them
            ``[n, D]`` of any floating-point dtype, on a CPU or GPU; read in pieces, so that it may
            be memory-mapped. Or batches ``[n, D]`` of all N rows in order, packed as they come.
        begin : int
            The first row; 0 for batches.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            When a shape does not fit, batches have other than N rows, or something is no tensor of
            floating-point rows; nothing was changed.
        """
        with self.lock, torch.no_grad():
            self._check_open()
            whole.load(self, weight, begin)

    def before_move(self) -> None:
        """Write changed rows back to the table, before a module moves the parameter."""
        with self.lock, torch.no_grad():
            whole.before_move(self)

    def moved(self, parameter: torch.nn.Parameter) -> None:
        """Follow the parameter, which a module moved to another device or dtype.

        Parameters
        ----------
        parameter : torch.nn.Parameter
            The parameter, or the one that replaces it now.
        """
        with self.lock, torch.no_grad():
            whole.moved(self, parameter)

    # Copies, statistics, end

    def __getstate__(self) -> dict[str, Any]:
        """Return the pickled form: rows and optimizer state, but no optimizers."""
        with self.lock:
            self._check_open()
            return whole.description(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        stores, store = state.pop("stores"), state.pop("row_store")
        self.__dict__.update(state)
        self.device = self.parameter.device
        self.row_store = RowStore(device=self.device, **store)
        self._begin(stores)

    def stats(self) -> dict[str, Any]:
        """Return sizes and counts; reading them waits for the GPU.

        Returns
        -------
        dict
            ``rows``, ``row_bytes``, ``codec``, ``raw_bytes`` (of all rows), ``host_bytes`` (of the
            table, metadata included), ``map_bytes`` (what finds resident rows and their
            order by use, on the host),
            ``ratio`` (raw over host bytes), ``cache_rows``, ``device_bytes`` (of resident rows),
            ``lookups``, ``hits``, ``misses``, ``hit_rate`` (of the different rows of each training
            batch; of ids in inference and with packed rows on the device), ``written_back`` (rows),
            ``moved_bytes`` (read from the table), ``overflow_bytes``, ``notes``.
        """
        with self.lock:
            self._check_open()
            return whole.stats_of(self)

    def close(self) -> None:
        """Free the memory; closing twice is fine."""
        with self.lock:
            if not self.closed:
                self.closed, self.device_slots, self.exchange = True, None, None
                self.row_store.close()

    def _check_open(self) -> None:
        if self.closed:
            raise BitslabError("rows: are closed")
