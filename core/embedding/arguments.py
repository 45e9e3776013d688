"""What cached rows are made of, checked."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import torch

from ..errors import ArgumentError, ArgumentTypeError
from ..memory.arguments import checked_device
from ..memory.table import CompressedTable
from .gradients import Array


def check_table(table: object) -> None:
    """Refuse what is no table of floating-point rows."""
    if not isinstance(table, CompressedTable):
        raise ArgumentTypeError(f"table: expected a CompressedTable, got {type(table).__name__}")
    if table.ndim != 2 or not len(table) or not table.shape[1]:
        raise ArgumentError(f"table: {list(table.shape)}, expected [N, D] with at least one row")
    if not table.dtype.is_floating_point:
        raise ArgumentTypeError(f"table: {table.dtype}, expected floating-point rows")


def device_or_default(device: torch.device | str | None) -> torch.device:
    """Return a device that is there; the current GPU, or the CPU without one, for None."""
    return checked_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def checked_rows(cache_rows: int, n_rows: int, least: int) -> int:
    """Return how many rows are to be resident, or refuse it."""
    try:
        wanted = operator.index(cache_rows)
    except TypeError:
        raise ArgumentTypeError(f"cache_rows: expected an int, got {cache_rows!r:.60}") from None
    if not least <= wanted <= n_rows:
        raise ArgumentError(f"cache_rows: {wanted}, accepted are {least} to {n_rows}")
    return wanted


def ids_by_use(counts: torch.Tensor | Sequence[int] | None, n_rows: int) -> tuple[Array, Array]:
    """Return the ids by how often they are used, and how often each is, int64 ``[N]``."""
    if counts is None:
        return np.arange(n_rows), np.zeros(n_rows, np.int64)
    often = torch.as_tensor(counts).detach().cpu()
    if often.shape != (n_rows,) or often.dtype in (torch.bool,) or often.is_complex():
        raise ArgumentError(
            f"counts: {list(often.shape)} of {often.dtype}, expected a number for each of "
            f"{n_rows} rows"
        )
    order = torch.argsort(often, descending=True, stable=True).numpy()
    return order, often.to(torch.int64).numpy()
