"""Coded tiles on a real GPU: the bytes of the twins, in tables of many tiles and in host memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import bitslab
from bitslab.engine.codecs.quantized.codec import TileCodec
from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cuda import CudaKernels, kernels_on
from bitslab.engine.kernels.format import NO_ROW, RowStorage, TableStorage
from bitslab.engine.kernels.tile_format import (
    TILE_FORMATS,
    Granularity,
    TileFormat,
    TileTables,
)
from bitslab.errors import CorruptedDataError, IndexRangeError
from tests.engine.kernels.tile_cases import (
    TileCase,
    bases_and_words,
    decoded,
    make_tiles,
)

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

CUDA = torch.device("cuda")
K = TileFormat(64, 128, torch.bfloat16, Granularity.CHANNEL, False)
V = TileFormat(64, 64, torch.float16, Granularity.TOKEN_LEVEL, True)
LOSSLESS = TileFormat(64, 128, torch.bfloat16, Granularity.LOSSLESS, False, 8)


@pytest.fixture
def kernels() -> CudaKernels:
    return kernels_on(CUDA)


def format_id(fmt: TileFormat) -> str:
    pairs = "tokens" if fmt.token_pairs else "channels"
    dtype = str(fmt.dtype).removeprefix("torch.")
    return f"{fmt.tokens}x{fmt.dim}-{dtype}-{fmt.granularity.name}-{pairs}-{fmt.code_bits}"


def on_gpu(packed: RowStorage, *, words_on_host: bool = False) -> TableStorage:
    words = packed.words.pin_memory() if words_on_host else packed.words.to(CUDA)
    lengths = packed.lengths.to(CUDA)
    return TableStorage(len(lengths), words, packed.bases.to(CUDA), lengths)


def tables_on_gpu(case: TileCase) -> TileTables:
    return case.tables.to(CUDA)


@pytest.mark.parametrize("fmt", TILE_FORMATS, ids=format_id)
def test_tiles_have_the_bytes_of_the_twin(kernels, fmt):
    case = make_tiles(fmt, n_rows=200 if fmt.values > 4096 else 2000, heads=5, seed=3)
    expected, tables = case.packed(), tables_on_gpu(case)
    rows = case.rows.to(CUDA)
    for _ in range(3):  # what a race writes changes from run to run
        lengths = kernels.measure_tiles(rows, tables)
        assert torch.equal(lengths.cpu(), expected.lengths)
        bases, n_words = bases_and_words(lengths, case.row_words)
        words = kernels.encode_tiles(rows, tables, lengths, bases, n_words)
        assert torch.equal(words.cpu(), expected.words)
    twin, damaged = decoded(expected, case, torch.arange(len(rows)))
    assert not damaged.any()
    for on_host in (False, True):
        table = on_gpu(expected, words_on_host=on_host)
        for sm_budget in (None, 1, 5):
            out = torch.full_like(rows, 0xA5)
            kernels.decode_tiles(table, tables, None, out, sm_budget=sm_budget)
            assert torch.equal(out.cpu(), twin)
    bitslab.raise_pending_errors()


@pytest.mark.parametrize("n", [1, 7, 300, 20_000])
@pytest.mark.parametrize("on_host", [False, True], ids=["device", "page-locked"])
@pytest.mark.parametrize("fmt", [K, V, LOSSLESS], ids=format_id)
def test_chosen_tiles_arrive(kernels, fmt, on_host, n):
    case = make_tiles(fmt, n_rows=300, heads=3)
    packed, tables = case.packed(), tables_on_gpu(case)
    twin, _ = decoded(packed, case, torch.arange(300))
    twin, table = twin.to(CUDA), on_gpu(packed, words_on_host=on_host)
    for dtype in (torch.int32, torch.int64):
        ids = torch.randint(-300, 300, (n,), device=CUDA).to(dtype)
        out = torch.full((n, fmt.row_bytes), 0xA5, dtype=torch.uint8, device=CUDA)
        kernels.decode_tiles(table, tables, ids, out, lowest=-300)
        assert torch.equal(out, twin[ids.long()])
        gather = kernels.prepare_tiles(table, tables, ids, out, 3)
        ids.copy_(ids.flip(0))
        gather()
        assert torch.equal(out, twin[ids.long()])
    whole = torch.full((n * fmt.row_bytes + 3,), 0xA5, dtype=torch.uint8, device=CUDA)
    out = whole[3:].view(n, -1)  # at an odd address
    kernels.decode_tiles(table, tables, ids, out)
    assert torch.equal(out, twin[ids.long()]) and (whole[:3] == 0xA5).all()
    bitslab.raise_pending_errors()


@pytest.mark.parametrize("fmt", [K, V, LOSSLESS], ids=format_id)
def test_many_tiles_are_within_the_bound(kernels, fmt, n_bytes=9 << 28):
    """Far more than a launch has warps for, of more than 2 ** 31 bytes in all."""
    heads, n = 8, n_bytes // fmt.row_bytes
    x = torch.randn(n, fmt.tokens, fmt.dim, dtype=fmt.dtype, device=CUDA)
    codec = TileCodec.fit(
        x[:32].cpu(),
        granularity=fmt.granularity.name.lower(),
        scale=0.6,
        heads=heads,
        token_pairs=fmt.token_pairs,
    )
    tables = codec.plan.tables().to(CUDA)
    x[::9, 5, 5] = float("inf")
    rows = x.view(torch.uint8).view(n, -1)
    lengths = kernels.measure_tiles(rows, tables)
    assert (lengths != 0).all()
    bases, n_words = bases_and_words(lengths, fmt.row_bytes // 4)
    words = kernels.encode_tiles(rows, tables, lengths, bases, n_words)
    table = TableStorage(n, words, bases, lengths)
    out = torch.empty_like(rows)
    kernels.decode_tiles(table, tables, None, out)
    bitslab.raise_pending_errors()
    back = out.view(fmt.dtype).view(x.shape)
    begins = torch.cat([torch.arange(10), torch.randint(n // heads, (10,))]) * heads
    some = (begins[:, None] + torch.arange(heads)).flatten().to(CUDA)
    given, found = x[some].cpu(), back[some].cpu()
    finite = given.isfinite()
    assert torch.equal(found[~finite], given[~finite])
    apart = (found.double() - given.double()).abs()
    assert (apart[finite] <= codec.bounds(given)[finite]).all()
    expected = cpu.measure_tiles(rows[some].cpu(), codec.plan.tables())
    assert torch.equal(lengths[some].cpu(), expected)
    again = torch.empty_like(rows[:1000])
    last = torch.arange(n - len(again), n, device=CUDA)
    kernels.decode_tiles(table, tables, last, again, lowest=0)
    assert torch.equal(again, out[-len(again) :])


@pytest.mark.parametrize("fmt", [K, V], ids=format_id)
def test_damaged_tiles_are_reported_and_the_others_decoded(kernels, fmt):
    case = make_tiles(fmt, n_rows=100)
    packed, tables = case.packed(), tables_on_gpu(case)
    rng = np.random.default_rng(0)
    n_bits = 32 * int(packed.bases[-1])
    reported = 0
    for i in range(20):
        words = packed.words.clone()
        words[0] ^= int(i == 0)  # the units of tile 0
        for bit in rng.integers(0, n_bits, 6).tolist():
            words[bit >> 5] ^= int(np.uint32(1 << (bit & 31)).view(np.int32))
        table = replace(packed, words=words)
        twin, damaged = decoded(table, case, torch.arange(100))
        twin[damaged] = 7
        out = torch.full_like(case.rows, 7, device=CUDA)
        kernels.decode_tiles(on_gpu(table), tables, None, out)
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), twin)
        if damaged.any():
            reported += 1
            with pytest.raises(CorruptedDataError, match="row .* of an earlier decode .* damaged"):
                bitslab.raise_pending_errors()
        bitslab.raise_pending_errors()
    assert reported


def test_bad_ids_are_reported(kernels):
    case = make_tiles(V, n_rows=50)
    packed, tables = case.packed(), tables_on_gpu(case)
    twin, _ = decoded(packed, case, torch.arange(50))
    table, out = on_gpu(packed), torch.full((2, V.row_bytes), 7, dtype=torch.uint8, device=CUDA)
    for bad in (50, -51, 1 << 40):
        ids = torch.tensor([0, bad], device=CUDA)
        kernels.decode_tiles(table, tables, ids, out, lowest=-50)
        torch.cuda.synchronize()
        assert (out == 7).all()
        with pytest.raises(IndexRangeError, match=f"got index {bad} at position 1"):
            bitslab.raise_pending_errors()
    kernels.decode_tiles(table, tables, torch.tensor([NO_ROW, -1], device=CUDA), out)
    bitslab.raise_pending_errors()
    assert (out[0] == 7).all() and torch.equal(out[1].cpu(), twin[49])


def test_a_graph_decodes_what_is_there_when_it_is_replayed(kernels):
    case = make_tiles(K, n_rows=60)
    packed, tables = case.packed(), tables_on_gpu(case)
    twin, _ = decoded(packed, case, torch.arange(60))
    table, twin = on_gpu(packed), twin.to(CUDA)
    ids = torch.arange(60, device=CUDA, dtype=torch.int32)
    out = torch.zeros_like(twin)
    gather = kernels.prepare_tiles(table, tables, ids, out)
    gather()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather()
    ids.copy_(torch.randperm(60, device=CUDA))
    graph.replay()
    assert torch.equal(out, twin[ids.long()])
    bitslab.raise_pending_errors()
