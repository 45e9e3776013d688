"""Samples of tensors, of which codecs learn and show their ratios."""

from __future__ import annotations

import torch

#: Codecs encode so many bytes of a tensor, for their ratio: this share of it, at least and at most.
SAMPLE_SHARE = 1 / 8
SAMPLE_BYTES = 64 << 10, 1 << 20
#: Taken from so many places of it.
SAMPLE_PIECES = 16


def sample_of(flat: torch.Tensor) -> torch.Tensor:
    """Return ``[m]`` elements of a contiguous tensor, from places that lie evenly.

    They are `SAMPLE_SHARE` of them.
    """
    flat = flat.view(-1)
    least, most = SAMPLE_BYTES
    nbytes = min(max(int(flat.nbytes * SAMPLE_SHARE), least), most)
    wanted = nbytes // SAMPLE_PIECES // flat.element_size()
    rows = flat.shape[0] // SAMPLE_PIECES
    if rows <= wanted:
        return flat
    return flat[: rows * SAMPLE_PIECES].view(SAMPLE_PIECES, rows)[:, :wanted].reshape(-1)
