"""Names of dtypes in configurations, and the bit fields of floating-point dtypes."""

from __future__ import annotations

import torch

from .errors import CorruptedDataError


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as torch writes it, without the module: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype that `dtype_name` named."""
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
    """Bytes of a number in a tensor of `dtype`: half an element for complex dtypes."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
