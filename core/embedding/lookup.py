"""Lookups: rows that are resident, rows that are fetched, and rows that bypass the cache.

Functions behind `CachedRows`; callers hold its lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from ..engine.advisor import MIN_SORTED_IDS, pays_to_sort
from ..engine.codecs.base import check_tensor_argument
from ..engine.kernels.cuda.slots import BagOffsets
from ..errors import ArgumentTypeError, BitslabError, IndexRangeError
from ..tables.counters import Counters
from ..tables.slabs import SlabCache
from .bags import checked_by_lookup, sound_offsets
from .device_access import access_to
from .device_lookup import LookedUp, look_up_on_gpu, runs_on_gpu
from .gradients import NONE, Array, to_device
from .resident_cache import ResidentCache, fits
from .slots import Batch
from .state import CacheState
from .written import write_back

IDS = (torch.int64, torch.int32)


@dataclass(frozen=True, eq=False)
class Found:
    """Rows of a batch: ``matrix[index]``.

    Parameters
    ----------
    matrix : torch.Tensor
        ``[M, D]``.
    index : numpy.ndarray
        int64 ``[n]``, the row of each id in it.
    ids : numpy.ndarray
        int64 ``[u]``, the different ids in the order of their rows, if a gradient is wanted.
    slots : numpy.ndarray
        int64 ``[u]``, their slots; empty where the batch bypassed the cache.
    whole : bool
        Whether the matrix is the parameter itself.
    """

    matrix: torch.Tensor
    index: Array
    ids: Array = field(default_factory=lambda: NONE)
    slots: Array = field(default_factory=lambda: NONE)
    whole: bool = False


def look_up(
    rows: CacheState,
    ids: torch.Tensor,
    *,
    train: bool,
    sparse: bool,
    padding_idx: int | None,
    max_norm: float | None,
    norm_type: float,
    offsets: torch.Tensor | None = None,
    include_last: bool = False,
    follows: bool = False,
) -> LookedUp:
    """Implement `CachedRows.lookup_padded`, and `lookup_bags` with the last three arguments."""
    access = access_to(rows.device)
    bags: BagOffsets | None = None
    if offsets is not None:
        n = ids.shape[0]
        if n and access is not None and checked_by_lookup(offsets, rows.device):
            sound = torch.empty_like(offsets, dtype=torch.int64)
            bags = BagOffsets(offsets, include_last, sound)
        else:
            offsets = sound_offsets(offsets, n, rows.device, include_last=include_last)
    _check_frozen(rows)
    wants_grad = rows.parameter.requires_grad and torch.is_grad_enabled()
    if wants_grad:
        _check_not_averaged(rows)
    fetches = train and rows.trainable and rows.cache == "rows"
    trains = wants_grad or fetches
    check_ids_tensor(ids)
    possible = trains and max_norm is None
    if access is not None and possible and runs_on_gpu(rows, ids, fetches=fetches):
        there = look_up_on_gpu(
            rows,
            ids,
            access,
            counts=fetches,
            wants_grad=wants_grad,
            padding_idx=padding_idx,
            bags=bags,
            follows=follows,
        )
        if there is not None:
            return there if offsets is None or bags is not None else there._replace(offsets=offsets)
    if bags is not None:
        offsets = sound_offsets(
            bags.given, ids.shape[0], rows.device, include_last=bags.include_last
        )
    rows.training.retire_steps()
    if rows.device.type == "cuda" and not trains and max_norm is None:
        return LookedUp(*_decode_on_gpu(rows, ids, padding_idx), offsets)
    host = host_ids(rows, ids)
    if fetches:
        found = fetch(rows, host, wants_grad=wants_grad, sparse=sparse)
    elif wants_grad:
        found = _read_with_grad(rows, host, sparse=sparse)
    else:
        found = _read(rows, host)
    if max_norm is not None:
        _renormalise(rows, host, found, max_norm, norm_type)
    padding = None if padding_idx is None else _position_of(rows, padding_idx, host, found)
    index = to_device(found.index, rows.device)
    if index.shape != ids.shape:
        index = index.view(ids.shape)
    matrix = found.matrix
    if wants_grad:
        matrix = rows.training.hold(matrix, found.slots, found.ids, whole=found.whole)
    return LookedUp(matrix, index, padding, offsets)


def _check_frozen(rows: CacheState) -> None:
    if not rows.trainable and rows.parameter.requires_grad:
        raise BitslabError(
            "weight: is frozen, but requires a gradient; make the module with freeze=False"
        )


def _check_not_averaged(rows: CacheState) -> None:
    """Refuse to train inside DistributedDataParallel, whose ranks hold different rows."""
    around = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if around is not None and any(p is rows.parameter for p in around._module_parameters):
        raise BitslabError(
            "weight: DistributedDataParallel would average the gradients of different rows, since "
            "each rank has rows of its own in the cache; shard the table with "
            "bitslab.integrations.torchrec, or keep it out of the averaging with "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
        )


def check_ids_tensor(ids: torch.Tensor) -> None:
    """Refuse what is no tensor of ids."""
    check_tensor_argument("input", ids)
    if ids.dtype not in IDS:
        raise ArgumentTypeError(f"input: {ids.dtype}, accepted are torch.int32 and torch.int64")


def host_ids(rows: CacheState, ids: torch.Tensor) -> Array:
    """Return ids as int64 ``[n]`` on the host, in range."""
    check_ids_tensor(ids)
    if ids.dtype is not torch.int64 or ids.device.type != "cpu":
        ids = ids.to("cpu", torch.int64)
    host: Array = np.ascontiguousarray(ids.numpy()).reshape(-1)
    bad = rows.slot_table.first_outside(host)
    if bad >= 0:
        raise IndexRangeError(
            f"input: index {int(host[bad])} at position {bad} is out of range for "
            f"{len(rows)} rows, accepted are 0 to {len(rows) - 1}"
        )
    return host


def prefetch(rows: CacheState, ids: torch.Tensor) -> None:
    """Implement `CachedRows.prefetch`."""
    check_ids_tensor(ids)
    if ids.is_cuda or rows.owned_by_device:
        return  # the host does not know which rows are resident
    host = host_ids(rows, ids)
    slots, missing = rows.slot_table.find(host)
    rows.row_store.prefetch(np.unique(host[slots < 0]) if missing else NONE)


def _position_of(rows: CacheState, row: int, host: Array, found: Found) -> int | None:
    """Return the index of a row in the matrix, or of the row of zeros that no id names."""
    if found.whole:
        # Without a slot the row is not in this batch, and -1 would name the last row instead.
        return rows.slot_table.slot_or_none(row)
    at = np.flatnonzero(host == row)
    if not len(at):
        return len(found.matrix) - 1
    found.index[at] = found.index[at[0]]  # it may have been decoded once for each id
    return int(found.index[at[0]])


# Lookups that make rows resident


def fetch(rows: CacheState, host: Array, *, wants_grad: bool, sparse: bool) -> Found:
    """Make the rows of a batch resident, or bypass the cache if they do not fit.

    Parameters
    ----------
    rows : CacheState
        The rows.
    host : numpy.ndarray
        int64 ``[n]`` ids in range.
    wants_grad, sparse : bool
        Whether a gradient is wanted, and whether it will be sparse.
    """
    slot_table = rows.slot_table
    batch = slot_table.look_up(host)
    slots, written = NONE, 0
    if len(batch.missing):
        rows.training.pin()
        room = slot_table.make_room(batch)
        if room is None and rows.training.release_zeroed():
            rows.training.pin()
            room = slot_table.make_room(batch)
        if room is None:
            return _bypass(rows, batch)
        slots = room
        written = _exchange(rows, batch, slots)
    rows.statistics.record(batch, written)
    return _resident(rows, batch, slots, wants_grad=wants_grad, sparse=sparse)


def _exchange(rows: CacheState, batch: Batch, slots: Array) -> int:
    """Put the missing rows of a batch into slots; return how many rows were written back."""
    slot_table = rows.slot_table
    gone = slot_table.id_of[slots]
    held = slots[gone >= 0]
    changed = held[slot_table.dirty[held]]
    step = rows.buffer_rows or len(slots)
    lost = NONE
    try:
        fresh = rows.row_store.gather(batch.missing[:step])
        write_back(rows, changed)
        rows.training.adapters.save(held, slot_table.id_of[held])
        rows.training.gradients.record_reuse(held)
        lost = slots  # the rows in them are on the host by now
        for begin in range(0, len(slots), step):
            if begin:
                fresh = rows.row_store.gather(batch.missing[begin : begin + step])
            rows.parameter.data[to_device(slots[begin : begin + step], rows.device)] = fresh
        slot_table.admit(batch.missing, slots, batch.missing_counts)
        rows.training.adapters.restore(slots, batch.missing)
    except BaseException:
        slot_table.repair(lost)
        raise
    return len(changed)


def _resident(
    rows: CacheState, batch: Batch, slots: Array, *, wants_grad: bool, sparse: bool
) -> Found:
    """Return the rows of a batch that are all resident, its missing ones in `slots` by now."""
    slot_table = rows.slot_table
    all_slots = np.concatenate([slots, batch.touched])
    # A parameter of no rows, which a packed cache has, is none that torch takes for padding_idx.
    if len(rows.parameter) and (not wants_grad or sparse or rows.device.type != "cpu"):
        index = slot_table.resolved(batch, slots)
        ids = slot_table.id_of[all_slots]
        return Found(rows.parameter.data, index, ids, all_slots, whole=True)
    # In the order of the ids, because torch sums the gradient of a row in an order that depends on
    # how the indices of different rows compare.
    ids, index, order = _in_order(slot_table.numbered(batch), slot_table.id_of[all_slots])
    all_slots = all_slots[order]
    matrix = _with_one_more(rows, len(ids))
    here = to_device(all_slots, rows.device)
    torch.index_select(rows.parameter.data, 0, here, out=matrix[:-1])
    return Found(matrix, index, ids, all_slots)


def _bypass(rows: CacheState, batch: Batch) -> Found:
    """Bypass the cache: gather into a temporary matrix; evict nothing."""
    slot_table = rows.slot_table
    missing, touched = batch.missing, batch.touched
    all_ids = np.concatenate([missing, slot_table.id_of[touched]])
    try:
        ids, index, order = _in_order(slot_table.numbered(batch), all_ids)
        matrix = _with_one_more(rows, len(ids))
        position = np.empty_like(order)
        position[order] = np.arange(len(order))
        if len(missing):
            matrix[to_device(position[: len(missing)], rows.device)] = rows.row_store.gather(
                missing
            )
        if len(touched):
            there = rows.parameter.data[to_device(touched, rows.device)]
            matrix[to_device(position[len(missing) :], rows.device)] = there
    finally:
        slot_table.reject(batch)
    rows.statistics.record(batch, 0)
    return Found(matrix, index, ids)


def _in_order(numbers: Array, ids: Array) -> tuple[Array, Array, Array]:
    """Return different ids ``[u]`` ascending, the index of each number among them, and the order.

    ``numbers`` int64 ``[n]`` are indices into `ids`.
    """
    order = np.argsort(ids)
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    return ids[order], position[numbers], order


def _with_one_more(rows: CacheState, n_rows: int) -> torch.Tensor:
    """Return uninitialised rows, and a row of zeros behind them that no id names."""
    matrix = torch.empty(n_rows + 1, rows.row_dim, dtype=rows.dtype, device=rows.device)
    matrix[n_rows:] = 0
    return matrix


# Lookups that leave the cache as it is


def _read_with_grad(rows: CacheState, host: Array, *, sparse: bool) -> Found:
    batch = rows.slot_table.look_up(host, count=False)
    if len(batch.missing):
        return _bypass(rows, batch)
    rows.statistics.record(batch, 0)
    return _resident(rows, batch, NONE, wants_grad=True, sparse=sparse)


def _read(rows: CacheState, host: Array) -> Found:
    slots, missing = rows.slot_table.find(host)
    if not missing and len(rows.parameter):
        rows.statistics.record_rows(len(host), 0)
        return Found(rows.parameter.data, slots, whole=True)
    matrix = _with_one_more(rows, len(host))
    _fill(rows, host, slots, missing, matrix[:-1])
    return Found(matrix, np.arange(len(host)))


def read(rows: CacheState, ids: torch.Tensor) -> torch.Tensor:
    """Implement `CachedRows.read`."""
    _check_frozen(rows)
    rows.training.retire_steps()
    if rows.device.type == "cuda":
        matrix, index, _ = _decode_on_gpu(rows, ids, None)
        whole = matrix.data_ptr() == rows.parameter.data_ptr()
        return matrix[index] if whole else matrix.view(*ids.shape, rows.row_dim)
    host = host_ids(rows, ids)
    slots, missing = rows.slot_table.find(host)
    return rows_of(rows, host, slots, missing).view(*ids.shape, rows.row_dim)


def rows_of(rows: CacheState, host: Array, slots: Array, missing: int) -> torch.Tensor:
    """Return the rows of a batch ``[n, D]`` on the CPU.

    Parameters
    ----------
    rows : CacheState
        The rows.
    host, slots : numpy.ndarray
        int64 ``[n]``: ids in range, and their slots or -1.
    missing : int
        How many have no slot.
    """
    out = torch.empty(len(host), rows.row_dim, dtype=rows.dtype)
    _fill(rows, host, slots, missing, out)
    return out


def _fill(rows: CacheState, host: Array, slots: Array, missing: int, out: torch.Tensor) -> None:
    """Write the rows of a batch to ``[n, D]`` on the device; see `rows_of`."""
    rows.statistics.record_rows(len(host) - missing, missing)
    if not missing:
        torch.index_select(rows.parameter.data, 0, to_device(slots, rows.device), out=out)
        return
    if 2 * missing > len(host):
        # Decoding resident rows as well costs less than selecting the others.
        rows.row_store.decode(host, out)
    else:
        away = np.flatnonzero(slots < 0)
        out[to_device(away, rows.device)] = rows.row_store.gather(host[away])
    if missing < len(host):
        here = np.flatnonzero(slots >= 0)
        there = rows.parameter.data[to_device(slots[here], rows.device)]
        out[to_device(here, rows.device)] = there


def _decode_on_gpu(
    rows: CacheState, ids: torch.Tensor, padding_idx: int | None
) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """Read resident rows from the GPU's memory and the others from the host's, in one kernel.

    Nothing waits for the GPU: the kernel checks ids there, and a bad one is raised by the next call
    on that GPU or by `bitslab.raise_pending_errors`.
    """
    check_ids_tensor(ids)
    return _gathered_on_gpu(rows, ids, padding_idx)


def plain_lookup_on_gpu(
    rows: CacheState, ids: torch.Tensor, padding_idx: int | None, *, masked: bool = True
) -> tuple[torch.Tensor, torch.Tensor, int | None] | None:
    """Look ids up in inference on a GPU, in the plainest case.

    Parameters
    ----------
    rows : CacheState
        The rows, on a GPU.
    ids : torch.Tensor
        int64 or int32, on that GPU.
    padding_idx : int, optional
        As for `CachedRows.lookup_padded`.
    masked : bool
        Whether bad ids are turned into ids that torch refuses; not needed by a kernel that checks.

    Returns
    -------
    tuple or None
        What `CachedRows.lookup_padded` returns. None where there is more to do, such as to raise:
        `CachedRows.lookup_padded` does that.
    """
    with rows.lock:
        frozen = rows.parameter.requires_grad and not rows.trainable
        if rows.closed or frozen or not rows.training.idle:
            return None
        return _gathered_on_gpu(rows, ids, padding_idx, masked=masked)


def cache_on_gpu(rows: CacheState) -> SlabCache | ResidentCache | None:
    """Return the cache that gather kernels read rows in the GPU's memory from, if any."""
    if rows.resident_cache is not None:
        return rows.resident_cache
    if rows.row_store.slabs is not None:
        return rows.row_store.slabs
    if rows.cache == "packed" or not fits(rows.table.row_bytes):
        return None
    rows.resident_cache = ResidentCache(rows)
    return rows.resident_cache


def _gathered_on_gpu(
    rows: CacheState, ids: torch.Tensor, padding_idx: int | None, *, masked: bool = True
) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """Implement `_decode_on_gpu` for ids that are int32 or int64."""
    device, parameter, flat = rows.device, rows.parameter, ids
    if ids.dim() != 1 or not ids.is_contiguous():
        flat = ids.reshape(-1).contiguous()
    n = flat.shape[0]
    if flat.device != device:
        if flat.device.type != "cpu":
            raise ArgumentTypeError(f"input: on {flat.device}, accepted are cpu and {device}")
        host = torch.from_numpy(host_ids(rows, ids))
        # A copy from pageable memory would make the host wait for the GPU.
        flat = host.pin_memory().to(device, non_blocking=True)
    if rows.cache == "rows" and rows.all_resident:
        if masked:
            # torch takes negative ids for memory before the rows; so it refuses them.
            flat = flat & torch.iinfo(flat.dtype).max
        return parameter.data, flat.view(ids.shape), padding_idx
    cache = cache_on_gpu(rows)
    sort = None if cache is None else _pays_to_sort(rows, cache.counters, n)
    index = rows.numbers(n)
    if ids.dim() != 1:
        index = index.view(ids.shape)
    spare = 0 if padding_idx is None else 1
    matrix = torch.empty(n + spare, parameter.shape[1], dtype=parameter.dtype, device=device)
    rows.table.gather_on_gpu(cache, flat, matrix[:n] if spare else matrix, sort)
    if padding_idx is None:
        return matrix, index, None
    matrix[n:] = 0
    return matrix, torch.where(flat.view(ids.shape) == padding_idx, n, index), n


def _pays_to_sort(rows: CacheState, counters: Counters, n: int) -> bool:
    """Return whether enough rows miss the GPU's memory that sorting the ids pays."""
    if n <= MIN_SORTED_IDS:
        return False
    rate = rows.miss_rate
    missing = int(n * rate.update(counters, rows.device))
    if missing <= MIN_SORTED_IDS:
        return False
    power = missing.bit_length()
    found = rate.sorts.get(power)
    if found is None:
        span_bytes = rows.table.nbytes
        row_bytes = max(1, span_bytes // len(rows))
        found = rate.sorts[power] = pays_to_sort(rows.device, span_bytes, row_bytes, missing)
    return found


def _renormalise(
    rows: CacheState, host: Array, found: Found, max_norm: float, norm_type: float
) -> None:
    """Scale down the rows of a batch that are longer than `max_norm`, in the table too."""
    index, matrix = to_device(found.index, rows.device), found.matrix
    used = torch.unique(index)
    before = matrix[used]
    torch.embedding_renorm_(matrix, index, max_norm, norm_type)
    changed = used[(matrix[used] != before).any(1)]
    if not len(changed):
        return
    row_at = np.empty(matrix.shape[0], np.int64)
    row_at[found.index] = host
    ids = row_at[changed.cpu().numpy()]
    slots = rows.slot_table.slot_of[ids].astype(np.int64)
    there = slots >= 0
    rows.slot_table.dirty[slots[there]] = True
    if not found.whole:
        kept = torch.from_numpy(there).to(rows.device)
        rows.parameter.data[to_device(slots[there], rows.device)] = matrix[changed[kept]]
        rows.row_store.update(ids[~there], matrix[changed[~kept]])
