"""Accuracy of a CNN with dense activations that lose bits on their way, at several schedules of P.

The example's CNN with LeakyReLU is trained on scikit-learn's digits from the weights of several
seeds, each in every way with the same batches: plain, and with what layers save packed by zfp at P
bits for four values, 128 in float32. `sliding` goes from Top down to Bottom over the epochs,
`inverse` from Bottom up to Top, `fixed` is always Bottom. Masks, integers and statistics of norms
lose nothing. The learning rate falls to 0 by half a cosine over the epochs, so that the last ones
hardly change what is right: at one rate throughout it goes up and down by a point from epoch to
epoch, which is more than what the ways differ by. Figures are the share of tested digits that the
model gets right, in %, as a mean of the last epochs; `crossed` the share of the lossy tensors'
bytes that crossed.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from typing import Any

from cnn.images import load_images
from cnn.models import SIDES
from cnn.options import check_options
from cnn.options import make_parser as cnn_parser
from cnn.training import Trainer

from bitslab.engine.advisor import LossySchedule

Rows = list[dict[str, Any]]
Report = Callable[[str], None]

PLAIN = "plain"
WAYS = (PLAIN, "sliding", "fixed", "inverse")
MAX_P = 128
DIGITS = 1797


def lossy(arguments: argparse.Namespace, report: Report) -> dict[str, Rows]:
    """Train in every way from every seed; return the table of accuracies."""
    top, bottom = arguments.lossy_bits
    parser = cnn_parser("")
    given = ["--model", arguments.lossy_model, "--activation", "leaky_relu", "--images", "1797"]
    options = parser.parse_args([*given, "--device", arguments.device])
    options.epochs, options.batch_size = arguments.lossy_epochs, arguments.lossy_batch
    options.lossy_bits = top, bottom
    options.width = arguments.lossy_width
    device = check_options(parser, options)
    right: dict[str, list[float]] = {way: [] for way in WAYS}
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for seed in seeds:
        options.seed = seed
        images = load_images("digits", DIGITS, SIDES["cifar"], seed, device)
        for way in WAYS:
            if way != PLAIN:
                options.schedule = way
            trainer = Trainer(images, PLAIN if way == PLAIN else "lossy", options, device)
            run = trainer.train(falling(trainer, options.epochs))
            last = run.epochs[-arguments.last_epochs :]
            right[way].append(100 * statistics.mean(epoch.test_accuracy for epoch in last))
            report(f"lossy: seed {seed}, {way}: {right[way][-1]:.1f} % right")
    rows: Rows = []
    plain = statistics.mean(right[PLAIN])
    for way, each in right.items():
        mean = statistics.mean(each)
        row: dict[str, Any] = {"way": way, "mean": f"{mean:.2f}", "less than plain": plain - mean}
        if len(each) > 1:  # of the mean, by the differences from sliding of the same seed
            off = [a - b for a, b in zip(each, right["sliding"], strict=True)]
            row["+-, beside sliding"] = statistics.stdev(off) / len(off) ** 0.5
        if way != PLAIN:
            schedule = LossySchedule(top, bottom, options.epochs, way)  # type: ignore[arg-type]
            rates = [schedule.value(epoch) for epoch in range(options.epochs)]
            row["P"] = f"{rates[0]} to {rates[-1]}"
            row["crossed"] = statistics.mean(rates) / MAX_P
        row |= {f"seed {seed}": f"{a:.1f}" for seed, a in zip(seeds, each, strict=True)}
        rows.append(row)
    title = (
        f"{arguments.lossy_model}, LeakyReLU, width {options.width:g}, {DIGITS} digits, "
        f"{options.epochs} epochs in batches of {options.batch_size}, Top {top}, Bottom {bottom}: "
        f"% right in the last {arguments.last_epochs}; asked: sliding within 0.5 points of plain, "
        "and not below fixed and inverse"
    )
    return {title: rows}


def falling(trainer: Trainer, epochs: int) -> Callable[[int], Callable[[int, int], None]]:
    """Return what sets the learning rate of each epoch, from 1, as `Trainer.train` calls it."""
    groups = trainer.optimizer.param_groups
    first = [group["lr"] for group in groups]

    def begin_epoch(number: int) -> Callable[[int, int], None]:
        share = (1 + math.cos(math.pi * (number - 1) / epochs)) / 2
        for group, rate in zip(groups, first, strict=True):
            group["lr"] = rate * share
        return lambda done, total: None

    return begin_epoch


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    add = parser.add_argument_group("lossy").add_argument
    add("--lossy-model", default="alexnet", help="default: %(default)s")
    add("--lossy-width", type=float, default=0.25, help="of its channels (default: %(default)s)")
    add("--lossy-epochs", type=int, default=24, help="default: %(default)s")
    add("--lossy-batch", type=int, default=64, help="images of a step (default: %(default)s)")
    add("--lossy-bits", nargs=2, type=int, default=(96, 32), metavar=("TOP", "BOTTOM"), help="P")
    add("--last-epochs", type=int, default=6, help="that are averaged (default: %(default)s)")
    add("--seeds", type=int, default=5, help="how many (default: %(default)s)")
    add("--first-seed", type=int, default=0, help="default: %(default)s")
