"""Sizes of trained embedding tables, all metadata counted; data as for codec_ratio.py."""

from __future__ import annotations

import sys
from typing import Any

import torch
from codec_ratio import TABLES, embedding

from bitslab.integrations.embedding import CachedEmbeddingBag

# The least that each should reach: float32, bfloat16.
TARGETS = {
    "ml-1m users": (1.14, 1.33),
    "ml-1m items": (1.13, 1.31),
    "Criteo embeddings 1": (1.14, None),
    "Criteo embeddings 8": (1.65, None),
}


def run() -> dict[str, list[dict[str, Any]]]:
    """Return one table."""
    found: list[dict[str, Any]] = []
    for name, file in TABLES.items():
        for dtype, target in zip(
            (torch.float32, torch.bfloat16), TARGETS.get(name, (None, None)), strict=True
        ):
            try:
                table = embedding(file, dtype)
            except FileNotFoundError as error:
                print(f"left out: {name}: no {error}", file=sys.stderr)
                continue
            bag = CachedEmbeddingBag.from_pretrained(table, device="cpu")
            stats = bag.stats()
            line = {
                "table": name,
                "dtype": str(dtype).removeprefix("torch."),
                "rows": stats["rows"],
                "row B": stats["row_bytes"],
                "plan": stats["codec"],
                "raw KB": stats["raw_bytes"] / 1e3,
                "host KB": stats["host_bytes"] / 1e3,
                "ratio": stats["ratio"],
            }
            if target is not None:
                line["target"] = f">= {target}x: {'ok' if stats['ratio'] >= target else 'missed'}"
            found.append(line)
    return {"Trained embedding tables": found}
