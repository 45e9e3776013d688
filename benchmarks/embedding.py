"""Measure lookups of embedding rows: packed tables with a cache, compared with the peers.

python benchmarks/embedding.py --only ratio     # sizes of trained tables
python benchmarks/embedding.py --only cpu       # and nn.EmbeddingBag
python benchmarks/embedding.py --only gpu --out benchmarks/results/gpu.md
python benchmarks/embedding.py --only train     # steps of training on a GPU
python benchmarks/embedding.py --only pool      # bags of rows in a GPU's memory, and torch's
python benchmarks/embedding.py --only collection  # steps of many small tables, and TorchRec's
python benchmarks/embedding.py --only host      # the host's part of steps of training; no GPU

One id a bag, as in the IBP paper's section 6.3, and fresh ids for each repetition. Uniform ids, and
ids by a Zipf law whose most used tenth of a tenth the caches hold. Rates are millions of lookups a
second, wall time, every launch and every wait included. FBGEMM is measured where fbgemm_gpu is
installed, ColossalAI where its folder is given: --colossalai FOLDER, the folder cache_embedding of
its sources, which needs the package contexttimer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from timing import add_output, print_tables

PARTS = ("ratio", "cpu", "gpu", "train", "pool", "collection", "host")


def main() -> int:
    """Run the requested parts and print one table each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, help="run one part")
    parser.add_argument("--repetitions", type=int, default=15, help="timed batches of each figure")
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[512, 4096, 16384, 65536],
        metavar="IDS",
        help="ids of a batch",
    )
    parser.add_argument(
        "--row-bytes",
        type=int,
        nargs="+",
        default=[128, 512, 2048],
        metavar="BYTES",
        help="bytes of a row of float32",
    )
    parser.add_argument("--table-mib", type=int, help="raw bytes of the table; 256 or 2048 (gpu)")
    parser.add_argument("--cache-ratio", type=float, default=0.01, help="share of rows cached")
    parser.add_argument(
        "--cache-ratios",
        type=float,
        nargs="+",
        default=[0.01, 0.05, 0.2, 1.0],
        metavar="SHARE",
        help="shares of rows cached, for steps of training",
    )
    parser.add_argument("--codec", default="auto", help="of the table, for steps of training")
    parser.add_argument("--colossalai", type=Path, metavar="FOLDER", help="its cache_embedding")
    add_output(parser)
    arguments = parser.parse_args()
    tables: dict[str, list[dict[str, Any]]] = {}
    if arguments.only in (None, "ratio"):
        import embedding_ratio

        tables |= embedding_ratio.run()
    if arguments.only in (None, "cpu"):
        import embedding_cpu

        tables |= embedding_cpu.run(arguments)
    if arguments.only == "gpu" or (arguments.only is None and torch.cuda.is_available()):
        import embedding_gpu

        tables |= embedding_gpu.run(arguments)
    if arguments.only == "train" or (arguments.only is None and torch.cuda.is_available()):
        import embedding_training

        tables |= embedding_training.run(arguments)
    if arguments.only == "pool" or (arguments.only is None and torch.cuda.is_available()):
        import embedding_pooling

        tables |= embedding_pooling.run(arguments)
    if arguments.only == "collection" or (arguments.only is None and torch.cuda.is_available()):
        import embedding_collection

        tables |= embedding_collection.run(arguments)
    if arguments.only == "host":
        import embedding_host

        tables |= embedding_host.run(arguments)
    print_tables(tables, arguments.json, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
