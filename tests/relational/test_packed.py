"""Typed products over packed rows: the bits of raw rows, and no whole copy of them."""

from __future__ import annotations

import pytest
import torch

import bitslab
import bitslab.relational as rel
from bitslab.engine.kernels.cpu import typed_products
from bitslab.relational import products
from tests.relational.oracle import random_graph
from tests.relational.programs import blocks, inputs_of, rgat, rgcn, rgcn_mean


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


@rel.program
def of_all_kinds(g, x, y, weight, root, bias):
    near = rel.shared(bias) + g.dst(y) @ root
    return near + rel.sum_to_dst(rel.typed_linear(g.src(x), weight))


@rel.program
def of_relations(g, x, weight):
    return rel.sum_to_dst(rel.typed_linear(g.relation(x), weight))


@pytest.mark.parametrize("relations", [3, 12])
@pytest.mark.parametrize(("depth", "width"), [(1, 5), (48, 1), (48, 7), (1, 1)])
@pytest.mark.parametrize("rows", [16, 1 << 14], ids=["many blocks", "one block"])
def test_the_bits_of_raw_rows(rows, depth, width, relations, monkeypatch):
    for module in (typed_products, products):
        monkeypatch.setattr(module, "BLOCK_ROWS", rows)
    graph = random_graph(0, 300, 90, 1000, relations)
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, depth, generator=draw) for n in (300, 90))
    shapes = ((relations, depth, width), (depth, width), (width,))
    leaves = [torch.randn(s, generator=draw).requires_grad_() for s in shapes]
    program = of_all_kinds.compile(rel.Passes(sides=False))
    found = []
    packed = [bitslab.CompressedTable.from_tensor(t, progress=False) for t in (x, y)]
    for given in ((x, y), packed):
        out = program(graph, *given, *leaves)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for raw, decoded in zip(*found, strict=True):
        assert torch.equal(raw, decoded)


@pytest.mark.parametrize("width", [1, 3])
def test_rows_of_heads_and_of_relations(width):
    graph = random_graph(0, 300, 90, 1000, 3)
    draw = torch.Generator().manual_seed(0)
    for program, n, weight in (
        (blocks, 300, torch.randn(3, 2, 8, width, generator=draw)),
        (of_relations, 3, torch.randn(3, 16, width, generator=draw)),
    ):
        x, leaf = torch.randn(n, 16, generator=draw), weight.requires_grad_()
        found = []
        for given in (x, bitslab.CompressedTable.from_tensor(x, progress=False)):
            out = program.compile(rel.Passes(sides=False))(graph, given, leaf)
            found.append([out, *torch.autograd.grad(out.square().sum(), leaf)])
        for raw, decoded in zip(*found, strict=True):
            assert torch.equal(raw, decoded)


def test_packed_rows_that_are_read_by_something_else_are_refused_by_name():
    graph, weight = random_graph(0, 12, 12, 60, 4), torch.randn(4, 6, 6)
    table = bitslab.CompressedTable.from_tensor(torch.randn(12, 6), progress=False)

    @rel.program
    def scaled(g, x, y):
        return rel.sum_to_dst(g.src(y) * g.src(x))

    with pytest.raises(bitslab.ArgumentError, match="'x' is packed and read by mul; accepted"):
        scaled.compile()(graph, table, torch.randn(12, 6))
    for n in (11, 13):  # of destinations too: those of a block are the first of all its sources
        other = bitslab.CompressedTable.from_tensor(torch.randn(n, 6), progress=False)
        with pytest.raises(bitslab.ArgumentError, match="accepted are 12 rows"):
            rel.OF_NODES(graph, other, weight[0])
