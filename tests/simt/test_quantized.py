"""The kernels of coded tiles, run on the CPU, write and read the bytes of their Numba twins."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cuda.runner import DAMAGED_ERROR, INDEX_ERROR, NO_ERROR
from bitslab.engine.kernels.format import NO_ROW, RowStorage, TableStorage
from bitslab.engine.kernels.tile_format import (
    MAX_SYMBOLS,
    TILE_DTYPES,
    Granularity,
    TileFormat,
)
from bitslab.errors import ArgumentError
from tests import pairwise
from tests.engine.kernels.tile_cases import (
    TileCase,
    bases_and_words,
    decoded,
    make_plan,
    make_tiles,
    table_of,
)
from tests.simt.module import guarded
from tests.simt.runner import simt_kernels

SIZES = (16, 16), (16, 80), (32, 64), (64, 128)


def formats_run() -> list[TileFormat]:
    """Return formats that hold every pair of settings, all of them with ``BITSLAB_FULL=1``."""
    formats = [
        TileFormat(*size, dtype, granularity, token_pairs, code_bits)
        for size, dtype, granularity, token_pairs, code_bits in product(
            SIZES, TILE_DTYPES, Granularity, (False, True), (8, 10)
        )
        if granularity is not Granularity.LOSSLESS or dtype.itemsize == 2
    ]
    if pairwise.FULL:
        return formats
    return [formats[i] for i in pairwise.cover([vars(fmt) for fmt in formats], 1)]


def format_id(fmt: TileFormat) -> str:
    pairs = "tokens" if fmt.token_pairs else "channels"
    dtype = str(fmt.dtype).removeprefix("torch.")
    return f"{fmt.tokens}x{fmt.dim}-{dtype}-{fmt.granularity.name}-{pairs}-{fmt.code_bits}"


FORMATS = formats_run()
K = TileFormat(16, 64, torch.bfloat16, Granularity.CHANNEL, False)
V = TileFormat(32, 48, torch.float16, Granularity.TOKEN_LEVEL, True)
LOSSLESS = TileFormat(32, 80, torch.bfloat16, Granularity.LOSSLESS, False)
LONG = TileFormat(256, 32, torch.float32, Granularity.TOKEN_RANGE, True)


def guarded_table(packed: RowStorage) -> TableStorage:
    return table_of(replace(packed, words=guarded(packed.words)))


def test_tiles_that_could_not_be_decoded_are_not_coded():
    fmt = TileFormat(256, 256, torch.bfloat16, Granularity.LOSSLESS, True, 8)
    case = make_tiles(fmt, n_rows=1, heads=1, rows_per_head=1)
    kernels, runner = simt_kernels()
    for pack in (kernels.measure_tiles, kernels.pack_tiles):
        with pytest.raises(ArgumentError, match="256 x 256 takes 1[0-9]* bytes of shared memory"):
            pack(case.rows, case.tables)
    assert not runner.mailbox.any()


@pytest.mark.drawn(6)
@pytest.mark.parametrize("fmt", [*FORMATS, LONG], ids=format_id)
def test_tiles_have_the_bytes_of_the_twin(fmt):
    case = make_tiles(fmt, n_rows=9 if fmt.values > 4096 else 40, seed=1)
    kernels, runner = simt_kernels(seed=fmt.dim % 3)
    expected = case.packed()
    rows = guarded(case.rows)
    lengths = kernels.measure_tiles(rows, case.tables)
    assert torch.equal(lengths, expected.lengths)
    assert (lengths == 0).any() and (lengths != 0).any()
    bases, n_words = bases_and_words(lengths, case.row_words)
    words = kernels.encode_tiles(rows, case.tables, lengths, bases, n_words + 5)
    assert torch.equal(words[: n_words + 4], expected.words) and not words[n_words:].any()
    words, lengths, found = kernels.pack_tiles(rows, case.tables)
    assert torch.equal(lengths, expected.lengths) and torch.equal(found, bases)
    assert torch.equal(words[: n_words + 4], expected.words)
    assert words.shape == (len(rows) * case.row_words + 4,)
    table = guarded_table(expected)
    ids = torch.arange(len(lengths))
    twin, damaged = decoded(expected, case, ids)
    assert not damaged.any()
    out = guarded(torch.full_like(case.rows, 0xA5))
    kernels.decode_tiles(table, case.tables, None, out)
    assert runner.mailbox[0] == NO_ERROR
    assert torch.equal(out, twin)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("fmt", [K, V, LOSSLESS], ids=format_id)
def test_tiles_are_packed_in_parts(fmt, monkeypatch):
    case = make_tiles(fmt, n_rows=100, heads=3, rows_per_head=7)
    expected = case.packed()
    monkeypatch.setattr("bitslab.engine.kernels.cuda.quantized.SLOTS_BYTES", 40 * fmt.row_bytes)
    kernels, runner = simt_kernels(1)
    words, lengths, bases = kernels.pack_tiles(case.rows, case.tables)
    assert [kernel for _, kernel in runner.launched] == ["pack_tiles", "move_tiles"] * 4
    assert torch.equal(lengths, expected.lengths) and torch.equal(bases, expected.bases)
    assert torch.equal(words[: len(expected.words)], expected.words)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("granularity", Granularity, ids=lambda g: g.name)
def test_slots_hold_all_that_is_written_of_raw_tiles(granularity, monkeypatch):
    """The smallest tile, whose symbols are all as long as can be, and most values exceptions."""
    fmt = TileFormat(16, 16, torch.bfloat16, granularity, True)
    plan = make_plan(fmt, heads=1, rows_per_head=1)
    long = np.zeros((1, MAX_SYMBOLS), np.uint8)
    long[0, 1:256] = fmt.code_bits
    plan = replace(
        plan,
        block_class=np.zeros_like(plan.block_class),
        radius=np.zeros(1, np.uint8),
        lengths=long,
    )
    tables = plan.tables()
    rows = torch.full((1, fmt.values), float("nan"), dtype=fmt.dtype).view(torch.uint8)
    assert cpu.measure_tiles(rows, tables).tolist() == [0]
    kernels, _ = simt_kernels()
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: guarded(empty(*size, **options)))
    words, lengths, bases = kernels.pack_tiles(rows, tables)
    assert lengths.tolist() == [0] and bases.tolist() == [0, fmt.row_bytes // 4]
    assert torch.equal(words, torch.cat([rows.view(torch.int32)[0], torch.zeros(4).int()]))


def test_cases_have_exceptions_of_every_kind():
    case = make_tiles(K, n_rows=40, seed=1)
    table = case.packed()
    exceptions = []
    at = table.bases[0]
    for length in table.lengths[:32].tolist():
        if length:
            exceptions.append(int(table.words[at]) >> 16 & 0xFFFF)
        at += length or case.row_words
    assert min(exceptions) == 0 and max(exceptions) > 32


@pytest.mark.parametrize("sm_budget", [None, 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_tiles_are_gathered_by_id(dtype, sm_budget):
    case = make_tiles(V, n_rows=70)
    kernels, runner = simt_kernels(3)
    table = case.packed()
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(-70, 70, 101)).to(dtype)
    twin, _ = decoded(table, case, ids.long() % 70)
    out = guarded(torch.zeros_like(twin))
    kernels.decode_tiles(
        guarded_table(table), case.tables, ids, out, lowest=-70, sm_budget=sm_budget
    )
    assert runner.mailbox[0] == NO_ERROR and torch.equal(out, twin)
    assert runner.grids[-1] <= ((sm_budget or 4),)
    out.zero_()
    gather = kernels.prepare_tiles(table_of(table), case.tables, ids, out, sm_budget)
    ids.copy_(ids.flip(0))
    gather()
    assert torch.equal(out, twin.flip(0))


def test_tiles_from_a_row_on_are_decoded_and_none_is_nothing():
    case = make_tiles(K, n_rows=70)
    kernels, runner = simt_kernels()
    packed = case.packed()
    table = guarded_table(packed)
    twin, _ = decoded(packed, case, torch.arange(33, 70))
    out = torch.zeros(38, case.rows.shape[1] + 1, dtype=torch.uint8).flatten()[1:]
    out = out[: 37 * case.rows.shape[1]].view(37, -1)  # at an odd address
    kernels.decode_tiles(table, case.tables, None, out, row_begin=33)
    assert torch.equal(out, twin)
    kernels.decode_tiles(table, case.tables, None, out[:0])
    assert len(kernels.measure_tiles(case.rows[:0], case.tables)) == 0
    empty = torch.empty(0, dtype=torch.int16)
    none = kernels.encode_tiles(
        case.rows[:0], case.tables, empty, torch.zeros(1, dtype=torch.int64), 0
    )
    assert none.tolist() == [0] * 4
    words, lengths, bases = kernels.pack_tiles(case.rows[:0], case.tables)
    assert words.tolist() == [0] * 4 and len(lengths) == 0 and bases.tolist() == [0]
    assert runner.mailbox[0] == NO_ERROR


def test_bad_ids_leave_all_and_no_row_leaves_its_own():
    case = make_tiles(K, n_rows=20)
    kernels, runner = simt_kernels()
    packed = case.packed()
    table = table_of(packed)
    ids = torch.tensor([3, NO_ROW, 0, -1])
    twin, _ = decoded(packed, case, torch.tensor([3, 0, 0, 19]))
    out = torch.full_like(twin, 7)
    kernels.decode_tiles(table, case.tables, ids, out)
    assert runner.mailbox[0] == NO_ERROR
    twin[1] = 7
    assert torch.equal(out, twin)
    out.fill_(7)
    for bad in (20, -21):
        kernels.decode_tiles(table, case.tables, torch.tensor([3, bad]), out[:2], lowest=-20)
        assert runner.mailbox.tolist() == [INDEX_ERROR, 1, bad, 20]
        assert (out == 7).all()
    first_bad = torch.tensor([1])
    runner.mailbox.zero_()
    kernels.decode_tiles(table, case.tables, torch.tensor([3, 20]), out[:2], first_bad=first_bad)
    assert runner.mailbox.tolist() == [INDEX_ERROR, 1, 20, 20] and (out == 7).all()


def test_tables_that_no_tiles_lie_in_are_refused():
    case = make_tiles(K, n_rows=5)
    kernels, _ = simt_kernels()
    packed = case.packed()
    table = table_of(packed)
    out = torch.zeros_like(case.rows)
    with pytest.raises(ArgumentError, match="table: neither bases nor lengths"):
        kernels.decode_tiles(replace(table, lengths=None), case.tables, None, out)
    with pytest.raises(ArgumentError, match="table: rows moved"):
        kernels.decode_tiles(replace(table, items_per_row=2), case.tables, None, out)
    shifted = replace(table, words=torch.cat([table.words[:1], table.words])[1:])
    with pytest.raises(ArgumentError, match="table: words: starts at no multiple of 16 bytes"):
        kernels.prepare_tiles(shifted, case.tables, torch.arange(5), out)
    kernels.decode_tiles(shifted, case.tables, None, out)
    assert torch.equal(out, decoded(packed, case, torch.arange(5))[0])
    large = TileFormat(256, 256, torch.float32, Granularity.CHANNEL, False)
    with pytest.raises(ArgumentError, match="format: a tile of 256 x 256 takes .* shared memory"):
        tables = make_tiles(large, n_rows=1).tables
        many = replace(tables, lookup=tables.lookup.repeat(4, 1), radius=tables.radius.repeat(4))
        kernels.decode_tiles(table, many, None, out)


def decode_damaged(table: RowStorage, case: TileCase, seed: int) -> bool:
    """Decode what may be damaged as the twin does; return whether it was."""
    ids = torch.arange(len(table.lengths))
    twin, damaged = decoded(table, case, ids)
    kernels, runner = simt_kernels(seed)
    out = guarded(torch.full_like(twin, 7))
    kernels.decode_tiles(guarded_table(table), case.tables, None, out)
    twin[damaged] = 7
    assert torch.equal(out, twin)
    kind, row, _, n_rows = runner.mailbox.tolist()
    if not damaged.any():
        assert kind == NO_ERROR
        return False
    assert kind == DAMAGED_ERROR and damaged[row] and n_rows == len(ids)
    return True


@pytest.mark.parametrize("fmt", [K, V, LOSSLESS], ids=format_id)
def test_flipped_bits_are_found_where_the_twin_finds_them(fmt):
    case = make_tiles(fmt, n_rows=10)
    table = case.packed()
    rng = np.random.default_rng(5)
    n_bits = 32 * int(table.bases[-1])
    reported = 0
    for seed in range(12):
        words = table.words.clone()
        for bit in rng.integers(0, n_bits, 4).tolist():
            words[bit >> 5] ^= int(np.int32(np.uint32(1 << (bit & 31))))
        reported += decode_damaged(replace(table, words=words), case, seed)
    assert 0 < reported


@pytest.mark.parametrize("part", ["units", "exceptions", "position", "order"])
def test_headers_and_positions_are_looked_at(part):
    case = make_tiles(V, n_rows=10)
    table = case.packed()
    lengths = table.lengths.long()
    r = 4
    at, end = int(lengths[:r].where(lengths[:r] > 0, case.row_words).sum()), 0
    end = at + int(lengths[r])
    words = table.words.clone()
    header = int(words[at]) & 0xFFFFFFFF
    assert header >> 16 >= 2
    changes = {
        "units": [(at, header - 1), (at, header + 1), (at, header | 0xFFFF)],
        "exceptions": [(at, header + (1 << 16)), (at, header | 0xFFFF << 16)],
        "position": [(end - 1, int(words[end - 1]) | 0xFFFF), (end - 1, V.values)],
        "order": [(end - 1, int(words[end - 2])), (end - 1, 0)],
    }
    for place, value in changes[part]:
        damaged = words.clone()
        damaged[place] = int(np.uint32(value & 0xFFFFFFFF).view(np.int32))
        assert decode_damaged(replace(table, words=damaged), case, 0)


@pytest.mark.parametrize("part", ["bases", "lengths"])
def test_damaged_tables_are_reported_and_never_read_outside(part):
    rng = np.random.default_rng(7)
    case = make_tiles(K, n_rows=50)
    for seed in range(6):
        table = case.packed()
        damaged = getattr(table, part).numpy().view(np.uint8)
        for where in rng.integers(0, damaged.size, 5):
            damaged[where] ^= rng.integers(1, 256)
        kernels, runner = simt_kernels(seed)
        out = guarded(torch.zeros_like(case.rows))
        kernels.decode_tiles(guarded_table(table), case.tables, None, out)
        assert runner.mailbox[0] == DAMAGED_ERROR
