"""Sums of rows that stand type after type, in pieces that threads and blocks share."""

from __future__ import annotations

import pytest
import torch

import bitslab.relational as rel
from bitslab.engine.kernels.uploads import Uploads
from bitslab.relational import RelationalGraph, execute, graph, type_sums
from bitslab.relational.execute import Machine
from bitslab.relational.steps import Steps
from tests.simt.runner import simt_kernels

#: Edges of each relation: none, fewer than a piece, one piece, several, none at the end.
COUNTS = (0, 3, 8, 30, 1, 17, 0)


@pytest.mark.parametrize("piece_rows", [1, 4, 8, 1000])
@pytest.mark.parametrize("counts", [COUNTS, (0, 0), (5,), (0, 20)], ids=str)
def test_levels_are_of_pieces_and_then_of_types(counts, piece_rows):
    bounds = [0, *torch.tensor(counts).cumsum(0).tolist()]
    rows = torch.randn(bounds[-1], 3, dtype=torch.float64)
    found, expected = rows, [part.sum(0) for part in rows.split(list(counts))]
    levels = type_sums.levels(bounds, piece_rows, Uploads(torch.device("cpu")))
    assert len(levels) == 1 + (max(counts) > piece_rows)
    assert int(levels[0][0].diff().max()) <= piece_rows
    for starts, columns in levels:
        assert int(starts[-1]) == len(columns) == len(found)
        found = torch.stack([part.sum(0) for part in found[columns].split(starts.diff().tolist())])
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(6,), (2, 3), ()], ids=str)
@pytest.mark.parametrize("backend", ["loops", "torch", "kernels"])
@pytest.mark.parametrize("piece_rows", [4, 512])
def test_sums_by_relation(piece_rows, backend, shape, dtype, monkeypatch):
    monkeypatch.setattr(type_sums, "PIECE_ROWS", piece_rows)
    kernels, runner = simt_kernels()
    if backend == "kernels":
        monkeypatch.setattr(execute, "gpu_kernels", lambda device: kernels)
        monkeypatch.setattr(graph, "read_at_once", lambda device: True)
    kinds = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))
    made = RelationalGraph(torch.zeros(2, len(kinds), dtype=torch.int64), kinds, 1, len(COUNTS))
    steps = Steps(made)
    step = steps.type_sum(steps.make("input", (), "typed_edge", shape, "g"), "relation", shape)
    machine = Machine(made, dtype, backend != "torch")
    bind, kernel = machine.prepared(step, False)
    run = bind(machine)
    assert kernel == (backend == "kernels")
    # Sums of integers are exact; those of 16-bit values are rounded once, not by pieces.
    draw = torch.Generator().manual_seed(0)
    g = torch.randint(-200, 201, (len(kinds), *shape), generator=draw).to(dtype)
    expected = torch.stack([part.double().sum(0) for part in g.split(list(COUNTS))])
    assert torch.equal(run(g), expected.to(dtype))
    assert torch.equal(run(g), run(g))
    launches = len(runner.launched)
    assert launches == (0 if backend != "kernels" else 3 * (2 if piece_rows == 4 else 1))


def test_gradients_of_rows_of_relations_are_sums_of_rows_in_order():
    @rel.program
    def scaled(g, x, factor):
        return rel.sum_to_dst(g.src(x) * g.relation(factor))

    draw = torch.Generator().manual_seed(0)
    edges, kinds = (torch.randint(9, (n, 40), generator=draw) for n in (2, 1))
    made = RelationalGraph(edges, kinds[0], 9, 9)
    leaves = [torch.randn(9, 3, generator=draw).requires_grad_() for _ in range(2)]
    backward = scaled.compile().explain(made, *leaves).partition("\nbackward\n")[2]
    assert "traversal" in backward and "type_sum" in backward
