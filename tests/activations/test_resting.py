"""Passes of a planner that has nothing to do: without hooks where others like them were seen."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bitslab
from bitslab.activations.hooks import SavedTensorHooks
from bitslab.activations.resting import NEAR_SEEN, SEEN_EVERY, kind_of
from tests.activations.test_planned import KEPT_BYTES, ROWS, blocks, steps

pytestmark = pytest.mark.usefixtures("one_thread", "quick_measuring", "holds")
PLANNED = 5  # passes until the plan is there, and one with hooks behind it


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each tensor that hooks were given."""
    found: list[int] = []
    real = SavedTensorHooks.pack

    def pack(self: SavedTensorHooks, t: torch.Tensor) -> Any:
        found.append(t.shape[0])
        return real(self, t)

    monkeypatch.setattr(SavedTensorHooks, "pack", pack)
    return found


def idle(model: nn.Module, **options: Any) -> bitslab.ActivationOffload:
    options = options or {"memory": "1GiB"}
    offload = bitslab.offload_activations(model, min_bytes=1024, **options)
    list(steps(model, PLANNED))
    assert offload.plan is not None and offload.plan.declined
    return offload


def test_most_passes_have_no_hooks_and_the_same_gradients(seen: list[int]) -> None:
    model, n = blocks(), 2 * sum(SEEN_EVERY)
    idle(model)
    plain = blocks()
    list(steps(plain, PLANNED))
    seen.clear()
    passes: list[int] = []
    expected = list(steps(plain, n))
    found = list(steps(model, n, between=lambda _: passes.append(len(seen))))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    hooked = sum(a < b for a, b in zip([0, *passes], passes, strict=False))
    assert hooked == 4


def test_a_larger_batch_is_seen_and_planned(seen: list[int]) -> None:
    model = blocks()
    # The batch that is planned takes half of it, and the larger one twice.
    offload = idle(model, memory=2 * KEPT_BYTES)
    seen.clear()
    list(steps(model, 3))
    assert not seen
    list(steps(model, 16, rows=lambda _: 4 * ROWS))
    assert 4 * ROWS in seen
    assert offload.plan is not None and not offload.plan.declined
    seen.clear()
    list(steps(model, 2, rows=lambda _: 4 * ROWS))
    assert seen


def test_of_a_plan_that_hardly_fits_two_of_five_passes_have_hooks(seen: list[int]) -> None:
    model = blocks()
    idle(model, memory=int(1.2 * KEPT_BYTES))
    hooked = []
    for _ in range(NEAR_SEEN + 10):
        seen.clear()
        list(steps(model, 1))
        hooked.append(bool(seen))
    until_known = hooked.index(False)
    assert until_known < NEAR_SEEN and all(hooked[:until_known])
    turns = hooked[until_known:]
    assert turns == ([False, True, False, False, True] * 3)[: len(turns)]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("memory", [1.2, 8.0], ids=["near", "far"])
@pytest.mark.parametrize("of_a_step", [2, 3, 4])
def test_each_micro_batch_of_a_step_is_seen(of_a_step: int, memory: float, seen: list[int]) -> None:
    """Of equal inputs: the model may take another branch in one of them."""
    model = blocks()
    idle(model, memory=int(memory * KEPT_BYTES))
    hooked = set()
    for i in range(of_a_step * 2 * sum(SEEN_EVERY)):
        seen.clear()
        model(torch.ones(ROWS, 32)).sum().backward()
        if seen and i > NEAR_SEEN:
            hooked.add(i % of_a_step)
    assert hooked == set(range(of_a_step))


def test_a_larger_batch_that_does_not_fit_is_planned_at_once(seen: list[int]) -> None:
    model = blocks()
    offload = idle(model, memory=int(1.2 * KEPT_BYTES))
    list(steps(model, NEAR_SEEN + 8))
    seen.clear()
    list(steps(model, 1, rows=lambda _: 2 * ROWS))
    assert 2 * ROWS in seen
    list(steps(model, 16, rows=lambda _: 2 * ROWS))
    assert offload.plan is not None and not offload.plan.declined


@pytest.mark.parametrize("first", [True, False], ids=["from-the-first-pass", "later"])
def test_a_checkpoint_around_the_model_is_computed_again_as_the_first_time(first: bool) -> None:
    """It counts what its own hooks are given, which see nothing while others are active."""
    model, plain = blocks(), blocks()
    bitslab.offload_activations(model, min_bytes=1024, memory="1GiB")
    x = torch.randn(ROWS, 32)

    def step(model: nn.Module, around: bool) -> list[torch.Tensor]:
        given = x.clone().requires_grad_()
        y = checkpoint(model, given, use_reentrant=False) if around else model(given)
        y.square().sum().backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found

    for i in range(2 * PLANNED):
        around = first or i >= PLANNED
        for a, b in zip(step(model, around), step(plain, around), strict=True):
            assert torch.equal(a, b)


def changed(name: str) -> Callable[[torch.Tensor], tuple[Any, ...]]:
    ways: dict[str, Callable[[torch.Tensor], tuple[Any, ...]]] = {
        "rows": lambda t: (t[:2],),
        "dtype": lambda t: (t.double(),),
        "gradient": lambda t: (t.clone().requires_grad_(),),
        "one more": lambda t: (t, t),
        "a flag": lambda t: (t, True),
        "a name": lambda t: ({"x": t},),
    }
    return ways[name]


@pytest.mark.parametrize("way", ["rows", "dtype", "gradient", "one more", "a flag", "a name"])
def test_other_inputs_are_of_another_kind(way: str) -> None:
    t = torch.ones(4, 3)
    assert kind_of(t) == kind_of(torch.zeros(4, 3)) is not None
    assert kind_of(t, 0.5) == kind_of(t, 0.25)
    assert kind_of(*changed(way)(t)) not in (None, kind_of(t))


class Other(torch.Tensor):
    """A tensor of some library."""


def test_unknown_inputs_have_no_kind() -> None:
    class Batch:
        pass

    assert kind_of(torch.ones(2), [Batch()]) is None
    assert kind_of(torch.Tensor._make_subclass(Other, torch.ones(2))) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a prototype
        assert kind_of(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])) is None
    assert kind_of(torch.ones(2, 2).to_sparse()) is None
    assert kind_of(list(range(1000))) is None

    class Name(str):
        __hash__ = None  # type: ignore[assignment]

    assert kind_of(Name("x")) is None


@pytest.mark.drawn(1)
@pytest.mark.parametrize("every", [3, 8, 10, 16])
def test_a_larger_batch_that_is_rare_is_never_left_to_torch(every: int, seen: list[int]) -> None:
    model = blocks()
    offload = idle(model, memory=2 * KEPT_BYTES)
    hooked = 0
    for i in range(20 * every):
        large = i % every == every - 1
        seen.clear()
        list(steps(model, 1, rows=lambda _: 4 * ROWS if large else ROWS))  # noqa: B023
        hooked += large and bool(seen)
        if not offload.plan.declined:  # type: ignore[union-attr]
            break
    assert hooked == (i + 1) // every


def test_inputs_of_two_kinds_in_turns_are_both_seen(seen: list[int]) -> None:
    model = blocks()
    idle(model)
    for rows in (ROWS, ROWS // 2):
        list(steps(model, 1, rows=lambda _: rows))  # noqa: B023
    found = []
    for i in range(2 * sum(SEEN_EVERY)):
        seen.clear()
        list(steps(model, 1, rows=lambda _: ROWS // (1 + i % 2)))  # noqa: B023
        found.append(bool(seen))
    assert sum(found[::2]) == sum(found[1::2]) == 2


@pytest.mark.parametrize("way", ["hooks-off", "error"])
def test_what_no_hook_has_seen_is_not_known(way: str, seen: list[int]) -> None:
    model = blocks()
    idle(model)
    x = torch.randn(2 * ROWS, 32)
    if way == "hooks-off":
        with torch.autograd.graph.disable_saved_tensors_hooks("on purpose"):
            model(x).square().sum().backward()
    else:
        handle = model.get_submodule("0").register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
    seen.clear()
    model(x).square().sum().backward()
    assert seen


def test_layers_that_are_trained_from_now_on_are_seen(seen: list[int]) -> None:
    model = blocks()
    model.get_submodule("0").requires_grad_(False)
    idle(model)
    seen.clear()
    list(steps(model, 1))
    assert not seen
    model.get_submodule("0").requires_grad_(True)
    list(steps(model, 1))
    assert seen
