"""Bags of rows in a GPU's memory: CachedEmbeddingBag's pooling and torch.embedding_bag's.

Microseconds by CUDA events, with bags of so many ids each; every result compared bit for bit. `by
threads` and `by warps` are the two kernels, `ours` the one that is chosen.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timing import gpu_seconds

from bitslab.engine.kernels.cuda import kernels_on

Rows = list[dict[str, Any]]
IDS_OF_A_BAG = (1, 2, 8, 20, 50, 200, 1000)
WARM_UP = 2
SUM = 0  # torch's number of the mode


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Measure every size that has a whole bag."""
    found: Rows = []
    for row_bytes in arguments.row_bytes:
        rows = torch.randn(100_000, row_bytes // 4, device="cuda")
        for n in arguments.batches:
            batches = [
                torch.randint(len(rows), (n,), device="cuda")
                for _ in range(WARM_UP + arguments.repetitions)
            ]
            for each in IDS_OF_A_BAG:
                if n >= each:
                    line = {"row B": row_bytes, "ids": n, "ids of a bag": each}
                    found.append(line | _times(rows, batches, each))
    return {f"Pooling of bags on {torch.cuda.get_device_name()}, microseconds": found}


def _times(rows: torch.Tensor, batches: list[torch.Tensor], each: int) -> dict[str, Any]:
    offsets = torch.arange(0, len(batches[0]), each, device="cuda")

    def by_torch(i: int) -> torch.Tensor:
        out, *_ = torch.embedding_bag(rows, batches[i], offsets, False, SUM)
        return out

    def ours(i: int, by_warps: bool | None = None) -> torch.Tensor:
        return kernels_on(rows.device).bags.pool(rows, batches[i], offsets, SUM, by_warps=by_warps)

    ways: dict[str, Callable[[int], torch.Tensor]] = {
        "torch": by_torch,
        "by threads": partial(ours, by_warps=False),
        "by warps": partial(ours, by_warps=True),
        "ours": ours,
    }
    expected = by_torch(0).view(torch.int32)
    for name, way in ways.items():
        if not torch.equal(way(0).view(torch.int32), expected):
            raise SystemExit(f"{name}: rows differ from torch.embedding_bag's")
    times = {
        name: 1e6 * gpu_seconds(way, len(batches) - WARM_UP, WARM_UP) for name, way in ways.items()
    }
    return times | {"torch / ours": times["torch"] / times["ours"]}
