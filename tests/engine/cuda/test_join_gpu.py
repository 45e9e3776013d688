"""Packed and new tokens of a K/V layer joined by a real GPU, as the twin joins them."""

from __future__ import annotations

import pytest
import torch

from bitslab.engine.kernels.cpu.join import join_rows
from bitslab.engine.kernels.cuda import kernels_on, raise_pending_errors
from bitslab.engine.kernels.cuda.source import Variant
from bitslab.engine.kernels.cuda.variants import all_variants
from tests.engine.kernels.cases import make_case
from tests.engine.kernels.join_cases import BATCH, HEADS, here, runs_of, side_of

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

VARIANTS = [v for v in all_variants() if isinstance(v, Variant) and v.file == "join"]


def on_gpu(t: torch.Tensor) -> torch.Tensor:
    return t.cuda()


@pytest.mark.parametrize("row_bytes", [16, 256, 1024])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_gpu_joins_what_the_twin_joins(variant: Variant, row_bytes: int) -> None:
    kernels = kernels_on(torch.device("cuda", torch.cuda.current_device()))
    for seed, (rows, unpacked) in enumerate(
        (((700, 31), ((5, 1, 3), (70, 2, None))), ((3, 900), ((0, 1, None), (9, 300, 0))))
    ):
        each = 1 if row_bytes == 16 else 1 << seed + 1  # tokens of a row
        cases = [make_case(variant, n_rows=500, row_bytes=row_bytes, seed=seed + i) for i in (0, 2)]
        found = []
        for place in (here, on_gpu):
            runs = [
                runs_of(case, [n, 40], each, seed=seed, place=place)
                for case, n in zip(cases, rows, strict=True)
            ]
            sides = [
                side_of(row_bytes // each, each * (n + 40), *sizes, seed=i, place=place)
                for i, (n, sizes) in enumerate(zip(rows, unpacked, strict=True))
            ]
            if place is here:
                assert [join_rows(*both) for both in zip(runs, sides, strict=True)] == [-1, -1]
            else:
                bytes_of = (row_bytes // each,) * 2
                prepared = kernels.prepare_join((runs[0], runs[1]), BATCH, HEADS, bytes_of)
                prepared(sides[0], sides[1])
            found.append([t.cpu() for side in sides for t in (side.out, side.memory)])
        raise_pending_errors()
        for expected, joined in zip(*found, strict=True):
            assert torch.equal(joined, expected)
