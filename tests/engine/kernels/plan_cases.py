"""Rows and rules for tests of what a planner counts."""

from __future__ import annotations

import numpy as np
import torch

from bitslab.engine.kernels.candidates import MaskRule

Rows = torch.Tensor


def some_rows(kind: str, n: int, row_bytes: int, seed: int = 0) -> Rows:
    """Return uint8 ``[n, row_bytes]``."""
    rng = np.random.default_rng(seed)
    if kind == "random":
        data = rng.integers(0, 256, (n, row_bytes))
    elif kind == "ones":  # the value that is the mark of a free place of a table
        data = np.where(rng.random((n, row_bytes // 8 + 1)) < 0.6, 255, 7).repeat(8, 1)
    elif kind == "few":
        data = rng.choice([0, 0, 0, 1, 64, 200], (n, row_bytes))
    else:
        assert kind == "constant"
        data = np.full((n, row_bytes), 3)
    return torch.from_numpy(data[:, :row_bytes].astype(np.uint8))


KINDS = ("random", "ones", "few", "constant")


def some_rules(row_bytes: int) -> list[MaskRule]:
    """Return rules of all kinds for rows of a size."""
    rules = []
    for width in (1, 2, 4, 8):
        if row_bytes % width == 0:
            for uniform in (False, True):
                rules += [MaskRule(width, uniform, t, 0) for t in (0.5, 0.7, 1.0)]
                everything = (1 << 8 * width) - 1
                rules += [MaskRule(width, uniform, None, f) for f in (everything & ~7, everything)]
    return rules
