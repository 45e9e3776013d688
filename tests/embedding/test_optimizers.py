"""Optimizers of cached rows: what is right is followed, what is not is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bitslab import ArgumentError, ArgumentTypeError
from bitslab.embedding import CachedRows, EvictionStrategy
from tests.embedding.support import OPTIMIZERS, Pair
from tests.helpers import dtype_id, same_bits

EACH = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def batches(seed: int, count: int, n_rows: int = 40) -> list[list[int]]:
    """Return batches of 1 to 20 ids, some of them often."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 21, (count,), generator=generator).tolist()
    drawn = [torch.rand(size, generator=generator) ** 2 * n_rows for size in sizes]
    return [ids.long().tolist() for ids in drawn]


@pytest.mark.pairwise
@EACH
@pytest.mark.parametrize("evict", list(EvictionStrategy), ids=lambda evict: evict.name)
@pytest.mark.parametrize("cache", ["rows", "packed"])
def test_many_steps_give_what_a_whole_table_gives(optimizer, evict, cache):
    pair = Pair(optimizer=optimizer, evict=evict, cache=cache, pinned_ids=(3,))
    for ids in batches(1, 12):
        pair.train(ids)
    pair.check()


@EACH
@pytest.mark.parametrize(
    ("n_rows", "cache_rows", "dim"),
    [(1, 1, 1), (1, 1, 4), (40, 1, 3), (40, 40, 4), (40, 39, 1)],
    ids=["one-number", "one-row", "one-slot", "all-resident", "all-but-one"],
)
def test_the_smallest_and_the_largest_caches(optimizer, n_rows, cache_rows, dim):
    pair = Pair(n_rows, cache_rows, dim, optimizer)
    for ids in batches(2, 20, n_rows):
        pair.train(ids)
    pair.check()


@EACH
def test_a_checkpoint_of_the_state_goes_to_a_whole_table_and_back(optimizer):
    pair = Pair(optimizer=optimizer)
    for ids in batches(3, 12):
        pair.train(ids)
    theirs, ours = (each.state_dict() for each in pair.optimizers)
    pair.optimizers[0].load_state_dict(ours)
    pair.optimizers[1].load_state_dict(theirs)
    for ids in batches(4, 12):
        pair.train(ids)
    pair.check()


@pytest.mark.parametrize("optimizer", ["adagrad", "sparse-adam"])
@pytest.mark.parametrize("how", ["cleared", "loaded"])
def test_an_optimizer_that_begins_anew_forgets_rows_that_are_not_resident_too(optimizer, how):
    pair = Pair(optimizer=optimizer)
    kind: Any = type(pair.optimizers[0])
    fresh = [kind([p], lr=0.1).state_dict() for p in (pair.plain, torch.zeros(40, 4))]
    for ids in batches(5, 8):
        pair.train(ids)
    for mine, state in zip(pair.optimizers, fresh, strict=True):
        if how == "loaded" or optimizer == "adagrad":  # it makes its state when it is made only
            mine.load_state_dict(state)
        else:
            mine.state.clear()
    for ids in batches(6, 8):
        pair.train(ids)
    pair.check()


def test_an_optimizer_that_was_made_while_the_parameter_was_larger():
    pair = Pair()
    pair.backward(range(20))
    pair.step()
    assert pair.rows.parameter.shape[0] > 8
    pair.optimizers = [
        torch.optim.Adagrad([p], lr=0.1, initial_accumulator_value=0.5)
        for p in (pair.plain, pair.rows.parameter)
    ]
    for ids in batches(7, 10):
        pair.train(ids)
    pair.check()


def test_two_optimizers_of_one_table_take_turns():
    pair = Pair(optimizer="adagrad")
    others: Any = [torch.optim.Adagrad([p], lr=0.5) for p in (pair.plain, pair.rows.parameter)]
    for n, ids in enumerate(batches(8, 20)):
        pair.train(ids)
        if n % 3 == 0:
            pair.optimizers, others = others, pair.optimizers
    pair.check()
    pair.optimizers = others
    pair.check()


def test_a_step_knows_when_parameters_were_replaced_in_the_list_of_a_group():
    pair = Pair(optimizer="adagrad")
    pair.train((1, 2), (3, 4))
    optimizer = pair.optimizers[1]
    group = optimizer.param_groups[0]
    (parameter,) = group["params"]
    group["params"][0] = other = torch.nn.Parameter(torch.zeros(3))
    group["weight_decay"], other.grad = 0.1, torch.ones(3)
    # Adagrad of torch 2.8 makes its state with the optimizer alone.
    optimizer.state[other] = {"step": torch.tensor(0.0), "sum": torch.zeros(3)}
    optimizer.step()  # not with these rows
    assert other.all()
    group["params"][0] = parameter
    pair.backward((2, 3, 30))
    with pytest.raises(ArgumentError, match="weight_decay"):
        optimizer.step()
    group["weight_decay"] = 0
    pair.step()
    optimizer.add_param_group({"params": [other], "weight_decay": 0.1})
    pair.train((3, 31), (30, 9))
    assert same_bits(pair.plain, pair.rows.whole())


@pytest.mark.parametrize("optimizer", ["adagrad", "adagrad-sparse", "sparse-adam"])
def test_a_closure_that_looks_rows_up(optimizer):
    pair = Pair(optimizer=optimizer)
    for ids in batches(9, 10):
        losses = iter((0, 1))
        found: list[Any] = []

        def closure(ids=ids, losses=losses, found=found):
            number = next(losses)
            if not number:
                pair.zero_grad()
                found[:] = pair.loss(ids)
            found[number].backward()
            return found[number]

        for optimizer in pair.optimizers:
            optimizer.step(closure)
    pair.check()


def refused(kind, **options):
    return pytest.param(kind, options, id=f"{kind.__name__}-{'-'.join(options) or 'plain'}")


KNOWN_TO_MOVE_ROWS = [
    refused(torch.optim.SGD, momentum=0.9),
    refused(torch.optim.SGD, weight_decay=0.1),
    refused(torch.optim.Adagrad, weight_decay=0.1),
    refused(torch.optim.Adam),
    refused(torch.optim.AdamW),
    refused(torch.optim.Adamax),
    refused(torch.optim.RMSprop),
    refused(torch.optim.LBFGS),
]


@pytest.mark.parametrize(("kind", "options"), KNOWN_TO_MOVE_ROWS)
def test_what_is_known_to_move_other_rows_is_refused_when_it_is_made(kind, options):
    pair = Pair()
    with pytest.raises(ArgumentError, match=f"optimizer: .*{kind.__name__} .*; use "):
        kind([pair.rows.parameter], lr=0.1, **options)
    # As is a group that comes later; the optimizer is what it was.
    other = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([other], lr=0.1, **options)
    if kind is not torch.optim.LBFGS:  # which has one group
        with pytest.raises(ArgumentError, match=f"optimizer: .*{kind.__name__} .*; use "):
            optimizer.add_param_group({"params": pair.rows.parameter})
    assert [p for group in optimizer.param_groups for p in group["params"]] == [other]


@pytest.mark.parametrize(("kind", "options"), KNOWN_TO_MOVE_ROWS)
def test_rows_that_require_no_gradient_may_be_among_parameters_of_any_optimizer(kind, options):
    pair = Pair()
    other = torch.nn.Parameter(torch.ones(2))
    pair.rows.parameter.requires_grad_(False)
    optimizer = kind([pair.rows.parameter, other], lr=0.1, **options)
    before = pair.rows.whole()

    def closure():
        optimizer.zero_grad()
        loss = other.square().sum()
        loss.backward()
        return loss

    if kind is torch.optim.LBFGS:
        return  # its steps join all parameters to one
    optimizer.step(closure)
    assert (other != 1).all()
    assert same_bits(pair.rows.whole(), before)
    pair.rows.parameter.requires_grad_(True)  # the step raises for rows that were unfrozen by hand
    pair.backward(range(20))
    with pytest.raises(ArgumentError, match=f"optimizer: .*{kind.__name__} .*; use "):
        optimizer.step()
    assert same_bits(pair.rows.whole(), before)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        refused(torch.optim.Adagrad, eps=0.0),
        refused(torch.optim.Adagrad, eps=0.0, initial_accumulator_value=1e-50),
        refused(torch.optim.SGD, maximize=True),
        refused(torch.optim.Adagrad, maximize=True),
    ],
)
def test_what_moves_other_rows_is_refused_and_changes_nothing(kind, options):
    pair = Pair()
    optimizer = kind([pair.rows.parameter], lr=0.1, **options)
    pair.backward(range(20))
    before = pair.rows.whole()
    with pytest.raises(ArgumentError, match=f"optimizer: .*{kind.__name__} .*; use "):
        optimizer.step(lambda: 0)
    with pytest.raises(ArgumentError, match="attach_optimizer"):
        pair.rows.attach_optimizer(optimizer)
    assert same_bits(pair.rows.whole(), before)
    pair.step()
    pair.check()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_uphill_with_dense_gradients_is_refused_with_what_to_use_instead(kind):
    pair = Pair()
    optimizer = kind([pair.rows.parameter], lr=0.1, maximize=True)
    pair.rows.attach_optimizer(optimizer)  # the gradients may be sparse
    before = pair.rows.whole()

    def closure():
        optimizer.zero_grad()
        loss = pair.loss(range(20))[1]
        loss.backward()
        return loss

    says = "maximize=True.*-0.0.*where maximize is refused sparse=True or the negated loss"
    with pytest.raises(ArgumentError, match=says):
        optimizer.step(closure)
    assert same_bits(pair.rows.whole(), before)
    with pytest.raises(ArgumentError, match=says):
        optimizer.step()
    assert same_bits(pair.rows.whole(), before)


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", -0.1), ("lr", torch.tensor(math.inf)), ("lr_decay", math.nan), ("eps", -1e-3)],
    ids=str,
)
def test_numbers_that_torch_looks_at_only_when_it_makes_an_optimizer(name, value):
    pair = Pair(optimizer="adagrad")
    pair.train(range(20))
    pair.backward(range(20))
    before = pair.rows.whole()
    pair.optimizers[1].param_groups[0][name] = value
    with pytest.raises(ArgumentError, match=f"optimizer: .*Adagrad has {name}="):
        pair.optimizers[1].step()
    assert same_bits(pair.rows.whole(), before)
    pair.optimizers[1].param_groups[0][name] = pair.optimizers[0].param_groups[0][name]
    pair.step()
    pair.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_fused_steps_of_short_numbers_on_a_cpu_are_refused(kind, dtype):
    rows = CachedRows.from_tensor(torch.ones(20, 4, dtype=dtype), cache_rows=5, device="cpu")
    weight, index = rows.lookup(torch.tensor([1, 2]), train=True)
    weight[index].sum().backward()
    with pytest.raises(ArgumentError, match=f"has fused=True, .* {dtype} on a CPU"):
        kind([rows.parameter], fused=True).step()
    assert (rows.whole() == 1).all()


# Rows by their bits

SGD, ADAGRAD, SPARSE_ADAM = torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam
NUMBERS: list[tuple[Any, bool, dict[str, Any]]] = [
    (SGD, False, {}),
    (SGD, False, {"lr": 0.0}),
    (SGD, False, {"lr": torch.tensor(0.5)}),
    (SGD, False, {"foreach": True}),
    (SGD, False, {"fused": True}),
    (SGD, False, {"dampening": 0.5}),
    (ADAGRAD, False, {}),
    (ADAGRAD, False, {"lr": 0.0}),
    (ADAGRAD, False, {"lr": torch.tensor(0.5)}),
    (ADAGRAD, False, {"foreach": False, "lr_decay": 0.3}),
    (ADAGRAD, False, {"foreach": True, "lr_decay": 0.3}),
    (ADAGRAD, False, {"fused": True, "lr_decay": 0.3}),
    (ADAGRAD, False, {"initial_accumulator_value": 0.3, "eps": 0}),
    (ADAGRAD, False, {"initial_accumulator_value": 1e-4, "foreach": True}),
    (SGD, True, {}),
    (SGD, True, {"maximize": True}),
    (SGD, True, {"foreach": True, "lr": torch.tensor(0.5)}),
    (ADAGRAD, True, {}),
    (ADAGRAD, True, {"maximize": True}),
    (ADAGRAD, True, {"eps": 0}),
    (ADAGRAD, True, {"foreach": True, "lr_decay": 0.3, "initial_accumulator_value": 0.3}),
    (SPARSE_ADAM, True, {}),
    (SPARSE_ADAM, True, {"maximize": True}),
    (SPARSE_ADAM, True, {"betas": (0.5, 0.7), "eps": 1e-3}),
]


def odd_numbers(dtype: torch.dtype, nans: bool) -> torch.Tensor:
    """Return zeros of both signs, the smallest numbers, infinity, and quiet NaNs that differ."""
    integer = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    plain = torch.tensor([0.0, 1.0, 0.125, math.inf], dtype=dtype)
    smallest = torch.tensor([1, 77], dtype=integer).view(dtype)
    quiet = torch.full((2,), math.nan, dtype=dtype).view(integer) + torch.tensor([5, 9]).to(integer)
    found = torch.cat([plain, smallest, *([quiet.view(dtype)] if nans else [])])
    return torch.cat([found, -found])


CASES = [
    pytest.param(
        *case,
        dtype,
        id="-".join((case[0].__name__, "sparse" * case[1], *case[2], dtype_id(dtype))),
    )
    for case in NUMBERS
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    if dtype is torch.float32 or "fused" not in case[2]  # which is refused
]


@pytest.mark.drawn(24)
@pytest.mark.parametrize(("kind", "sparse", "options", "dtype"), CASES)
def test_every_bit_of_every_row_is_that_of_a_whole_table(kind, sparse, options, dtype):
    if kind is ADAGRAD:
        options = {"eps": 1e-4} | options
    # torch sets the bits of a NaN of bfloat16 where a gradient is dense.
    pool = odd_numbers(dtype, nans=sparse or dtype is not torch.bfloat16)
    factors = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, 2.0], dtype=dtype)
    generator = torch.Generator().manual_seed(len(options))

    def draw(values: torch.Tensor, *shape: int) -> torch.Tensor:
        return values[torch.randint(len(values), shape, generator=generator)].clone()

    # As torch rounds the last elements of short numbers otherwise, multiples of 64.
    weight = draw(pool, 64, 4)
    plain = torch.nn.Parameter(weight.clone())
    rows = CachedRows.from_tensor(weight, cache_rows=16, device="cpu")
    theirs, ours = (kind([p], **{"lr": 0.25, **options}) for p in (plain, rows.parameter))
    for _ in range(8):
        ids = torch.randperm(64, generator=generator)[:8]
        ids[:2] = ids[2]
        factor = draw(factors, 8, 4)
        (F.embedding(ids, plain, sparse=sparse) * factor).sum().backward()
        found, index = rows.lookup(ids, train=True, sparse=sparse)
        (F.embedding(index, found, sparse=sparse) * factor).sum().backward()
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
        assert same_bits(rows.whole(), plain.detach())
    states = (optimizer.state_dict()["state"].get(0, {}) for optimizer in (theirs, ours))
    for (name, value), found in zip(*(s.items() for s in states), strict=True):
        assert name == found[0]
        assert same_bits(torch.as_tensor(found[1]), torch.as_tensor(value)), name


def test_the_default_device_of_torch_is_not_that_of_state():
    rows = CachedRows.from_tensor(torch.randn(20, 4), cache_rows=5, device="cpu")
    optimizer = ADAGRAD([rows.parameter], initial_accumulator_value=0.5)
    with torch.device("meta"):
        for ids in (torch.arange(4, device="cpu"), torch.arange(10, 14, device="cpu")):
            found, index = rows.lookup(ids, train=True)
            found[index].backward(torch.ones(4, 4, device="cpu"))
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()["state"][0]["sum"]
    assert state.device.type == "cpu"
    assert state[:4].eq(1.5).all() and state[4:10].eq(0.5).all()


def test_a_signalling_nan_that_is_not_looked_up_is_kept():
    weight = torch.full((20, 4), 0x7F800001, dtype=torch.int32).view(torch.float32)
    rows = CachedRows.from_tensor(weight, cache_rows=5, device="cpu")
    optimizer = torch.optim.SGD([rows.parameter], lr=0.1)
    found, index = rows.lookup(torch.tensor([3]), train=True)
    found[index].sum().backward()
    optimizer.step()
    away = torch.arange(20) >= 5
    assert same_bits(rows.whole()[away], weight[away])


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_adagrad_whose_eps_is_nothing_in_the_rows_dtype(sparse):
    weight = torch.randn(20, 4).half()
    rows = CachedRows.from_tensor(weight, cache_rows=5, device="cpu")
    optimizer = torch.optim.Adagrad([rows.parameter], lr=0.1)
    found, index = rows.lookup(torch.tensor([1, 2]), train=True, sparse=sparse)
    torch.nn.functional.embedding(index, found, sparse=sparse).sum().backward()
    if sparse:
        optimizer.step()
        assert not rows.whole().isnan().any()
        return
    with pytest.raises(ArgumentError, match="which is 0 in torch.float16"):
        optimizer.step()


class Rowwise(torch.optim.Optimizer):
    """One number of state for each row, as FBGEMM's row-wise Adagrad has."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if "sum" not in self.state[p]:
                self.state[p]["sum"] = torch.zeros(p.shape[0])
            total = self.state[p]["sum"]
            total += p.grad.pow(2).mean(1)
            p -= 0.1 * p.grad / (total.sqrt() + 1e-6)[:, None]


@pytest.mark.parametrize("early", [True, False], ids=["before-training", "in-training"])
def test_an_optimizer_of_ones_own_that_the_caller_vouches_for(early):
    pair = Pair()
    if not early:
        for ids in batches(10, 5):
            pair.train(ids)
    pair.optimizers = [Rowwise([p]) for p in (pair.plain, pair.rows.parameter)]
    pair.rows.attach_optimizer(pair.optimizers[1], row_wise=True)
    for ids in batches(11, 20):
        pair.train(ids)
    pair.check()


def test_attaching_what_is_no_optimizer_of_these_rows():
    pair = Pair()
    with pytest.raises(ArgumentTypeError, match="optimizer: expected a torch"):
        pair.rows.attach_optimizer(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="does not have the parameter"):
        pair.rows.attach_optimizer(pair.optimizers[0])
