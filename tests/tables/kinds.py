"""Tables of every layout and codec, and rows for them."""

from __future__ import annotations

from typing import Any

import torch

from bitslab import CompressedTable
from bitslab.tables.parts import Layout

#: Layout and codec of each.
KINDS: dict[str, tuple[Layout, str]] = {
    "compact": ("compact", "ibp"),
    "in-place": ("inplace", "ibp"),
    "raw": ("compact", "raw"),
}


def make(x: Any, kind: str, **options: Any) -> CompressedTable:
    layout, codec = KINDS[kind]
    return CompressedTable.from_tensor(x, layout, codec, progress=False, **options)


def weights(n: int = 1000, columns: int = 64, seed: int = 0) -> torch.Tensor:
    """Return float32 ``[n, columns]`` that packs to about nine tenths."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, columns, generator=generator) * 0.02


def even_rows(n: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return float32 rows of one number each, so that a mix of two rows shows.

    The numbers reach from tiny to huge, so that rows take from few words to all of them.
    """
    generator = torch.Generator().manual_seed(seed)
    powers = 10.0 ** torch.randint(-30, 30, (n, 1), generator=generator)
    numbers = torch.randn(n, 1, generator=generator) * powers
    return numbers.expand(n, columns).contiguous()
