"""Decoding rows chosen by id on a GPU; what gathers from one table have in common is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch

from ....errors import ArgumentError
from ..format import (
    CacheStorage,
    RowFormat,
    RowLayout,
    TableStorage,
    ceil_div,
    read_together,
)
from . import chosen_rows
from .chosen_rows import ChosenRows
from .ids import ALL_GOOD, check_ids_count
from .parameters import Address, Int32, Int64
from .runner import Runner, do_nothing
from .source import MIN_SHORT_VECTOR, Variant
from .tiles import (
    SHORT_ROW_BYTES,
    THREADS,
    WARPS,
    WORDS_ALIGN_BYTES,
    Grid,
    TileShape,
    aligned_to,
    chosen_shape,
    decode_variant,
    tile_arguments,
)


@dataclass(init=False)
class GatherRows(ChosenRows):
    """Parameters of `gather_rows`.

    Those of `ChosenRows`, and the tensors of a `RowLayout`, any of which may be None; int32 or
    int64 ids; an order of unsigned int32, int64 `first_bad` and `counters`, or None.
    `longest_words` is the longest packed row of table and cache.
    """

    kernel = "gather_rows"

    ids: Address
    id_bytes: Int32
    order: Address
    n: Int64
    row_clusters: Address
    tables: Address
    starts: Address
    n_rows: Int64
    chunks: Int32
    row_words: Int32
    row_bytes: Int32
    clusters: Int32
    tile_rows: Int32
    stride_words: Int32
    stage_words: Int32
    longest_words: Int32
    out: Address
    first_bad: Address
    lowest: Int64
    counters: Address
    mailbox: Address
    items_per_row: Int32
    item_bytes: Int32
    n_items: Int64
    items_cached: Int32


@dataclass(init=False)
class GatherLongRows(GatherRows):
    """Parameters of `gather_long_rows`, whose rows fit no stage."""

    kernel = "gather_long_rows"


@dataclass(init=False)
class GatherShortRows(GatherRows):
    """Parameters of `gather_short_rows`, where eight lanes take a row."""

    kernel = "gather_short_rows"


class GatherKernels:
    """The kernels of gather.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        # The last one of each table: most gathers of a table are alike.
        self._plans: WeakKeyDictionary[TableStorage, GatherPlan] = WeakKeyDictionary()

    def gather_rows(
        self,
        table: TableStorage,
        layout: RowLayout,
        ids: torch.Tensor,
        out: torch.Tensor,
        *,
        cache: CacheStorage | None = None,
        counters: torch.Tensor | None = None,
        first_bad: torch.Tensor | None = None,
        lowest: int = ALL_GOOD,
        order: torch.Tensor | None = None,
        sm_budget: int | None = None,
    ) -> int:
        """Decode rows chosen by id without waiting for the GPU; see `kernels.cpu.gather_rows`.

        Parameters
        ----------
        table, layout, ids, out, cache, counters
            As on the CPU. The table's words and overflow may lie in page-locked host memory, the
            slabs on other GPUs that this one may read. `out` may be of another dtype, if its rows
            have as many bytes.
        first_bad : torch.Tensor, optional
            int64 ``[1]``, what `IdKernels.check` or `IdKernels.order` found; when it found a bad
            id, `out` is left untouched and the mailbox has the error.
        lowest : int
            Without `first_bad`: the lowest good id, 0 or ``-N``. Every block then looks at all ids,
            which for up to CHECKED_BY_ALL takes less than a launch for that. ALL_GOOD where they
            are known to be good.
        order : torch.Tensor, optional
            int32 ``[n]``, read as unsigned: the sequence in which the rows are fetched.
        sm_budget : int, optional
            Multiprocessors that the kernel may use; all when left out.

        Returns
        -------
        int
            -1. Damaged rows are reported in the mailbox.
        """
        n = out.shape[0]
        if n == 0:
            return -1
        check_ids_count(n)
        plan = self._plans.get(table)
        address = out.data_ptr()
        if plan is None or not plan.serves(layout, cache, address):
            plan = GatherPlan(self._runner, table, layout, cache, address, out.nbytes // n)
            if plan.words is table.words:
                self._plans[table] = plan
        if not plan.aligned:
            # The kernel stores whole chunks. A copy first, since bad ids leave `out` untouched.
            aligned = out.clone()
            self.gather_rows(
                table,
                layout,
                ids,
                aligned,
                cache=cache,
                counters=counters,
                first_bad=first_bad,
                lowest=lowest,
                order=order,
                sm_budget=sm_budget,
            )
            out.copy_(aligned)
            return -1
        plan.launch(
            min(ceil_div(n, plan.tile_rows), plan.grid.blocks(sm_budget)),
            ids.data_ptr(),
            ids.element_size(),
            0 if order is None else order.data_ptr(),
            n,
            address,
            0 if first_bad is None else first_bad.data_ptr(),
            lowest,
            0 if counters is None else counters.data_ptr(),
        )
        return -1

    def prepare_gather(
        self,
        table: TableStorage,
        layout: RowLayout,
        ids: torch.Tensor,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> Callable[[], None]:
        """Return what decodes chosen rows, as they are then, on torch's current stream.

        Parameters
        ----------
        table, layout, out, sm_budget
            As for `gather_rows`.
        ids : torch.Tensor
            int32 or int64 ``[n]``; they must be good.

        Raises
        ------
        ArgumentError
            When `out` or the words lie where the kernel cannot store or load: a copy made now would
            hold what the words are now; or there are too many ids.
        """
        n = out.shape[0]
        if n == 0:
            return do_nothing
        check_ids_count(n)
        plan = GatherPlan(self._runner, table, layout, None, out.data_ptr(), out.nbytes // n)
        if not plan.aligned:
            raise ArgumentError(f"out: starts at no multiple of {layout.format.chunk_bytes} bytes")
        if plan.words is not table.words:
            raise ArgumentError(f"table: words start at no multiple of {WORDS_ALIGN_BYTES} bytes")
        return _PreparedGather(plan, ids, out, sm_budget)


class GatherPlan:
    """What gathers from one table have in common, worked out once.

    Parameters
    ----------
    runner : Runner
        Of the device.
    table : TableStorage
        The table.
    layout : RowLayout
        How its rows are packed.
    cache : CacheStorage or None
        Cached rows.
    address : int
        Of the first output.
    item_bytes : int
        Of a row of the output.

    Attributes
    ----------
    aligned : bool
        Whether the kernel can store chunks there; there is no `launch` otherwise.
    words : torch.Tensor
        The table's words, or an aligned copy, which holds for one gather only.
    tile_rows : int
        Rows of a tile.
    grid : Grid
        Blocks.
    launch : Launch
        Takes `ids`, `id_bytes`, `order`, `n`, `out`, `first_bad`, `lowest` and `counters` of
        `GatherRows`.
    """

    def __init__(
        self,
        runner: Runner,
        table: TableStorage,
        layout: RowLayout,
        cache: CacheStorage | None,
        address: int,
        item_bytes: int,
    ) -> None:
        self._layout = layout
        # Weakly, so that the slabs of a cache that was deleted are freed.
        self._cache = None if cache is None else ref(cache)
        self._start = address % 16
        self.words = table.words
        table = read_together(table, cache)
        f = layout.format
        each = table.items_per_row
        self.aligned = each > 1 or address % f.chunk_bytes == 0
        if not self.aligned:
            return
        max_words = max(table.max_words, 0 if cache is None else cache.max_words)
        shape = chosen_shape(max_words)
        self.tile_rows = shape.tile_rows
        # Warps that share a row do not wait for each other to fetch more of it.
        typical_words = table.typical_words
        if shape.tile_rows < WARPS:
            typical_words = table.max_packed_words or table.max_words
        # The decoder of one chunk a lane takes items out of the rows that they share.
        variant = decode_variant("gather", layout, address if each == 1 else 1)
        self.grid = Grid(runner, variant, shape)
        self.words = aligned_to(table.words, WORDS_ALIGN_BYTES)
        self.launch = runner.bind(
            variant,
            _gather_kernel(variant, f, shape),
            THREADS,
            self.grid.shared_bytes,
            **chosen_rows.values_of(table, cache, f, self.words, typical_words),
            row_clusters=table.row_clusters,
            **tile_arguments(layout, table.n_rows, shape),
            longest_words=max_words,
            mailbox=runner.mailbox,
            items_per_row=each,
            item_bytes=f.row_bytes if each == 1 else item_bytes,
            n_items=table.n_items,
            items_cached=cache is not None and cache.holds_items,
        )

    def serves(self, layout: RowLayout, cache: CacheStorage | None, address: int) -> bool:
        """Return whether a gather to an address can go by this."""
        kept = None if self._cache is None else self._cache()
        if (kept is None) != (self._cache is None):
            return False
        return layout is self._layout and cache is kept and address % 16 == self._start


class _PreparedGather:
    """A gather of which all is known."""

    __slots__ = ("_launch", "_owners", "_values")

    def __init__(
        self, plan: GatherPlan, ids: torch.Tensor, out: torch.Tensor, sm_budget: int | None
    ) -> None:
        n = out.shape[0]
        blocks = min(ceil_div(n, plan.tile_rows), plan.grid.blocks(sm_budget))
        self._launch = plan.launch
        self._values = (
            blocks,
            ids.data_ptr(),
            ids.element_size(),
            0,
            n,
            out.data_ptr(),
            0,
            ALL_GOOD,
            0,
        )
        self._owners = ids, out  # of the memory that the addresses point to

    def __call__(self) -> None:
        self._launch(*self._values)


def _gather_kernel(variant: Variant, f: RowFormat, shape: TileShape) -> type[GatherRows]:
    if not shape.stage_words:
        return GatherLongRows
    short = variant.vector >= MIN_SHORT_VECTOR and f.row_bytes <= SHORT_ROW_BYTES
    return GatherShortRows if short and shape.tile_rows > WARPS else GatherRows
