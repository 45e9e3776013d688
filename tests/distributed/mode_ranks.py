"""What ranks check of exchanges in inference mode, which threads do not take from each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from bitslab.distributed import CompressedAllToAll, Table, all_to_all_single
from bitslab.distributed.function import _zero
from tests.distributed.cpu_coder import coded_where_rows_are
from tests.distributed.device_ranks import crossed
from tests.distributed.table_ranks import rows_of

CPU = torch.device("cpu")
PLANNED = [Table("users", 8), Table("items", 3, torch.bfloat16)]


def modes(rank: int, ranks: int, device: torch.device = CPU) -> dict[str, bool]:
    """Rows cross in inference mode, and train an object that was first used in it."""
    seen: dict[str, bool] = {}
    sizes = {table.name: [5] * ranks for table in PLANNED}
    for codec in ("compressed", "raw", "auto"):
        for with_ids in (False, True):
            _zero.cache_clear()
            exchange = CompressedAllToAll(
                dist.new_group(), tables=PLANNED, codec=codec, decide_every=2
            )
            rows = {
                t.name: rows_of(t, 5 * ranks, rank).to(device).requires_grad_() for t in PLANNED
            }
            exact = {name: crossed(t, sizes[name], sizes[name]) for name, t in rows.items()}
            ids = {"users": torch.arange(5 * ranks)} if with_ids else None

            def begin() -> Any:
                return exchange.begin_tables(rows, sizes, sizes, row_ids=ids)  # noqa: B023

            key = f"{codec} {with_ids}"
            for step in range(3):
                with torch.inference_mode():
                    at_once = exchange.exchange_tables(rows, sizes, sizes, row_ids=ids)
                    begun = begin()
                    inside = begin().wait()
                outside = begun.wait()
                for name, found in (("once", at_once), ("in", inside), ("out", outside)):
                    seen[f"{key} {step} {name}"] = all(
                        torch.equal(found[table], t) for table, t in exact.items()
                    )
                trained = begin()
                with torch.inference_mode():
                    found = trained.wait() if step == 1 else {}
                found = found or trained.wait()
                seen[f"{key} {step} trained"] = torch.equal(found["users"], exact["users"])
                if step == 1:  # waited for in inference mode, they have no gradients
                    continue
                for t in rows.values():
                    t.grad = None
                sum(t.float().sum() for t in found.values()).backward()  # type: ignore[union-attr]
                seen[f"{key} {step} gradients"] = all(
                    t.grad is not None and bool((t.grad == 1).all()) for t in rows.values()
                )
    return seen


def modes_of_the_function(rank: int, ranks: int, device: torch.device = CPU) -> dict[str, bool]:
    """The same of `all_to_all_single`, at once and asynchronous."""
    seen: dict[str, bool] = {}
    group = dist.new_group()
    for codec in ("compressed", "auto"):
        for async_op in (False, True):
            for begins_in, waits_in in ((True, True), (True, False), (False, False), (False, True)):
                with torch.inference_mode(begins_in):
                    t = rows_of(PLANNED[0], 5 * ranks, rank).to(device)
                    found = torch.full_like(t, 7.0)
                    work = all_to_all_single(found, t, group=group, codec=codec, async_op=async_op)
                with torch.inference_mode(waits_in):
                    if async_op:
                        work.wait()
                    exact = torch.empty_like(t)
                    dist.all_to_all_single(exact, t.clone())
                key = f"{codec} {async_op} {begins_in} {waits_in}"
                seen[key] = torch.equal(found, exact)
    return seen


def in_inference_mode(rank: int, ranks: int) -> dict[str, bool]:
    """Both, of rows that the host codes, and as on a GPU."""
    seen: dict[str, bool] = {}
    for on_device in (False, True):
        with coded_where_rows_are() if on_device else nullcontext():
            for check in (modes, modes_of_the_function):
                found = check(rank, ranks)
                seen |= {f"{on_device} {check.__name__} {key}": ok for key, ok in found.items()}
    return seen


def nccl_modes(rank: int, ranks: int) -> dict[str, bool]:
    """Both, of rows on GPUs."""
    device = torch.device("cuda", rank)
    return modes(rank, ranks, device) | modes_of_the_function(rank, ranks, device)


CHECKS: dict[str, Callable[[int, int], Any]] = {
    f.__name__: f for f in (in_inference_mode, nccl_modes)
}
