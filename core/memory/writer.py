"""Writing a host buffer whose size is known only at the end."""

from __future__ import annotations

import os
import secrets

import torch

from ..errors import BitslabError
from .host import _NAME, HostBuffer, Pin, _available_bytes


class HostWriter:
    """Appends tensors to memory that becomes a `HostBuffer`, with no second copy at the end.

    Parameters
    ----------
    pin : bool or "lazily"
        As for `HostBuffer.allocate`.
    """

    def __init__(self, *, pin: Pin) -> None:
        self._pin = pin
        self._nbytes = 0
        self._token = secrets.token_hex(8)
        self._pieces: list[torch.Tensor] = []
        self._fd: int | None = None
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create(_NAME + self._token, os.MFD_CLOEXEC)

    def append(self, t: torch.Tensor) -> None:
        """Append the bytes of a CPU tensor.

        Raises
        ------
        BitslabError
            When there is no memory for them.
        """
        data = t.contiguous().reshape(-1).view(torch.uint8)
        if data.numel() > _available_bytes():
            raise BitslabError(
                f"host memory: no room for {data.numel()} bytes more after {self._nbytes}"
            )
        self._nbytes += data.numel()
        if self._fd is None:
            self._pieces.append(data.clone())
            return
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
        if self._fd is None:
            buffer = HostBuffer.allocate(self._nbytes, pin=self._pin)
            if self._pieces:
                torch.cat(self._pieces, out=buffer.tensor)
            return buffer
        try:
            buffer = HostBuffer(self._fd, self._nbytes, self._token, self._pin, owner=True)
        except OSError as error:
            raise BitslabError(f"host memory: {self._nbytes} bytes: {error}") from error
        self._fd = None  # the buffer's from now on
        if self._pin is True:
            buffer.ensure_pinned()
        return buffer

    def discard(self) -> None:
        """Let go of what was written."""
        self._pieces.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        self.discard()
