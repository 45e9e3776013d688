"""The planner's CUDA kernels, run on the CPU, count like their Numba twins."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bitslab import InvariantCodec
from bitslab.engine.codecs import PlanCache
from bitslab.engine.codecs.invariant import planner
from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.candidates import CandidateTable, MaskRule
from bitslab.engine.kernels.cuda import plan
from tests.engine.kernels.plan_cases import KINDS, some_rows, some_rules
from tests.simt.module import guarded
from tests.simt.runner import simt_kernels


@pytest.mark.drawn(9)
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
    counts = guarded(cpu.count_bits(rows, 1))
    masks = kernels.agreed_masks(counts, n, table)
    assert torch.equal(masks, cpu.agreed_masks(counts, n, table))
    values = kernels.frequent_values(rows, masks, table)
    assert torch.equal(values, cpu.frequent_values(rows, masks, table))
    other = guarded(some_rows(kind, n + 9, row_bytes, seed + 5))
    for unit_bits in (32, 1):
        given = other, masks, values, table, unit_bits
        assert torch.equal(kernels.sizes_by_option(*given), cpu.sizes_by_option(*given))
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
        table = CandidateTable.of(rules, 32, 50)
        masks = kernels.agreed_masks(cpu.count_bits(rows, 4), 50, table)
        values = kernels.frequent_values(rows, masks, table)
        assert torch.equal(values, cpu.frequent_values(rows, masks, table))
        assert left_out not in {name for _, name in runner.launched}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=str)
def test_both_backends_choose_one_plan(dtype, monkeypatch):
    torch.manual_seed(0)
    numbers = torch.randn(600, 96) * 0.02 if dtype.is_floating_point else torch.arange(38400)
    rows = numbers.view(-1, 64).to(dtype).view(-1, 128 // dtype.itemsize).view(torch.uint8)
    monkeypatch.setattr(planner, "SAMPLE_BYTES", 16 << 10)
    monkeypatch.setattr(planner, "PROBE_BYTES", 3 << 10)
    monkeypatch.setattr(planner, "PROBE_ROWS", 8)

    def profile():
        sample = planner.draw_sample(rows, 0)
        plan = planner.choose_plan(sample, dtype, planner.Options(), len(rows))
        return plan, planner.fit_profile(sample, plan).to_config()

    expected = profile()
    kernels, runner = simt_kernels()
    monkeypatch.setattr(planner, "kernels_for", lambda device: kernels)
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
    monkeypatch.setattr(planner, "SAMPLE_BYTES", 64 << 10)
    monkeypatch.setattr(planner, "PROBE_BYTES", 6 << 10)
    monkeypatch.setattr(planner, "PROBE_ROWS", 8)
    plans = PlanCache()
    rows = [(torch.randn(80, 1024) * 0.02).bfloat16() for _ in range(3)]
    expected = [InvariantCodec.fit(x, plans=plans) for x in rows]
    assert plans.stats() == {"planned": 1, "kept": 2}
    kernels, runner = simt_kernels()
    monkeypatch.setattr(planner, "kernels_for", lambda device: kernels)
    monkeypatch.setattr(planner, "_waits_for", lambda device: True)
    launching = Launching()
    with launching:
        assert InvariantCodec.fit(rows[2], plans=plans) == expected[2]
    assert [name for _, name in runner.launched] == [
        "count_bits",  # of the even rows and the odd ones
        "agreed_masks",
        "frequent_by_position",
        "count_values",
        "top_values",
        "top_values",
        "sizes_by_option",
        "agreed_masks",
        "count_values",
        "top_values",
        "top_values",
    ]
    # Rows of the sample, blocks of some of them, and the counts of these.
    assert sorted(launching.names) == ["add", "cat", *["index_select"] * 3, *["zeros"] * 4]
