"""Sizes of what CNNs save for their backward pass, by codec, all metadata counted.

Each model is trained on scikit-learn's digits, enlarged to 32 pixels, and then saves one batch that
it was not trained on last. A row is a kind of tensor, all layers together, encoded tensor by tensor
with a codec fitted to it; `best` is the smallest of each tensor, raw where none is smaller. Peers:
LZ4 (the package lz4, by our form of it), zlib at its fastest.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from timing import print_tables

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from cnn.images import load_images  # noqa: E402
from cnn.models import MODELS, SIDES  # noqa: E402
from cnn.options import checked_device  # noqa: E402
from cnn.options import make_parser as cnn_parser  # noqa: E402
from cnn.saved import Saved, saved_tensors  # noqa: E402
from cnn.training import Trainer  # noqa: E402
from swap_train import add_options as add_train_options  # noqa: E402
from swap_train import train  # noqa: E402

from bitslab.engine.codecs import blob_codec_class  # noqa: E402

#: Those of which the issue names sizes.
RATIO_MODELS = ("alexnet", "vgg16", "vgg16_bn")
CODECS = ("zvc", "csr", "rle", "ibp-blob", "zvc+ibp", "lz4")
RAW, ZLIB, BEST = "raw", "zlib", "best"
#: Rows of a table: which kinds of saved tensors they sum, None for all.
KINDS: dict[str, tuple[str, ...] | None] = {
    "activations": ("activation",),
    "convolution outputs": ("convolution",),
    "pooled": ("pooled",),
    "pool indices": ("pool indices",),
    "dropout": ("dropout", "dropout mask"),
    "everything": None,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Rows = list[dict[str, Any]]


def sizes_of(values: torch.Tensor) -> dict[str, int]:
    """Return the bytes that a tensor takes by each codec, with what the codec learnt."""
    sizes = {RAW: values.nbytes}
    for name in CODECS:
        codec = blob_codec_class(name).fit(values)
        sizes[name] = codec.encode(values).nbytes + codec.profile_bytes
    data = values.contiguous().view(-1).view(torch.uint8)
    sizes[ZLIB] = len(zlib.compress(data.cpu().numpy().data, 1))
    sizes[BEST] = min(sizes[name] for name in (RAW, *CODECS))
    return sizes


def table(saved: Sequence[Saved]) -> Rows:
    """Return ratios by kind of tensor."""
    measured = [(each, sizes_of(each.values)) for each in saved if each.values.numel()]
    rows: Rows = []
    for title, kinds in KINDS.items():
        chosen = [(s, sizes) for s, sizes in measured if kinds is None or s.kind in kinds]
        if chosen:
            rows.append({"saved": title} | row_of(chosen))
    return rows


def row_of(chosen: Iterable[tuple[Saved, Mapping[str, int]]]) -> dict[str, Any]:
    """Return the share of zeros, raw bytes, and ratios of several tensors together."""
    total: dict[str, int] = {}
    zeros = 0.0
    for saved, sizes in chosen:
        zeros += saved.zeros * sizes[RAW]
        for name, n_bytes in sizes.items():
            total[name] = total.get(name, 0) + n_bytes
    raw = total.pop(RAW)
    row: dict[str, Any] = {"zeros %": 100 * zeros / raw, "MB": raw / 1e6}
    return row | {name: raw / n_bytes for name, n_bytes in total.items()}


def ratio(arguments: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Rows]:
    """Train the models, and return a table for each of them and dtype."""
    tables = {}
    for model in arguments.models or RATIO_MODELS:
        parser = cnn_parser("")
        given = ["--model", model, "--epochs", str(arguments.epochs), "--device", "cpu"]
        options = parser.parse_args([*given, "--images", str(arguments.images)])
        device = checked_device(parser, options)
        images = load_images("digits", options.images, SIDES["cifar"], options.seed, device)
        for name, dtype in DTYPES.items():
            options.dtype = name
            report(f"{model}, {name}: training {options.epochs} epochs")
            trainer = Trainer(images, "plain", options, device)
            run = trainer.train(lambda number: lambda done, total: None)
            batch, labels = images.batch(images.tested[: arguments.batch_size])
            trainer.model.train()
            report(f"{model}, {name}: encoding")
            accuracy = run.epochs[-1].test_accuracy
            title = (
                f"{model}, {name}, width {options.width}, after {options.epochs} epochs "
                f"({100 * accuracy:.1f} % right), a batch of {len(labels)}: raw over encoded bytes"
            )
            tables[title] = table(saved_tensors(trainer.model, batch, labels, dtype))
    return tables


PARTS = {"ratio": ratio, "train": train}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (default: all)")
    add(
        "--models",
        nargs="+",
        choices=MODELS,
        metavar="MODEL",
        help="of examples/train_cnn_swapped.py (default: those of the issue)",
    )
    add("--epochs", type=int, default=8, help="of training (default: %(default)s)")
    add("--images", type=int, default=1000, help="digits, a fifth to test (default: %(default)s)")
    add("--batch-size", type=int, default=64, help="images that are saved (default: %(default)s)")
    add(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="of all parts but ratio, which counts on the CPU (default: %(default)s)",
    )
    add("--json", action="store_true", help="print JSON in place of tables")
    add("--out", type=Path, metavar="FILE", help="write the tables to a file, too")
    add_train_options(parser)
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
