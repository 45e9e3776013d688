"""What a layer costs the host: calls of Python functions and launches, which vary with nothing.

On graphs of some thousand edges a GPU waits for these; times are in `benchmarks/relational.py`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bitslab.relational import (
    HGT,
    TYPED_MEAN,
    CompiledProgram,
    execute,
    graph,
    hgt_of_features,
    rgat,
)
from bitslab.relational.steps import Costs
from tests.forked import run_forked
from tests.relational.oracle import random_graph
from tests.relational.test_node_types import inputs_of, typed_graph
from tests.simt.runner import simt_kernels

#: Counts the calls of a forward pass, and of one with its backward pass. In a process of its own:
#: what other tests have attached to torch would be counted.
COUNT = """
import gc, json, torch
from bitslab.integrations import pyg
from bitslab.relational import execute, graph
from tests.host_calls import calls_of
from tests.simt.runner import simt_kernels

def infer():
    with torch.no_grad():
        run(x)

def step():
    leaf.grad = None
    layer.zero_grad()
    run(leaf).sum().backward()

RELATIONS = 9
torch.manual_seed(0)
index, kinds = torch.randint(12, (2, 60)), torch.randint(RELATIONS, (60,))
names = [("n", str(i), "n") for i in range(RELATIONS)]
by_type = {name: index[:, kinds == i] for i, name in enumerate(names)}
x = torch.randn(12, 8)
leaf = x.clone().requires_grad_()
gc.disable()
kernels, _ = simt_kernels()
found = {}
for device in ("cpu", "gpu"):
    if device == "gpu":
        execute.gpu_kernels = lambda device: kernels
        index, kinds = index.clone(), kinds.clone()
        by_type = {name: each.clone() for name, each in by_type.items()}
    for name in ("RGCNConv", "RGATConv", "HGTConv"):
        heterogeneous = name == "HGTConv"
        sizes = (8, 8, (["n"], names) if heterogeneous else RELATIONS)
        layer = getattr(pyg, name)(*sizes)
        given = (by_type,) if heterogeneous else (index, kinds)
        run = lambda x: layer({"n": x}, *given)["n"] if heterogeneous else layer(x, *given)
        # The first calls make the plan and compile.
        found[f"{name} {device}"] = [min(calls_of(f) for _ in range(3)) for f in (infer, step)]
print(json.dumps(found))
"""

#: Calls of an inference and of a training step. SIMT's launches are of modules that do not count.
MOST_CALLS = {
    "RGCNConv cpu": (77, 171),
    "RGATConv cpu": (143, 446),
    "HGTConv cpu": (182, 494),
    "RGCNConv gpu": (49, 91),
    "RGATConv gpu": (58, 149),
    "HGTConv gpu": (76, 168),
}


def test_calls_of_layers() -> None:
    pytest.importorskip("torch_geometric")
    done = run_forked(["-c", COUNT])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == MOST_CALLS.keys()
    for name, (infer, step) in found.items():
        most = MOST_CALLS[name]
        assert 0 < infer <= most[0] and infer < step <= most[1], found


class Launches(TorchDispatchMode):
    """Counts torch's operators that start a kernel on a GPU: those that make no view or memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        view = any(r.alias_info and not r.alias_info.is_write for r in function._schema.returns)
        name = function._schema.name.removeprefix("aten::")
        if not view and not name.startswith(("empty", "new_empty", "detach", "_unsafe_view")):
            self.names.append(name)
        return function(*args, **kwargs or {})


def launches_of(
    program: CompiledProgram, made: graph.RelationalGraph, inputs: list[torch.Tensor], runner: Any
) -> tuple[int, int]:
    """Return the launches of a forward pass, and of its backward pass."""
    counts = []
    out: Any = None
    for backward in (False, True):
        runner.launched.clear()
        with Launches() as launches:
            if backward:
                torch.autograd.grad(out, inputs, torch.ones_like(out))
            else:
                out = program(made, *inputs)
        counts.append(len(launches.names) - backward + len(runner.launched))  # ones_like
    return counts[0], counts[1]


#: Of each program inputs beyond the graph, and launches of its forward and its backward pass.
PROGRAMS: dict[str, tuple[list[tuple[int, ...]], tuple[int, int]]] = {
    "RGCN": ([(12, 8), (9, 8, 8)], (2, 5)),
    "RGAT": ([(12, 8), (12, 8), (9, 8, 8), (8, 1), (8, 1)], (6, 16)),
    "HGT": (
        [*[(12, 1, 8)] * 3, (9, 1, 8, 8), (9, 1, 8, 8), (9, 1, 1)],
        (5, 17),
    ),
}


@pytest.mark.parametrize(("heads", "most"), [(1, (16, 53)), (2, (20, 61))])
def test_launches_of_products_of_weights(
    heads: int, most: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HGT's bias rows are added in the products whose weights were multiplied by matrices."""
    found, runner = simt_kernels()
    monkeypatch.setattr(execute, "gpu_kernels", lambda device: found)
    monkeypatch.setattr(graph, "read_at_once", lambda device: True)
    costs = dict.fromkeys(("cpu", "cuda"), Costs(1.0, kernels=True))
    monkeypatch.setattr("bitslab.relational.steps.COSTS", costs)
    made = typed_graph(sizes=(900, 600, 300), edges=40)
    program = hgt_of_features(heads, True)
    assert program is not None
    inputs = inputs_of(made, heads, True, dtype=torch.float32)
    assert "weight_product" in program.explain(made, *inputs)
    launches_of(program, made, inputs, runner)  # compiles
    forward, backward = launches_of(program, made, inputs, runner)
    assert 0 < forward <= most[0] and 0 < backward <= most[1], (forward, backward)


@pytest.mark.parametrize("name", PROGRAMS)
def test_launches_of_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, runner = simt_kernels()
    monkeypatch.setattr(execute, "gpu_kernels", lambda device: found)
    monkeypatch.setattr(graph, "read_at_once", lambda device: True)
    made = random_graph(0, 12, 12, 60, 9)
    draw = torch.Generator().manual_seed(0)
    shapes, most = PROGRAMS[name]
    inputs = [torch.randn(*s, generator=draw).requires_grad_() for s in shapes]
    program = {"RGCN": TYPED_MEAN, "RGAT": rgat(1, 0.2, False, False), "HGT": HGT}[name]
    assert program is not None
    launches_of(program, made, inputs, runner)  # makes the plan
    forward, backward = launches_of(program, made, inputs, runner)
    assert 0 < forward <= most[0] and 0 < backward <= most[1], (forward, backward)
