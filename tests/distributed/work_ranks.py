"""What ranks check of the `Work` of an exchange: results, futures, hooks of DDP, callbacks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bitslab.distributed import all_to_all_single
from bitslab.distributed.caller import Caller
from bitslab.distributed.collective import function_caller
from bitslab.distributed.selection import PLAIN
from tests.distributed.cpu_coder import coded_where_rows_are
from tests.distributed.ranks import error_of, noise

#: Where rows are coded, and how they cross.
WAYS = [(there, plain) for there in (False, True) for plain in (False, True)]


def _coded(there: bool) -> AbstractContextManager[None]:
    return coded_where_rows_are() if there else nullcontext()


def _plain(plain: bool) -> AbstractContextManager[Any]:
    """Have torch's own collective deliver the rows of ``codec="auto"``."""
    if not plain:
        return nullcontext()
    return mock.patch.object(Caller, "_mode", lambda self, way: PLAIN)


def futures(rank: int, ranks: int) -> dict[str, Any]:
    """Futures and results of exchanges that go on, ended well or failed."""
    seen: dict[str, Any] = {}
    t = torch.arange(4.0 * ranks).view(-1, 2) + 100 * rank
    expected = torch.empty_like(t)
    dist.all_to_all_single(expected, t)
    for there, plain in WAYS:
        key = f"{there} {plain}"
        group = dist.new_group()
        found = torch.zeros_like(t)
        codec = "auto" if plain else "compressed"
        start = partial(all_to_all_single, found, group=group, async_op=True, codec=codec)
        with _coded(there), _plain(plain):
            start(t).wait()
            if rank:
                dist.barrier()
            found.zero_()
            work = start(t)
            future = work.get_future()
            child = future.then(lambda done: done.value()[0].sum())
            if not rank:  # others have not begun
                seen[f"{key} goes on"] = not (future.done() or work.is_completed())
                said = error_of(work.result)
                seen[f"{key} no result"] = said.startswith("BitslabError: result: the exchange ")
                dist.barrier()
            (value,) = future.wait()
            seen[f"{key} value"] = value is found and torch.equal(value, expected)
            seen[f"{key} child"] = float(child.wait()) == float(expected.sum())
            work.wait()
            (result,) = work.result()
            seen[f"{key} result"] = result is found and work.is_success() and work.is_completed()
            (late,) = work.get_future().value()
            seen[f"{key} late"] = late is found
            if plain:
                continue
            # One more row for all than they expect.
            wrong = start(torch.ones((2 + (rank == 0)) * ranks, 2))
            error = error_of(wrong.get_future().wait)
            seen[f"{key} error"] = error.startswith("ExchangeError: sizes stage: rank")
            seen[f"{key} failed"] = error_of(wrong.result) == error == error_of(wrong.wait)
            seen[f"{key} state"] = wrong.is_completed() and not wrong.is_success()
    return seen


def own_rows(rank: int, ranks: int) -> dict[str, bool]:
    """Of an exchange that nobody waits for, all rows are there when its future is done."""
    t = noise(rank, ranks, 8)
    found, expected = torch.zeros_like(t), torch.empty_like(t)
    dist.all_to_all_single(expected, t)
    with coded_where_rows_are():
        work = all_to_all_single(found, t, async_op=True, codec="compressed")
        work.get_future().wait()
        seen = {"all": torch.equal(found, expected)}
        found[0].fill_(7.0)  # what comes later is not written over
        work.wait()
        work.wait()
    return seen | {"once": bool((found[0] == 7.0).all())}


REFUSED = "BitslabError: wait: in a callback of an exchange's future"


def in_callbacks(rank: int, ranks: int) -> dict[str, Any]:
    """A callback may begin other exchanges; the thread that exchanges does not wait for them."""
    seen: dict[str, Any] = {}
    for there in (False, True):
        group = dist.new_group()
        t = noise(rank, ranks, 8)
        out, later = torch.empty_like(t), torch.zeros_like(t)
        begin = partial(all_to_all_single, group=group, async_op=True, codec="compressed")
        works: list[Any] = []

        def follow(done: Any, begin: Any = begin, works: Any = works, later: Any = later) -> str:
            works.append(begin(later, done.value()[0]))
            return error_of(works[-1].wait)

        with _coded(there):
            # Which thread calls, this one or the one that exchanges, is a matter of time.
            said = begin(out, t).get_future().then(follow).wait()
            seen[f"{there} said"] = said == "no error" or said.startswith(REFUSED)
            works[-1].wait()
        expected = torch.empty_like(t)
        dist.all_to_all_single(expected, out)
        seen[f"{there} later"] = torch.equal(later, expected)
    return seen


def refused_in_callbacks(rank: int, ranks: int) -> dict[str, Any]:
    """The thread that exchanges does not wait for what it would do next, and goes on."""
    seen: dict[str, Any] = {}
    for there in (False, True):
        group = dist.new_group()
        t = noise(rank, ranks, 8)
        begin = partial(all_to_all_single, torch.empty_like(t), t, group=group, codec="compressed")
        with _coded(there):
            begin(async_op=True).wait()
            if rank:
                dist.barrier()
            first, second = begin(async_op=True), begin(async_op=True)
            calls = [second.wait, begin][: 1 + there]
            if rank == 0:  # the others have not begun: that thread calls

                def called(done: Any, calls: Any = calls) -> list[str]:
                    return [error_of(call) for call in calls]

                said = first.get_future().then(called)
                dist.barrier()
                found = said.wait()
                of_all = [each.startswith(REFUSED) for each in found]
                seen[f"{there}"] = len(of_all) == len(calls) and all(of_all)
            seen[f"{there} goes on"] = second.wait() and begin(async_op=True).wait()
    return seen


def hook_of_ddp(rank: int, ranks: int) -> dict[str, Any]:
    """A communication hook that sends parts of a bucket by the exchange, and waits for no work."""
    seen: dict[str, Any] = {}
    for there, plain in WAYS:
        group = dist.new_group()

        def exchanged(
            state: Any, bucket: Any, group: Any = group, plain: bool = plain
        ) -> torch.futures.Future[torch.Tensor]:
            given = bucket.buffer()
            size = -(-len(given) // ranks) * ranks
            sent = torch.zeros(size).index_put_((torch.arange(len(given)),), given)
            parts = torch.empty_like(sent)
            codec = "auto" if plain else "compressed"
            work = all_to_all_single(parts, sent, group=group, async_op=True, codec=codec)

            def summed(done: Any) -> torch.Tensor:
                mine = done.value()[0].view(ranks, -1).sum(0) / ranks
                whole = [torch.empty_like(mine) for _ in range(ranks)]
                dist.all_gather(whole, mine)
                return torch.cat(whole)[: len(given)]

            found: torch.futures.Future[torch.Tensor] = work.get_future().then(summed)
            return found

        exchanged.__annotations__.clear()  # torch compares them with types; here they are texts
        with warnings.catch_warnings(), _coded(there), _plain(plain):
            warnings.simplefilter("ignore")
            torch.manual_seed(3)
            models = [DistributedDataParallel(torch.nn.Linear(5, 3)) for _ in range(2)]
            models[1].load_state_dict(models[0].state_dict())
            models[1].register_comm_hook(None, exchanged)
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
            for model in models:
                model(inputs).square().sum().backward()
        pairs = zip(*(model.parameters() for model in models), strict=True)
        seen[f"{there} {plain}"] = all(
            a.grad is not None and b.grad is not None and torch.allclose(a.grad, b.grad)
            for a, b in pairs
        )
    return seen


def plain_asynchronous(rank: int, ranks: int) -> dict[str, Any]:
    """Rows that torch's own collective delivers: the future has the output, not its bytes."""
    t = noise(rank, ranks, 8)
    found, expected = torch.zeros_like(t), torch.empty_like(t)
    dist.all_to_all_single(expected, t)
    group = dist.new_group()
    with coded_where_rows_are(), _plain(True):
        work = all_to_all_single(found, t, group=group, async_op=True)
        (value,) = work.get_future().wait()
        empty = torch.empty(ranks, 0)
        none = all_to_all_single(empty, torch.empty(ranks, 0), group=group, async_op=True)
        caller = function_caller(group, "auto")
        return {
            "value": value is found and torch.equal(found, expected),
            "wait": work.wait() is True and work.is_success() and work.exception() is None,
            "plain": caller.counters[0].plain_calls == 2,
            "none": none.get_future().done() and none.result()[0] is empty and none.is_success(),
        }


CHECKS: dict[str, Callable[[int, int], Any]] = {
    f.__name__: f
    for f in (
        futures,
        own_rows,
        in_callbacks,
        refused_in_callbacks,
        hook_of_ddp,
        plain_asynchronous,
    )
}
