"""The planner's CUDA kernels, run on the CPU, count like their Numba twins."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bitslab import InvariantCodec
from bitslab.engine.codecs import PlanCache
from bitslab.engine.codecs.invariant import learning, planner
from bitslab.engine.codecs.invariant import sample as samples
from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.candidates import CandidateTable, CandidateTables, MaskRule
from bitslab.engine.kernels.cuda import plan
from tests.engine.kernels.plan_cases import KINDS, some_rows, some_rules
from tests.simt.module import guarded
from tests.simt.runner import simt_kernels


@pytest.mark.drawn(5)
@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "row_bytes"), [(1, 8), (45, 24), (33, 18), (3, 264)], ids=str)
@pytest.mark.parametrize("slice_places", [256, 4096], ids=["many-slices", "one-slice"])
@pytest.mark.parametrize("seed", [0, 1])
def test_plan_kernels_count_like_their_twins(kind, n, row_bytes, slice_places, seed, monkeypatch):
    monkeypatch.setattr(plan, "SLICE_PLACES", slice_places)
    kernels, runner = simt_kernels(seed)
    rows, rules = guarded(some_rows(kind, n, row_bytes, seed)), some_rules(row_bytes)
    if row_bytes > 256:  # more places than a block has threads, for which some rules will do
        rules = rules[1::2]
    table = CandidateTable.of(rules, row_bytes, n)
    first, beside = (
        guarded(some_rows("few", 37, 16, seed)),
        CandidateTable.of(some_rules(16), 16, 37),
    )
    other = guarded(some_rows(kind, n + 9, row_bytes, seed + 5))
    alone = [rows], CandidateTables.of(table)
    both = [first, rows], CandidateTables.of(beside, table)
    for each, candidates in (alone, both)[seed : seed + 1] if row_bytes > 256 else (alone, both):
        counts = [guarded(cpu.count_bits(x, 1)) for x in each]
        here, there = (backend.plan_memory(each, candidates) for backend in (cpu, kernels))
        for backend, memory in ((cpu, here), (kernels, there)):
            backend.agreed_masks(counts, candidates, memory)
            backend.frequent_values(each, candidates, memory)
        for i in range(len(each)):
            assert torch.equal(there.found(i), here.found(i))
        for unit_bits in (32, 1):
            for backend, memory in ((cpu, here), (kernels, there)):
                backend.sizes_by_option(other, candidates, memory, unit_bits)
            assert torch.equal(there.totals, here.totals)
    assert {name for _, name in runner.launched} >= {
        "agreed_masks",
        "frequent_by_position",
        "count_values",
        "top_values",
        "sizes_by_option",
    }


def test_positional_or_uniform_rules_alone_are_counted():
    rows = some_rows("few", 50, 32)
    kernels, runner = simt_kernels()
    for uniform, left_out in ((False, "count_values"), (True, "frequent_by_position")):
        runner.launched.clear()
        rules = [MaskRule(4, uniform, 0.75, 0), MaskRule(2, uniform, None, 0xFF80)]
        candidates = CandidateTables.of(CandidateTable.of(rules, 32, 50))
        here, there = (backend.plan_memory([rows], candidates) for backend in (cpu, kernels))
        for backend, memory in ((cpu, here), (kernels, there)):
            backend.agreed_masks([cpu.count_bits(rows, 4)], candidates, memory)
            backend.frequent_values([rows], candidates, memory)
        assert torch.equal(there.found(0), here.found(0))
        assert left_out not in {name for _, name in runner.launched}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=str)
def test_both_backends_choose_one_plan(dtype, monkeypatch):
    torch.manual_seed(0)
    numbers = torch.randn(600, 96) * 0.02 if dtype.is_floating_point else torch.arange(38400)
    rows = numbers.view(-1, 64).to(dtype).view(-1, 128 // dtype.itemsize).view(torch.uint8)
    monkeypatch.setattr(samples, "SAMPLE_BYTES", 16 << 10)
    monkeypatch.setattr(samples, "PROBE_BYTES", 3 << 10)
    monkeypatch.setattr(samples, "PROBE_ROWS", 8)

    def profile():
        sample = samples.draw_sample(rows, 0)
        plan = planner.choose_plan(sample, dtype, planner.Options(), len(rows))
        return plan, planner.fit_profile(sample, plan).to_config()

    expected = profile()
    kernels, runner = simt_kernels()
    for module in (samples, learning, planner):
        monkeypatch.setattr(module, "kernels_for", lambda device: kernels)
    assert profile() == expected
    assert len(runner.launched) >= 12


class Launching(TorchDispatchMode):
    """Counts operations of torch that a GPU launches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("index_select", "cat", "zeros", "full", "add", "clone", "copy_", "_to_copy"):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def test_a_known_plan_is_checked_in_few_launches(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(samples, "SAMPLE_BYTES", 64 << 10)
    monkeypatch.setattr(samples, "PROBE_BYTES", 6 << 10)
    monkeypatch.setattr(samples, "PROBE_ROWS", 8)
    plans = PlanCache()
    rows = [(torch.randn(80, 1024) * 0.02).bfloat16() for _ in range(3)]
    expected = [InvariantCodec.fit(x, plans=plans) for x in rows]
    assert plans.stats() == {"planned": 1, "kept": 2}
    kernels, runner = simt_kernels()
    for module in (samples, learning, planner):
        monkeypatch.setattr(module, "kernels_for", lambda device: kernels)
    monkeypatch.setattr(planner, "_waits_for", lambda device: True)
    launching = Launching()
    with launching:
        assert InvariantCodec.fit(rows[2], plans=plans) == expected[2]
    # What the probe learns, and what is fitted to the sample, in the same launches.
    assert [name for _, name in runner.launched] == [
        "count_bits",  # of the even rows and the odd ones
        "agreed_masks",
        "frequent_by_position",
        "count_values",
        "top_values",
        "sizes_by_option",
    ]
    # Rows of the sample, blocks of some of them, and the counts of these.
    assert sorted(launching.names) == ["add", *["index_select"] * 3, *["zeros"] * 2]
