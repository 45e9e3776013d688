"""The options that both scripts have, and their checks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

# These modules are next to this package.
from common.arguments import DTYPES, add_device, add_json, add_plot, add_seed, positive, share

from bitslab.engine.codecs.registry import codec_names

from .clicks import Clicks
from .criteo import read_criteo
from .movielens import read_movielens
from .tables import TableOptions
from .zipf import draw_clicks

EVICTED = ("LFU", "DATASET", "LRU")
#: Options that results depend on, whichever script has them.
SETTINGS = (
    *("data", "root", "scale", "zipf", "lines", "max_rows", "embedding_dim", "dtype"),
    *("cache_ratio", "evict", "codec", "layout", "seed"),
)


def add_data_options(parser: argparse.ArgumentParser, lines: int | None) -> None:
    """Add the options of the click data."""
    group = parser.add_argument_group("data")
    add = group.add_argument
    add(
        "--data",
        type=Path,
        metavar="FILE",
        help="a click log of Criteo, TSV as they come or CSV, .gz or not: a label, 13 integers, 26 "
        "categories in hexadecimal, any of them empty",
    )
    add(
        "--root",
        type=Path,
        metavar="FOLDER",
        help="folder of MovieLens-100k: u.data, and u.item and u.user where they are",
    )
    add(
        "--scale",
        type=share,
        default=0.01,
        help="without either: clicks are drawn, ids by a Zipf law from tables with the sizes of "
        "Criteo Kaggle's 26, those above 1,000 rows times this (default: %(default)g; 1 gives "
        "33,762,577 rows)",
    )
    add(
        "--zipf",
        type=exponent,
        default=1.05,
        metavar="S",
        help="the k-th most frequent id comes k ** -S as often as the first, 0 for uniform ids "
        "(default: %(default)g)",
    )
    add(
        "--lines",
        type=positive,
        metavar="N",
        help="lines to read of a file (default: all)"
        + (f", or to draw (default: {lines:,})" if lines else ""),
    )
    add(
        "--max-rows",
        type=positive,
        default=10_000_000,
        metavar="N",
        help="rows of a table for Criteo's log; where there are more values they are hashed to as "
        "many (default: %(default)s)",
    )
    add_seed(group)
    parser.set_defaults(drawn_lines=lines)


def add_table_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the tables."""
    add = parser.add_argument_group("tables").add_argument
    add(
        "--embedding-dim",
        type=positive,
        default=32,
        metavar="D",
        help="numbers in a row of a table (default: %(default)s)",
    )
    add("--dtype", choices=DTYPES, default="float32", help="of the tables (default: %(default)s)")
    add(
        "--cache-ratio",
        type=share,
        default=0.05,
        help="rows kept on the device as a share of the table's (default: %(default)g)",
    )
    add(
        "--evict",
        type=str.upper,
        choices=EVICTED,
        default="LFU",
        help="which rows make room: those used least often, those rarest in the data, or those not "
        "used for longest (default: %(default)s)",
    )
    add(
        "--codec",
        choices=("auto", *codec_names()),
        default="auto",
        help="what packs rows on the host; auto plans for each table, and keeps raw those that do "
        "not gain (default: %(default)s)",
    )
    add(
        "--layout",
        choices=("compact", "inplace"),
        default="compact",
        help="compact: host memory shrinks; inplace: each packed row is where the raw row would "
        "be (default: %(default)s)",
    )


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add where it runs and what it writes."""
    add_device(parser)
    add_plot(parser, "the results to this file, such as it.png")
    add_json(parser)


def exponent(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 10:
        raise argparse.ArgumentTypeError(f"{text}, accepted are numbers from 0 to 10")
    return number


def ratio_below_one(text: str) -> float:
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{text}, accepted are numbers above 0 and below 1")
    return number


def widths(text: str) -> list[int]:
    """Read such as 512-256-64."""
    try:
        numbers = [int(part) for part in text.split("-")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}, accepted are widths such as 256-64")
    return numbers


def check_data(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse data that is missing, or named twice."""
    if options.data and options.root:
        parser.error(
            "argument --root: is for MovieLens, --data for Criteo; accepted is one of them"
        )
    if options.data and not options.data.is_file():
        parser.error(f"argument --data: {options.data} is no file")
    if options.root and not options.root.is_dir():
        parser.error(f"argument --root: {options.root} is no folder")


def load_clicks(options: argparse.Namespace, test_share: float, steps: Any) -> Clicks:
    """Read or draw the clicks that the options name, or raise ClicksError."""
    if options.data:
        with steps.step(f"reading {options.data.name}") as report:
            return read_criteo(options.data, options.max_rows, options.lines, test_share, report)
    if options.root:
        with steps.step(f"reading {options.root.name}"):
            return read_movielens(options.root, test_share)
    lines = options.lines or options.drawn_lines
    with steps.step("drawing clicks") as report:
        return draw_clicks(lines, options.scale, options.zipf, options.seed, test_share, report)


def table_options(options: argparse.Namespace, **others: Any) -> TableOptions:
    return TableOptions(
        width=options.embedding_dim,
        dtype=DTYPES[options.dtype],
        cache_ratio=options.cache_ratio,
        evict=options.evict,
        codec=options.codec,
        layout=options.layout,
        **others,
    )


def settings_of(options: argparse.Namespace, *others: str) -> dict[str, Any]:
    """Return options by name, as JSON has them."""
    named = {name: getattr(options, name) for name in (*SETTINGS, *others)}
    return {name: str(part) if isinstance(part, Path) else part for name, part in named.items()}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
