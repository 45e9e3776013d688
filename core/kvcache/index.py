"""Indices of sequences of a batch, checked before anything changes."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..errors import ArgumentError, ArgumentTypeError, IndexRangeError

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
_ACCEPTED = "accepted are a tensor, list or tuple of integers, a bool mask, and a slice"


def sequence_index(index: Any, batch: int, name: str = "indices") -> torch.Tensor:
    """Return the sequences that an index names, int64 ``[n]`` on the CPU, each from 0 to batch - 1.

    An index on a GPU is waited for.

    Parameters
    ----------
    index : torch.Tensor, sequence or slice
        Integers ``[n]``, negative ones counted from the end, or bools ``[batch]``.
    batch : int
        Sequences of the batch.
    name : str
        Of the argument, for messages.

    Raises
    ------
    ArgumentTypeError
        For another type or dtype.
    ArgumentError
        For another shape.
    IndexRangeError
        For a sequence out of range.
    """
    if isinstance(index, slice):
        return torch.tensor(range(batch)[index], dtype=torch.int64)
    found = _as_tensor(index, name)
    if found.dtype == torch.bool:
        if found.shape != (batch,):
            raise ArgumentError(
                f"{name}: a mask of shape {list(found.shape)}, expected [{batch}], the sequences "
                "of the cache"
            )
        return found.cpu().nonzero().flatten()
    _check_integers(found, name)
    found = found.cpu().long()
    bad = found[(found < -batch) | (found >= batch)]
    if bad.numel():
        raise IndexRangeError(
            f"{name}: {int(bad[0])}, accepted are {-batch} to {batch - 1}: the cache holds "
            f"{batch} sequences"
        )
    return torch.where(found < 0, found + batch, found)


def beam_index(
    index: Any, batch: int, device: torch.device, name: str = "beam_idx"
) -> torch.Tensor:
    """Return the sequences that an index names, int64 ``[n]`` on a device.

    As `sequence_index`, but one that is on the GPU in question is not read by the host, which
    would wait for it at each step of a beam search; bad numbers end in torch's own assertion there.
    """
    on_gpu = isinstance(index, torch.Tensor) and index.device.type == device.type == "cuda"
    if not on_gpu:
        return sequence_index(index, batch, name).to(device)
    _check_integers(index, name)
    found: torch.Tensor = index.to(device, torch.int64)
    return found


def repeat_count(repeats: Any) -> int:
    """Return how often each sequence is repeated.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        For what is no integer, and negative ones.
    """
    try:
        count = operator.index(repeats)
    except TypeError:
        raise ArgumentTypeError(f"repeats: expected an int, got {repeats!r:.60}") from None
    if isinstance(repeats, bool):
        raise ArgumentTypeError(f"repeats: expected an int, got {repeats!r}")
    if count < 0:
        raise ArgumentError(f"repeats: {count}, accepted are numbers from 0")
    return count


def indexed(t: torch.Tensor, dim: int, index: Any) -> torch.Tensor:
    """Index dimension 0 or 1 of a tensor."""
    if t.is_floating_point() and t.itemsize == 1:
        # As bytes: torch 2.8 cannot index 8-bit floats on the CPU.
        return indexed(t.view(torch.uint8), dim, index).view(t.dtype)
    return t[index] if dim == 0 else t[:, index]


def _as_tensor(index: Any, name: str) -> torch.Tensor:
    if not isinstance(index, torch.Tensor):
        try:
            index = torch.as_tensor(index)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ArgumentTypeError(f"{name}: {index!r:.60}; {_ACCEPTED}") from error
        if not index.numel() and index.dim() == 1:
            index = index.long()  # an empty list has the dtype of floats
    if index.device.type == "meta":
        raise ArgumentTypeError(f"{name}: on meta, where it has no values")
    found: torch.Tensor = index
    return found


def _check_integers(index: torch.Tensor, name: str) -> None:
    if index.dtype not in _INTEGERS:
        raise ArgumentTypeError(f"{name}: dtype {index.dtype}; {_ACCEPTED}")
    if index.dim() != 1:
        raise ArgumentError(f"{name}: shape {list(index.shape)}, expected one dimension")
