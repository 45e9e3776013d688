"""PyG's to_hetero around compiled layers, before and after they are compiled."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as gnn
from torch import nn

from bitslab.integrations import pyg
from bitslab.integrations.pyg import compile_relational, relational_calls, restore_relational
from tests.integrations.pyg.relational_layers import TYPES, close, graph

SIZES = {"paper": 30, "author": 20}
EDGE_TYPES = [("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "by", "author")]


class Layers(nn.Module):
    """Two layers of typed edges; to_hetero makes one of each for every kind of edge."""

    def __init__(self, module, name):
        super().__init__()
        make = getattr(module, name)
        if name == "RGATConv":
            self.one, self.two = make(8, 6, TYPES, heads=2), make(12, 4, TYPES)
        else:
            self.one, self.two = make((8, 8), 12, TYPES), make((12, 12), 4, TYPES)

    def forward(self, x, edge_index, edge_type):
        hidden = self.one(x, edge_index, edge_type).relu()
        return self.two(hidden, edge_index, edge_type)


def inputs():
    draw = torch.Generator().manual_seed(0)
    x = {t: torch.randn(n, 8, generator=draw).requires_grad_() for t, n in SIZES.items()}
    made = {t: graph(SIZES[t[0]], SIZES[t[2]], 80, seed=i) for i, t in enumerate(EDGE_TYPES)}
    return x, {t: e for t, (e, _) in made.items()}, {t: k for t, (_, k) in made.items()}


def values_and_gradients(model):
    x, edges, types = inputs()
    out = model(x, edges, types)
    model.zero_grad()
    sum(
        (rows * torch.linspace(-1, 1, rows.numel()).view_as(rows)).sum() for rows in out.values()
    ).backward()
    return [*out.values(), *(t.grad for t in x.values()), *(p.grad for p in model.parameters())]


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            close(a, b)


@pytest.mark.parametrize("name", ["RGCNConv", "FastRGCNConv", "RGATConv"])
def test_to_hetero_of_compiled_layers_and_compiled_after_it(name):
    metadata = (list(SIZES), EDGE_TYPES)
    plain = gnn.to_hetero(Layers(gnn, name), metadata)
    around = gnn.to_hetero(Layers(pyg, name), metadata)
    for p in plain.parameters():
        nn.init.normal_(p, std=0.3)
    around.load_state_dict(plain.state_dict())
    expected = values_and_gradients(plain)
    same(values_and_gradients(around), expected)
    calls = relational_calls(around)
    assert len(calls) == 2 * len(EDGE_TYPES)
    assert all(each == {"": 1} for each in calls.values())
    # Inside: what to_hetero made of PyG's layers is compiled in place.
    report = compile_relational(plain)
    assert len(report.compiled) == 2 * len(EDGE_TYPES) and not report.left
    same(values_and_gradients(plain), expected)
    assert all(each == {"": 1} for each in relational_calls(plain).values())
    same(values_and_gradients(restore_relational(plain)), expected)
    assert not relational_calls(plain)
