"""Steps of an optimizer do to a cached table what they do to a plain one, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, SparseAdam

from bitslab import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.integrations.embedding import CachedEmbedding, CachedEmbeddingBag, EvictionStrategy
from tests.helpers import dtype_id
from tests.integrations.embedding.support import (
    D,
    N,
    Optimizers,
    assert_same,
    bags,
    batches,
    lookup,
    loss_of,
    singles,
    step,
    table,
    train_both,
    whole,
)

# torch's own Adagrad says this of its own sparse tensors, once a process.

DENSE: dict[str, Optimizers] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "adagrad": lambda p: Adagrad(p, lr=0.1),
    "adagrad-with-options": lambda p: Adagrad(
        p, lr=0.1, lr_decay=0.2, initial_accumulator_value=0.3, eps=1e-4
    ),
    "adagrad-one-by-one": lambda p: Adagrad(p, lr=0.1, foreach=False),
}
SPARSE: dict[str, Optimizers] = {
    "sgd": DENSE["sgd"],
    "adagrad": DENSE["adagrad"],
    "adagrad-with-options": lambda p: Adagrad(
        p, lr=0.1, lr_decay=0.2, initial_accumulator_value=0.3
    ),
    "sparse-adam": lambda p: SparseAdam(list(p), lr=0.01),
    "sparse-adam-with-options": lambda p: SparseAdam(list(p), lr=0.01, betas=(0.5, 0.7), eps=1e-4),
    "sgd-uphill": lambda p: SGD(p, lr=0.1, maximize=True),
    "adagrad-uphill": lambda p: Adagrad(p, lr=0.1, maximize=True),
    "sparse-adam-uphill": lambda p: SparseAdam(list(p), lr=0.01, maximize=True),
}
CASES = [(name, False) for name in DENSE] + [(name, True) for name in SPARSE]
CACHES = {"one-row": 0.001, "fewer-than-a-batch": 0.1, "some": 0.4, "all": 1.0}


def of(name: str, sparse: bool) -> Optimizers:
    return (SPARSE if sparse else DENSE)[name]


@pytest.mark.drawn(24)
@pytest.mark.pairwise
@pytest.mark.parametrize("cache_ratio", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize(("name", "sparse"), CASES, ids=[f"{n}-{s}" for n, s in CASES])
@pytest.mark.parametrize("make", [bags, singles])
def test_every_optimizer_with_every_size_of_cache(make, name, sparse, cache_ratio):
    plain, ours = make(sparse=sparse, cache_ratio=cache_ratio)
    train_both(plain, ours, of(name, sparse), batches(12))
    if 0.1 < cache_ratio < 1:
        assert ours.stats()["written_back"] > 0


@pytest.mark.parametrize("strategy", EvictionStrategy, ids=lambda s: s.name)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_every_mode_and_strategy(mode, strategy):
    counts = torch.arange(N).flip(0)
    plain, ours = bags(
        mode=mode, padding_idx=2, evict_strategy=strategy, ids_freq_mapping=counts, cache_ratio=0.4
    )
    train_both(plain, ours, DENSE["adagrad"], batches(20))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("name", ["sgd", "adagrad-with-options"])
def test_other_dtypes(dtype, name):
    # 64 and 16 rows: torch itself rounds the last elements of a tensor of 16 bits otherwise than
    # the first, up to the next multiple of 64 elements.
    plain, ours = singles(dtype, cache_ratio=0.25, n=64)
    train_both(plain, ours, DENSE[name], batches(12, n=64))


@pytest.mark.parametrize(
    "options",
    [
        {"max_norm": 0.15},
        {"max_norm": 0.15, "sparse": True},
        {"padding_idx": 0},
        {"padding_idx": 0, "sparse": True},
        {"scale_grad_by_freq": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [bags, singles])
def test_options_of_modules(make, options):
    plain, ours = make(cache_ratio=0.3, **options)
    train_both(plain, ours, DENSE["adagrad"], batches(15))


def test_rows_packed_anew_as_training_moves_them(monkeypatch):
    monkeypatch.setattr("bitslab.embedding.store.REPACK_BYTES", 1 << 10)
    before = torch.ones(400, D)
    plain = torch.nn.Embedding(400, D, _weight=before.clone())
    ours = CachedEmbedding.from_module(plain, cache_ratio=0.1)
    packed_as = ours.stats()["codec"]
    train_both(plain, ours, DENSE["sgd"], batches(60, n_ids=30, n=400))
    ours.flush()
    stats = ours.stats()
    assert stats["overflow_bytes"] <= max(1 << 10, stats["host_bytes"] / 4)
    assert stats["codec"] != packed_as


def test_learning_rates_that_change():
    plain, ours = bags(cache_ratio=0.4)
    optimizers = [SGD(m.parameters(), lr=0.5) for m in (plain, ours)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    for ids in batches(8):
        for module, optimizer, scheduler in zip((plain, ours), optimizers, schedulers, strict=True):
            step(module, optimizer, ids)
            scheduler.step()
        assert_same(whole(ours), whole(plain))
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"] < 0.5


@pytest.mark.parametrize("sparse", [False, True])
def test_steps_that_are_skipped(sparse):
    plain, ours = bags(mode="sum", sparse=sparse, cache_ratio=0.3)
    optimizers = [Adagrad(m.parameters(), lr=0.1) for m in (plain, ours)]
    for number, ids in enumerate(batches(12)):
        for module, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(lookup(module, ids)).backward()
            if number % 3:  # as a GradScaler does when it finds an infinity
                optimizer.step()
        assert_same(whole(ours), whole(plain))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("cache_ratio", [0.1, 0.6], ids=["too-small", "large"])
def test_gradients_that_gather_over_several_batches(cache_ratio, sparse, set_to_none):
    plain, ours = singles(sparse=sparse, cache_ratio=cache_ratio)
    optimizers = [Adagrad(m.parameters(), lr=0.1) for m in (plain, ours)]
    for number, ids in enumerate(batches(12, n_ids=6)):
        for module, optimizer in zip((plain, ours), optimizers, strict=True):
            loss_of(lookup(module, ids)).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none)
        assert_same(whole(ours), whole(plain), number)


@pytest.mark.parametrize("cache_ratio", [0.1, 0.3], ids=["too-small", "large"])
@pytest.mark.parametrize("keep", [False, True], ids=["alone", "with-another-graph"])
def test_a_gradient_is_clipped_by_the_norm_of_all(cache_ratio, keep):
    plain, ours = bags(mode="sum", cache_ratio=cache_ratio)
    optimizers = [SGD(m.parameters(), lr=0.5) for m in (plain, ours)]
    for ids in batches(6):
        for module, optimizer in zip((plain, ours), optimizers, strict=True):
            kept = lookup(module, torch.arange(3)) if keep else None
            optimizer.zero_grad()
            loss_of(lookup(module, ids)).backward()
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)
            assert norm > 0.01
            optimizer.step()
            if kept is not None:
                optimizer.zero_grad()
                loss_of(kept).backward()
                optimizer.step()
        # The norm sums other zeros in another order.
        torch.testing.assert_close(whole(ours), whole(plain), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("groups", ["one-group", "groups"])
def test_several_tables_and_layers_in_one_optimizer(groups):
    def model(kind: Any, one: Any, **options: Any) -> torch.nn.ModuleDict:
        torch.manual_seed(1)
        return torch.nn.ModuleDict(
            {
                "bag": kind(N, D, _weight=table(), mode="sum", **options),
                "single": one(N, D, _weight=table(N, D) * 2, **options),
                "top": torch.nn.Linear(D, 1),
            }
        )

    cached = {"cache_ratio": 0.3, "device": "cpu"}
    models = [
        model(torch.nn.EmbeddingBag, torch.nn.Embedding),
        model(CachedEmbeddingBag, CachedEmbedding, **cached),
    ]
    optimizers = []
    for m in models:
        given: Any = m.parameters()
        if groups == "groups":
            given = [
                {"params": m["bag"].parameters(), "lr": 0.2},
                {"params": [*m["single"].parameters()], "lr_decay": 0.1},
                {"params": m["top"].parameters(), "weight_decay": 0.01},
            ]
        optimizers.append(Adagrad(given, lr=0.05))
    for a, b in zip(batches(10), batches(10, seed=1), strict=True):
        losses = []
        for m, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            out = m["top"](lookup(m["bag"], a) + lookup(m["single"], b[:4]))
            losses.append(out.square().sum())
            losses[-1].backward()
            optimizer.step()
        assert_same(losses[0].detach(), losses[1].detach())
    for name in ("bag", "single"):
        assert_same(whole(models[0][name]), whole(models[1][name]))


def test_several_lookups_between_two_steps():
    plain, ours = bags(mode="sum", cache_ratio=0.2)
    optimizers = [Adagrad(m.parameters(), lr=0.1) for m in (plain, ours)]
    given = batches(12)
    for a, b in zip(given[::2], given[1::2], strict=True):
        for module, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            first = lookup(module, a)
            with torch.no_grad():
                lookup(module, b)
            (loss_of(first) + loss_of(lookup(module, b))).backward()
            module.eval()
            lookup(module, a)
            module.train()
            optimizer.step()
        assert_same(whole(ours), whole(plain))


def test_prefetching_changes_nothing():
    for sparse in (False, True):
        plain, ours = bags(mode="sum", sparse=sparse, cache_ratio=0.3)
        optimizers = [Adagrad(m.parameters(), lr=0.1) for m in (plain, ours)]
        given = batches(12)
        for ids, coming, other in zip(given, given[1:], batches(12, seed=7), strict=False):
            ours.prefetch(coming, torch.arange(0, len(coming), 3))
            out = step(ours, optimizers[1], ids)
            assert_same(out, step(plain, optimizers[0], ids))
            ours.rows.prefetch(other)  # which never comes
        ours.prefetch(given[0])
        ours.load_state_dict(ours.state_dict())
        assert_same(whole(ours), whole(plain))
        assert_same(lookup(ours, given[0]), lookup(plain, given[0]))


# Optimizers that would move other rows

REFUSED: dict[str, Optimizers] = {
    "adagrad-without-eps": lambda p: Adagrad(p, eps=0),
    "sgd-uphill": lambda p: SGD(p, lr=0.1, maximize=True),
    "adagrad-uphill": lambda p: Adagrad(p, maximize=True),
}
REFUSED_WHEN_MADE: dict[str, Optimizers] = {
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "sgd-weight-decay": lambda p: SGD(p, lr=0.1, weight_decay=0.1),
    "adagrad-weight-decay": lambda p: Adagrad(p, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p),
    "adamw": lambda p: torch.optim.AdamW(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "lbfgs": lambda p: torch.optim.LBFGS(list(p)),
    "asgd": lambda p: torch.optim.ASGD(p),
}


@pytest.mark.parametrize("name", REFUSED_WHEN_MADE)
def test_what_is_known_to_move_other_rows_is_refused_when_it_is_made(name):
    _, ours = bags(mode="sum")
    with pytest.raises(ArgumentError, match="use torch.optim.SGD without momentum"):
        REFUSED_WHEN_MADE[name](ours.parameters())


@pytest.mark.parametrize("name", REFUSED)
def test_what_moves_other_rows_is_refused_and_changes_nothing(name):
    _, ours = bags(mode="sum")
    optimizer = REFUSED[name](ours.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(lookup(ours, batches(1)[0]))
        loss.backward()
        return loss

    closure()
    says = rf"{type(optimizer).__name__} .*use torch.optim.SGD without momentum"
    with pytest.raises(ArgumentError, match=says):
        optimizer.step(closure)  # type: ignore[arg-type]
    assert_same(whole(ours), table())
    assert not optimizer.state or name.startswith("adagrad")
    with pytest.raises(ArgumentError, match=says):
        ours.attach_optimizer(optimizer)
    # What is accepted goes on from there.
    plain = torch.nn.EmbeddingBag(N, D, _weight=table(), mode="sum")
    train_both(plain, ours, DENSE["sgd"], batches(4))


def test_options_that_change_later_are_refused_too():
    _, ours = bags()
    optimizer = SGD(ours.parameters(), lr=0.1)
    step(ours, optimizer, batches(1)[0])
    kept = whole(ours)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(ArgumentError, match="weight_decay=0.1"):
        step(ours, optimizer, batches(1)[0])
    assert_same(whole(ours), kept)


def test_only_the_group_of_the_rows_matters():
    _, ours = bags()
    top = torch.nn.Linear(D, 1)
    groups: list[dict[str, Any]] = [
        {"params": ours.parameters()},
        {"params": top.parameters(), "momentum": 0.9, "weight_decay": 0.1},
    ]
    optimizer = SGD(groups, lr=0.1)
    top(lookup(ours, batches(1)[0])).sum().backward()
    optimizer.step()
    assert not torch.equal(whole(ours), table())


class _RowWise(torch.optim.Optimizer):
    """An optimizer of one's own with state for each row, as FBGEMM's row-wise Adagrad is."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                sums = self.state[p].setdefault("sum", torch.zeros(p.shape[0], 1))
                sums += p.grad.square().mean(1, keepdim=True)
                p -= group["lr"] * p.grad / (sums.sqrt() + 1e-8)


def test_an_optimizer_of_ones_own_can_be_attached():
    plain, ours = bags(mode="sum", cache_ratio=0.3)
    mine = _RowWise(ours.parameters())
    with pytest.raises(ArgumentError, match=r"attach_optimizer\(optimizer, row_wise=True\)"):
        step(ours, mine, batches(1)[0])
    ours.attach_optimizer(mine, row_wise=True)
    theirs = _RowWise(plain.parameters())
    for ids in batches(10):
        assert_same(step(ours, mine, ids), step(plain, theirs, ids))
    assert_same(whole(ours), whole(plain))


def test_an_optimizer_is_attached_between_a_backward_pass_and_its_step():
    plain, ours = bags(mode="sum", cache_ratio=0.001)
    theirs, mine = (Adagrad(m.parameters(), lr=0.1) for m in (plain, ours))
    for module in (plain, ours):
        loss_of(lookup(module, torch.arange(6))).backward()  # more rows than are resident
    ours.attach_optimizer(mine)
    theirs.step()
    mine.step()
    assert_same(whole(ours), whole(plain))
    assert_same_state(mine.state_dict(), theirs.state_dict())


def test_attach_optimizer_refuses_what_is_none_or_has_other_parameters():
    _, ours = bags()
    with pytest.raises(ArgumentTypeError, match="optimizer: expected a torch.optim.Optimizer"):
        ours.attach_optimizer("sgd")  # type: ignore[arg-type]
    other = SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="module.parameters"):
        ours.attach_optimizer(other)


# State of optimizers

STATES = ["adagrad-with-options", "sparse-adam"]


def trained(name: str) -> tuple[Any, Any, torch.optim.Optimizer, torch.optim.Optimizer]:
    sparse = name.startswith("sparse")
    plain, ours = bags(mode="sum", sparse=sparse, cache_ratio=0.3)
    return plain, ours, *train_both(plain, ours, of(name, sparse), batches(8))


def assert_same_state(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for key, values in theirs["state"].items():
        assert mine["state"][key].keys() == values.keys()
        for name, value in values.items():
            found = mine["state"][key][name]
            if isinstance(value, torch.Tensor):
                assert_same(found, value, name)
            else:
                assert found == value


@pytest.mark.parametrize("name", STATES)
def test_state_of_optimizers_is_that_of_all_rows(name):
    _, _, theirs, mine = trained(name)
    assert_same_state(mine.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("attached", [True, False])
def test_training_goes_on_from_a_checkpoint_of_either_kind(name, attached):
    plain, ours, theirs, mine = trained(name)
    make = of(name, ours.sparse)
    other_plain, other = bags(mode="sum", sparse=ours.sparse, cache_ratio=0.5)
    for module, state, source in (
        (other_plain, mine.state_dict(), ours),
        (other, theirs.state_dict(), plain),
    ):
        module.load_state_dict(source.state_dict())
        optimizer = make(module.parameters())
        if attached and module is other:
            other.attach_optimizer(optimizer)
        optimizer.load_state_dict(copy.deepcopy(state))
        for ids in batches(8, seed=3):
            step(module, optimizer, ids)
    for ids in batches(8, seed=3):
        step(plain, theirs, ids)
    assert_same(whole(other_plain), whole(plain))
    assert_same(whole(other), whole(plain))


def test_a_step_counts_for_an_optimizer_that_was_made_first():
    plain, ours = bags(mode="sum", cache_ratio=0.3)
    theirs, mine = Adagrad(plain.parameters()), Adagrad(ours.parameters())
    with torch.no_grad():  # resident rows change before the optimizer is known
        for ids in batches(5, seed=9):
            lookup(ours, ids)
    for ids in batches(10):
        assert_same(step(ours, mine, ids), step(plain, theirs, ids))
    assert_same_state(mine.state_dict(), theirs.state_dict())


# What cannot be right raises


def test_gradients_that_were_not_cleared_are_refused():
    _, ours = bags(mode="sum", cache_ratio=0.3)
    optimizer = SGD(ours.parameters(), lr=0.1)
    with pytest.raises(BitslabError, match="zero_grad"):
        for ids in batches(10):
            loss_of(lookup(ours, ids)).backward()
            optimizer.step()


@pytest.mark.parametrize("make", [bags, singles])
@pytest.mark.parametrize("cache", ["rows", "packed"])
def test_frozen_modules_refuse_gradients(make, cache):
    _, ours = make(freeze=True, cache=cache)
    assert not any(p.requires_grad for p in ours.parameters())
    ids = batches(1)[0]
    assert not lookup(ours, ids).requires_grad
    ours.requires_grad_(True)
    with pytest.raises(BitslabError, match="freeze=False"):
        lookup(ours, ids)
    ours.requires_grad_(False)
    assert_same(whole(ours), table())
    assert_same(lookup(ours, ids), lookup(make()[1], ids).detach())
    assert ours.stats()["written_back"] == 0


@pytest.mark.drawn(8)
@pytest.mark.parametrize("padding_idx", [None, 3], ids=["plain", "padding"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
@pytest.mark.parametrize("make", [bags, singles])
def test_packed_caches_train_too(make, name, sparse, padding_idx):
    plain, ours = make(cache="packed", sparse=sparse, cache_ratio=0.3, padding_idx=padding_idx)
    train_both(plain, ours, of(name, sparse), batches(10))
    assert ours.stats()["written_back"] > 0
    ours.eval(), plain.eval()
    with torch.no_grad():
        for ids in batches(5, seed=4):
            assert_same(lookup(ours, ids), lookup(plain, ids))
