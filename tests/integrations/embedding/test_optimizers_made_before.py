"""Optimizers made before a model was compressed or restored train on, or raise; none is idle."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch

from bitslab import ArgumentError, BitslabError
from bitslab.embedding.rebinding import live_optimizers
from bitslab.integrations.embedding import compress_embeddings, restore_embeddings
from tests.integrations.embedding.support import D, N, assert_same, batches, lookup, loss_of

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
SMALL: dict[str, Any] = {"min_rows": 20, "cache_ratio": 0.3}
ADAGRAD, SGD, ADAM = torch.optim.Adagrad, torch.optim.SGD, torch.optim.Adam

KINDS: dict[str, tuple[Any, bool]] = {
    "sgd": (lambda p: SGD(p, lr=0.1), False),
    "sgd-foreach": (lambda p: SGD(p, lr=0.1, foreach=True), False),
    "sgd-fused": (lambda p: SGD(p, lr=0.1, fused=True), False),
    "adagrad": (lambda p: ADAGRAD(p, lr=0.1), False),
    "adagrad-fused": (lambda p: ADAGRAD(p, lr=0.1, fused=True), False),
    "adagrad-started": (lambda p: ADAGRAD(p, lr=0.1, initial_accumulator_value=0.5), False),
    "adagrad-sparse": (lambda p: ADAGRAD(p, lr=0.1), True),
    "sparse-adam": (lambda p: torch.optim.SparseAdam(p, lr=0.1), True),
    "named": (lambda p: ADAGRAD([(str(i), each) for i, each in enumerate(p)], lr=0.1), False),
}


class Model(torch.nn.Module):
    """Two tables, of which the second is small, and a layer."""

    table: Any
    small: Any

    def __init__(self, sparse: bool = False, top: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.EmbeddingBag(N, D, mode="sum", sparse=sparse)
        self.small = torch.nn.Embedding(10, D, sparse=sparse)
        self.top = torch.nn.Linear(D, 1) if top else torch.nn.Identity()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(lookup(self.table, ids).sum(0) + self.small(ids % 10).sum(0))
        return out


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(ids)).backward()
    optimizer.step()


def assert_same_state(ours: Any, plain: Any) -> None:
    """Compare state dicts of models or optimizers."""
    assert type(ours) is type(plain)
    if isinstance(plain, torch.Tensor):
        assert_same(ours, plain)
    elif isinstance(plain, dict):
        assert ours.keys() == plain.keys()
        for name in plain:
            assert_same_state(ours[name], plain[name])
    elif isinstance(plain, list):
        assert len(ours) == len(plain)
        for one, other in zip(ours, plain, strict=True):
            assert_same_state(one, other)
    else:
        assert ours == plain


@pytest.mark.parametrize("before", [0, 3], ids=["no-step-yet", "state-there"])
@pytest.mark.parametrize("name", KINDS)
def test_an_optimizer_made_before_trains_on_as_if_nothing_had_happened(name, before):
    make, sparse = KINDS[name]
    models = [Model(sparse, top=not sparse) for _ in range(2)]
    optimizers = [make(m.parameters()) for m in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    given = iter(batches(9 + before))

    def train(steps: int) -> None:
        for _ in range(steps):
            ids = next(given)
            for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
                step(model, optimizer, ids)
                scheduler.step()

    train(before)
    for optimizer in optimizers:
        optimizer.zero_grad()
    weight = weakref.ref(models[1].table.weight)
    compress_embeddings(models[1], **SMALL)
    gc.collect()
    assert weight() is None  # the optimizer does not keep the plain table
    train(5)
    assert_same_state(models[1].state_dict(), models[0].state_dict())
    assert_same_state(optimizers[1].state_dict(), optimizers[0].state_dict())
    restore_embeddings(models[1])
    train(4)
    assert_same_state(models[1].state_dict(), models[0].state_dict())
    assert_same_state(optimizers[1].state_dict(), optimizers[0].state_dict())


def test_each_of_several_optimizers_keeps_what_it_had():
    plain, ours = Model(), Model()
    made = [
        (SGD(m.table.parameters(), lr=0.1), ADAM([*m.small.parameters(), *m.top.parameters()]))
        for m in (plain, ours)
    ]
    compress_embeddings(ours, **SMALL)
    assert made[1][0].param_groups[0]["params"] == [ours.table.rows.parameter]
    for ids in batches(4):
        for model, optimizers in zip((plain, ours), made, strict=True):
            loss_of(model(ids)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_state(ours.state_dict(), plain.state_dict())


def test_gradients_are_added_up_and_cleared_before_the_first_step():
    plain, ours = Model(), Model()
    optimizers = [ADAGRAD(m.parameters(), lr=0.1) for m in (plain, ours)]
    compress_embeddings(ours, **SMALL)
    first, *accumulated = batches(4)
    for model, optimizer in zip((plain, ours), optimizers, strict=True):
        loss_of(model(first)).backward()
        optimizer.zero_grad()
        for ids in accumulated:
            loss_of(model(ids)).backward()
        optimizer.step()
    assert_same_state(ours.state_dict(), plain.state_dict())


def test_an_optimizer_may_be_made_after_the_first_backward_pass():
    plain, ours = Model(), Model()
    compress_embeddings(ours, **SMALL)
    for model in (plain, ours):
        loss_of(model(batches(1)[0])).backward()
        ADAGRAD(model.parameters(), lr=0.1).step()
    assert_same_state(ours.state_dict(), plain.state_dict())


def test_one_of_another_kind_is_refused_only_where_it_would_train_the_table():
    model = Model()
    optimizer = ADAM(model.parameters(), lr=0.1)
    ids = batches(1)[0]
    step(model, optimizer, ids)
    optimizer.zero_grad()
    kept = copy.deepcopy(optimizer.state_dict()["state"][0])
    compress_embeddings(model, **SMALL)
    before = model.table.rows.whole()
    model.small(ids % 10).sum().backward()
    optimizer.step()  # of the rest of the model
    loss_of(model(ids)).backward()
    with pytest.raises(ArgumentError, match="Adam moves rows that were not looked up; use"):
        optimizer.step()
    assert_same(model.table.rows.whole(), before)
    optimizer.zero_grad()
    restore_embeddings(model)
    assert_same_state(optimizer.state_dict()["state"][0], kept)
    step(model, optimizer, ids)
    assert not torch.equal(model.table.weight, before)


@pytest.mark.parametrize("freeze", ["freeze", "requires-no-gradient"])
def test_frozen_tables_are_passed_over(freeze):
    model = Model()
    model.table.weight.requires_grad_(freeze == "freeze")
    optimizer = ADAM(model.parameters(), lr=0.1)
    compress_embeddings(model, freeze=True if freeze == "freeze" else None, **SMALL)
    before = model.table.rows.whole()
    step(model, optimizer, batches(1)[0])
    model.eval()
    with torch.no_grad():
        model(batches(1)[0])
    assert_same(model.table.rows.whole(), before)


class Own(torch.optim.Optimizer):
    """An optimizer of one's own that knows its parameters by another list too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.mine = list(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.mine:
            if p.grad is not None:
                p -= 0.1 * p.grad


def test_one_that_cannot_be_taken_over_raises_with_the_line_to_move():
    model = Model()
    optimizer = Own(model.parameters())
    compress_embeddings(model, **SMALL)
    before = model.table.rows.whole()
    model.small(torch.tensor([1])).sum().backward()
    optimizer.step()  # there is nothing of the table to lose
    loss_of(model(batches(1)[0])).backward()
    with pytest.raises(BitslabError, match=r"Own was made before its weight \[50, 8\].*move the l"):
        optimizer.step()
    assert_same(model.table.rows.whole(), before)
    # One more that has the table makes it right.
    after = SGD(model.table.parameters(), lr=0.1)
    optimizer.step()
    after.step()
    assert not torch.equal(model.table.rows.whole(), before)
    # And back: that which was made for the rows has no part in the model any more.
    rows = Own(model.table.parameters())
    model.table.attach_optimizer(rows, row_wise=True)
    del after
    restore_embeddings(model)
    for stale in (optimizer, rows):
        loss_of(model(batches(1)[0])).backward()
        with pytest.raises(BitslabError, match="Own was made before its weight .*restored"):
            stale.step()


@pytest.mark.parametrize("kind", [Own, torch.optim.LBFGS], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("named", [False, True], ids=["position", "keyword"])
def test_a_closure_hides_no_step_that_would_train_nothing(kind, named):
    model = Model()
    optimizer = kind(model.parameters())
    compress_embeddings(model, **SMALL)

    def closure() -> Any:
        optimizer.zero_grad()
        model.zero_grad()
        loss = loss_of(model(batches(1)[0]))
        loss.backward()
        return loss

    with pytest.raises(BitslabError, match=f"{kind.__name__} was made before its weight"):
        optimizer.step(closure=closure) if named else optimizer.step(closure)


def test_parameters_listed_before_are_no_use_afterwards():
    model = Model()
    listed = list(model.parameters())
    compress_embeddings(model, **SMALL)
    optimizer = SGD(listed, lr=0.1)
    loss_of(model(batches(1)[0])).backward()
    with pytest.raises(BitslabError, match="SGD was made before its weight"):
        optimizer.step()


def test_a_weight_that_another_model_trains_too_does_not_lose_its_optimizer_unnoticed():
    model, other = Model(), torch.nn.Embedding(N, D)
    other.weight = model.table.weight
    optimizer = SGD(model.parameters(), lr=0.1)
    compress_embeddings(model, **SMALL)
    with pytest.raises(BitslabError, match="is trained in another too.*make an optimizer"):
        other(torch.tensor([1])).sum().backward()
    again = SGD(other.parameters(), lr=0.1)
    again.zero_grad()
    before = other.weight.detach().clone()
    other(torch.tensor([1])).sum().backward()
    again.step()
    assert not torch.equal(other.weight, before)
    step(model, optimizer, batches(1)[0])


def test_a_model_that_cannot_be_compressed_keeps_its_optimizer(monkeypatch):
    plain, ours = Model(), Model()
    ours.small = torch.nn.Embedding.from_pretrained(ours.small.weight.detach(), freeze=False)
    optimizers = [ADAGRAD(m.parameters(), lr=0.1) for m in (plain, ours)]
    for ids in batches(2):
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            step(model, optimizer, ids)
            optimizer.zero_grad()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("bitslab.integrations.embedding.single.CachedEmbedding.from_module", fail)
    with pytest.raises(MemoryError):
        compress_embeddings(ours, min_rows=5)
    for ids in batches(2, seed=1):
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            step(model, optimizer, ids)
    assert_same_state(ours.state_dict(), plain.state_dict())


def test_live_optimizers_are_found_and_not_kept():
    optimizer = SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    assert any(each is optimizer for each in live_optimizers())
    ref = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert ref() is None


@pytest.mark.gpu
@pytest.mark.parametrize("begins", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adagrad-sparse", "sparse-adam"])
def test_an_optimizer_follows_a_table_to_a_gpu_and_back(name, begins):
    make, sparse = KINDS[name]
    n, given = 4000, batches(9, n_ids=300, n=4000)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(torch.nn.Sequential(torch.nn.EmbeddingBag(n, D, mode="sum", sparse=sparse)))
        models[-1].to(begins)
    optimizers = [make(m.parameters()) for m in models]

    def train(steps: int, device: str) -> None:
        for _ in range(steps):
            ids = given.pop().view(-1, 3)
            for model, optimizer, where in zip(models, optimizers, (begins, device), strict=True):
                optimizer.zero_grad()
                model(ids.to(where)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            # A GPU sums gradients in another order.
            theirs, ours = (m.state_dict()["0.weight"].cpu() for m in models)
            torch.testing.assert_close(ours, theirs)

    train(2, begins)
    compress_embeddings(models[1], device="cuda", cache_ratio=0.1, min_rows=0)
    train(4, "cuda")
    restore_embeddings(models[1])
    assert models[1][0].weight.device.type == "cuda"
    train(3, "cuda")
