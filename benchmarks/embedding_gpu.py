"""Lookups on a GPU out of tables in host memory, compared with existing libraries.

- ``on device``: nn.EmbeddingBag with the whole table in the GPU's memory: the upper bound.
- ``CPU + copy``: nn.EmbeddingBag in host memory, its result copied through page-locked memory.
- ``zero-copy``: raw rows read by the GPU (no cache), then nn.functional.embedding_bag.
- ``zero-copy, cache``: the same with a cache of raw rows: CachedEmbeddingBag with ``codec="raw"``.
- ``packed``: the same out of a CompressedTable; raw where the link's model says that packed rows
  would come more slowly (``table`` says which).
- ``packed, cache`` and ``packed cache``: CachedEmbeddingBag with raw cached rows and packed ones.
- ``FBGEMM``: a MANAGED_CACHING table (UVM and an LRU cache of the same share of the rows).
- ``ColossalAI``: its CachedEmbeddingBag (LFU), which writes every evicted row back.

Wall time of all repetitions, with one wait at the end.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from embedding_ids import Draw, trained_like

import bitslab
from bitslab.embedding import CachedRows
from bitslab.engine.advisor import pays_to_sort_rows
from bitslab.engine.transfer.gather import gather_copied_rows
from bitslab.integrations.embedding import CachedEmbeddingBag

Rows = list[dict[str, Any]]
Lookup = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
WARM_UP = 5


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Measure, and compare every result with nn.EmbeddingBag's bit for bit."""
    found: Rows = []
    table_bytes = (arguments.table_mib or 2048) << 20
    with torch.no_grad():
        for row_bytes in arguments.row_bytes:
            weight = trained_like(table_bytes // row_bytes, row_bytes)
            for kind in ("uniform", "zipf"):
                found += _of_one_table(weight, kind, arguments)
    name = torch.cuda.get_device_name()
    title = (
        f"Lookups on {name}, table of {table_bytes >> 20} MiB in host memory, cache of "
        f"{arguments.cache_ratio:.0%}, million a second"
    )
    return {title: found}


def _of_one_table(weight: torch.Tensor, kind: str, arguments: argparse.Namespace) -> Rows:
    draw = Draw(len(weight), kind)
    ways, plan = _ways(weight, draw.counts(), arguments)
    found: Rows = []
    for n in arguments.batches:
        offsets = torch.arange(n, device="cuda")
        lines: dict[str, float] = {}
        # Enough of them for a time that can be measured.
        timed = max(arguments.repetitions, min(200, 1_000_000 // n))
        batches = [draw.ids(n).cuda() for _ in range(2 * WARM_UP + timed)]
        wanted = ways["on device"](batches[0], offsets)
        for name, look_up in ways.items():
            most = max(len(ids.unique()) for ids in batches)
            if name == "ColossalAI" and most > len(weight) * arguments.cache_ratio:
                continue  # it refuses batches with more different rows than the cache holds
            out = look_up(batches[0], offsets)
            if not torch.equal(out.view(torch.int32), wanted.view(torch.int32)):
                raise SystemExit(f"{name}: rows differ from nn.EmbeddingBag's")
            del out
            lines[name] = n / _seconds(look_up, batches, offsets) / 1e6
        line: dict[str, Any] = {"row B": weight.shape[1] * 4, "ids": n, "law": kind}
        line |= {"table": plan} | lines
        best = max(lines["packed, cache"], lines["packed cache"])
        line["packed / zero-copy"] = lines["packed"] / lines["zero-copy"]
        line["packed, cache / zero-copy, cache"] = (
            lines["packed, cache"] / lines["zero-copy, cache"]
        )
        line["best / CPU + copy"] = best / lines["CPU + copy"]
        for peer in ("FBGEMM", "ColossalAI"):
            if peer in lines:
                line[f"best / {peer}"] = best / lines[peer]
        found.append(line)
    for way in ways.values():
        owner = getattr(way, "close", None)
        if owner is not None:
            owner()
    torch.cuda.empty_cache()
    return found


def _seconds(look_up: Lookup, batches: list[torch.Tensor], offsets: torch.Tensor) -> float:
    """Return the mean wall time of a batch, those of the warm-up left out."""
    for ids in batches[1 : 2 * WARM_UP]:
        look_up(ids, offsets)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for ids in batches[2 * WARM_UP :]:
        look_up(ids, offsets)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / (len(batches) - 2 * WARM_UP)


def _ways(
    weight: torch.Tensor, counts: torch.Tensor, arguments: argparse.Namespace
) -> tuple[dict[str, Lookup], str]:
    ratio = arguments.cache_ratio
    on_cpu = torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum")

    def copied(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = on_cpu(ids.cpu(), offsets.cpu())
        return rows.pin_memory().to("cuda", non_blocking=True)

    raw = bitslab.CompressedTable.from_tensor(weight, codec="raw")
    row_bytes = weight.shape[1] * 4

    def zero_copy(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rows = torch.empty(len(ids), weight.shape[1], device="cuda")
        raw_rows = raw._parts.raw_rows()
        gather_copied_rows(
            raw_rows,
            row_bytes,
            ids,
            rows.view(torch.uint8).view(-1, row_bytes),
            sort=pays_to_sort_rows(rows.device, raw_rows, len(raw_rows), len(ids)),
        )
        index = torch.arange(len(ids), device="cuda")
        return F.embedding_bag(index, rows, offsets, mode="sum")

    packed_table = CachedRows.from_tensor(weight, cache_rows=1, device="cuda").table

    def packed(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rows = packed_table.gather(ids)
        index = torch.arange(len(ids), device="cuda")
        return F.embedding_bag(index, rows, offsets, mode="sum")

    def cached(cache_ratio: float, **options: Any) -> Lookup:
        bag = CachedEmbeddingBag.from_pretrained(
            weight,
            mode="sum",
            device="cuda",
            cache_ratio=cache_ratio,
            warmup_ratio=1.0,
            ids_freq_mapping=counts,
            **options,
        )
        return bag.eval()

    ways: dict[str, Lookup] = {
        "on device": torch.nn.EmbeddingBag.from_pretrained(weight.cuda(), mode="sum"),
        "CPU + copy": copied,
        "zero-copy": zero_copy,
        "packed": packed,
        "zero-copy, cache": cached(ratio, codec="raw"),
        "packed, cache": cached(ratio),
        "packed cache": cached(ratio, cache="packed"),
    }
    fbgemm = _fbgemm(weight, ratio)
    if fbgemm is not None:
        ways["FBGEMM"] = fbgemm
    if arguments.colossalai is not None:
        ways["ColossalAI"] = _colossalai(arguments.colossalai, weight, ratio, counts)
    return ways, packed_table.codec.describe()


def _fbgemm(weight: torch.Tensor, ratio: float) -> Lookup | None:
    table = fbgemm_table(weight, ratio)
    if table is None:
        return None

    def look_up(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ends = F.pad(offsets, (0, 1), value=len(ids))
        out: torch.Tensor = table(ids, ends)
        return out

    return look_up


def fbgemm_table(weight: torch.Tensor, ratio: float, **options: Any) -> torch.nn.Module | None:
    """Return FBGEMM's SplitTableBatchedEmbeddingBags of one table, or None where there is none.

    Parameters
    ----------
    weight : torch.Tensor
        ``[N, D]`` on the CPU.
    ratio : float
        Share of the rows in its cache; from 1 on the table lies in the GPU's memory.
    **options
        For its class. Its steps are fused into the backward pass: ``optimizer`` is a member of
        ``EmbOptimType`` by name, EXACT_SGD when left out.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
            from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
                ComputeDevice,
                SplitTableBatchedEmbeddingBagsCodegen,
            )
    except (ImportError, OSError) as error:
        print(f"left out: FBGEMM: {error}", file=sys.stderr)
        return None
    cached = EmbeddingLocation.MANAGED_CACHING
    location = EmbeddingLocation.DEVICE if ratio >= 1 else cached
    options["optimizer"] = EmbOptimType[options.get("optimizer", "EXACT_SGD")]
    table: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [(*weight.shape, location, ComputeDevice.CUDA)], cache_load_factor=ratio, **options
    )
    table.split_embedding_weights()[0].copy_(weight)
    found: torch.nn.Module = table
    return found


def _colossalai(folder: Path, weight: torch.Tensor, ratio: float, counts: torch.Tensor) -> Lookup:
    bag = colossalai_bag(folder, weight, ratio, counts)

    def look_up(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = bag(ids, offsets)
        return out

    return look_up


def colossalai_bag(
    folder: Path, weight: torch.Tensor, ratio: float, counts: torch.Tensor, *, sparse: bool = False
) -> torch.nn.Module:
    """Return ColossalAI's class, loaded without the rest of its package."""
    package = types.ModuleType("colossalai_cache_embedding")
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package
    module = importlib.import_module(f"{package.__name__}.cached_embedding")
    # The cache must hold a batch; what it has no room for it refuses.
    bag: torch.nn.Module = module.CachedEmbeddingBag(
        *weight.shape,
        _weight=weight.clone(),
        mode="sum",
        sparse=sparse,
        cache_ratio=ratio,
        ids_freq_mapping=counts,
        warmup_ratio=1.0,
        pin_weight=True,
        evict_strategy=module.EvictionStrategy.LFU,
    )
    return bag
