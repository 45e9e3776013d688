"""What a layer costs the host: calls of Python functions and launches, which vary with nothing.

On graphs of some thousand edges a GPU waits for these; times are in `benchmarks/relational.py`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bitslab.relational import CompiledProgram, execute, graph, rgat
from tests.forked import run_forked
from tests.relational.oracle import random_graph
from tests.simt.runner import simt_kernels

#: Counts the calls of a forward pass, and of one with its backward pass. In a process of its own:
#: what other tests have attached to torch would be counted.
COUNT = """
import gc, json, torch
from bitslab.integrations.pyg import RGATConv
from tests.host_calls import calls_of

def infer():
    with torch.no_grad():
        layer(x, index, kinds)

def step():
    leaf.grad = None
    layer.zero_grad()
    layer(leaf, index, kinds).sum().backward()

torch.manual_seed(0)
index, kinds = torch.randint(12, (2, 60)), torch.randint(9, (60,))
layer = RGATConv(8, 8, 9)
x = torch.randn(12, 8)
leaf = x.clone().requires_grad_()
gc.disable()
# The first calls make the plan and compile.
print(json.dumps([min(calls_of(run) for _ in range(3)) for run in (infer, step)]))
"""


def test_calls_of_a_layer() -> None:
    pytest.importorskip("torch_geometric")
    done = run_forked(["-c", COUNT])
    assert done.returncode == 0, done.stderr
    infer, step = json.loads(done.stdout.splitlines()[-1])
    assert 0 < infer <= 190 and infer < step <= 505, (infer, step)


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


def test_launches_of_relational_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    found, runner = simt_kernels()
    monkeypatch.setattr(execute, "gpu_kernels", lambda device: found)
    monkeypatch.setattr(graph, "read_at_once", lambda device: True)
    made = random_graph(0, 12, 12, 60, 9)
    draw = torch.Generator().manual_seed(0)
    shapes = ((12, 8), (12, 8), (9, 8, 8), (8, 1), (8, 1))
    inputs = [torch.randn(*s, generator=draw).requires_grad_() for s in shapes]
    program = rgat(1, 0.2, False, False)
    assert program is not None
    launches_of(program, made, inputs, runner)  # makes the plan
    forward, backward = launches_of(program, made, inputs, runner)
    assert 0 < forward <= 10 and 0 < backward <= 22, (forward, backward)
