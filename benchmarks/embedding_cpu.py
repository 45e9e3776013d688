"""Lookups on a CPU: CachedEmbeddingBag, nn.EmbeddingBag, and FBGEMM's table for CPUs."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
from embedding_ids import Draw, trained_like
from timing import cpu_seconds_in_turn

from bitslab.integrations.embedding import CachedEmbeddingBag

Rows = list[dict[str, Any]]
Lookup = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: Targets, as shares of nn.EmbeddingBag's rate: rows all or none of which are resident, and Zipf
#: ids with a small cache.
HIT_SHARE, MISS_SHARE, ZIPF_SHARE = 1 / 2, 1 / 3, 0.6
CACHE, SMALL_CACHE = 0.1, 0.05  # shares of rows that are resident


def fbgemm_table(weight: torch.Tensor) -> Lookup | None:
    """Return FBGEMM's lookup in host memory, or None where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
            from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
                ComputeDevice,
                SplitTableBatchedEmbeddingBagsCodegen,
            )
    except ImportError:
        return None
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(*weight.shape, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_SGD,
    )
    table.split_embedding_weights()[0].copy_(weight)

    def look_up(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ends = torch.cat([offsets, torch.tensor([len(ids)])])
        out: torch.Tensor = table(ids, ends)
        return out

    return look_up


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Measure, and compare every result with nn.EmbeddingBag's bit for bit."""
    found: Rows = []
    table_bytes = (arguments.table_mib or 256) << 20
    with torch.no_grad():
        for row_bytes in arguments.row_bytes:
            found += _of_one_table(table_bytes // row_bytes, row_bytes, arguments)
    threads = torch.get_num_threads()
    return {f"Lookups on {threads} CPU cores, million a second (nn.EmbeddingBag's = 1)": found}


def _of_one_table(n_rows: int, row_bytes: int, arguments: argparse.Namespace) -> Rows:
    weight = trained_like(n_rows, row_bytes)
    plain = torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum")
    fbgemm = fbgemm_table(weight)
    found: Rows = []
    for kind, ratio in (("uniform", CACHE), ("zipf", CACHE), ("zipf", SMALL_CACHE)):
        draw = Draw(n_rows, kind)
        bag = CachedEmbeddingBag.from_pretrained(
            weight,
            mode="sum",
            device="cpu",
            cache_ratio=ratio,
            warmup_ratio=1.0,
            ids_freq_mapping=draw.counts(),
        ).eval()
        resident = torch.from_numpy(bag.rows.slot_table.slot_of >= 0)
        for n in arguments.batches:
            offsets = torch.arange(n)
            cases = {"all hit": resident, "none hit": ~resident, "as drawn": None}
            for case, wanted in cases.items():
                if kind == "zipf" and case != "as drawn":
                    continue
                batches = [_drawn(draw, n, wanted) for _ in range(arguments.repetitions + 1)]
                line: dict[str, Any] = {"row B": row_bytes, "cache": f"{ratio:.0%}", "ids": n}
                line |= {"law": kind, "rows": case}
                ways = {"nn": plain, "bitslab": bag, "FBGEMM": fbgemm}
                rates = {
                    name: n / seconds / 1e6
                    for name, seconds in _seconds(ways, batches, offsets).items()
                }
                line |= {f"{name} M/s": rate for name, rate in rates.items()}
                line["bitslab of nn"] = rates["bitslab"] / rates["nn"]
                asked = {"all hit": HIT_SHARE, "none hit": MISS_SHARE}.get(case)
                asked = ZIPF_SHARE if ratio == SMALL_CACHE else asked
                if asked is not None:
                    verdict = "ok" if line["bitslab of nn"] >= asked else "missed"
                    line["asked"] = f">= {asked:.2f}: {verdict}"
                found.append(line)
    return found


def _seconds(
    ways: dict[str, Lookup | None], batches: list[torch.Tensor], offsets: torch.Tensor
) -> dict[str, float]:
    """Return the median time of a batch in each way that there is; the first is not counted."""
    there = {name: look_up for name, look_up in ways.items() if look_up is not None}
    expected = there["nn"](batches[0], offsets).view(torch.int32)
    for name, look_up in there.items():
        if not torch.equal(look_up(batches[0], offsets).view(torch.int32), expected):
            raise SystemExit(f"{name}: rows differ from nn.EmbeddingBag's")
    runs = {
        name: lambda i, look_up=look_up: look_up(batches[i], offsets)
        for name, look_up in there.items()
    }
    return cpu_seconds_in_turn(runs, len(batches) - 1)


def _drawn(draw: Draw, n: int, wanted: torch.Tensor | None) -> torch.Tensor:
    """Draw ids from the wanted ones only."""
    if wanted is None:
        return draw.ids(n)
    found = torch.empty(0, dtype=torch.int64)
    while len(found) < n:
        more = draw.ids(4 * n)
        found = torch.cat([found, more[wanted[more]]])
    return found[:n].contiguous()
