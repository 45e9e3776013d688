"""PyG's compiled layers over packed rows: the bits of the same layers over raw ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData

import bitslab
from bitslab import CompressedTable
from bitslab.engine.kernels.cpu import typed_products
from bitslab.errors import ArgumentTypeError
from bitslab.integrations import pyg
from bitslab.integrations.pyg import compress_features, relational_calls
from bitslab.relational import PlanMemoryError, products
from tests.helpers import options_id
from tests.integrations.pyg.relational_layers import (
    EDGES,
    METADATA,
    NODES,
    TYPES,
    both,
    close,
    graph,
    hetero,
    tensors_of,
)

#: What finds the order and the pairs of a small graph.
SURVEY = "bitslab.engine.kernels.cpu.segment_sums.survey_edges"


def cached(table):
    cache = bitslab.SlabCache(table, 4000, devices=["cpu"])
    cache.fill(torch.arange(0, len(table), 2))
    return cache


def feature_of(x):
    """Return x as a data set has it after `compress_features`."""
    data = Data(x=x.clone())
    compress_features(data)
    return data.x


PACKED: dict[str, Any] = {
    "table": CompressedTable.from_tensor,
    "cache": lambda x: cached(CompressedTable.from_tensor(x)),
    "feature": feature_of,
}


def bits(layer, *args):
    """Return the outputs of a layer, and the gradients of its parameters."""
    layer.zero_grad()
    torch.manual_seed(5)
    outs = tensors_of(layer(*args))
    sum((o.float() * torch.linspace(-1, 1, o.numel()).view_as(o)).sum() for o in outs).backward()
    return [*outs, *(p.grad for p in layer.parameters())]


def check_same_bits(layer, raw, packed):
    for a, b in zip(bits(layer, *packed), bits(layer, *raw), strict=True):
        assert (a is None) == (b is None)
        assert b is None or (a.dtype is b.dtype and torch.equal(a, b))
    assert relational_calls(layer) == {"": {"": 2}}


LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("RGCNConv", {}),
    ("RGCNConv", {"num_bases": 3, "aggr": "add"}),
    ("RGCNConv", {"num_blocks": 2}),
    ("RGCNConv", {"root_weight": False, "bias": False}),
    ("FastRGCNConv", {}),
    ("FastRGCNConv", {"num_blocks": 4, "aggr": "add"}),
    ("RGATConv", {}),
    ("RGATConv", {"heads": 2, "num_bases": 2}),
]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize(("name", "kwargs"), LAYERS, ids=str)
def test_the_bits_of_raw_rows(name, kwargs, kind, autocast):
    _, ours = both(name, 64, 12, TYPES, **kwargs)
    x = torch.randn(NODES, 64)
    packed, edges = PACKED[kind](x), graph()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        check_same_bits(ours, (x, *edges), (packed, *edges))
    if kind == "feature":
        assert packed.feature.kept_whole is None


@pytest.mark.parametrize("types", [2, 12])
def test_the_bits_of_one_column(types):
    _, ours = both("RGCNConv", 64, 1, types)
    x, edges = torch.randn(NODES, 64), graph(types=types)
    check_same_bits(ours, (x, *edges), (CompressedTable.from_tensor(x), *edges))


HGT: list[dict[str, Any]] = [
    {"out_channels": 16},
    {"out_channels": 16, "heads": 4},
    {"out_channels": 8, "heads": 2},  # as wide as the rows of two node types
]


@pytest.mark.drawn(6)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("kwargs", HGT, ids=options_id)
def test_the_bits_of_raw_rows_of_hgt(kwargs, kind, autocast):
    x, edges = hetero()
    _, ours = both("HGTConv", {t: v.shape[1] for t, v in x.items()}, metadata=METADATA, **kwargs)
    for few in (("paper",), ("author", "field"), tuple(x)):
        packed = {t: PACKED[kind](v) if t in few else v for t, v in x.items()}
        layer = copy.deepcopy(ours)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            check_same_bits(layer, (x, edges), (packed, edges))
        if kind == "feature":
            assert all(packed[t].feature.kept_whole is None for t in few)


def test_features_of_a_data_set_are_projected_by_hgt_block_by_block(monkeypatch):
    for module in (typed_products, products):
        monkeypatch.setattr(module, "BLOCK_ROWS", 16)
    x, edges = hetero()
    plain, ours = both("HGTConv", {t: v.shape[1] for t, v in x.items()}, 16, METADATA)
    data = HeteroData()
    for name, rows in x.items():
        data[name].x = rows
    compress_features(data)
    most = []
    gather = bitslab.CompressedFeature.gather

    def counted(feature, ids, *args, **kwargs):
        most.append(len(ids))
        return gather(feature, ids, *args, **kwargs)

    monkeypatch.setattr(bitslab.CompressedFeature, "gather", counted)
    found = ours(data.x_dict, edges)
    # Each row is decoded once, for keys, queries and values together.
    assert max(most) <= 16 and sum(most) == sum(map(len, x.values()))
    for name, rows in plain(x, edges).items():
        close(found[name], rows)
    sum(rows.square().sum() for rows in found.values()).backward()
    assert all(lin.weight.grad is not None for lin in ours.kqv_lin.lins.values())
    assert all(data[name].x.feature.kept_whole is None for name in x)


def test_hgt_of_lazy_sizes_takes_those_of_packed_rows():
    x, edges = hetero()
    found = []
    for packs in (False, True):
        torch.manual_seed(4)
        layer = pyg.HGTConv(-1, 8, METADATA, heads=2)
        given = {t: CompressedTable.from_tensor(v) if packs else v for t, v in x.items()}
        torch.manual_seed(9)
        found.append(layer(given, edges))
    for name, rows in found[0].items():
        assert torch.equal(found[1][name], rows)


def test_packed_rows_of_hgt_without_memory_for_a_plan_raise_that(monkeypatch):
    x, edges = hetero()
    ours = pyg.HGTConv({t: v.shape[1] for t, v in x.items()}, 8, METADATA)
    packed = {t: CompressedTable.from_tensor(v) for t, v in x.items()}
    with monkeypatch.context() as patched:
        patched.setattr(SURVEY, without_memory)
        with pytest.raises(PlanMemoryError, match="no memory for the plan"):
            ours(packed, edges)
    assert ours(packed, edges)["paper"].shape == (30, 8)


def test_packed_features_of_a_data_set_are_decoded_as_they_are_multiplied():
    index, kind = graph()
    plain, ours = both("RGCNConv", 8, 12, TYPES)
    data = Data(x=torch.randn(NODES, 8).round(), edge_index=index)
    expected = plain(data.x, index, kind)
    compress_features(data)
    close(ours(data.x, index, kind), expected)
    assert relational_calls(ours) == {"": {"": 1}}
    assert data.x.feature.kept_whole is None, "the features were decoded as a whole"


@pytest.mark.parametrize("as_table", [False, True], ids=["feature", "table"])
@pytest.mark.parametrize("name", ["RGCNConv", "FastRGCNConv"])
def test_packed_features_without_a_root_weight(name, as_table):
    index, kind = graph()
    plain, ours = both(name, 8, 12, TYPES, root_weight=False)
    data = Data(x=torch.randn(NODES, 8).round(), edge_index=index)
    raw = data.x.clone()
    table: Any = CompressedTable.from_tensor(raw)
    compress_features(data)
    x = table if as_table else data.x
    close(ours(x, index, kind), plain(raw, index, kind))
    wide = torch.randn(NODES, 3)  # of destinations only their number counts
    for target in (wide, CompressedTable.from_tensor(wide)):
        close(ours((x, target), index, kind), plain((raw, wide), index, kind))
    assert relational_calls(ours) == {"": {"": 3}}


NOT_PACKED: list[tuple[str, dict[str, Any]]] = [
    ("RGCNConv", {"aggr": "max"}),
    ("RGATConv", {"mod": "additive"}),
    ("RGATConv", {"attention_mechanism": "within-relation"}),
]


@pytest.mark.parametrize(("name", "kwargs"), NOT_PACKED, ids=str)
def test_packed_rows_are_refused_by_name_where_they_are_not_taken(name, kwargs):
    index, kind = graph()
    ours = getattr(pyg, name)(8, 12, TYPES, **kwargs)
    x = torch.randn(NODES, 8).round()
    table: Any = CompressedTable.from_tensor(x)
    (why,) = kwargs
    for packed in (table, bitslab.SlabCache(table, 4000, devices=["cpu"])):
        match = f"^x is {type(packed).__name__}, .*{why}.*; accepted are tensors$"
        with pytest.raises(ArgumentTypeError, match=match):
            ours(packed, index, kind)
    if name == "RGCNConv":
        with pytest.raises(ArgumentTypeError, match=r"^x\[0\] is CompressedTable"):
            ours((table, x), index, kind)
    assert not relational_calls(ours)
    narrow = CompressedTable.from_tensor(x[:, :5].contiguous())
    with pytest.raises(ArgumentTypeError, match="^x is CompressedTable"):
        getattr(pyg, name)(8, 12, TYPES)(narrow, index, kind)


def test_packed_rows_are_refused_by_name_as_features_of_edges_and_of_another_width():
    table: Any = CompressedTable.from_tensor(torch.randn(EDGES, 8).round())
    with pytest.raises(ArgumentTypeError, match="^edge_attr is CompressedTable; accepted are"):
        pyg.RGATConv(8, 12, TYPES, edge_dim=8)(torch.randn(NODES, 8), *graph(), table)
    x, edges = hetero()
    ours = pyg.HGTConv({t: v.shape[1] for t, v in x.items()}, 8, METADATA)
    x["author"] = CompressedTable.from_tensor(torch.randn(20, 9))
    with pytest.raises(ArgumentTypeError, match=r"^x_dict\['author'\] is CompressedTable; accep"):
        ours(x, edges)


@pytest.mark.parametrize("name", ["RGCNConv", "RGATConv"])
@pytest.mark.parametrize("cached", [False, True], ids=["table", "cache"])
def test_packed_rows_take_the_place_of_features(name, cached):
    index, kind = graph()
    plain, ours = both(name, 8, 12, TYPES)
    x = torch.randn(NODES, 8).round()
    packed: Any = bitslab.CompressedTable.from_tensor(x, progress=False)
    if cached:
        packed = bitslab.SlabCache(packed, 200, devices=["cpu"])
        packed.fill(torch.arange(0, NODES, 2))
    close(ours(packed, index, kind), plain(x, index, kind))
    assert relational_calls(ours) == {"": {"": 1}}
    if cached:
        assert packed.stats()["hits"]


def without_memory(*args):
    raise MemoryError("Unable to allocate 8 GiB")


def test_packed_rows_without_memory_for_a_plan_raise_that(monkeypatch):
    ours = pyg.RGCNConv(8, 8, TYPES)
    table = CompressedTable.from_tensor(torch.randn(NODES, 8).round())
    monkeypatch.setattr(SURVEY, without_memory)
    with pytest.raises(PlanMemoryError, match="no memory for the plan"):
        ours(table, *graph())
