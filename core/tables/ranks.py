"""One table and one cache for all ranks of torch.distributed on a machine."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from ..devices import device_or_default
from ..engine.kernels.format import MAX_SLABS
from ..errors import ArgumentError, BitslabError
from .slab_handles import gpu_name, gpu_named
from .slabs import SlabCache
from .table import CompressedTable


class _Shareable(Protocol):
    def handle(self) -> str: ...

    def close(self) -> None: ...


Shared = TypeVar("Shared", bound=_Shareable)


def share_table(build: Callable[[], CompressedTable], group: Any = None) -> CompressedTable:
    """Make a table once on each machine, for all ranks that run there.

    The lowest rank of each machine builds; the others attach to its memory. All ranks of the group
    must call this together.

    Parameters
    ----------
    build : function
        ``() -> CompressedTable``; called by one rank of each machine, while the others wait. The
        group's timeout must be longer than it takes.
    group : torch.distributed.ProcessGroup, optional
        The ranks. When left out: this process alone, which builds.

    Returns
    -------
    CompressedTable
        Read-only where ranks share it. The rank that built may exit or close it before the others.

    Raises
    ------
    BitslabError
        On every rank when `build`, or attaching, failed on any; the message says why.
    ArgumentError
        When this process is not in the group.

    Notes
    -----
    Ranks in different containers or of different users do not share: each such set builds its own.
    A group of NCCL sends its messages through the current GPU: call ``torch.cuda.set_device``
    first.
    """
    if group is None:
        return build()
    return _shared("share_table", group, None, lambda _: build(), CompressedTable.attach)


def share_cache(
    table: CompressedTable,
    build: Callable[[list[torch.device]], SlabCache],
    group: Any = None,
    device: torch.device | str | None = None,
) -> SlabCache:
    """Make a cache once on each machine, its slabs spread over the GPUs of the ranks there.

    Parameters
    ----------
    table : CompressedTable
        The table that `share_table` returned.
    build : function
        ``(devices) -> SlabCache``: a filled cache over `table` with a slab on each of the devices,
        which are the GPUs of the ranks of the machine, or the CPU once for each rank, up to eight.
        Called by one rank of each machine; that rank must live, and keep the cache, as long as the
        others use it.
    group : torch.distributed.ProcessGroup, optional
        As in `share_table`.
    device : torch.device or str, optional
        Where rows of this rank go; the current GPU, or the CPU where there is none, when left out.

    Returns
    -------
    SlabCache
        It can be filled again only where no ranks share it.

    Raises
    ------
    BitslabError, ArgumentError
        As in `share_table`; also when a GPU cannot read another's memory.
    """
    where = device_or_default(device)
    if group is None:
        return build([where])
    on_gpu = where.type == "cuda"
    with torch.cuda.device(where) if on_gpu else contextlib.nullcontext():
        return _shared(
            "share_cache",
            group,
            gpu_name(where) if on_gpu else "cpu",
            lambda names: build(_devices(names)),
            lambda handle: SlabCache.attach(table, handle, where),
        )


def _shared(
    what: str,
    group: Any,
    payload: Any,
    build: Callable[[list[Any]], Shared],
    attach: Callable[[str], Shared],
) -> Shared:
    """Build on the lowest rank of each machine, attach on the others; fail on all or on none.

    `build` takes the `payload` of every rank of the machine, in the order of the ranks.
    """
    me = _rank(group)
    ranks = _exchange(group, (_machine(), payload))
    neighbours = [rank for rank, (machine, _) in enumerate(ranks) if machine == ranks[me][0]]
    leads = neighbours[0] == me
    made: Shared | None = None
    handle, failure = "", None
    if leads:
        try:
            made = build([ranks[rank][1] for rank in neighbours])
            if len(neighbours) > 1:
                handle = made.handle()
        except BaseException as error:  # a Ctrl-C is reported too, or the other ranks wait
            failure = error
    try:
        answers = _exchange(group, (handle, _text_of(failure)))
        _raise_failures(what, answers, failure)
        if not leads:
            try:
                made = attach(answers[neighbours[0]][0])
            except BaseException as error:
                failure = error
        # The rank that built may free the memory only when all have attached.
        _raise_failures(what, _exchange(group, ("", _text_of(failure))), failure)
    except BaseException:
        if made is not None:
            made.close()
        raise
    assert made is not None
    return made


def _rank(group: Any) -> int:
    """Return this process's rank in a group."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ArgumentError(
            "group: torch.distributed is not initialised; call init_process_group first"
        )
    try:
        rank = dist.get_rank(group)
    except (AttributeError, TypeError, ValueError) as error:
        raise ArgumentError(f"group: {group!r:.60} is no process group ({error})") from error
    if rank < 0:
        raise ArgumentError("group: this process is not in it")
    return rank


def _exchange(group: Any, payload: Any) -> list[Any]:
    """All-gather a picklable payload; return the payload of every rank, by rank."""
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, payload, group=group)
    return answers


def _machine() -> tuple[str, ...]:
    """Return an identity that is equal for processes which can map each other's memory."""
    identity = [platform.node(), str(os.getuid()) if hasattr(os, "getuid") else ""]
    with contextlib.suppress(OSError):
        identity.append(os.readlink("/proc/self/ns/pid"))
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        identity.append(file.read().strip())
    return tuple(identity)


def _devices(names: list[str]) -> list[torch.device]:
    """Return the devices of the slabs: each GPU once, the CPU as often as it is named."""
    if set(names) == {"cpu"}:
        return [torch.device("cpu")] * min(len(names), MAX_SLABS)
    return [
        torch.device(name) if name == "cpu" else gpu_named(name) for name in dict.fromkeys(names)
    ]


def _text_of(failure: BaseException | None) -> str:
    return "" if failure is None else f"{type(failure).__name__}: {failure}"


def _raise_failures(
    what: str, answers: list[tuple[str, str]], failure: BaseException | None
) -> None:
    """Raise if any rank failed; `failure` is the error of this rank."""
    if failure is not None and not isinstance(failure, Exception):
        raise failure
    failed = [(rank, text) for rank, (_, text) in enumerate(answers) if text]
    if failed:
        rank, text = failed[0]
        raise BitslabError(f"{what}: rank {rank} of the group failed: {text}") from failure
