"""Train a language model while what it keeps for its backward pass goes to the host or an SSD."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common.report import OUTPUT, Steps, make_console, same_bits, write_json
from common.reproducible import reproducible
from lm.models import MINILM, repository_text
from lm.options import check_options, make_parser
from lm.shown import draw, print_runs, verdict
from lm.training import Run, Trainer
from lm.ways import PEER

import bitslab


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__ or "")
    options = parser.parse_args(arguments)
    device = check_options(parser, options)
    text = repository_text(options.model)
    if options.tokens >= len(text):
        parser.error(f"argument --tokens: {options.tokens}, but the text has {len(text)}")
    runs: list[Run] = []
    try:
        with Steps() as steps, reproducible(device):
            for way in options.way:
                with steps.step(way) as report:
                    runs.append(Trainer(way, options, device).train(text, report))
    except bitslab.BitslabError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    for run in runs[1:]:
        run.equal = same_bits(run.losses, runs[0].losses)
    equal = all(run.equal is not False for run in runs if run.way != PEER)
    show(options, facts_of(options, device, equal), runs)
    return 0 if equal else 1


def facts_of(options: argparse.Namespace, device: torch.device, equal: bool) -> dict[str, Any]:
    """Return the values common to all ways."""
    names = (
        *("model", "size", "steps", "batch_size", "tokens", "lr", "policy", "min_bytes"),
        *("in_flight_mb", "verify", "write_budget", "seed"),
    )
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "disk": str(Path(options.disk or ".").resolve()),
        "settings": {name: getattr(options, name) for name in names},
        "versions": {"bitslab": bitslab.__version__, "torch": torch.__version__},
        "all_equal": equal,
    }


def show(options: argparse.Namespace, summary: dict[str, Any], runs: list[Run]) -> None:
    """Print, draw and write what the options ask for."""
    if options.json != OUTPUT:
        console = make_console()
        size = "" if options.model == MINILM else f", {options.size}"
        console.print(
            f"{options.model}{size}: {options.steps} steps of {options.batch_size} x "
            f"{options.tokens} tokens on {summary['device']}, disk {summary['disk']}"
        )
        print_runs(console, runs)
        if len(runs) > 1:
            console.print(verdict(runs, summary["all_equal"], summary["device"]))
    if options.json:
        write_json(options.json, summary, runs)
    if options.plot:
        draw(options.plot, runs)


if __name__ == "__main__":
    sys.exit(main())
