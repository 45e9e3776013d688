"""The main program of the two scripts."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import ranks
from common.arguments import DTYPES
from common.report import OUTPUT, Steps, describe, make_console, same_bits, write_json

from . import datasets
from .datasets import DatasetError, Graph
from .modes import MODES
from .options import check_model, make_parser, rank_device
from .report import Run, draw, print_run
from .training import Trainer

#: Options that results depend on and that no other value of the summary shows.
SETTINGS = (
    "batch_size",
    "cache_ratio",
    "degree",
    "fanouts",
    "hidden",
    "lr",
    "max_train",
    "model",
    "pipeline",
    "scale_up",
    "seed",
    "workers",
)


@dataclass(frozen=True)
class Framework:
    """A framework's script: its name, its trainer, and the loader of its own datasets."""

    name: str
    trainer: type[Trainer]
    own_loader: Callable[[str, Path | None], Graph]


def run(
    framework: Framework,
    description: str,
    script: str,
    line: str,
    arguments: Sequence[str] | None = None,
) -> int:
    """Train as the command line says; return the exit status."""
    parser = make_parser(description, script, line)
    options = parser.parse_args(arguments)
    check_model(parser, options)
    device = rank_device(parser, options.device)
    if options.batch_size < ranks.wanted_size():
        parser.error(
            f"argument --batch-size: {options.batch_size}, which is none for some of "
            f"{ranks.wanted_size()} ranks"
        )
    try:
        with ranks.started(device) as together, Steps(shown=together.rank == 0) as steps:
            graph = load_graph(options, framework.own_loader, steps)
            modes = MODES if options.features == "all" else (options.features,)
            runs = [
                train(framework, graph, mode, options, device, together, steps) for mode in modes
            ]
    except DatasetError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    equal = all(same_bits(run.losses, runs[0].losses) for run in runs)
    if together.rank == 0:
        show(options, facts_of(framework, graph, device, together, options, equal), runs)
    return 0 if equal else 1


def load_graph(
    options: argparse.Namespace, own_loader: Callable[[str, Path | None], Graph], steps: Steps
) -> Graph:
    """Load the dataset that the options name, as they want it."""
    # What the frameworks print meanwhile is not part of the result.
    with steps.step(f"loading {options.dataset}"), contextlib.redirect_stdout(sys.stderr):
        graph = datasets.load(options.dataset, options.root, own_loader)
    if not len(graph.train):
        raise DatasetError(f"{graph.name}: no node has a label to train on")
    if options.scale_up:
        with steps.step("drawing links") as report:
            graph = datasets.scaled_up(
                graph, options.scale_up, options.degree, options.seed, report
            )
    if options.edge_features:
        graph = datasets.with_edge_features(graph, options.seed)
    return datasets.in_dtype(graph, DTYPES[options.dtype])


def train(
    framework: Framework,
    graph: Graph,
    mode: str,
    options: argparse.Namespace,
    device: torch.device,
    together: ranks.Ranks,
    steps: Steps,
) -> Run:
    """Train in one mode."""
    with steps.step(f"{mode}: preparing features"):
        trainer = framework.trainer(graph, mode, options, device, together)
    epochs = []
    for epoch in range(1, options.epochs + 1):
        with steps.step(f"{mode}: epoch {epoch} of {options.epochs}") as report:
            epochs.append(trainer.train_epoch(epoch, report))
    with steps.step(f"{mode}: validating"):
        accuracy = trainer.validate()
    columns = trainer.columns.values()
    return Run(
        mode=mode,
        raw_bytes=sum(column.raw_bytes for column in columns),
        host_bytes=sum(column.host_bytes for column in columns),
        copies=max(together.distinct(column.memory) for column in columns),
        prepare_seconds=trainer.prepare_seconds,
        epochs=epochs,
        validation_accuracy=accuracy,
    )


def facts_of(
    framework: Framework,
    graph: Graph,
    device: torch.device,
    together: ranks.Ranks,
    options: argparse.Namespace,
    equal: bool,
) -> dict[str, Any]:
    """Return the values common to all ways."""
    return {
        "framework": framework.name,
        "dataset": graph.name,
        "nodes": graph.n_nodes,
        "edges": graph.n_edges,
        "features": graph.x.shape[1],
        "edge_features": 0 if graph.e is None else graph.e.shape[1],
        "dtype": str(graph.x.dtype).removeprefix("torch."),
        "device": describe(device),
        "ranks": together.size,
        "settings": {name: getattr(options, name) for name in SETTINGS},
        "losses_equal": equal,
    }


def show(options: argparse.Namespace, summary: dict[str, Any], runs: Sequence[Run]) -> None:
    """Print, draw and write what the options ask for."""
    if options.json != OUTPUT:
        console = make_console()
        console.print(
            f"{summary['dataset']}: {summary['nodes']:,} nodes of {summary['features']:,} "
            f"{summary['dtype']} features, {summary['edges']:,} edges; {summary['framework']} on "
            f"{summary['device']}" + (f", {summary['ranks']} ranks" if summary["ranks"] > 1 else "")
        )
        for run in runs:
            print_run(console, run, summary["ranks"])
        if len(runs) > 1:
            n = len(runs[0].losses)
            verdict = "equal to the last bit" if summary["losses_equal"] else "DIFFERENT"
            if summary["device"] != "cpu" and not summary["losses_equal"]:
                verdict += " (a GPU adds in no fixed order: compare last bits on a CPU)"
            console.print(f"losses of {n:,} batches, {len(runs)} ways: {verdict}")
    if options.json:
        write_json(options.json, summary, runs)
    if options.plot:
        draw(options.plot, runs)
