"""Measure the codecs: ratios on real data, speed on the CPU and on a GPU, compared with peers.

python benchmarks/codec.py            # what this machine can run
python benchmarks/codec.py --only gpu --out benchmarks/results/gpu.md
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
    parser.add_argument("--only", choices=("ratio", "published", "cpu", "gpu"), help="one part")
    parser.add_argument("--repetitions", type=int, default=7, help="timed runs of each row")
    parser.add_argument("--gpu-bytes", type=int, default=1 << 30, help="raw bytes of a GPU input")
    add_output(parser)
    arguments = parser.parse_args()
    tables: dict[str, list[dict[str, Any]]] = {}
    if arguments.only in (None, "ratio"):
        import codec_ratio

        tables |= codec_ratio.run(arguments)
    if arguments.only in (None, "published"):
        import codec_published

        tables |= codec_published.run(arguments)
    if arguments.only in (None, "cpu"):
        import codec_cpu

        tables |= codec_cpu.run(arguments)
    if arguments.only == "gpu" or (arguments.only is None and torch.cuda.is_available()):
        import codec_gpu

        tables |= codec_gpu.run(arguments)
    print_tables(tables, arguments.json, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
