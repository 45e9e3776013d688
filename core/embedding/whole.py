"""Operations of cached rows on the whole table: read, load, write back, move, describe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ..devices import checked_device
from ..engine.codecs.base import check_tensor_argument
from ..engine.memory.readonly import plain
from ..errors import ArgumentError, ArgumentTypeError, BitslabError
from .gradients import to_device
from .ownership import sync_from_device, take_back
from .resident_cache import with_spare
from .state import CacheState
from .written import differing, write_back


def decoded(rows: CacheState, begin: int, end: int) -> torch.Tensor:
    """Implement `CachedRows.decoded`."""
    rows.watch.check()
    if rows.all_resident:
        sync_from_device(rows)  # raises what is known of bad ids
        return _checked_data(rows)[begin:end].to("cpu", copy=True).contiguous()
    sync_from_device(rows)  # the GPU writes to the table too
    out = rows.table.decoded(begin, end)
    ids = rows.slot_table.id_of
    slots = np.flatnonzero(rows.slot_table.dirty & (ids >= begin) & (ids < end))
    if len(slots):
        there = rows.parameter.data[to_device(slots, rows.device)]
        out[torch.from_numpy(ids[slots] - begin)] = there.cpu()
    return out


def _checked_data(rows: CacheState) -> torch.Tensor:
    """Return the rows ``[N, D]`` of a parameter that holds all; refuse another."""
    data = rows.parameter.data
    if data.shape != rows.shape or data.dtype != rows.dtype:
        raise BitslabError(
            f"weight: the module's parameter was given {list(data.shape)} of {data.dtype}, "
            f"accepted are {list(rows.shape)} of {rows.dtype}"
        )
    return data


def write_changed(rows: CacheState) -> None:
    """Pack the resident rows that may have changed into the table."""
    if not rows.all_resident:
        write_back(rows, np.flatnonzero(rows.slot_table.dirty))
        return
    # Whoever wrote to the parameter, and however.
    _checked_data(rows)
    for begin, end in rows.ranges(0, len(rows)):
        write_back(rows, differing(rows, np.arange(begin, end)))


def load(rows: CacheState, weight: torch.Tensor | Iterable[torch.Tensor], begin: int) -> None:
    """Implement `CachedRows.load`."""
    if not isinstance(weight, torch.Tensor) and isinstance(weight, Iterable):
        if begin:
            raise ArgumentError(f"begin: {begin}, accepted with batches is 0")
        _replace(rows, _checked(rows, weight))
        return
    _check_rows(rows, weight)
    n_rows = len(weight)
    if not 0 <= begin <= len(rows) - n_rows:
        raise ArgumentError(
            f"weight: {list(weight.shape)} for rows from {begin} on of {list(rows.shape)}"
        )
    weight = plain(weight.detach())
    if n_rows == len(rows):
        ranges = rows.ranges(0, n_rows)
        _replace(rows, (weight[first:last].to(rows.dtype) for first, last in ranges))
        return
    take_back(rows)  # else older rows might come from the device later
    # Writes to other rows are still refused until those are loaded too.
    refused = rows.watch.refuses()
    for first, last in rows.ranges(begin, begin + n_rows):
        piece = weight[first - begin : last - begin].to(rows.dtype)
        rows.row_store.update(np.arange(first, last), piece)
    _read_again(rows, begin, begin + n_rows)
    if refused:
        rows.watch.accept_loaded(begin, begin + n_rows)


def _check_rows(rows: CacheState, weight: torch.Tensor) -> None:
    """Refuse what is no tensor of rows."""
    check_tensor_argument("weight", weight)
    if weight.dim() != 2 or weight.shape[1] != rows.row_dim:
        raise ArgumentError(f"weight: {list(weight.shape)}, accepted are [n, {rows.row_dim}]")
    if not weight.dtype.is_floating_point:
        raise ArgumentTypeError(f"weight: {weight.dtype}, accepted are floating-point rows")


def _checked(rows: CacheState, batches: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield batches in the dtype of the rows, and refuse what is not all of the rows."""
    n_rows = 0
    for batch in batches:
        _check_rows(rows, batch)
        n_rows += len(batch)
        yield plain(batch.detach()).to(rows.dtype)
    if n_rows != len(rows):
        raise ArgumentError(f"weight: batches of {n_rows} rows in all, accepted are {len(rows)}")


def _replace(rows: CacheState, batches: Iterable[torch.Tensor]) -> None:
    """Pack all rows again."""
    take_back(rows)
    rows.row_store.replace(batches)
    _read_again(rows, 0, len(rows))
    # Whatever was written to the parameter before is gone.
    rows.watch.accept()


def _read_again(rows: CacheState, begin: int, end: int) -> None:
    """Read the resident ones of rows begin..end from the table."""
    sync_from_device(rows)
    at, slots = rows.slot_table.among(begin, end)
    if len(slots):
        fresh = rows.table.gather(torch.from_numpy(at + begin), None, rows.device)
        rows.parameter.data[to_device(slots, rows.device)] = fresh
        rows.slot_table.dirty[slots] = rows.training.step_may_come


def flush(rows: CacheState, *, evict: bool) -> None:
    """Implement `CachedRows.flush`."""
    rows.training.retire_steps()
    sync_from_device(rows)
    slot_table = rows.slot_table
    if rows.trainable:
        write_changed(rows)
    rows.row_store.tidy()
    if not evict or rows.all_resident:
        return
    rows.training.pin()
    if slot_table.extra_rows or (slot_table.pinned.sum() > len(rows.pinned_ids)):
        raise BitslabError(
            "flush: gradients of looked-up rows wait for a step; take it, or clear them "
            "with zero_grad(), and drop what was computed from them"
        )
    slots = slot_table.resident()
    slots = slots[~slot_table.pinned[slots]]
    rows.training.adapters.save(slots, slot_table.id_of[slots])
    rows.training.gradients.record_reuse(slots)
    slot_table.evict_slots(slots)


def before_move(rows: CacheState) -> None:
    """Implement `CachedRows.before_move`."""
    rows.training.retire_steps()
    sync_from_device(rows)
    if rows.trainable:
        write_changed(rows)


def moved(rows: CacheState, parameter: torch.nn.Parameter) -> None:
    """Implement `CachedRows.moved`."""
    if parameter.device.type == "meta":
        raise ArgumentError("device: meta; rows of a table cannot go there")
    rows.parameter = parameter
    before = rows.device
    try:
        rows.device = checked_device(parameter.device)
        parameter.data = with_spare(parameter.data)
        rows.row_store.move(rows.device)
        if parameter.dtype != rows.dtype:
            table, dtype = rows.table, parameter.dtype
            ranges = rows.ranges(0, len(rows))
            if rows.all_resident:
                data = parameter.data
                _replace(rows, (data[begin:end].cpu() for begin, end in ranges))
            else:
                _replace(rows, (table.decoded(begin, end).to(dtype) for begin, end in ranges))
    except BaseException:
        # The table has every row as it was.
        rows.device = before
        grad, parameter.grad = parameter.grad, None
        data = torch.zeros(parameter.shape, dtype=rows.dtype, device=before)
        rows.watch.set_data(with_spare(data))
        if grad is not None and grad.device.type != "meta":
            parameter.grad = grad.to(before, rows.dtype)
        _read_again(rows, 0, len(rows))
        rows.row_store.move(before)
        raise
    finally:
        rows.watch.accept()
    if rows.device != before:
        rows.device_uses = None  # synced by `before_move`
    rows.training.moved()


def description(rows: CacheState) -> dict[str, Any]:
    """Return what describes the rows for a copy or another process."""
    rows.watch.check()
    if rows.trainable:
        before_move(rows)
        rows.table.compact(progress=False)
    names = ("parameter", "trainable", "cache", "pinned_ids", "slot_table", "buffer_rows")
    state = {name: getattr(rows, name) for name in names}
    stores = rows.training.adapters.stores()
    return state | {"stores": stores, "row_store": rows.row_store.description()}


def stats_of(rows: CacheState) -> dict[str, Any]:
    """Implement `CachedRows.stats`."""
    table = rows.table.stats()
    hits, misses = rows.statistics.hits, rows.statistics.misses
    lookups, moved = rows.statistics.lookups, table["moved_bytes"]
    if rows.table.codec.keeps_raw:
        moved += rows.statistics.fetched_by_gpu * table["row_bytes"]  # which the table cannot count
    on_device = (rows.device_slots, rows.device_uses, rows.exchange)
    device_bytes = rows.parameter.nbytes + sum(
        each.nbytes for each in on_device if each is not None
    )
    if rows.resident_cache is not None:
        on_gpu = rows.resident_cache.counted()
        hits, misses = hits + on_gpu[0], misses + on_gpu[1]
        lookups += on_gpu[0] + on_gpu[1]
    if rows.row_store.slabs is not None:
        # Rows in slabs are no hits to the statistics: slabs have counters of their own.
        slabs = rows.row_store.slabs.stats()
        hits, misses = slabs["hits"], slabs["misses"]
        lookups = hits + misses
        device_bytes += sum(slabs["slab_bytes"]) + slabs["map_bytes"]
    return {
        "rows": len(rows),
        "row_bytes": table["row_bytes"],
        "codec": table["codec"],
        "raw_bytes": table["raw_bytes"],
        "host_bytes": table["host_bytes"],
        "map_bytes": rows.slot_table.map_bytes,
        "ratio": table["ratio"],
        "cache_rows": rows.row_store.packed_rows or rows.cache_rows,
        "device_bytes": device_bytes,
        "lookups": lookups,
        "hits": hits,
        "misses": misses,
        "hit_rate": hits / (hits + misses) if hits + misses else 0.0,
        "written_back": rows.row_store.written_back + rows.statistics.written_by_gpu,
        "moved_bytes": moved,
        "overflow_bytes": table["overflow_bytes"],
        "notes": list(rows.row_store.notes),
    }
