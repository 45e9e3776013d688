"""The contract of a codec of whole tensors, and what its `encode` returns.

Swapped activations, files and collectives use them: one tensor in, one buffer out, and no random
access. The compatibility law of `base` holds here too.

Every buffer begins with a header of `HEADER_BYTES`, little-endian:

====== ====== ==========================================================
byte   type   content
====== ====== ==========================================================
0      int64  bytes that are used, the header included
8      int64  elements of the tensor
16     int32  number that the codec's class gave its form (`BlobCodec.form`)
20     int32  bytes of an element
24     8      free for the codec, else zero
====== ====== ==========================================================

The bytes that are used are written by the kernel that encodes: nobody waits for them until someone
asks for the size, and they travel with the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...devices import checked_device
from ...errors import ArgumentError, ArgumentTypeError, CorruptedDataError
from ..kernels.blob_format import ALIGN_BYTES as ALIGN_BYTES
from ..kernels.blob_format import HEADER_BYTES as HEADER_BYTES
from .base import (
    check_integer,
    check_out_argument,
    check_tensor_argument,
    elements,
    share_memory,
)


@dataclass(frozen=True, eq=False)
class Blob:
    """A tensor encoded by a `BlobCodec`, which alone can read it.

    Parameters
    ----------
    data : torch.Tensor
        uint8 ``[n]``, contiguous, at a multiple of `ALIGN_BYTES`: the header, what the codec wrote,
        and maybe unused bytes after it.
    shape : torch.Size
        Shape of the tensor.
    dtype : torch.dtype
        Its dtype.
    """

    data: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Device of the buffer."""
        return self.data.device

    @property
    def used_bytes(self) -> torch.Tensor:
        """int64 ``[]`` on `device`, a view of the header: bytes that are used, without waiting."""
        return self.data[:8].view(torch.int64)[0]

    @property
    def nbytes(self) -> int:
        """Bytes that are used; waits for the device.

        Raises
        ------
        CorruptedDataError
            When the header says more bytes than there are, or fewer than a header.
        """
        used = int(self.used_bytes)
        if not HEADER_BYTES <= used <= self.data.shape[0]:
            raise CorruptedDataError(
                f"blob: its header says {used} bytes, there are {self.data.shape[0]}"
            )
        return used

    @property
    def raw_nbytes(self) -> int:
        """Bytes of the tensor before it was encoded."""
        return elements(self.shape) * self.dtype.itemsize

    def trimmed(self) -> Blob:
        """Return a copy whose buffer has the used bytes and no more; waits for the device."""
        return Blob(self.data[: self.nbytes].clone(), self.shape, self.dtype)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Blob:
        """Return the blob on `device`, its whole buffer; no copy when it is there already."""
        data = self.data.to(checked_device(device), non_blocking=non_blocking)
        return Blob(data, self.shape, self.dtype)

    def pin_memory(self) -> Blob:
        """Return a copy in page-locked host memory."""
        return Blob(self.data.pin_memory(), self.shape, self.dtype)


class BlobCodec(ABC):
    """Encodes one whole tensor of any shape and dtype into one buffer.

    A codec is immutable: fitting makes a new one. It has no global state, so threads may share it.

    The law of a lossless codec: ``decode(encode(t))`` equals `t` bit for bit, NaN payloads, signed
    zeros and subnormals included, for every tensor whose dtype it takes, whether or not what it was
    fitted on resembles it.

    The law of a lossy codec: every finite element comes back as a finite one of the same dtype that
    is no further from it than `bounds` says. NaN and infinities come back bit for bit. Systems that
    promise every bit refuse a codec that has an `error_bound`.

    Neither ever uses more than `max_encoded_bytes`. `encode` waits for no device: the size is a
    number there until someone asks for it (`Blob.nbytes`), and both methods launch on torch's
    current stream and are safe inside CUDA-graph capture once warmed up.
    """

    name: ClassVar[str]
    #: Number of the form in the header; one for each layout of the bytes, for ever. A codec with
    #: several layouts has further numbers, which no other codec takes.
    form: ClassVar[int]
    #: Types of the devices on which it encodes and decodes.
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)
    #: Whether `fit` reads values of the sample, for which it waits where that is on a GPU.
    learns: ClassVar[bool] = False
    #: How far a decoded element is from the given one at most, as a formula; None: not at all.
    error_bound: ClassVar[str | None] = None

    #: Class method ``fit(sample, **options)``: learn from a tensor of the kind to be encoded, on
    #: any device. Those that learn nothing only keep their options.
    fit: ClassVar[Callable[..., BlobCodec]]

    @property
    def profile_bytes(self) -> int:
        """Bytes of what the codec learnt, which must be kept along with its blobs."""
        return 0

    @abstractmethod
    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether tensors of a dtype can be encoded."""

    @abstractmethod
    def max_encoded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the most bytes that a tensor can take, its header included."""

    @abstractmethod
    def encode(
        self, t: torch.Tensor, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> Blob:
        """Encode a tensor on its own device, without waiting for it.

        Parameters
        ----------
        t : torch.Tensor
            Dense, of any shape (empty and 0-d ones too), any strides, and a dtype that it `takes`.
        out : torch.Tensor, optional
            uint8 ``[n]`` on the same device, contiguous, at a multiple of `ALIGN_BYTES`, of
            `max_encoded_bytes` or more: the buffer to write to. It shares no memory with `t`.
        sm_budget : int, optional
            On a GPU no more blocks are started than this many multiprocessors hold; all when left
            out.

        Returns
        -------
        Blob
            Its elements in row-major order.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            When `t` or `out` is not as above; nothing is written.
        """

    @abstractmethod
    def decode(
        self, blob: Blob, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> torch.Tensor:
        """Decode a blob on its own device, without waiting for it.

        Parameters
        ----------
        blob : Blob
            What `encode` of an equal codec returned, on any device that it takes.
        out : torch.Tensor, optional
            Tensor of the blob's shape and dtype to write to, with any strides that do not overlap.
        sm_budget : int, optional
            As for `encode`.

        Returns
        -------
        torch.Tensor
            `out`, or a new tensor in row-major order.

        Raises
        ------
        CorruptedDataError
            When the blob is damaged; on a GPU by a later call, or by
            `bitslab.raise_pending_errors`. Damage that is not noticed gives wrong values of this
            call alone: no byte outside the buffer is read, none outside `out` written.
        ArgumentError, ArgumentTypeError
            When `blob` or `out` is not as above.
        """

    def for_flat(self, elements: int, dtype: torch.dtype, device: torch.device) -> FlatCodec:
        """Return what encodes and decodes tensors of one size, with arguments that are sound.

        For systems that swap tensors of one size again and again, in memory that they have taken
        for it. The bytes are those of `encode` of a tensor ``[elements]``, whose limits hold.

        Parameters
        ----------
        elements : int
            Elements of a tensor.
        dtype : torch.dtype
            One that it `takes`.
        device : torch.device
            One that it works on.

        Raises
        ------
        ArgumentError
            When it is too large, as `max_encoded_bytes` says.
        """
        return FlatCodec(self, elements, dtype)

    def prepare(self, device: torch.device) -> None:  # noqa: B027 - most need nothing
        """Make what it needs on a device, which the first call there does else.

        May wait for the device; inside `bitslab.engine.kernels.uploads.in_stream_order` it is there
        when torch's current stream has come so far.
        """

    def bounds(self, t: torch.Tensor) -> torch.Tensor:
        """Return how far each element may be from its decoded one; see `error_bound`.

        Returns
        -------
        torch.Tensor
            float64 of the shape of `t`, on its device; 0 everywhere for a lossless codec.
        """
        check_tensor_argument("t", t)
        return torch.zeros(t.shape, dtype=torch.float64, device=t.device)

    @abstractmethod
    def to_config(self) -> dict[str, Any]:
        """Return everything needed to build the codec again, as JSON-able values."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> BlobCodec:
        """Build the codec that `to_config` described."""

    def describe(self) -> str:
        """Return the codec and its settings in a few words, for tables."""
        return self.name

    def __eq__(self, other: object) -> bool:
        """Codecs are equal when they are of one class and have one configuration."""
        return type(self) is type(other) and self.to_config() == other.to_config()

    def __hash__(self) -> int:
        """Hash by what is cheap and stable."""
        return hash(self.name)

    def __repr__(self) -> str:
        """Name the codec and its settings."""
        return f"<{type(self).__name__} {self.describe()}>"


class FlatCodec:
    """A codec for tensors of one size and dtype, in any shape; `BlobCodec.for_flat` returns it.

    Arguments are not checked: that takes as long as a launch. What this one does by the codec's own
    methods, which check all the same, those of the built-in codecs do with less.

    Parameters
    ----------
    codec : BlobCodec
        The codec.
    elements : int
        Elements of a tensor.
    dtype : torch.dtype
        Their dtype.

    Attributes
    ----------
    max_bytes : int
        Most bytes of a buffer.
    """

    def __init__(self, codec: BlobCodec, elements: int, dtype: torch.dtype) -> None:
        self.codec, self.elements, self.dtype = codec, elements, dtype
        self._shape = torch.Size([elements])
        self.max_bytes = codec.max_encoded_bytes(self._shape, dtype)

    def encode(self, flat: torch.Tensor, data: torch.Tensor, sm_budget: int | None = None) -> None:
        """Encode a tensor on its own device, without waiting for it.

        Parameters
        ----------
        flat : torch.Tensor
            Of `elements` in any shape, contiguous, without a graph; neither a conjugate nor a
            negative.
        data : torch.Tensor
            uint8 of `max_bytes` or more, contiguous, at a multiple of ALIGN_BYTES, which shares no
            memory with it.
        sm_budget : int, optional
            As for `BlobCodec.encode`.
        """
        self.codec.encode(flat.view(-1), out=data, sm_budget=sm_budget)

    def decode(self, data: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
        """Return the tensor of a buffer, on its device, without waiting for that.

        Parameters
        ----------
        data : torch.Tensor
            uint8, as `encode` has filled it.
        shape : torch.Size, optional
            What it is to have, of `elements`; ``[elements]`` when left out.

        Returns
        -------
        torch.Tensor
            A new one, contiguous.

        Raises
        ------
        CorruptedDataError
            As `BlobCodec.decode` does.
        """
        found = self.codec.decode(Blob(data, self._shape, self.dtype))
        return found if shape is None else found.view(shape)


def bytes_in_order(t: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, uint8 ``[nbytes]``: a view, and nothing is checked.

    A dimension of one element may have any stride, with which torch refuses to view another dtype.
    """
    return (t if t.dim() == 1 else t.as_strided((t.numel(),), (1,))).view(torch.uint8)


def check_encode_arguments(
    codec: BlobCodec, t: torch.Tensor, out: torch.Tensor | None, sm_budget: int | None = None
) -> torch.Tensor:
    """Return the buffer to encode into, `out` or a new one, or refuse the arguments."""
    check_tensor_argument("t", t)
    _check_budget(sm_budget)
    if not codec.takes(t.dtype):
        raise ArgumentTypeError(f"t: dtype {t.dtype} is not one that codec {codec.name!r} takes")
    most = codec.max_encoded_bytes(t.shape, t.dtype)
    if out is None:
        return torch.empty(most, dtype=torch.uint8, device=t.device)
    check_tensor_argument("out", out)
    if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous():
        raise ArgumentTypeError(
            f"out: {list(out.shape)} {out.dtype}, expected contiguous torch.uint8, one dimension"
        )
    if out.device != t.device:
        raise ArgumentTypeError(f"out: on {out.device}, expected {t.device}, where t is")
    if out.shape[0] < most:
        raise ArgumentError(f"out: {out.shape[0]} bytes, a tensor like t may take {most}")
    if out.data_ptr() % ALIGN_BYTES:
        raise ArgumentError(f"out: begins at no multiple of {ALIGN_BYTES} bytes")
    if share_memory(out, t):
        raise ArgumentError("out: shares memory with t")
    return out


def _check_budget(sm_budget: int | None) -> None:
    if sm_budget is not None:
        check_integer("sm_budget", sm_budget, range(1, 1 << 31))


def check_decode_arguments(
    codec: BlobCodec, blob: Blob, out: torch.Tensor | None, sm_budget: int | None = None
) -> torch.Tensor:
    """Return the tensor to decode into, `out` or a new one, or refuse the arguments."""
    if not isinstance(blob, Blob):
        raise ArgumentTypeError(f"blob: expected a Blob, got {type(blob).__name__}")
    _check_budget(sm_budget)
    data = blob.data
    check_tensor_argument("blob: data", data)
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise ArgumentTypeError(
            f"blob: data is {list(data.shape)} {data.dtype}, expected a contiguous torch.uint8 of "
            "one dimension"
        )
    if not codec.takes(blob.dtype):
        raise ArgumentTypeError(f"blob: codec {codec.name!r} does not take {blob.dtype}")
    if data.shape[0] < HEADER_BYTES:
        raise CorruptedDataError(f"blob: {data.shape[0]} bytes, a header takes {HEADER_BYTES}")
    if data.data_ptr() % ALIGN_BYTES:
        raise ArgumentError(f"blob: data begins at no multiple of {ALIGN_BYTES} bytes")
    if out is None:
        return torch.empty(blob.shape, dtype=blob.dtype, device=data.device)
    check_out_argument(out, blob.shape, blob.dtype, data.device, [data])
    return out
