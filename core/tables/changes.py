"""Changing a table's rows: new values for some of them, and the whole packed anew."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..engine.codecs import RawCodec, RowCodec
from ..engine.codecs.base import rows_as_bytes
from ..engine.kernels.format import ceil_div
from ..errors import ArgumentError, BitslabError
from .arguments import checked_ids
from .build import SAMPLE_BYTES, check_items, choose_codec, take_rows
from .device import DeviceCopies
from .host_table import HostTable
from .parts import TableParts
from .rows import HostRows

Array = np.ndarray[Any, Any]


def update(table: HostTable, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Do what `CompressedTable.update` says."""
    table._check_open()
    check_writable(table, "update")
    check_items(rows, tuple(table.shape[1:]), table.dtype)
    wanted = checked_ids(ids).cpu()
    if wanted.shape[0] != rows.shape[0]:
        raise ArgumentError(f"ids, rows: {wanted.shape[0]} ids for {rows.shape[0]} rows")
    table.check_ids(wanted)
    numbers = wanted.numpy().astype(np.int64)
    numbers = np.where(numbers < 0, numbers + len(table), numbers)
    last = len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1]
    if len(last) < len(numbers):
        numbers = numbers[last]
        rows = take_rows(rows, last)
    if not len(numbers) or not table.row_bytes:
        return
    with changing(table, "update"):
        if table.rows_per_packed_row > 1:
            numbers, rows = merged(table, numbers, rows)
        packed = None if table._parts.raw else table.codec.encode(rows).to(torch.device("cpu"))
        with table._lock.writing():
            table._check_open()
            # Once more: it may have been handed out since.
            check_writable(table, "update")
            for cache in list(table._caches):
                cache.forget(torch.from_numpy(numbers))
            try:
                changed = table._rows.update(numbers, rows, packed)
                table._device_copies.refresh(table._rows, changed)
            except BaseException:
                table._device_copies.clear()  # made anew from what the host has
                raise


def merged(table: HostTable, ids: Array, items: torch.Tensor) -> tuple[Array, torch.Tensor]:
    """Return the packed rows that items lie in, with these as they are to be.

    Parameters
    ----------
    table : HostTable
        Inside `changing`; several of its rows share a packed row.
    ids : numpy.ndarray
        int64 ``[n]``, in range, no two alike.
    items : torch.Tensor
        ``[n, *row_shape]``, their new values.

    Returns
    -------
    ids : numpy.ndarray
        int64 ``[m]``, ascending: packed rows.
    rows : torch.Tensor
        ``[m, *codec.row_shape]`` on the CPU, decoded.
    """
    each, item_bytes = table.rows_per_packed_row, table.row_bytes
    picked, at = np.unique(ids // each, return_inverse=True)
    rows = table.packed_rows_of(torch.from_numpy(picked))
    data = rows_as_bytes(rows, table.codec.row_bytes).view(-1)[: len(picked) * each * item_bytes]
    data.view(-1, item_bytes).numpy()[at * each + ids % each] = (
        rows_as_bytes(items, item_bytes).cpu().numpy()
    )
    return picked, rows


def replace(table: HostTable, fresh: TableParts) -> None:
    """Let a table, inside `changing`, have its rows in other parts; a failure closes these."""
    try:
        with table._lock.writing():
            table._check_open()
            check_writable(table, "compact")
            if fresh.codec is not table.codec:
                for cache in list(table._caches):
                    cache.forget(torch.arange(ceil_div(len(table), table.rows_per_packed_row)))
                table._device_copies = DeviceCopies()
            old, table._rows = table._rows, HostRows(fresh, pin=table._pin)
            table._prepared = None
            table._device_copies.clear()
    except BaseException:
        fresh.close()
        raise
    old.close()


def fitted_again(table: HostTable) -> RowCodec:
    """Return a codec fitted to the rows as they are now, raw where packing gains nothing."""
    n_rows = ceil_div(len(table), table.rows_per_packed_row)
    n_sample = min(n_rows, max(1, SAMPLE_BYTES // max(1, table.codec.row_bytes)))
    picked = np.sort(np.random.default_rng(0).choice(n_rows, n_sample, replace=False))
    sample = table.packed_rows_of(torch.from_numpy(picked))
    fitted = choose_codec(sample, "auto", n_rows, {})
    if isinstance(fitted, RawCodec):
        return RawCodec(tuple(table.shape[1:]), table.dtype)
    return fitted


@contextlib.contextmanager
def changing(table: HostTable, what: str) -> Iterator[None]:
    """Be the only one that changes the table."""
    with table._update_lock:
        if table._busy:
            raise BitslabError(f"{what}: called from inside {table._busy} of the same table")
        table._busy = what
        try:
            yield
        finally:
            table._busy = ""


def check_writable(table: HostTable, what: str) -> None:
    """Raise BitslabError when `what` must not change the table."""
    if table._path is not None:
        raise BitslabError(
            f"{what}: this table is memory-mapped from {table._path}; open it with "
            "layout='inplace', or make one with from_tensor"
        )
    if table._pid != os.getpid():
        raise BitslabError(f"{what}: this table belongs to process {table._pid}, the parent")
    if table._read_only or any(buffer.shared for buffer in table._parts.buffers.values()):
        raise BitslabError(
            f"{what}: this table's memory is shared with other processes, which would not see "
            "the change whole; change it before it is handed out"
        )
