"""What a graph with plans holds: it goes with its last user, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from bitslab.relational import execute, graph
from tests.relational.oracle import random_graph
from tests.relational.programs import PROGRAMS, inputs_of
from tests.simt.runner import simt_kernels


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def ran(made: graph.RelationalGraph, name: str, backend: str) -> tuple[torch.Tensor, ...]:
    """Return the outputs of a program, which gradients can be taken of."""
    inputs = [x.requires_grad_() for x in inputs_of(name, made, torch.float32).values()]
    outputs = PROGRAMS[name].compile(backend=backend)(made, *inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


@pytest.mark.parametrize("backend", ["auto", "torch", "kernels"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_memory_of_a_graph_goes_with_its_last_user(
    name: str, backend: str, no_collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "kernels":
        found, _ = simt_kernels()
        monkeypatch.setattr(execute, "gpu_kernels", lambda device: found)
        monkeypatch.setattr(graph, "read_at_once", lambda device: True)
    made = random_graph(0, 12, 12, 60, 4)
    outputs = ran(made, name, "torch" if backend == "torch" else "auto")
    torch.stack([o.sum() for o in outputs]).sum().backward()
    edges, pairs = made.rows("edge").of_edge, made.rows("pair_src").of_edge
    held = [weakref.ref(each) for each in (made, made.order, edges, pairs)]
    del made, outputs, edges, pairs
    assert [each() for each in held] == [None] * 4


def test_gradients_are_taken_after_the_graph_is_gone(no_collector: None) -> None:
    made = random_graph(0, 12, 12, 60, 4)
    inputs = [x.requires_grad_() for x in inputs_of("rgcn", made, torch.float32).values()]
    program = PROGRAMS["rgcn"].compile()
    expected = torch.autograd.grad(program(made, *inputs).square().sum(), inputs)
    total = program(made, *inputs).square().sum()
    held = weakref.ref(made)
    del made
    assert held() is None
    for a, b in zip(torch.autograd.grad(total, inputs), expected, strict=True):
        assert torch.equal(a, b)
