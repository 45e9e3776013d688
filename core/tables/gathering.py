"""Gathers from a table: on the CPU by Numba kernels, on a GPU by kernels that read host memory."""

from __future__ import annotations

import torch

from ..engine.advisor import pays_to_sort_rows
from ..engine.codecs.base import (
    bits_in_order,
    check_out_argument,
    check_tensor_argument,
    raise_bad_index,
    rows_as_bytes,
)
from ..engine.kernels.cpu.items import PreparedItems
from ..engine.kernels.cpu.prepared import PreparedTable
from ..engine.kernels.cuda import kernels_on
from ..engine.kernels.format import MAX_SLABS
from ..engine.transfer.gather import gather_copied_rows, gather_packed_rows
from .arguments import checked_ids, target_device
from .cache import Cache
from .host_table import HostTable, raise_damaged

CPU = torch.device("cpu")
POPULATED_BYTES = 4 << 30  # up to which all pages are mapped at the first gather: about a second


def gather(
    table: HostTable,
    ids: torch.Tensor,
    out: torch.Tensor | None,
    device: torch.device | str | None,
    cache: Cache | None,
    sort: bool | None,
    sm_budget: int | None,
) -> torch.Tensor:
    """Do what `CompressedTable.gather_with` says; with no cache, `CompressedTable.gather`."""
    table._check_open()
    wanted = checked_ids(ids)
    if out is not None:
        check_tensor_argument("out", out)
    target = target_device(ids, out, device)
    n = wanted.shape[0]
    if out is not None:
        check_out_argument(out, (n, *table._parts.item_shape), table.dtype, target, [ids])
    if target.type == "cpu":
        wanted = wanted.cpu()
    if wanted.device.type == "cpu":
        table._check_ids(wanted)
    result = out
    if result is not None and not bits_in_order(result):
        # A copy of what it holds, since bad ids leave `out` untouched.
        result = result.detach().resolve_conj().resolve_neg()
        result = result.clone(memory_format=torch.contiguous_format)
    if result is None:
        result = torch.empty((n, *table._parts.item_shape), dtype=table.dtype, device=target)
    if n and table.row_bytes:
        with table._lock.reading():
            table._check_open()
            if target.type == "cpu":
                on_cpu(table, wanted, rows_as_bytes(result, table.row_bytes), cache)
            else:
                if wanted.device.type == "cpu":
                    # A copy from pageable memory would make the host wait for the GPU.
                    wanted = wanted.pin_memory()
                wanted = wanted.to(target, non_blocking=True)
                on_gpu(table, wanted, result, cache, sort, sm_budget)
    table._count(gathers=1, rows=n)
    return result if out is None or out is result else out.copy_(result)


def on_cpu(table: HostTable, ids: torch.Tensor, data: torch.Tensor, cache: Cache | None) -> None:
    """Gather rows on the CPU, for a reader inside the table's lock.

    Parameters
    ----------
    table : HostTable
        The table.
    ids : torch.Tensor
        int32 or int64 ``[n]`` on the CPU, contiguous and in range.
    data : torch.Tensor
        uint8 ``[n, row_bytes]`` on the CPU, contiguous, to write to.
    cache : Cache or None
        What answers for some of the rows.
    """
    populate(table)
    if table._parts.raw and cache is None:
        table._rows.decode(ids, data)
        table._count(copied_words=ids.shape[0] * table._parts.row_words)
        return
    prepared = prepared_rows(table) if cache is None else None
    if prepared is not None:
        damaged, words = prepared.gather(ids, data)
        raise_damaged(damaged)
        table._count(copied_words=words)
        return
    storage = None if cache is None else cache.storage(CPU)
    counts = torch.zeros(2 * (MAX_SLABS + 1), dtype=torch.int64)
    raise_damaged(table._rows.decode(ids, data, cache=storage, counters=counts))
    table.counters_for(cache).add(counts)


def populate(table: HostTable) -> None:
    """Map the pages of the rows, once."""
    if not table._populated:
        table._populated = True
        buffer = table._parts.buffers.get("words")
        if buffer is not None and buffer.nbytes <= POPULATED_BYTES:
            buffer.populate()


def prepared_rows(table: HostTable) -> PreparedTable | PreparedItems | None:
    """Return the packed rows made ready for gathers on the CPU, or None where that cannot be."""
    rows, overflow_bytes = table._rows, table._rows.overflow_bytes
    found = table._prepared
    # Updates write to memory in place, but for an overflow that has to grow.
    if found is None or found[0] is not rows or found[1] != overflow_bytes:
        storage = rows.storage()
        prepared: PreparedTable | PreparedItems | None = None
        if storage.items_per_row > 1:
            prepared = PreparedItems(storage, rows.layout)
        elif PreparedTable.serves(storage, rows.layout):
            prepared = PreparedTable(storage, rows.layout)
        found = table._prepared = (rows, overflow_bytes, prepared)
    return found[2]


def readable_by_gpu(table: HostTable) -> bool:
    """Tell whether GPUs can read the rows where they are; page-lock them if they are to."""
    buffer = table._parts.buffers.get("words")
    return bool(table._pin and buffer is not None and buffer.ensure_pinned())


def some_on_gpu(table: HostTable, ids: torch.Tensor, out: torch.Tensor) -> None:
    """Gather some rows on a GPU, on torch's current stream, for a reader inside the table's lock.

    Parameters
    ----------
    table : HostTable
        One that is `readable_by_gpu`.
    ids : torch.Tensor
        int64 ``[n]`` on the GPU, contiguous: good ones, which nobody checks, or NO_ROW.
    out : torch.Tensor
        As for `on_gpu`; rows of NO_ROW are left as they are.
    """
    device, parts = out.device, table._parts
    kernels = kernels_on(device, tell=False)
    table._gpus.add(device)
    try:
        if parts.raw:
            raw = table._device_copies.raw_rows(table._rows)
            kernels.copy_rows(raw, parts.item_bytes, ids, out)
        else:
            storage, layout = table._device_copies.get(device, table._rows)
            counters = table.counters.on(device)
            kernels.gather_rows(storage, layout, ids, out, counters=counters)
    finally:
        table._lock.mark_gpu_read(device)


def on_gpu(
    table: HostTable,
    ids: torch.Tensor,
    out: torch.Tensor,
    cache: Cache | None,
    sort: bool | None,
    sm_budget: int | None,
    *,
    from_end: bool = True,
) -> None:
    """Gather rows on a GPU, on torch's current stream, for a reader inside the table's lock.

    Parameters
    ----------
    table : HostTable
        The table.
    ids : torch.Tensor
        int32 or int64 ``[n]`` on the GPU, contiguous; the kernels check them.
    out : torch.Tensor
        The rows ``[n, *row_shape]`` or their bytes uint8 ``[n, row_bytes]``, contiguous, on the
        GPU, to write to.
    cache : Cache or None
        What answers for some of the rows.
    sort, sm_budget : optional
        As in `CompressedTable.gather`.
    from_end : bool
        Whether negative ids count from the end; they are out of range otherwise.
    """
    device, parts = out.device, table._parts
    if not readable_by_gpu(table):
        # The GPU cannot read the rows itself: the CPU gathers them, and a copy brings them.
        on_host = torch.empty(out.shape, dtype=out.dtype)
        wanted = ids.cpu()
        table._check_ids(wanted)
        if not from_end and bool((wanted < 0).any()):
            position = int((wanted < 0).nonzero()[0])
            raise_bad_index(int(wanted[position]), position, len(table), "ids")
        on_cpu(table, wanted, rows_as_bytes(on_host, table.row_bytes), cache)
        out.copy_(on_host)
        return
    table._gpus.add(device)
    try:
        if parts.raw and cache is None:
            rows = table._device_copies.raw_rows(table._rows)
            if sort is None:
                sort = pays_to_sort_rows(device, rows, len(rows), ids.shape[0])
            gather_copied_rows(
                rows,
                parts.item_bytes,
                ids,
                out,
                sort=sort,
                sm_budget=sm_budget,
                from_end=from_end,
            )
            table._count(copied_words=ids.shape[0] * parts.row_words)
            return
        storage, layout = table._device_copies.get(device, table._rows)
        if sort is None:
            # With a cache, few ids go to the table, and those that do not would lose by the order.
            sort = cache is None and pays_to_sort_rows(
                device, storage.words, storage.n_rows, ids.shape[0]
            )
        gather_packed_rows(
            storage,
            layout,
            ids,
            out,
            cache=None if cache is None else cache.storage(device),
            counters=table.counters_for(cache).on(device),
            sort=sort,
            sm_budget=sm_budget,
            from_end=from_end,
        )
    finally:
        table._lock.mark_gpu_read(device)
