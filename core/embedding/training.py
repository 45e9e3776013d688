"""Training of cached rows: they keep their slots until their gradient has been applied."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import BitslabError
from .adapters import Adapters
from .device_slots import DeviceSlots
from .gradient_watch import GradientWatch
from .gradients import (
    NONE,
    Array,
    BackwardPass,
    BackwardPasses,
    PinnedLookup,
    bypass,
    given_slots,
    on_device_of,
    renumbered,
    sparse_rows,
    track,
)
from .optimizers import watch
from .ownership import take_back
from .resident_cache import with_spare
from .row_state import RowState
from .sizes import resized
from .state import CacheState
from .written import write_back

#: Lookups with pending gradients from which on slots whose gradient was zeroed are released.
MANY_LOOKUPS = 32
#: Stands for the ids of a lookup whose rows have left.
GONE = -2


class Training:
    """Gradients and optimizers of cached rows. Callers hold the rows' lock.

    Rows of a lookup keep their slots while a backward pass may reach it (the lookup *waits*), and
    until a step has applied their gradient (it is *pending*). Gradients of lookups that bypassed
    the cache are added to the parameter's at the end of the backward pass: the parameter grows to
    hold their rows for the step, and shrinks at the next lookup. Such a pass sums all of its
    gradients here, in the order in which autograd computes them, as autograd does.

    Parameters
    ----------
    rows : CacheState
        The rows.
    stores : list of dict of str to RowState
        State of optimizers that are not attached yet, from before a copy.
    """

    def __init__(self, rows: CacheState, stores: list[dict[str, RowState]]) -> None:
        self._owner = weakref.ref(rows)
        self.adapters = Adapters(rows, stores)
        self.gradients = GradientWatch(rows)
        self._live: list[weakref.ref[PinnedLookup]] = []
        self._pending: list[PinnedLookup] = []
        self._passes = BackwardPasses()
        self._grown = rows.slot_table.extra_rows > 0
        # A sparse gradient as an optimizer has it for a step, and as it was.
        self._summed: tuple[torch.Tensor | None, torch.Tensor] | None = None
        self.moved()

    @property
    def _rows(self) -> CacheState:
        rows = self._owner()
        if rows is None:
            raise BitslabError("backward: the module that looked these rows up is gone")
        return rows

    def moved(self) -> None:
        """Watch the parameter after it has become another object."""
        if self._rows.trainable:
            watch(self._rows)
            self.gradients.watch()

    @property
    def _on_host(self) -> bool:
        """Whether gradients are summed on the host, bit for bit as torch sums them."""
        return self._rows.device.type == "cpu" and not self._rows.owned_by_device

    # Lookups whose gradient may be computed

    def hold(
        self,
        matrix: torch.Tensor,
        slots: Array,
        ids: Array,
        *,
        whole: bool,
        on_device: torch.Tensor | None = None,
        number: int = 0,
    ) -> torch.Tensor:
        """Return rows of a batch with a graph that reports their gradient; pin their slots.

        Parameters
        ----------
        matrix : torch.Tensor
            ``[M, D]``, the rows and a row of zeros behind them; or the parameter's data.
        slots, ids : numpy.ndarray
            int64 ``[u]``; no slots where the lookup bypassed the cache.
        whole : bool
            Whether the matrix is the parameter's.
        on_device, number
            As for `PinnedLookup`.
        """
        lookup = self._pinned(slots, ids, on_device, number)
        parameter = self._rows.parameter
        if on_device is not None and self.gradients.is_direct():
            return track(parameter, None, None, self, lookup)
        lookup.origin = self.gradients.origin()
        if lookup.bypassed:
            return bypass(parameter, matrix, self, lookup)
        if whole:  # detached: autograd detects writes to the parameter before backward
            return track(lookup.origin, parameter.detach(), None, self, lookup)
        return track(lookup.origin, matrix, torch.from_numpy(slots), self, lookup)

    def hold_result(self, on_device: torch.Tensor, number: int) -> PinnedLookup | None:
        """Return a lookup on the device for `track_result`; None where `hold` is to be used."""
        direct = self.gradients.is_direct()
        return self._pinned(NONE, NONE, on_device, number) if direct else None

    def _pinned(
        self, slots: Array, ids: Array, on_device: torch.Tensor | None, number: int
    ) -> PinnedLookup:
        lookup = PinnedLookup(slots, ids, self._rows.row_store.changes, on_device, number)
        self._live = [*(r for r in self._live if r() is not None), weakref.ref(lookup)]
        return lookup

    def _waiting(self) -> list[PinnedLookup]:
        return [lookup for lookup in self.live if not lookup.used and len(lookup.slots)]

    def pin(self) -> None:
        """Set `pinned` of the slots whose rows may not leave."""
        slot_table = self._rows.slot_table
        slot_table.pinned[:] = False
        for row in self._rows.pinned_ids:
            if slot_table.slot_of[row] >= 0:
                slot_table.pinned[slot_table.slot_of[row]] = True
        for lookup in (*self._waiting(), *self._pending):
            slot_table.pinned[lookup.slots] = True

    # Backward

    def on_gradient(
        self,
        node: Any,
        lookup: PinnedLookup,
        grad: torch.Tensor,
        slots: torch.Tensor | None,
        shape: torch.Size,
    ) -> torch.Tensor | None:
        """Backward hook: mark rows dirty and pinned; return the gradient, or None if summed here.

        Parameters
        ----------
        node, lookup
            The node that the gradient has reached, and the lookup.
        grad : torch.Tensor
            Of the parameter; or of the rows in `slots` and of the row of zeros behind them.
        slots : torch.Tensor or None
            int64 ``[u]``.
        shape : torch.Size
            Shape of the parameter at the lookup.
        """
        rows = self._rows
        with rows.lock:
            if rows.closed:
                raise BitslabError("rows: are closed")
            this = self._passes.reached(node, self._end_pass)  # rows are not moved in one
            if lookup.on_device is None and rows.device_slots is not None:
                take_back(rows)
            self._check_resident(lookup)
            rows.watch.check()
            self.gradients.check_cleared("backward")
            collects = self._collects(rows, this, shape)
            if collects and lookup.on_device is not None:
                take_back(rows)  # gradients are summed here by id
            kept: torch.Tensor | None
            if grad.is_sparse:
                on_host = rows.device_slots is None and rows.device.type == "cpu"
                if slots is None and not collects and not on_host:
                    kept = grad
                else:
                    kept = self._on_sparse_gradient(
                        this, lookup, grad, slots, shape, collects=collects
                    )
            elif collects:
                rows_only = grad if slots is not None else grad[on_device_of(grad, lookup.slots)]
                self._collect(this, lookup, None, rows_only)
                kept = None
            elif slots is not None:
                kept = grad.new_zeros(shape).index_copy_(0, slots, grad[: len(slots)])
            else:
                kept = grad
            lookup.used = True
            if lookup.origin is None and kept is not None:
                this.add(kept)
            if lookup.on_device is not None:
                assert rows.device_slots is not None
                rows.device_slots.changed(lookup.on_device, lookup.number)
                return kept
            rows.slot_table.dirty[lookup.slots] = True
            self._pending.append(lookup)
            return kept

    def _on_sparse_gradient(
        self,
        this: BackwardPass,
        lookup: PinnedLookup,
        grad: torch.Tensor,
        slots: torch.Tensor | None,
        shape: torch.Size,
        *,
        collects: bool,
    ) -> torch.Tensor | None:
        rows = self._rows
        if slots is not None:
            picked = grad._indices()[0]
            real = picked < len(slots)
            grad = sparse_rows(slots[picked[real]], grad._values()[real], shape)
        # Sparse gradients are added to each other in an order that depends on how their indices
        # compare, so that has to happen to those of ids. One alone is as well left to autograd.
        summed = self._on_host and this.accumulates
        summed = summed and (
            rows.parameter.grad is not None or any(other is not lookup for other in self._waiting())
        )
        if not summed and not collects:
            return grad
        self._collect(this, lookup, None, renumbered(grad, rows.slot_table.id_of, rows.shape))
        return None

    def take(
        self, node: Any, lookup: PinnedLookup, found: torch.Tensor | None, grad: torch.Tensor
    ) -> None:
        """Collect the gradient of a lookup that bypassed the cache."""
        rows = self._rows
        with rows.lock:
            rows.watch.check()
            self.gradients.check_cleared("backward")
            if grad.is_sparse:
                positions = grad._indices()[0].cpu()
                real = positions < len(lookup.ids)
                ids = torch.from_numpy(lookup.ids)[positions[real]].to(grad.device)
                values = grad._values()[real.to(grad.device)]
                grad = sparse_rows(ids, values, rows.shape)
            self._collect(self._passes.reached(node, self._end_pass), lookup, found, grad)
            lookup.used = True

    def _check_resident(self, lookup: PinnedLookup) -> None:
        if lookup.on_device is not None:
            if not lookup.used:
                return  # no row leaves before the first backward pass and step
            device_slots = self._rows.device_slots
            there = not (
                device_slots is not None and device_slots.have_left(lookup.on_device, lookup.number)
            )
        else:
            id_of = self._rows.slot_table.id_of
            there = not len(lookup.slots) or lookup.slots.max() < len(id_of)
            there = there and np.array_equal(id_of[lookup.slots], lookup.ids)
        if not there:
            raise BitslabError(
                "backward: rows of this lookup have left the cache since an earlier backward "
                "pass and step; look them up again"
            )

    def _collects(self, rows: CacheState, this: BackwardPass, shape: torch.Size) -> bool:
        """Return whether a pass sums gradients here: autograd could not, or in another order."""
        if this.taken or shape != rows.parameter.shape:
            return True
        for ref in self._live if this.accumulates else ():
            lookup = ref()
            if lookup is not None and lookup.on_device is None and lookup.bypassed:
                return True
        return False

    def _collect(
        self,
        this: BackwardPass,
        lookup: PinnedLookup,
        found: torch.Tensor | None,
        grad: torch.Tensor,
    ) -> None:
        """Keep a gradient until the pass ends."""
        why = ""
        if not this.accumulates:
            why = "torch.autograd.grad"
        elif torch.is_grad_enabled():
            why = "create_graph=True"
        elif self.gradients.has_other_hooks:
            why = "a hook on the parameter"
        if why:
            raise BitslabError(
                f"backward: {why} is not possible with a batch of more rows than the cache has "
                f"room for, which is {self._rows.cache_rows} rows; make the cache larger"
            )
        this.taken.append((lookup, found, grad.detach()))

    def _end_pass(self, this: BackwardPass) -> None:
        """Add the gradients of a pass to the parameter's, which grows to hold their rows."""
        rows = self._rows
        with rows.lock:
            self._passes.forget(this)
            if not this.taken and rows.device_slots is not None:
                return  # there is an empty slot
        with rows.lock, torch.no_grad():
            taken, this.taken = this.taken, []
            if not taken:
                self._leave_one_free()
                return
            take_back(rows)
            self.gradients.before_backward()
            for lookup, found, _ in taken:
                self._make_resident(lookup, found)
            self._leave_one_free()
            sparse: torch.Tensor | None = None
            dense: torch.Tensor | None = None
            for lookup, _, grad in taken:
                if grad.is_sparse:
                    sparse = grad if sparse is None else sparse + grad
                    continue
                where = on_device_of(grad, rows.slot_table.slot_of[lookup.ids].astype(np.int64))
                given = grad[: len(lookup.ids)]
                if dense is None:
                    dense = torch.zeros_like(rows.parameter.data).index_copy_(0, where, given)
                else:
                    dense[where] += given
            if sparse is not None:
                self._add_sparse(sparse)
            if dense is not None:
                old = rows.parameter.grad
                if old is None or old.is_sparse:
                    rows.parameter.grad = dense if old is None else dense + old
                else:
                    old.add_(dense)
        hooks: Any = getattr(rows.parameter, "_post_accumulate_grad_hooks", None)
        for hook in list((hooks or {}).values()):
            hook(rows.parameter)

    def _make_resident(self, lookup: PinnedLookup, found: torch.Tensor | None) -> None:
        """Grow the parameter to hold the rows of a gradient."""
        rows = self._rows
        slot_table = rows.slot_table
        new = np.flatnonzero(slot_table.slot_of[lookup.ids] < 0)
        if len(new):
            ids = lookup.ids[new]
            if found is None or lookup.changes != rows.row_store.changes:
                fresh = rows.row_store.gather(ids)  # a step may have changed them since the lookup
            else:
                fresh = found[on_device_of(found, new)]
            self._grow(ids, fresh)
        slots = slot_table.slot_of[lookup.ids].astype(np.int64)
        slot_table.dirty[slots] = True
        if lookup.bypassed:
            added = PinnedLookup(slots, lookup.ids)
            added.used = True
            self._pending.append(added)

    def _grow(self, ids: Array, fresh: torch.Tensor) -> None:
        rows = self._rows
        parameter, first = rows.parameter, len(rows.slot_table.id_of)
        data = torch.cat([parameter.data[:first], fresh])
        before = grad = parameter.grad
        if grad is not None:
            grad = resized(grad, data.shape)
        parameter.grad = None
        self._grown = True
        self.adapters.grow(ids, first)
        rows.watch.set_data(data)
        parameter.grad = grad
        self.gradients.follow(before, grad)
        rows.slot_table.grow(ids)

    def _leave_one_free(self) -> None:
        """Append an empty slot to the parameter if lookups' gradients fill all slots.

        It distinguishes a gradient that is changed by hand everywhere from one that is scaled.
        """
        rows = self._rows
        n_slots = len(rows.slot_table.id_of)
        n_held = sum(len(lookup.slots) for lookup in self._pending)
        if rows.all_resident or rows.owned_by_device or n_held < n_slots:
            return
        free = np.ones(n_slots, bool)
        for lookup in self._pending:
            free[lookup.slots] = False
        if not free.any():
            self._grow(np.array([-1]), rows.parameter.data.new_zeros(1, rows.row_dim))

    def _add_sparse(self, grad: torch.Tensor) -> None:
        """Add a sparse gradient by ids to that of the parameter."""
        rows = self._rows
        if (old := rows.parameter.grad) is not None:
            grad = renumbered(old, rows.slot_table.id_of, rows.shape) + grad
        rows.parameter.grad = renumbered(grad, rows.slot_table.slot_of, rows.parameter.shape)

    # Between steps

    @property
    def step_may_come(self) -> bool:
        """Whether a step could change rows: there is a gradient, or a pass is under way."""
        return self._rows.parameter.grad is not None or len(self._passes) > 0

    @property
    def idle(self) -> bool:
        """Whether no gradient is pending, and the parameter has its size and was not written to."""
        rows = self._rows
        busy = self._pending or self._grown or rows.owned_by_device
        return not (busy or rows.watch.changed)

    @property
    def pass_under_way(self) -> BackwardPass | None:
        """The backward pass that this code runs in, if it has reached a lookup."""
        return self._passes.current()

    @property
    def in_pass(self) -> bool:
        """Whether a backward pass is under way."""
        return len(self._passes) > 0

    @property
    def in_use(self) -> bool:
        """Whether a gradient is pending, or may still be computed."""
        return self.held or self.in_pass or not all(lookup.used for lookup in self.live)

    @property
    def held(self) -> bool:
        """Whether a gradient waits for a step."""
        device_slots = self._rows.device_slots
        return bool(self._pending) or (device_slots is not None and device_slots.holding)

    @property
    def oldest_kept(self) -> int | None:
        """The first batch on the device whose gradient may be computed or waits for a step."""
        device_slots = self._rows.device_slots
        first = None if device_slots is None else device_slots.held_from
        for ref in self._live:
            if (lookup := ref()) is not None and lookup.on_device is not None and not lookup.used:
                first = lookup.number if first is None else min(first, lookup.number)
        return first

    @property
    def live(self) -> list[PinnedLookup]:
        """The lookups whose graph is alive."""
        return [lookup for ref in self._live if (lookup := ref()) is not None]

    def sync_slots(self, held: Array, device_slots: DeviceSlots) -> None:
        """Read from the GPU which slots its lookups use.

        Parameters
        ----------
        held : numpy.ndarray
            int64, slots whose gradient waits for a step.
        device_slots : DeviceSlots
            Has looked them up; the host's table has been updated.
        """
        id_of = self._rows.slot_table.id_of
        if len(held):
            kept = PinnedLookup(held, id_of[held])
            kept.used = True
            self._pending.append(kept)
        for lookup in self.live:
            if lookup.on_device is not None:
                gone = lookup.used and device_slots.have_left(lookup.on_device, lookup.number)
                lookup.slots = np.unique(lookup.on_device.cpu().numpy())
                lookup.ids = np.full_like(lookup.slots, GONE) if gone else id_of[lookup.slots]
                lookup.on_device = None

    def release_applied(self) -> None:
        """Release pending lookups if a step has applied their gradients, or they were dropped."""
        rows = self._rows
        rows.watch.check()
        held = self._pending or (rows.device_slots is not None and rows.device_slots.holding)
        if held and rows.parameter.grad is None and not self._passes:
            self.release()

    def release(self) -> None:
        """Release all pending lookups."""
        self._pending.clear()
        if (device_slots := self._rows.device_slots) is not None and device_slots.holding:
            device_slots.release()

    def retire_steps(self) -> None:
        """Release lookups of finished steps, take the cache back from the GPU, shrink it."""
        if self.idle:
            return
        self.release_applied()
        if self._rows.owned_by_device:
            take_back(self._rows)  # which calls `has_grown`
        if self.in_pass:
            return
        if len(self._pending) >= MANY_LOOKUPS:
            self.release_zeroed()
        if self._grown and not self._pending:
            capacity = self._rows.slot_table.capacity_rows
            if all(lookup.slots.max() < capacity for lookup in self._waiting()):
                # Autograd may write to it later, so it is no inference tensor.
                with torch.inference_mode(False), torch.no_grad():
                    self._shrink()

    def release_zeroed(self) -> bool:
        """Release slots whose gradient was set to zero; return whether there were any."""
        grad = self._rows.parameter.grad
        if self._passes or grad is None or not self._pending:
            return False
        held = np.unique(np.concatenate([lookup.slots for lookup in self._pending]))
        slots = given_slots(grad, held)
        self._pending.clear()
        if len(slots):
            kept = PinnedLookup(slots, self._rows.slot_table.id_of[slots])
            kept.used = True
            self._pending.append(kept)
        return len(slots) < len(held)

    def _shrink(self) -> None:
        """Write rows beyond the capacity back to the host, and remove their slots."""
        rows = self._rows
        slot_table, parameter = rows.slot_table, rows.parameter
        capacity = slot_table.capacity_rows
        slots = np.arange(capacity, len(slot_table.id_of))
        slots = slots[slot_table.id_of[slots] >= 0]
        ids = slot_table.id_of[slots]
        write_back(rows, slots[slot_table.dirty[slots]])
        self.adapters.save(slots, ids)
        # From here on an interruption leaves at worst more rows than the slot table has slots for,
        # which are cut off the next time.
        slot_table.shrink()
        self.adapters.shrink(capacity)
        grad, parameter.grad = parameter.grad, None
        rows.watch.set_data(with_spare(parameter.data[:capacity].clone()))
        if grad is not None:
            parameter.grad = kept = resized(grad, parameter.shape)
            self.gradients.follow(grad, kept)
            if len(given_slots(grad, slots)):
                self.gradients.record_dropped(kept)
        self._grown = False

    # Steps

    def before_step(self, optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> None:
        """Check options and gradient before a step of an optimizer, and align its state.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            It has the parameter.
        options : mapping
            Of the parameter's group, with defaults.
        """
        rows = self._rows
        with rows.lock:
            adapter = self.adapters.attached(optimizer)
            adapter.check(options)
            rows.watch.check()
            if not rows.all_resident:
                self.gradients.check_step(self._pending)
            if type(optimizer) in (torch.optim.Adagrad, torch.optim.SparseAdam):
                self._sum_in_order(negated=bool(options.get("maximize")))
            adapter.align()

    def _sum_in_order(self, *, negated: bool) -> None:
        """Coalesce a sparse gradient in the order of the ids, as torch does for a plain table.

        With `negated` (maximize) it is negated first, which gives zeros of the other sign.
        """
        rows = self._rows
        grad = rows.parameter.grad
        if grad is None or not grad.is_sparse or not self._on_host:
            return
        given, rows.parameter.grad = renumbered(grad, rows.slot_table.id_of, rows.shape), None
        self._add_sparse(-(-given).coalesce() if negated else given.coalesce())
        self._summed = (rows.parameter.grad, grad)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Accept the values of a step, and release its lookups."""
        rows = self._rows
        with rows.lock:
            self.adapters.attached(optimizer).align(made_now=True)
            if self._summed is not None:
                # Later gradients are added to the gradient as it was.
                summed, grad = self._summed
                if rows.parameter.grad is summed:
                    rows.parameter.grad = grad
                self._summed = None
            rows.watch.accept_step()
            self.release()

    def has_grown(self) -> None:
        """Look whether the parameter has rows beyond the cache, to be removed."""
        self._grown = self._rows.slot_table.extra_rows > 0
