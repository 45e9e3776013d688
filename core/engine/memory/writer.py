"""Writing a host buffer whose size is known only at the end."""

from __future__ import annotations

import os
import secrets

import torch

from ...dtypes import flat_bytes
from ...errors import BitslabError
from . import host, page_locking
from .host import HostBuffer, Pin

#: Buffers up to this size have no file until another process asks for one, unless a GPU reads them:
#: a process may have 1024 open files by default, and a set of small graphs has more tables.
SMALL_BYTES = 64 << 10


class HostWriter:
    """Appends tensors to memory that becomes a `HostBuffer`, with no second copy at the end.

    Nobody may write to the buffer while it is given to another process for the first time.

    Parameters
    ----------
    pin : bool or "lazily"
        As for `HostBuffer.allocate`.
    """

    def __init__(self, *, pin: Pin) -> None:
        self._pin = pin
        self._nbytes = 0
        self._token = secrets.token_hex(8)
        # Small ones, or all where the system has no memory files.
        self._pieces: list[torch.Tensor] = []
        self._fd: int | None = None
        self._has_files = hasattr(os, "memfd_create")
        # What is page-locked cannot get its file later.
        self._small_bytes = (
            0 if pin is not False and page_locking.registrar.available() else SMALL_BYTES
        )

    def append(self, t: torch.Tensor) -> None:
        """Append the bytes of a CPU tensor.

        Raises
        ------
        BitslabError
            When there is no memory for them.
        """
        data = flat_bytes(t)
        if data.numel() > host.room_for(data.numel()):
            raise BitslabError(
                f"host memory: no room for {data.numel()} bytes more after {self._nbytes}"
            )
        if self._fd is None and self._has_files:
            if self._nbytes + data.numel() > self._small_bytes:
                self._begin_file()
        if self._fd is None:
            self._pieces.append(data.clone())
        else:
            self._write(data)
        self._nbytes += data.numel()

    def _begin_file(self) -> None:
        """Go on in a file, with what was appended so far."""
        try:
            self._fd = host.make_file(self._token, 0)
        except OSError as error:
            raise BitslabError(f"host memory: no file for it: {error}") from error
        for piece in self._pieces:
            self._write(piece)
        self._pieces.clear()

    def _write(self, data: torch.Tensor) -> None:
        assert self._fd is not None
        left = memoryview(data.numpy().data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            raise BitslabError(
                f"host memory: no room after {self._nbytes} bytes: {error}"
            ) from error

    def finish(self) -> HostBuffer:
        """Return the buffer; the writer is used up."""
        try:
            buffer = HostBuffer(self._fd, self._nbytes, self._token, self._pin, owner=True)
        except OSError as error:
            raise BitslabError(f"host memory: {self._nbytes} bytes: {error}") from error
        if self._pieces:
            torch.cat(self._pieces, out=buffer.tensor)
            self._pieces.clear()
        self._fd = None  # the buffer's from now on
        if self._pin is True:
            buffer.ensure_pinned()
        return buffer

    def discard(self) -> None:
        """Release what was written."""
        self._pieces.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        self.discard()
