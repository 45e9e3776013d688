"""Size and time of what the relational compiler makes, and what its values take.

`python relational_size.py --first RGCN` prints what the first steps of a process take on a GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from relational import DIM, of_same_state
from relational_graphs import Graph, cpu_graphs, sampled
from relational_plans import timed
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch_geometric import nn as gnn

from bitslab.engine.kernels.cuda.source import source_text
from bitslab.integrations import pyg
from bitslab.integrations.pyg import relational_calls
from bitslab.relational import (
    TYPED_MEAN,
    CompiledProgram,
    NodeTypes,
    RelationalGraph,
    hgt_of_features,
    rgat,
)

Table = list[dict[str, Any]]
Inputs = list[torch.Tensor]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODELS = ("RGCN", "RGAT", "HGT")
#: Values on these stand on nodes; all others on pairs and edges.
NODEWISE = ("src", "dst")


def programs(graph: RelationalGraph, dim: int) -> dict[str, tuple[CompiledProgram, Inputs]]:
    """Return the programs of the three layers with inputs for a graph of typed nodes."""
    n, relations, types = graph.num_src, graph.num_relations, graph.node_types
    attended, hgt = rgat(1, 0.2, False, False), hgt_of_features(1, True)
    assert attended is not None and hgt is not None and types is not None
    x = torch.randn(n, dim)
    weight, matrices = (torch.randn(relations, *shape) for shape in ((dim, dim), (1, dim, dim)))
    ends = [torch.randn(types.count, dim, dim) for _ in range(3)]
    biases = [torch.randn(types.count, dim) for _ in range(3)]
    prior = torch.randn(relations, 1, 1)
    made: dict[str, tuple[CompiledProgram, Inputs]] = {
        "RGCN": (TYPED_MEAN, [x, weight]),
        "RGAT": (attended, [x, x.clone(), weight, torch.randn(dim, 1), torch.randn(dim, 1)]),
        "HGT": (hgt, [x, *ends, *biases, matrices, matrices.clone(), prior]),
    }
    return {model: (run, [t.to(DEVICE) for t in given]) for model, (run, given) in made.items()}


def typed(graph: Graph) -> RelationalGraph:
    """Return a graph with the types of its nodes."""
    edges, kinds = graph.edges, graph.types
    src, dst = (
        torch.zeros(graph.relations, dtype=torch.int64).index_copy_(0, kinds, graph.node_types[end])
        for end in edges
    )
    bounds = torch.tensor([0, *graph.sizes.values()]).cumsum(0)
    types = NodeTypes(tuple(bounds.tolist()), tuple(src.tolist()), tuple(dst.tolist()))
    at = edges.to(DEVICE), kinds.to(DEVICE)
    return RelationalGraph(*at, graph.nodes, graph.relations, types)


def step_ms(run: CompiledProgram, on: RelationalGraph, given: Inputs) -> float:
    """Return what a training step of a program takes, from its call to its end on the device."""
    leaves = [x.clone().requires_grad_() for x in given]
    return 1e3 * timed(lambda: run(on, *leaves).square().mean().backward(), DEVICE)[1]


def sizes() -> dict[str, Table]:
    """Return lines of both levels of IR and of CUDA, and times of first and later calls."""
    rows: Table = []
    for name, graph, _ in cpu_graphs(("mag-0.1", "kinships")):
        for model in MODELS:
            made = typed(graph)
            program, inputs = programs(made, DIM)[model]
            narrow = programs(made, DIM // 2)[model][1]
            ms = functools.partial(step_ms, program, made)
            first, again = ms(inputs), min(ms(inputs) for _ in range(3))
            other, other_again = ms(narrow), min(ms(narrow) for _ in range(3))
            leaves = [x.clone().requires_grad_() for x in inputs]
            make = functools.partial(_new_plan, program, graph, leaves)
            planned = 1e3 * timed(make, DEVICE)[1]
            plan = program.plan(made, leaves)
            assert plan.backward is not None
            rows.append(
                {
                    "graph": name,
                    "model": model,
                    "operators": len(str(program.program).splitlines()),
                    "steps forward": len(plan.forward.order),
                    "steps backward": len(plan.backward.order),
                    "first step ms": first,
                    "later step ms": again,
                    "first of other shapes ms": other,
                    "later of these ms": other_again,
                    "graph and plan ms": planned,
                }
            )
    files = {
        "typed products": "typed_gemm",
        "sums, dots, softmax": "segment_sums",
        "edges in order": "survey",
    }
    cuda = [
        {"kernels": what, "file": f"{file}.cu", "lines with what it includes": _lines(file)}
        for what, file in files.items()
    ]
    tables = {
        f"Programs, dims {DIM}, training, {place()}": rows,
        "CUDA that all programs share: none is generated for one": cuda,
        "Calls of compiled layers on sampled blocks": blocks(),
    }
    if DEVICE.type == "cuda":
        title = "First training steps of a process on mag-0.1, kernels compiled by NVRTC or not"
        tables[title] = first_steps()
    return tables


def place() -> str:
    """Return where it is measured, for titles."""
    on_gpu = DEVICE.type == "cuda"
    return torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} threads"


def first(model: str) -> dict[str, float]:
    """Return what the first two training steps of this process take, in milliseconds."""
    ((_, graph, _),) = cpu_graphs(("mag-0.1",))
    made = typed(graph)
    program, inputs = programs(made, DIM)[model]
    (inputs[0] @ inputs[0][:DIM].t()).sum().item()  # torch's own first steps are not ours
    return {"first": step_ms(program, made, inputs), "second": step_ms(program, made, inputs)}


def first_steps() -> Table:
    """Return first steps in processes without and with compiled kernels on disk."""
    rows: Table = []
    for model in MODELS:
        row: dict[str, Any] = {"model": model}
        with tempfile.TemporaryDirectory() as folder:
            kept = {"CUPY_CACHE_DIR": f"{folder}/cupy", "BITSLAB_CACHE": f"{folder}/bitslab"}
            for disk in ("nothing", "kernels"):
                ran = subprocess.run(
                    [sys.executable, __file__, "--first", model],
                    env=os.environ | kept,
                    check=True,
                    capture_output=True,
                    text=True,
                )
                found = json.loads(ran.stdout)
                row[f"{disk} on disk: first ms"] = found["first"]
                row[f"{disk}: second ms"] = found["second"]
            row["files"] = sum(1 for _ in Path(folder, "cupy").rglob("*.cubin"))
        rows.append(row)
    return rows


def _new_plan(program: CompiledProgram, graph: Graph, leaves: Inputs) -> None:
    program.plan(typed(graph), leaves)


def _lines(file: str) -> int:
    return sum(1 for line in source_text(file).splitlines() if line.strip())


def blocks(count: int = 20) -> Table:
    """Return how many of some sampled blocks run without a plan, and what a call takes."""
    layer = pyg.RGCNConv(DIM, DIM, 6).to(DEVICE)
    times = []
    for seed in range(count):
        block, (n_src, n_dst) = sampled(1024, 10, seed)
        x = torch.randn(n_src, DIM, device=DEVICE), torch.randn(n_dst, DIM, device=DEVICE)
        at = block.edges.to(DEVICE), block.types.to(DEVICE)
        with torch.no_grad():
            _, seconds = timed(functools.partial(layer, x, *at), DEVICE)
        times.append(1e3 * seconds)
    calls = relational_calls(layer)[""]
    without = sum(n for reason, n in calls.items() if reason)
    return [
        {
            "blocks": f"{count} of mag-0.1, 1,024 papers, fanout 10",
            "without a plan": without,
            "first call ms (median)": sorted(times)[count // 2],
        }
    ]


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the most bytes that torch's allocator of the device holds beyond those before."""
    run()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    del kept
    events = profiler.profiler.kineto_results.events()
    moves = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = most = 0
    for _, n_bytes in moves:
        held += n_bytes
        most = max(most, held)
    return most


def rows_bytes(graph: RelationalGraph, program: CompiledProgram, inputs: Inputs) -> tuple[int, int]:
    """Return bytes of an inference's values on pairs and edges, and of those on nodes."""
    with torch.no_grad():
        plan = program.plan(graph, inputs)
    found = {True: 0, False: 0}
    for step in plan.forward.order:
        if step.op not in ("reshape", "t", "inverse_counts") and step.space != "shared":
            found[step.space in NODEWISE] += graph.rows(step.space).n * step.width * 4
    return found[False], found[True]


def memory() -> dict[str, Table]:
    """Return peak bytes of inference beside what plans hold, and of RGAT beside PyG's."""
    rows: Table = []
    for name, graph, _ in cpu_graphs(("mag-0.1", "kinships")):
        made = typed(graph)
        for model, (program, inputs) in programs(made, DIM).items():

            def infer(run: Any = program, on: Any = made, given: Sequence[Any] = inputs) -> Any:
                with torch.no_grad():
                    return run(on, *given)

            of_rows, of_nodes = rows_bytes(made, program, inputs)
            most = peak_bytes(infer)
            rows.append(
                {
                    "graph": name,
                    "model": model,
                    "peak MiB": most / 2**20,
                    "rows of the plan MiB": of_rows / 2**20,
                    "nodewise MiB": of_nodes / 2**20,
                    "peak/both (<= 1.15)": most / (of_rows + of_nodes),
                }
            )
    title = f"Peak memory of inference beyond inputs and weights, {place()}"
    return {title: rows, "RGAT": against_pyg()}


def against_pyg() -> Table:
    """Return the peak bytes of RGAT on kinships, ours and PyG's."""
    ((name, graph, _),) = cpu_graphs(("kinships",))
    plain = gnn.RGATConv(DIM, DIM, graph.relations).to(DEVICE)
    plain, ours = of_same_state(plain, pyg.RGATConv(DIM, DIM, graph.relations).to(DEVICE))
    x = torch.randn(graph.nodes, DIM, device=DEVICE)
    edges, types = graph.edges.to(DEVICE), graph.types.to(DEVICE)

    def infer(layer: nn.Module) -> Any:
        with torch.no_grad():
            return layer(x, edges, types)

    def step(layer: nn.Module) -> Any:
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        layer(leaf, edges, types).square().mean().backward()

    table: Table = []
    for what, run in (("inference", infer), ("training step", step)):
        peer, mine = (peak_bytes(functools.partial(run, layer)) for layer in (plain, ours))
        table.append(
            {
                "graph": name,
                "what": what,
                "PyG MiB": peer / 2**20,
                "ours MiB": mine / 2**20,
                "PyG/ours (>= 20)": peer / mine,
            }
        )
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", choices=MODELS, required=True)
    print(json.dumps(first(parser.parse_args().first)))
