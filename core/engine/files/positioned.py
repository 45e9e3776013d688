"""Reading and writing at a position of a file, however few bytes the system moves in one call."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import torch

from ...errors import BitslabError


def read_into(fd: int, offset: int, buffers: Sequence[memoryview], *, align_bytes: int = 1) -> int:
    """Read from `offset` on into one buffer after the other.

    Parameters
    ----------
    fd : int
        Descriptor of the file.
    offset : int
        Of the first byte.
    buffers : sequence of memoryview
        Bytes to fill.
    align_bytes : int
        What a call has to begin at a multiple of: files that bypass the page cache ask for it. What
        a call has read beyond the last multiple is read again.

    Returns
    -------
    int
        Bytes read; fewer than `buffers` have where the file ends.

    Raises
    ------
    OSError
        When the system cannot read them.
    """
    n_bytes, done = sum(map(len, buffers)), 0
    while done < n_bytes:
        got = os.preadv(fd, _after(buffers, done), offset + done)
        whole = got if done + got >= n_bytes else got - got % align_bytes
        if whole == 0:
            return done + got
        done += whole
    return done


def write_from(
    fd: int, offset: int, buffers: Sequence[memoryview], *, align_bytes: int = 1
) -> None:
    """Write one buffer after the other from `offset` on; parameters as for `read_into`.

    Raises
    ------
    OSError
        When the system cannot write them, or takes no more bytes without saying why.
    """
    n_bytes, done = sum(map(len, buffers)), 0
    while done < n_bytes:
        put = os.pwritev(fd, _after(buffers, done), offset + done)
        whole = put if done + put >= n_bytes else put - put % align_bytes
        if whole == 0:
            raise OSError(errno.EIO, f"{put} of {n_bytes - done} bytes were written")
        done += whole


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return the buffers without their first bytes."""
    left = []
    for buffer in buffers:
        if done < len(buffer):
            left.append(buffer[done:])
        done = max(0, done - len(buffer))
    return left


def read_at(fd: int, offset: int, out: torch.Tensor) -> None:
    """Read bytes of a file from `offset` on to uint8 `out` on the CPU.

    Raises
    ------
    OSError
        When the system cannot read them.
    BitslabError
        When the file ends before.
    """
    done = read_into(fd, offset, [out.numpy().data])
    if done < out.shape[0]:
        raise BitslabError(f"file: ends at byte {offset + done}, expected {offset + out.shape[0]}")


def write_at(fd: int, offset: int, data: torch.Tensor) -> None:
    """Write uint8 `data` on the CPU to a file from `offset` on.

    Raises
    ------
    OSError
        When the system cannot write them.
    """
    write_from(fd, offset, [data.numpy().data])
