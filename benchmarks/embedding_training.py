"""Steps of training on a GPU with the table in host memory: lookup, backward and optimizer.

Wall time of a step in microseconds, fresh ids for each, one wait at the end of all:

- ``on device``: nn.EmbeddingBag with the whole table in the GPU's memory.
- ``step``: CachedEmbeddingBag, ids on the GPU.
- ``limit``: 200 + 1.5 times (``on device`` + the bytes that came and went, optimizer state
  included, over the link's rates of reading and writing random rows, measured here too).
- ``host``: time of the host alone, for as many steps as a GPU's queue takes.
- ``FBGEMM``: SplitTableBatchedEmbeddingBags, where fbgemm_gpu and its backward pass are installed:
  UVM caching, with all rows resident the GPU's memory; its fused SGD, and rowwise Adagrad, which
  keeps one number a row where Adagrad keeps a row.
- ``Adagrad, row-wise``: RowWiseAdagrad, which keeps one number a row too, where TorchRec is
  installed.
- ``ColossalAI``: its CachedEmbeddingBag, where its folder is given and a batch fits its cache.

``misses`` and ``written``: rows a step. A cache of 100 % holds all rows: its limit is 1.3 times
``on device``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from embedding_gpu import colossalai_bag, fbgemm_table
from embedding_ids import Draw, trained_like
from timing import gpu_seconds

from bitslab import CompressedTable
from bitslab.engine.kernels.cuda import kernels_on
from bitslab.engine.kernels.cuda.exchange import ExchangedArray
from bitslab.integrations.embedding import CachedEmbeddingBag

Rows = list[dict[str, Any]]
Step = Callable[[torch.Tensor], None]
WARM_UP = 8
QUEUED_STEPS = 12  # that surely fit in a GPU's queue
ROW_WISE = "Adagrad, row-wise"
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], bool]] = {
    "SGD, sparse": (torch.optim.SGD, True),
    "Adagrad": (torch.optim.Adagrad, False),
}
try:
    from bitslab.integrations.torchrec.fused import RowWiseAdagrad

    OPTIMIZERS[ROW_WISE] = RowWiseAdagrad, False
except (ImportError, OSError) as error:
    print(f"left out: {ROW_WISE}: {error}", file=sys.stderr)
OF_FBGEMM = {
    "SGD, sparse": "EXACT_SGD",
    "Adagrad": "EXACT_ROWWISE_ADAGRAD",
    ROW_WISE: "EXACT_ROWWISE_ADAGRAD",
}
LEARNING_RATE = 0.01
ADDED_US, FACTOR, RESIDENT_FACTOR = 200.0, 1.5, 1.3


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Measure, and compare the rows with nn.EmbeddingBag's after all steps."""
    found: Rows = []
    table_bytes = (arguments.table_mib or 512) << 20
    for row_bytes in arguments.row_bytes:
        weight = trained_like(table_bytes // row_bytes, row_bytes)
        rates = _link_rates(weight)
        batches = _drawn(len(weight), arguments)
        for name in OPTIMIZERS:
            plain = _plain_of(weight, name)
            on_device = {key: measure_steps(plain[1], each)[0] for key, each in batches.items()}
            for ratio in arguments.cache_ratios:
                found += _of_a_cache(
                    weight, batches, name, ratio, on_device, plain[0], rates, arguments
                )
    title = (
        f"Steps of training on {torch.cuda.get_device_name()}, table of {table_bytes >> 20} MiB "
        f"in host memory, codec {arguments.codec}, microseconds"
    )
    return {title: found}


def _drawn(n_rows: int, arguments: argparse.Namespace) -> dict[tuple[str, int], list[torch.Tensor]]:
    """Return ids of batches on the GPU, new ones for each step, by law and size."""
    batches = {}
    for law in ("uniform", "zipf"):
        draw = Draw(n_rows, law)
        for n in arguments.batches:
            steps = WARM_UP + QUEUED_STEPS + arguments.repetitions
            batches[law, n] = [draw.ids(n).cuda() for _ in range(steps)]
    return batches


def _step_of(bag: torch.nn.Module, name: str) -> Step:
    optimizer = OPTIMIZERS[name][0](bag.parameters(), lr=LEARNING_RATE)
    if name == ROW_WISE and isinstance(bag, CachedEmbeddingBag):
        bag.attach_optimizer(optimizer, row_wise=True)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        bag(ids, _offsets(len(ids))).sum().backward()
        optimizer.step()

    return step


_kept: dict[int, torch.Tensor] = {}


def _offsets(n: int) -> torch.Tensor:
    if n not in _kept:
        _kept[n] = torch.arange(n, device="cuda")
    return _kept[n]


def _plain_of(weight: torch.Tensor, name: str) -> tuple[torch.nn.EmbeddingBag, Step]:
    plain = torch.nn.EmbeddingBag.from_pretrained(
        weight.cuda(), freeze=False, mode="sum", sparse=OPTIMIZERS[name][1]
    )
    return plain, _step_of(plain, name)


def _of_a_cache(
    weight: torch.Tensor,
    batches: dict[tuple[str, int], list[torch.Tensor]],
    name: str,
    ratio: float,
    on_device: dict[tuple[str, int], float],
    plain: torch.nn.EmbeddingBag,
    rates: tuple[float, float],
    arguments: argparse.Namespace,
) -> Rows:
    sparse, found = OPTIMIZERS[name][1], list[dict[str, Any]]()
    row_bytes = weight.shape[1] * weight.element_size()
    # With Adagrad's sums.
    moved_bytes = row_bytes + {"Adagrad": row_bytes, ROW_WISE: 4}.get(name, 0)
    bag = CachedEmbeddingBag.from_pretrained(
        weight,
        freeze=False,
        mode="sum",
        sparse=sparse,
        cache_ratio=ratio,
        warmup_ratio=1.0,
        codec=arguments.codec,
        ids_freq_mapping=Draw(len(weight), "zipf").counts(),
        device="cuda",
    )
    step, fbgemm = _step_of(bag, name), _fbgemm_us(weight, batches, name, ratio)
    for (law, n), ids in batches.items():
        before = bag.stats()
        microseconds, host = measure_steps(step, ids)
        after = bag.stats()
        misses, written = (
            (after[key] - before[key]) / len(ids) for key in ("misses", "written_back")
        )
        link = 1e6 * moved_bytes * (misses / rates[0] + written / rates[1])
        limit = ADDED_US + FACTOR * (on_device[law, n] + link)
        if ratio >= 1:
            limit = RESIDENT_FACTOR * on_device[law, n]
        line = {
            "row B": row_bytes,
            "cache": f"{ratio:.0%}",
            "optimizer": name,
            "law": law,
            "ids": n,
            "misses": misses,
            "written": written,
            "on device us": on_device[law, n],
            "step us": microseconds,
            "limit us": limit,
            "step / limit": microseconds / limit,
            "host us": host,
        }
        if (law, n) in fbgemm:
            theirs_us = fbgemm[law, n]
            line |= {"FBGEMM us": theirs_us, "FBGEMM / step": theirs_us / microseconds}
        found.append(line | _peers(weight, ids, name, ratio, microseconds, arguments))
    if not torch.allclose(bag.weight, plain.weight.detach().cpu(), rtol=0, atol=1e-5):
        raise SystemExit(f"{name}, cache of {ratio:.0%}: rows differ from nn.EmbeddingBag's")
    return found


def _fbgemm_us(
    weight: torch.Tensor,
    batches: dict[tuple[str, int], list[torch.Tensor]],
    name: str,
    ratio: float,
) -> dict[tuple[str, int], float]:
    """Return microseconds of FBGEMM's steps, of none where they cannot be measured."""
    table = fbgemm_table(weight, ratio, optimizer=OF_FBGEMM[name], learning_rate=LEARNING_RATE)
    if table is None:
        return {}

    def step(ids: torch.Tensor) -> None:
        table(ids, F.pad(_offsets(len(ids)), (0, 1), value=len(ids))).sum().backward()

    try:
        return {key: measure_steps(step, each)[0] for key, each in batches.items()}
    except (NotImplementedError, RuntimeError) as error:  # a library of it that is missing
        print(f"left out: FBGEMM's steps: {str(error).splitlines()[0]}", file=sys.stderr)
        return {}


def _peers(
    weight: torch.Tensor,
    ids: list[torch.Tensor],
    name: str,
    ratio: float,
    microseconds: float,
    arguments: argparse.Namespace,
) -> dict[str, float]:
    most = max(len(each.unique()) for each in ids)  # type: ignore[no-untyped-call]
    if arguments.colossalai is None or ratio >= 1 or most > len(weight) * ratio:
        return {}
    counts = Draw(len(weight), "zipf").counts()
    theirs = colossalai_bag(arguments.colossalai, weight, ratio, counts, sparse=OPTIMIZERS[name][1])
    theirs_us, _ = measure_steps(_step_of(theirs, name), ids)
    return {"ColossalAI us": theirs_us, "ColossalAI / step": theirs_us / microseconds}


def _link_rates(weight: torch.Tensor) -> tuple[float, float]:
    """Return bytes a second of random rows over the link: read, and written."""
    table = CompressedTable.from_tensor(weight, codec="raw")
    stored = table.rows_for_gpu()
    if stored is None:
        raise SystemExit("the table cannot be page-locked")
    kernels = kernels_on(torch.device("cuda", torch.cuda.current_device()))
    n, row_bytes = min(len(weight) // 4, 65536), weight.shape[1] * weight.element_size()
    cached = torch.empty(n, *weight.shape[1:], device="cuda")
    arrays = kernels.exchange.described([ExchangedArray(cached, stored)], cached.device)
    slots, coming = torch.arange(n, device="cuda"), torch.tensor([n, 0], device="cuda")
    none = torch.full_like(slots, -1)
    generator = torch.Generator(device="cuda").manual_seed(3)
    drawn = [torch.randperm(len(weight), device="cuda", generator=generator) for _ in range(20)]
    ids = [each[:n].contiguous() for each in drawn]
    units = n * cached.shape[1] * cached.element_size() // 16

    def written(i: int) -> None:
        kernels.exchange.exchange(arrays, slots, ids[i], none, coming, units)

    read_s = gpu_seconds(lambda i: table.gather(ids[i], cached), 8)
    # Values of other rows come there, but they are no one's.
    written_s = gpu_seconds(lambda i: written(10 + i), 8)
    table.close()
    return n * row_bytes / read_s, n * row_bytes / written_s


def measure_steps(step: Step, batches: list[torch.Tensor]) -> tuple[float, float]:
    """Return wall time of a step, and of the host alone, in microseconds."""
    for ids in batches[:WARM_UP]:
        step(ids)
    _finish()
    begin = time.perf_counter()
    for ids in batches[WARM_UP : WARM_UP + QUEUED_STEPS]:
        step(ids)
    host = time.perf_counter() - begin
    _finish()
    begin = time.perf_counter()
    for ids in batches[WARM_UP + QUEUED_STEPS :]:
        step(ids)
    _finish()
    wall = time.perf_counter() - begin
    n = len(batches) - WARM_UP - QUEUED_STEPS
    return 1e6 * wall / n, 1e6 * host / QUEUED_STEPS


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
