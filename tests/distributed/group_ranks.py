"""What ranks check of groups that are made and destroyed again and again."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bitslab.distributed import CompressedAllToAll, all_to_all_single, helpers
from bitslab.distributed.buffers import Buffers
from bitslab.distributed.helpers import helper_of
from tests.distributed.cpu_coder import coded_where_rows_are
from tests.distributed.ranks import error_of, noise, world

TIMES = 20


def _counted(kept: bool) -> dict[str, int]:
    """Return how much there is of what groups have; with torch's own where none is kept."""
    gc.collect()
    buffers = [each for each in gc.get_objects() if isinstance(each, Buffers)]
    found = {
        "threads": sum(t.name == "bitslab-exchange" for t in threading.enumerate()),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "buffers": sum(each.nbytes for each in buffers),
        "callers": len(buffers),
    }
    if not kept:
        found["all threads"] = len(os.listdir("/proc/self/task"))
        found["files"] = len(os.listdir("/proc/self/fd"))
    return found


def _exchanged(group: dist.ProcessGroup, t: torch.Tensor) -> torch.Tensor:
    """Use a group in each way; return what came."""
    found = torch.empty_like(t)
    all_to_all_single(found, t, group=group, codec="compressed")
    for there in (False, True):
        with coded_where_rows_are() if there else nullcontext():
            found.zero_()
            all_to_all_single(found, t, group=group, async_op=True, codec="compressed").wait()
            exchange = CompressedAllToAll(group, codec="compressed")
            assert torch.equal(exchange(t), found)
    return found


def destroyed(rank: int, ranks: int) -> dict[str, Any]:
    """Subgroups of some ranks, and of all, leave nothing behind; later ones go on."""
    seen: dict[str, Any] = {}
    t = noise(rank, ranks, 8)
    _exchanged(world(), t)
    expected = torch.empty_like(t)
    dist.all_to_all_single(expected, t)
    for kept in (False, True):
        last: list[dist.ProcessGroup] = []
        equal, before = True, dict[str, int]()
        for i in range(TIMES):
            # Ranks know other numbers of groups: the first one is in more of them.
            pair = dist.new_group([0, ranks - 1])
            whole = dist.new_group(list(range(ranks)))
            if rank in (0, ranks - 1):
                _exchanged(pair, noise(rank, 2, 4))
            equal = equal and torch.equal(_exchanged(whole, t), expected)
            for group in (pair, whole):
                if group != dist.GroupMember.NON_GROUP_MEMBER:
                    dist.destroy_process_group(group)
                    if kept:
                        last.append(group)
            del pair, whole, group
            if i == 0:
                time.sleep(0.5)  # threads are through with what they did last
                before = _counted(kept)
        seen[f"equal {kept}"] = equal
        end = time.monotonic() + 10
        while (after := _counted(kept)) != before and time.monotonic() < end:
            time.sleep(0.05)
        seen[f"same {kept}"] = after == before or [before, after]
        dist.barrier()
    return seen


def of_pending_calls(rank: int, ranks: int) -> dict[str, Any]:
    """What was asked of a group's thread and not begun when it ended raises, and says why."""
    group = dist.new_group()
    t = noise(rank, ranks, 8)
    all_to_all_single(torch.empty_like(t), t, group=group, async_op=True).wait()
    helper = helper_of(group)
    held = threading.Event()
    helper.lane.submit(held.wait, 20)
    work = all_to_all_single(torch.empty_like(t), t, group=group, async_op=True)
    future = work.get_future()
    closing = threading.Thread(target=helper.close)
    closing.start()
    text = "ExchangeError: exchange: not begun, its group was destroyed before"
    seen: dict[str, Any] = {"wait": error_of(work.wait) == text}
    seen["future"] = error_of(future.wait) == text
    seen["result"] = error_of(work.result) == text
    seen["state"] = work.is_completed() and not work.is_success()
    seen["exception"] = str(work.exception()) == text.partition(": ")[2]
    held.set()
    closing.join()
    dist.destroy_process_group(group)
    other = dist.new_group()
    helper_of(other)  # what is of destroyed groups goes
    again = error_of(lambda: helper_of(group))
    seen["again"] = again.startswith("ArgumentError: group: was destroyed")
    return seen


def not_made(rank: int, ranks: int) -> dict[str, Any]:
    """A rank that could not make a helper, or was interrupted, does not try once more."""
    seen: dict[str, Any] = {}
    for error in (KeyboardInterrupt(), RuntimeError("nobody came"), MemoryError("none left")):
        group = dist.new_group()
        t = noise(rank, ranks, 8)

        def call(t: torch.Tensor = t, group: Any = group) -> None:
            all_to_all_single(torch.empty_like(t), t, group=group, async_op=True).wait()

        name = type(error).__name__
        with mock.patch.object(helpers, "new_group_beside", side_effect=error):
            try:
                first = error_of(call)
            except BaseException as raised:
                first = type(raised).__name__
        reason = "sizes stage: no communicator for the group's thread: "
        wanted = f"ExchangeError: {reason}" if name == "RuntimeError" else name
        again = f"ExchangeError: an earlier exchange failed: {reason}{name}"
        seen[name] = first.startswith(wanted) and error_of(call).startswith(again)
    return seen


def of_devices(rank: int, ranks: int) -> dict[str, Any]:
    """Tensors on two devices have helpers of their own, on these, whichever is torch's current."""
    group, made = dist.new_group(), []

    def beside(of: Any, backend: str, device: torch.device) -> Any:
        made.append((backend, str(device)))
        return of

    stream = mock.MagicMock()
    with (
        mock.patch.object(helpers, "new_group_beside", beside),
        mock.patch.object(helpers, "StreamLane", stream),
        mock.patch.object(torch, "zeros", mock.MagicMock()),
        mock.patch.object(helpers, "end_group"),
    ):
        found = [helper_of(group, torch.device("cuda", i)) for i in (1, 0, 1)]
        streams = [str(call.args[0]) for call in stream.call_args_list]
        helpers._helpers.of(group).clear()
    dist.barrier()  # another rank may not have connected its group yet
    return {
        "made": made == [("nccl", "cuda:1"), ("nccl", "cuda:0")],
        "streams": streams == ["cuda:1", "cuda:0"],
        "kept": found[0] is found[2] is not found[1],
    }


CHECKS: dict[str, Callable[[int, int], Any]] = {
    f.__name__: f for f in (destroyed, of_pending_calls, not_made, of_devices)
}
