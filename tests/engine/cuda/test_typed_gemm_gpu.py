"""Typed products on a real GPU: of packed rows the bits of raw rows, for every variant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bitslab.engine.kernels.cpu import typed_products
from bitslab.engine.kernels.cuda import kernels_on
from bitslab.engine.kernels.cuda.source import Variant
from bitslab.engine.kernels.cuda.typed_gemm import TypedTiles
from bitslab.engine.kernels.cuda.variants import all_variants
from bitslab.engine.kernels.typed_products import SCHEDULES, PackedRows
from tests.engine.kernels.cases import TABLE_KINDS, cache_of, make_case, table_of
from tests.simt.test_typed_gemm import close, finite_rows, gradient_reference, reference, values
from tests.test_gpu import to_gpu

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

CUDA = torch.device("cuda")
PACKED = [
    v
    for v in all_variants()
    if isinstance(v, Variant) and v.file == "typed_gemm" and not v.schedule
]
BOUNDS = [0, 0, 700, 701, 733, 3000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("depth", "width"), [(64, 64), (77, 5), (1000, 130)])
def test_raw_rows(depth, width, dtype):
    kernels = kernels_on(CUDA).typed
    x = values(500, depth, dtype=dtype)
    index = torch.randint(500, (BOUNDS[-1],))
    weight = values(len(BOUNDS) - 1, depth, width, dtype=dtype, seed=2)
    bias = values(len(BOUNDS) - 1, width, dtype=dtype, seed=6)
    g = values(BOUNDS[-1], width, dtype=dtype, seed=5)
    tiles = TypedTiles(BOUNDS, CUDA)
    assert kernels.takes(x.cuda(), depth)
    on_gpu: dict[str, Any] = {"index": index.cuda()}
    runs = []
    for _ in range(3):  # what a race writes changes from run to run
        outs = []
        for given in (None, bias.cuda()):
            outs.append(torch.zeros(BOUNDS[-1], width, dtype=dtype, device=CUDA))
            kernels.product(x.cuda(), weight.cuda(), tiles, outs[-1], bias=given, **on_gpu)
        runs.append((*outs, kernels.gradient(x.cuda(), g.cuda(), tiles, depth, **on_gpu)))
    plain, added, gradient = (found.cpu() for found in runs[0])
    close(plain, reference(x, weight, BOUNDS, BOUNDS[-1], index=index), dtype)
    close(added, reference(x, weight, BOUNDS, BOUNDS[-1], index=index, bias=bias), dtype)
    close(gradient, gradient_reference(x, g, BOUNDS, index), dtype)
    for again in runs[1:]:
        assert all(map(torch.equal, again, runs[0]))


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("variant", PACKED, ids=lambda v: v.name)
def test_packed_rows_give_the_bits_of_raw_rows(variant, host):
    kernels = kernels_on(CUDA).typed
    dtypes = (torch.float16, torch.bfloat16) if variant.chunk_bytes == 2 else (torch.float32,)
    tiles = TypedTiles(BOUNDS, CUDA)
    for number, kind in enumerate(TABLE_KINDS):
        dtype = dtypes[number % len(dtypes)]
        row_bytes = (256, 1040, 2048, 528)[number]
        case = make_case(variant, n_rows=200, row_bytes=row_bytes, seed=number)
        case.rows = finite_rows(case, dtype).view(torch.uint8).reshape(case.rows.shape)
        table = table_of(case, kind, number)
        there = to_gpu(table)
        if host:
            there = replace(there, words=table.words.pin_memory())
        cache = to_gpu(cache_of(case, table, torch.randperm(200)[:90], slabs=3))
        raw = case.rows.view(dtype).cuda()
        index = torch.randint(200, (BOUNDS[-1],), device=CUDA)
        weight = values(len(BOUNDS) - 1, raw.shape[1], 72, dtype=dtype).cuda()
        rows: dict[str, Any] = {
            "index": index, "bias": values(len(BOUNDS) - 1, 72, dtype=dtype, seed=2).cuda()
        }  # fmt: skip
        g = values(BOUNDS[-1], 72, dtype=dtype, seed=1).cuda()
        found = []
        for source in (
            raw,
            PackedRows(there, case.layout.to(CUDA), dtype),
            PackedRows(there, case.layout.to(CUDA), dtype, cache),
        ):
            assert kernels.takes(source, raw.shape[1])
            out = torch.zeros(BOUNDS[-1], 72, dtype=dtype, device=CUDA)
            kernels.product(source, weight, tiles, out, **rows)
            gradient = kernels.gradient(source, g, tiles, raw.shape[1], index=index)
            found.append((out.view(torch.uint8), gradient.view(torch.uint8)))
            for schedule in range(1, len(SCHEDULES)):
                if kernels.takes(source, raw.shape[1], schedule):
                    again = torch.zeros_like(out)
                    kernels.product(source, weight, tiles, again, **rows, schedule=schedule)
                    assert torch.equal(again.view(torch.uint8), found[0][0])
        for out, gradient in found[1:]:
            assert torch.equal(out, found[0][0]) and torch.equal(gradient, found[0][1])


def test_rows_in_order_of_a_type_are_one_block():
    """A block takes a launch; those that are gathered are blocks, so that few are there at once."""
    x, bounds = torch.empty(40_000, 1, device=CUDA), [0, 39_999, 40_000]
    found = [each[:3] for each in typed_products.blocks(x, bounds, None, CUDA)]
    assert found == [(0, 0, 39_999), (1, 39_999, 40_000)]
    index = torch.arange(40_000, device=CUDA)
    gathered = [each[:3] for each in typed_products.blocks(x, bounds, index, CUDA)]
    assert len(gathered) == 1 + -(-39_999 // typed_products.BLOCK_ROWS)
