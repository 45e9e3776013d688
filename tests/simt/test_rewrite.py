"""Rows packed into the table that they belong to: the kernel and its twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cuda.rewrite import warps_for
from bitslab.engine.kernels.cuda.source import Variant
from bitslab.engine.kernels.format import NO_ROW
from bitslab.engine.kernels.rewriting import MAX_REWRITTEN_ROW_BYTES, USED_BITS, LeavingRows
from tests.engine.kernels.cases import make_case
from tests.engine.kernels.rewrite_cases import (
    KINDS,
    N_ROWS,
    Packed,
    assert_same,
    cases_of,
    check,
)
from tests.simt.module import guarded
from tests.simt.runner import simt_kernels
from tests.simt.variants import variants_drawn

VARIANTS = variants_drawn(
    "rewrite",
    [
        Variant("rewrite", 4, 3, False, True, byte_field=True),
        Variant("rewrite", 2, 3, False, True, byte_field=True),
        Variant("rewrite", 4, 1, True, False),
    ],
)


@pytest.mark.drawn(8)
@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_the_kernel_writes_what_its_twin_writes(variant, kind):
    moves = False
    for seed, case in enumerate(cases_of(variant)):
        kernels, runner = simt_kernels(seed)

        def rewrite(packed: Packed, batch: LeavingRows) -> None:
            given = batch._replace(rows=guarded(batch.rows))
            kernels.rewrite_rows(packed.table, packed.layout, packed.places, given)  # noqa: B023

        moves |= check(case, kind, seed, rewrite, lambda t: guarded(t.clone()))
        assert {used for used, _ in runner.launched} == {variant}
    assert moves == (kind == "compact")


@pytest.mark.parametrize(
    ("row_bytes", "warps"), [(6144, 8), (6160, 7), (12_304, 3), (48 << 10, 1)], ids=str
)
def test_rows_that_are_long_are_packed_by_fewer_warps(row_bytes, warps):
    case = make_case(Variant("rewrite", 4, 3, False, True), n_rows=N_ROWS, row_bytes=row_bytes)
    assert warps_for(case.layout) == warps
    assert row_bytes <= MAX_REWRITTEN_ROW_BYTES
    kernels, _ = simt_kernels()
    packed, before = Packed(case, "compact"), Packed(case, "compact")
    n = 6
    rows = guarded(case.rows[:n].flip(0).contiguous())
    rows[::3] = torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, rows[::3].shape, np.uint8)
    )
    batch = LeavingRows(rows, torch.arange(n), torch.arange(n), torch.tensor([n]), n)
    kernels.rewrite_rows(packed.table, case.layout, packed.places, batch)
    cpu.rewrite_rows(before.table, case.layout, before.places, batch)
    assert torch.equal(packed.gathered()[:n], rows)
    assert torch.equal(packed.gathered()[n:], case.rows[n:])
    assert_same(before, packed)


@pytest.mark.parametrize("coming", [0, 5])
def test_nothing_is_written_where_no_row_leaves(coming):
    case = make_case(VARIANTS[0], n_rows=N_ROWS)
    kernels, _ = simt_kernels()
    packed, before = Packed(case, "compact"), Packed(case, "compact")
    leaving = torch.full((5,), NO_ROW)
    batch = LeavingRows(case.rows, torch.arange(5), leaving, torch.tensor([coming]), 5)
    kernels.rewrite_rows(packed.table, case.layout, packed.places, batch)
    assert torch.equal(packed.table.words, before.table.words)
    assert torch.equal(packed.gathered(), case.rows) and not packed.outside().any()
    assert packed.places.report.tolist() == [1 << USED_BITS, 0]
