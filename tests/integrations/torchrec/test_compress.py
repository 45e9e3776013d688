"""compress_tables: models go on as before; restore_tables puts everything back."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("torchrec", reason="torchrec is not installed")

from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.optim.keyed import KeyedOptimizerWrapper

from bitslab import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.integrations.torchrec import (
    CompressedEmbeddingBagCollection,
    CompressedEmbeddingCollection,
    compress_tables,
    restore_tables,
)
from tests.integrations.torchrec.batches import bag_configs, batch, configs, same_state


class Model(torch.nn.Module):
    """Both kinds of collections, one of them in two places, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=bag_configs())
        self.inner = torch.nn.ModuleDict({"again": self.bags})
        self.rows = EmbeddingCollection(tables=configs(), need_indices=True)
        self.dense = torch.nn.Linear(88, 3)

    def forward(self, features):
        rows = self.rows(features)
        pooled = self.dense(self.bags(features).values())
        return pooled.sum() + sum((r.values() ** 2).sum() for r in rows.values())


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def losses(model, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step in range(steps):
        loss = model(batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found


def test_a_model_trains_as_before() -> None:
    plain, packed = make_model(), make_model()
    report = compress_tables(packed, min_rows=100, cache_ratio=0.1)
    assert report.model is packed
    assert isinstance(packed.bags, CompressedEmbeddingBagCollection)
    assert isinstance(packed.rows, CompressedEmbeddingCollection)
    assert packed.inner["again"] is packed.bags
    assert same_state(plain, packed)
    assert losses(plain) == losses(packed)
    assert same_state(plain, packed)
    restore_tables(packed)
    assert type(packed.bags) is EmbeddingBagCollection
    assert type(packed.rows) is EmbeddingCollection
    assert packed.inner["again"] is packed.bags
    assert same_state(plain, packed)
    assert losses(plain) == losses(packed)


def test_the_report_says_what_was_done() -> None:
    model = make_model()
    report = compress_tables(model, min_rows=400)
    assert list(report.compressed) == [
        *(f"bags.embedding_bags.{name}" for name in ("t1", "t2", "t3")),
        *(f"rows.embeddings.{name}" for name in ("t1", "t2", "t3")),
    ]
    assert not report.left
    resident = [report.compressed[f"bags.embedding_bags.{t}"]["cache_rows"] for t in ("t1", "t2")]
    assert resident == [5, 300]
    assert report.raw_bytes == 4 * (8 * 801 + 64 * 41 + 64 * 842)
    assert "bags.embedding_bags.t1" in str(report)
    assert report.as_dict()["compressed"] == report.compressed


def test_small_collections_and_packed_ones_are_left_alone() -> None:
    model = make_model()
    state = copy.deepcopy(model.state_dict())
    report = compress_tables(model)
    assert report.left == {"bags": "no table has 25000 rows", "rows": "no table has 25000 rows"}
    assert "bags: no table has 25000 rows" in str(report)
    assert type(model.bags) is EmbeddingBagCollection
    assert same_state(state, model)
    compress_tables(model, min_rows=0)
    report = compress_tables(model, min_rows=0)
    assert set(report.left.values()) == {"is packed already"}
    assert str(compress_tables(torch.nn.Linear(2, 2))) == "no embedding tables"


def test_a_predicate_chooses() -> None:
    model = make_model()
    seen = []

    def only_rows(name, module):
        seen.append((name, type(module)))
        return name == "rows"

    report = compress_tables(model, min_rows=0, predicate=only_rows)
    assert seen == [("bags", EmbeddingBagCollection), ("rows", EmbeddingCollection)]
    assert {name.split(".")[0] for name in report.compressed} == {"rows"}
    assert report.left == {"bags": "the predicate says so"}


def test_a_collection_itself_is_replaced() -> None:
    collection = make_model().bags
    report = compress_tables(collection, min_rows=0)
    assert isinstance(report.model, CompressedEmbeddingBagCollection)
    assert same_state(collection, report.model)
    assert list(report.compressed) == [f"embedding_bags.{name}" for name in ("t1", "t2", "t3")]
    assert type(restore_tables(report.model)) is EmbeddingBagCollection


def test_frozen_tables_and_modes_are_kept() -> None:
    model = make_model().eval()
    model.rows.train()
    model.bags.embedding_bags["t2"].weight.requires_grad_(False)
    compress_tables(model, min_rows=0)
    assert not model.bags.training
    assert model.rows.training
    groups = model.bags.groups
    frozen = [g.rows.parameter.requires_grad for g in groups for t in g.tables if t == 1]
    assert frozen == [False]
    restore_tables(model)
    grads = {n: b.weight.requires_grad for n, b in model.bags.embedding_bags.items()}
    assert grads == {"t1": True, "t2": False, "t3": True}
    assert not model.bags.training
    assert model.rows.training


def test_half_tables_keep_their_dtype() -> None:
    """TorchRec makes float16 tables of BF16 configs."""
    model = EmbeddingBagCollection(tables=bag_configs(data_type=DataType.BF16))
    packed = compress_tables(model, min_rows=0).model
    assert same_state(model, packed)
    assert same_state(model, restore_tables(packed))


def tied(model):
    model.other = torch.nn.Embedding(300, 8)
    model.other.weight = model.bags.embedding_bags["t2"].weight


def hooked(model):
    model.bags.register_forward_hook(lambda *_: None)


def in_backward(model):
    model.bags.embedding_bags["t1"].weight._in_backward_optimizers = []


def on_meta(model):
    model.bags = model.inner["again"] = EmbeddingBagCollection(
        tables=bag_configs(), device=torch.device("meta")
    )


def doubles(model):
    model.bags.double()


def averaged(model):
    tables = bag_configs(pooling=PoolingType.MEAN)
    model.bags = model.inner["again"] = EmbeddingBagCollection(tables=tables, is_weighted=True)


class Other(EmbeddingBagCollection):  # type: ignore[misc]
    """A class that nobody knows."""


def another_class(model):
    model.bags.__class__ = Other


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (tied, "table 't2' shares its weight"),
        (hooked, "has hooks"),
        (in_backward, "table 't1' has an optimizer in backward"),
        (on_meta, "table 't1' is on the meta device"),
        (doubles, "table 't1' is torch.float64"),
        (averaged, "table 't1' averages"),
        (another_class, "is a Other"),
    ],
)
def test_what_cannot_be_packed_is_left_alone(change, why) -> None:
    model = make_model()
    change(model)
    bags = model.bags
    report = compress_tables(model, min_rows=0)
    assert report.left["bags"].startswith(why)
    assert {name.split(".")[0] for name in report.compressed} == {"rows"}
    assert model.bags is bags


def test_an_error_changes_nothing() -> None:
    model = make_model()
    bags = model.bags
    with pytest.raises(ArgumentError, match="layout"):
        compress_tables(model, min_rows=0, layout="loose")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="cache_ratio"):
        compress_tables(model, min_rows=0, cache_ratio=2.0)
    with pytest.raises(ArgumentError, match="min_rows"):
        compress_tables(model, min_rows=-1)
    with pytest.raises(ArgumentTypeError, match="model"):
        compress_tables({})  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="model"):
        restore_tables({})  # type: ignore[arg-type]
    assert model.bags is bags


def test_packed_collections_pass_for_torchrecs() -> None:
    packed = compress_tables(make_model().bags, min_rows=0).model
    assert isinstance(packed, EmbeddingBagCollectionInterface)
    config = packed.embedding_bag_configs()[0]
    assert isinstance(config, EmbeddingBagConfig)


# Optimizers that were made before

KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def train(model, optimizer, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        model(batch(seed)).backward()
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", KINDS)
def test_an_optimizer_made_before_trains_on_as_if_nothing_had_happened(name) -> None:
    models = [make_model(), make_model()]
    optimizers = [KINDS[name](m.parameters()) for m in models]
    for change, seeds in ((None, range(2)), (compress_tables, range(2, 6)), (None, range(6, 8))):
        if change is not None:
            report = change(models[1], min_rows=100, cache_ratio=0.1)
            assert report.compressed
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, seeds)
        assert same_state(*models)
    restore_tables(models[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(8, 10))
    assert same_state(*models)


def test_an_optimizer_that_has_some_of_the_tables_raises_with_the_line_to_move() -> None:
    model = make_model()
    together = ("t1", "t2")
    one, *rest = [model.rows.embeddings[name].weight for name in together]
    optimizers = [torch.optim.SGD([one], lr=0.01), torch.optim.SGD(rest, lr=0.01)]
    compress_tables(model, min_rows=0, codec="raw")
    assert any({0, 1} <= set(group.tables) for group in model.rows.groups)
    before = copy.deepcopy(model.state_dict())
    model(batch(0)).backward()
    for optimizer in optimizers:
        with pytest.raises(BitslabError, match="move the line that makes the optimizer"):
            optimizer.step()
    assert same_state(before, model)


def test_a_keyed_optimizer_raises_with_the_line_to_move() -> None:
    model = make_model()
    keyed = KeyedOptimizerWrapper(
        dict(model.named_parameters()), lambda p: torch.optim.SGD(p, lr=0.01)
    )
    names = keyed.state_dict()["state"].keys()
    compress_tables(model, min_rows=0)
    model(batch(0)).backward()
    with pytest.raises(BitslabError, match="move the line that makes the optimizer"):
        keyed.step()
    assert keyed.state_dict()["state"].keys() == names


def test_a_collection_with_a_gradient_is_left_alone() -> None:
    model = make_model()
    model(batch(0)).backward()
    report = compress_tables(model, min_rows=0)
    assert "has a gradient; apply it and clear it" in report.left["bags"]
    model.zero_grad()
    assert not compress_tables(model, min_rows=0).left
