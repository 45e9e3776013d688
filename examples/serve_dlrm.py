"""Look up embeddings for inference with DLRM, compressed and not, and print how long it takes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common.arguments import DTYPES, above_zero, checked_device, positive
from common.report import OUTPUT, Report, Steps, describe, make_console, write_json
from common.reproducible import drawn_seed
from dlrm import options as dlrm_options
from dlrm.checkpoint import Checkpoint
from dlrm.clicks import Batch, Clicks, ClicksError
from dlrm.criteo import N_DENSE
from dlrm.model import Dlrm
from dlrm.serving import PERCENTILES, Draw, Served, Server, Timing
from dlrm.tables import (
    CachedTables,
    HostTables,
    Tables,
    TorchTables,
    UncachedTables,
    Weights,
    initial_weights,
)
from dlrm.zipf import draw_requests, scaled_rows
from rich.console import Console
from rich.table import Table

MODES: dict[str, tuple[type[Tables], str]] = {
    "raw": (TorchTables, "nn.EmbeddingBag"),
    "host": (HostTables, "nn.EmbeddingBag on the CPU"),
    "rows": (CachedTables, "hot rows as they are"),
    "packed": (CachedTables, "hot rows packed"),
    "uncached": (UncachedTables, "no hot rows"),
}

#: Lines drawn at once to count their ids.
COUNTED_AT_ONCE = 1 << 14

DESCRIPTION = f"""\
{__doc__}

Requests are batches of lines; of each the embeddings of all its categories are looked up and
pooled, then scored by DLRM's perceptrons. This is what section 6.3 of the paper on invariant bit
packing (EuroSys'26) measures. The tables are frozen, and kept in these ways:

  raw       nn.EmbeddingBag, whole tables on the device
  host      the same in host memory, the pooled rows copied to the GPU (with a GPU only)
  rows      packed in host memory, hot rows uncompressed on the device
  packed    packed in host memory, hot rows packed on the device as well, where more of them fit
  uncached  packed in host memory, none on the device

rows and packed are bitslab.integrations.embedding.CachedEmbeddingBag(freeze=True, cache=...),
uncached is bitslab.CompressedTable. Each request has fresh ids, all ways answer the same requests,
and what they look up is compared bit for bit with raw's.
"""

EPILOG = """\
examples:
  python examples/serve_dlrm.py                                 # offline: fresh tables, ids drawn
  python examples/serve_dlrm.py --zipf 0 --cache-ratio 0.2      # uniform ids, as the paper has
  python examples/serve_dlrm.py --checkpoint dlrm.pt --batch-sizes 512 8192 65536
  python examples/serve_dlrm.py --checkpoint dlrm.pt --data test.csv --max-rows 1000000

The exit status is 0, 1 when a bit differs from raw's, 2 when the data or an option is refused.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--modes",
        nargs="+",
        choices=MODES,
        metavar="WAY",
        help=f"in addition to raw, one or several of {', '.join(MODES)} (default: all)",
    )
    add(
        "--batch-sizes",
        nargs="+",
        type=positive,
        default=[512, 4096, 16384],
        metavar="N",
        help="lines of a request, each of which looks up a row in every table; the paper has 512 "
        "to 65536 (default: 512 4096 16384)",
    )
    add(
        "--repeats",
        type=positive,
        default=100,
        metavar="N",
        help="requests of each size, at most (default: %(default)s)",
    )
    add(
        "--seconds",
        type=above_zero,
        default=2.0,
        help="time for each size, after which no more requests are begun (default: %(default)g)",
    )
    add(
        "--counted",
        type=positive,
        default=200_000,
        metavar="N",
        help="lines of other requests whose ids are counted before, which gives the hot rows "
        "(default: %(default)s)",
    )
    add(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="a model that train_dlrm.py --save wrote, with its sizes and dtype (default: fresh "
        "tables)",
    )
    dlrm_options.add_data_options(parser, lines=None)
    dlrm_options.add_table_options(parser)
    dlrm_options.add_output_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    device = checked_device(parser, options.device)
    dlrm_options.check_data(parser, options)
    if options.checkpoint and not options.checkpoint.is_file():
        parser.error(f"argument --checkpoint: {options.checkpoint} is no file")
    wanted = options.modes or MODES
    if options.modes and "host" in options.modes and device.type == "cpu":
        parser.error("argument --modes: host: on a CPU this is raw; accepted are the others")
    modes = [mode for mode in MODES if mode == "raw" or mode in wanted]
    if device.type == "cpu" and "host" in modes:
        modes.remove("host")
    try:
        with Steps() as steps:
            served, summary = serve(modes, options, device, steps)
    except ClicksError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    show(options, summary, served)
    return 1 if summary["requests_that_differ"] else 0


def serve(
    modes: list[str], options: argparse.Namespace, device: torch.device, steps: Steps
) -> tuple[list[Served], dict[str, Any]]:
    """Make the tables and answer requests; return the times of each way, and the summary."""
    checkpoint = Checkpoint(options.checkpoint) if options.checkpoint else None
    clicks = dlrm_options.load_clicks(options, 0.5, steps) if options.data or options.root else None
    weights: Weights
    if checkpoint:
        table_rows, n_dense = checkpoint.table_rows, checkpoint.n_dense
        table = next(iter(checkpoint.tables.values()))
        options.embedding_dim, options.dtype = table.shape[1], dlrm_options.name_of(table.dtype)
        weights, hidden = (
            checkpoint.weights,
            (checkpoint.hidden("bottom"), checkpoint.hidden("top")),
        )
    else:
        table_rows = clicks.table_rows if clicks else scaled_rows(options.scale)
        n_dense = clicks.dense.shape[1] if clicks else N_DENSE
        weights = initial_weights(options.embedding_dim, DTYPES[options.dtype], options.seed)
        hidden = ([64], [64])
    if clicks and (clicks.table_rows != table_rows or clicks.dense.shape[1] != n_dense):
        raise ClicksError(
            f"--checkpoint {options.checkpoint}: its tables have other rows than {clicks.name} "
            "names; give the file and the --max-rows that it was trained with"
        )
    draw = drawer(options, table_rows, n_dense, clicks)
    with steps.step("counting ids") as report:
        counts = counted(draw, table_rows, options.counted, report)
    kept: dict[str, Tables] = {}
    for mode in modes:
        with steps.step(f"{mode}: making tables"):
            cache = "packed" if mode == "packed" else "rows"
            how = dlrm_options.table_options(options, freeze=True, cache=cache, counts=counts)
            kept[mode] = MODES[mode][0](table_rows, weights, device, how)
    torch.manual_seed(options.seed)
    model = Dlrm(kept["raw"], n_dense, *hidden).to(device)
    if checkpoint:
        model.load_state_dict(checkpoint.perceptrons, strict=False)
    server = Server(kept, model, draw, device)
    timings: dict[str, list[Timing]] = {mode: [] for mode in modes}
    for batch_size in options.batch_sizes:
        with steps.step(f"requests of {batch_size:,} lines") as report:
            for timing in server.serve(batch_size, options.repeats, options.seconds, report):
                timings[timing.mode].append(timing)
    served = [
        Served(mode, tables.memory(), tables.codecs, timings[mode]) for mode, tables in kept.items()
    ]
    for tables in kept.values():
        tables.close()
    summary = {
        "tables": table_rows,
        "row_bytes": options.embedding_dim * DTYPES[options.dtype].itemsize,
        "requests_from": clicks.name if clicks else "drawn",
        "device": describe(device),
        "settings": {
            **dlrm_options.settings_of(options, "batch_sizes", "repeats", "seconds", "counted"),
            "checkpoint": str(options.checkpoint) if options.checkpoint else None,
        },
        "requests_compared": sum(
            len(timing.lookup_seconds) for mode in modes[1:] for timing in timings[mode]
        ),
        "requests_that_differ": sum(
            timing.requests_that_differ for of in timings.values() for timing in of
        ),
    }
    return served, summary


def drawer(
    options: argparse.Namespace, table_rows: dict[str, int], n_dense: int, clicks: Clicks | None
) -> Draw:
    """Return a function that draws requests: random lines of a file, or ids by a Zipf law."""
    generator = torch.Generator().manual_seed(drawn_seed(options.seed, 1))

    def draw(n_lines: int) -> Batch:
        if clicks:
            return clicks.batch(torch.randint(len(clicks), (n_lines,), generator=generator))
        return draw_requests(table_rows, n_dense, options.zipf, n_lines, generator)

    return draw


def counted(
    draw: Draw, table_rows: dict[str, int], n_lines: int, report: Report
) -> dict[str, torch.Tensor]:
    """Count how often requests name each row, int64 ``[rows]`` for each table."""
    counts = {name: torch.zeros(rows, dtype=torch.int64) for name, rows in table_rows.items()}
    for begin in range(0, n_lines, COUNTED_AT_ONCE):
        batch = draw(min(COUNTED_AT_ONCE, n_lines - begin))
        for (ids, _), count in zip(batch.bags, counts.values(), strict=True):
            count += torch.bincount(ids, minlength=len(count))
        report(begin + len(batch.labels), n_lines)
    return counts


def show(options: argparse.Namespace, summary: dict[str, Any], served: list[Served]) -> None:
    """Print, draw and write what the options ask for."""
    if options.json != OUTPUT:
        console = make_console()
        rows = summary["tables"].values()
        console.print(
            f"{len(rows)} tables of {sum(rows):,} rows of {summary['row_bytes']} bytes "
            f"({options.dtype}), {served[0].memory.raw_bytes / 1e6:,.2f} MB; on {summary['device']}"
        )
        print_served(console, served)
        n, differ = summary["requests_compared"], summary["requests_that_differ"]
        verdict = f"{differ:,} DIFFER" if differ else "all equal"
        console.print(f"{n:,} requests compared bit for bit with nn.EmbeddingBag: {verdict}")
    if options.json:
        write_json(options.json, summary, served)
    if options.plot:
        draw(options.plot, served)


def print_served(console: Console, served: list[Served]) -> None:
    """Print memory by way, then times by size and way."""
    memory = Table()
    memory.add_column("tables")
    for heading in ("host MB", "device MB", "ratio"):
        memory.add_column(heading, justify="right")
    for one in served:
        memory.add_row(
            f"{one.mode}: {MODES[one.mode][1]}",
            f"{one.memory.host_bytes / 1e6:,.2f}",
            f"{one.memory.device_bytes / 1e6:,.2f}",
            "" if one.memory.ratio is None else f"{one.memory.ratio:.2f}",
        )
    console.print(memory)
    shown = Table(caption="milliseconds of all lookups of a request; the last column: with scoring")
    for heading in (
        *("lines", "tables", "requests", *(f"p{p} ms" for p in PERCENTILES), "lookups/s"),
        *("times raw", "hit rate", "moved MB", "request p50 ms"),
    ):
        shown.add_column(heading, justify="left" if heading == "tables" else "right")
    for together in zip(*(one.timings for one in served), strict=True):
        for timing in together:
            hit_rate = timing.traffic.hit_rate
            shown.add_row(
                f"{timing.batch_size:,}" if timing is together[0] else "",
                timing.mode,
                f"{len(timing.lookup_seconds):,}",
                *(f"{timing.percentile(p) * 1e3:.2f}" for p in PERCENTILES),
                f"{timing.lookups_per_s:,.0f}",
                f"{timing.lookups_per_s / together[0].lookups_per_s:.2f}",
                "" if hit_rate is None else f"{hit_rate:.1%}",
                f"{timing.traffic.moved_bytes / 1e6:,.2f}"
                if timing.mode not in ("raw", "host")
                else "",
                f"{timing.request_p50 * 1e3:.2f}",
                end_section=timing is together[-1],
            )
    console.print(shown)


def draw(path: Path, served: list[Served]) -> None:
    """Draw lookups/s and the median latency by the size of requests."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rates, times) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    sizes = [timing.batch_size for timing in served[0].timings]
    for one in served:
        rates.plot(sizes, [t.lookups_per_s for t in one.timings], marker="o", label=one.mode)
        times.plot(sizes, [t.percentile(50) * 1e3 for t in one.timings], marker="o")
    rates.set(ylabel="lookups/s", xscale="log", ylim=0)
    rates.legend()
    times.set(ylabel="median ms", xscale="log", yscale="log")
    for axes in (rates, times):
        axes.set_xlabel("lines of a request")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
