"""CompressedBlob: what `compress` returns for a codec of whole tensors."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from .compressed_base import Compressed
from .engine.codecs import Blob, BlobCodec
from .engine.codecs.base import check_out_argument
from .errors import ArgumentTypeError


class CompressedBlob(Compressed):
    """A tensor in one buffer, which is decoded as a whole.

    Made by `compress` and `load` with a codec of whole tensors, such as ``"zvc"``. It has the
    names of a `CompressedTensor`, but no items: `decompress` it first.

    Parameters
    ----------
    codec : BlobCodec
        What encoded the tensor.
    blob : Blob
        The buffer, with the shape and the dtype of the tensor.

    Attributes
    ----------
    codec : BlobCodec
        What encoded the tensor.
    blob : Blob
        The buffer.

    Raises
    ------
    ArgumentTypeError
        When `codec` does not take tensors of the blob's dtype.

    Notes
    -----
    Immutable; threads may share it.

    Examples
    --------
    >>> import torch, bitslab
    >>> activation = torch.randn(256, 512).relu()
    >>> cb = bitslab.compress(activation, "zvc")
    >>> cb.ratio > 1.8
    True
    >>> torch.equal(cb.decompress(), activation)
    True
    """

    def __init__(self, codec: BlobCodec, blob: Blob) -> None:
        if not codec.takes(blob.dtype):
            raise ArgumentTypeError(f"blob: codec {codec.name!r} does not take {blob.dtype}")
        self.codec: BlobCodec = codec
        self.blob = blob

    # What it is

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return torch.Size(self.blob.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return self.blob.dtype

    @property
    def device(self) -> torch.device:
        """Device of the buffer, and of what is decoded from it."""
        return self.blob.device

    @property
    def nbytes(self) -> int:
        """Bytes of everything: the buffer, its header included, and what the codec learnt."""
        return self.blob.data.shape[0] + self.codec.profile_bytes

    def __bool__(self) -> bool:
        """Return True, also for an empty tensor: it is there."""
        return True

    # Decoding

    def __getitem__(self, index: Any) -> NoReturn:
        """Refuse any index.

        Raises
        ------
        ArgumentTypeError
            Always: items cannot be decoded alone.
        """
        raise ArgumentTypeError(
            f"index: codec {self.codec.name!r} packs whole tensors, no item can be decoded alone; "
            'index decompress(), or compress with a codec of rows such as "ibp"'
        )

    def decompress(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Decode the tensor.

        Parameters
        ----------
        out : torch.Tensor, optional
            Tensor of the same shape and dtype to write to, on `device`, or on a GPU when the buffer
            is in host memory: then it crosses the link packed.

        Returns
        -------
        torch.Tensor
            `out`, or a new tensor on `device`; equal to what was compressed, bit for bit, unless
            the codec has an ``error_bound``.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            When `out` has another shape, dtype or device, or shares memory with the buffer or with
            itself.
        CorruptedDataError
            When the buffer is damaged; `out` is untouched on the CPU.
        """
        blob = self.blob
        if isinstance(out, torch.Tensor) and out.is_cuda and self.device.type == "cpu":
            check_out_argument(out, blob.shape, blob.dtype, out.device, [blob.data])
            blob = blob.to(out.device)
        return self.codec.decode(blob, out)

    # Moving and keeping

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> CompressedBlob:
        """Return the tensor with its buffer on `device`; no copy when it is there already.

        Parameters
        ----------
        device : torch.device or str
            CPU or CUDA device.
        non_blocking : bool
            Do not wait for a copy from page-locked memory.
        """
        return CompressedBlob(self.codec, self.blob.to(device, non_blocking=non_blocking))

    def _pinned(self) -> CompressedBlob:
        return CompressedBlob(self.codec, self.blob.pin_memory())
