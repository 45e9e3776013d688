"""What ranks check of tables' rows that are under way while other work runs."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bitslab.distributed import CompressedAllToAll, Table
from bitslab.distributed import exchange as stages
from bitslab.distributed.agreement import Agreement
from bitslab.distributed.caller import Caller
from bitslab.distributed.device import DeviceExchange
from bitslab.distributed.device_repeats import FoundRepeats
from bitslab.distributed.pairs import Pairs
from bitslab.distributed.plain import PlainExchange
from bitslab.distributed.selection import PLAIN
from bitslab.distributed.work import OfThread
from tests.distributed.cpu_coder import coded_where_rows_are
from tests.distributed.device_ranks import crossed
from tests.distributed.early_ranks import any_error_of
from tests.distributed.ranks import error_of, splits
from tests.distributed.table_ranks import rows_of

CPU = torch.device("cpu")
PLANNED = [Table("users", 8), Table("items", 3, torch.bfloat16), Table("days", 2, torch.int64)]
#: Where rows are coded, and by which codec.
WAYS = [(on_device, codec) for on_device in (False, True) for codec in ("compressed", "raw")]


def _coded(on_device: bool) -> AbstractContextManager[None]:
    return coded_where_rows_are() if on_device else nullcontext()


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def several_at_once(rank: int, ranks: int, device: torch.device = CPU) -> dict[str, Any]:
    """Three objects' rows and gradients beside all-reduces, waited for in another order each."""
    seen: dict[str, Any] = {}
    for codec in ("auto", "compressed", "raw"):
        objects = [
            CompressedAllToAll(tables=PLANNED, codec=codec, decide_every=3) for _ in range(3)
        ]
        total, equal = torch.zeros(4, device=device), []
        for step in range(7):
            begun, wanted, leaves = [], [], []
            for number, exchange in enumerate(objects):
                receive, send, rows, exact = {}, {}, {}, {}
                for i, table in enumerate(PLANNED):
                    sizes = splits(rank, ranks, 10 * number + i)
                    receive[table.name], send[table.name] = sizes
                    t = rows_of(table, sum(sizes[1]), 100 * rank + 10 * number + step).to(device)
                    rows[table.name] = t.requires_grad_(t.is_floating_point())
                    exact[table.name] = crossed(t, *sizes)
                begun.append(exchange.begin_tables(rows, receive, send))
                wanted.append((exact, receive, send))
                leaves.append(rows)
                dist.all_reduce(total.add_(1.0))
            order = [(step + n) % 3 for n in range(3)]  # of all ranks: autograd goes back by it
            found = {n: begun[n].wait() for n in order}
            dist.all_reduce(total)
            loss = torch.zeros((), device=device)
            factors = {}
            for n in range(3):
                exact = wanted[n][0]
                equal += [torch.equal(found[n][name], t) for name, t in exact.items()]
                equal.append(list(found[n]) == list(exact) and not found[n]["days"].requires_grad)
                for name in ("users", "items"):
                    t = found[n][name]
                    factors[n, name] = (torch.arange(t.numel(), device=device) % 7 + 1.0).view_as(t)
                    loss = loss + (t.float() * factors[n, name]).sum()
            loss.backward()
            for (n, name), given in factors.items():
                _, receive, send = wanted[n]
                leaf = leaves[n][name]
                back = crossed(given.to(leaf.dtype), send[name], receive[name])
                equal.append(leaf.grad is not None and torch.equal(leaf.grad, back))
        seen[f"{codec} equal"] = all(equal)
        stats = [exchange.stats() for exchange in objects]
        seen[f"{codec} counted"] = all(
            each[way]["calls"] + each[way]["plain_calls"] == 7
            for each in stats
            for way in ("forward", "backward")
        )
        states: list[Any] = [None] * ranks
        dist.all_gather_object(states, [each.state_dict()["decision"] for each in objects])
        seen[f"{codec} agreed"] = all(state == states[0] for state in states)
        seen[f"{codec} iterations"] = all(each.iteration == 7 for each in objects)
    return seen


def begun_before_others(rank: int, ranks: int, device: torch.device = CPU) -> dict[str, Any]:
    """Rank 0 goes on, forward and back, while the others have not begun: they wait for its word."""
    seen: dict[str, Any] = {}
    for on_device, codec in WAYS if device == CPU else WAYS[:2]:
        key, store = f"{on_device} {codec}", _store()
        exchange = CompressedAllToAll(dist.new_group(), tables=PLANNED[:2], codec=codec)
        sizes = {table.name: [5] * ranks for table in PLANNED[:2]}
        rows = {
            t.name: rows_of(t, 5 * ranks, rank).to(device).requires_grad_() for t in PLANNED[:2]
        }
        weight = torch.ones(3, device=device, requires_grad=True)
        with _coded(on_device):
            exchange.begin_tables(rows, sizes, sizes).wait()  # makes communicators
            if rank:
                store.wait([f"{key} forward"])
            begun = exchange.begin_tables(rows, sizes, sizes)
            if not rank:
                store.set(f"{key} forward", "")
            dense = weight * 2.0  # autograd comes to it between the two
            if not rank:
                dense.register_hook(lambda _, key=key, store=store: store.set(f"{key} back", ""))
            found = begun.wait()
            loss = sum((t.float().sum() for t in found.values()), dense.sum())
            if rank:
                store.wait([f"{key} back"])
            loss.backward()
        seen[f"{key} rows"] = all(
            torch.equal(found[name], crossed(t, sizes[name], sizes[name]))
            for name, t in rows.items()
        )
        seen[f"{key} gradients"] = all(
            t.grad is not None and torch.equal(t.grad, torch.ones_like(t)) for t in rows.values()
        )
        seen[f"{key} dense"] = weight.grad is not None and bool((weight.grad == 2.0).all())
    return seen


def as_torch_has_it(rank: int, ranks: int) -> dict[str, Any]:
    """Waiting again, without gradients, twice through a graph, a second order, other calls."""
    seen: dict[str, Any] = {}
    for on_device in (False, True):
        exchange = CompressedAllToAll(dist.new_group(), tables=PLANNED[:1], codec="compressed")
        sizes = {"users": [5] * ranks}
        rows = rows_of(PLANNED[0], 5 * ranks, rank).requires_grad_()
        begin = partial(exchange.begin_tables, {"users": rows}, sizes, sizes)
        with _coded(on_device):
            begun = begin()
            found = begun.wait()["users"]
            seen[f"{on_device} again"] = begun.wait()["users"] is found
            with torch.no_grad():
                free = begin()
            seen[f"{on_device} no gradient"] = not free.wait()["users"].requires_grad
            begun = begin()
            at_once = exchange.exchange_tables({"users": rows}, sizes, sizes)["users"]
            seen[f"{on_device} at once"] = torch.equal(at_once, begun.wait()["users"])
            last = begin()
            counts = exchange.state_dict()["iteration"], exchange.stats()["forward"]["calls"]
            seen[f"{on_device} state"] = counts == (4, 5)
            last.wait()
            found.sum().backward(retain_graph=True)
            found.sum().backward()
            seen[f"{on_device} twice"] = rows.grad is not None and bool((rows.grad == 2.0).all())
            squares = begin().wait()["users"].square().sum()
            (gradient,) = torch.autograd.grad(squares, rows, create_graph=True)
            try:
                gradient.sum().backward()
            except RuntimeError as error:
                seen[f"{on_device} second order"] = "once_differentiable" in str(error)
            seen[f"{on_device} backward"] = exchange.state_dict()["backward_calls"] == 3
    exchange, interrupted = CompressedAllToAll(tables=PLANNED[:1]), []
    begun = exchange.begin_tables({"users": rows}, sizes, sizes)
    with mock.patch.object(OfThread, "finish", side_effect=KeyboardInterrupt):
        try:
            begun.wait()
        except KeyboardInterrupt:
            interrupted.append(True)
    seen["interrupted"] = interrupted and torch.equal(begun.wait()["users"], found)
    return seen


def failures(rank: int, ranks: int) -> dict[str, Any]:
    """What one rank has wrong is raised where it waits, and by the others with its name."""
    seen: dict[str, Any] = {}
    sizes = {"users": [5] * ranks}
    rows = rows_of(PLANNED[0], 5 * ranks, rank).requires_grad_()

    def made() -> Callable[..., Any]:
        group = dist.new_group()
        exchange = CompressedAllToAll(group, tables=PLANNED[:1], codec="compressed")
        return partial(exchange.begin_tables, {"users": rows})

    begin = made()
    seen["an argument"] = error_of(lambda: begin(sizes, {"users": [4] * ranks}))
    seen["another table"] = error_of(lambda: begin(sizes, sizes, row_ids={"x": rows}))
    seen["goes on"] = error_of(begin(sizes, sizes).wait)
    # Rows of one id that differ, on rank 1 alone.
    ids = torch.zeros(5 * ranks, dtype=torch.int64) if rank == 1 else torch.arange(5 * ranks)
    begun = begin(sizes, sizes, row_ids={"users": ids})
    seen["ids"] = error_of(begun.wait)
    seen["ids again"] = error_of(begun.wait)
    seen["ids next"] = any_error_of(lambda: begin(sizes, sizes).wait())
    begin = made()
    begin(sizes, sizes).wait()
    no_memory = mock.patch.object(stages, "encode_part", side_effect=MemoryError("none left"))
    with no_memory if rank == 1 else nullcontext():
        seen["memory"] = any_error_of(begin(sizes, sizes).wait)
    begin = made()
    loss = begin(sizes, sizes).wait()["users"].sum()
    with no_memory if rank == 1 else nullcontext():
        seen["memory back"] = any_error_of(loss.backward)
    begin = made()
    wrong = {"users": [4] * ranks} if rank else sizes
    seen["disagreement"] = error_of(begin(wrong, sizes).wait)
    return seen


def failed_before_ranks_meet(rank: int, ranks: int, device: torch.device = CPU) -> dict[str, Any]:
    """Ranks learn of a failure at other times, and raise where they would meet in their own thread.

    Rank 0 learns last, and is in its next call by then, which decides, or is plain.
    """
    seen: dict[str, Any] = {}
    sizes = {"users": [5] * ranks}
    rows = rows_of(PLANNED[0], 5 * ranks, rank).to(device)
    learns = Agreement.sizes_of

    def late(*given: Any) -> Any:
        time.sleep(1.5 * (rank == 0))
        return learns(*given)

    fails = mock.patch.object(DeviceExchange, "_messages", side_effect=MemoryError("none left"))
    for name in ("decides", "plain"):
        exchange = CompressedAllToAll(dist.new_group(), tables=PLANNED[:1], decide_every=3)
        with _coded(device == CPU):
            for _ in range(2):
                exchange.begin_tables({"users": rows}, sizes, sizes).wait()
            with (
                mock.patch.object(Agreement, "sizes_of", late),
                fails if rank == 1 else nullcontext(),
            ):
                begun = exchange.begin_tables({"users": rows}, sizes, sizes)
                if name == "plain":
                    exchange._caller.decision.modes = [PLAIN, PLAIN]
                time.sleep(0.5 * (rank != 0))
                started = time.monotonic()
                seen[f"{name} next"] = any_error_of(
                    lambda: exchange.begin_tables({"users": rows}, sizes, sizes)  # noqa: B023
                )
                seen[f"{name} prompt"] = time.monotonic() - started < 10
                seen[name] = any_error_of(begun.wait)
    return seen


def check_met_late(of_ranks: list[Any]) -> None:
    """Rank 1 failed: all raise at once, in the next call and where they wait."""
    for rank, seen in enumerate(of_ranks):
        for name in ("decides", "plain"):
            assert "an earlier exchange failed" in seen[f"{name} next"], seen
            assert seen[f"{name} prompt"]
            elsewhere = "ExchangeError: sizes stage: this or an earlier exchange failed on rank 1"
            assert seen[name].startswith("MemoryError: none" if rank == 1 else elsewhere)


def plain_failures(rank: int, ranks: int) -> dict[str, Any]:
    """Rows that torch's own collective brought and nobody could write, or nobody waited for."""
    seen: dict[str, Any] = {}
    sizes = {table.name: [5] * ranks for table in PLANNED}
    rows = {t.name: rows_of(t, 5 * ranks, rank) for t in PLANNED}
    with coded_where_rows_are():
        exchange = CompressedAllToAll(dist.new_group(), tables=PLANNED, codec="raw")
        begun = exchange.begin_tables(rows, sizes, sizes)
        with mock.patch.object(PlainExchange, "_spread", side_effect=MemoryError("none left")):
            seen["first"] = any_error_of(begun.wait)
        seen["second"] = any_error_of(begun.wait)
        found = exchange.begin_tables(rows, sizes, sizes).wait()
        seen["next"] = all(
            torch.equal(found[name], crossed(t, sizes[name], sizes[name]))
            for name, t in rows.items()
        )
        before = exchange.stats()["buffer_bytes"]
        for _ in range(20):
            exchange.begin_tables(rows, sizes, sizes)
        gc.collect()
        dist.barrier()
        until = time.monotonic() + 10  # gloo's threads hold the last ones a little longer
        while exchange.stats()["buffer_bytes"] > before + 4 * 4096 and time.monotonic() < until:
            time.sleep(0.01)
        seen["buffers"] = exchange.stats()["buffer_bytes"] <= before + 4 * 4096
    return seen


def dead_in_flight(rank: int, ranks: int) -> dict[str, Any] | None:
    """The last rank ends instead of beginning: the others raise where they wait, then at once."""
    exchange = CompressedAllToAll(tables=PLANNED[:1], codec="compressed")
    sizes = {"users": [5] * ranks}
    begin = partial(
        exchange.begin_tables, {"users": rows_of(PLANNED[0], 5 * ranks, rank)}, sizes, sizes
    )
    begin().wait()
    if rank == ranks - 1:
        os._exit(1)
    first = error_of(lambda: begin().wait())
    with mock.patch.object(Pairs, "cross") as cross:
        second = error_of(begin)
    return {"first": first, "second": second, "at once": not cross.called}


def dead_in_flight_back(rank: int, ranks: int) -> dict[str, Any] | None:
    """The last rank ends behind the forward exchange."""
    exchange = CompressedAllToAll(tables=PLANNED[:1], codec="compressed")
    sizes = {"users": [5] * ranks}
    rows = rows_of(PLANNED[0], 5 * ranks, rank).requires_grad_()
    loss = exchange.begin_tables({"users": rows}, sizes, sizes).wait()["users"].sum()
    if rank == ranks - 1:
        os._exit(1)
    first = error_of(loss.backward)
    return {
        "first": first,
        "second": error_of(lambda: exchange.begin_tables({"users": rows}, sizes, sizes)),
    }


def several_as_on_a_gpu(rank: int, ranks: int) -> dict[str, Any]:
    """`several_at_once` of rows that are coded where they are."""
    with coded_where_rows_are():
        return several_at_once(rank, ranks)


def ids_are_found(rank: int, ranks: int, device: torch.device = CPU) -> dict[str, Any]:
    """Rows share ids, which are read in the helper's thread and nowhere else, of one rank too."""
    threads: list[str] = []
    read = FoundRepeats._read

    def counted(found: FoundRepeats) -> Any:
        threads.append(threading.current_thread().name)
        return read(found)

    planned = [Table("users", 8), Table("items", 4), Table("others", 8)]
    exchange = CompressedAllToAll(tables=planned, codec="compressed")
    sizes = {table.name: [50] * ranks for table in planned}
    ids = {"users": torch.arange(50 * ranks) % 11, "items": torch.arange(50 * ranks) % 7}
    weights = {
        name: torch.randn(11, 8 if name == "users" else 4, device=device).requires_grad_()
        for name in ids
    }
    seen: dict[str, Any] = {}
    for turn, where in enumerate((CPU, device)):
        given = {name: t.to(where) for name, t in ids.items()}
        rows = {name: t[ids[name].to(device)] for name, t in weights.items()}
        rows["others"] = torch.randn(50 * ranks, 8, device=device)
        threads.clear()
        with mock.patch.object(FoundRepeats, "_read", counted):
            found = exchange.begin_tables(rows, sizes, sizes, row_ids=given).wait()
        seen[f"{turn} thread"] = len(threads) == 1 and threads[0].startswith("bitslab-exchange")
        factors = (torch.arange(50 * ranks, device=device) % 5 + 1.0 + rank)[:, None]
        for t in weights.values():
            t.grad = None
        sum((found[name] * factors).sum() for name in ids).backward()  # type: ignore[union-attr]
        for name, t in weights.items():
            exact = crossed(rows[name], sizes[name], sizes[name])
            seen[f"{turn} {name}"] = torch.equal(found[name], exact)
            back = crossed(factors.expand(rows[name].shape).contiguous(), *[sizes[name]] * 2)
            wanted = torch.zeros_like(t).index_add_(0, ids[name].to(device), back)
            seen[f"{turn} {name} back"] = t.grad is not None and torch.allclose(t.grad, wanted)
    table = exchange.stats()["tables"]["users"]
    seen["fewer"] = 0 < table["moved_bytes"] < table["raw_bytes"] / 2
    seen["fewer back"] = table["backward_raw_bytes"] < table["raw_bytes"] / 2
    return seen


def alone_in_flight(rank: int, ranks: int) -> dict[str, Any]:
    """What a rank checks alone, whose rows for itself cross."""
    with coded_where_rows_are(own_rows_cross=True):
        return several_at_once(rank, ranks) | ids_are_found(rank, ranks)


def ids_as_on_a_gpu(rank: int, ranks: int) -> dict[str, Any]:
    """`ids_are_found` of rows that are coded where they are."""
    with coded_where_rows_are():
        return ids_are_found(rank, ranks)


def nccl_in_flight(rank: int, ranks: int) -> dict[str, Any]:
    """The same of rows on GPUs, over NCCL; of one rank those for itself cross."""
    Caller.own_rows_cross = ranks == 1
    device = torch.device("cuda", rank)
    seen = several_at_once(rank, ranks, device) | begun_before_others(rank, ranks, device)
    seen |= ids_are_found(rank, ranks, device)
    return seen | _begun_behind_a_busy_gpu(ranks, device)


def nccl_failed_before_ranks_meet(rank: int, ranks: int) -> dict[str, Any]:
    """The same of rows on GPUs, over NCCL."""
    return failed_before_ranks_meet(rank, ranks, torch.device("cuda", rank))


def _begun_behind_a_busy_gpu(ranks: int, device: torch.device) -> dict[str, Any]:
    """The calling thread begins while the GPU has not come to the rows, with ids and without."""
    seen: dict[str, Any] = {}
    exchange = CompressedAllToAll(tables=PLANNED[:1], codec="compressed")
    sizes = {"users": [50] * ranks}
    ids = torch.arange(50 * ranks, device=device) % 11
    rows = torch.randn(11, 8, device=device)[ids].requires_grad_()
    for given in (None, {"users": ids}):
        for _ in range(2):  # kernels are compiled, and memory is allocated, in the first one
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000_000)
            behind = torch.cuda.Event()
            behind.record()
            begun = exchange.begin_tables({"users": rows}, sizes, sizes, row_ids=given)
            goes_on = not behind.query()
            found = begun.wait()["users"]
        key = "with ids" if given else "without ids"
        seen[f"{key} begun"] = goes_on
        seen[f"{key} equal"] = torch.equal(found, crossed(rows, sizes["users"], sizes["users"]))
    return seen


CHECKS: dict[str, Callable[[int, int], Any]] = {
    f.__name__: f
    for f in (
        several_at_once,
        several_as_on_a_gpu,
        begun_before_others,
        as_torch_has_it,
        failures,
        plain_failures,
        failed_before_ranks_meet,
        dead_in_flight,
        dead_in_flight_back,
        alone_in_flight,
        ids_as_on_a_gpu,
        nccl_in_flight,
        nccl_failed_before_ranks_meet,
    )
}
