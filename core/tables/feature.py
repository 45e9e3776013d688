"""CompressedFeature: a feature of the nodes or edges of a graph, as a table with a cache."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..devices import checked_device, device_or_default
from ..engine.codecs import RowCodec
from ..engine.codecs.base import check_tensor_argument
from ..engine.kernels.typed_products import PackedRows
from ..engine.memory.locks import call_after_fork
from ..engine.memory.readonly import ReadOnlyTensor, read_only
from ..engine.progress import ProgressFunction
from ..engine.transfer.lanes import Task, ThreadLane
from ..engine.versions import version_of
from ..errors import ArgumentError, ArgumentTypeError, DecodedCopyWarning
from .arguments import checked_target
from .parts import Layout
from .slabs import SlabCache, least_capacity_bytes
from .table import CompressedTable

#: Gathers of fewer bytes run in the calling thread: a hand-over would cost more.
OVERLAP_BYTES = 1 << 20
#: A decoded copy of a feature of at least this many bytes raises a warning.
WARN_BYTES = 1 << 20

HotIds = torch.Tensor | Callable[[], torch.Tensor]


#: Decode rows on the CPU in the background, for all features: two threads, since each gather runs
#: torch's number of threads itself.
fetchers = ThreadLane("bitslab-fetch", threads=2)


class RowsFuture:
    """Rows that were requested; `wait` returns them.

    Notes
    -----
    On a GPU the rows belong to the stream that was current at the request, as with any operator,
    or to a stream of their own, for which `wait` makes the current one wait. The host does not wait
    for the GPU.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: torch.Tensor | Task[torch.Tensor]) -> None:
        self._rows = rows

    def wait(self) -> torch.Tensor:
        """Return the rows ``[n, *row_shape]``, or raise the error of their gather."""
        if isinstance(self._rows, torch.Tensor):
            return self._rows
        return self._rows.result()


class CompressedFeature:
    """A feature of the nodes or edges of a graph: one packed row each, with an optional cache.

    Integrations put it in the place of a feature tensor. It is immutable.

    Parameters
    ----------
    table : CompressedTable
        The rows.
    cache : SlabCache, optional
        A cache over that table.
    device : torch.device or str, optional
        Where rows mostly go; the device of the cache, or else the CPU, when left out.
    notes : iterable of str
        What `stats` is to say of how it was made.

    Notes
    -----
    Threads: any number may gather. Processes: a worker process gets the same host memory (see
    `CompressedTable`) and no cache, since workers must not use GPUs; `copy.deepcopy` copies the
    table without the cache. Forked children use neither the parent's GPUs nor its cache on them.

    Examples
    --------
    >>> import torch, bitslab
    >>> x = torch.randn(1000, 64).round()
    >>> feature = bitslab.CompressedFeature.from_tensor(x, cache_ratio=0.05, device="cpu")
    >>> futures = [feature.fetch(torch.tensor(ids)) for ids in ([3, 1], [999])]
    >>> [tuple(future.wait().shape) for future in futures]
    [(2, 64), (1, 64)]
    >>> torch.equal(feature.whole(), x)
    True
    """

    def __init__(
        self,
        table: CompressedTable,
        cache: SlabCache | None = None,
        device: torch.device | str | None = None,
        *,
        notes: Iterable[str] = (),
    ) -> None:
        if not isinstance(table, CompressedTable):
            raise ArgumentTypeError(
                f"table: expected a CompressedTable, got {type(table).__name__}"
            )
        if cache is not None and cache.table is not table:
            raise ArgumentError("cache: is over another table")
        if device is None:
            device = cache.devices[0] if cache is not None else "cpu"
        self.table = table
        self.cache = cache
        self.device = checked_device(device)
        self._notes = list(notes)
        self._whole: ReadOnlyTensor | None = None
        self._whole_version = 0
        self._tensor: weakref.ref[torch.Tensor] | None = None
        self._leaf: torch.Tensor | None = None
        self.after_fork()
        call_after_fork(self)

    def after_fork(self) -> None:
        """Reset the lock, which belongs to one process."""
        self._lock = threading.RLock()

    @classmethod
    def from_tensor(
        cls,
        t: torch.Tensor,
        *,
        codec: str | RowCodec = "auto",
        layout: Layout = "compact",
        device: torch.device | str | None = None,
        cache_bytes: int = 0,
        cache_ratio: float = 0.0,
        cache_codec: str | RowCodec | None = None,
        hot_ids: HotIds | None = None,
        group: Any = None,
        progress: ProgressFunction | bool | None = None,
        **options: Any,
    ) -> CompressedFeature:
        """Pack a tensor of features.

        Parameters
        ----------
        t : torch.Tensor
            ``[N, *row_shape]`` of any dtype and strides, on a CPU or GPU, without gradient.
        codec, layout, progress, **options
            As in `CompressedTable.from_tensor`. ``"raw"`` keeps the rows as they are.
        device : torch.device or str, optional
            Device of the cache, and where rows mostly go. When left out: the current GPU, or the
            CPU where there is none.
        cache_bytes : int
            Bytes of a cache of hot rows in the memory of `device`; 0 for none.
        cache_ratio : float
            The same as a share of the bytes of `t`, 0 to 1; not together with `cache_bytes`. For a
            share below one row no cache is made, and ``notes`` in `stats` says so.
        cache_codec : str or RowCodec, optional
            With ``codec="raw"``: what packs the rows in the cache, so that only those are packed
            (IBP(C) of IBP, section 6.2).
        hot_ids : torch.Tensor or function, optional
            Ids by hotness, the hottest first (see `bitslab.hotness`), or a function that returns
            them, called only for a cache. The order of the rows when left out.
        group : torch.distributed.ProcessGroup, optional
            Ranks that all make this feature: those on one machine share one copy of the table in
            host memory, and one cache with a slab of the bytes above on the GPU of each; see
            `bitslab.tables.ranks`.

        Raises
        ------
        ArgumentTypeError, ArgumentError
            When an argument is not accepted, or `t` requires a gradient.
        """
        check_tensor_argument("t", t)
        if t.requires_grad:
            raise ArgumentError(
                "t: requires a gradient, which packed rows cannot take; detach() it first"
            )
        target = device_or_default(device)
        capacity_bytes = _capacity(t, cache_bytes, cache_ratio)

        def build() -> CompressedTable:
            return CompressedTable.from_tensor(t, layout, codec, progress=progress, **options)

        if group is None:
            table = build()
        else:
            from .ranks import share_table

            table = share_table(build, group)
        cache, note = None, ""
        if cache_ratio and capacity_bytes < least_capacity_bytes(table):
            note = f"no cache: {cache_ratio} of {t.nbytes} bytes hold no row"
        elif capacity_bytes:

            def fill(devices: list[torch.device]) -> SlabCache:
                order = hot_ids() if callable(hot_ids) else hot_ids
                made = SlabCache(table, capacity_bytes, devices, codec=cache_codec)
                made.fill(torch.arange(len(table)) if order is None else order)
                return made

            if group is None:
                cache = fill([target])
                together = cache_ratio and table.rows_per_packed_row > 1
                if together and not cache.stats()["cached_rows"]:
                    cache.close()
                    cache = None
                    note = f"no cache: {cache_ratio} of {t.nbytes} bytes hold no packed row"
            else:
                from .ranks import share_cache

                cache = share_cache(table, fill, group, target)
        return cls(table, cache, target, notes=[note] if note else ())

    # Properties

    @property
    def shape(self) -> torch.Size:
        """``[N, *row_shape]``."""
        return self.table.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return self.table.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the packed rows take."""
        return self.table.nbytes

    @property
    def ratio(self) -> float:
        """Bytes of the rows over `nbytes`."""
        return self.table.ratio

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.table)

    def __repr__(self) -> str:
        """Return table and cache as text."""
        cache = "" if self.cache is None else f", {self.cache!r}"
        return f"CompressedFeature({self.table!r}{cache})"

    # Rows

    def gather(
        self,
        ids: torch.Tensor,
        out: torch.Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """Return rows chosen by id, decoded, through the cache if it serves the target device.

        Parameters
        ----------
        ids, out, device
            As in `CompressedTable.gather`, which also lists the errors.

        Returns
        -------
        torch.Tensor
            ``[n, *row_shape]``.
        """
        cache = self._cache_for(checked_target(ids, out, device))
        if cache is not None:
            return cache.gather(ids, out, device)
        return self.table.gather(ids, out, device)

    def fetch(
        self,
        ids: torch.Tensor,
        device: torch.device | str | None = None,
        *,
        pin_memory: bool = False,
    ) -> RowsFuture:
        """Start to gather rows, and return at once, so that several features load together.

        Parameters
        ----------
        ids : torch.Tensor
            As in `CompressedTable.gather`. They must not change before `wait` returned.
        device : torch.device or str, optional
            Where the rows go; the device of `ids` when left out.
        pin_memory : bool
            Rows on the CPU: put them into page-locked memory, for a copy to a GPU.

        Raises
        ------
        IndexRangeError
            When an id on the CPU is out of range. `wait` raises all other errors.
        """
        target = checked_target(ids, None, device)
        if target.type != "cpu":
            return RowsFuture(self.gather(ids, None, target))
        if ids.device.type == "cpu":
            self.table.check_ids(ids)

        def rows() -> torch.Tensor:
            out = None
            if pin_memory and torch.cuda.is_available():
                shape = (ids.shape[0], *self.shape[1:])
                out = torch.empty(shape, dtype=self.dtype, pin_memory=True)
            return self.gather(ids, out, target)

        if ids.numel() * self.table.row_bytes < OVERLAP_BYTES:
            return RowsFuture(rows())
        return RowsFuture(fetchers.submit(rows))

    def read_by_products(
        self, device: torch.device
    ) -> contextlib.AbstractContextManager[PackedRows | torch.Tensor | None]:
        """Give the rows to typed products on a GPU; see `CompressedTable.read_by_products`."""
        return self.table.read_by_products(device, self._cache_for(device))

    def whole(self) -> ReadOnlyTensor:
        """Return all rows on the CPU, decoded once and kept; they must not be written to.

        It is the same object each time, so that ``requires_grad_`` lasts.

        For callers that read a whole feature, such as a layer over the full graph. ``notes`` in
        `stats` gives the bytes of the copy; so does a DecodedCopyWarning, once, where they are
        1 MiB or more. `forget_whole` frees the copy.

        Returns
        -------
        ReadOnlyTensor
            ``[N, *row_shape]``.
        """
        with self._lock:
            # Writes that torch cannot stop change the copy's version: decode again.
            if self._whole is None or version_of(self._whole) != self._whole_version:
                self._whole = read_only(self.table.decoded(0, len(self)))
                self._whole_version = version_of(self._whole)
                self._report_copy(self._whole.nbytes)
            return self._whole

    def _report_copy(self, copy_bytes: int) -> None:
        """Record once that a decoded copy is kept, and warn of one that is large."""
        note = (
            "materialised: something read the whole feature, which is kept decoded too: "
            f"{copy_bytes:,} bytes"
        )
        if note in self._notes:
            return
        self._notes.append(note)
        if copy_bytes >= WARN_BYTES:
            warnings.warn(
                f"bitslab: a compressed feature of {len(self):,} rows was read as a whole; the "
                f"decoded copy is kept and takes {copy_bytes:,} bytes on top of the packed ones. "
                "Rows chosen by id are decoded alone; where all are read all the time, a plain "
                "tensor takes less",
                DecodedCopyWarning,
                stacklevel=_levels_to_caller(),
            )

    @property
    def kept_whole(self) -> ReadOnlyTensor | None:
        """The copy that `whole` keeps; None before `whole` and after `forget_whole`."""
        return self._whole

    def forget_whole(self) -> None:
        """Free the decoded rows that `whole` keeps."""
        with self._lock:
            self._whole = None

    # The tensor that represents the feature

    def stand_in(self, make: Callable[[CompressedFeature], torch.Tensor]) -> torch.Tensor:
        """Return the tensor that represents this feature, the same object while it is in use.

        Parameters
        ----------
        make : function
            Called with this feature when there is no such tensor.

        Returns
        -------
        torch.Tensor
            What `make` returned. It may refer to this feature: the feature keeps only a weak
            reference to it, until `hold_leaf`.
        """
        with self._lock:
            t = None if self._tensor is None else self._tensor()
            if t is None:
                t = make(self)
                self._tensor = weakref.ref(t)
            return t

    def hold_leaf(self, t: torch.Tensor | None) -> None:
        """Keep the tensor that `stand_in` returned alive while it takes gradients; None: no longer.

        Otherwise its gradient would be lost when no other reference keeps it.
        """
        self._leaf = t

    @property
    def leaf(self) -> torch.Tensor | None:
        """The tensor that takes this feature's gradients, if one does."""
        return self._leaf

    def _cache_for(self, target: torch.device) -> SlabCache | None:
        """Return the cache if it serves gathers to a device."""
        cache = self.cache
        return cache if cache is not None and target in cache.devices else None

    # Statistics, copies

    def stats(self) -> dict[str, Any]:
        """Return sizes and counts; reading them waits for the GPUs.

        Returns
        -------
        dict
            All of `CompressedTable.stats`; ``cache`` (the dict of `SlabCache.stats`, or
            None), ``hit_rate`` (0 without a cache), ``materialised_bytes`` (of the copy that
            `whole` keeps) and ``notes`` (a list of remarks, such as why there is no cache).
        """
        stats = self.table.stats()
        cache = None if self.cache is None else self.cache.stats()
        notes = list(self._notes)
        if stats["codec"] == "raw" and cache is None:
            notes.append(
                "kept raw: packing would not make this feature smaller, or was not requested"
            )
        return stats | {
            "cache": cache,
            "hit_rate": 0.0 if cache is None else cache["hit_rate"],
            "materialised_bytes": 0 if self._whole is None else self._whole.nbytes,
            "notes": notes,
        }

    def __getstate__(self) -> dict[str, Any]:
        """Describe the feature for another process: its table, shared or copied, and no cache."""
        return {"table": self.table, "notes": list(self._notes)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["table"])  # type: ignore[misc]
        self._notes = state["notes"]

    def __copy__(self) -> CompressedFeature:
        """Return this feature, which is immutable."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedFeature:
        """Copy the table; the copy has no cache."""
        copied = CompressedFeature(copy.deepcopy(self.table, memo), None, self.device)
        memo[id(self)] = copied
        return copied


def _levels_to_caller() -> int:
    """Return the stacklevel of the first frame outside this package and torch, for a warning."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in (__name__.partition(".")[0], "torch"):
            break
        level, frame = level + 1, frame.f_back
    return level


def _capacity(t: torch.Tensor, cache_bytes: int, cache_ratio: float) -> int:
    """Return the bytes of the cache; 0 for none."""
    if not isinstance(cache_ratio, (int, float)) or not 0 <= cache_ratio <= 1:
        raise ArgumentError(f"cache_ratio: {cache_ratio!r:.60}, accepted are 0 to 1")
    if not isinstance(cache_bytes, int) or cache_bytes < 0:
        raise ArgumentError(f"cache_bytes: {cache_bytes!r:.60}, accepted are whole numbers from 0")
    if not cache_ratio:
        return cache_bytes
    if cache_bytes:
        raise ArgumentError("cache_bytes, cache_ratio: both given, accepted is one of them")
    return int(cache_ratio * t.numel() * t.element_size())
