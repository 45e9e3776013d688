"""Typed products over packed rows: the bits of raw rows, and no whole copy of them."""

from __future__ import annotations

import pytest
import torch

import bitslab
from bitslab.engine.kernels.cpu import typed_products
from tests.relational.oracle import random_graph
from tests.relational.programs import inputs_of, rgat, rgcn, rgcn_mean


@pytest.mark.parametrize("program", [rgcn, rgcn_mean, rgat], ids=lambda p: p.__name__)
@pytest.mark.parametrize("kind", [bitslab.CompressedTable, bitslab.CompressedFeature])
def test_packed_rows_are_decoded_block_by_block(program, kind, monkeypatch):
    monkeypatch.setattr(typed_products, "BLOCK_ROWS", 64)
    most = []
    plain = kind.gather

    def counted(table, ids, *args, **kwargs):
        most.append(len(ids))
        return plain(table, ids, *args, **kwargs)

    monkeypatch.setattr(kind, "gather", counted)
    graph = random_graph(0, 1000, 1000, 4000, 3)
    inputs = inputs_of(program.__name__, graph, torch.float32)
    inputs["x"] = inputs["x"].round()
    leaves = {k: x.requires_grad_() for k, x in inputs.items() if k != "x"}
    packed = kind.from_tensor(inputs["x"], progress=False)
    compiled = program.compile(bitslab.relational.Passes(sides=False))
    outs, grads = [], []
    for x in (inputs["x"], packed):
        out = compiled(graph, *(inputs | leaves | {"x": x}).values())
        out = out[0] if isinstance(out, tuple) else out
        outs.append(out.detach())
        grads.append(torch.autograd.grad(out.square().sum(), list(leaves.values())))
    assert most and max(most) <= 64
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-5)
    for raw, decoded in zip(*grads, strict=True):
        torch.testing.assert_close(raw, decoded, rtol=1e-5, atol=1e-4)


def test_closed_table():
    graph = random_graph(0, 12, 12, 60, 4)
    inputs = inputs_of("rgcn", graph, torch.float32)
    table = bitslab.CompressedTable.from_tensor(inputs["x"])
    table.close()
    with pytest.raises(bitslab.BitslabError, match="closed"):
        rgcn.compile()(graph, *(inputs | {"x": table}).values())


def test_table_closed_before_the_backward_pass():
    graph = random_graph(0, 12, 12, 60, 4)
    inputs = inputs_of("rgcn", graph, torch.float32)
    leaf = inputs["weight"].requires_grad_()
    with bitslab.CompressedTable.from_tensor(inputs["x"], progress=False) as table:
        out = rgcn.compile()(graph, *(inputs | {"x": table}).values())
    with pytest.raises(bitslab.BitslabError, match="closed"):
        out.sum().backward()
    assert leaf.grad is None
