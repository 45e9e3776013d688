"""Trained models in files of torch.save; all ways of keeping tables write the same."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from .clicks import ClicksError
from .model import Dlrm

TABLE_KEY = "tables.embedding_bags."


def save(path: Path, model: Dlrm, settings: dict[str, Any]) -> None:
    """Write the weights, whole tables in id order, and the settings, in plain tensors and types."""
    state = {key: value.detach().cpu() for key, value in model.state_dict().items()}
    torch.save({"model": state, "settings": settings}, path)


class Checkpoint:
    """A model as `save` wrote it; its tables are read on request.

    Raises
    ------
    ClicksError
        When the file is none of these.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            saved = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ClicksError(f"--checkpoint {path}: cannot be read: {reason}") from error
        if not isinstance(saved, dict) or not {"model", "settings"} <= set(saved):
            raise ClicksError(f"--checkpoint {path}: not written by train_dlrm.py --save")
        self.settings: dict[str, Any] = saved["settings"]
        state: dict[str, torch.Tensor] = saved["model"]
        self.tables = {
            key.removeprefix(TABLE_KEY).removesuffix(".weight"): value
            for key, value in state.items()
            if key.startswith(TABLE_KEY)
        }
        self.perceptrons = {
            key: value for key, value in state.items() if not key.startswith(TABLE_KEY)
        }
        if not self.tables or "bottom.0.weight" not in self.perceptrons:
            raise ClicksError(f"--checkpoint {path}: has no tables or no bottom perceptron")

    @property
    def table_rows(self) -> dict[str, int]:
        return {name: len(table) for name, table in self.tables.items()}

    @property
    def n_dense(self) -> int:
        return self.perceptrons["bottom.0.weight"].shape[1]

    def hidden(self, which: str) -> list[int]:
        """Return the widths of the hidden layers of ``"bottom"`` or ``"top"``."""
        widths = [
            len(value)
            for key, value in self.perceptrons.items()
            if key.startswith(f"{which}.") and key.endswith(".bias")
        ]
        return widths[:-1]

    def weights(self, name: str, rows: int) -> torch.Tensor:
        """Return the weights of a table, as `tables.Weights`."""
        return self.tables[name]
