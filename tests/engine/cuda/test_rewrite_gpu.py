"""Rows packed into tables in page-locked host memory by a real GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bitslab import CompressedTable
from bitslab.engine.kernels.cuda import kernels_on
from bitslab.engine.kernels.cuda.source import Variant
from bitslab.engine.kernels.cuda.variants import all_variants
from bitslab.engine.kernels.format import NO_ROW
from bitslab.engine.kernels.rewriting import LeavingRows, OverflowPlaces
from tests.engine.kernels.rewrite_cases import KINDS, METADATA, Packed, cases_of, check
from tests.helpers import same_bits

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

VARIANTS = [v for v in all_variants() if isinstance(v, Variant) and v.file == "rewrite"]


def on_device(batch: LeavingRows, device: torch.device) -> LeavingRows:
    rows, slots, leaving, coming = (t.to(device) for t in batch[:4])
    return LeavingRows(rows, slots, leaving, coming, batch.most)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_gpu_writes_what_the_twin_writes(variant, kind):
    device = torch.device("cuda", torch.cuda.current_device())
    kernels = kernels_on(device)

    def rewrite(packed: Packed, batch: LeavingRows) -> None:
        table, places = packed.table, packed.places
        on_gpu = {name: getattr(table, name) for name in (*METADATA, "bases", "lengths")}
        on_gpu = {name: t.to(device) for name, t in on_gpu.items() if t is not None}
        free, state = places.free.to(device), places.state.to(device)
        kernels.rewrite_rows(
            replace(table, **on_gpu),
            packed.layout.to(device),
            OverflowPlaces(free, state, places.report),
            on_device(batch, device),
        )
        torch.cuda.synchronize()
        for name in METADATA:
            if name in on_gpu:
                getattr(table, name).copy_(on_gpu[name])
        places.free.copy_(free)
        places.state.copy_(state)

    for seed, case in enumerate(cases_of(variant)):
        check(case, kind, seed, rewrite, lambda t: t.pin_memory())


@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize(
    ("dtype", "dim", "n_rows", "n"),
    [
        pytest.param(torch.float32, 64, 50_000, 20_000, id="256B"),
        pytest.param(torch.bfloat16, 64, 50_000, 20_000, id="128B"),
        pytest.param(torch.float32, 4096, 3000, 1500, id="16KiB"),
        pytest.param(torch.bfloat16, 24_576, 900, 500, id="48KiB"),
    ],
)
def test_large_batches_are_whole_on_the_host(layout, dtype, dim, n_rows, n):
    """Many warps take and free places of the overflow area at once."""
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(n_rows, dim, generator=generator).to(dtype)
    table = CompressedTable.from_tensor(rows, layout, codec="ibp", progress=False)
    for number in range(12):
        writes = table.writes_by_gpu(device)
        assert writes is not None
        scale = 10.0 ** torch.randint(-20, 20, (n, 1), generator=generator)
        fresh = torch.randn(n, dim, generator=generator)
        fresh = (fresh * scale if number % 2 else fresh).to(dtype)
        leaving = torch.randperm(n_rows, generator=generator)[:n]
        leaving[::11] = NO_ROW
        kept = leaving >= 0
        slots = torch.randperm(n, generator=generator)
        rows[leaving[kept]] = fresh[slots[kept]]
        coming = torch.tensor([n, 0], device=device)
        writes.reserve(n)
        writes.write(on_device(LeavingRows(fresh, slots, leaving, coming, n), device))
        out = torch.empty(n_rows, dim, dtype=dtype, device=device)
        table.gather_some_on_gpu(torch.arange(n_rows, device=device), out)
        assert same_bits(out.cpu(), rows)
        if number % 3 == 2:
            assert same_bits(table.decoded(0, n_rows), rows)
    if layout == "compact":
        assert 0 < table.stats()["moved_rows"] < n_rows
        overflow = table._rows.overflow
        assert overflow is not None
        free = np.unique(overflow.free)
        assert len(free) + table.stats()["moved_rows"] == overflow.used
    table.close()
