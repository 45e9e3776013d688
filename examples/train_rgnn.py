"""Train a relational graph network with layers as they are, compiled, and over packed features."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from common.arguments import (
    above_zero,
    add_device,
    add_json,
    add_plot,
    add_seed,
    checked_device,
    from_zero,
    positive,
)
from common.memory import MemoryPeak
from common.triples import COMMANDS, find_triples, folders, read_triples, with_inverse
from torch import nn

import bitslab.relational as rel
from bitslab import CompressedFeature

LAYERS = ("plain", "compiled", "packed")
#: Losses of two ways may differ by so much of their size: sums are made in another order.
TOLERANCE = 2e-3

DESCRIPTION = """\
Classify the entities of a graph with typed edges: the layers of PyG or DGL as they are (plain),
compiled by one line (compiled), and compiled over features that are packed in host memory and
decoded as they are multiplied (packed). All begin with the same parameters; their loss curves must
be equal.
"""
EPILOG = """\
examples:
  python examples/train_rgnn.py                          # RGCN with PyG, offline, a drawn graph
  python examples/train_rgnn.py --model rgat --layers plain compiled --explain
  python examples/train_rgnn.py --model hgt --framework dgl
  python examples/train_rgnn.py --graph kinships --plot losses.svg
      # of pykeen's package, whose files
      # are looked for below $BITSLAB_DATA/pykeen/datasets, or where pykeen is installed

The exit status is 0, 1 when loss curves differ, 2 when an option is refused.
"""


class RefusedError(Exception):
    """An option that cannot be served."""


@rel.program
def project(g: Any, x: Any, weight: Any, bias: Any) -> Any:
    """Return the rows of nodes times a weight: rows may be packed."""
    return g.dst(x) @ weight + rel.shared(bias)


PROJECT = project.compile()


@dataclass
class Entities:
    """A graph with typed edges, on the device; features are on the CPU."""

    edge_index: torch.Tensor
    edge_type: torch.Tensor
    relations: int
    x: torch.Tensor
    labels: torch.Tensor
    classes: int

    @property
    def nodes(self) -> int:
        return len(self.x)


@dataclass
class Result:
    """What became of one way."""

    layers: str
    losses: list[float] = field(default_factory=list)
    accuracy: float = math.nan
    epoch_ms: float = math.nan
    peak_mib: float = math.nan
    feature_ratio: float = 1.0


def drawn_edges(options: Any, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw classes, and edges that mostly lead to the source's class; return labels and triples."""
    labels = torch.randint(options.classes, (options.nodes,), generator=draw)
    by_class = torch.argsort(labels)
    starts = torch.searchsorted(labels[by_class], torch.arange(options.classes + 1))
    src = torch.randint(options.nodes, (options.edges,), generator=draw)
    low, high = starts[labels[src]], starts[labels[src] + 1]
    near = low + (torch.rand(options.edges, generator=draw) * (high - low)).long()
    anywhere = torch.randint(options.nodes, (options.edges,), generator=draw)
    dst = torch.where(torch.rand(options.edges, generator=draw) < 0.7, by_class[near], anywhere)
    kinds = (torch.rand(options.edges, generator=draw).square() * options.relations).long()
    return labels, torch.stack([src, kinds, dst], 1)


def pykeen_edges(name: str, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the triples of a data set in pykeen's package; labels by each entity's main relation.

    The text of the package is read: pykeen itself is not imported.
    """
    path = find_triples(name)
    if path is None:
        places = " or ".join(str(folder / name / "train.txt") for folder in folders())
        raise RefusedError(
            f"argument --graph: {name} needs {places}; accepted are drawn, and kinships, umls and "
            f"nations after {COMMANDS}"
        )
    try:
        triples = read_triples(path)
    except ValueError as error:
        raise RefusedError(f"argument --graph: {error}") from error
    nodes, relations = int(triples[:, [0, 2]].max()) + 1, int(triples[:, 1].max()) + 1
    counts = torch.zeros(nodes, relations).index_put_(
        (triples[:, 0], triples[:, 1]), torch.ones(len(triples)), accumulate=True
    )
    return counts.argmax(1) % classes, triples


def entities(options: Any, device: torch.device) -> Entities:
    """Return the graph with inverse relations, and features that are noise around the classes."""
    draw = torch.Generator().manual_seed(options.seed)
    if options.graph == "drawn":
        labels, triples = drawn_edges(options, draw)
        relations = options.relations
    else:
        labels, triples = pykeen_edges(options.graph, options.classes)
        relations = int(triples[:, 1].max()) + 1
    index, kinds = with_inverse(triples, relations)
    centres = torch.randn(options.classes, options.features, generator=draw)
    noise = 3 * torch.randn(len(labels), options.features, generator=draw)
    # As features are that were stored in 16 bits: they pack without loss.
    x = (centres[labels] + noise).bfloat16().float()
    there = (index.to(device), kinds.to(device))
    return Entities(*there, 2 * relations, x, labels.to(device), options.classes)


class Network(nn.Module):
    """A projection of the features where the first layer takes none packed, and two layers."""

    def __init__(self, options: Any, graph: Entities) -> None:
        super().__init__()
        self.model, self.graph = options.model, graph
        hidden, n = options.hidden, graph.relations
        # HGT projects keys, queries and values of its own; DGL's layers take tensors alone.
        self.projects = options.model == "hgt" or options.framework == "dgl"
        first = hidden if self.projects else graph.x.shape[1]
        if self.projects:
            self.weight = nn.Parameter(torch.randn(graph.x.shape[1], hidden) / hidden)
            self.bias = nn.Parameter(torch.zeros(hidden))
        sizes = ((first, hidden), (hidden, hidden))
        self.run: Callable[[nn.Module, Any], torch.Tensor]
        if options.framework == "pyg":
            self.layers = nn.ModuleList(self._pyg(*size, n) for size in sizes)
        else:
            self.layers = nn.ModuleList(self._dgl(*size, n) for size in sizes)
        self.last = nn.Linear(hidden, graph.classes)

    def _pyg(self, width: int, out: int, relations: int) -> nn.Module:
        conv = importlib.import_module("torch_geometric.nn")
        index, kinds = self.graph.edge_index, self.graph.edge_type
        if self.model == "hgt":
            by_type = {("n", str(r), "n"): index[:, kinds == r] for r in range(relations)}
            self.run = lambda layer, h: layer({"n": h}, by_type)["n"]
            layer: nn.Module = conv.HGTConv(width, out, (["n"], list(by_type)))
            return layer
        self.run = lambda layer, h: layer(h, index, kinds)
        kind = conv.RGCNConv if self.model == "rgcn" else conv.RGATConv
        made: nn.Module = kind(width, out, relations)
        return made

    def _dgl(self, width: int, out: int, relations: int) -> nn.Module:
        dgl = importlib.import_module("dgl")
        src, dst = self.graph.edge_index
        g = dgl.graph((src, dst), num_nodes=self.graph.nodes)
        kinds = self.graph.edge_type
        layer: nn.Module
        if self.model == "rgcn":
            degrees = g.in_degrees().clamp(min=1).float()
            norm = degrees.reciprocal()[dst][:, None]
            self.run = lambda layer, h: layer(g, h, kinds, norm)
            layer = dgl.nn.RelGraphConv(width, out, relations)
            return layer
        one = torch.zeros(self.graph.nodes, dtype=torch.int64, device=dst.device)
        self.run = lambda layer, h: layer(g, h, one, kinds)
        layer = dgl.nn.HGTConv(width, out, 1, 1, relations, dropout=0.0)
        return layer

    def forward(self, x: Any) -> torch.Tensor:
        h = x
        if self.projects and isinstance(x, torch.Tensor):
            h = torch.addmm(self.bias, x, self.weight)
        elif self.projects:
            graph = self.graph
            sizes = (graph.nodes, graph.nodes)
            ends = (graph.edge_index, graph.edge_type, sizes, graph.relations)
            h = rel.run_on_edges(PROJECT, *ends, x, self.weight, self.bias)
        for layer in self.layers:
            h = self.run(layer, h).relu()
        out: torch.Tensor = self.last(h)
        return out


def train(way: str, options: Any, graph: Entities, device: torch.device) -> Result:
    """Train one way from the same parameters as the others."""
    torch.manual_seed(options.seed)
    result = Result(way)
    model = Network(options, graph).to(device)
    x: Any = graph.x
    if way != "plain":
        integration = importlib.import_module(f"bitslab.integrations.{options.framework}")
        report = integration.compile_relational(model)
        if report.left:
            raise RefusedError(f"not compiled: {report}")
    if way == "packed":
        x = CompressedFeature.from_tensor(graph.x, device=device, progress=False)
        result.feature_ratio = x.ratio
    else:
        x = x.to(device)
    chosen = torch.rand(graph.nodes, generator=torch.Generator().manual_seed(options.seed))
    trained = (chosen < 0.6).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    seconds = []
    with MemoryPeak(device) as peak:
        for _ in range(options.epochs):
            begin = time.perf_counter()
            optimizer.zero_grad()
            out = model(x)
            loss = nn.functional.cross_entropy(out[trained], graph.labels[trained])
            torch.autograd.backward(loss)
            optimizer.step()
            result.losses.append(float(loss.detach()))
            seconds.append(time.perf_counter() - begin)
    with torch.no_grad():
        found = model(x).argmax(1)
    result.accuracy = float((found == graph.labels)[~trained].float().mean())
    result.epoch_ms = 1e3 * statistics.median(seconds)
    result.peak_mib = (peak.device_bytes if device.type == "cuda" else peak.host_bytes) / 2**20
    if isinstance(x, CompressedFeature):
        x.table.close()
    return result


def explained(options: Any, graph: Entities) -> str:
    """Return both levels of the first product's program: a layer's messages, or the projection."""
    plan = rel.RelationalGraph(graph.edge_index, graph.edge_type, graph.nodes, graph.relations)
    device, width = graph.edge_index.device, options.hidden
    x = torch.zeros(graph.nodes, width, device=device)
    weight = torch.zeros(graph.relations, width, width, device=device, requires_grad=True)
    if options.model == "rgcn":
        return rel.TYPED_MEAN.explain(plan, x, weight)
    if options.model == "rgat":
        program = rel.rgat(1, 0.2, False, False)
        assert program is not None
        q = torch.zeros(width, 1, device=device)
        return program.explain(plan, x, x, weight, q, q)
    rows, matrices = x[:, None], weight[:, None]
    prior = torch.zeros(graph.relations, 1, 1, device=device)
    return rel.HGT.explain(plan, rows, rows, rows, matrices, matrices, prior)


def differing(results: Sequence[Result]) -> list[str]:
    """Return what differs of the loss curves."""
    wrong = []
    for other in results[1:]:
        for epoch, (a, b) in enumerate(zip(results[0].losses, other.losses, strict=True)):
            if not abs(a - b) <= TOLERANCE * max(abs(a), 1e-3):
                wrong.append(
                    f"epoch {epoch}: {results[0].layers} has a loss of {a}, {other.layers} of {b}"
                )
                break
    return wrong


def draw_losses(results: Sequence[Result], path: Path, title: str) -> None:
    """Draw the loss curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for number, result in enumerate(results):
        label = f"{result.layers}, {result.epoch_ms:.1f} ms an epoch"
        axes.plot(result.losses, label=label, linewidth=5 - 1.5 * number, alpha=0.7)
    axes.set(xlabel="epoch", ylabel="loss", title=title)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    shown = "(default: %(default)s)"
    add("--model", choices=("rgcn", "rgat", "hgt"), default="rgcn", help=shown)
    add("--framework", choices=("pyg", "dgl"), default="pyg", help=f"DGL has no RGAT {shown}")
    add("--layers", nargs="+", choices=LAYERS, default=list(LAYERS), help="default: all, in turn")
    graph = parser.add_argument_group("graph").add_argument
    graph("--graph", default="drawn", help=f"drawn, or kinships, umls or nations {shown}")
    graph("--nodes", type=positive, default=2000, help=f"of a drawn graph {shown}")
    graph("--edges", type=from_zero, default=10_000, help=f"of it, without inverse ones {shown}")
    graph("--relations", type=positive, default=6, help=f"of it, without inverse ones {shown}")
    graph("--features", type=positive, default=64, help=f"of a node {shown}")
    graph("--classes", type=positive, default=4, help=shown)
    training = parser.add_argument_group("training").add_argument
    training("--hidden", type=positive, default=32, help=f"width of the layers {shown}")
    training("--epochs", type=positive, default=20, help=shown)
    training("--lr", type=above_zero, default=0.01, help=f"learning rate {shown}")
    add_seed(parser)
    add_device(parser)
    add("--explain", action="store_true", help="print both levels of the compiled program")
    add_plot(parser, "the loss curves to this file")
    add_json(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.setdefault("DGLBACKEND", "pytorch")
    parser = make_parser()
    options = parser.parse_args(arguments)
    device = checked_device(parser, options.device)
    if options.framework == "dgl" and options.model == "rgat":
        parser.error("argument --model: DGL has no RGAT; accepted with it are rgcn and hgt")
    try:
        graph = entities(options, device)
    except RefusedError as error:
        parser.error(str(error))
    to = sys.stderr if options.json and str(options.json) == "-" else sys.stdout
    title = (
        f"{options.model} with {options.framework}: {graph.nodes} nodes, "
        f"{graph.edge_index.shape[1]} edges, {graph.relations} relations, {device}"
    )
    print(title, file=to)
    if options.explain:
        print(explained(options, graph), file=to)
    results = []
    for way in dict.fromkeys(options.layers):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            result = train(way, options, graph, device)
        results.append(result)
        print(
            f"{way:>8}: loss {result.losses[0]:.4f} to {result.losses[-1]:.4f}, accuracy "
            f"{result.accuracy:.3f}, {result.epoch_ms:.1f} ms an epoch, peak "
            f"{result.peak_mib:.0f} MiB, features {result.feature_ratio:.2f} times smaller",
            file=to,
            flush=True,
        )
    if options.plot:
        draw_losses(results, options.plot, title)
    wrong = differing(results)
    if options.json:
        found = {"graph": title, "equal": not wrong, "results": [asdict(r) for r in results]}
        text = json.dumps(found, indent=1)
        if str(options.json) == "-":
            print(text)
        else:
            options.json.write_text(text)
    for each in wrong:
        print(each, file=sys.stderr)
    if len(results) > 1 and not wrong:
        print("loss curves are equal", file=to)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
