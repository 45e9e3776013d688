"""What `relational.py` sweeps on a CPU: the layers over their dims, and programs without each pass.

On graphs that are drawn with the sizes of published data sets, or are the data sets themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from relational_gpu import (
    PASSES,
    Drawn,
    drawn_inputs,
    graph_of,
    layer_programs,
    models,
    of_one_type,
    without_each,
)
from timing import cpu_seconds_in_turn

from bitslab.relational import CompiledProgram

Table = list[dict[str, Any]]
GRAPHS = ("AIFB", "MUTAG")
MODELS = ("RGCN", "RGAT", "HGT")


def in_turn(
    ways: dict[str, Callable[[torch.Tensor], Any]], x: torch.Tensor, repetitions: int
) -> dict[str, dict[str, float]]:
    """Return milliseconds of inference and of a training step, the ways in turn."""
    leaf = x.clone().requires_grad_()

    def infer(run: Callable[[torch.Tensor], Any], _: int) -> None:
        with torch.no_grad():
            run(x)

    def step(run: Callable[[torch.Tensor], Any], _: int) -> None:
        leaf.grad = None
        run(leaf).square().mean().backward()

    found = {}
    for what, work in (("inference", infer), ("training", step)):
        runs = {name: functools.partial(work, run) for name, run in ways.items()}
        seconds = cpu_seconds_in_turn(runs, repetitions)
        found[what] = {name: 1e3 * s for name, s in seconds.items()}
    return found


def dims(graphs: Sequence[str] | None, sizes: Sequence[int], repetitions: int) -> Table:
    """Measure the three layers beside PyG's and plain torch over their dims (figure 3.12)."""
    rows: Table = []
    for name in graphs or GRAPHS:
        graph = graph_of(name)
        for dim in sizes:
            for model, ways in models(graph, dim, list(MODELS), torch.float32):
                row: dict[str, Any] = {"graph": name, "model": model, "dims": dim}
                for what, ms in in_turn(ways, torch.randn(graph.nodes, dim), repetitions).items():
                    row |= {
                        f"{what}: ours ms": ms["ours"],
                        f"{what}: PyG/ours": ms["PyG"] / ms["ours"],
                        f"{what}: torch/ours": ms["torch"] / ms["ours"],
                    }
                rows.append(row)
    return rows


def passes(graphs: Sequence[str] | None, sizes: Sequence[int], repetitions: int) -> Table:
    """Measure programs with all passes, and the times that they take without each (table 3.5)."""
    rows: Table = []
    for name in graphs or GRAPHS:
        graph = graph_of(name)
        for model, program in layer_programs().items():
            for dim in sizes:
                ways, x = _without_each(program, graph, dim)
                for what, ms in in_turn(ways, x, repetitions).items():
                    row: dict[str, Any] = {"graph": name, "model": model, "dims": dim}
                    row |= {"": what, "all passes ms": ms[""]}
                    for off in PASSES:  # without it the steps may be the same
                        row[f"no {off}"] = ms[off] / ms[""] if off in ms else "same"
                    rows.append(row)
    return rows


def _without_each(
    program: CompiledProgram, graph: Drawn, dim: int
) -> tuple[dict[str, Callable[[torch.Tensor], Any]], torch.Tensor]:
    """Return the program with all passes and without each, as functions of features, and those.

    A pass that changes no step is left out.
    """
    plan = of_one_type(graph)
    tensors = drawn_inputs(graph, program, dim)
    for name in set(tensors) - {"x"}:
        tensors[name].requires_grad_()

    def run(compiled: CompiledProgram, x: torch.Tensor) -> Any:
        out = compiled(plan, *(tensors | {"x": x}).values())
        return out[0] if isinstance(out, tuple) else out

    found, _ = without_each(program, plan, list(tensors.values()))
    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        off: functools.partial(run, compiled) for off, compiled in found.items()
    }
    return ways, tensors["x"]
