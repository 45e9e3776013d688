"""Bags of ids: their offsets are checked before a kernel reads by them."""

from __future__ import annotations

import torch

from ..engine.kernels.cuda import kernels_on
from ..engine.kernels.cuda.bags import POOLED_DTYPES
from ..errors import ArgumentError


def pools_on_gpu(dtype: torch.dtype, n_bags: int) -> bool:
    """Return whether `pooled_on_gpu` takes rows of a dtype and so many bags."""
    return dtype in POOLED_DTYPES and n_bags > 0


def pooled_on_gpu(
    matrix: torch.Tensor,
    index: torch.Tensor,
    offsets: torch.Tensor,
    mode: int,
    *,
    padding: int | None,
    include_last: bool,
) -> torch.Tensor:
    """Return a row for each bag, as ``torch.embedding_bag`` does; see `cuda.bags`."""
    kernels = kernels_on(matrix.device)
    return kernels.bags.pool(
        matrix.contiguous(), index, offsets, mode, padding=padding, include_last=include_last
    )


def checked_by_lookup(offsets: torch.Tensor, device: torch.device) -> bool:
    """Return whether a lookup of ids on a GPU can look at offsets ``[B]`` on its way."""
    return offsets.device == device and offsets.is_contiguous()


def sound_offsets(
    offsets: torch.Tensor, n_ids: int, device: torch.device, *, include_last: bool
) -> torch.Tensor:
    """Return offsets on a device, such as kernels of torch can take.

    Parameters
    ----------
    offsets : torch.Tensor
        int32 or int64 ``[B]``.
    n_ids : int
        Ids of all bags.
    device : torch.device
        Where the rows are.
    include_last : bool
        Whether the last offset is the end of the last bag.

    Returns
    -------
    torch.Tensor
        int64 ``[B]`` on `device`. Where they were given on that GPU and one is bad, all ids are in
        the last bag, and the next call on the GPU raises ArgumentError, or
        `bitslab.raise_pending_errors`.

    Raises
    ------
    ArgumentError
        When they do not divide the ids into bags; those on a GPU as far as their number shows it.
    """
    if not offsets.is_cuda or device.type != "cuda" or not offsets.shape[0]:
        offsets = offsets.to("cpu")
        reason = why_no_offsets(offsets, n_ids, include_last)
        if reason:
            raise ArgumentError(f"offsets: {reason}")
        return offsets.to(device, torch.int64, non_blocking=True)
    if offsets.device != device:
        offsets = offsets.to(device)
    if not offsets.is_contiguous():
        offsets = offsets.contiguous()
    bags = kernels_on(device).bags
    return bags.sound_offsets(offsets, n_ids, include_last=include_last)


def why_no_offsets(offsets: torch.Tensor, n_ids: int, include_last: bool) -> str:
    """Return why offsets ``[B]`` on the CPU do not divide ids into bags, or an empty text."""
    if not len(offsets):
        return "is empty, expected the end at least" if include_last else ""
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0:
        return f"begins with {first}, expected 0"
    if include_last and last != n_ids:
        return f"ends with {last}, expected {n_ids}, the number of ids (include_last_offset)"
    if len(offsets) > 1 and bool((offsets[1:] < offsets[:-1]).any()):
        at = int((offsets[1:] < offsets[:-1]).nonzero()[0, 0])
        return f"falls from {int(offsets[at])} to {int(offsets[at + 1])} at position {at + 1}"
    if last > n_ids:
        return f"reaches {last}, but there are {n_ids} ids"
    return ""
