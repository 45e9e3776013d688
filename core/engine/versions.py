"""How often a tensor was changed in place, which torch counts and gives no public name."""

from __future__ import annotations

import torch


def version_of(t: torch.Tensor) -> int:
    """Return how often a tensor was changed in place, its views and its root included."""
    return t._version
