"""Planning on a GPU: the codecs of the CPU, with no copy of the sample."""

from __future__ import annotations

import warnings

import pytest
import torch

import bitslab
from bitslab import InvariantCodec
from bitslab.engine.codecs import PlanCache
from bitslab.engine.kernels import cpu, kernels_for
from bitslab.engine.kernels.candidates import POSITIONAL_ROWS, CandidateTable, CandidateTables
from tests.engine.kernels.plan_cases import KINDS, some_rows, some_rules
from tests.gpu import set_sync_debug_mode
from tests.helpers import DTYPES, dtype_id, packable, random_bits, same_bits

pytestmark = pytest.mark.gpu

SHAPES = [(1, 8), (300, 64), (POSITIONAL_ROWS, 40), (64, 4096 + 4), (130, 18)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "row_bytes"), SHAPES, ids=str)
def test_gpu_counts_like_the_cpu(kind, n, row_bytes):
    rows, other = some_rows(kind, n, row_bytes), some_rows(kind, n + 500, row_bytes, seed=1)
    first = some_rows("few", 77, 40, seed=2)
    table = CandidateTable.of(some_rules(row_bytes), row_bytes, n)
    beside = CandidateTable.of(some_rules(40)[2:7], 40, 77)
    gpu = kernels_for(torch.device("cuda"))
    for each, candidates in (
        ([rows], CandidateTables.of(table)),
        ([first, rows], CandidateTables.of(beside, table)),
    ):
        here, there = (
            kernels.plan_memory([x.to(device) for x in each], candidates)
            for kernels, device in ((cpu, "cpu"), (gpu, "cuda"))
        )
        counts = [cpu.count_bits(x, 1) for x in each]
        cpu.agreed_masks(counts, candidates, here)
        gpu.agreed_masks([x.cuda() for x in counts], candidates, there)
        cpu.frequent_values(each, candidates, here)
        gpu.frequent_values([x.cuda() for x in each], candidates, there)
        for i in range(len(each)):
            assert torch.equal(there.found(i).cpu(), here.found(i))
        for unit_bits in (32, 1):
            cpu.sizes_by_option(other, candidates, here, unit_bits)
            gpu.sizes_by_option(other.cuda(), candidates, there, unit_bits)
            assert torch.equal(there.totals.cpu(), here.totals)


@pytest.mark.parametrize("make", [packable, random_bits], ids=["packable", "random"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_gpu_and_cpu_choose_the_same_codec(dtype, make):
    # More than the sample, long rows, short ones, and so few that all are counted.
    sizes = ((64, 9 << 20), (1024, 9 << 20), (32 << 10, 9 << 20), (768, 8 << 10), (16, 96 << 10))
    for row_bytes, n_bytes in sizes:
        rows = make(dtype, (n_bytes // row_bytes, row_bytes // dtype.itemsize))
        for seed in (0, 1):
            on_gpu = InvariantCodec.fit(rows.cuda(), seed=seed)
            assert on_gpu == InvariantCodec.fit(rows, seed=seed)
        few = rows[:100]
        assert on_gpu.refitted(few.cuda()) == on_gpu.refitted(few)
        assert same_bits(on_gpu.decode(on_gpu.encode(few.cuda())).cpu(), few)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.int64], ids=dtype_id)
@pytest.mark.parametrize("row_bytes", [64, 2048])
def test_a_kept_plan_waits_for_the_gpu_once(dtype, row_bytes):
    plans, shape = PlanCache(), ((8 << 20) // row_bytes, row_bytes // dtype.itemsize)
    torch.manual_seed(0)
    rows = [(torch.randn(shape) * 20).round().clamp(-128, 127).to(dtype).cuda() for _ in range(4)]
    fitted = [InvariantCodec.fit(x, plans=plans) for x in rows[:2]]
    set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            fitted.append(InvariantCodec.fit(rows[2], plans=plans))
    finally:
        set_sync_debug_mode("default")
    assert plans.stats() == {"planned": 1, "kept": 2}
    assert len([each for each in waits if "synchroniz" in str(each.message)]) == 1
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # another stream reads no numbers that were copied on this one
        fitted.append(InvariantCodec.fit(rows[3], plans=plans))
    on_cpu = PlanCache()
    assert [InvariantCodec.fit(x.cpu(), plans=on_cpu) for x in rows] == fitted


def test_plans_are_kept_alike_on_both_devices():
    on_cpu, on_gpu = PlanCache(), PlanCache()
    torch.manual_seed(0)
    for scale in (0.02, 1.0, 0.0, 0.5):
        x = (torch.randn(3000, 1024) * scale).bfloat16()
        codec = InvariantCodec.fit(x, plans=on_cpu)
        assert InvariantCodec.fit(x.cuda(), plans=on_gpu) == codec
        assert on_cpu.stats() == on_gpu.stats()
    assert on_gpu.stats()["kept"] >= 1


def test_clusters_of_rows_on_a_gpu():
    x = torch.cat([torch.randn(900, 64) * 1e-6, torch.randn(900, 64) * 1e6]).bfloat16()
    assert InvariantCodec.fit(x.cuda(), clusters=2) == InvariantCodec.fit(x, clusters=2)


def test_only_counts_and_the_profile_come_back(monkeypatch):
    copied = []
    to_cpu = torch.Tensor.cpu

    def counted(t, *args, **kwargs):
        copied.append(t.nbytes)
        return to_cpu(t, *args, **kwargs)

    x = (torch.randn(8192, 4096, device="cuda") * 0.02).bfloat16()
    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    codec = InvariantCodec.fit(x)
    monkeypatch.undo()
    assert codec.describe() == "ibp 2B k3 uniform"
    assert 2 <= len(copied) <= 4
    assert sum(copied) <= 16 << 10


def test_compress_of_a_gpu_tensor_that_is_not_contiguous():
    x = (torch.randn(300, 512, device="cuda") * 0.02).bfloat16()
    for view in (x.T, x[::2], x[:, 3:], x.view(-1)[1:-511].view(-1, 512)):
        ct = bitslab.compress(view)
        assert torch.equal(ct.decompress(), view)
        assert ct.codec == bitslab.compress(view.cpu()).codec
