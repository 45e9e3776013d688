"""What `CompressedTensor` and `CompressedBlob` have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar, cast

import torch

from .container import AnyTensor, write_tensors
from .dtypes import dtype_name
from .engine.codecs import BlobCodec, RowCodec
from .engine.codecs.base import elements
from .engine.files.new_file import PathLike, replacing
from .errors import ArgumentTypeError
from .options import check_path

Kind = TypeVar("Kind", bound="Compressed")


class Compressed(ABC):
    """A compressed tensor: its size, its names, its file."""

    codec: RowCodec | BlobCodec

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Shape of the tensor."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of what is packed, and of what is decoded from it."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of everything that is kept."""

    @abstractmethod
    def _pinned(self: Kind) -> Kind:
        """Return a copy in page-locked host memory."""

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def raw_nbytes(self) -> int:
        """Bytes of the tensor before it was compressed."""
        return elements(self.shape) * self.dtype.itemsize

    @property
    def ratio(self) -> float:
        """`raw_nbytes` over `nbytes`; 1.0 for an empty tensor."""
        return self.raw_nbytes / self.nbytes if self.raw_nbytes else 1.0

    def __len__(self) -> int:
        """Return the length of the first dimension."""
        if not self.shape:
            raise ArgumentTypeError("len(): a 0-d tensor has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        """Name shape, dtype, device, codec and ratio."""
        return (
            f"{type(self).__name__}({list(self.shape)}, {dtype_name(self.dtype)}, {self.device}, "
            f"{self.codec.describe()}, {self.ratio:.2f}x)"
        )

    def pin_memory(self: Kind) -> Kind:
        """Return a copy in page-locked host memory; `self` on a machine without a GPU."""
        if self.device.type != "cpu":
            raise ArgumentTypeError(f"pin_memory(): on {self.device}, only cpu can be page-locked")
        return self._pinned() if torch.cuda.is_available() else self

    def save(self, path: PathLike) -> None:
        """Write the tensor to a file that `load` reads; see `save_file`."""
        check_path(path)
        with replacing(path) as temporary:
            write_tensors(temporary, {"tensor": cast(AnyTensor, self)})
