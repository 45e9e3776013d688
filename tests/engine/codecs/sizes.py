"""What rows take that invariant bit packing packs."""

from __future__ import annotations

from typing import Any

import torch

from bitslab import InvariantCodec

#: Options of the published algorithm.
PUBLISHED: dict[str, Any] = {"code_bits": 1, "grouped": False, "uniform": False}


def stored_bytes(codec: InvariantCodec, rows: torch.Tensor) -> int:
    """Return everything that must be kept: packed rows, their metadata and the profile."""
    return codec.encode(rows).nbytes + codec.profile_bytes


def saved(codec: InvariantCodec, rows: torch.Tensor) -> float:
    """Return the share of the bytes that is saved."""
    return 1 - stored_bytes(codec, rows) / rows.nbytes
