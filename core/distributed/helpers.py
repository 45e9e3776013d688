"""Communicators of a group that one thread of this process uses alone."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..engine.transfer import StreamLane, ThreadLane


@dataclass(frozen=True)
class Helper:
    """A communicator of a group, and the thread that uses it.

    Parameters
    ----------
    group : ProcessGroup
        The same ranks as the group that it serves, with the same timeout.
    lane : ThreadLane
        One thread: exchanges run in the order in which they were asked for.
    words : torch.Tensor
        int64 ``[2, ranks, 2]`` there: by rank a descriptor and a number, those that are sent and
        those that come, for a rank that has no memory for others.
    stream : StreamLane or None
        Where messages cross, on a GPU.
    """

    group: dist.ProcessGroup
    lane: ThreadLane
    words: torch.Tensor
    stream: StreamLane | None = None


_helpers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Helper]] = (
    weakref.WeakKeyDictionary()
)
# torch keeps a helper's communicator until all groups are destroyed. It is not destroyed with the
# group that it serves: torch would give its name to the next one of the same ranks, and these would
# read what the store has of the old one.


def helper_of(group: dist.ProcessGroup, device_type: str = "cpu") -> Helper:
    """Return the helper of a group for tensors of a device; all its ranks make it at once."""
    of_group = _helpers.setdefault(group, {})
    if device_type not in of_group:
        _make_as_many_groups(group, device_type)
        ranks = dist.get_process_group_ranks(group)
        # Messages go by a rank's place in the group, which may be in another order than the ranks.
        order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
        own = dist.new_group(
            ranks,
            backend="nccl" if device_type == "cuda" else "gloo",
            timeout=timeout_of(group, device_type),
            use_local_synchronization=True,
            **order,
        )
        device, stream = torch.device(device_type), None
        if device_type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
            stream = StreamLane(device)
        with nullcontext() if stream is None else stream.on():
            words = torch.zeros(2, group.size(), 2, dtype=torch.int64, device=device)
        of_group[device_type] = Helper(own, ThreadLane("bitslab-exchange"), words, stream)
    return of_group[device_type]


def _make_as_many_groups(group: dist.ProcessGroup, device_type: str) -> None:
    """Make groups of this rank alone until it knows as many as the others of a group.

    torch names a group that only its ranks make by the number of groups that a rank knows: ranks
    that differ in it would wait for each other under two names.
    """
    known = dist.distributed_c10d._world.pg_names
    most = torch.tensor([len(known)], device=device_type)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    while len(known) < int(most):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def timeout_of(group: dist.ProcessGroup, device_type: str = "cpu") -> timedelta | None:
    """Return how long collectives of a group wait at most; None where its backend keeps it."""
    backend = group._get_backend(torch.device(device_type))
    options = getattr(backend, "options", None)
    found = getattr(options, "_timeout", None)
    return found if isinstance(found, timedelta) else None
