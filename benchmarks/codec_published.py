"""Sizes as the IBP paper has them: its tables 4, 5 and 7, figures 13 and 15, on the data at hand.

All of it is invariant bit packing with the published options (codes of one bit, a mask for each
chunk position, not grouped). Files are found as in codec_ratio. Reddit, Products, MAG, the DLRM of
NVIDIA and the K/V of OPT and Gemma are not there: trained embeddings of Criteo's and MovieLens'
models, MiniLM's weights and drawn rows stand in, and the tables say so by name.

`counted` ratios and percents have everything in them (masks, values, offsets, cluster ids); others
are those of packed rows alone, as in the paper.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from codec_ratio import (
    TABLES,
    attention,
    embedding,
    planetoid,
    published_codec,
    read,
    saved_percent,
)

import bitslab
from bitslab.engine.codecs.invariant.codec import InvariantCodec

Rows = list[dict[str, Any]]

PUBLISHED: dict[str, Any] = {"code_bits": 1, "grouped": False, "uniform": False}
SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
CHUNK_BYTES = (1, 2, 4, 8)
THRESHOLDS = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)
CLUSTERS = (1, 4, 16, 64, 256)
GROUP_ROWS = 100  # of the groups of table 4
GRAPH_ROWS = 20_000  # of the graph of table 7, its features drawn from the rows of a data set
AGREEING = 0.8  # share of rows of its invariant bits

#: Figures of the paper by data set: of table 4 (bit pack, grouped, invariant %), 5 (ratios) and 7.
PAPER_BITS = {
    "Pubmed": (6.3, 7.5, 89.4),
    "Citeseer": (6.3, 65.3, 99.0),
    "Cora": (6.3, 76.0, 99.2),
}
PAPER_RATIOS = {
    "Pubmed": (7.37, 7.34, 7.34, 7.34, 7.35, 7.35),
    "Citeseer": (25.09,) * 6,
    "Cora": (26.36, 26.36, 26.36, 26.36, 26.36, 26.34),
}
PAPER_CACHED = {"Pubmed": 6.84, "Citeseer": 24.15, "Cora": 25.88}


def drawn(n_rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal rows with the sigma of trained weights, 0.02."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(n_rows, columns, generator=generator) * 0.02).to(dtype)


def integers(n_rows: int, columns: int, normal: bool) -> torch.Tensor:
    """Return int32 rows, normal around zero (sigma 1e6) or uniform over all values."""
    generator = torch.Generator().manual_seed(0)
    if normal:
        return (torch.randn(n_rows, columns, generator=generator) * 1e6).to(torch.int32)
    low, high = -(1 << 31), (1 << 31) - 1
    return torch.randint(low, high, (n_rows, columns), dtype=torch.int32, generator=generator)


def sources() -> dict[str, Callable[[], torch.Tensor]]:
    """Return how each data set is read, or drawn, by its name."""
    found: dict[str, Callable[[], torch.Tensor]] = {
        name: partial(planetoid, name.lower()) for name in PAPER_BITS
    }
    for name in ("Criteo embeddings 1", "ml-1m users"):
        found[f"{name}, float32"] = partial(embedding, TABLES[name], torch.float32)
    found["drawn normal, 400 B, float32"] = partial(drawn, 20_000, 100)
    found["drawn normal, 256 B, float16"] = partial(drawn, 40_000, 128, torch.float16)
    found["drawn normal, 256 B, bfloat16"] = partial(drawn, 40_000, 128, torch.bfloat16)
    found["MiniLM attention, bfloat16"] = lambda: torch.cat(attention(torch.bfloat16))
    return found


def as_words(rows: torch.Tensor) -> np.ndarray:
    """Return rows of 2- or 4-byte elements as unsigned words ``[N, C]``."""
    plain = rows.reshape(rows.shape[0], -1).contiguous().view(torch.uint8).numpy()
    return plain.view({2: np.uint16, 4: np.uint32}[rows.element_size()])


def leading_zeros(words: np.ndarray) -> np.ndarray:
    """Return how many of the highest bits of each word are zero."""
    _, lengths = np.frexp(words.astype(np.float64))  # exact below 53 bits
    return 8 * words.itemsize - lengths


def bits_removed(words: np.ndarray, group_rows: int | None = None) -> float:
    """Return the percent of bits that plain bit packing removes.

    Values lose the high bits that are zero in all of them; with `group_rows`, in all rows of a
    group at the same column.
    """
    if group_rows is None:
        zeros = leading_zeros(np.bitwise_or.reduce(words, axis=None).reshape(1))
        return float(100 * zeros[0] / (8 * words.itemsize))
    removed = 0
    for start in range(0, len(words), group_rows):
        group = words[start : start + group_rows]
        removed += len(group) * int(leading_zeros(np.bitwise_or.reduce(group, axis=0)).sum())
    return 100 * removed / (8 * words.nbytes)


def invariant_bits(words: np.ndarray, share: float = AGREEING) -> float:
    """Return the percent of a row's bits that are equal in at least a share of the rows."""
    plain = words.view(np.uint8)
    ones = np.zeros(8 * plain.shape[1], np.int64)
    for start in range(0, len(plain), 512):
        ones += np.unpackbits(plain[start : start + 512], axis=1).sum(axis=0, dtype=np.int64)
    agree = np.maximum(ones, len(plain) - ones)
    return float(100 * (agree >= share * len(plain)).mean())


def bits_row(name: str, rows: torch.Tensor) -> dict[str, Any]:
    """Return the row of table 4 for a data set."""
    words = as_words(rows)
    shown: dict[str, Any] = {
        "data": name,
        "bit pack %": bits_removed(words),
        f"in groups of {GROUP_ROWS} rows %": bits_removed(words, GROUP_ROWS),
        "invariant in 80 % of rows %": invariant_bits(words),
    }
    if name in PAPER_BITS:
        shown["paper"] = ", ".join(f"{value:g}" for value in PAPER_BITS[name])
    return shown


def share_row(name: str, rows: torch.Tensor) -> dict[str, Any]:
    """Return the row of table 5: ratios with masks that were learnt from a share of the rows."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(rows.shape[0], generator=generator)
    shown: dict[str, Any] = {"data": name, "rows": rows.shape[0]}
    for share in SHARES:
        codec = published_codec(rows[order[: max(1, round(share * rows.shape[0]))]])
        shown[f"{100 * share:g} %"] = rows.nbytes / int(codec.packed_bytes(rows).sum())
    if name in PAPER_RATIOS:
        shown["paper"] = ", ".join(f"{value:g}" for value in PAPER_RATIOS[name])
    return shown


def threshold_rows(name: str, rows: torch.Tensor) -> Rows:
    """Return rows of figure 13: percent saved by chunk size and threshold."""
    found: Rows = []
    for chunk_bytes in CHUNK_BYTES:
        shown: dict[str, Any] = {"data": name, "chunk B": chunk_bytes}
        for threshold in THRESHOLDS:
            codec = InvariantCodec.fit(
                rows, chunk_bytes=chunk_bytes, threshold=threshold, **PUBLISHED
            )
            shown[f"tau {threshold:g}"] = saved_percent(
                rows.nbytes / int(codec.packed_bytes(rows).sum())
            )
        found.append(shown)
    return found


def cluster_row(name: str, rows: torch.Tensor) -> dict[str, Any]:
    """Return the row of figure 15: percent saved, all counted, by clusters allowed."""
    shown: dict[str, Any] = {"data": name}
    for clusters in CLUSTERS:
        codec = InvariantCodec.fit(rows, chunk_bytes=4, clusters=clusters, **PUBLISHED)
        packed = bitslab.compress(rows, codec)
        if not torch.equal(packed.decompress().view(torch.uint8), rows.view(torch.uint8)):
            raise SystemExit(f"{name}: decompressed bits differ")
        shown[f"{clusters} allowed"] = saved_percent(packed.raw_nbytes / packed.nbytes)
    shown[f"used of {CLUSTERS[-1]}"] = codec.clusters
    return shown


def cache_row(name: str, rows: torch.Tensor) -> dict[str, Any]:
    """Return the row of table 7: rows that a cache of 1 % of the raw bytes holds."""
    generator = torch.Generator().manual_seed(0)
    drawn_rows = rows[torch.randint(rows.shape[0], (GRAPH_ROWS,), generator=generator)]
    shown: dict[str, Any] = {"data": name, "raw rows": GRAPH_ROWS // 100}
    for title, codec in (("published", published_codec(drawn_rows)), ("best plan", "auto")):
        table = bitslab.CompressedTable.from_tensor(drawn_rows, codec=codec)
        cache = bitslab.SlabCache(table, drawn_rows.nbytes // 100, devices=["cpu"])
        cache.fill(torch.arange(GRAPH_ROWS))
        held = cache.stats()["cached_rows"]
        shown[f"{title}, rows"] = held
        shown[f"{title}, times"] = held / shown["raw rows"]
    if name in PAPER_CACHED:
        shown["paper, times"] = PAPER_CACHED[name]
    return shown


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Return the tables by title; takes no option."""
    found = {
        name: rows for name, load in sources().items() if (rows := read(name, load)) is not None
    }
    dense = [name for name in found if name not in PAPER_BITS and "float32" in name]
    clustered = {
        "normal integers, 500 B": integers(16_384, 125, normal=True),
        "uniform integers, 500 B": integers(16_384, 125, normal=False),
        **{name: found[name] for name in dense},
    }
    return {
        "Bits that packing can remove (table 4)": [bits_row(*item) for item in found.items()],
        "Ratio of packed rows, masks learnt from a share of them (table 5)": [
            share_row(*item) for item in found.items()
        ],
        "Rows that a cache of 1 % of the raw bytes holds (table 7)": [
            cache_row(name, rows) for name, rows in found.items() if rows.dtype == torch.float32
        ],
        "Saved % by chunk size and threshold (figure 13)": [
            row for name in dense for row in threshold_rows(name, found[name])
        ],
        "Saved % by clusters, all counted (figure 15)": [
            cluster_row(*item) for item in clustered.items()
        ],
    }
