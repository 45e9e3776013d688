"""The codecs of rows of which equal ones are kept once."""

from __future__ import annotations

import math
import numbers
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ....dtypes import dense
from ....errors import ArgumentError, ArgumentTypeError, CorruptedDataError
from ...kernels.blob_format import HEADER_BYTES
from ...kernels.cuda import kernels_on
from ...kernels.vector_chunks import VectorOptions
from ...kernels.vector_format import (
    KINDS,
    VLZ_BOUNDED_FORM,
    VLZ_FORM,
    WINDOWS,
    raw_body_bytes,
    row_elements,
)
from ..base import bits_in_order, check_tensor_argument, elements
from ..blob import Blob, BlobCodec, check_decode_arguments, check_encode_arguments
from .decoding import decode_body
from .encoding import encode_body, finite_range


class _VectorCodec(BlobCodec):
    """Whole tensors ``[N, ...]`` as N rows; equal rows are kept once.

    Notes
    -----
    On a GPU a tensor to be encoded has fewer than 2**30 real numbers, one to be decoded 2**32.
    """

    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def __init__(self, window: int | None = None, *, references: bool = True) -> None:
        if window is not None and window not in WINDOWS or isinstance(window, bool):
            accepted = ", ".join(map(str, WINDOWS))
            raise ArgumentError(f"window: {window!r:.60}, accepted are {accepted} and None")
        if not isinstance(references, bool):
            raise ArgumentTypeError(f"references: expected a bool, got {references!r:.60}")
        self.window = window
        self.references = references

    @abstractmethod
    def bound_of(self, t: torch.Tensor) -> float:
        """Return how far a decoded element of a tensor may be from the given one."""

    @abstractmethod
    def options(self) -> VectorOptions:
        """Return how kernels encode a tensor."""

    def max_encoded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of the raw tensor and of both headers."""
        return HEADER_BYTES + raw_body_bytes(elements(shape) * dtype.itemsize)

    def encode(
        self, t: torch.Tensor, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> Blob:
        """Encode a tensor on its own device; see `BlobCodec.encode`."""
        data = check_encode_arguments(self, t, out, sm_budget)
        if t.device.type == "cuda":
            form = self._header(0, t)[2]
            kernels = kernels_on(t.device)
            kernels.encode_vector(dense(t), self.options(), form, data, sm_budget)
            return Blob(data, t.shape, t.dtype)
        target = data.numpy()
        body = encode_body(
            t, self.bound_of(t), self.window, target[HEADER_BYTES:], references=self.references
        )
        target[:HEADER_BYTES].view(np.int64)[:] = self._header(HEADER_BYTES + body, t)
        return Blob(data, t.shape, t.dtype)

    def decode(
        self, blob: Blob, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> torch.Tensor:
        """Decode a blob on its own device; see `BlobCodec.decode`."""
        result = check_decode_arguments(self, blob, out, sm_budget)
        in_order = bits_in_order(result)
        target = result if in_order else torch.empty_like(result, memory_format=_ROWS)
        if blob.device.type == "cuda":
            form, bounded = self._header(0, result)[2], [self.error_bound is not None]
            kernels = kernels_on(blob.device)
            kernels.decode_vectors([blob.data], [target], bounded, form, sm_budget)
            return result if in_order else result.copy_(target)
        header = blob.data[:HEADER_BYTES].view(torch.int64).tolist()
        if tuple(header[1:]) != self._header(0, result)[1:]:
            raise CorruptedDataError(f"blob: its {self.name} form is damaged, or of another tensor")
        body = blob.data[HEADER_BYTES : blob.nbytes].numpy()
        decode_body(body, target, bounded=self.error_bound is not None)
        return result if in_order else result.copy_(target)

    def _header(self, used: int, t: torch.Tensor) -> tuple[int, int, int, int]:
        row = row_elements(t.shape)[1]
        return used, t.numel(), self.form | t.element_size() << 32, row

    def describe(self) -> str:
        """Return the codec and its window: ``vlz``, ``vlz 255``."""
        return self.name if self.window is None else f"{self.name} {self.window}"

    def to_config(self) -> dict[str, Any]:
        """Return the window, and whether equal rows are looked for."""
        return {"window": self.window, "references": self.references}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> _VectorCodec:
        """Build the codec that `to_config` described.

        Raises
        ------
        CorruptedDataError
            When the configuration is damaged.
        """
        try:
            return cls(**config)
        except (TypeError, ArgumentError) as error:
            raise CorruptedDataError(f"{cls.name}: configuration {config!r:.60}: {error}") from None


class VectorLzCodec(_VectorCodec):
    """Encodes whole tensors of rows losslessly: rows that repeat are kept once.

    The tensor is ``[N, ...]``; a row is what stands at one index of the first dimension (below two
    dimensions an element). A row that equals an earlier one is a reference to it. Of the others the
    byte with sign and exponent gets a Huffman code where that is shorter. A tensor that would not
    shrink is kept raw. See `bitslab.engine.kernels.vector_format` for the bytes.

    Parameters
    ----------
    window : int, optional
        Rows that a reference may reach back: 32, 64, 128 or 255; all rows when left out.
    references : bool
        Whether equal rows are looked for.

    Raises
    ------
    ArgumentError
        When the window is another number.

    Examples
    --------
    >>> import torch
    >>> from bitslab.engine.codecs import VectorLzCodec
    >>> rows = torch.randn(50, 64)[torch.arange(1000) % 50]
    >>> codec = VectorLzCodec()
    >>> blob = codec.encode(rows)
    >>> blob.raw_nbytes / blob.nbytes > 18
    True
    >>> torch.equal(codec.decode(blob), rows)
    True
    """

    name: ClassVar[str] = "vlz"
    form: ClassVar[int] = VLZ_FORM

    @classmethod
    def fit(
        cls, sample: torch.Tensor, *, window: int | None = None, references: bool = True
    ) -> VectorLzCodec:
        """Return the codec; a sample teaches it nothing."""
        return cls(window, references=references)

    def takes(self, dtype: torch.dtype) -> bool:
        """Return True: rows are compared by their bits."""
        return True

    def bound_of(self, t: torch.Tensor) -> float:
        """Return 0: every bit is kept."""
        return 0.0

    def options(self) -> VectorOptions:
        """Return how kernels encode a tensor."""
        return VectorOptions(window=self.window, references=self.references)


class BoundedVectorCodec(_VectorCodec):
    """Encodes whole tensors of rows within a bound: quantised, and equal rows of codes kept once.

    An element becomes the number of the nearest multiple of a step of about two bounds, with no
    prediction, so that equal rows remain equal (section III-B of the SC'24 paper on the all-to-all
    of recommenders), and rows that differ by little become equal. Each element is decoded and
    compared at once: one that would be further away than the bound, or whose code would not fit 16
    bits, keeps its bits, as NaN and infinities do. References and codes are those of
    `VectorLzCodec`, with a Huffman code or fixed fields for what is left.

    Parameters
    ----------
    error_bound : float
        How far a decoded element may be from the given one; positive and finite.
    relative : bool
        Whether the bound is a share of the tensor's largest less its least finite value.
    window, references
        As for `VectorLzCodec`.

    Raises
    ------
    ArgumentError
        When a number is not as above.
    """

    name: ClassVar[str] = "vlzq"
    form: ClassVar[int] = VLZ_BOUNDED_FORM
    error_bound = "the given bound, or that share of the largest less the least finite value"

    def __init__(
        self,
        error_bound: float,
        *,
        relative: bool = False,
        window: int | None = None,
        references: bool = True,
    ) -> None:
        super().__init__(window, references=references)
        self.bound = checked_bound("error_bound", error_bound)
        if not isinstance(relative, bool):
            raise ArgumentTypeError(f"relative: expected a bool, got {relative!r:.60}")
        self.relative = relative

    @classmethod
    def fit(
        cls,
        sample: torch.Tensor,
        *,
        error_bound: float = 0.01,
        relative: bool = True,
        window: int | None = None,
        references: bool = True,
    ) -> BoundedVectorCodec:
        """Return the codec; a sample teaches it nothing."""
        return cls(error_bound, relative=relative, window=window, references=references)

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether it is float16, bfloat16 or float32."""
        return dtype in KINDS

    def bound_of(self, t: torch.Tensor) -> float:
        """Return the bound in the units of a tensor on the CPU; 0 without two finite values."""
        if not self.relative:
            return self.bound
        least, largest = finite_range(t)
        return self.bound * (largest - least) if largest > least else 0.0

    def options(self) -> VectorOptions:
        """Return how kernels encode a tensor."""
        return VectorOptions(self.bound, self.relative, self.window, self.references)

    def bounds(self, t: torch.Tensor) -> torch.Tensor:
        """Return the bound for finite elements, 0 for others; see `BlobCodec.bounds`."""
        check_tensor_argument("t", t)
        bound = self.bound_of(t.detach().cpu())
        return t.detach().isfinite().to(torch.float64) * bound

    def describe(self) -> str:
        """Return the codec, its bound and its window: ``vlzq 0.03 rel``."""
        kind = " rel" if self.relative else ""
        window = "" if self.window is None else f" {self.window}"
        return f"{self.name} {self.bound:g}{kind}{window}"

    def to_config(self) -> dict[str, Any]:
        """Return bound, window and whether equal rows are looked for."""
        return {"error_bound": self.bound, "relative": self.relative, **super().to_config()}


def checked_bound(name: str, bound: Any) -> float:
    """Return a bound as a float, or refuse what is no positive finite number."""
    if isinstance(bound, bool) or not isinstance(bound, numbers.Real):
        raise ArgumentTypeError(f"{name}: expected a float, got {bound!r:.60}")
    try:
        found = float(bound)
    except OverflowError:  # of an integer
        found = math.inf
    if not 0 < found < math.inf:
        raise ArgumentError(f"{name}: {bound}, accepted are positive finite numbers")
    return found


_ROWS = torch.contiguous_format
