"""Activations that training keeps: what moving them to an SSD costs, and what is planned.

Part `cpu`: training on a CPU whose activations go to an SSD, beside plain training, checkpoints,
save_on_cpu and torch.save in hooks: peak, CPU seconds, gradients; activations_cpu.py says more.
Then steps of planners beside plain ones, in turns: of those that have nothing to do, and with a
disk; activations_turns.py.

Part `gpu`: steps and peaks of activations at the paper's shapes, beside peers;
activations_gpu.py says more.

Part `disk`: what the disk tier writes and reads, beside the probe that it is planned by, fio where
that is installed, dd, and torch.save. Ways take turns with fresh bytes; the best turn of each
counts, because other processes use the disk, too.

Part `model`: the gain of larger micro-batches, and what larger systems would write, from measured
layers and the size model; activations_model.py says more.

Part `plan`: what the planner adds to a step at limits of memory, beside other planners and rules,
by the timeline; activations_plan.py says more. Then what it predicts of models in training, beside
what is measured; activations_rok.py says more.

Part `rok`: tokens a second over the peak of memory, by batch size, for keeping, recomputing,
offloading and the planner, and the largest batch of the planner in the memory that keeping takes;
--plot draws the curves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from activations_cpu import WAYS, cpu
from activations_disk import Rows, disk
from activations_gpu import add_options as add_gpu_options
from activations_gpu import gpu
from activations_model import model
from activations_plan import plan
from activations_rok import add_options, predictions, rok, show
from timing import add_output


def plans(arguments: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Rows]:
    """Return the tables of plans, and of what they predict."""
    return plan(arguments, report) | predictions(arguments, report)


PARTS = {"cpu": cpu, "gpu": gpu, "disk": disk, "model": model, "plan": plans, "rok": rok}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (default: all)")
    add("--folder", metavar="FOLDER", help="on the SSD (default: the current one)")
    add("--mb", type=int, default=1000, help="that are written each time (default: %(default)s)")
    add_options(parser)
    add_gpu_options(parser)
    add(
        "--step-gb",
        type=float,
        default=17.2,
        help="GB of a step, for the rate that it would need (default: %(default)s, four layers of "
        "8,192 at 16 x 1,024 tokens)",
    )
    add("--step-seconds", type=float, default=1.2, help="of that step (default: %(default)s)")
    add("--widths", nargs="+", type=int, help="model: widths of layers (default: by the device)")
    add("--cpu-batch", type=int, default=4, help="cpu: sequences of a step (default: %(default)s)")
    add("--cpu-tokens", type=int, default=256, help="cpu: of a sequence (default: %(default)s)")
    add("--cpu-ways", nargs="+", choices=WAYS, metavar="WAY", default=list(WAYS),
        help=f"cpu: beside plain (default: all of {', '.join(WAYS)})")  # fmt: skip
    add("--turns", type=int, default=40,
        help="cpu: of plain and planned steps, 0 for none (default: %(default)s)")  # fmt: skip
    add("--sites", nargs="+", type=int, help="plan: of drawn steps (default: 12 40 500)")
    add("--milp-seconds", type=float, default=10.0, help="plan: for a program (default: 10)")
    add_output(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    show(make_parser(), PARTS, argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
