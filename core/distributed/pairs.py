"""Messages between pairs of ranks over gloo, from the thread that calls.

A collective of gloo waits for a thread of its own, and a receiver that names its buffer only then
has the sender wait for it. Here receives are posted before there is anything to send, and are
longer than what may come: gloo takes what is sent and leaves the rest of the buffer as it was.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

#: Tags of first messages, of those that are too long to follow a descriptor, and of terms. Users'
#: own messages have others.
FIRST, LONG, TERMS = 0x626C0001, 0x626C0002, 0x626C0003


class Pairs:
    """What one rank of a group and each of some others send each other under one tag.

    Parameters
    ----------
    group : ProcessGroup
        With gloo.
    buffers : mapping of int to torch.Tensor
        uint8 on the CPU, by rank: where what it sends goes, as long as that or longer. Nothing else
        is to touch them until `cross` returned.
    tag : int
        Of the messages; those of a pair arrive in the order in which they were sent.
    """

    def __init__(
        self, group: dist.ProcessGroup, buffers: Mapping[int, torch.Tensor], tag: int
    ) -> None:
        self._group, self._tag = group, tag
        self._coming = [group.recv([into], rank, tag) for rank, into in buffers.items()]

    def cross(self, sent: Mapping[int, torch.Tensor]) -> None:
        """Send uint8 to ranks, and wait for that and for all that comes.

        Raises
        ------
        RuntimeError
            When a rank ended, or nothing comes within the group's timeout.
        """
        going = [self._group.send([data], rank, self._tag) for rank, data in sent.items()]
        for work in self._coming:
            work.wait()
        for work in going:
            work.wait()
