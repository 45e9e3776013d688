"""Packed collections where code expects TorchRec's own: types, graphs, the meta device, none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("torchrec", reason="torchrec is not installed")

from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.fx import symbolic_trace
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)

from bitslab import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.integrations.embedding import CachedEmbeddingBag
from bitslab.integrations.torchrec import (
    CompressedEmbeddingBagCollection,
    CompressedEmbeddingCollection,
    compress_tables,
    restore_tables,
)
from tests.helpers import same_bits
from tests.integrations.torchrec.batches import bag_configs, batch, configs, same_state

META = torch.device("meta")
#: TorchRec's class, its interface, ours, and configs of tables.
CLASSES: dict[str, Any] = {
    "bags": (
        EmbeddingBagCollection,
        EmbeddingBagCollectionInterface,
        CompressedEmbeddingBagCollection,
        bag_configs,
    ),
    "rows": (
        EmbeddingCollection,
        EmbeddingCollectionInterface,
        CompressedEmbeddingCollection,
        configs,
    ),
}
EACH = pytest.mark.parametrize("name", CLASSES)


def pair(name, **options):
    torch.manual_seed(0)
    plain = CLASSES[name][0](tables=CLASSES[name][3](), **options)
    torch.manual_seed(0)
    return plain, CLASSES[name][2](
        tables=CLASSES[name][3](), **{"device": "cpu", "cache_ratio": 0.1, **options}
    )


def values_of(out):
    """Return what a collection has returned as tensors by name."""
    if isinstance(out, dict):
        return {key: part.values() for key, part in out.items()}
    return out.to_dict()


def same_values(ours, plain):
    ours, plain = values_of(ours), values_of(plain)
    return ours.keys() == plain.keys() and all(same_bits(ours[k], plain[k]) for k in plain)


def views_of(collection):
    bags = isinstance(collection, EmbeddingBagCollection)
    return collection.embedding_bags if bags else collection.embeddings


@EACH
def test_a_packed_collection_is_an_instance_of_the_class_it_replaces(name):
    plain, interface, kind, _ = CLASSES[name]
    ours = pair(name)[1]
    assert isinstance(ours, plain) and isinstance(ours, interface) and type(ours) is kind
    copied = copy.deepcopy(ours)
    assert isinstance(copied, plain) and same_state(ours, copied)


# Graphs


class Top(torch.nn.Module):
    """A collection below the top of a model."""

    def __init__(self, collection) -> None:
        super().__init__()
        self.sparse = torch.nn.ModuleDict({"tables": collection})
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, features: KeyedJaggedTensor):
        out = self.sparse["tables"](features)
        return out, self.scale * 2


@EACH
@pytest.mark.parametrize("trace", [symbolic_trace, torch.fx.symbolic_trace], ids=["torchrec", "fx"])
def test_a_graph_calls_the_collection_and_does_not_look_into_it(name, trace):
    plain, ours = pair(name)
    model = Top(ours)
    graph = trace(model)
    calls = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    assert calls == ["sparse.tables"]
    graph.graph.lint()
    assert same_values(graph(batch(1))[0], plain(batch(1)))
    # It is the same module, which trains on.
    optimizer = torch.optim.SGD(graph.parameters(), lr=0.1)
    sum(value.sum() for value in values_of(graph(batch(2))[0]).values()).backward()
    optimizer.step()
    assert same_values(graph(batch(2))[0], ours(batch(2)))
    assert not same_values(graph(batch(2))[0], plain(batch(2)))


@EACH
@pytest.mark.parametrize("trace", [symbolic_trace, torch.fx.symbolic_trace], ids=["torchrec", "fx"])
def test_a_collection_is_traced_by_itself(name, trace):
    plain, ours = pair(name)
    graph = trace(ours)
    assert [n.target for n in graph.graph.nodes if n.op == "call_module"] == ["collection"]
    assert graph.collection is ours
    assert same_values(graph(batch(1)), plain(batch(1)))
    assert same_values(graph(features=batch(1)), plain(batch(1)))
    assert len(list(graph.parameters())) == len(list(ours.parameters()))


@EACH
def test_scripting_is_refused_by_name(name):
    ours = pair(name)[1]
    for model in (ours, Top(ours), symbolic_trace(Top(ours))):
        with pytest.raises(ArgumentTypeError, match=f"jit.script: {type(ours).__name__} cannot be"):
            torch.jit.script(model)
    bag = CachedEmbeddingBag(50, 8, device="cpu", cache_ratio=0.5)
    with pytest.raises(ArgumentTypeError, match="jit.script: CachedEmbeddingBag cannot be"):
        torch.jit.script(torch.nn.Sequential(bag))


# The meta device


@EACH
@pytest.mark.parametrize("how", ["argument", "name", "context"])
def test_on_the_meta_device_tables_have_shapes_alone(name, how):
    kind, (plain, _) = CLASSES[name][2], pair(name)
    state = torch.get_rng_state()
    if how == "context":
        with META:
            ours = kind(tables=CLASSES[name][3]())
    else:
        ours = kind(tables=CLASSES[name][3](), device=META if how == "argument" else "meta")
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn, as by TorchRec
    assert ours.device == META
    expected = plain.state_dict()
    found = ours.state_dict()
    assert list(found) == list(expected)
    for key, value in found.items():
        assert value.is_meta and value.shape == expected[key].shape
    assert {k: v.shape for k, v in ours.named_parameters()} == {
        k: v.shape for k, v in plain.named_parameters()
    }
    for table, view in views_of(ours).items():
        assert view.weight.is_meta and view.weight.shape == views_of(plain)[table].weight.shape
    ours.reset_parameters()
    ours.flush()
    assert ours.stats()["tables"] == {} and "t1" in repr(views_of(ours)["t1"])
    restored = restore_tables(copy.deepcopy(ours))
    assert type(restored) is CLASSES[name][0]
    assert all(value.is_meta for value in restored.state_dict().values())


@pytest.mark.parametrize("inverse", [False, True], ids=["", "inverse-indices"])
def test_outputs_on_the_meta_device_have_their_shapes(inverse):
    plain, _ = pair("bags")
    ours = CompressedEmbeddingBagCollection(tables=bag_configs(), device=META)
    features = batch(3)
    extra = {}
    if inverse:
        n_keys = len(features.keys())
        extra = {"inverse_indices": (features.keys(), torch.zeros(n_keys, 20, dtype=torch.int64))}
    features = KeyedJaggedTensor(
        features.keys(), features.values(), lengths=features.lengths(), **extra
    )
    there = ours(features.to(META))
    out = plain(features)
    assert there.values().is_meta and there.values().shape == out.values().shape
    assert there.keys() == out.keys() and there.length_per_key() == out.length_per_key()


@EACH
def test_a_collection_on_the_meta_device_does_not_pretend_to_have_rows(name):
    kind = CLASSES[name][2]
    ours = kind(tables=CLASSES[name][3](), device=META)
    with pytest.raises(NotImplementedError, match="meta"):  # torch's own
        ours.to("cpu")
    with pytest.raises(ArgumentError, match="device: a collection on the meta device has no rows"):
        ours.to_empty(device="cpu")
    assert ours.device == META and all(p.is_meta for p in ours.parameters())
    with pytest.raises(ArgumentError, match="table 't1' is on the meta device"):
        views_of(ours)["t1"].load(torch.zeros(501, views_of(ours)["t1"].embedding_dim))
    weights = {"t1": torch.zeros(501, ours.specs[0].row_dim)}
    with pytest.raises(ArgumentError, match="weights: given with the meta device"):
        kind(tables=CLASSES[name][3](), device=META, weights=weights)
    packed = pair(name)[1]
    with pytest.raises(BitslabError, match="device: meta"):
        packed.to(META)


# No tables


@EACH
def test_a_collection_of_no_tables_returns_nothing(name):
    ours = CLASSES[name][2](tables=[], device="cpu")
    assert ours.device == torch.device("cpu") and not ours.state_dict()
    assert not list(ours.parameters()) and views_of(ours) == {}
    out = ours(batch(1))
    if name == "bags":
        assert out.values().shape == (13, 0) and out.keys() == []
        assert ours.embedding_bag_configs() == []
    else:
        assert out == {} and ours.embedding_dim() == -1 == EmbeddingCollection([]).embedding_dim()
    ours.prefetch(batch(1))
    ours.reset_parameters()
    ours.flush()
    assert ours.stats()["raw_bytes"] == 0
    assert CLASSES[name][2](tables=[], device=META).device == META
    graph = symbolic_trace(Top(ours))
    assert len(values_of(graph(batch(1))[0])) == 0
    model = torch.nn.Sequential(CLASSES[name][0](tables=[]), torch.nn.Linear(1, 1))
    assert compress_tables(model, min_rows=0).left == {"0": "has no rows"}
    assert type(restore_tables(ours)) is CLASSES[name][0]
