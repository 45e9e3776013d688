"""Rows of one table in a call, and the gradients of its copies of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .messages import Array, Repeats
from .plan import TableState


@dataclass
class Part:
    """Rows of one table in a call, and what its backward pass needs.

    Parameters
    ----------
    state : TableState
        Of the table.
    shape, dtype, row : tuple of int, torch.dtype, int
        Of a row; its elements.
    send_rows, receive_rows : list of int
        Rows for each rank and of each.
    repeats : list or None
        For each rank the `Repeats` among its rows; after the exchange, those by which they crossed.
    received_ids : numpy.ndarray or None
        int64: the ids of the rows that come.
    places : list
        As of `Rows`.
    """

    state: TableState
    shape: tuple[int, ...]
    dtype: torch.dtype
    row: int
    send_rows: list[int]
    receive_rows: list[int]
    repeats: list[Repeats | None] | None
    received_ids: Array | None
    places: list[Array | None] = field(default_factory=list)


def sums_of(part: Part, gradient: torch.Tensor) -> tuple[list[torch.Tensor], Array | None]:
    """Return gradients for each rank, those of copies of a row as one, and the ids of each row."""
    ids: list[Array | None] = [None] * len(part.receive_rows)
    if part.received_ids is not None:
        ids = list(np.split(part.received_ids, np.cumsum(part.receive_rows)[:-1]))
    sent, kept = [], []
    for rows, places, of_rows in zip(
        torch.split(gradient, part.receive_rows), part.places, ids, strict=True
    ):
        sent.append(rows if places is None else _summed(rows, places))
        if of_rows is not None:
            kept.append(of_rows if places is None else _ids_of_sums(of_rows, places))
    return sent, np.concatenate(kept) if kept else None


def _ids_of_sums(ids: Array, places: Array) -> Array:
    found = np.empty(int(places.max()) + 1, np.int64)
    found[places] = ids
    return found


def _summed(rows: torch.Tensor, places: Array) -> torch.Tensor:
    """Return the sums of rows ``[n, row]`` that are copies of one; 16 bits are added as 32."""
    wide = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
    sums = torch.zeros((int(places.max()) + 1, rows.shape[1]), dtype=wide, device=rows.device)
    at = torch.from_numpy(places).to(rows.device)
    return sums.index_add_(0, at, rows.to(wide)).to(rows.dtype)


def spread_to_copies(part: Part, found: torch.Tensor, back: Sequence[int]) -> torch.Tensor:
    """Return gradients of the rows that were given: sums to the first copy of each."""
    if list(back) == part.send_rows:
        return found
    result = torch.zeros((sum(part.send_rows), part.row), dtype=found.dtype, device=found.device)
    pieces = zip(
        torch.split(result, part.send_rows),
        torch.split(found, list(back)),
        part.repeats or [],
        strict=True,
    )
    for to, given, repeated in pieces:
        if repeated is None:
            to.copy_(given)
        else:
            to[torch.from_numpy(repeated.first).to(to.device)] = given
    return result
