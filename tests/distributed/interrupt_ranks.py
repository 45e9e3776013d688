"""What ranks check where one is interrupted outside of the stages: it does not go on as if not."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bitslab.distributed import CompressedAllToAll, all_to_all_single
from bitslab.distributed.device import DeviceExchange
from bitslab.distributed.helpers import Helper
from bitslab.distributed.selection import Decision
from tests.distributed.cpu_coder import coded_where_rows_are
from tests.distributed.early_ranks import any_error_of
from tests.distributed.ranks import noise

INTERRUPTED = "KeyboardInterrupt: "
LATER = "ExchangeError: an earlier exchange failed: "


def _said(work: Callable[[], Any]) -> str:
    try:
        return any_error_of(work)
    except KeyboardInterrupt:
        return INTERRUPTED


def _interrupt(*args: Any, **options: Any) -> Any:
    raise KeyboardInterrupt


_finish = DeviceExchange.finish


def _finish_and_interrupt(self: DeviceExchange) -> None:
    _finish(self)
    raise KeyboardInterrupt


def between_pieces(rank: int, ranks: int) -> dict[str, Any]:
    """Rank 1 is interrupted behind its first of three pieces: no later one is taken for them."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    exchange = CompressedAllToAll(group, codec="compressed", pieces=3)
    of_helper = Helper.submit

    def submit(self: Helper, *args: Any) -> Any:
        task = of_helper(self, *args)
        if args[0].__name__ == "_stages":
            raise KeyboardInterrupt
        return task

    t = noise(rank, ranks, 8)
    with coded_where_rows_are():
        exchange(t)
        with mock.patch.object(Helper, "submit", submit) if rank == 1 else nullcontext():
            first = _said(partial(exchange, t))
        second = _said(partial(exchange, t))
    own = first == INTERRUPTED if rank == 1 else first.startswith("ExchangeError: ")
    return {"first": own or first, "second": second.startswith(LATER) or second}


def behind_the_exchange(rank: int, ranks: int) -> dict[str, Any]:
    """Rank 1 is interrupted where it waits, or notes what came: it alone raises from there on."""
    seen: dict[str, Any] = {}
    for there in (False, True):
        group = dist.new_group(timeout=timedelta(seconds=3))
        exchange = CompressedAllToAll(group, decide_every=1)
        failing = mock.patch.object(Decision, "decide", _interrupt)
        if there:
            failing = mock.patch.object(DeviceExchange, "finish", _finish_and_interrupt)
        t = noise(rank, ranks, 8)
        with coded_where_rows_are() if there else nullcontext():
            exchange(t)
            if there:  # the next one measures
                exchange._caller.codec = "compressed"
            with failing if rank == 1 else nullcontext():
                first = _said(partial(exchange, t))
            seen[f"{there} first"] = first == (INTERRUPTED if rank == 1 else "no error") or first
            if rank == 1:
                started = time.monotonic()
                second = _said(partial(exchange, t))
                seen[f"{there} second"] = second.startswith(LATER) or second
                seen[f"{there} at once"] = time.monotonic() - started < 1
    return seen


def of_asynchronous_calls(rank: int, ranks: int) -> dict[str, Any]:
    """Who is interrupted while he waits may wait once more: the exchange goes on."""
    seen: dict[str, Any] = {}
    for there in (False, True):
        group = dist.new_group()
        t = noise(rank, ranks, 8)
        found, expected = torch.empty_like(t), torch.empty_like(t)
        with coded_where_rows_are() if there else nullcontext():
            start = partial(all_to_all_single, group=group, async_op=True, codec="compressed")
            start(found, t).wait()
            work = start(found.zero_(), t)
            with mock.patch.object(type(work._exchange), "finish", _interrupt):
                seen[f"{there} first"] = _said(work.wait) == INTERRUPTED
            work.wait()
            dist.all_to_all_single(expected, t)
            seen[f"{there} equal"] = torch.equal(found, expected)
            start(found, t).wait()
    return seen


CHECKS: dict[str, Callable[[int, int], Any]] = {
    f.__name__: f for f in (between_pieces, behind_the_exchange, of_asynchronous_calls)
}
