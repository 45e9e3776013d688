"""Raw rows by id: every byte of every shape and alignment, and the lines that warps ask for."""

from __future__ import annotations

from itertools import product
from typing import Literal

import numpy as np
import pytest
import torch

from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cuda import copy as copying
from bitslab.engine.kernels.cuda.copy import (
    MAX_ROW_BYTES,
    MAX_STRIDE_BYTES,
    CopyKernels,
    choose_unit,
    covering_units,
    division,
    piece_bytes,
)
from bitslab.engine.kernels.cuda.ids import IdKernels, IdScratch
from bitslab.engine.kernels.cuda.runner import INDEX_ERROR, NO_ERROR
from bitslab.engine.kernels.cuda.source import COPY_PIECES, PlainVariant, copy_variant
from bitslab.engine.kernels.format import LINE_BYTES, NO_ROW
from bitslab.errors import ArgumentError
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner

SIZES = [(unit, piece) for unit, pieces in COPY_PIECES.items() for piece in pieces]
FILL = 0xA5


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def table(
    n: int, row_bytes: int, stride: int, side: Literal["end", "start"], offset: int
) -> torch.Tensor:
    """Return rows `offset` bytes from a forbidden page, at their start or behind their end."""
    used = (n - 1) * stride + row_bytes
    flat = guarded(random_bytes(used + offset), side=side)
    flat = flat[offset:] if side == "start" else flat[: flat.numel() - offset]
    return flat.as_strided((n, row_bytes), (stride, 1), flat.storage_offset())


def output(n: int, row_bytes: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a place for rows, and the whole memory that it lies in."""
    whole = guarded(torch.full((n * row_bytes + offset + 64,), FILL, dtype=torch.uint8))
    shift = (offset - whole.data_ptr()) % 16
    return whole[shift : shift + n * row_bytes].view(n, row_bytes), whole


def assert_copies(rows, row_bytes, ids, offset, kernels=None, **options) -> SimtRunner:
    """Copy, compare every row and look for bytes written elsewhere."""
    runner = SimtRunner()
    kernels = kernels or CopyKernels(runner)
    out, whole = output(len(ids), row_bytes, offset)
    kernels.copy_rows(rows, row_bytes, ids, out, **options)
    assert torch.equal(out, rows[ids.long(), :row_bytes])
    before = out.data_ptr() - whole.data_ptr()
    behind = before + out.numel()
    assert (whole[:before] == FILL).all()
    assert (whole[behind:] == FILL).all()
    assert runner.mailbox[0] == NO_ERROR
    return runner


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("unit", "piece"), SIZES, ids=lambda n: str(n))
@pytest.mark.parametrize("side", ["start", "end"])
def test_rows_of_any_size_and_alignment_arrive(unit, piece, side):
    generator = np.random.default_rng(unit * 100 + piece)
    for pieces_a_row in (1, 3, 5, 11, 31, 33, 65, 301):
        row_bytes = piece * pieces_a_row
        n = int(generator.integers(1, 40))
        stride = row_bytes + piece * int(generator.integers(0, 9))
        # An odd number of pieces behind a page's edge, so that no wider piece fits.
        offset = piece * (2 * int(generator.integers(0, 8)) + 1) if piece < 16 else 16
        ids = torch.from_numpy(generator.integers(-n, n, 57))
        rows = table(n, row_bytes, stride, side, offset)
        runner = assert_copies(rows, row_bytes, ids, piece * 3, unit_bytes=unit)
        assert runner.launched == [(copy_variant(unit, piece), "copy_rows")]


@pytest.mark.parametrize("row_bytes", [4, 100, 128, 256, 301, 602, 2048, 2052, 2056, 2076])
def test_rows_that_lie_back_to_back_arrive_from_any_base_address(row_bytes):
    for base in (0, 1, 2, 4, 8, 36, 127):
        rows = table(20, row_bytes, row_bytes, "start", base)
        assert_copies(rows, row_bytes, torch.randint(-20, 20, (33,)), 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("unit", COPY_PIECES)
def test_ids_of_both_widths_duplicates_and_orders(dtype, unit):
    rows = table(300, 36, 36, "end", 0)
    for n in (1, 2, 255, 1000):
        ids = torch.randint(-300, 300, (n,)).to(dtype)
        ids[n // 2 :] = ids[0]
        assert_copies(rows, 36, ids, 4, unit_bytes=unit)
        order = torch.randperm(n).int()
        assert_copies(rows, 36, ids, 4, unit_bytes=unit, order=order)


@pytest.mark.parametrize("unit", COPY_PIECES)
def test_part_of_each_row_is_copied(unit):
    rows = table(9, 200, 200, "end", 0)
    ids = torch.tensor([3, 8, -9, 0])
    for row_bytes in (1, 60, 199):
        assert_copies(rows, row_bytes, ids, 0, unit_bytes=unit)


def test_more_units_than_one_round_of_the_grid():
    """Blocks go on to further tiles, which begin inside rows."""
    for row_bytes, n in ((1, 9000), (4, 9000), (68, 3000), (2052, 150), (40_004, 9)):
        rows = table(50, row_bytes, row_bytes, "start", 0)
        ids = torch.randint(-50, 50, (n,))
        runner = assert_copies(rows, row_bytes, ids, 0, unit_bytes=4, sm_budget=1)
        units = n * covering_units(row_bytes, row_bytes, rows.data_ptr(), 4)
        blocks = runner.grids[0][0]
        assert blocks == copying.BLOCKS
        assert units > 2 * blocks * copying.TILE_UNITS


def test_the_budget_of_multiprocessors_bounds_the_grid():
    rows, ids = table(5, 4096, 4096, "start", 0), torch.zeros(40, dtype=torch.int64)
    grids = {}
    for budget in (None, 0, 1, 2, 99):
        grids[budget] = assert_copies(rows, 4096, ids, 0, sm_budget=budget).grids[0][0]
    each = copying.BLOCKS
    assert grids == {None: 2 * each, 0: each, 1: each, 2: 2 * each, 99: 2 * each}


def test_no_rows_and_rows_of_no_bytes_launch_nothing():
    runner = SimtRunner()
    rows, no_ids = random_bytes(4, 8), torch.zeros(0, dtype=torch.int64)
    CopyKernels(runner).copy_rows(rows, 8, no_ids, torch.empty(0, 8, dtype=torch.uint8))
    empty = torch.empty(3, 0, dtype=torch.uint8)
    CopyKernels(runner).copy_rows(rows, 0, torch.zeros(3, dtype=torch.int64), empty)
    assert runner.launched == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("bad", [300, -301, 2_000_000_000])
def test_a_bad_id_is_reported_and_nothing_is_written(dtype, bad):
    runner = SimtRunner()
    rows, ids = random_bytes(300, 52), torch.randint(-300, 300, (5000,)).to(dtype)
    ids[4321] = bad
    ids[4999] = bad
    scratch = IdScratch.allocate("cpu", 5000)
    for ordered in (False, True):
        runner.mailbox.zero_()
        order = None
        if ordered:
            scratch.order.fill_(-7)
            order = IdKernels(runner).order(ids, 300, scratch)
            assert (scratch.order == -7).all()
        else:
            IdKernels(runner).check(ids, 300, scratch.first_bad)
        out = torch.full((5000, 52), FILL, dtype=torch.uint8)
        CopyKernels(runner).copy_rows(rows, 52, ids, out, first_bad=scratch.first_bad, order=order)
        assert (out == FILL).all()
        assert runner.mailbox.tolist() == [INDEX_ERROR, 4321, bad, 300]


def test_good_ids_pass_the_check_and_the_order():
    runner, scratch = SimtRunner(), IdScratch.allocate("cpu", 700)
    rows, ids = random_bytes(300, 52), torch.randint(-300, 300, (700,))
    order = IdKernels(runner).order(ids, 300, scratch)
    out = torch.empty(700, 52, dtype=torch.uint8)
    CopyKernels(runner).copy_rows(rows, 52, ids, out, first_bad=scratch.first_bad, order=order)
    assert torch.equal(out, rows[ids])
    assert runner.mailbox[0] == NO_ERROR


def test_places_past_four_gibibytes_are_reached(tmp_path):
    """Of the sparse files only the pages in use take room."""

    def sparse(name: str) -> torch.Tensor:
        shape = (9_000_000, 600)  # 5.4 GB
        return torch.from_numpy(np.memmap(tmp_path / name, np.uint8, "w+", shape=shape))

    rows, out = sparse("rows"), sparse("out")
    picked = [0, 7_158_278, 7_158_279, 8_999_999]  # 4 GiB lies between the two in the middle
    rows[picked] = random_bytes(4, 600)
    ids = torch.zeros(9_000_000, dtype=torch.int32)
    ids[picked] = torch.tensor([8_999_999, 0, 7_158_278, 7_158_279], dtype=torch.int32)
    order = torch.tensor(picked, dtype=torch.int32)
    for unit in COPY_PIECES:
        out[picked] = FILL
        CopyKernels(SimtRunner()).copy_rows(rows, 600, ids, out[:4], order=order, unit_bytes=unit)
        assert torch.equal(out[picked], rows[ids[picked].long()])


def test_rows_too_long_or_too_far_apart_are_refused():
    flat = random_bytes(1)
    out, ids = torch.empty(1, 1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="row_bytes: 2147483648; .* at most"):
        CopyKernels(SimtRunner()).copy_rows(flat.expand(2, 1), MAX_ROW_BYTES + (1 << 14), ids, out)
    far = torch.empty(2, 1, dtype=torch.uint8, device="meta").as_strided(
        (2, 1), (MAX_STRIDE_BYTES + 1, 1)
    )
    with pytest.raises(ArgumentError, match="rows: bytes from row to row: 4294967296; "):
        CopyKernels(SimtRunner()).copy_rows(far, 1, ids, out)


def test_division_by_multiplication_is_exact():
    generator = np.random.default_rng(0)
    divisors = [1, 2, 3, 5, 7, 127, 128, 129, 4096, (1 << 29) - 1, 1 << 29, (1 << 29) + 1]
    divisors += generator.integers(1, 1 << 30, 300).tolist()
    for divisor in divisors:
        multiplier, shift = division(divisor)
        assert 0 <= multiplier < 1 << 32
        assert 0 <= shift < 32
        near = {q * divisor + d for q in (1, 2, 1000) for d in (-1, 0, 1)}
        near |= {0, (1 << 31) - 1, (1 << 31) // divisor * divisor - 1}
        for n in {*near, *generator.integers(0, 1 << 31, 50).tolist()}:
            if 0 <= n < 1 << 31:
                quotient = (n * multiplier >> 32) >> shift if multiplier else n
                assert quotient == n // divisor, (n, divisor)


def test_covering_units_are_the_most_that_a_row_touches():
    for unit, row_bytes, extra, base in product((4, 16), range(1, 50), range(20), range(0, 16, 3)):
        stride = row_bytes + extra
        starts = base + np.arange(16) * stride
        touched = (starts + row_bytes - 1) // unit - starts // unit + 1
        assert covering_units(row_bytes, stride, base, unit) == touched.max()


def test_pieces_divide_every_place_and_units_follow_the_memory():
    assert [piece_bytes(p) for p in (0, 1, 2, 6, 12, 24, 48, 4096)] == [16, 1, 2, 2, 4, 8, 16, 16]
    for row_bytes, piece in product((4, 32, 2052), (1, 2, 4, 8, 16)):
        assert choose_unit(row_bytes, piece, on_host=True) == (16 if row_bytes >= 32 else 4)
        assert choose_unit(row_bytes, piece, on_host=False) == (16 if piece >= 8 else 4)


# ------------------------------------------------------------------ lines asked for


def requests(runner: SimtRunner, line_bytes: int, warp: int) -> int:
    """Return how many lines the last launch asked for: of one instruction, each line once."""
    loads = runner.loads[-1]
    seen = np.stack(
        [loads["block"], loads["thread"] // warp, loads["step"], loads["address"] // line_bytes]
    )
    return len(np.unique(seen, axis=1).T)


@pytest.mark.parametrize(("shift", "expected"), [(0, 7), (1, 5)], ids=["plain", "shifted"])
def test_the_example_of_pytorch_direct(monkeypatch, shift, expected):
    """Thesis section 4.4: rows 0, 2 and 4 of 11 words, lines of 16 bytes, warps of 4 threads.

    The threads 11 to 21, which take row 2, ask for 7 lines, and for 5 with the circular shift.
    """

    def variant(unit_bytes: int, piece: int) -> PlainVariant:
        names = ("UNIT_BYTES", "PIECE_BYTES", "LINE_BYTES", "SHIFT")
        values = (unit_bytes, piece, 16, shift)
        return PlainVariant("copy", tuple(zip(names, values, strict=True)))

    monkeypatch.setattr(copying, "copy_variant", variant)
    monkeypatch.setattr(copying, "LINE_BYTES", 16)
    runner = SimtRunner(traced=True)
    rows = table(5, 44, 44, "start", 0)
    out = torch.empty(3, 44, dtype=torch.uint8)
    CopyKernels(runner).copy_rows(rows, 44, torch.tensor([0, 2, 4]), out, unit_bytes=4)
    assert torch.equal(out, rows[[0, 2, 4]])
    loads = runner.loads[0]
    row_2 = loads[(loads["thread"] >= 11) & (loads["thread"] <= 21)]
    assert sorted((row_2["address"] - rows.data_ptr()).tolist()) == [*range(88, 132, 4)]
    runner.loads[0] = row_2
    assert requests(runner, 16, 4) == expected


@pytest.mark.parametrize("unit", COPY_PIECES)
@pytest.mark.parametrize("row_bytes", [129, 301, 602, 1028, 2048, 2052, 2076, 4096])
def test_long_rows_ask_for_at_most_two_lines_more_than_they_touch(unit, row_bytes):
    """Counted over groups of threads whose loads fill a line, of each line once."""
    n, units_a_line = 40, LINE_BYTES // unit
    for base in (0, 1, 4, 100):
        rows = table(n, row_bytes, row_bytes, "start", base)
        runner = SimtRunner(traced=True)
        ids = torch.randperm(n)
        out = torch.empty(n, row_bytes, dtype=torch.uint8)
        CopyKernels(runner).copy_rows(rows, row_bytes, ids, out, unit_bytes=unit)
        assert torch.equal(out, rows[ids])
        loads, blocks = runner.loads[0], runner.grids[0][0]
        steps = copying.TILE_UNITS // copying.THREADS
        tile = loads["step"] // steps * blocks + loads["block"]
        thread = loads["step"] % steps * copying.THREADS + loads["thread"]
        place = tile.astype(np.int64) * copying.TILE_UNITS + thread
        row = place // covering_units(row_bytes, row_bytes, rows.data_ptr(), unit)
        asked = np.unique([row, place // units_a_line, loads["address"] // LINE_BYTES], axis=1)[0]
        asked = np.bincount(asked.astype(np.int64), minlength=n)
        starts = rows.data_ptr() + ids.numpy() * row_bytes
        fewest = (starts + row_bytes - 1) // LINE_BYTES - starts // LINE_BYTES + 1
        extra = asked - fewest
        assert extra.min() >= 0
        assert extra.max() <= 2
        assert extra.mean() <= 1.25
        if (row_bytes | rows.data_ptr()) % LINE_BYTES == 0:
            assert extra.max() == 0


def test_small_rows_share_the_loads_of_a_warp():
    """Rows of 16 bytes: one instruction of a warp fetches 32 of them."""
    rows = table(1000, 16, 16, "start", 0)
    runner = SimtRunner(traced=True)
    ids = torch.randint(0, 1000, (1024,))
    out = torch.empty(1024, 16, dtype=torch.uint8)
    CopyKernels(runner).copy_rows(rows, 16, ids, out, unit_bytes=16)
    loads = runner.loads[0]
    instructions = np.stack([loads["block"], loads["thread"] // 32, loads["step"]])
    assert np.unique(instructions, axis=1).shape[1] == 1024 // 32


@pytest.mark.parametrize("unit", COPY_PIECES)
def test_a_copy_that_checks_ids_itself_writes_all_or_nothing(unit):
    rows, runner = random_bytes(50, 64), SimtRunner(1)
    good = torch.from_numpy(np.random.default_rng(3).integers(0, 50, 3000))
    for lowest, bad in ((-50, -51), (-50, 50), (0, -1), (0, 50)):
        ids = good.clone()
        ids[2345] = ids[2999] = bad
        out = torch.full((3000, 64), FILL, dtype=torch.uint8)
        CopyKernels(runner).copy_rows(rows, 64, ids, out, lowest=lowest, unit_bytes=unit)
        assert (out == FILL).all()
        assert runner.mailbox.tolist() == [INDEX_ERROR, 2345, bad, 50]
        runner.mailbox.zero_()
    good[5] = -1
    assert_copies(rows, 64, good, 0, lowest=-50, unit_bytes=unit)


def test_plans_are_kept_for_rows_of_one_size_only():
    kernels = CopyKernels(SimtRunner())
    for _ in range(2):
        for row_bytes, stride, offset in ((64, 64, 0), (64, 80, 0), (32, 64, 0), (64, 64, 4)):
            for n in (1, 33):
                rows = table(n, row_bytes, stride, "start", offset)
                assert_copies(rows, row_bytes, torch.randint(-n, n, (40,)), 0, kernels)
    assert 4 <= len(kernels.plans) <= 6


@pytest.mark.parametrize("row_bytes", [1, 6, 16, 128, 2000])
def test_rows_of_no_id_are_left_as_they_are(row_bytes):
    rows = table(50, row_bytes, row_bytes, "end", 0)
    ids = torch.tensor([3, NO_ROW, 49, 0, NO_ROW, NO_ROW, 3])
    out, _ = output(len(ids), row_bytes, 0)
    twin = out.clone()
    CopyKernels(SimtRunner()).copy_rows(rows, row_bytes, ids, out)
    wanted = torch.where((ids >= 0)[:, None], rows[ids.clamp(0)], FILL)
    assert torch.equal(out, wanted)
    cpu.copy_rows(rows.contiguous(), row_bytes, ids, twin)
    assert torch.equal(twin, wanted)
