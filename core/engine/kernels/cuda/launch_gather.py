"""What gathers from one table have in common, worked out once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
import torch

from ....errors import ArgumentError
from ..format import (
    BUCKET_ENTRIES,
    PAD_WORDS,
    CacheStorage,
    RowFormat,
    RowLayout,
    TableStorage,
    ceil_div,
    read_together,
)
from .launch_ids import ALL_GOOD, check_ids_count
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

#: What changes between gathers of a plan, as arguments of the kernel; see `_GatherPlan.launch`.
CHANGING = ("ids", "id_bytes", "order", "n", "out", "first_bad", "lowest", "counters")


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
    launch : Prepared
        Takes the address of the ids, bytes of an id, the addresses of the order, n, the address of
        the output, that of `first_bad`, `lowest`, and the address of the counters.
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
        lengths = table.lengths
        args: dict[str, Any] = {
            "words": self.words,
            "n_words": np.int64(table.words.shape[0] - PAD_WORDS),
            "bases": table.bases,
            "lengths": lengths,
            "length_bytes": np.int32(0 if lengths is None else lengths.element_size()),
            "flags": table.flags,
            "moved": table.moved,
            "overflow": table.overflow,
            "overflow_rows": np.int64(_overflow_rows(table, f)),
            "typical_words": np.int32(typical_words),
            "entries": None if cache is None else cache.entries,
            "bucket_mask": np.uint32(
                0 if cache is None else cache.entries.shape[0] // BUCKET_ENTRIES - 1
            ),
            "slabs": None if cache is None else cache.addresses,
            "ids": None,
            "id_bytes": np.int32(0),
            "order": None,
            "n": np.int64(0),
            "row_clusters": table.row_clusters,
            **tile_arguments(layout, table.n_rows, shape),
            "longest_words": np.int32(max_words),
            "out": None,
            "first_bad": None,
            "lowest": np.int64(0),
            "counters": None,
            "mailbox": runner.mailbox,
            "items_per_row": np.int32(each),
            "item_bytes": np.int32(f.row_bytes if each == 1 else item_bytes),
            "n_items": np.int64(table.n_items),
            "items_cached": np.int32(cache is not None and cache.holds_items),
        }
        names = list(args)
        self.launch = runner.prepare(
            variant,
            _gather_kernel(variant, f, shape),
            THREADS,
            list(args.values()),
            [names.index(name) for name in CHANGING],
            self.grid.shared_bytes,
        )

    def serves(self, layout: RowLayout, cache: CacheStorage | None, address: int) -> bool:
        """Return whether a gather to an address can go by this."""
        kept = None if self._cache is None else self._cache()
        if (kept is None) != (self._cache is None):
            return False
        return layout is self._layout and cache is kept and address % 16 == self._start


def prepare_gather(
    runner: Runner,
    table: TableStorage,
    layout: RowLayout,
    ids: torch.Tensor,
    out: torch.Tensor,
    sm_budget: int | None,
) -> Callable[[], None]:
    """Return what decodes chosen rows, as they are then, on torch's current stream.

    Parameters
    ----------
    runner : Runner
        Of the device.
    table, layout, out, sm_budget
        As for `CudaKernels.gather_rows`.
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
    plan = GatherPlan(runner, table, layout, None, out.data_ptr(), out.nbytes // n)
    if not plan.aligned:
        raise ArgumentError(f"out: starts at no multiple of {layout.format.chunk_bytes} bytes")
    if plan.words is not table.words:
        raise ArgumentError(f"table: words start at no multiple of {WORDS_ALIGN_BYTES} bytes")
    return _PreparedGather(plan, ids, out, sm_budget)


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


def _gather_kernel(variant: Variant, f: RowFormat, shape: TileShape) -> str:
    if not shape.stage_words:
        return "gather_long_rows"
    short = variant.vector >= MIN_SHORT_VECTOR and f.row_bytes <= SHORT_ROW_BYTES
    return "gather_short_rows" if short and shape.tile_rows > WARPS else "gather_rows"


def _overflow_rows(table: TableStorage, f: RowFormat) -> int:
    return 0 if table.overflow is None else (table.overflow.shape[0] - PAD_WORDS) // f.row_words
