"""Activations that training keeps: what moving them to an SSD costs, and what is planned.

Part `cpu`: training on a CPU whose activations go to an SSD, beside plain training, checkpoints,
save_on_cpu and torch.save in hooks: peak, CPU seconds, gradients; activations_cpu.py says more.

Part `disk`: what the disk tier writes and reads, beside the probe that it is planned by, fio where
that is installed, dd, and torch.save. Ways take turns with fresh bytes; the best turn of each
counts, because other processes use the disk, too.

Part `model`: the gain of larger micro-batches, and what larger systems would write, from measured
layers and the size model; activations_model.py says more.

Part `plan`: what the planner adds to a step at limits of memory, beside other planners and rules,
by the timeline; activations_plan.py says more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from activations_cpu import cpu
from activations_disk import Rows, disk
from activations_model import model
from activations_plan import plan
from timing import print_tables

PARTS = {"cpu": cpu, "disk": disk, "model": model, "plan": plan}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (default: all)")
    add("--folder", metavar="FOLDER", help="on the SSD (default: the current one)")
    add("--mb", type=int, default=1000, help="that are written each time (default: %(default)s)")
    add("--repetitions", type=int, default=3, help="turns of each way (default: %(default)s)")
    add(
        "--step-gb",
        type=float,
        default=17.2,
        help="GB of a step, for the rate that it would need (default: %(default)s, four layers of "
        "8,192 at 16 x 1,024 tokens)",
    )
    add("--step-seconds", type=float, default=1.2, help="of that step (default: %(default)s)")
    add("--batch", type=int, default=4, help="cpu: sequences of a step (default: %(default)s)")
    add("--tokens", type=int, default=256, help="cpu: of a sequence (default: %(default)s)")
    add("--hidden", nargs="+", type=int, help="model: widths of layers (default: by the device)")
    add("--sites", nargs="+", type=int, help="plan: of drawn steps (default: 12 40 500)")
    add("--milp-seconds", type=float, default=10.0, help="plan: for a program (default: 10)")
    add("--json", action="store_true", help="print JSON in place of tables")
    add("--out", type=Path, metavar="FILE", help="write the tables to a file, too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    tables: dict[str, Rows] = {}
    for part in arguments.only:
        tables |= PARTS[part](arguments, lambda text: print(text, file=sys.stderr, flush=True))
    print_tables(tables, arguments.json, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
