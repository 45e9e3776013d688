"""The contract of a file that holds bytes of tensors at offsets, and the errors of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch

from ...errors import BitslabError

#: Offsets in a file, and memory that is written with no copy, are multiples of this.
ALIGN_BYTES = 4096


#: Who makes the calls of a file: this package, or kvikio.
FileKind = Literal["posix", "kvikio"]


class DiskError(BitslabError):
    """A folder or file of the disk tier cannot be used; the message names it, and the cause."""


class TensorFile(Protocol):
    """A file of one process, whose ranges threads write and read, each range one at a time.

    Attributes
    ----------
    path : str
        Its folder.
    nbytes : int
        What it takes of its file system.
    direct : bool
        Whether bytes go to the device itself, and not to the system's page cache.
    """

    path: str
    nbytes: int
    direct: bool

    @property
    def kind(self) -> FileKind:
        """Who makes the calls."""

    def grow(self, nbytes: int) -> None:
        """Take more of the file system, now; `nbytes` is the new size.

        Raises
        ------
        DiskError
            When the file system has not as much to spare; nothing has changed then.
        """

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Write uint8 ``[n]`` of host memory from a multiple of ALIGN_BYTES on.

        What is behind it, up to the next multiple, is undefined then.

        Raises
        ------
        DiskError
            When not all of it is written.
        """

    def read(self, offset: int, out: torch.Tensor) -> None:
        """Read to uint8 ``[n]`` of host memory from a multiple of ALIGN_BYTES on.

        Raises
        ------
        DiskError
            When not all of it is read.
        """

    def close(self) -> None:
        """Give the space back, once nobody writes or reads; again does nothing."""


#: Makes the file in a folder.
OpenFile = Callable[[str], TensorFile]
