"""CachedRows: a table packed on the host, its hot rows on the device as a parameter that trains."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch

from ..codecs import RowCodec
from ..codecs.base import check_tensor_argument, raise_bad_index
from ..errors import ArgumentError, ArgumentTypeError, BitslabError
from ..memory.arguments import checked_device
from ..memory.build import Rows, rows_per_batch
from ..memory.locks import call_after_fork
from ..memory.parts import Layout
from ..memory.progress import ProgressFunction
from ..memory.slabs import SlabCache
from ..memory.table import CompressedTable
from .arguments import check_table, checked_rows, device_or_default, ids_by_use
from .eviction import EvictionStrategy
from .gradients import NONE, Array
from .lookups import bring, host_ids, look_up, read, rows_of, to_device
from .optimizers import check_optimizer
from .resident_cache import MissRate, ResidentCache, fits, with_spare
from .residents import Batch, Residents
from .source import Source, packed_table
from .state import RowState
from .statistics import Statistics
from .tracing import not_traced
from .training import Training, set_data

CacheKind = Literal["rows", "packed"]


class CachedRows:
    """Rows of an embedding table: all packed in host memory, the hot ones resident on a device.

    `lookup` brings the rows of a batch to the device, where they train as part of `parameter`, and
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
        What leaves first.
    trainable : bool
        Whether rows may change. If not, nothing is ever written back.
    counts : torch.Tensor, sequence or None
        ``[N]``, how often each row is used in the data set: the most used are resident at first.
    warmup_ratio : float
        Share of the resident rows that is filled at first, 0 to 1.
    pinned_ids : sequence of int
        Rows that stay resident always, such as the one that pads.
    buffer_rows : int
        The most rows that are brought at once, which bounds the memory for that; 0 for no bound.

    Attributes
    ----------
    parameter : torch.nn.Parameter
        ``[cache_rows, D]`` on the device, for the optimizer. When the rows of a step do not fit it
        grows, and shrinks at the next lookup.

    Notes
    -----
    A step of an optimizer gives exactly what it would give on the whole table, if the optimizer
    leaves rows without gradient alone; others are refused at their first step. Gradients must be
    cleared between steps, as usual (`zero_grad`); what could not be told apart raises.

    float16 and bfloat16: torch's SGD rounds the last ``numel % 64`` elements of a parameter
    otherwise than the others, so that a step may differ there by one unit in the last place.

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
        if not isinstance(buffer_rows, int) or buffer_rows < 0:
            raise ArgumentError(f"buffer_rows: {buffer_rows!r:.60}, accepted are 0 and more")
        if cache not in get_args(CacheKind):
            raise ArgumentError(f"cache: {cache!r:.60}, accepted are {get_args(CacheKind)}")
        if not isinstance(evict, EvictionStrategy):
            raise ArgumentTypeError(f"evict: expected an EvictionStrategy, got {evict!r:.60}")
        n_rows = len(table)
        cache_rows = checked_rows(cache_rows, n_rows, 0 if cache == "packed" else 1)
        self.device = device_or_default(device)
        self.trainable = trainable
        self.buffer_rows = buffer_rows
        self.cache: CacheKind = cache
        packed_rows = cache_rows if cache == "packed" else 0
        self.source = Source(table, self.device, packed_rows, "auto", True, NONE)
        self.pinned_ids = tuple(dict.fromkeys(pinned_ids)) if cache == "rows" else ()
        for row in self.pinned_ids:
            if not 0 <= row < n_rows:
                raise_bad_index(row, self.pinned_ids.index(row), n_rows, "pinned_ids")
        # Beside at least one row that can change places.
        resident = 0 if cache == "packed" else min(n_rows, cache_rows + len(self.pinned_ids))
        self.residents = Residents(n_rows, resident, evict)
        data = torch.zeros(resident, self.row_dim, dtype=table.dtype, device=self.device)
        self.parameter = torch.nn.Parameter(with_spare(data), requires_grad=trainable)
        #: What is worth knowing; `stats` has them.
        self.notes: list[str] = []
        self._begin([])
        self.warm_up(counts, warmup_ratio)

    def _begin(self, stores: list[dict[str, RowState]]) -> None:
        self.statistics = Statistics()
        self._resident_cache: ResidentCache | None = None
        cached = self.source.packed_rows or self.cache_rows
        self.miss_rate = MissRate(1 - cached / len(self))
        self._numbers: torch.Tensor | None = None
        self._closed = False
        self.after_fork()
        call_after_fork(self)
        self.training = Training(self, stores)

    def after_fork(self) -> None:
        """Set up what belongs to one process: the lock, and what its threads fetch."""
        self.lock = threading.RLock()
        self.source.prefetched = None

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
        table, notes = packed_table(weight, layout, codec, pin, device, progress)
        try:
            made = cls(table, **options)
        except BaseException:
            table.close()
            raise
        made.source.codec, made.source.pin = codec, pin
        made.notes += notes
        return made

    # What it is

    @property
    def table(self) -> CompressedTable:
        """The rows on the host; those of resident ones may be older."""
        return self.source.table

    def __len__(self) -> int:
        """Return the number of rows of the table."""
        return len(self.table)

    @property
    def shape(self) -> torch.Size:
        """``[N, D]``."""
        return self.table.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows."""
        return self.table.dtype

    @property
    def row_dim(self) -> int:
        """Elements of a row, D."""
        return int(self.table.shape[1])

    @property
    def cache_rows(self) -> int:
        """Rows that `parameter` holds between steps, those of `pinned_ids` included."""
        return self.residents.capacity_rows

    @property
    def all_resident(self) -> bool:
        """Whether every row is resident; then each lies in the slot of its own number."""
        return self.cache_rows == len(self)

    def __repr__(self) -> str:
        """Name the table and the cache."""
        if self._closed:
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
            Whether rows may come and go. If not, what is resident stays so, and the other rows of
            the batch are decoded beside it.
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
            When an id is out of range; nothing was changed.
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
        """Do what `lookup` does, and say where the row is that pads.

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
            Place of that row in `weight`; of a row that no index names, if the batch has none.
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
            )

    @not_traced
    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of some ids, with no gradient and with nothing coming or going.

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
        one_each: Callable[[], bool],
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Look bags up in inference on a CPU, where there is nothing else to do.

        Parameters
        ----------
        ids : torch.Tensor
            int64 ``[n]`` on the CPU, contiguous.
        offsets : torch.Tensor
            int64 on the CPU, contiguous: where bags begin.
        include_last : bool
            Whether the last one is the number of ids.
        one_each : callable
            Tells whether every bag is of one id, so that nothing needs pooling; called where a row
            is not resident.

        Returns
        -------
        tuple or None
            The parameter and slots int64 ``[n]``, if all rows are resident. With `one_each` else
            rows ``[n, D]`` and None. None where an argument is bad, or there is more to do: then
            `lookup_padded` does that.
        """
        with self.lock:
            if self._closed or self.device.type != "cpu" or not self.training.idle:
                return None
            host = ids.numpy()
            slots, missing = self.residents.find_bags(host, offsets.numpy(), include_last)
            if missing == 0 and len(slots):
                self.statistics.note_rows(len(slots), 0)
                return self.parameter, torch.from_numpy(slots)
            if missing <= 0 or not one_each() or self.parameter.requires_grad != self.trainable:
                return None
            return rows_of(self, host, slots, missing), None

    def bring(self, ids: torch.Tensor) -> torch.Tensor | None:
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
            self.training.settle()
            found = bring(self, host_ids(self, ids), wants_grad=False, sparse=False)
            return to_device(found.index, self.device).view(ids.shape) if found.whole else None

    @not_traced
    def lookup_slots(
        self, slots: torch.Tensor, padding_idx: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Do what `lookup_padded` does for rows that `bring` has made resident.

        Parameters
        ----------
        slots : torch.Tensor
            int64 of any shape.
        padding_idx : int, optional
            As there.
        """
        with self.lock:
            self._check_open()
            host = slots.detach().reshape(-1).cpu().numpy()
            held = self.residents.id_of
            if len(host) and not (0 <= host.min() and host.max() < len(held)):
                raise ArgumentError(f"input: slots outside 0 to {len(held) - 1}")
            used = np.unique(host)
            if (held[used] < 0).any():
                raise ArgumentError("input: names slots that hold no row; call prepare_ids first")
            matrix: torch.Tensor = self.parameter.data
            if torch.is_grad_enabled() and self.parameter.requires_grad:
                matrix = self.training.hold(matrix, used, held[used], whole=True)
            padding = None if padding_idx is None else int(self.residents.slot_of[padding_idx])
            return matrix, slots.to(self.device, torch.int64), padding

    def cache_on_gpu(self) -> SlabCache | ResidentCache | None:
        """Return what tells the kernels of the GPU which rows are in its memory."""
        if self.source.slabs is not None:
            return self.source.slabs
        if self.cache == "packed" or not fits(self.table.row_bytes):
            return None
        if self._resident_cache is None:
            self._resident_cache = ResidentCache(self)
        return self._resident_cache

    def numbers(self, n: int) -> torch.Tensor:
        """Return int64 0 to n - 1 on the device, kept for the next time."""
        if self._numbers is None or len(self._numbers) < n or self._numbers.device != self.device:
            self._numbers = torch.arange(max(n, 1024), device=self.device)
            if self.device.type == "cuda":
                # Other streams may read it.
                torch.cuda.current_stream(self.device).synchronize()
        return self._numbers[:n]

    def write_back(self, slots: Array) -> None:
        """Pack resident rows into the table."""
        if len(slots):
            rows = self.parameter.data[torch.from_numpy(slots).to(self.device)]
            self.source.update(self.residents.id_of[slots], rows)
            # A step may still apply a gradient that is there.
            self.residents.dirty[slots] = self.training.step_may_come

    def prefetch(self, ids: torch.Tensor) -> None:
        """Start to fetch the rows of a lookup to come, and return.

        A hint: results never depend on it. One is kept, the last.

        Parameters
        ----------
        ids : torch.Tensor
            As for `lookup`. Those on a GPU are waited for.
        """
        with self.lock:
            self._check_open()
            host = np.unique(host_ids(self, ids))
            self.source.prefetch(host[self.residents.slot_of[host] < 0])

    def warm_up(
        self, counts: torch.Tensor | Sequence[int] | None = None, warmup_ratio: float = 1.0
    ) -> None:
        """Choose anew what is resident, before training or for good in inference.

        Parameters
        ----------
        counts : torch.Tensor, sequence or None
            ``[N]``, how often each row is used: the most used become resident. Without it the first
            rows of the table do.
        warmup_ratio : float
            Share of the cache to fill, 0 to 1. A table that fits is resident whole.
        """
        order, how_often = ids_by_use(counts, len(self))
        if not isinstance(warmup_ratio, (int, float)) or not 0 <= warmup_ratio <= 1:
            raise ArgumentError(f"warmup_ratio: {warmup_ratio!r:.60}, accepted are 0 to 1")
        residents = self.residents
        if len(residents.resident()):
            self.flush(evict=True)
        if self.cache == "packed":
            self.source.fill(order)
            return
        if counts is not None and residents.evict is EvictionStrategy.DATASET:
            residents.order = np.empty(len(self), np.int64)
            residents.order[order] = np.arange(len(self))
        if self.all_resident:
            if residents.free_rows < len(self):
                return  # each row is where it belongs
            chosen = np.arange(len(self))  # in the slot of its own number
        else:
            away = residents.slot_of < 0
            fixed = np.array([row for row in self.pinned_ids if away[row]], np.int64)
            wanted = int(np.ceil((residents.free_rows - len(fixed)) * warmup_ratio))
            rest = order[away[order] & ~np.isin(order, fixed)]
            chosen = np.concatenate([fixed, rest[:wanted]])
        if not len(chosen):
            return
        rows = self.table.gather(torch.from_numpy(chosen), None, self.device)
        slots = None
        try:
            slots = residents.make_room(Batch(chosen, chosen[:0], chosen, how_often[chosen]))
            assert slots is not None  # no more than the free ones
            self.parameter.data[to_device(slots, self.device)] = rows
            residents.admit(chosen, slots, how_often[chosen])
            self.training.restore(slots, chosen)
        except BaseException:
            residents.mend(slots)
            raise

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, *, row_wise: bool = False) -> None:
        """Let an optimizer's state follow the rows before its first step, when it is found anyway.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            It has `parameter`.
        row_wise : bool
            The caller vouches that a step leaves rows without gradient, and their state, alone.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            When it is no optimizer, does not have `parameter`, or moves rows without gradient.
        """
        with self.lock:
            self._check_open()
            self.training.link(check_optimizer(optimizer), row_wise=row_wise).align()

    def flush(self, *, evict: bool = False) -> None:
        """Pack every row that may have changed back into the table.

        Parameters
        ----------
        evict : bool
            Whether the resident rows leave too, but for those that always stay.
        """
        with self.lock, torch.no_grad():
            self._check_open()
            self.training.settle()
            residents = self.residents
            self.write_back(np.flatnonzero(residents.dirty))
            self.source.tidy()
            if not evict or self.all_resident:
                return
            self.training.pin()
            if residents.extra_rows or (residents.pinned.sum() > len(self.pinned_ids)):
                raise BitslabError(
                    "flush: gradients of looked-up rows wait for a step; take it, or clear them "
                    "with zero_grad(), and drop what was computed from them"
                )
            slots = residents.resident()
            slots = slots[~residents.pinned[slots]]
            self.training.save(slots, residents.id_of[slots])
            self.training.note_reuse(slots)
            residents.empty(slots)

    # All rows

    def decoded(self, begin: int, end: int) -> torch.Tensor:
        """Return rows ``[end - begin, D]`` on the CPU by id, as they are now."""
        with self.lock:
            self._check_open()
            rows = self.table.decoded(begin, end)
            ids = self.residents.id_of
            slots = np.flatnonzero(self.residents.dirty & (ids >= begin) & (ids < end))
            if len(slots):
                there = self.parameter.data[torch.from_numpy(slots).to(self.device)]
                rows[torch.from_numpy(ids[slots] - begin)] = there.cpu()
            return rows

    def whole(self) -> torch.Tensor:
        """Return all rows ``[N, D]`` on the CPU in the order of their ids, as they are now."""
        rows = torch.empty(self.shape, dtype=self.dtype)
        for begin, end in self.ranges(0, len(self)):
            rows[begin:end] = self.decoded(begin, end)
        return rows

    def ranges(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield rows begin..end in pieces of bounded size: the first, and the last + 1."""
        step = rows_per_batch(self.table.row_bytes)
        for at in range(begin, end, step):
            yield at, min(at + step, end)

    def load(self, weight: torch.Tensor, begin: int = 0) -> None:
        """Give rows new values, and keep their optimizers' state.

        Parameters
        ----------
        weight : torch.Tensor
            ``[n, D]`` of any floating-point dtype, on a CPU or GPU; read in pieces, so that it may
            be memory-mapped.
        begin : int
            The first row.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            When the shape does not fit or it is no tensor; nothing was changed.
        """
        check_tensor_argument("weight", weight)
        n_rows = weight.shape[0] if weight.dim() == 2 else -1
        if n_rows < 0 or weight.shape[1] != self.row_dim or not 0 <= begin <= len(self) - n_rows:
            raise ArgumentError(
                f"weight: {list(weight.shape)} for rows from {begin} on of {list(self.shape)}"
            )
        weight = weight.detach()
        with self.lock, torch.no_grad():
            self._check_open()
            if n_rows == len(self):
                self._replace_table(weight)
                return
            for first, last in self.ranges(begin, begin + n_rows):
                rows = weight[first - begin : last - begin].to(self.dtype)
                self.source.update(np.arange(first, last), rows)
            self._refresh(begin, begin + n_rows)

    def _replace_table(
        self, weight: torch.Tensor | _Decoded, dtype: torch.dtype | None = None
    ) -> None:
        """Pack all rows anew, from a tensor, or from what they are now in another dtype."""
        self.source.replace(
            weight[begin:end].to(dtype or self.dtype) for begin, end in self.ranges(0, len(self))
        )
        self._refresh(0, len(self))

    def _refresh(self, begin: int, end: int) -> None:
        """Read resident rows from the table again."""
        ids = self.residents.id_of
        slots = np.flatnonzero((ids >= begin) & (ids < end))
        if len(slots):
            rows = self.table.gather(torch.from_numpy(ids[slots]), None, self.device)
            self.parameter.data[to_device(slots, self.device)] = rows
            self.residents.dirty[slots] = self.training.step_may_come

    def before_move(self) -> None:
        """Get ready for `moved`: changed rows go back to the table."""
        with self.lock, torch.no_grad():
            self.training.settle()
            if self.trainable:
                self.write_back(np.flatnonzero(self.residents.dirty))

    def moved(self, parameter: torch.nn.Parameter) -> None:
        """Follow the parameter, which a module moved to another device or dtype.

        Parameters
        ----------
        parameter : torch.nn.Parameter
            It, or what stands in its place now.
        """
        with self.lock, torch.no_grad():
            if parameter.device.type == "meta":
                raise ArgumentError("device: meta; rows of a table cannot go there")
            self.parameter = parameter
            before = self.device
            try:
                self.device = checked_device(parameter.device)
                parameter.data = with_spare(parameter.data)
                self.source.move(self.device)
                if parameter.dtype != self.dtype:
                    self._replace_table(_Decoded(self), parameter.dtype)
            except BaseException:
                # The table has every row as it was.
                self.device = before
                grad, parameter.grad = parameter.grad, None
                data = torch.zeros(parameter.shape, dtype=self.dtype, device=before)
                set_data(parameter, with_spare(data))
                if grad is not None and grad.device.type != "meta":
                    parameter.grad = grad.to(before, self.dtype)
                self._refresh(0, len(self))
                self.source.move(before)
                raise
            self.training.moved()

    # Copies, statistics, end

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedRows:
        """Copy table, cache and optimizer state; the copy knows no optimizer yet."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Describe the rows for a copy or another process."""
        with self.lock:
            self._check_open()
            if self.trainable:
                self.before_move()
                self.table.compact(progress=False)
            names = ("parameter", "trainable", "cache", "pinned_ids", "residents", "buffer_rows")
            state = {name: getattr(self, name) for name in (*names, "notes")}
            stores = self.training.stores()
            return state | {"stores": stores, "source": self.source.description()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        stores, source = state.pop("stores"), state.pop("source")
        self.__dict__.update(state)
        self.device = self.parameter.device
        self.source = Source(device=self.device, **source)
        self._begin(stores)

    def stats(self) -> dict[str, Any]:
        """Return sizes and counts; reading them waits for the GPU.

        Returns
        -------
        dict
            ``rows``, ``row_bytes``, ``codec``, ``raw_bytes`` (of all rows), ``host_bytes`` (of the
            table, metadata included), ``map_bytes`` (what finds resident rows, on the host),
            ``ratio`` (raw over host bytes), ``cache_rows``, ``device_bytes`` (of resident rows),
            ``lookups``, ``hits``, ``misses``, ``hit_rate`` (of the different rows of each training
            batch; of ids in inference and with packed rows on the device), ``written_back`` (rows),
            ``moved_bytes`` (read from the table), ``overflow_bytes``, ``notes``.
        """
        with self.lock:
            self._check_open()
            table = self.table.stats()
            hits, misses = self.statistics.hits, self.statistics.misses
            lookups, moved = self.statistics.lookups, table["moved_bytes"]
            device_bytes = self.parameter.nbytes
            if self._resident_cache is not None:
                on_gpu = self._resident_cache.counted()
                hits, misses, moved = hits + on_gpu[0], misses + on_gpu[1], moved + on_gpu[2]
                lookups += on_gpu[0] + on_gpu[1]
            if self.source.slabs is not None:
                # What lies in them is not resident to the statistics; they count by themselves.
                slabs = self.source.slabs.stats()
                hits, misses = slabs["hits"], slabs["misses"]
                lookups, moved = hits + misses, moved + slabs["host_bytes"]
                device_bytes += sum(slabs["slab_bytes"]) + slabs["map_bytes"]
            return {
                "rows": len(self),
                "row_bytes": table["row_bytes"],
                "codec": table["codec"],
                "raw_bytes": table["raw_bytes"],
                "host_bytes": table["host_bytes"],
                "map_bytes": self.residents.slot_of.nbytes,
                "ratio": table["ratio"],
                "cache_rows": self.source.packed_rows or self.cache_rows,
                "device_bytes": device_bytes,
                "lookups": lookups,
                "hits": hits,
                "misses": misses,
                "hit_rate": hits / (hits + misses) if hits + misses else 0.0,
                "written_back": self.source.written_back,
                "moved_bytes": moved,
                "overflow_bytes": table["overflow_bytes"],
                "notes": list(self.notes),
            }

    def close(self) -> None:
        """Let the memory go; closing twice is fine."""
        with self.lock:
            if not self._closed:
                self._closed = True
                self.source.close()

    def _check_open(self) -> None:
        if self._closed:
            raise BitslabError("rows: are closed")


class _Decoded:
    """The rows as they are, for what reads a tensor piece by piece."""

    def __init__(self, rows: CachedRows) -> None:
        self._table = rows.table

    def __getitem__(self, piece: slice) -> torch.Tensor:
        return self._table.decoded(piece.start, piece.stop)
