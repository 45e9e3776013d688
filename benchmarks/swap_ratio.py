"""Sizes of what models save for their backward pass, by codec, all metadata counted.

CNNs are trained on scikit-learn's digits, enlarged to 32 pixels, and then save one batch that they
were not trained on last; language models are those of swap_llm.py. A row is a kind of tensor, all
layers together, encoded tensor by tensor with a codec fitted to it; `best` is the smallest of each
tensor, raw where none is smaller. Before them stand normal values with zeros scattered over them.
Peers: LZ4 (the package lz4, by our form of it), zstd and zlib at their fastest usual levels.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import swap_llm
import torch
import zstandard
from cnn.images import load_images
from cnn.models import SIDES
from cnn.options import check_options
from cnn.options import make_parser as cnn_parser
from cnn.saved import Saved, saved_tensors
from cnn.training import Trainer

from bitslab.engine.codecs import blob_codec_class

#: Those of which issue 20 names sizes.
MODELS = ("alexnet", "vgg16", "vgg16_bn")
ZEROS = "zeros"
CODECS = ("zvc", "csr", "rle", "ibp-blob", "zvc+ibp", "lz4")
RAW, ZSTD, ZLIB, BEST = "raw", "zstd", "zlib", "best"
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
ELEMENTS = 1 << 20  # of a tensor with scattered zeros

Rows = list[dict[str, Any]]
Report = Callable[[str], None]


def sizes_of(values: torch.Tensor) -> dict[str, int]:
    """Return the bytes that a tensor takes by each codec, with what the codec learnt."""
    sizes = {RAW: values.nbytes}
    for name in CODECS:
        codec = blob_codec_class(name).fit(values)
        sizes[name] = codec.encode(values).nbytes + codec.profile_bytes
    data = values.contiguous().view(-1).view(torch.uint8).numpy()
    sizes[ZSTD] = len(zstandard.ZstdCompressor(level=1).compress(data.data))
    sizes[ZLIB] = len(zlib.compress(data.data, 1))
    sizes[BEST] = min(sizes[name] for name in (RAW, *CODECS))
    return sizes


def table(saved: Sequence[Saved], row_kinds: Mapping[str, tuple[str, ...] | None] = KINDS) -> Rows:
    """Return ratios by kind of tensor."""
    measured = [(each, sizes_of(each.values)) for each in saved if each.values.numel()]
    rows: Rows = []
    for title, kinds in row_kinds.items():
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
    row |= {name: raw / n_bytes for name, n_bytes in total.items()}
    return row | {"best saves %": 100 * (1 - total[BEST] / raw)}


def ratio(arguments: argparse.Namespace, report: Report) -> dict[str, Rows]:
    """Train the models, and return a table for each of them and dtype."""
    tables: dict[str, Rows] = {}
    for model in arguments.models or (ZEROS, *MODELS, *swap_llm.MODELS):
        for name in DTYPES:
            if model == ZEROS:
                tables |= zeros(name)
            elif model in swap_llm.MODELS:
                tables |= language_model(model, name, report)
            else:
                tables |= cnn(model, name, arguments, report)
    return tables


def zeros(dtype_name: str) -> dict[str, Rows]:
    """Return the table of normal values with scattered zeros, and what their ideal would be."""
    generator = torch.Generator().manual_seed(0)
    dtype = DTYPES[dtype_name]
    bits = 8 * dtype.itemsize
    rows: Rows = []
    for percent in (50, 90):
        values = torch.randn(ELEMENTS, generator=generator)
        values[torch.randperm(ELEMENTS, generator=generator)[: ELEMENTS * percent // 100]] = 0
        saved = Saved("", "", values.shape, values.to(dtype))
        row = {"saved": f"{percent} % zeros"} | row_of([(saved, sizes_of(saved.values))])
        rows.append(row | {"ideal": bits / (1 + bits * (1 - percent / 100))})
    title = f"{dtype_name}, {ELEMENTS:,} normal values with scattered zeros: raw over encoded bytes"
    return {f"{title}; ideal: a bit a value and what is not zero": rows}


def cnn(
    model: str, dtype_name: str, arguments: argparse.Namespace, report: Report
) -> dict[str, Rows]:
    """Train a CNN and return the table of what it saves."""
    parser = cnn_parser("")
    given = ["--model", model, "--epochs", str(arguments.epochs), "--device", "cpu"]
    options = parser.parse_args([*given, "--images", str(arguments.images)])
    device = check_options(parser, options)
    options.dtype = dtype_name
    images = load_images("digits", options.images, SIDES["cifar"], options.seed, device)
    report(f"{model}, {dtype_name}: training {options.epochs} epochs")
    trainer = Trainer(images, "plain", options, device)
    run = trainer.train(lambda number: lambda done, total: None)
    batch, labels = images.batch(images.tested[: arguments.batch_size])
    trainer.model.train()
    report(f"{model}, {dtype_name}: encoding")
    accuracy = run.epochs[-1].test_accuracy
    title = (
        f"{model}, {dtype_name}, width {options.width}, after {options.epochs} epochs "
        f"({100 * accuracy:.1f} % right), a batch of {len(labels)}: raw over encoded bytes"
    )
    return {title: table(saved_tensors(trainer.model, batch, labels, DTYPES[dtype_name]))}


def language_model(model: str, dtype_name: str, report: Report) -> dict[str, Rows]:
    """Return the table of what a language model saves, or nothing where it is not installed."""
    try:
        title, saved = swap_llm.MODELS[model](DTYPES[dtype_name], report)
    except swap_llm.MISSING as error:
        report(f"left out: {model} ({error})")
        return {}
    report(f"{model}, {dtype_name}: encoding")
    return {f"{title}: raw over encoded bytes": table(saved, swap_llm.KINDS)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    add = parser.add_argument_group("ratio").add_argument
    add("--epochs", type=int, default=8, help="of training (default: %(default)s)")
    add("--images", type=int, default=1000, help="digits, a fifth to test (default: %(default)s)")
    add("--batch-size", type=int, default=64, help="images that are saved (default: %(default)s)")
