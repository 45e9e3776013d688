"""Names and bit fields of dtypes, and tensors as bytes."""

from __future__ import annotations

import torch

from .errors import CorruptedDataError


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as torch writes it, without the module: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype of a name; the inverse of `dtype_name`."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise CorruptedDataError(f"dtype: {name!r} is not a dtype of this torch")
    return dtype


#: Exponent field of each floating-point dtype as (lowest bit, width); the sign is one bit above it.
EXPONENT_FIELDS: dict[torch.dtype, tuple[int, int]] = {
    torch.float64: (52, 11),
    torch.float32: (23, 8),
    torch.float16: (10, 5),
    torch.bfloat16: (7, 8),
    torch.float8_e4m3fn: (3, 4),
    torch.float8_e5m2: (2, 5),
    torch.float8_e4m3fnuz: (3, 4),
    torch.float8_e5m2fnuz: (2, 5),
    # A complex number is two floats; chunks are planned as those of its parts.
    torch.complex64: (23, 8),
    torch.complex128: (52, 11),
}


def element_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of a real number in a tensor of `dtype`: half an element if complex."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def dense(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor in row-major order with the strides of its shape, a view where possible.

    A contiguous tensor may have other strides: a dimension of one element, as in
    ``torch.randn(2)[::2]``, keeps any stride, and torch then refuses to view another dtype.
    """
    if _in_order(t) and not t.is_conj() and not t.is_neg():  # most tensors: no more views
        return t.detach()
    # The memory of lazy conjugates and negatives holds other bits than their values.
    found = t.detach().resolve_conj().resolve_neg().contiguous()
    if _in_order(found):
        return found
    strides, step = [], 1
    for size in reversed(found.shape):
        strides.append(step)
        step *= max(1, size)
    strides.reverse()
    return found if found.stride() == tuple(strides) else found.as_strided(found.shape, strides)


def _in_order(t: torch.Tensor) -> bool:
    """Return whether a tensor of one or two dimensions has the strides of its shape."""
    return 0 < t.dim() < 3 and t.stride() == t.shape[1:] + (1,)


def flat_bytes(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as uint8 ``[nbytes]``, a view where it is row-major."""
    found = dense(t)
    return (found if found.dim() == 1 else found.reshape(-1)).view(torch.uint8)
