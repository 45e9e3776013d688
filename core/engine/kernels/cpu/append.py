"""A new token behind those that are there: the readable twin of append.cu."""

from __future__ import annotations

import torch


def append_token(
    new: tuple[torch.Tensor, torch.Tensor],
    memory: tuple[torch.Tensor, torch.Tensor],
    ends: tuple[int, int],
    short_by: torch.Tensor,
) -> None:
    """Put a token of each sequence behind those that are there.

    See `kernels.cuda.append.AppendKernels.append_token`.
    """
    missing = int(short_by)
    if not 0 <= missing < min(ends):
        return
    for tokens, there, end in zip(new, memory, ends, strict=True):
        there[:, :, end - 1 - missing].copy_(tokens[:, :, 0])
