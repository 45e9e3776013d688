"""What a graph that is new costs `relational.py`'s programs: its plan, and their first call on it.

Each repetition has a graph of its own: tensors of mag-0.1 that no plan knows, or another sampled
block. "plan" is the making of the graph, which finds its order and checks its nodes and relations;
the first call makes all else that a program needs (pairs, maps, CSRs) and runs; "all of the plan"
is both, less a later call. Other graphs of the kind have run before, so that kernels are there.

`blocks` has whole layers instead, PyG's and ours, on blocks that each layer sees once, as it
does in training with neighbour sampling.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from relational_graphs import Graph, mag, sampled
from timing import say

from bitslab.relational import TYPED_SUM, CompiledProgram, RelationalGraph, rgat

Table = list[dict[str, Any]]
#: Issue 23: a plan, maps and CSRs, in ms, by device and graph.
ASKED = {("cuda", "mag-0.1"): 5.0, ("cuda", "block"): 0.3, ("cpu", "mag-0.1"): 150.0}
BLOCK = "block"
SEEDS, FANOUT = 1024, 10

Made = tuple[Graph, tuple[int, int]]


def graphs(name: str, count: int) -> Iterator[Made]:
    """Yield graphs of a kind, each with its source and destination nodes."""
    if name == BLOCK:
        yield from (sampled(SEEDS, FANOUT, seed) for seed in range(count))
        return
    graph, _ = mag()
    for _ in range(count):
        yield graph, (graph.nodes, graph.nodes)


def plans(dim: int, repetitions: int, device: torch.device) -> Table:
    """Measure plans of mag-0.1 and of sampled blocks, and first calls on them."""
    attended = rgat(1, 0.2, False, False)
    assert attended is not None
    rows = []
    for name in ("mag-0.1", BLOCK):
        try:
            made = list(graphs(name, repetitions + 2))
        except FileNotFoundError as error:
            say(f"left out: {name}, {error}")
            continue
        for model, program in (("RGCN", TYPED_SUM), ("RGAT", attended)):
            rows.append(row(name, model, program, made, dim, device))
    return rows


def row(
    name: str,
    model: str,
    program: CompiledProgram,
    made: list[Made],
    dim: int,
    device: torch.device,
) -> dict[str, Any]:
    """Measure a program on new graphs; the first two warm up."""
    times: dict[str, list[float]] = {"plan": [], "first call": [], "later call": []}
    for graph, (n_src, n_dst) in made:
        edges, types = (t.to(device, copy=True) for t in (graph.edges, graph.types))
        inputs = inputs_of(program, graph.relations, (n_src, n_dst), dim, device)
        new = functools.partial(RelationalGraph, edges, types, (n_src, n_dst), graph.relations)
        plan, took = timed(new, device)
        times["plan"].append(took)
        call = functools.partial(program, plan, *inputs)
        with torch.no_grad():
            times["first call"].append(timed(call, device)[1])
            later = statistics.median(timed(call, device)[1] for _ in range(3))
        times["later call"].append(later)
    ms = {what: 1e3 * statistics.median(taken[2:]) for what, taken in times.items()}
    whole = ms["plan"] + ms["first call"] - ms["later call"]
    asked = ASKED.get((device.type, name))
    edge_count = statistics.median(len(graph.types) for graph, _ in made)
    title = name if name != BLOCK else f"mag-0.1, blocks of {SEEDS:,} papers, fanout {FANOUT}"
    return {
        "graph": title,
        "edges": round(edge_count),
        "program": model,
        **{f"{what} ms": took for what, took in ms.items()},
        "all of the plan ms": whole,
        "asked": "-" if asked is None else f"<= {asked:g}: {'ok' if whole <= asked else 'missed'}",
    }


def blocks(dim: int, repetitions: int, device: torch.device) -> Table:
    """Measure layers on sampled blocks that are new to them, in turns; the first three warm up."""
    from torch_geometric import nn

    from bitslab.integrations import pyg

    try:
        made = list(graphs(BLOCK, repetitions + 3))
    except FileNotFoundError as error:
        say(f"left out: layers on blocks, {error}")
        return []
    rows = []
    for model in ("RGCNConv", "RGATConv"):
        relations = made[0][0].relations
        peer = getattr(nn, model)(dim, dim, relations).to(device)
        ours = getattr(pyg, model)(dim, dim, relations).to(device)
        ours.load_state_dict(peer.state_dict())
        times: dict[str, list[float]] = {}
        for graph, (n_src, _) in made:
            for who, layer in (("ours", ours), ("PyG", peer)):
                edges, types = (t.to(device, copy=True) for t in (graph.edges, graph.types))
                x = torch.randn(n_src, dim, device=device)

                def infer(layer: Any = layer, given: Any = (x, edges, types)) -> None:
                    with torch.no_grad():
                        layer(*given)

                def step(layer: Any = layer, given: Any = (x, edges, types)) -> None:
                    layer.zero_grad()
                    layer(*given).sum().backward()

                times.setdefault(f"{who} inference", []).append(timed(infer, device)[1])
                edges += 0  # another graph to a layer that keeps plans
                times.setdefault(f"{who} step", []).append(timed(step, device)[1])
        ms = {what: 1e3 * statistics.median(taken[3:]) for what, taken in times.items()}
        edge_count = statistics.median(len(graph.types) for graph, _ in made)
        rows.append({
            "layer": model,
            "edges": round(edge_count),
            **{f"{what} ms": took for what, took in ms.items()},
            "PyG/ours inference": ms["PyG inference"] / ms["ours inference"],
            "PyG/ours step": ms["PyG step"] / ms["ours step"],
        })  # fmt: skip
    return rows


def inputs_of(
    program: CompiledProgram,
    relations: int,
    nodes: tuple[int, int],
    dim: int,
    device: torch.device,
) -> list[torch.Tensor]:
    """Draw a program's inputs."""
    shapes = {
        "x": (nodes[0], dim),
        "y": (nodes[1], dim),
        "weight": (relations, dim, dim),
        "q": (dim, 1),
        "k": (dim, 1),
    }
    return [torch.randn(*shapes[each], device=device) for each in program.program.names]


def timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Run something; return its result, and seconds until the device is done with it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - begin
