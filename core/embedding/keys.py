"""Ids of several tables whose rows lie back to back in one: their rows are found on the device."""

from __future__ import annotations

from itertools import accumulate

import torch

from .device_access import access_to


def rows_of_keys(
    ids: torch.Tensor, counts: list[int], begins: list[int], sizes: list[int]
) -> torch.Tensor | None:
    """Return the rows that ids on a GPU name; the host does not wait for it.

    Parameters
    ----------
    ids : torch.Tensor
        int32 or int64 ``[n]``: `counts` of one key after those of another.
    counts, begins, sizes : list of int
        For each key: its ids, the first row of its table, and the rows of that.

    Returns
    -------
    torch.Tensor or None
        int64 ``[n]`` on the device. An id out of range stands for the first or the last row of its
        table, and the next call on the GPU raises IndexRangeError, or
        `bitslab.raise_pending_errors`. None where the host has to find them: on a CPU.
    """
    access = access_to(ids.device)
    if access is None:
        return None
    kernels = access.kernels(ids.device)
    keys = torch.tensor([[*accumulate(counts)], begins, sizes], dtype=torch.int64, device="cpu")
    # A few numbers in pageable memory: the driver takes them at once.
    return kernels.ids.rows_of_keys(ids.contiguous(), keys.to(ids.device, non_blocking=True))
