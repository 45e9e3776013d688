"""PyG's compiled layers inside torch.autocast, torch.compile, copies and PyG's explainers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.explain import Explainer, GNNExplainer

from bitslab.integrations import pyg
from bitslab.integrations.pyg import compile_relational, relational_calls, restore_relational
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


def compare_in_autocast(plain, ours, features, *args, **kwargs):
    """Compare as `compare` does, inside torch.autocast, within the precision of bfloat16."""
    results = []
    for layer in (plain, ours):
        leaves = {k: x.clone().requires_grad_() for k, x in features.items()}
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16):
            x = leaves if len(leaves) > 2 else leaves["x"]
            outs = tensors_of(layer(x, *args, **kwargs))
        layer.zero_grad()
        loss = sum((o.float() * torch.linspace(-1, 1, o.numel()).view_as(o)).sum() for o in outs)
        loss.backward()
        grads = [x.grad for x in leaves.values()] + [p.grad for p in layer.parameters()]
        results.append((outs, grads))
    for a, b in zip(results[1][0], results[0][0], strict=True):
        assert a.dtype == b.dtype
        close(a.float(), b.float(), 0.03)
    for a, b in zip(results[1][1], results[0][1], strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            close(a, b, 0.05)


class Two(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.one, self.two = make(8, 12), make(12, 6)

    def forward(self, x, *args):
        return self.two(self.one(x, *args).tanh(), *args)  # no kink: rounding would cross it


AUTOCAST = [
    ("RGCNConv", {}),
    ("RGCNConv", {"num_bases": 3}),
    ("RGCNConv", {"num_blocks": 2}),
    ("RGCNConv", {"bias": False}),
    ("RGCNConv", {"root_weight": False}),
    ("FastRGCNConv", {"num_bases": 3, "bias": False}),
    ("RGCNConv", {"bias": False, "root_weight": False}),
    ("RGATConv", {}),
    ("RGATConv", {"num_bases": 2}),
    ("RGATConv", {"dropout": 0.4}),
]


@pytest.mark.parametrize(("name", "kwargs"), AUTOCAST, ids=str)
def test_layers_inside_autocast(name, kwargs):
    index, kind = graph()
    models = []
    for module in (gnn, pyg):
        torch.manual_seed(3)
        models.append(Two(lambda n, m, of=module: getattr(of, name)(n, m, TYPES, **kwargs)))
    plain, ours = models
    ours.load_state_dict(plain.state_dict())
    x = {"x": torch.randn(NODES, 8) / 4}
    compare_in_autocast(plain, ours, x, index, kind)
    assert relational_calls(ours) == {"one": {"": 1}, "two": {"": 1}}


@pytest.mark.parametrize("kwargs", [{}, {"bias": False}], ids=options_id)
@pytest.mark.parametrize("name", ["RGCNConv", "FastRGCNConv"])
def test_layers_of_bfloat16_return_the_dtype_of_pygs(name, kwargs):
    plain, ours = (layer.bfloat16() for layer in both(name, 8, 12, TYPES, **kwargs))
    x, edges = torch.randn(NODES, 8).bfloat16() / 4, graph()
    expected, found = plain(x, *edges), ours(x, *edges)
    assert found.dtype is expected.dtype
    close(found.float(), expected.float(), 0.03)


def test_rgat_with_features_of_edges_inside_autocast():
    plain, ours = both("RGATConv", 8, 12, TYPES, heads=2, edge_dim=3)
    edge_attr = torch.randn(EDGES, 3)
    compare_in_autocast(plain, ours, {"x": torch.randn(NODES, 8)}, *graph(), edge_attr)
    assert relational_calls(ours) == {"": {"": 1}}


@pytest.mark.parametrize("out", [8, 16])
def test_hgt_inside_autocast(out):
    x, edges = hetero()
    sizes = {t: v.shape[1] for t, v in x.items()}
    plain, ours = both("HGTConv", sizes, out, METADATA, heads=4)
    compare_in_autocast(plain, ours, x, edges)
    assert relational_calls(ours) == {"": {"": 1}}


@pytest.mark.parametrize("name", ["RGCNConv", "RGATConv", "HGTConv"])
def test_autocast_is_the_same_inside_torch_compile(name, fresh_compiler):
    if name == "HGTConv":
        x, edges = hetero()
        _, ours = both(name, {t: v.shape[1] for t, v in x.items()}, 8, METADATA)
        args = (x, edges)
    else:
        _, ours = both(name, 8, 12, TYPES, num_bases=3)
        args = (torch.randn(NODES, 8), *graph())
    with torch.autocast("cpu", torch.bfloat16):
        found = tensors_of(torch.compile(ours, fullgraph=True, backend="aot_eager")(*args))
        expected = tensors_of(ours(*args))
    for a, b in zip(found, expected, strict=True):
        close(a, b)


def test_autocast_leaves_float64_as_torch_does():
    plain, ours = both("RGCNConv", 8, 12, TYPES)
    x, edges = torch.randn(NODES, 8).double(), graph()
    plain, ours = plain.double(), ours.double()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ours(x, *edges), plain(x, *edges))


def mask_of_edges(model, x, index, kind):
    torch.manual_seed(1)
    explainer = Explainer(
        model,
        algorithm=GNNExplainer(epochs=3),
        explanation_type="model",
        edge_mask_type="object",
        node_mask_type="attributes",
        model_config={
            "mode": "multiclass_classification", "task_level": "node", "return_type": "raw"
        },
    )  # fmt: skip
    return explainer(x, index, kind=kind).edge_mask


class Explained(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = gnn.RGATConv(8, 8, TYPES), gnn.RGATConv(8, 4, TYPES)

    def forward(self, x, index, kind):
        return self.two(self.one(x, index, kind).relu(), index, kind)


def copied(model):
    return pickle.loads(pickle.dumps(copy.deepcopy(model)))


STEPS = [
    ("compile", "explain", "call"),
    ("call", "explain", "compile", "call", "explain", "call", "explain"),
    ("compile", "call", "copy", "explain", "call"),
    ("compile", "copy", "explain", "restore", "explain", "compile", "call", "explain"),
]


@pytest.mark.parametrize("steps", STEPS, ids="-".join)
def test_masks_of_edges_are_explained_in_any_order_of_calls(steps):
    index, kind = graph()
    x = torch.randn(NODES, 8)
    torch.manual_seed(0)
    plain = Explained()
    model = copy.deepcopy(plain)
    expected, mask = plain(x, index, kind), mask_of_edges(plain, x, index, kind)
    for step in steps:
        if step == "explain":
            torch.testing.assert_close(mask_of_edges(model, x, index, kind), mask)
        elif step == "call":
            close(model(x, index, kind), expected)
        else:
            change = {"compile": compile_relational, "restore": restore_relational, "copy": copied}
            changed = change[step](model)
            model = changed if step == "copy" else model


def test_unpickled_layers_are_ready_for_torch_compile(fresh_compiler, monkeypatch):
    _, ours = both("RGATConv", 8, 8, TYPES, heads=2)
    pickled = pickle.dumps(ours)
    monkeypatch.setattr("bitslab.relational.layers._rgat", {})  # as in another process
    again = pickle.loads(pickled)
    x, edges = torch.randn(NODES, 8), graph()
    found = torch.compile(again, fullgraph=True, backend="aot_eager")(x, *edges)
    close(found, ours(x, *edges))


class Broken(nn.Module):
    """Layers that `torch.compile` compiles one by one."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, *edges):
        outs = []
        for layer in self.layers:
            outs.append(layer(x, *edges))
            torch._dynamo.graph_break()
        return outs


def test_many_layers_are_compiled_within_torchs_limit(fresh_compiler):
    kinds = (pyg.RGCNConv, pyg.RGATConv)
    model = Broken([kind(8, 4 + i, TYPES) for i in range(6) for kind in kinds] * 2)
    x, edges = torch.randn(NODES, 8), graph()
    expected = model(x, *edges)
    whole = torch.compile(model, backend="aot_eager")
    # Twelve sizes, eight compilations for each class, and layers of one size share theirs.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=8):
        for a, b in zip(whole(x, *edges), expected, strict=True):
            close(a, b)


@pytest.mark.parametrize("name", ["RGCNConv", "RGATConv"])
def test_compiled_by_torch_without_a_break(name, fresh_compiler):
    _, ours = both(name, 8, 12, TYPES)
    x, edges = torch.randn(NODES, 8, requires_grad=True), graph()
    whole = torch.compile(ours, fullgraph=True, backend="aot_eager")
    found, expected = whole(x, *edges), ours(x, *edges)
    close(found, expected)
    parameters = [x, *ours.parameters()]
    grads = [torch.autograd.grad(o.square().sum(), parameters, allow_unused=True)
             for o in (found, expected)]  # fmt: skip
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            close(a, b)
