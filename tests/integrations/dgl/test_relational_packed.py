"""DGL's compiled layers over packed rows: the bits of the same layers over raw ones."""

from __future__ import annotations

import copy
from typing import Any

import dgl
import pytest
import torch

import bitslab
from bitslab import CompressedTable
from bitslab.engine.kernels.cpu import typed_products
from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.integrations import dgl as ours_of
from bitslab.integrations.dgl import compress_features, relational_calls
from bitslab.relational import PlanMemoryError, products
from bitslab.tensors import FeatureTensor
from tests.helpers import options_id

NODES, EDGES, TYPES, NODE_TYPES, WIDTH = 40, 300, 5, 3, 64


#: What finds the order and the pairs of a small graph.
SURVEY = "bitslab.engine.kernels.cpu.segment_sums.survey_edges"


def drawn(n_types=TYPES):
    draw = torch.Generator().manual_seed(0)
    ends = torch.randint(NODES, (2, EDGES), generator=draw)
    types = torch.randint(n_types, (EDGES,), generator=draw)
    kinds = torch.randint(NODE_TYPES, (NODES,), generator=draw)
    return dgl.graph((ends[0], ends[1]), num_nodes=NODES), types, kinds


def column_of(x):
    """Return x as a graph has it after `compress_features`."""
    graph = dgl.graph(([], []), num_nodes=len(x))
    graph.ndata["x"] = x.clone()
    compress_features(graph)
    return graph.ndata["x"]


def cached(x):
    cache = bitslab.SlabCache(CompressedTable.from_tensor(x), 4000, devices=["cpu"])
    cache.fill(torch.arange(0, len(x), 2))
    return cache


PACKED: dict[str, Any] = {
    "table": CompressedTable.from_tensor, "cache": cached, "column": column_of
}  # fmt: skip


def bits(layer, call, x):
    """Return the output of a layer, and the gradients of its parameters."""
    layer.zero_grad()
    torch.manual_seed(5)
    out = call(layer, x)
    (out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return [out, *(p.grad for p in layer.parameters())]


def check_same_bits(layer, call, x, packed):
    for a, b in zip(bits(layer, call, packed), bits(layer, call, x), strict=True):
        assert (a is None) == (b is None)
        assert b is None or (a.dtype is b.dtype and torch.equal(a, b))
    assert relational_calls(layer)[""] == {"": 2}
    if isinstance(packed, FeatureTensor):
        assert packed.feature.kept_whole is None, "the features were decoded as a whole"


REL: list[dict[str, Any]] = [
    {},
    {"regularizer": "basis", "num_bases": 3},
    {"regularizer": "bdd", "num_bases": 4},
    {"bias": False, "self_loop": False, "layer_norm": True},
    {"activation": torch.relu, "dropout": 0.3},
]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("kwargs", REL, ids=options_id)
def test_rel_graph_conv(kwargs, kind, autocast):
    graph, types, _ = drawn()
    x, norm = torch.randn(NODES, WIDTH), torch.rand(EDGES, 1)
    layer, packed = ours_of.RelGraphConv(WIDTH, 12, TYPES, **kwargs), PACKED[kind](x)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for weights in (None, norm):
            one = copy.deepcopy(layer)
            check_same_bits(one, lambda of, x, w=weights: of(graph, x, types, w), x, packed)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize(("heads", "size"), [(1, 16), (4, 3), (4, 16)])
def test_hgt(heads, size, kind, autocast):
    graph, types, kinds = drawn()
    x = torch.randn(NODES, WIDTH)
    layer = ours_of.HGTConv(WIDTH, size, heads, NODE_TYPES, TYPES, use_norm=heads == 1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        check_same_bits(layer, lambda of, x: of(graph, x, kinds, types), x, PACKED[kind](x))


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize(
    ("regularizer", "out"), [(None, 12), (None, 1), ("basis", 12), ("bdd", 12), ("bdd", 2)]
)
def test_typed_linear(regularizer, out, kind):
    _, _, kinds = drawn()
    x = torch.randn(NODES, WIDTH)
    layer = ours_of.TypedLinear(WIDTH, out, NODE_TYPES, regularizer, regularizer and 2)
    check_same_bits(layer, lambda of, x: of(x, kinds), x, PACKED[kind](x))


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("size", [4, 16])
def test_destinations_of_a_block_are_the_first_packed_rows(kind, size):
    graph, types, kinds = drawn()
    few = dgl.in_subgraph(graph, torch.arange(10))
    block = dgl.to_block(few, torch.arange(10))
    assert block.num_src_nodes() > block.num_dst_nodes()
    edge_types = types[few.edata[dgl.EID]][block.edata[dgl.EID]]
    node_types = kinds[block.srcdata[dgl.NID]]
    x = torch.randn(block.num_src_nodes(), WIDTH)
    packed = PACKED[kind](x)
    layer = ours_of.RelGraphConv(WIDTH, 12, TYPES)
    check_same_bits(layer, lambda of, x: of(block, x, edge_types), x, packed)
    layer = ours_of.HGTConv(WIDTH, size, 4, NODE_TYPES, TYPES, dropout=0.0)
    check_same_bits(layer, lambda of, x: of(block, x, node_types, edge_types), x, packed)


def test_features_of_a_graph_are_decoded_block_by_block(monkeypatch):
    for module in (typed_products, products):
        monkeypatch.setattr(module, "BLOCK_ROWS", 16)
    graph, types, kinds = drawn()
    graph.ndata["x"] = torch.randn(NODES, WIDTH)
    raw = graph.ndata["x"].clone()
    compress_features(graph)
    read = []
    gather = bitslab.CompressedFeature.gather

    def counted(feature, ids, *args, **kwargs):
        read.append(len(ids))
        return gather(feature, ids, *args, **kwargs)

    monkeypatch.setattr(bitslab.CompressedFeature, "gather", counted)
    layer = ours_of.HGTConv(WIDTH, 4, 4, NODE_TYPES, TYPES, dropout=0.0)
    found = layer(graph, graph.ndata["x"], kinds, types)
    # Once for keys, queries and values, and once for the skip connection.
    assert max(read) <= 16 and sum(read) == 2 * NODES
    torch.testing.assert_close(found, layer(graph, raw, kinds, types))


def test_columns_that_take_a_gradient_run_dgls_code():
    graph, types, _ = drawn()
    x = column_of(torch.randn(NODES, WIDTH)).requires_grad_()
    layer = ours_of.RelGraphConv(WIDTH, 12, TYPES)
    layer(graph, x, types).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    (reason,) = relational_calls(layer)[""]
    assert reason == "features that are not rows of floats"


def test_errors_of_packed_rows_name_what_is_wrong(monkeypatch):
    graph, types, kinds = drawn()
    table = CompressedTable.from_tensor(torch.randn(NODES, WIDTH))
    several = dgl.heterograph({("a", t, "a"): ([0], [1]) for t in ("r", "s")})
    layer = ours_of.RelGraphConv(WIDTH, 12, TYPES)
    match = "^feat is CompressedTable, .*2 edge types.*; accepted are tensors$"
    with pytest.raises(ArgumentTypeError, match=match):
        layer(several, table, types)
    ids = CompressedTable.from_tensor(torch.arange(NODES * WIDTH).view(NODES, WIDTH))
    for call, name in (
        (lambda: layer(graph, ids, types), "feat"),
        (lambda: ours_of.HGTConv(8, 8, 1, 3, 5)(graph, ids, kinds, types), "x"),
        (lambda: ours_of.TypedLinear(8, 8, 3)(ids, kinds), "x"),
    ):
        with pytest.raises(ArgumentTypeError, match=f"^{name} is CompressedTable, .*tensors$"):
            call()
    with pytest.raises(ArgumentError, match=r"rows of shape \[64\] by weights \[R, 8, 12\]"):
        ours_of.RelGraphConv(8, 12, TYPES)(graph, table, types)
    with pytest.raises(ArgumentError, match=r"x_type has shape \[39\], x \[40, 64\]; accepted"):
        ours_of.TypedLinear(WIDTH, 8, 3)(table, kinds[1:])
    with pytest.raises(ArgumentError, match="input 'x' has shape"):
        layer(graph, CompressedTable.from_tensor(torch.randn(NODES + 1, WIDTH)), types)

    def without_memory(*args):
        raise MemoryError("Unable to allocate 8 GiB")

    monkeypatch.setattr(SURVEY, without_memory)
    with pytest.raises(PlanMemoryError, match="no memory for the plan"):
        layer(graph, table, types.flip(0))
