"""The options of train_cnn_swapped.py, and their checks."""

from __future__ import annotations

import argparse

import torch

# These modules are next to this package.
from common.arguments import (
    DTYPES,
    above_zero,
    add_device,
    add_json,
    add_plot,
    add_seed,
    checked_device,
    from_zero,
    positive,
    share,
)

import bitslab

from .models import ACTIVATIONS, MODELS, SIDES
from .training import OPTIMIZERS
from .ways import LOSSY, LOSSY_TEXT, SCHEDULES, WAYS, lossy_of

DESCRIPTION = """\
{summary}

What a layer saves for its backward pass waits for most of a step: it can leave the device after the
forward pass and come back before it is read. Half of the numbers behind a ReLU are zeros and pool
indices are small, so that fewer bytes cross than were saved, and every bit comes back. Whether
packing is worth its time is decided for each tensor from measurements, anew while zeros come and go
(CSWAP+). The same model is trained in these ways:

{ways}
  all          one after the other

The last five are one line, bitslab.offload_activations(model, policy=...), before the loop. All
start from the same weights and see the same batches, and all must give the same losses, to the last
bit. One more way has to be asked for by name:

{lossy}

Without a GPU all of it runs on the CPU: the engine's threads stand for the GPU's streams, and
what crosses no link is reported as if it did.
"""

EPILOG = """\
examples:
  python examples/train_cnn_swapped.py                          # offline: AlexNet on digits
  python examples/train_cnn_swapped.py --model vgg16_bn --ways plain auto --epochs 5 --plot vgg.png
  python examples/train_cnn_swapped.py --model resnet --activation leaky_relu
  python examples/train_cnn_swapped.py --activation leaky_relu --ways plain lossy --epochs 10
  python examples/train_cnn_swapped.py --device cuda --model vgg16 --shape imagenet \\
      --images 2048 --batch-size 128 --width 1                  # the paper's table 3

Exposed is what a step takes longer than the plain one. The exit status is 0, 1 when losses differ
between ways that are lossless (but for torch's own save_on_cpu), 2 when an option is refused.
"""


def make_parser(summary: str) -> argparse.ArgumentParser:
    """Return the parser of the script."""
    ways = "\n".join(f"  {name:<11}  {text}" for name, text in WAYS.items())
    lossy = f"  {LOSSY:<11}  {LOSSY_TEXT}"
    parser = argparse.ArgumentParser(
        description=DESCRIPTION.format(summary=summary, ways=ways, lossy=lossy),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(parser)
    _add_training(parser)
    _add_ways(parser)
    add_device(parser)
    add_seed(parser)
    add_plot(parser, "losses, zeros and steps to this file, such as cnn.png")
    add_json(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--model", choices=MODELS, default="alexnet", help="default: %(default)s")
    add(
        "--shape",
        choices=SIDES,
        default="cifar",
        help="images of 32 or of 224 pixels, and the form of the model for them (default: "
        "%(default)s)",
    )
    add(
        "--activation",
        choices=ACTIVATIONS,
        default="relu",
        help="relu leaves zeros, the others are dense (default: %(default)s)",
    )
    add(
        "--width",
        type=share,
        help="channels as a share of the published ones (default: 1 on a GPU, 0.25 on a CPU)",
    )
    add(
        "--dtype",
        choices=[name for name in DTYPES if name != "float16"],
        default="float32",
        help="bfloat16: by autocast (default: %(default)s)",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    add(
        "--data",
        choices=("digits", "drawn"),
        default="digits",
        help="scikit-learn's 1,797 digits, enlarged; or waves in ten directions and lengths, drawn "
        "(default: %(default)s)",
    )
    add(
        "--images",
        type=positive,
        default=1000,
        metavar="N",
        help="how many; every fifth is tested (default: %(default)s)",
    )
    add("--epochs", type=positive, default=3, help="default: %(default)s")
    add("--batch-size", type=positive, default=32, help="default: %(default)s")
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adam",
        help="sgd has a momentum of 0.9 (default: %(default)s)",
    )
    add("--lr", type=above_zero, default=0.001, help="learning rate (default: %(default)s)")


def _add_ways(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("saved tensors").add_argument
    add(
        "--ways",
        nargs="+",
        choices=(*WAYS, LOSSY, "all"),
        default=["all"],
        metavar="WAY",
        help=f"one or several of {', '.join(WAYS)}, {LOSSY}, or all but {LOSSY} (default: all)",
    )
    add(
        "--codecs",
        nargs="+",
        metavar="CODEC",
        help="what static and auto may pack with (default: the best that are registered)",
    )
    add(
        "--select",
        choices=("all", "conv_inputs"),
        default="all",
        help="which saved tensors; conv_inputs as vDNN (default: %(default)s)",
    )
    add(
        "--min-bytes",
        type=from_zero,
        default=1 << 14,
        metavar="N",
        help="smaller tensors are left where they are (default: %(default)s)",
    )
    add(
        "--schedule",
        choices=SCHEDULES,
        default="sliding",
        help=f"of {LOSSY}: P from TOP down to BOTTOM, from BOTTOM up to TOP, or always BOTTOM "
        "(default: %(default)s)",
    )
    add(
        "--lossy-bits",
        nargs=2,
        type=positive,
        default=(96, 32),
        metavar=("TOP", "BOTTOM"),
        help=f"of {LOSSY}: P, the bits that cross for four values, 128 in float32 (default: 96 32)",
    )
    add(
        "--verify",
        type=from_zero,
        default=0,
        metavar="N",
        help="check what comes back by checksums, every N-th step also bit by bit (default: no)",
    )


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> torch.device:
    """Return the device, which is there; fill in what depends on it and check the rest."""
    device = checked_device(parser, options.device)
    if options.width is None:
        options.width = 1.0 if device.type == "cuda" else 0.25
    n_trained = options.images - options.images // 5
    if options.batch_size > n_trained:
        parser.error(
            f"argument --batch-size: {options.batch_size}, but {n_trained} of --images "
            f"{options.images} are trained on; accepted are batches up to that"
        )
    named = [way for given in options.ways for way in (WAYS if given == "all" else (given,))]
    options.ways = list(dict.fromkeys(named))
    try:
        lossy_of(options)
    except bitslab.ArgumentError as error:
        parser.error(f"argument --lossy-bits: {error}")
    return device
