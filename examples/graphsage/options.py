"""The options that both scripts have, and their checks."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import ranks
from common.arguments import (
    DTYPES,
    above_zero,
    add_device,
    add_json,
    add_plot,
    add_seed,
    device_named,
    from_zero,
    positive,
    share,
)

from .modes import MODES
from .sampler import ALL

#: Heads of a hidden layer of GAT; its last layer has one.
GAT_HEADS = 4

MODES_HELP = """\
The features are kept in one of five ways, as IBP (EuroSys'26, section 6.2) compares them:

  raw      a tensor in host memory, as the framework has it
  unified  a tensor in host memory that the GPU reads directly             bitslab.unified
  host     rows packed in host memory, decoded where they arrive           IBP(M)
  cache    raw rows in host memory, the hottest ones packed on the GPU     IBP(C)
  both     packed rows in host memory, the hottest ones on the GPU too     IBP(C/M)
  all      one after the other, to see that every loss is the same to the last bit

The last three are one line: {line}
Without a GPU all of it runs on the CPU, with the cache in host memory.
"""

EPILOG = """\
examples:
  python examples/{script} --features all                  # offline: digits, five ways
  python examples/{script} --features both --dataset citeseer --root FOLDER --scale-up 100000
  torchrun --nproc-per-node=2 examples/{script}            # data-parallel, one copy of the features

The exit status is 0, 1 when losses differ between ways (last bits may on a GPU, which adds in no
fixed order), 2 when the data or an option is refused.
"""


def make_parser(description: str, script: str, line: str) -> argparse.ArgumentParser:
    """Return the parser of a script.

    Parameters
    ----------
    description : str
        What it does.
    script : str
        Its file name.
    line : str
        The line that compresses features.
    """
    parser = argparse.ArgumentParser(
        description=f"{description}\n{MODES_HELP.format(line=line)}",
        epilog=EPILOG.format(script=script),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--dataset",
        default="digits",
        help="digits (scikit-learn's, each linked to the ten most like it), normal (drawn, "
        "dense), citeseer, cora, pubmed, or a class of the framework's datasets, for PyG also "
        "Class:name as in Amazon:Photo (default: %(default)s)",
    )
    add("--features", choices=(*MODES, "all"), default="both", help="default: %(default)s")
    add("--epochs", type=positive, default=5, help="default: %(default)s")
    add_options(parser)
    add(
        "--pipeline",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="sample and fetch the next batch while one trains (default: --pipeline)",
    )
    add_plot(parser, "losses, times and bytes moved to this file, such as ways.png")
    add_json(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of graph and training; benchmarks have these too."""
    add = parser.add_argument
    add(
        "--root",
        type=Path,
        help="folder of Planetoid files such as ind.citeseer.allx; without it the framework "
        "downloads its datasets (for others: where it keeps them)",
    )
    add(
        "--scale-up",
        type=positive,
        metavar="N",
        help="give N nodes the links of a large power-law graph, and features drawn from the real "
        "ones, as the paper's SU datasets",
    )
    add(
        "--degree",
        type=above_zero,
        default=50.0,
        help="edges to a node of such a graph, on average (default: %(default)g, as ogbn-products)",
    )
    add(
        "--cache-ratio",
        type=share,
        default=0.01,
        help="bytes of the cached rows as a share of the raw features' (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=positive,
        default=256,
        help="seeds of a batch, of all ranks together; the paper has 512 to 8192 "
        "(default: %(default)s)",
    )
    add(
        "--fanouts",
        type=fanout,
        nargs="+",
        default=[25, 10],
        metavar="K",
        help=f"neighbours to sample, hop by hop from the seeds, {ALL} for all; as many layers "
        "(default: 25 10)",
    )
    add("--model", choices=("sage", "gat"), default="sage", help="default: %(default)s")
    add(
        "--hidden",
        type=positive,
        default=256,
        help=f"width of the model, for gat a multiple of its {GAT_HEADS} heads "
        "(default: %(default)s)",
    )
    add("--lr", type=above_zero, default=0.003, help="learning rate (default: %(default)s)")
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the stored features; the model computes in float32 (default: %(default)s)",
    )
    add("--edge-features", action="store_true", help="give each edge eight drawn numbers too")
    add(
        "--max-train",
        type=positive,
        metavar="N",
        help="train on N nodes an epoch at most, others each time; validate on as many",
    )
    add("--workers", type=from_zero, default=0, help="processes that sample (default: %(default)s)")
    add_seed(parser)
    add_device(parser)


def fanout(text: str) -> int:
    number = int(text)
    if number < 1 and number != ALL:
        raise argparse.ArgumentTypeError(f"{number}, accepted are numbers from 1 on, and {ALL}")
    return number


def check_model(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse a width that heads do not share evenly."""
    if options.model == "gat" and options.hidden % GAT_HEADS:
        parser.error(
            f"argument --hidden: {options.hidden}, accepted with --model gat are multiples of "
            f"{GAT_HEADS}"
        )


def rank_device(parser: argparse.ArgumentParser, name: str | None) -> torch.device:
    """Return the device of this process; under torchrun, each has a GPU of its own."""
    device = device_named(parser, name)
    if device.type == "cpu":
        return device
    if device.index is not None and ranks.local_size() > 1:
        parser.error(
            f"argument --device: {name} for each of {ranks.local_size()} processes; accepted is "
            "cuda, which gives each a GPU of its own"
        )
    index = ranks.local_rank() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        parser.error(
            f"argument --device: {name or device}, but torch sees {torch.cuda.device_count()} CUDA "
            f"GPUs, and this process needs number {index}"
        )
    return torch.device("cuda", index)
