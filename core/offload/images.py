"""The memory that holds a unit's packed image: host memory, a file, or a GPU."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

import numpy as np
import torch

from ..engine.files.file_locks import hold, release
from ..engine.files.positioned import read_into
from ..engine.memory.arena import host_arena
from ..errors import BitslabError


class Image(Protocol):
    """An image, uint8 ``[nbytes]``."""

    nbytes: int

    @property
    def tier(self) -> str:
        """Where it lies: "host", "disk" or "device"."""
        ...

    def tensor(self) -> torch.Tensor:
        """Return its bytes, uint8 ``[nbytes]``, on the CPU or a GPU.

        Raises
        ------
        BitslabError
            When they cannot be had any more.
        """
        ...

    def close(self) -> None:
        """Release the memory; again does nothing."""
        ...


class HostImage:
    """An image in host memory, page-locked where there is a GPU.

    Parameters
    ----------
    nbytes : int
        Its size.

    Raises
    ------
    BitslabError
        When the memory cannot be had.
    """

    tier = "host"

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # A buffer of its own: what is kept raw may be used when the image is closed.
        self._buffer = host_arena().buffer(nbytes)

    @property
    def pinned(self) -> bool:
        """Whether a GPU may read it by itself."""
        return self._buffer.pinned

    def tensor(self) -> torch.Tensor:
        """Return its bytes on the CPU."""
        return self._buffer.tensor

    def close(self) -> None:
        """Give the memory up."""
        self._buffer.close()


class DeviceImage:
    """An image in the memory of a GPU.

    Parameters
    ----------
    data : torch.Tensor
        uint8 ``[nbytes]`` on the GPU.
    """

    tier = "device"

    def __init__(self, data: torch.Tensor) -> None:
        self.nbytes = data.numel()
        self._data: torch.Tensor | None = data

    def tensor(self) -> torch.Tensor:
        """Return its bytes on the GPU."""
        if self._data is None:
            raise BitslabError("these packed weights are closed")
        return self._data

    def close(self) -> None:
        """Give the memory up."""
        self._data = None


class MappedFile:
    """A file of images, memory-mapped, that notices when it is removed or cut.

    While it is open, no other model's weights can be written to its path. Reading a mapped file
    that was cut ends the process, so its size is looked up before.

    Parameters
    ----------
    path : str
        The file.
    in_use : bool
        False while the file is still written, and locked by its writer, until `renamed`.

    Raises
    ------
    OSError
        When it cannot be read.
    """

    def __init__(self, path: str, *, in_use: bool = True) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close_fd = weakref.finalize(self, release, self._fd, os.getpid())
        if in_use:
            try:
                hold(self._fd, path)
            except BaseException:
                self._close_fd()
                raise
        self.nbytes = os.fstat(self._fd).st_size
        self._map: torch.Tensor | None = None

    def renamed(self, path: str) -> None:
        """Lock the file as one in use: it is complete and has another name now."""
        hold(self._fd, path)
        self.path = path
        self.nbytes = os.fstat(self._fd).st_size
        self._map = None

    def check(self) -> None:
        """Raise unless the file is still there, whole.

        Raises
        ------
        BitslabError
            When it was removed, cut, or closed.
        """
        if not self._close_fd.alive:
            raise BitslabError(f"{self.path}: these packed weights are closed")
        state = os.fstat(self._fd)
        if state.st_nlink == 0:
            raise BitslabError(
                f"{self.path}: the file with the packed weights of this model was removed while "
                "the model uses it; put it back or load the model again"
            )
        if state.st_size < self.nbytes:
            raise BitslabError(
                f"{self.path}: the file with the packed weights of this model was cut from "
                f"{self.nbytes} to {state.st_size} bytes while the model uses it"
            )

    def mapped(self) -> torch.Tensor:
        """Return the file's bytes: uint8 ``[nbytes]`` on the CPU, private to this process."""
        self.check()
        if self._map is None:
            # By its descriptor, because another file may have its name by now. Copy on write,
            # because torch warns of arrays that cannot be written to.
            with os.fdopen(os.dup(self._fd), "rb") as file, torch.inference_mode(False):
                self._map = torch.from_numpy(np.memmap(file, np.uint8, mode="c"))
        return self._map

    def read(self, offset: int, out: torch.Tensor) -> None:
        """Read bytes from `offset` on to uint8 `out` on the CPU, not through the map.

        Raises
        ------
        BitslabError
            As `check`, or when the system cannot read them.
        """
        self.check()
        try:
            done = read_into(self._fd, offset, [out.numpy().data])
        except OSError as error:
            raise BitslabError(f"{self.path}: cannot be read: {error}") from error
        if done < out.shape[0]:
            raise BitslabError(f"{self.path}: ends at byte {offset + done}, it was cut")

    def close(self) -> None:
        """Unmap and unlock the file; again does nothing."""
        self._map = None
        self._close_fd()


class FileImage:
    """An image in a file.

    Parameters
    ----------
    file : MappedFile
        The file, which may hold several images.
    offset, nbytes : int
        Where it lies there.
    """

    tier = "disk"

    def __init__(self, file: MappedFile, offset: int, nbytes: int) -> None:
        self.file = file
        self.offset = offset
        self.nbytes = nbytes

    def tensor(self) -> torch.Tensor:
        """Return its bytes on the CPU, from the map."""
        self.file.check()
        return self.file.mapped()[self.offset : self.offset + self.nbytes]

    def read(self, out: torch.Tensor) -> None:
        """Read it to uint8 ``[nbytes]`` on the CPU."""
        self.file.read(self.offset, out)

    def close(self) -> None:
        """Unmap and unlock the file, of all its images."""
        self.file.close()
