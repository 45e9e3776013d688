"""The ways to keep the tables that a model is trained with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .clicks import Clicks
from .tables import CachedTables, TableOptions, Tables, TorchTables, Weights
from .torchrec_tables import CollectionTables, CompressedTables, missing_torchrec

MODES: dict[str, type[Tables]] = {
    "torch": TorchTables,
    "cached": CachedTables,
    "ebc": CollectionTables,
    "torchrec": CompressedTables,
}
#: Those that are made of TorchRec's parts.
NEEDS_TORCHREC = ("ebc", "torchrec")


def refusal(mode: str, *, sparse: bool = False, dtype: str = "float32") -> str | None:
    """Return why a mode cannot be had; None when it can."""
    if mode not in NEEDS_TORCHREC:
        return None
    if sparse:
        return "TorchRec's collections have no sparse gradients (--sparse, --optimizer sparse-adam)"
    if mode == "ebc" and dtype == "bfloat16":
        return "TorchRec's own collection has float16 in place of bfloat16 (--dtype)"
    missing = missing_torchrec()
    return None if missing is None else f"TorchRec does not load ({missing})"


def make_tables(
    mode: str,
    table_rows: Mapping[str, int],
    weights: Weights,
    device: torch.device,
    options: TableOptions,
) -> Tables:
    """Make the tables in a mode."""
    return MODES[mode](table_rows, weights, device, options)


def counted(clicks: Clicks) -> dict[str, torch.Tensor]:
    """Count how often the lines to train on name each row, int64 ``[rows]`` for each table."""
    return {
        feature.name: torch.bincount(
            feature.of(torch.arange(clicks.n_trained))[0], minlength=feature.rows
        )
        for feature in clicks.features
    }
