"""Train a CNN while what it saves for its backward pass leaves the device, packed."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from cnn.images import Images, ImagesError, load_images
from cnn.models import SIDES
from cnn.options import check_options, make_parser
from cnn.shown import draw, print_decisions, print_runs, print_sparsity, verdict
from cnn.training import Run, Sparsity, Trainer
from cnn.ways import PEER
from common.report import OUTPUT, Report, Steps, make_console, same_bits, write_json
from common.reproducible import reproducible

import bitslab


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__ or "")
    options = parser.parse_args(arguments)
    device = check_options(parser, options)
    sparsity: list[Sparsity] = []
    try:
        with Steps() as steps, reproducible(device):
            images = load_images(
                options.data, options.images, SIDES[options.shape], options.seed, device
            )
            runs: list[Run] = []
            for way in options.ways:
                counted = None if runs else sparsity
                runs.append(train(images, way, options, device, steps, counted))
    except (ImagesError, bitslab.BitslabError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    equal = compare(runs)
    show(options, facts_of(options, images, device, equal, sparsity), runs, sparsity)
    return 0 if equal else 1


def train(
    images: Images,
    way: str,
    options: argparse.Namespace,
    device: torch.device,
    steps: Steps,
    sparsity: list[Sparsity] | None,
) -> Run:
    """Train in one way, with progress."""
    trainer = Trainer(images, way, options, device)
    with progress(steps, way, options.epochs) as begin_epoch:
        run = trainer.train(begin_epoch, sparsity)
    # So that the memory of the next one is measured alone.
    del trainer
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return run


@contextmanager
def progress(steps: Steps, way: str, epochs: int) -> Iterator[Callable[[int], Report]]:
    """Show the batches of all epochs of a way; yield what begins an epoch."""
    with steps.step(way) as report:

        def begin_epoch(number: int) -> Report:
            return lambda done, total: report((number - 1) * total + done, epochs * total)

        yield begin_epoch


def compare(runs: list[Run]) -> bool:
    """Compare each run with the first, which is plain if asked for; return whether ours agree."""
    first = runs[0]
    for run in runs[1:]:
        run.equal = same_bits(run.numbers, first.numbers)
        if first.way == "plain":
            run.exposed_seconds = run.step_seconds - first.step_seconds
    return all(run.equal is not False for run in runs if run.lossless and run.way != PEER)


def facts_of(
    options: argparse.Namespace,
    images: Images,
    device: torch.device,
    equal: bool,
    sparsity: list[Sparsity],
) -> dict[str, Any]:
    """Return the values common to all ways."""
    names = (
        *("model", "shape", "activation", "width", "dtype", "data", "epochs", "batch_size", "lr"),
        "optimizer",
        *("codecs", "select", "min_bytes", "verify", "seed"),
    )
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "images": len(images.labels),
        "settings": {name: getattr(options, name) for name in names},
        "versions": {"bitslab": bitslab.__version__, "torch": torch.__version__},
        "all_equal": equal,
        "sparsity": [vars(row) for row in sparsity],
    }


def show(
    options: argparse.Namespace,
    summary: dict[str, Any],
    runs: list[Run],
    sparsity: list[Sparsity],
) -> None:
    """Print, draw and write what the options ask for."""
    if options.json != OUTPUT:
        console = make_console()
        saved = sum(row.nbytes for row in sparsity)
        console.print(
            f"{options.model}, {options.shape}, {options.activation}, {options.dtype}, width "
            f"{options.width:g}; {summary['images']:,} images ({options.data}), batches of "
            f"{options.batch_size}, {options.epochs} epochs; a step saves {saved / 1e6:,.2f} MB; "
            f"on {summary['device']}"
        )
        print_sparsity(console, sparsity)
        for run in runs:
            print_decisions(console, run)
        print_runs(console, runs)
        if sum(run.lossless for run in runs) > 1:
            console.print(verdict(runs, summary["all_equal"], summary["device"]))
    if options.json:
        write_json(options.json, summary, runs)
    if options.plot:
        draw(options.plot, runs, sparsity)


if __name__ == "__main__":
    sys.exit(main())
