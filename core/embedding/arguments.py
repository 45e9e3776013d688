"""Checks of the arguments of cached rows."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch

from ..engine.codecs.base import raise_bad_index
from ..errors import ArgumentError, ArgumentTypeError
from ..tables.table import CompressedTable
from .eviction import EvictionStrategy
from .gradients import Array

CacheKind = Literal["rows", "packed"]


def check_table(table: object) -> None:
    """Raise unless `table` is a CompressedTable of floating-point rows."""
    if not isinstance(table, CompressedTable):
        raise ArgumentTypeError(f"table: expected a CompressedTable, got {type(table).__name__}")
    if table.ndim != 2 or not len(table) or not table.shape[1]:
        raise ArgumentError(f"table: {list(table.shape)}, expected [N, D] with at least one row")
    if not table.dtype.is_floating_point:
        raise ArgumentTypeError(f"table: {table.dtype}, expected floating-point rows")


def checked_rows(cache_rows: int, n_rows: int, least: int) -> int:
    """Return `cache_rows` as an int; raise unless it is `least` to `n_rows`."""
    try:
        wanted = operator.index(cache_rows)
    except TypeError:
        raise ArgumentTypeError(f"cache_rows: expected an int, got {cache_rows!r:.60}") from None
    if not least <= wanted <= n_rows:
        raise ArgumentError(f"cache_rows: {wanted}, accepted are {least} to {n_rows}")
    return wanted


def ids_by_use(
    counts: torch.Tensor | Sequence[int] | None, n_rows: int, most_used: int = 0
) -> tuple[Array, Array]:
    """Return the ids, the most used first, and the count of each id; int64 ``[N]`` each.

    Ids with equal counts are ordered as in ColossalAI's class: by torch's `argsort`, or by `topk`
    for those that it makes resident first.

    Parameters
    ----------
    counts : torch.Tensor, sequence or None
        ``[N]``.
    n_rows : int
        N.
    most_used : int
        Number of leading ids that are ordered by `topk`.
    """
    if counts is None:
        return np.arange(n_rows), np.zeros(n_rows, np.int64)
    often = torch.as_tensor(counts).detach()
    if often.shape != (n_rows,) or often.dtype in (torch.bool,) or often.is_complex():
        raise ArgumentError(
            f"counts: {list(often.shape)} of {often.dtype}, expected a number for each of "
            f"{n_rows} rows"
        )
    # On their own device: a GPU orders ties differently from a CPU.
    order = torch.argsort(often, descending=True)
    if most_used:
        first = torch.topk(often, min(most_used, n_rows)).indices
        rest = torch.ones(n_rows, dtype=torch.bool, device=often.device)
        rest[first] = False
        order = torch.cat([first, order[rest[order]]])
    return order.cpu().numpy(), often.to("cpu", torch.int64).numpy()


def check_options(buffer_rows: object, cache: object, evict: object) -> None:
    """Refuse options of cached rows that are not accepted."""
    if not isinstance(buffer_rows, int) or buffer_rows < 0:
        raise ArgumentError(f"buffer_rows: {buffer_rows!r:.60}, accepted are 0 and more")
    if cache not in get_args(CacheKind):
        raise ArgumentError(f"cache: {cache!r:.60}, accepted are {get_args(CacheKind)}")
    if not isinstance(evict, EvictionStrategy):
        raise ArgumentTypeError(f"evict: expected an EvictionStrategy, got {evict!r:.60}")


def check_warmup_ratio(warmup_ratio: object) -> None:
    """Raise unless `warmup_ratio` is a number from 0 to 1."""
    if not isinstance(warmup_ratio, (int, float)) or not 0 <= warmup_ratio <= 1:
        raise ArgumentError(f"warmup_ratio: {warmup_ratio!r:.60}, accepted are 0 to 1")


def checked_pins(pinned_ids: Sequence[int], n_rows: int) -> tuple[int, ...]:
    """Return the rows that are always resident, each once; raise for one out of range."""
    pins = tuple(dict.fromkeys(pinned_ids))
    for position, row in enumerate(pins):
        if not 0 <= row < n_rows:
            raise_bad_index(row, position, n_rows, "pinned_ids")
    return pins
