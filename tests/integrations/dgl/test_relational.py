"""DGL's relational layers compiled: results, gradients and state are those of DGL's own."""

from __future__ import annotations

import copy
from typing import Any

import dgl
import pytest
import torch
from dgl import nn as dnn
from torch import nn

from bitslab.errors import ArgumentError
from bitslab.integrations import dgl as ours_of
from bitslab.integrations.dgl import compile_relational, relational_calls, restore_relational
from bitslab.relational.products import Products
from bitslab.relational.steps import Costs
from tests.helpers import options_id

NODES, EDGES, TYPES, NODE_TYPES = 40, 300, 5, 3


#: What finds the order and the pairs of a small graph.
SURVEY = "bitslab.engine.kernels.cpu.segment_sums.survey_edges"


def drawn(seed=0):
    draw = torch.Generator().manual_seed(seed)
    ends = torch.randint(NODES, (2, EDGES), generator=draw)
    types = torch.randint(TYPES, (EDGES,), generator=draw)
    kinds = torch.randint(NODE_TYPES, (NODES,), generator=draw)
    return dgl.graph((ends[0], ends[1]), num_nodes=NODES), types, kinds


def both(name, *args, **kwargs):
    layers = []
    for module in (dnn, ours_of):
        torch.manual_seed(3)
        layers.append(getattr(module, name)(*args, **kwargs))
    plain, ours = layers
    for a, b in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        assert a[0] == b[0] and torch.equal(a[1], b[1])
    return plain, ours


def close(a, b, within=1e-5):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert (a - b).abs().max() <= within * max(1.0, b.abs().max().item())


def compare(plain, ours, x, call, reason=""):
    """Compare outputs and gradients; ``call(layer, x)`` runs a layer."""
    results = []
    for layer in (plain, ours):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(5)
        out = call(layer, leaf)
        layer.zero_grad()
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out, leaf.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*reversed(results), strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            close(a, b)
    assert relational_calls(ours)[""] == {reason: 1}


REL = [
    {},
    {"regularizer": "basis", "num_bases": 3},
    {"regularizer": "bdd", "num_bases": 2},
    {"bias": False, "self_loop": False},
    {"layer_norm": True, "activation": torch.relu, "dropout": 0.3},
]


@pytest.mark.parametrize("norm", [None, (EDGES,), (EDGES, 1)], ids=["no norm", "1-D", "2-D"])
@pytest.mark.parametrize("kwargs", REL, ids=options_id)
def test_rel_graph_conv(kwargs, norm):
    graph, types, _ = drawn()
    weights = None if norm is None else torch.rand(norm).reshape(EDGES, 1)
    plain, ours = both("RelGraphConv", 8, 12, TYPES, **kwargs)
    x = torch.randn(NODES, 8)
    compare(plain, ours, x, lambda layer, x: layer(graph, x, types, weights))


def test_rel_graph_conv_of_a_block_and_of_sorted_types():
    graph, types, _ = drawn()
    block = dgl.to_block(graph, torch.arange(NODES))
    kinds = types[block.edata[dgl.EID]]
    plain, ours = both("RelGraphConv", 8, 12, TYPES)
    x = torch.randn(block.num_src_nodes(), 8)
    compare(plain, ours, x, lambda layer, x: layer(block, x, kinds))
    order = types.argsort(stable=True)
    u, v = (ends[order] for ends in graph.edges())
    by_type = dgl.graph((u, v), num_nodes=NODES)
    plain, ours = both("RelGraphConv", 8, 12, TYPES)
    compare(
        plain, ours, x[:NODES], lambda layer, x: layer(by_type, x, types[order], presorted=True)
    )


@pytest.mark.parametrize(
    ("heads", "use_norm", "width"), [(1, False, 8), (4, False, 8), (2, True, 10)]
)
def test_hgt(heads, use_norm, width):
    graph, types, kinds = drawn()
    args = (width, 8 // heads, heads, NODE_TYPES, TYPES)
    plain, ours = both("HGTConv", *args, use_norm=use_norm)
    for layer in (plain, ours):
        torch.manual_seed(8)
        for p in layer.relation_pri:
            nn.init.normal_(p)
    x = torch.randn(NODES, width)
    compare(plain, ours, x, lambda layer, x: layer(graph, x, kinds, types))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_hgt_of_types_in_order_multiplies_weights_first(heads, monkeypatch):
    # Operations alone count: layers this small are left as they are else.
    monkeypatch.setattr(
        "bitslab.relational.steps.COSTS", dict.fromkeys(("cpu", "cuda"), Costs(1.0))
    )
    draw = torch.Generator().manual_seed(0)
    nodes = torch.arange(NODE_TYPES).repeat_interleave(200)
    types = torch.randint(TYPES, (60,), generator=draw)
    ends = torch.randint(200, (2, 60), generator=draw)
    of_relations = torch.randint(NODE_TYPES, (2, TYPES), generator=draw)
    first = ends + 200 * of_relations[:, types]
    other = types.roll(1)  # relations that do not say the types of their ends
    products, multiply = [], Products.weight_product

    def counted(self, step, weight, matrix):
        products.append(step)
        return multiply(self, step, weight, matrix)

    monkeypatch.setattr(Products, "weight_product", counted)
    x = torch.randn(len(nodes), 8)
    g = dgl.graph((first[0], first[1]), num_nodes=len(nodes))
    for kinds, relations, found in (
        (nodes, types, 4), (nodes, other, 0), (nodes.flip(0), types, 0)
    ):  # fmt: skip
        plain, ours = both("HGTConv", 8, 8 // heads, heads, NODE_TYPES, TYPES, dropout=0.0)
        products.clear()
        compare(
            plain,
            ours,
            x,
            lambda layer, x, kinds=kinds, relations=relations: layer(g, x, kinds, relations),
        )
        assert len(products) == found  # of keys and values, forward and backward


def test_hgt_of_a_block():
    graph, types, kinds = drawn()
    few = dgl.in_subgraph(graph, torch.arange(10))
    block = dgl.to_block(few, torch.arange(10))
    edge_types = types[few.edata[dgl.EID]][block.edata[dgl.EID]]
    node_types = kinds[block.srcdata[dgl.NID]]
    plain, ours = both("HGTConv", 8, 8, 1, NODE_TYPES, TYPES, dropout=0.0)
    x = torch.randn(block.num_src_nodes(), 8)
    compare(plain, ours, x, lambda layer, x: layer(block, x, node_types, edge_types))


@pytest.mark.parametrize("regularizer", [None, "basis", "bdd"])
def test_typed_linear(regularizer):
    types = torch.randint(TYPES, (NODES,))
    plain, ours = both("TypedLinear", 8, 12, TYPES, regularizer, 2 if regularizer else None)
    compare(plain, ours, torch.randn(NODES, 8), lambda layer, x: layer(x, types))


def test_a_graph_that_gets_more_edges():
    graph, types, _ = drawn()
    plain, ours = both("RelGraphConv", 8, 12, TYPES)
    x = torch.randn(NODES, 8)
    close(ours(graph, x, types), plain(graph, x, types))
    graph.add_edges(torch.tensor([0, 1]), torch.tensor([2, 3]))
    types = torch.cat([types, torch.tensor([1, 0])])
    close(ours(graph, x, types), plain(graph, x, types))


class Derived(dnn.TypedLinear):  # type: ignore[misc]
    pass


def test_one_line_compiles_a_model_and_one_restores_it():
    graph, types, kinds = drawn()
    torch.manual_seed(0)
    model = nn.ModuleList(
        [
            dnn.RelGraphConv(8, 8, TYPES),
            dnn.HGTConv(8, 4, 2, NODE_TYPES, TYPES, dropout=0.0),
            Derived(8, 8, 2),
        ]
    )
    x = torch.randn(NODES, 8)

    def run():
        return model[1](graph, model[0](graph, x, types), kinds, types)

    expected, kinds_before = run(), list(map(type, model.modules()))
    attributes = [set(vars(m)) for m in model.modules()]
    report = compile_relational(model)
    assert {"0": "RelGraphConv", "1": "HGTConv"}.items() <= report.compiled.items()
    assert report.left == {"2": "Derived is derived from DGL's class"}
    close(run(), expected)
    calls = relational_calls(copy.deepcopy(model))
    assert calls["0"] == {"": 1} and calls["1"] == {"": 1}
    assert restore_relational(model) is model
    assert list(map(type, model.modules())) == kinds_before
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert torch.equal(run(), expected)


def test_calls_that_are_not_covered_run_dgls_code():
    graph, types, _ = drawn()
    plain, ours = both("RelGraphConv", 8, 12, TYPES)
    x = torch.randn(NODES, 8)
    graph.edata["norm"] = torch.rand(EDGES, 1)
    assert torch.equal(ours(graph, x, types), plain(graph, x, types))
    assert relational_calls(ours)[""] == {"a norm that the graph has": 1}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_a_norm_of_another_dtype_gives_the_result_of_dgls(dtype):
    graph, types, _ = drawn()
    plain, ours = both("RelGraphConv", 8, 12, TYPES)
    x, norm = torch.randn(NODES, 8), (3 * torch.rand(EDGES, 1)).to(dtype)
    assert torch.equal(ours(graph, x, types, norm), plain(graph, x, types, norm))
    assert relational_calls(ours)[""] == {f"a norm of {dtype}": 1}


def test_hgt_names_how_many_rows_and_types_are_accepted():
    graph, types, kinds = drawn()
    layer = ours_of.HGTConv(8, 8, 1, NODE_TYPES, TYPES)
    for x, ntype in ((torch.randn(NODES + 1, 8), kinds), (torch.randn(NODES, 8), kinds[1:])):
        with pytest.raises(ArgumentError, match="accepted are 40 of both, one for each source"):
            layer(graph, x, ntype, types)


def test_without_memory_for_a_plan_dgls_code_runs(monkeypatch):
    def fail(*args):
        raise MemoryError("Unable to allocate 8 GiB")

    graph, types, _ = drawn()
    plain, ours = both("RelGraphConv", 8, 12, TYPES)
    x = torch.randn(NODES, 8)
    with monkeypatch.context() as patched:
        patched.setattr(SURVEY, fail)
        assert torch.equal(ours(graph, x, types), plain(graph, x, types))
    assert relational_calls(ours) == {"": {"no memory for a plan": 1}}
    torch.testing.assert_close(ours(graph, x, types), plain(graph, x, types), rtol=1e-4, atol=1e-5)
    assert relational_calls(ours) == {"": {"no memory for a plan": 1, "": 1}}


def gradients(layer, call, x):
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = call(layer, leaf)
    layer.zero_grad()
    (out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return out, [leaf.grad, *(p.grad for p in layer.parameters())]


AUTOCAST = [
    ("RelGraphConv", (8, 12, TYPES), {}),
    ("RelGraphConv", (8, 12, TYPES), {"regularizer": "basis", "num_bases": 3}),
    ("RelGraphConv", (8, 12, TYPES), {"regularizer": "bdd", "num_bases": 2, "layer_norm": True}),
    ("HGTConv", (8, 4, 2, NODE_TYPES, TYPES), {"dropout": 0.0}),
    ("HGTConv", (8, 3, 2, NODE_TYPES, TYPES), {"dropout": 0.0, "use_norm": True}),
    ("TypedLinear", (8, 12, TYPES), {}),
    ("TypedLinear", (8, 12, TYPES), {"regularizer": "basis", "num_bases": 3}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), AUTOCAST, ids=str)
def test_layers_inside_autocast(name, args, kwargs):
    graph, types, kinds = drawn()
    calls = {
        "RelGraphConv": lambda layer, x: layer(graph, x, types),
        "HGTConv": lambda layer, x: layer(graph, x, kinds, types),
        "TypedLinear": lambda layer, x: layer(x, types[:NODES]),
    }
    plain, ours = both(name, *args, **kwargs)
    x = torch.randn(NODES, 8) / 2
    (expected, wanted), (out, found) = (gradients(layer, calls[name], x) for layer in (plain, ours))
    # DGL multiplies by weights of float32 in float32, whatever autocast says.
    assert out.dtype == expected.dtype or (name, kwargs) == ("TypedLinear", {})
    close(out.float(), expected.float(), 0.03)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            close(a, b, 0.05)
    assert set(relational_calls(ours)[""]) == {""}


@pytest.mark.parametrize("regularizer", [None, "basis", "bdd"])
def test_typed_linear_compiled_by_torch_without_a_break(regularizer, fresh_compiler):
    types = torch.randint(TYPES, (NODES,))
    bases = 2 if regularizer else None
    plain, ours = both("TypedLinear", 8, 12, TYPES, regularizer, bases)
    whole: Any = torch.compile(ours, fullgraph=True, backend="aot_eager")
    results = []
    for layer in (plain, whole):
        x = torch.linspace(-1, 1, NODES * 8).view(NODES, 8).requires_grad_()
        out = layer(x, types)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    for a, b in zip(*reversed(results), strict=True):
        close(a, b)


def test_derived_classes_with_a_message_of_their_own_run_dgls_code():
    graph, types, kinds = drawn()

    def doubled(base: Any) -> Any:
        class Doubled(base):  # type: ignore[misc]
            def message(self, edges):
                return {name: 2 * rows for name, rows in super().message(edges).items()}

        return Doubled

    x = torch.randn(NODES, 8)
    for name, args, call in (
        ("RelGraphConv", (8, 12, TYPES), lambda layer: layer(graph, x, types)),
        ("HGTConv", (8, 4, 2, NODE_TYPES, TYPES), lambda layer: layer(graph, x, kinds, types)),
    ):
        found = []
        for module in (dnn, ours_of):
            torch.manual_seed(3)
            layer = doubled(getattr(module, name))(*args).eval()
            found.append(call(layer))
        close(found[1], found[0])
        assert relational_calls(layer)[""] == {"Doubled defines message": 1}


class OfSources(nn.Module):
    """Gives a layer of one kind of nodes the features of the sources, of HeteroGraphConv's pair."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, graph, pair, *args):
        return self.layer(graph, pair[0], *args)


@pytest.mark.parametrize("of_block", [False, True], ids=["graph", "block"])
@pytest.mark.parametrize("name", ["RelGraphConv", "HGTConv"])
def test_hetero_graph_conv_around_compiled_layers_and_compiled_inside(name, of_block):
    sizes = {"user": 30, "item": 30}  # the sources' features stand for the destinations' too
    kinds = [("user", "buys", "item"), ("item", "of", "user"), ("user", "knows", "user")]
    draw = torch.Generator().manual_seed(0)
    edges = {k: tuple(torch.randint(30, (2, 80), generator=draw)) for k in kinds}
    graph = dgl.heterograph(edges, sizes)
    if of_block:
        graph = dgl.to_block(graph, {t: torch.arange(n) for t, n in sizes.items()})
    x = {t: torch.randn(graph.num_src_nodes(t), 8, generator=draw) for t in sizes}
    types = {k: torch.randint(TYPES, (80,), generator=draw) for k in kinds}
    more: dict[str, Any] = {k[1]: (types[k],) for k in kinds}
    args: Any = (8, 8, TYPES)
    if name == "HGTConv":
        args = (8, 4, 2, NODE_TYPES, TYPES)
        nodes = torch.randint(NODE_TYPES, (30,), generator=draw)
        more = {k: (nodes, *each) for k, each in more.items()}
    models = []
    for module in (dnn, ours_of):
        torch.manual_seed(3)
        layers = {k[1]: OfSources(getattr(module, name)(*args).eval()) for k in kinds}
        models.append(dnn.HeteroGraphConv(layers, aggregate="sum"))

    def run(model):
        leaves = {t: rows.clone().requires_grad_() for t, rows in x.items()}
        out = model(graph, leaves, mod_args=more)
        model.zero_grad()
        total = torch.stack([rows.square().sum() for rows in out.values()]).sum()
        total.backward()
        grads = [p.grad for p in model.parameters()]
        return [*out.values(), *(t.grad for t in leaves.values()), *grads]

    def same(found, expected):
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            if b is not None:
                close(a, b)

    plain, ours = models
    expected = run(plain)
    same(run(ours), expected)
    compiled = compile_relational(plain).compiled
    assert list(compiled.values()).count(name) == len(kinds)
    same(run(plain), expected)
    for model in models:
        calls = relational_calls(model)
        assert {k: v for k, v in calls.items() if k.endswith(".layer")} == {
            f"mods.{kind[1]}.layer": {"": 1} for kind in kinds
        }
    restore_relational(plain)
    same(run(plain), expected)
