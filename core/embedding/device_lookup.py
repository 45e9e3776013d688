"""Training lookups by ids on a GPU: the host neither reads the ids nor waits for the GPU.

See `DeviceSlots`, which owns the cache while such lookups go on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..engine.kernels.cuda.slots import BagOffsets, SlotColumns
from ..errors import BitslabError
from .device_access import DeviceAccess
from .device_slots import DeviceSlots, DeviceUses
from .gradients import NONE, PinnedLookup
from .ownership import take_back
from .resident_cache import with_spare
from .row_exchange import RowExchange
from .sizes import resized
from .state import CacheState

#: Slots that are added, more than a batch needs: batches differ a little in size.
MORE = 1.25
#: Added slots, with gradient and optimizer state, take at most this share of the free GPU memory.
MEMORY_SHARE = 0.25
#: Lookups done by the host after an allocation failed, before the next attempt.
PAUSE_LOOKUPS = 1000


class LookedUp(NamedTuple):
    """What a lookup has found."""

    #: ``[M, D]``, a matrix, and int64 where the row of each id is in it.
    weight: torch.Tensor
    indices: torch.Tensor
    #: Index of the padding row.
    padding: int | None
    #: int64 ``[B]`` on the device, where they were asked for: such as kernels of torch can take.
    offsets: torch.Tensor | None = None
    #: Where the gradient is reported only once `track_result` knows what was computed.
    pinned: PinnedLookup | None = None


class _BySlot(NamedTuple):
    """The tensors on the device that have an entry for each slot."""

    data: torch.Tensor
    grad: torch.Tensor | None
    columns: SlotColumns
    #: Of each optimizer, by name.
    states: list[dict[str, torch.Tensor]]


def runs_on_gpu(rows: CacheState, ids: torch.Tensor, *, fetches: bool) -> bool:
    """Return whether a lookup may run on the GPU alone, whose `DeviceAccess` there is.

    Parameters
    ----------
    rows : CacheState
        The rows.
    ids : torch.Tensor
        int64 or int32.
    fetches : bool
        Whether the lookup may make rows resident.
    """
    if ids.device != rows.device or rows.cache != "rows":
        return False
    # Rows of no bytes are the host's.
    return rows.parameter.shape[1] > 0 and (fetches or rows.all_resident)


def look_up_on_gpu(
    rows: CacheState,
    ids: torch.Tensor,
    access: DeviceAccess,
    *,
    counts: bool,
    wants_grad: bool,
    padding_idx: int | None,
    bags: BagOffsets | None = None,
    follows: bool = False,
) -> LookedUp | None:
    """Look rows up on the GPU without waiting for it.

    A bad id is raised by the next call on the GPU, by what writes the rows back, or by
    `bitslab.raise_pending_errors`. Until then it counts as the first or the last row, so that
    torch's kernels read within bounds: a step taken before that moves this row.

    Parameters
    ----------
    rows : CacheState
        The rows.
    ids : torch.Tensor
        int64 or int32 on their GPU.
    access : DeviceAccess
        How the GPU reaches them.
    counts : bool
        Whether the batch updates what decides which row leaves first.
    wants_grad : bool
        Whether a gradient is wanted.
    padding_idx : int, optional
        As for `CachedRows.lookup_padded`.
    bags : BagOffsets, optional
        Offsets to look at on the way; there are ids then.
    follows : bool
        Whether the caller leaves the indices alone, and calls `track_result`.

    Returns
    -------
    LookedUp or None
        None where the host has to look them up, and nothing was done.

    Raises
    ------
    BitslabError
        When a CUDA graph is captured: its replays would not be counted on the host.
    """
    device = rows.device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise BitslabError(
            "a lookup in training cannot be captured by a CUDA graph: call eval() first, or leave "
            "the lookup out of the graph"
        )
    flat = ids
    if flat.dim() != 1 or not flat.is_contiguous():
        flat = flat.reshape(-1).contiguous()
    n, parameter = flat.shape[0], rows.parameter
    kernels = access.kernels(device)  # raises errors of earlier lookups
    if rows.all_resident:
        uses = rows.device_uses
        if uses is not None and uses.is_used_up:
            uses.sync()
            uses = None
        if uses is None or uses.device != device:
            uses = rows.device_uses = DeviceUses(rows.slot_table, device, kernels)
        index = torch.empty_like(flat, dtype=torch.int64)
        counters = rows.statistics.record_on_device(n, device)
        if n:
            uses.look_up(flat, index, counters, uses=counts, bags=bags)
        # The parameter is the table: whatever changes it is found when rows are written back.
        weight = parameter if wants_grad else parameter.data
        if ids.dim() != 1:
            index = index.view(ids.shape)
        return LookedUp(weight, index, padding_idx, None if bags is None else bags.sound)
    training, device_slots = rows.training, rows.device_slots
    if device_slots is not None:
        if device_slots.is_used_up:
            take_back(rows)
        else:
            device_slots.follow()
    training.release_applied()
    oldest = training.oldest_kept
    device_slots = _with_room(rows, access, n, oldest)
    states = None if device_slots is None else training.adapters.followed_states()
    if device_slots is None or states is None:
        return None
    exchange, parameter = rows.exchange, rows.parameter
    assert exchange is not None
    exchange.begin(parameter.data, states, n)
    counters = rows.statistics.record_on_device(n, device)
    # Always new memory: ids may be written to before backward, and so may what is returned.
    index = torch.empty_like(flat, dtype=torch.int64)
    kept = None if follows or not wants_grad else torch.empty_like(index)
    number = device_slots.look_up(
        flat, index, counters, oldest, exchange, uses=counts, kept=kept, bags=bags
    )
    if n:
        training.gradients.record_reuse_from(number)
    padding = None if padding_idx is None else rows.slot_table.slot_or_none(padding_idx)
    pinned, weight = None, parameter.data
    if wants_grad:
        pinned = training.hold_result(index, number) if follows else None
        if pinned is not None:
            weight = parameter
        else:
            on_device = index if kept is None else kept
            weight = training.hold(
                parameter, NONE, NONE, whole=True, on_device=on_device, number=number
            )
    if ids.dim() != 1:
        index = index.view(ids.shape)
    return LookedUp(weight, index, padding, None if bags is None else bags.sound, pinned)


def _with_room(
    rows: CacheState, access: DeviceAccess, n_ids: int, oldest: int | None
) -> DeviceSlots | None:
    """Return the slots on the device, enough of them for a lookup of `n_ids` ids.

    Returns
    -------
    DeviceSlots or None
        None where the host has to look the ids up.
    """
    training, wanted = rows.training, rows.wanted_slots
    if wanted.pause:
        wanted.pause -= 1
        return None
    exchange = rows.exchange
    if exchange is None or not exchange.settle():
        # Asked each time: a table that is packed again has other memory.
        if not access.reads_table(rows.table):
            return None
    try:
        if rows.device_slots is None:
            rows.slot_table.repair_if_interrupted()
            training.retire_steps()
            # Gradients of lookups that bypassed the cache may grow the parameter.
            bypassing = any(lookup.bypassed for lookup in training.live)
            if not training.idle or training.in_use or bypassing:
                return None
            states = training.adapters.followed_states()
            if states is None:
                return None
            training.pin()
            kernels = access.kernels(rows.device, raise_errors=False)
            rows.exchange = RowExchange(rows.row_store, access, kernels)
            rows.device_slots = DeviceSlots(
                rows.slot_table,
                rows.device,
                kernels,
                has_state=len(states) > 0,
            )
        found = rows.device_slots
        needed, n_slots = found.slots_needed(n_ids, oldest), found.n_slots
        enough = needed <= n_slots
        if not enough:
            wanted.slots = min(max(wanted.slots, int(MORE * needed)), len(rows))
        if wanted.slots > n_slots and not training.in_use:  # else gradients have its shape
            _widen(rows, found, wanted.slots)
            enough = True
        return found if enough else None
    except torch.OutOfMemoryError:
        wanted.pause = PAUSE_LOOKUPS
        return None


# More slots


def _widen(rows: CacheState, device_slots: DeviceSlots, n_slots: int) -> None:
    """Have `n_slots` slots."""
    # The parameter must not have the shape of the whole table: state is recognised by it.
    n_slots += n_slots == len(rows)
    more = n_slots - device_slots.n_slots
    states = [adapter.states() for adapter in rows.training.adapters]
    data, grad = rows.parameter.data, rows.parameter.grad
    before = _BySlot(data, grad, device_slots.columns, states)
    with torch.inference_mode(False), torch.no_grad():
        # Allocate everything before anything changes.
        _check_memory(rows, more, before)
        grown = data.new_zeros(data.shape[0] + more, data.shape[1])
        grown[: data.shape[0]] = data
        after = _BySlot(
            with_spare(grown),
            None if grad is None else resized(grad, grown.shape),
            device_slots.widened(more),
            [adapter.widened(more) for adapter in rows.training.adapters],
        )
        try:
            _install(rows, device_slots, after)
            rows.slot_table.grow(np.full(more, -1))
        except BaseException:
            if len(rows.slot_table.id_of) < len(after.data):
                _install(rows, device_slots, before)
            raise


def _install(rows: CacheState, device_slots: DeviceSlots, tensors: _BySlot) -> None:
    """Use other tensors from now on."""
    device_slots.install(tensors.columns)
    for adapter, states in zip(rows.training.adapters, tensors.states, strict=True):
        adapter.follow(states)
    before, rows.parameter.grad = rows.parameter.grad, None
    rows.watch.set_data(tensors.data)
    rows.parameter.grad = tensors.grad
    rows.training.gradients.follow(before, tensors.grad)


def _check_memory(rows: CacheState, more: int, there: _BySlot) -> None:
    """Raise OutOfMemoryError if `more` rows would take too large a share of the free memory."""
    device = rows.device
    if device.type != "cuda":
        return
    states = [t for each in there.states for t in each.values()]
    of_rows = [there.data, there.data, *states]  # twice: the gradient is as large as the rows
    needed = more * sum(t.element_size() * t[:1].numel() for t in of_rows)
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device)
    free -= torch.cuda.memory_allocated(device)
    if needed > MEMORY_SHARE * free:
        raise torch.OutOfMemoryError(f"{needed} bytes for the miss buffer, {free} are free")
