"""The buffers of a new table: packed from rows, or raw where packing saves nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ..devices import checked_device
from ..engine.codecs import RawCodec, RowCodec
from ..engine.codecs.base import check_tensor_argument
from ..engine.progress import Progress, ProgressFunction
from ..errors import ArgumentError
from .build import (
    Rows,
    build_parts,
    check_layout,
    fitted_to_items,
    peek,
    sample_rows,
    slices_of,
)
from .parts import Layout, TableParts
from .rows import HostRows


def parts_of_rows(
    t: Rows | Iterable[Rows],
    layout: Layout,
    codec: str | RowCodec,
    options: dict[str, Any],
    *,
    pin: bool,
    device: torch.device | str | None,
    seed: int,
    progress: ProgressFunction | bool | None,
) -> TableParts:
    """Pack rows into the buffers of a table; see `CompressedTable.from_tensor`."""
    check_layout(layout)
    where = None if device is None else checked_device(device)
    if isinstance(t, (torch.Tensor, np.ndarray)):
        if t.ndim < 1:
            raise ArgumentError("t: has no dimension; a table needs rows")
        if isinstance(t, torch.Tensor):
            check_tensor_argument("t", t)
        n_rows: int | None = t.shape[0]
        sample = sample_rows(t, seed)
        batches: Iterable[torch.Tensor] = slices_of(t)
    else:
        n_rows = None
        sample, batches = peek(t, seed)
    fitted = fitted_to_items(sample, codec, n_rows, options, layout, seed)
    shape = tuple(sample.shape[1:])
    with Progress("packing", n_rows, progress) as shown:
        parts = build_parts(batches, fitted, shape, layout, pin=pin, progress=shown, device=where)
        if codec == "auto" and not parts.raw and parts.gains_nothing():
            # The sample packs well, the whole table does not.
            shown.restart()
            with contextlib.closing(HostRows(parts, pin=False)) as packed:
                raw = RawCodec(shape, parts.dtype)
                parts = build_parts(packed.batches(), raw, shape, layout, pin=pin, progress=shown)
    return parts
