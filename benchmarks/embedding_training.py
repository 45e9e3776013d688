"""Steps of training on a GPU with the table in host memory: lookup, backward and optimizer.

- ``on device``: nn.EmbeddingBag with the whole table in the GPU's memory: what there is to lose.
- ``ids on GPU`` and ``ids on CPU``: CachedEmbeddingBag, by where the ids of a batch come from.
- ``ColossalAI``: its CachedEmbeddingBag with ids on the GPU, which it reads back.

``resident``: ids of which the cache holds all rows. ``waits``: whether the host had to wait for the
GPU in a step by ids there, which was kept busy meanwhile. Mean wall time of a step in microseconds,
with one wait at the end of all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from embedding_gpu import colossalai_bag
from embedding_ids import Draw, trained_like

from bitslab.integrations.embedding import CachedEmbeddingBag

Rows = list[dict[str, Any]]
Step = Callable[[torch.Tensor], None]
WARM_UP = 20
BUSY_CYCLES = 200_000_000  # a tenth of a second, which no step takes
OPTIMIZERS = {"SGD, sparse": (torch.optim.SGD, True), "Adagrad": (torch.optim.Adagrad, False)}


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Measure, and compare the rows with nn.EmbeddingBag's after all steps."""
    found: Rows = []
    table_bytes = (arguments.table_mib or 256) << 20
    for row_bytes in arguments.row_bytes:
        weight = trained_like(table_bytes // row_bytes, row_bytes)
        for kind in ("resident", "zipf"):
            draw = Draw(len(weight), "zipf")
            for n in arguments.batches:
                batches = _drawn(draw, n, kind, len(weight), arguments)
                for name in OPTIMIZERS:
                    line = {"row B": row_bytes, "ids": n, "rows": kind, "optimizer": name}
                    found.append(line | _of_one_size(weight, batches, draw, name, arguments))
    title = (
        f"Steps of training on {torch.cuda.get_device_name()}, table of {table_bytes >> 20} MiB in "
        f"host memory, cache of {arguments.cache_ratio:.0%}, microseconds"
    )
    return {title: found}


def _drawn(
    draw: Draw, n: int, kind: str, n_rows: int, arguments: argparse.Namespace
) -> list[torch.Tensor]:
    """Return ids of batches on the GPU, new ones for each."""
    steps = WARM_UP + max(arguments.repetitions, min(100, 500_000 // n))
    if kind == "zipf":
        return [draw.ids(n).cuda() for _ in range(steps)]
    # The most used ones, which are resident from the start.
    hot = draw.counts().topk(int(n_rows * arguments.cache_ratio)).indices
    return [hot[torch.randint(len(hot), (n,))].cuda() for _ in range(steps)]


def _of_one_size(
    weight: torch.Tensor,
    batches: list[torch.Tensor],
    draw: Draw,
    name: str,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    kind, sparse = OPTIMIZERS[name]
    offsets = torch.arange(len(batches[0]), device="cuda")

    def step_of(bag: torch.nn.Module) -> Step:
        optimizer = kind(bag.parameters(), lr=0.01)

        def step(ids: torch.Tensor) -> None:
            optimizer.zero_grad()
            bag(ids, offsets).sum().backward()
            optimizer.step()

        return step

    plain = torch.nn.EmbeddingBag.from_pretrained(
        weight.cuda(), freeze=False, mode="sum", sparse=sparse
    )
    line: dict[str, Any] = {"on device": _microseconds(step_of(plain), batches)}
    for way in ("ids on GPU", "ids on CPU"):
        bag = CachedEmbeddingBag.from_pretrained(
            weight,
            freeze=False,
            mode="sum",
            sparse=sparse,
            cache_ratio=arguments.cache_ratio,
            warmup_ratio=1.0,
            ids_freq_mapping=draw.counts(),
            device="cuda",
        )
        step = step_of(bag)
        ids = batches if way == "ids on GPU" else [each.cpu() for each in batches]
        line[way] = _microseconds(step, ids)
        if not torch.allclose(bag.weight, plain.weight.cpu(), rtol=0, atol=1e-6):
            raise SystemExit(f"{way}: rows differ from nn.EmbeddingBag's")
        if way == "ids on GPU":
            line["hit rate"] = bag.stats()["hit_rate"]
            line["waits"] = _waits(step, batches)
    line["ids on CPU / on GPU"] = line["ids on CPU"] / line["ids on GPU"]
    most = max(len(ids.unique()) for ids in batches)  # type: ignore[no-untyped-call]
    if arguments.colossalai is not None and most <= len(weight) * arguments.cache_ratio:
        theirs = colossalai_bag(
            arguments.colossalai, weight, arguments.cache_ratio, draw.counts(), sparse=sparse
        )
        line["ColossalAI"] = _microseconds(step_of(theirs), batches)
        line["ColossalAI / on GPU"] = line["ColossalAI"] / line["ids on GPU"]
    return line


def _microseconds(step: Step, batches: list[torch.Tensor]) -> float:
    for ids in batches[:WARM_UP]:
        step(ids)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for ids in batches[WARM_UP:]:
        step(ids)
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - begin) / (len(batches) - WARM_UP)


def _waits(step: Step, batches: list[torch.Tensor]) -> str:
    """Return whether a step waits for a GPU that has other work."""
    for ids in batches[:4]:
        step(ids)
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    busy = torch.cuda.Event()  # type: ignore[no-untyped-call]
    busy.record()
    step(batches[4])
    waited: bool = busy.query()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return "yes" if waited else "no"
