"""Typed products, run on the CPU: those of the definition, and of packed rows those of raw ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bitslab.engine.kernels.cpu import typed_products
from bitslab.engine.kernels.cuda.runner import DAMAGED_ERROR, NO_ERROR
from bitslab.engine.kernels.cuda.source import Variant
from bitslab.engine.kernels.cuda.typed_gemm import TypedGemmKernels, TypedTiles
from bitslab.engine.kernels.format import MAX_SLABS
from bitslab.engine.kernels.typed_products import (
    GRADIENT_DEPTH,
    SCHEDULES,
    TILE_COLUMNS,
    PackedRows,
    schedules_of,
)
from tests.engine.kernels.cases import cache_of, make_case, table_of
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner
from tests.simt.test_gather import guarded_cache, guarded_table

DTYPES = {2: (torch.float16, torch.bfloat16), 4: (torch.float32,)}
#: Rows of each type: none, fewer than a tile, one tile, more than one.
BOUNDS = [0, 0, 5, 37, 37, 80]


def close(found, expected, dtype):
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    scale = float(expected.abs().max()) or 1.0
    assert float((found.double() - expected.double()).abs().max()) <= tolerance * scale


def values(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference(x, weight, bounds, n_out, **options):
    out = torch.zeros(n_out, weight.shape[2], dtype=torch.float64)
    options = {k: v if v.dtype is torch.int64 else v.double() for k, v in options.items()}
    typed_products.multiply_rows(x.double(), weight.double(), bounds, out, **options)
    return out


def gradient_reference(x, g, bounds, index=None):
    out = torch.zeros(len(bounds) - 1, x.shape[1], g.shape[1], dtype=torch.float64)
    typed_products.multiply_gradient(x.double(), g.double(), bounds, out, index=index)
    return out


@pytest.mark.parametrize(
    ("depth", "width", "dtype"),
    [
        (48, 70, torch.float32),
        (7, 3, torch.float32),
        (80, 64, torch.float16),
        (9, 5, torch.bfloat16),
        (300, 8, torch.bfloat16),
    ],
    ids=["vectors", "odd", "halves", "odd-bfloats", "deep"],
)
def test_raw_rows(depth, width, dtype):
    runner = SimtRunner(seed=depth)
    kernels = TypedGemmKernels(runner)
    x = guarded(values(20, depth, dtype=dtype))
    n = BOUNDS[-1]
    index = torch.randint(20, (n,), generator=torch.Generator().manual_seed(1))
    weight = guarded(values(len(BOUNDS) - 1, depth, width, dtype=dtype, seed=2))
    scatter = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    scale = guarded(values(n, dtype=dtype, seed=4))
    g = guarded(values(n, width, dtype=dtype, seed=5))
    tiles = TypedTiles(BOUNDS, torch.device("cpu"))
    assert kernels.takes(x, depth)
    bias = guarded(values(len(BOUNDS) - 1, width, dtype=dtype, seed=6))
    options = {"index": index, "bias": bias, "scatter": scatter, "scale": scale}
    for given in ({"index": index}, {"index": index, "bias": bias}, options):
        out = guarded(torch.zeros(n, width, dtype=dtype))
        kernels.product(x, weight, tiles, out, **given)
        close(out, reference(x, weight, BOUNDS, n, **given), dtype)
    found = kernels.gradient(x, g, tiles, depth, index=index)
    assert found.dtype is dtype and not found[0].any() and not found[3].any()
    close(found, gradient_reference(x, g, BOUNDS, index), dtype)


@pytest.mark.parametrize("schedule", range(len(SCHEDULES)))
@pytest.mark.parametrize(("depth", "width"), [(48, 70), (9, 5)], ids=["wide", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_of_types_are_added_before_products_are_rounded(dtype, depth, width, schedule):
    """Of integers, which float32 sums in any order without error: each bit is the twin's."""
    runner = SimtRunner(seed=depth)
    draw = torch.Generator().manual_seed(depth)
    x, weight, bias = (
        torch.randint(-high, high + 1, shape, generator=draw).to(dtype)
        for high, shape in ((15, (20, depth)), (15, (5, depth, width)), (200, (5, width)))
    )
    n, tiles = BOUNDS[-1], TypedTiles(BOUNDS, torch.device("cpu"))
    index = torch.randint(20, (n,), generator=draw)
    plain = reference(x, weight, BOUNDS, n, index=index)
    exact = reference(x, weight, BOUNDS, n, index=index, bias=bias)
    kernels = TypedGemmKernels(runner)
    run = kernels.prepare_product(tiles, n, (depth,), width, dtype, index, schedule)
    for given, expected in ((None, plain), (bias, exact)):
        out = guarded(torch.zeros(n, width, dtype=dtype))
        guard = None if given is None else guarded(given)
        kernels.product(x, weight, tiles, out, index=index, bias=guard, schedule=schedule)
        assert torch.equal(out, expected.to(dtype))
        assert torch.equal(run(x, weight, guard), out)
    rounded_twice = plain.to(dtype) + bias.repeat_interleave(torch.tensor(BOUNDS).diff(), 0)
    assert dtype is not torch.bfloat16 or not torch.equal(rounded_twice, exact.to(dtype))


def test_rows_of_types_in_a_part_of_a_matrix_are_added():
    kernels, tiles = TypedGemmKernels(SimtRunner()), TypedTiles(BOUNDS, torch.device("cpu"))
    x, weight = values(80, 8, dtype=torch.float32), values(5, 8, 6, dtype=torch.float32, seed=1)
    whole, out = values(5, 3, 6, dtype=torch.float32, seed=2), torch.zeros(80, 6)
    kernels.product(x, weight, tiles, out, bias=whole[:, 1])
    close(out, reference(x, weight, BOUNDS, 80, bias=whole[:, 1]), torch.float32)


def test_rows_in_order_of_a_part_of_a_matrix():
    kernels = TypedGemmKernels(SimtRunner())
    whole, weight = values(80, 3, 24, dtype=torch.float32), values(5, 24, 6, dtype=torch.float32)
    out = torch.zeros(80, 3, 6)
    tiles = TypedTiles(BOUNDS, torch.device("cpu"))
    kernels.product(whole[:, 1], weight, tiles, out[:, 1])
    close(out[:, 1], reference(whole[:, 1], weight, BOUNDS, 80), torch.float32)
    assert not out[:, 0].any() and not out[:, 2].any()


def test_gradients_of_many_tiles_are_sums_of_chunks(monkeypatch):
    monkeypatch.setattr("bitslab.engine.kernels.cuda.typed_gemm.CHUNK_TILES", 2)
    bounds = [0, 170, 170, 200]
    x, g = values(200, 8, dtype=torch.float32), values(200, 4, dtype=torch.float32, seed=1)
    tiles = TypedTiles(bounds, torch.device("cpu"))
    chunks, starts = tiles.chunks()
    assert starts.tolist() == [0, 3, 4, 5]
    assert chunks.tolist() == [[0, 2], [2, 4], [4, 6], [6, 6], [6, 7]]
    found = TypedGemmKernels(SimtRunner()).gradient(x, g, tiles, 8)
    close(found, gradient_reference(x, g, bounds), torch.float32)


@pytest.mark.parametrize("bounds", [[0, 128, 128], [0, 70, 140, 140, 140], [0, 0, 90, 90]], ids=str)
@pytest.mark.parametrize("heads", [(), (3,)], ids=str)
def test_gradients_of_as_many_chunks_as_types_with_rows_are_sums(heads, bounds, monkeypatch):
    """Types without rows make up for the further chunks of long ones, in number alone."""
    monkeypatch.setattr("bitslab.engine.kernels.cuda.typed_gemm.CHUNK_TILES", 2)
    tiles, n = TypedTiles(bounds, torch.device("cpu")), bounds[-1]
    x, g = values(n, *heads, 8, dtype=torch.float32), values(n, *heads, 4, dtype=torch.float32)
    kernels = TypedGemmKernels(SimtRunner())
    found = kernels.prepare_gradient(tiles, (*heads, 8), 4, torch.float32, None)(x, g)
    assert found.is_contiguous()
    parts = [(x, g, found)] if not heads else [(x[:, h], g[:, h], found[:, h]) for h in range(3)]
    for rows, gradients, of_types in parts:
        close(of_types, gradient_reference(rows, gradients, bounds), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(), (1,), (3,)], ids=str)
@pytest.mark.parametrize("chunk_tiles", [1, 32])
def test_prepared_products_of_heads(heads, dtype, chunk_tiles, monkeypatch):
    monkeypatch.setattr("bitslab.engine.kernels.cuda.typed_gemm.CHUNK_TILES", chunk_tiles)
    runner = SimtRunner()
    kernels, tiles = TypedGemmKernels(runner), TypedTiles(BOUNDS, torch.device("cpu"))
    n, types = BOUNDS[-1], len(BOUNDS) - 1
    index = torch.randint(20, (n,), generator=torch.Generator().manual_seed(1))
    x = values(20, *heads, 24, dtype=dtype)
    weight = values(types, *heads, 24, 6, dtype=dtype, seed=1)
    bias = values(types, *heads, 6, dtype=dtype, seed=3)
    g = values(n, *heads, 6, dtype=dtype, seed=2)
    run = kernels.prepare_product(tiles, n, (*heads, 24), 6, dtype, index)
    gradient = kernels.prepare_gradient(tiles, (*heads, 24), 6, dtype, index)
    found = run(x, weight), gradient(x, g), run(x, weight, bias)
    assert [out.shape for out in found] == [g.shape, weight.shape, g.shape]
    assert all(out.dtype is dtype for out in found)
    for h in range(heads[0] if heads else 1):
        parts = [t[:, h] if heads else t for t in (x, weight, bias, g, *found)]
        of_x, of_weight, of_bias, of_g, product, total, added = parts
        close(product, reference(of_x, of_weight, BOUNDS, n, index=index), dtype)
        close(added, reference(of_x, of_weight, BOUNDS, n, index=index, bias=of_bias), dtype)
        close(total, gradient_reference(of_x, of_g, BOUNDS, index), dtype)


def test_gradients_of_types_of_one_chunk_each_are_not_summed(monkeypatch):
    monkeypatch.setattr(torch, "segment_reduce", None)
    x, g = values(80, 8, dtype=torch.float32), values(80, 4, dtype=torch.float32, seed=1)
    tiles = TypedTiles(BOUNDS, torch.device("cpu"))
    assert tiles.chunks()[0].tolist() == [[0, 0], [0, 1], [1, 2], [2, 2], [2, 4]]
    found = TypedGemmKernels(SimtRunner()).gradient(x, g, tiles, 8)
    close(found, gradient_reference(x, g, BOUNDS), torch.float32)


BYTES = Variant("typed_gemm", 4, 3, False, True, 4, True)
BFLOATS = Variant("typed_gemm", 2, 3, False, True, 8, True)
PACKED = [
    (BYTES, "compact", torch.float32, 256, False),
    (BYTES, "inplace", torch.float32, 1040, True),
    (BYTES, "raw", torch.float32, 272, True),
    (BFLOATS, "compact-moved", torch.bfloat16, 288, True),
    (BFLOATS, "inplace", torch.float16, 272, False),
]


def finite_rows(case, dtype):
    """Return the rows of a case with exponents of numbers that can be multiplied."""
    return torch.where(
        torch.isfinite(case.rows.view(dtype)) & (case.rows.view(dtype).abs() < 1e3),
        case.rows.view(dtype),
        torch.zeros((), dtype=dtype),
    )


@pytest.mark.parametrize(
    ("variant", "kind", "dtype", "row_bytes", "cached"),
    PACKED,
    ids=[f"{p[0].name}-{p[1]}" for p in PACKED],
)
def test_products_of_packed_rows_are_those_of_raw_rows_bit_for_bit(
    variant, kind, dtype, row_bytes, cached
):
    case = make_case(variant, n_rows=45, row_bytes=row_bytes, seed=2)
    case.rows = finite_rows(case, dtype).view(torch.uint8).reshape(case.rows.shape)
    table = table_of(case, kind)
    cache = cache_of(case, table, torch.arange(0, 45, 2), slabs=3) if cached else None
    counters = torch.zeros(2 * (MAX_SLABS + 1), dtype=torch.int64)
    packed = PackedRows(
        guarded_table(table),
        case.layout,
        dtype,
        None if cache is None else guarded_cache(cache),
        counters,
    )
    raw = case.rows.view(dtype)
    depth, n, width = raw.shape[1], BOUNDS[-1], 72 if kind == "raw" else 16
    index = torch.randint(45, (n,), generator=torch.Generator().manual_seed(1))
    weight = values(len(BOUNDS) - 1, depth, width, dtype=dtype, seed=2)
    bias = guarded(values(len(BOUNDS) - 1, width, dtype=dtype, seed=6))
    g = values(n, width, dtype=dtype, seed=5)
    tiles = TypedTiles(BOUNDS, torch.device("cpu"))
    runner = SimtRunner(seed=3)
    kernels = TypedGemmKernels(runner)
    assert kernels.takes(packed, depth) and kernels.takes(raw, depth)
    outs = []
    for source in (raw, packed):
        out = torch.zeros(n, width, dtype=dtype)
        kernels.product(source, weight, tiles, out, index=index, bias=bias)
        outs.append((out, kernels.gradient(source, g, tiles, depth, index=index)))
    counted = counters.clone()
    runner.multiprocessors = 1  # a block takes several tiles
    by_few = torch.zeros(n, width, dtype=dtype)
    kernels.product(packed, weight, tiles, by_few, index=index, bias=bias)
    assert runner.mailbox[0] == NO_ERROR
    assert torch.equal((counters - counted).view(2, -1).sum(1)[:1], torch.tensor([n]))
    counters = counted
    assert torch.equal(by_few.view(torch.uint8), outs[1][0].view(torch.uint8))
    for found, expected in zip(outs[1], outs[0], strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    close(outs[0][0], reference(raw, weight, BOUNDS, n, index=index, bias=bias), dtype)
    assert {v for v, _ in runner.launched} >= {variant}
    # The product reads each row once, the gradient once for each block of columns.
    times = 1 + -(-width // TILE_COLUMNS) * -(-depth // GRADIENT_DEPTH)
    assert int(counters[: MAX_SLABS + 1].sum()) == times * n
    hits = int((index % 2 == 0).sum()) if cached else 0
    assert int(counters[:MAX_SLABS].sum()) == times * hits


@pytest.mark.parametrize("number", range(1, len(SCHEDULES)))
@pytest.mark.parametrize(
    ("variant", "kind", "dtype", "row_bytes"),
    [
        (BYTES, "compact", torch.float32, 256),
        (BYTES, "inplace", torch.float32, 528),
        (BFLOATS, "compact-moved", torch.bfloat16, 288),
    ],
    ids=["short", "long", "bfloats"],
)
def test_schedules_change_no_bit(variant, kind, dtype, row_bytes, number):
    case = make_case(variant, n_rows=45, row_bytes=row_bytes, seed=2)
    case.rows = finite_rows(case, dtype).view(torch.uint8).reshape(case.rows.shape)
    packed = PackedRows(guarded_table(table_of(case, kind)), case.layout, dtype)
    raw = guarded(case.rows.view(dtype))
    bounds = [0, 0, 5, 37, 37, 140]
    depth, n = raw.shape[1], bounds[-1]
    index = torch.randint(45, (n,), generator=torch.Generator().manual_seed(1))
    weight = guarded(values(len(bounds) - 1, depth, 72, dtype=dtype, seed=2))
    bias = guarded(values(len(bounds) - 1, 72, dtype=dtype, seed=4))
    scatter = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    tiles = TypedTiles(bounds, torch.device("cpu"))
    runner = SimtRunner(seed=3)
    runner.multiprocessors = 1  # blocks take several tiles
    kernels = TypedGemmKernels(runner)
    usual = torch.zeros(n, 72, dtype=dtype)
    given = {"index": index, "bias": bias, "scatter": scatter}
    kernels.product(raw, weight, tiles, usual, **given)
    close(usual, reference(raw, weight, bounds, n, **given), dtype)
    for source in (raw, packed):
        taken = number in schedules_of(dtype.itemsize, source is packed)
        assert kernels.takes(source, depth, number) == taken
        if not taken:
            continue
        out = guarded(torch.zeros(n, 72, dtype=dtype))
        kernels.product(source, weight, tiles, out, **given, schedule=number)
        assert torch.equal(out.view(torch.uint8), usual.view(torch.uint8))
    run = kernels.prepare_product(tiles, n, (depth,), 72, dtype, index, number)
    assert torch.equal(
        run(raw, weight, bias)[scatter.argsort()].view(torch.uint8), usual.view(torch.uint8)
    )
    assert runner.mailbox[0] == NO_ERROR


def test_schedules_of_other_masks_are_the_usual_one():
    kernels = TypedGemmKernels(SimtRunner())
    case = make_case(Variant("typed_gemm", 2, 2, False, True, 8), n_rows=45, row_bytes=256)
    rows = PackedRows(table_of(case, "compact"), case.layout, torch.bfloat16)
    assert kernels.takes(rows, 128) and not kernels.takes(rows, 128, 1)


def test_damaged_rows_are_reported():
    case = make_case(BYTES, n_rows=45, row_bytes=256, seed=2)
    table = table_of(case, "compact")
    assert table.lengths is not None
    lengths = table.lengths.clone()
    lengths[lengths > 0] = 1
    runner = SimtRunner()
    damaged = PackedRows(replace(table, lengths=lengths), case.layout, torch.float32)
    weight, out = values(1, 64, 4, dtype=torch.float32), torch.zeros(45, 4)
    tiles = TypedTiles([0, 45], torch.device("cpu"))
    TypedGemmKernels(runner).product(damaged, weight, tiles, out)
    assert runner.mailbox[0] == DAMAGED_ERROR


def test_what_is_not_taken():
    kernels = TypedGemmKernels(SimtRunner())
    case = make_case(BYTES, n_rows=45, row_bytes=256)
    rows = PackedRows(table_of(case, "compact"), case.layout, torch.float32)
    assert kernels.takes(rows, 64)
    assert not kernels.takes(replace(rows, dtype=torch.bfloat16), 128)  # chunks of two elements
    assert not kernels.takes(replace(rows, table=replace(rows.table, items_per_row=2)), 64)
    assert not kernels.takes(replace(rows, table=replace(rows.table, max_words=2000)), 64)
    clusters = make_case(replace(BYTES, vector=1), clusters=3, n_rows=45)
    assert not kernels.takes(
        PackedRows(table_of(clusters, "compact"), clusters.layout, torch.float32), 64
    )
    assert not kernels.takes(torch.zeros(3, 64, dtype=torch.float64), 64)
    assert not kernels.takes(torch.zeros(3, 4096), 4096)  # 32 rows of 16 KiB
