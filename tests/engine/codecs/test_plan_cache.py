"""Plans that tensors of a kind share."""

from __future__ import annotations

import pytest
import torch

import bitslab
from bitslab import InvariantCodec
from bitslab.engine.codecs import PlanCache
from bitslab.engine.codecs.invariant import plan_cache, planner, sample
from tests.engine.codecs.sizes import stored_bytes
from tests.helpers import random_bits, same_bits


def weights(seed: int, scale: float = 0.02, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(600, 256, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def test_tensors_of_a_kind_keep_a_plan_and_have_values_of_their_own():
    plans = PlanCache()
    rows = [weights(0), weights(1), weights(2, scale=30.0)]
    codecs = [InvariantCodec.fit(x, plans=plans) for x in rows]
    assert plans.stats() == {"planned": 1, "kept": 2}
    assert len({codec.describe() for codec in codecs}) == 1
    assert codecs[0].profile.values.tolist() != codecs[2].profile.values.tolist()
    for x, codec in zip(rows, codecs, strict=True):
        assert same_bits(codec.decode(codec.encode(x)), x)
        assert stored_bytes(codec, x) <= 1.003 * stored_bytes(InvariantCodec.fit(x), x)


@pytest.mark.parametrize("uniform", ["auto", True, False], ids=str)
def test_a_kept_plan_is_checked_and_fitted_in_one_copy_to_the_host(uniform, monkeypatch):
    plans, on_device = PlanCache(), PlanCache()
    monkeypatch.setattr(sample, "SAMPLE_BYTES", 64 << 10)  # on halves of a sample
    copies: list[int] = []
    to_host = torch.Tensor.cpu

    def counted(x: torch.Tensor) -> torch.Tensor:
        copies.append(x.numel())
        return to_host(x)

    for seed in range(3):
        expected = InvariantCodec.fit(weights(seed), plans=plans, uniform=uniform)
        copies.clear()
        with monkeypatch.context() as patch:
            patch.setattr(planner, "_waits_for", lambda device: True)
            patch.setattr(torch.Tensor, "cpu", counted)
            found = InvariantCodec.fit(weights(seed), plans=on_device, uniform=uniform)
        assert found == expected
        assert (len(copies) == 1) == (seed > 0)
    assert on_device.stats() == plans.stats() == {"planned": 1, "kept": 2}


def test_a_plan_that_was_expected_and_is_not_kept_leaves_no_trace(monkeypatch):
    plans, on_device = PlanCache(), PlanCache()
    makes = [lambda: weights(0), *OTHERS.values(), lambda: weights(7)]
    for make in makes:
        torch.manual_seed(3)
        expected = InvariantCodec.fit(make(), plans=plans)
        torch.manual_seed(3)
        with monkeypatch.context() as patch:
            patch.setattr(planner, "_waits_for", lambda device: True)
            assert InvariantCodec.fit(make(), plans=on_device) == expected
    assert on_device.stats() == plans.stats()


OTHERS = {
    "half-zero": lambda: weights(3).relu(),
    "all-zero": lambda: torch.zeros(600, 256).bfloat16(),
    "noise": lambda: random_bits(torch.bfloat16, (600, 256)),
    "whole-numbers": lambda: weights(4, scale=3.0).round(),
    "columns-of-their-own-scale": lambda: weights(5) * torch.logspace(-9, 9, 256).bfloat16(),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_rows_of_another_kind_are_planned_anew(make):
    torch.manual_seed(0)
    plans, x = PlanCache(), make()
    InvariantCodec.fit(weights(0), plans=plans)
    codec = InvariantCodec.fit(x, plans=plans)
    assert plans.stats() == {"planned": 2, "kept": 0}
    assert codec == InvariantCodec.fit(x)
    # What was planned last is what is known.
    assert InvariantCodec.fit(x, plans=plans) == codec
    assert plans.stats() == {"planned": 2, "kept": 1}


@pytest.mark.parametrize("limits", [(10**6, 9 * 10**3), (9 * 10**3, 10**6)], ids=str)
def test_a_mask_that_fits_more_than_the_rows_have_is_not_kept(limits):
    torch.manual_seed(0)
    plans = PlanCache()
    for limit in limits:
        x = torch.randint(0, limit, (900, 64))
        assert InvariantCodec.fit(x, plans=plans) == InvariantCodec.fit(x)
    assert plans.stats() == {"planned": 2, "kept": 0}


def test_plans_are_known_by_dtype_size_kind_and_options():
    plans = PlanCache()
    x = weights(0)
    for rows, options in (
        (x, {}),
        (x, {"kind": "v"}),
        (x, {"code_bits": 1}),
        (x.half(), {}),
        (x[:, :128], {}),
    ):
        InvariantCodec.fit(rows, plans=plans, **options)
    assert (len(plans), plans.stats()) == (5, {"planned": 5, "kept": 0})
    codec = InvariantCodec.fit(weights(1), plans=plans, code_bits=1)
    assert codec.profile.format.code_bits == 1
    assert plans.stats() == {"planned": 5, "kept": 1}


def test_the_plan_that_was_used_longest_ago_makes_room():
    plans = PlanCache(capacity=2)
    for kind in ("a", "b", "a", "c", "a", "b"):
        InvariantCodec.fit(weights(0), plans=plans, kind=kind)
    assert (len(plans), plans.stats()) == (2, {"planned": 4, "kept": 2})


def test_sorts_of_tensors_may_come_in_turns():
    plans = PlanCache()
    sorts = [weights(0, dtype=torch.float32), weights(1).float(), weights(2).float().relu()]
    own = [stored_bytes(InvariantCodec.fit(x), x) for x in sorts]
    for n in range(9):
        x = sorts[n % 3] * 2.0**n
        assert stored_bytes(InvariantCodec.fit(x, plans=plans), x) <= 1.003 * own[n % 3]
    assert (len(plans), plans.stats()) == (3, {"planned": 3, "kept": 6})


def test_few_plans_of_a_kind_are_known():
    plans = PlanCache()
    for bits in (8, 16, 24, 32, 40, 48):
        InvariantCodec.fit(torch.randint(0, 1 << bits, (600, 64)), plans=plans)
    assert plans.stats()["planned"] == 6 and len(plans) == plan_cache.MOST_ALIKE


def test_copies_know_what_was_known_and_are_collected():
    plans = PlanCache()
    InvariantCodec.fit(weights(0), plans=plans)
    one, other = plans.copy(), plans.copy()
    InvariantCodec.fit(weights(1), plans=one)
    sparse = [InvariantCodec.fit(weights(n).relu(), plans=other) for n in (2, 3)]
    assert sparse[0] == InvariantCodec.fit(weights(2).relu())
    assert (one.stats(), other.stats()) == ({"planned": 0, "kept": 1}, {"planned": 1, "kept": 1})
    assert (len(plans), len(one), len(other)) == (1, 1, 2)
    third = plans.copy()
    InvariantCodec.fit(weights(4).relu(), plans=third)
    for copied in (other, one, third):  # the last two know nothing that is new
        plans.update(copied)
    assert (len(plans), plans.stats()) == (2, {"planned": 3, "kept": 2})
    assert InvariantCodec.fit(weights(3).relu(), plans=plans) == sparse[1]


def test_compress_takes_plans():
    plans = PlanCache()
    for seed in range(3):
        x = weights(seed)
        assert same_bits(bitslab.compress(x, plans=plans).decompress(), x)
    assert plans.stats() == {"planned": 1, "kept": 2}


def test_wrong_arguments_are_refused():
    with pytest.raises(bitslab.ArgumentError, match="capacity: 0, accepted are 1"):
        PlanCache(0)
    with pytest.raises(bitslab.ArgumentTypeError, match="other: expected a PlanCache, got dict"):
        PlanCache().update({})  # type: ignore[arg-type]
    with pytest.raises(bitslab.ArgumentTypeError, match="plans: expected a PlanCache, got dict"):
        InvariantCodec.fit(weights(0), plans={})  # type: ignore[arg-type]
    with pytest.raises(bitslab.ArgumentTypeError, match="kind: expected a str, got 3"):
        InvariantCodec.fit(weights(0), plans=PlanCache(), kind=3)  # type: ignore[arg-type]
