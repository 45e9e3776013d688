"""Shared helpers: tensors of every dtype, comparison bit for bit, and what a GPU refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import bitslab

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def traits(dtype: torch.dtype) -> tuple[int, str]:
    """Return what tells dtypes apart for those who move bytes: the width, the kind of number."""
    if dtype == torch.bool:
        return 1, "bool"
    kind = "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "integer"
    return dtype.itemsize, kind


def bits_of(t: torch.Tensor) -> torch.Tensor:
    """Copy a tensor's bytes to uint8 ``[nbytes]``."""
    t = t.detach().resolve_conj().resolve_neg()
    return t.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def options_id(options: Mapping[str, Any]) -> str:
    """Return a readable id of keyword arguments, the same in every process."""
    named = (f"{name}={getattr(value, '__name__', value)}" for name, value in options.items())
    return ", ".join(named) or "defaults"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits_of(a), bits_of(b))


def take(t: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Index by bytes, because torch cannot index every dtype."""
    shape = (*ids.shape, *t.shape[1:])
    if not t.numel() or not ids.numel():
        return torch.empty(shape, dtype=t.dtype)
    items = bits_of(t).view(t.shape[0], -1)
    return items[ids.flatten()].flatten().view(t.dtype).view(shape)


def packable(dtype: torch.dtype, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Make a tensor whose numbers resemble each other, as weights and counts do."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(tuple(shape), generator=generator)
    if dtype == torch.bool:
        return numbers > 1.5
    if dtype.is_complex:
        return torch.complex(numbers, -numbers).to(dtype)
    if dtype.is_floating_point:
        return (numbers / 8).to(dtype)
    return numbers.abs().mul(8).to(dtype)


def random_bits(dtype: torch.dtype, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Make a tensor of bytes drawn evenly: NaN, infinities and subnormals are among them."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    drawn = torch.randint(high, (count,), dtype=torch.uint8, generator=generator)
    return drawn.view(dtype).view(tuple(shape))


def refusal_on_gpu(decode: Callable[[], object]) -> bitslab.CorruptedDataError | None:
    """Decode on a GPU; return the error that says of its data that they are damaged, if any.

    Of a decode of two kernels the second may see the error of the first before it starts, and what
    it finds itself is raised later: nothing is left behind for the next decode.
    """
    found = None
    for call in (decode, bitslab.raise_pending_errors, bitslab.raise_pending_errors):
        try:
            call()
        except bitslab.CorruptedDataError as error:
            found = found or error
    return found
