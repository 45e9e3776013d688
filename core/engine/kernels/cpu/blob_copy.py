"""Encoded tensors between buffers on the host, as many bytes as are used."""

from __future__ import annotations

import torch


def copy_blob(source: torch.Tensor, target: torch.Tensor, first_byte: int = 0) -> None:
    """Copy the used bytes of an encoded tensor; see `kernels.cuda.blob_copy`."""
    nbytes = min(source.shape[0], target.shape[0])
    if nbytes < max(8, first_byte + 1):
        return
    used = int(source[:8].view(torch.int64)[0])
    used = nbytes if not 0 <= used <= nbytes else used  # as unsigned, where damaged
    if used > first_byte:
        target[first_byte:used].copy_(source[first_byte:used])
