"""Communicators of a group that one thread of this process uses alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..engine.on_host import on_host
from ..engine.tasks import ThreadTask
from ..engine.transfer import StreamLane, ThreadLane
from ..errors import ArgumentError
from .faults import ExchangeError, Faults, cause_of, reason_of
from .groups import PerGroup, end_group, is_known, new_group_beside
from .modes import Mode, kept_tensors, mode_of_thread
from .wire import FAILED, descriptor

T = TypeVar("T")

CPU = torch.device("cpu")


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
    words_on_host : torch.Tensor
        ``[ranks, 2]``, page-locked for a GPU: where the thread reads those that have come.
    stream : StreamLane or None
        Where messages cross, on a GPU.
    """

    group: dist.ProcessGroup
    lane: ThreadLane
    words: torch.Tensor
    words_on_host: torch.Tensor
    stream: StreamLane | None = None

    def submit(self, work: Callable[..., T], /, *args: Any) -> ThreadTask[T]:
        """Queue ``work(*args)`` for the thread, in the calling thread's mode of autograd."""
        return self.lane.submit(_in_mode, mode_of_thread(), work, args)

    def say_failed(self, faults: Faults, error: BaseException) -> None:
        """Say to all ranks, in the sizes stage, that this one failed before it could send.

        In the helper's thread, of rows that are coded on their device. It takes no memory there.
        Where the stage fails, too, every later call raises.
        """
        faults.failed(reason_of(error), known_to_all=False, cause=cause_of(error))
        if not faults.to_report:
            return  # a collective failed: all is over
        said, found = self.words

        def crossed() -> None:
            with nullcontext() if self.stream is None else self.stream.on():
                said[:, 0].fill_(descriptor(faults.cause, FAILED))
                distributed_c10d.all_to_all_single(found, said, group=self.group)
                on_host(found, self.words_on_host)

        with suppress(ExchangeError):  # the error that is reported is raised
            faults.stage("sizes", crossed)
            faults.reported()

    def close(self) -> None:
        """End thread and communicator; what the thread has not begun is cancelled."""
        self.lane.close()
        if self.stream is not None:
            self.stream.stream.synchronize()
        end_group(self.group)


def _in_mode(mode: Mode, work: Callable[..., T], args: tuple[Any, ...]) -> T:
    with mode():
        return work(*args)


def _close(made: Helper | str) -> None:
    if isinstance(made, Helper):
        made.close()


#: By device the helper of a group, or why there is none.
_helpers: PerGroup[torch.device, Helper | str] = PerGroup(_close)


def helper_of(group: dist.ProcessGroup, device: torch.device = CPU) -> Helper:
    """Return the helper of a group for tensors of a device; all its ranks make it at once.

    It ends with the group.

    Raises
    ------
    ExchangeError
        When it cannot be made, and from there on: ranks may have come apart.
    ArgumentError
        When the group was destroyed.
    """
    of_group = _helpers.of(group)
    found = of_group.get(device)
    if found is None:
        if not is_known(group):
            raise ArgumentError("group: was destroyed, or is not one that torch.distributed made")
        try:
            found = of_group[device] = _made(group, device)
        except BaseException as error:
            reason = f"sizes stage: no communicator for the group's thread: {error!r:.200}"
            of_group[device] = reason
            if isinstance(error, RuntimeError):
                raise ExchangeError(reason) from error
            raise
    if isinstance(found, str):
        raise ExchangeError(f"an earlier exchange failed: {found}")
    return found


def _made(group: dist.ProcessGroup, device: torch.device) -> Helper:
    on_gpu = device.type == "cuda"
    own = new_group_beside(group, "nccl" if on_gpu else "gloo", device)
    stream = StreamLane(device) if on_gpu else None
    with nullcontext() if stream is None else stream.on(), kept_tensors():
        words = torch.zeros(2, group.size(), 2, dtype=torch.int64, device=device)
        there = torch.zeros(group.size(), 2, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
    return Helper(own, ThreadLane("bitslab-exchange"), words, there, stream)
