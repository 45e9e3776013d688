"""How bytes cross between a device and host memory: by threads on the CPU, by address on a GPU."""

from __future__ import annotations

import torch

from ..engine.codecs.blob import FlatCodec
from ..engine.kernels.cpu.blob_copy import copy_blob
from ..engine.tasks import ThreadTask
from ..engine.transfer import Mark, StreamLane, ThreadLane, wait_on_host
from .copies import StoredCopy
from .host_room import HostMemory
from .moments import Moment
from .staging import copy_blob_on_gpu
from .traffic import encode, used_bytes


def send(
    lane: StreamLane | ThreadLane,
    flat: torch.Tensor,
    host: HostMemory,
    nbytes: int,
    after: Mark | None,
) -> Mark:
    """Copy a tensor, whose elements lie one behind the other, to the host; return when it is there.

    Parameters
    ----------
    lane : StreamLane or ThreadLane
        Does it.
    flat : torch.Tensor
        The tensor.
    host : torch.Tensor or HostPiece
        As many bytes; a tensor on the CPU, page-locked memory on a GPU.
    nbytes : int
        The bytes.
    after : Mark or None
        What the stream waits for.
    """
    if isinstance(lane, ThreadLane):
        return lane.run(copy_on_host, flat, host)
    return lane.copy(host.data_ptr(), flat.data_ptr(), nbytes, after=after)


def bring(
    lane: StreamLane | ThreadLane,
    out: torch.Tensor,
    host: HostMemory,
    stored: Mark,
    expected_bytes: int | None,
    after: Mark | None,
) -> Mark:
    """Fill a tensor of a device from the host; return when it is filled.

    Parameters
    ----------
    lane, host, after
        As for `send`.
    out : torch.Tensor
        The tensor, whose elements lie one behind the other.
    stored : Mark
        When `host` is filled.
    expected_bytes : int or None
        None for all bytes of `out`; else `host` is a blob of unknown size, and these are what such
        blobs needed of late.
    """
    if isinstance(lane, ThreadLane):
        return lane.run(fill_on_host, out, host, stored)
    if isinstance(stored, ThreadTask):  # it was read from a disk
        stored.result()
        return lane.copy(out.data_ptr(), host.data_ptr(), out.nbytes, after=after)
    if expected_bytes is None:
        to, at = out.data_ptr(), host.data_ptr()
        return lane.copy(to, at, out.nbytes, after=after, then_after=stored)
    assert not isinstance(after, ThreadTask)  # of the stream that computes
    lane.wait(stored)
    return lane.queue_on(copy_blob_on_gpu, host, out, expected_bytes, after=after)


def came_whole(copy: StoredCopy, lane: StreamLane | ThreadLane) -> bool:
    """Return whether all of a copy was fetched whose size was not known; else it is forgotten.

    The host, which is ahead of the device, waits for its size.
    """
    copy.is_fetched_short = False
    stored, host, fetched = copy.stored, copy.host, copy.fetched
    assert stored is not None and host is not None and fetched is not None
    wait_on_host(stored)
    if used_bytes(host) <= fetched.nbytes:
        return True
    if isinstance(lane, StreamLane):
        lane.keep(fetched)
    copy.fetched = copy.arrived = None
    return False


def copy_on_host(flat: torch.Tensor, host: torch.Tensor) -> None:
    """Copy a tensor ``[n]`` to host memory, in a thread."""
    host.copy_(flat.view(torch.uint8))


def fill_on_host(out: torch.Tensor, host: torch.Tensor, stored: ThreadTask[object]) -> None:
    """Copy back to uint8 ``[n]``, in a thread."""
    stored.result()
    nbytes = out.shape[0]
    out.copy_(host if host.shape[0] == nbytes else host[:nbytes])


class HostEncoder:
    """Encodes and copies, in the only thread of the lane that sends on a CPU."""

    def __init__(self) -> None:
        self._scratch: torch.Tensor | None = None

    def encode(
        self, swap: FlatCodec, flat: torch.Tensor, host: torch.Tensor, timing: list[Moment] | None
    ) -> None:
        """Encode a tensor ``[n]`` to host memory: what does not fit is left out."""
        most = swap.max_bytes
        data = self._scratch
        if data is None or data.shape[0] < most:
            self._scratch = data = None
            self._scratch = data = torch.empty(most, dtype=torch.uint8)
        encode(swap, flat, data, None, timing)
        copy_blob(data, host)
