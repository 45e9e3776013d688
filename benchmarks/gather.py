"""Measure gathers of rows by id: out of host memory, raw and packed, and out of a cache.

python benchmarks/gather.py            # what this machine can run
python benchmarks/gather.py --only gpu --out benchmarks/results/gpu.md
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from timing import add_output, print_tables


def main() -> int:
    """Run the requested parts and print one table each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=("cpu", "gpu"), help="run one part")
    parser.add_argument("--repetitions", type=int, default=7, help="timed runs of each row")
    parser.add_argument(
        "--largest-gib", type=float, default=8, help="largest table in host memory for a GPU"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        default=["raw", "alignment", "packed", "cache", "peers"],
        help="tables of the GPU part: raw alignment packed cache peers",
    )
    add_output(parser)
    arguments = parser.parse_args()
    tables: dict[str, list[dict[str, Any]]] = {}
    if arguments.only in (None, "cpu"):
        import gather_cpu

        tables |= gather_cpu.run(arguments)
    if arguments.only == "gpu" or (arguments.only is None and torch.cuda.is_available()):
        import gather_gpu

        tables |= gather_gpu.run(arguments)
    print_tables(tables, arguments.json, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
