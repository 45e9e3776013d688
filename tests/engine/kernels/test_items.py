"""Items that share packed rows, decoded without the rest of these, as the whole rows decode."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cpu.items import without_items
from bitslab.engine.kernels.cuda.source import Variant
from bitslab.engine.kernels.format import MAX_SLABS
from tests.engine.kernels.cases import cache_of, make_case, table_of

#: Bytes of a chunk, bits of a code, grouped, uniform; the mask; bytes of a row and its items.
SHARED = {
    "bytes-grouped": (Variant("gather", 1, 1, True, True), None, 240, 80),
    "halves-of-bytes": (Variant("gather", 2, 3, False, True), 0x7F80, 256, 16),
    "halves": (Variant("gather", 2, 2, False, True), 0x7C00, 240, 24),
    "words-in-part": (Variant("gather", 4, 3, False, True), 0x7C007C00, 240, 40),
    "words-of-bytes": (Variant("gather", 4, 3, False, True), 0x7F800000, 256, 4),
    "words-and-bits": (Variant("gather", 4, 1, False, True), None, 252, 63),
    "long-chunks": (Variant("gather", 8, 3, False, True), ~0x3F & (2**64 - 1), 256, 32),
    "long-grouped": (Variant("gather", 8, 2, True, True), None, 2048, 64),
    "positional": (Variant("gather", 4, 2, True, False), None, 256, 32),
    "positional-in-part": (Variant("gather", 8, 3, False, False), None, 240, 12),
}
N_ROWS = 41


def made(shared, kind, seed=0, clusters=1):
    variant, mask, row_bytes, each = SHARED[shared]
    case = make_case(
        variant, clusters=clusters, n_rows=N_ROWS, row_bytes=row_bytes, mask=mask, seed=seed
    )
    return case, replace(table_of(case, kind, seed), items_per_row=each, filler_items=each // 2)


def gathered(table, layout, ids, **more):
    out = torch.full((len(ids), layout.format.row_bytes // table.items_per_row), 0xA5).byte()
    bad = cpu.gather_rows(table, layout, ids, out, **more)
    return bad, out


def through_whole_rows(table, layout, ids):
    each = table.items_per_row
    rows = torch.empty(len(ids), layout.format.row_bytes, dtype=torch.uint8)
    wanted = ids % table.n_items
    bad = cpu.gather_rows(without_items(table), layout, wanted // each, rows)
    items = rows.view(len(ids), each, -1)
    return bad * each if bad >= 0 else -1, items[torch.arange(len(ids)), wanted % each]


def some_ids(n_items, rng):
    """Return ids at random, in order, backwards and more than once."""
    first = int(rng.integers(0, n_items))
    run = torch.arange(first, first + 150) % n_items
    drawn = torch.from_numpy(rng.integers(-n_items, n_items, 70))
    return torch.cat([drawn, run, drawn[:5], run.flip(0)[:9], run[:1], run[:1], drawn[:3]])


@pytest.mark.parametrize("clusters", [1, 3])
@pytest.mark.parametrize("kind", ["compact", "compact-moved", "inplace"])
@pytest.mark.parametrize("shared", SHARED)
def test_items_are_what_whole_rows_decode_to(shared, kind, clusters):
    case, table = made(shared, kind, clusters=clusters)
    layout, each = case.layout, table.items_per_row
    items = case.rows.view(N_ROWS * each, -1)[: table.n_items]
    ids = some_ids(table.n_items, np.random.default_rng(0))
    counts = torch.zeros(2 * (MAX_SLABS + 1), dtype=torch.int64)
    for wanted in (ids, ids.to(torch.int32), ids[:1], ids[:0]):
        bad, found = gathered(table, layout, wanted, counters=counts)
        assert bad == -1 and torch.equal(found, items[wanted.long()])
    assert int(counts[MAX_SLABS]) == 2 * len(ids) + 1
    cache = cache_of(case, replace(table, items_per_row=1), torch.arange(0, N_ROWS, 3), slabs=2)
    bad, found = gathered(table, layout, ids, cache=cache)
    assert bad == -1 and torch.equal(found, items[ids])


@pytest.mark.drawn(5)
@pytest.mark.parametrize("shared", SHARED)
@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1))
def test_damaged_rows_are_refused_as_whole_ones_are(shared, seed):
    """Any word, length, base or cluster of a table may be wrong."""
    rng = np.random.default_rng(seed)
    kind = ["compact", "compact-moved", "inplace"][seed % 3]
    case, table = made(shared, kind, seed % 5, clusters=1 + seed % 2)
    parts = {}
    for name in ("words", "lengths", "bases", "row_clusters", "flags"):
        part = getattr(table, name)
        if part is not None and rng.random() < 0.6:
            data = part.clone()
            memory = data.numpy().view(np.uint8)
            for at in rng.integers(0, len(memory), 4):
                memory[at] ^= 1 << int(rng.integers(0, 8))
            parts[name] = data
    damaged = replace(table, **parts)
    for item in some_ids(table.n_items, rng)[:60].split(1):
        expected, decoded = through_whole_rows(damaged, case.layout, item)
        bad, found = gathered(damaged, case.layout, item)
        assert bad == expected
        assert bad >= 0 or torch.equal(found, decoded)
    ids = some_ids(table.n_items, rng)
    bad, found = gathered(damaged, case.layout, ids)
    expected, decoded = through_whole_rows(damaged, case.layout, ids)
    assert (bad >= 0) == (expected >= 0)
    assert bad >= 0 or torch.equal(found, decoded)
