"""Items that share packed rows, and raw rows that begin at any byte: the kernel and its twin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cuda.runner import INDEX_ERROR, NO_ERROR
from bitslab.engine.kernels.cuda.source import Variant
from bitslab.engine.kernels.cuda.tiles import STAGE_BYTES
from bitslab.engine.kernels.format import MAX_SLABS, NO_ROW
from tests.engine.kernels.cases import cache_of, make_case, raw_cache_of, table_of
from tests.simt.module import guarded
from tests.simt.runner import simt_kernels
from tests.simt.test_gather import guarded_cache, guarded_table

#: Variants with rows of so many bytes and items each. The kernel takes one chunk a lane for all.
SHARED = {
    "bytes": (Variant("gather", 1, 1, True, True), 240, 80),
    "halves": (Variant("gather", 2, 3, False, True), 256, 16),
    "words": (Variant("gather", 4, 3, False, True), 252, 4),
    "long-chunks": (Variant("gather", 8, 3, False, True), 240, 48),
    "positional": (Variant("gather", 4, 2, True, False), 256, 32),
}


def items_table(case, kind, each, filler=3, seed=0):
    table = table_of(case, kind, seed)
    items = case.rows.view(-1, case.rows.shape[1] // each)
    return replace(table, items_per_row=each, filler_items=filler), items[: len(items) - filler]


def gather_both(table, layout, ids, item_bytes, *, cache=None, order=None, same_words=True):
    """Gather with the kernel and its twin; return the items and the rows counted by source."""
    kernels, runner = simt_kernels(1)
    counts = torch.zeros(2, 2 * (MAX_SLABS + 1), dtype=torch.int64)
    twin = torch.empty(len(ids), item_bytes, dtype=torch.uint8)
    assert cpu.gather_rows(table, layout, ids, twin, cache=cache, counters=counts[0]) == -1
    # One byte behind an aligned address: items are stored wherever they belong.
    out = guarded(torch.full((len(ids) * item_bytes + 1,), 0xA5, dtype=torch.uint8))
    out = out[1:].view(len(ids), item_bytes)
    kernels.gather_rows(
        guarded_table(table),
        layout,
        ids,
        out,
        cache=None if cache is None else guarded_cache(cache),
        counters=counts[1],
        order=order,
    )
    assert runner.mailbox[0] == NO_ERROR
    assert torch.equal(out, twin)
    if cache is not None:
        by_source = counts.view(2, 2, -1)
        assert torch.equal(by_source[0, 0], by_source[1, 0])
        if same_words:
            assert torch.equal(by_source[0, 1], by_source[1, 1])
    return twin, counts[1].view(2, -1)[0]


@pytest.mark.pairwise
@pytest.mark.parametrize("cached", ["table", "rows-cached", "items-cached"])
@pytest.mark.parametrize("kind", ["compact", "compact-moved", "inplace"])
@pytest.mark.parametrize("shared", SHARED)
def test_items_are_taken_out_of_the_rows_that_they_share(shared, kind, cached):
    variant, row_bytes, each = SHARED[shared]
    clusters = 3 if shared == "positional" else 1
    case = make_case(variant, clusters=clusters, n_rows=45, row_bytes=row_bytes)
    table, items = items_table(case, kind, each)
    rng = np.random.default_rng(1)
    ids = torch.from_numpy(rng.integers(-len(items), len(items), 77))
    # The twin reads a row once for items that follow one another, the kernel for each.
    ids = torch.cat(
        [ids[:1], ids[1:][ids[1:] % len(items) // each != ids[:-1] % len(items) // each]]
    )
    order = torch.from_numpy(rng.permutation(len(ids)).astype(np.int32))
    cache, hits = None, torch.zeros(len(ids), dtype=torch.bool)
    if cached == "rows-cached":
        cache = cache_of(case, replace(table, items_per_row=1), torch.arange(0, 45, 2), slabs=3)
        hits = ids % len(items) // each % 2 == 0
    elif cached == "items-cached":
        held = torch.arange(0, len(items), 3)
        cache = raw_cache_of(items, held, 1, holds_items=True)
        hits = ids % len(items) % 3 == 0
    found, rows = gather_both(
        table,
        case.layout,
        ids,
        items.shape[1],
        cache=cache,
        order=order,
        # Nor does the twin of what the cache holds in between.
        same_words=kind == "compact" and cached != "items-cached",
    )
    assert torch.equal(found, items[ids])
    assert int(rows[:MAX_SLABS].sum()) == int(hits.sum())
    assert int(rows.sum()) == len(ids)


@pytest.mark.parametrize("cached", [False, True], ids=["table", "cache"])
@pytest.mark.parametrize("row_bytes", [1, 2, 3, 5, 6, 63, 101, 1433, STAGE_BYTES + 3])
def test_raw_rows_begin_at_any_byte_and_reads_remain_within_the_table(row_bytes, cached):
    width = 2 if row_bytes % 2 == 0 else 1
    n_rows = 12 if row_bytes > 1000 else 45
    case = make_case(Variant("gather", width, 1, False, True), n_rows=n_rows, row_bytes=row_bytes)
    table = table_of(case, "raw")
    cache = raw_cache_of(case.rows, torch.arange(0, n_rows, 2), 2) if cached else None
    ids = torch.from_numpy(np.random.default_rng(0).integers(-n_rows, n_rows, 41))
    found, _ = gather_both(table, case.layout, ids, row_bytes, cache=cache)
    assert torch.equal(found, case.rows[ids])


@pytest.mark.parametrize("lowest", [None, 0], ids=["found-before", "looked-for"])
def test_a_bad_item_leaves_the_output_untouched_and_is_named(lowest):
    variant, row_bytes, each = SHARED["halves"]
    case = make_case(variant, n_rows=20, row_bytes=row_bytes)
    table, items = items_table(case, "compact", each)
    kernels, runner = simt_kernels()
    ids = torch.tensor([0, 5, len(items), 1])
    first_bad = None
    if lowest is None:
        first_bad = torch.empty(1, dtype=torch.int64)
        kernels.ids.check(ids, table.n_items, first_bad)
    out = torch.full((4, items.shape[1]), 7, dtype=torch.uint8)
    kernels.gather_rows(table, case.layout, ids, out, first_bad=first_bad, lowest=lowest or 0)
    assert (out == 7).all()
    assert runner.mailbox.tolist() == [INDEX_ERROR, 2, len(items), len(items)]


@pytest.mark.parametrize("kind", ["compact", "compact-moved", "inplace"])
def test_items_of_no_id_are_left_as_they_are(kind):
    variant, row_bytes, each = SHARED["halves"]
    case = make_case(variant, n_rows=20, row_bytes=row_bytes)
    table, items = items_table(case, kind, each)
    ids = torch.arange(100)
    ids[::3] = NO_ROW
    kernels, runner = simt_kernels(1)
    out = guarded(torch.full((100, items.shape[1]), 7, dtype=torch.uint8))
    kernels.gather_rows(guarded_table(table), case.layout, ids, out)
    wanted = torch.where((ids != NO_ROW)[:, None], items[ids.clamp(0)], 7)
    assert torch.equal(out, wanted) and runner.mailbox[0] == NO_ERROR
