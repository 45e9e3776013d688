"""Process groups of torch: what is kept for each, and groups that serve others."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ..engine.memory.locks import current_process

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class _OfGroup(NamedTuple):
    """Things of a group, and whether torch knew the group when these were first asked for."""

    things: dict[Any, Any]
    was_known: bool
    process: int


class PerGroup(Generic[K, T]):
    """Things of groups by key, until their group is destroyed.

    They go when nobody has the group any more, which `torch.distributed.destroy_process_group` sees
    to, or else when another group first asks for some.

    Parameters
    ----------
    release : callable, optional
        ``release(thing)`` frees what a thing does not free itself.
    """

    _all: ClassVar[list[PerGroup[Any, Any]]] = []

    def __init__(self, release: Callable[[T], object] | None = None) -> None:
        self._release = release
        self._kept: weakref.WeakKeyDictionary[dist.ProcessGroup, _OfGroup] = (
            weakref.WeakKeyDictionary()
        )
        self._all.append(self)

    def of(self, group: dist.ProcessGroup) -> dict[K, T]:
        """Return the things of a group, which may be added to."""
        found = self._kept.get(group)
        if found is None:
            for each in self._all:
                each.drop_destroyed()
            found = _OfGroup({}, is_known(group), current_process())
            weakref.finalize(group, self._end, found).atexit = False
            self._kept[group] = found
        return found.things

    def drop_destroyed(self) -> None:
        """Release what is of groups that torch knew, and knows no more."""
        for each in self._kept.keyrefs():
            group = each()
            found = None if group is None else self._kept.get(group)
            if group is not None and found is not None:
                if found.was_known and not is_known(group):
                    self._kept.pop(group, None)
                    self._end(found)

    def _end(self, found: _OfGroup) -> None:
        if found.process != current_process():
            return  # a forked child has none of the threads and connections
        while found.things:
            _, thing = found.things.popitem()
            if self._release is not None:
                self._release(thing)


def is_known(group: dist.ProcessGroup) -> bool:
    """Return whether torch has a group that was made and not destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def new_group_beside(group: dist.ProcessGroup, backend: str, device: torch.device) -> Any:
    """Return a new group of the ranks of another one; all these make it at once.

    `torch.distributed.new_group` names a group that only its ranks make by the number of groups
    that a rank knows. Ranks that differ in it would wait for each other under two names, and when
    groups are destroyed a later one would get the name of an earlier one, and read of the store
    where that was to be reached. So its ranks draw a name, over the group that they have.

    Parameters
    ----------
    group : ProcessGroup
        Known to torch.
    backend : str
        Of the new one.
    device : torch.device
        For which both have a backend.

    Raises
    ------
    RuntimeError
        When ranks do not come within the group's timeout.
    """
    of_torch: Any = dist.distributed_c10d
    drawn = torch.tensor([secrets.randbits(62)], device=device)
    dist.all_reduce(drawn, dist.ReduceOp.MAX, group=group)
    # Messages go by a rank's place in the group, which may be in another order than the ranks.
    ranks: Sequence[int] = dist.get_process_group_ranks(group)
    found, _ = of_torch._new_process_group_helper(
        len(ranks),
        group.rank(),
        list(ranks),
        dist.Backend(backend),
        of_torch._get_default_store(),
        f"bitslab-{int(drawn):x}",
        timeout=timeout_of(group, device) or of_torch._get_default_timeout(backend),
    )
    of_torch._world.pg_group_ranks[found] = {rank: place for place, rank in enumerate(ranks)}
    return found


def end_group(group: dist.ProcessGroup) -> None:
    """Destroy a group that `new_group_beside` made, on this rank by itself.

    Nothing of it may be under way.
    """
    if not is_known(group):
        return  # all groups were destroyed at once
    if dist.get_backend(group) == "nccl":
        # To destroy communicators of NCCL waits for the other ranks, which may keep theirs longer.
        dist.distributed_c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return how long collectives of a group wait at most; None where its backend keeps it."""
    backend = group._get_backend(torch.device(device.type))
    found = getattr(getattr(backend, "options", None), "_timeout", None)
    return found if isinstance(found, timedelta) else None
