"""What a step needs of cached rows: they stay until their gradient has been applied."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import BitslabError
from .device_notes import notes_of, take_notes
from .gradient_watch import GradientWatch
from .gradients import (
    NONE,
    Array,
    BackwardPass,
    Use,
    accumulates,
    at_end_of_backward,
    detour,
    given_slots,
    on_device_of,
    pass_number,
    sparse_rows,
    track,
)
from .guests import let_go
from .optimizers import OptimizerLink, has_stepped, watch
from .resident_cache import with_spare
from .sizes import resized
from .state import RowState

if TYPE_CHECKING:
    from .rows import CachedRows


#: Lookups whose gradients are looked at together, for those that were set to zero.
MANY_LOOKUPS = 32


class Training:
    """Gradients and optimizers of cached rows. The rows' lock is held by whoever calls.

    Rows of a lookup may not leave their slots while a backward pass may come (the lookup *waits*),
    nor until a step has applied their gradient (it is *pending*). Gradients of rows that were
    looked up beside the parameter (a *detour*) are brought to it at the end of the backward pass;
    it grows to hold those rows for the step, and shrinks at the next lookup. A pass with a detour
    sums all of its gradients here, in the order in which they arrive, as autograd does.

    Parameters
    ----------
    rows : CachedRows
        The rows.
    stores : list of dict of str to RowState
        State of optimizers that are not known yet, from before a copy.
    """

    def __init__(self, rows: CachedRows, stores: list[dict[str, RowState]]) -> None:
        self._owner = weakref.ref(rows)
        self.links: list[OptimizerLink] = []
        self._orphans = list(stores)
        self.gradients = GradientWatch(rows)
        self._live: weakref.WeakSet[Use] = weakref.WeakSet()
        self._pending: list[Use] = []
        # Those under way, by number; autograd holds each while it lasts.
        self._passes: weakref.WeakValueDictionary[int, BackwardPass] = weakref.WeakValueDictionary()
        self._grown = rows.residents.extra_rows > 0
        # A sparse gradient as an optimizer has it for a step, and as it was.
        self._summed: tuple[torch.Tensor | None, torch.Tensor] | None = None
        self.moved()

    @property
    def _rows(self) -> CachedRows:
        rows = self._owner()
        if rows is None:
            raise BitslabError("backward: the module that looked these rows up is gone")
        return rows

    def moved(self) -> None:
        """Follow a parameter that is another object now."""
        if self._rows.trainable:
            watch(self._rows)
            self.gradients.watch()

    @property
    def _on_host(self) -> bool:
        """Whether gradients are summed on the host, bit for bit as torch sums them."""
        return self._rows.device.type == "cpu"

    # Lookups whose gradient may come

    def hold(
        self,
        matrix: torch.Tensor,
        slots: Array,
        ids: Array,
        *,
        whole: bool,
        on_device: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return rows of a batch such that their gradient arrives, and keep them in their slots.

        Parameters
        ----------
        matrix : torch.Tensor
            ``[M, D]``, the rows, and at the end one that is none; or the parameter's.
        slots, ids : numpy.ndarray
            int64 ``[u]``; no slots where the rows lie beside the parameter.
        whole : bool
            Whether the matrix is the parameter's.
        on_device : torch.Tensor, optional
            int64 ``[n]``, the slots, where the host knows none of them before `know_slots`.
        """
        use = Use(slots, ids, self._rows.source.changes, on_device)
        self._live.add(use)
        parameter, use.origin = self._rows.parameter, self.gradients.origin()
        if use.beside:
            return detour(parameter, matrix, self, use)
        if whole:  # detached, it notices writes to the parameter before backward
            return track(use.origin, parameter.detach(), None, self, use)
        return track(use.origin, matrix, torch.from_numpy(slots), self, use)

    def _waiting(self) -> list[Use]:
        return [use for use in self._live if not use.used and len(use.slots)]

    def pin(self) -> None:
        """Mark the slots whose rows may not leave."""
        residents = self._rows.residents
        residents.pinned[:] = False
        for row in self._rows.pinned_ids:
            if residents.slot_of[row] >= 0:
                residents.pinned[residents.slot_of[row]] = True
        for use in (*self._waiting(), *self._pending):
            residents.pinned[use.slots] = True

    # Backward

    def arrived(
        self,
        node: Any,
        use: Use,
        grad: torch.Tensor,
        slots: torch.Tensor | None,
        shape: torch.Size,
    ) -> torch.Tensor | None:
        """Hear of the gradient of resident rows; return what autograd adds to the parameter's.

        Parameters
        ----------
        node : torch.autograd.graph.Node
            What the gradient has reached.
        use : Use
            The lookup.
        grad : torch.Tensor
            Of the parameter; or of the rows in `slots` and of one more that is none.
        slots : torch.Tensor or None
            int64 ``[u]``.
        shape : torch.Size
            That of the parameter at the lookup.
        """
        rows = self._rows
        with rows.lock:
            self._check_there(use)
            rows.watch.check()
            self.gradients.check_cleared("backward")
            this = self._this_pass()
            if use.on_device is not None and self._collects(this, node, shape):
                take_notes(rows)  # gradients are summed here by ids
            kept: torch.Tensor | None
            if grad.is_sparse:
                kept = self._arrived_sparse(this, node, use, grad, slots, shape)
            elif self._collects(this, node, shape):
                rows_only = grad if slots is not None else grad[on_device_of(grad, use.slots)]
                self._collect(this, node, use, None, rows_only)
                kept = None
            elif slots is not None:
                kept = grad.new_zeros(shape).index_copy_(0, slots, grad[: len(slots)])
            else:
                kept = grad
            use.used = True
            if use.on_device is not None:
                notes_of(rows).changed(use.on_device, held=rows.guests is not None)
                return kept
            rows.residents.dirty[use.slots] = True
            self._pending.append(use)
            return kept

    def _arrived_sparse(
        self,
        this: BackwardPass,
        node: Any,
        use: Use,
        grad: torch.Tensor,
        slots: torch.Tensor | None,
        shape: torch.Size,
    ) -> torch.Tensor | None:
        rows = self._rows
        if slots is not None:
            picked = grad._indices()[0]
            real = picked < len(slots)
            grad = sparse_rows(slots[picked[real]], grad._values()[real], shape)
        # Sparse gradients are added to each other in an order that depends on how their indices
        # compare, so that has to happen to those of ids. One alone is as well left to autograd.
        others = rows.parameter.grad is not None or any(
            other is not use for other in self._waiting()
        )
        summed = others and self._on_host and accumulates(node)
        if not summed and not self._collects(this, node, shape):
            return grad
        ids = torch.from_numpy(rows.residents.id_of)[grad._indices()[0].cpu()].to(grad.device)
        self._collect(this, node, use, None, sparse_rows(ids, grad._values(), rows.shape))
        return None

    def take(self, node: Any, use: Use, found: torch.Tensor | None, grad: torch.Tensor) -> None:
        """Take the gradient of rows that were looked up beside the parameter, and of one more."""
        rows = self._rows
        with rows.lock:
            rows.watch.check()
            self.gradients.check_cleared("backward")
            if grad.is_sparse:
                places = grad._indices()[0].cpu()
                real = places < len(use.ids)
                ids = torch.from_numpy(use.ids)[places[real]].to(grad.device)
                values = grad._values()[real.to(grad.device)]
                grad = sparse_rows(ids, values, rows.shape)
            self._collect(self._this_pass(), node, use, found, grad)
            use.used = True

    def _check_there(self, use: Use) -> None:
        if use.on_device is not None:
            return  # no row leaves before the host knows of the lookup
        id_of = self._rows.residents.id_of
        there = not len(use.slots) or use.slots.max() < len(id_of)
        if not there or not np.array_equal(id_of[use.slots], use.ids):
            raise BitslabError(
                "backward: rows of this lookup have left the cache since an earlier backward "
                "pass and step; look them up again"
            )

    def _this_pass(self) -> BackwardPass:
        number = pass_number()
        this = self._passes.get(number)
        if this is None:
            this = self._passes[number] = BackwardPass(self._end_pass)
            at_end_of_backward(this)
        return this

    def _collects(self, this: BackwardPass, node: Any, shape: torch.Size) -> bool:
        """Tell whether a pass sums gradients here: autograd could not, or in another order."""
        if this.taken or shape != self._rows.parameter.shape:
            return True
        return any(use.beside for use in self._live) and accumulates(node)

    def _collect(
        self,
        this: BackwardPass,
        node: Any,
        use: Use,
        found: torch.Tensor | None,
        grad: torch.Tensor,
    ) -> None:
        """Keep a gradient until the pass ends."""
        why = ""
        if not accumulates(node):
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
        this.taken.append((use, found, grad.detach()))

    def _end_pass(self, this: BackwardPass) -> None:
        """Bring what a pass collected to the parameter, which grows to hold its rows."""
        rows = self._rows
        with rows.lock, torch.no_grad():
            taken, this.taken = this.taken, []
            for number in [n for n, each in self._passes.items() if each is this]:
                del self._passes[number]
            if not taken:
                self._leave_one_free()
                return
            take_notes(rows)
            self.gradients.before_backward()
            for use, found, _ in taken:
                self._make_resident(use, found)
            self._leave_one_free()
            sparse: torch.Tensor | None = None
            dense: torch.Tensor | None = None
            for use, _, grad in taken:
                if grad.is_sparse:
                    sparse = grad if sparse is None else sparse + grad
                    continue
                where = on_device_of(grad, rows.residents.slot_of[use.ids].astype(np.int64))
                given = grad[: len(use.ids)]
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

    def _make_resident(self, use: Use, found: torch.Tensor | None) -> None:
        """Let the parameter grow to hold rows that gradients have come for."""
        rows = self._rows
        residents = rows.residents
        new = np.flatnonzero(residents.slot_of[use.ids] < 0)
        if len(new):
            ids = use.ids[new]
            if found is None or use.changes != rows.source.changes:
                fresh = rows.source.gather(ids)  # a step may have changed them since the lookup
            else:
                fresh = found[on_device_of(found, new)]
            self._grow(ids, fresh)
        slots = residents.slot_of[use.ids].astype(np.int64)
        residents.dirty[slots] = True
        if use.beside:
            added = Use(slots, use.ids)
            added.used = True
            self._pending.append(added)

    def _grow(self, ids: Array, fresh: torch.Tensor) -> None:
        rows = self._rows
        parameter, first = rows.parameter, len(rows.residents.id_of)
        data = torch.cat([parameter.data[:first], fresh])
        before = grad = parameter.grad
        if grad is not None:
            grad = resized(grad, data.shape)
        parameter.grad = None
        self._grown = True
        for link in self.links:
            link.grow(ids, first)
        rows.watch.set_data(data)
        parameter.grad = grad
        self.gradients.follow(before, grad)
        rows.residents.grow(ids)

    def _leave_one_free(self) -> None:
        """Let the parameter grow by a slot of no row where gradients of lookups are in all slots.

        A gradient that is changed by hand everywhere is told by it from one that is scaled.
        """
        rows = self._rows
        n_slots = len(rows.residents.id_of)
        n_held = sum(len(use.slots) for use in self._pending)
        if rows.all_resident or rows.guests is not None or n_held < n_slots:
            return
        free = np.ones(n_slots, bool)
        for use in self._pending:
            free[use.slots] = False
        if not free.any():
            self._grow(np.array([-1]), rows.parameter.data.new_zeros(1, rows.row_dim))

    def _add_sparse(self, grad: torch.Tensor) -> None:
        """Add a sparse gradient by ids to that of the parameter."""
        rows = self._rows
        old = rows.parameter.grad
        if old is not None:
            grad = self._by_id(old) + grad
        slot_of = torch.from_numpy(rows.residents.slot_of)
        slots = slot_of[grad._indices()[0].cpu()].to(grad.device, torch.int64)
        rows.parameter.grad = sparse_rows(slots, grad._values(), rows.parameter.shape)

    def _by_id(self, grad: torch.Tensor) -> torch.Tensor:
        """Return a sparse gradient of the parameter with the ids as indices."""
        ids = torch.from_numpy(self._rows.residents.id_of)[grad._indices()[0].cpu()]
        return sparse_rows(ids.to(grad.device), grad._values(), self._rows.shape)

    # Between steps

    @property
    def step_may_come(self) -> bool:
        """Whether a step could change rows by a gradient that is there."""
        return self._rows.parameter.grad is not None or len(self._passes) > 0

    @property
    def idle(self) -> bool:
        """Whether no step is under way, and the parameter of its size and as it should be."""
        rows = self._rows
        busy = self._pending or self._grown or rows.guests is not None
        return not (busy or rows.watch.changed)

    @property
    def pass_under_way(self) -> BackwardPass | None:
        """The backward pass that this code runs in, if gradients of lookups have come with it."""
        return self._passes.get(pass_number())

    @property
    def in_pass(self) -> bool:
        """Whether a backward pass is under way."""
        return len(self._passes) > 0

    @property
    def in_use(self) -> bool:
        """Whether a gradient may come, or waits for a step."""
        return self.held or self.in_pass or not all(use.used for use in self._live)

    @property
    def held(self) -> bool:
        """Whether a gradient waits for a step."""
        notes = self._rows.notes
        return bool(self._pending) or (notes is not None and notes.holding)

    @property
    def live(self) -> list[Use]:
        """The lookups whose graph is there."""
        return list(self._live)

    def know_slots(self, held: Array = NONE) -> None:
        """Take over from the GPU which slots are in use.

        Parameters
        ----------
        held : numpy.ndarray
            int64, those whose gradient waits for a step.
        """
        id_of = self._rows.residents.id_of
        if len(held):
            kept = Use(held, id_of[held])
            kept.used = True
            self._pending.append(kept)
        for use in self.live:
            if use.on_device is not None:
                use.slots = np.unique(use.on_device.cpu().numpy())
                use.ids = id_of[use.slots]
                use.on_device = None

    def release_taken(self) -> None:
        """Let go of gradients that a step has taken, or that were dropped."""
        self._rows.watch.check()
        if not self.in_pass and self._rows.parameter.grad is None:
            self.release()

    def release(self) -> None:
        """Let go of all gradients."""
        self._pending.clear()
        if self._rows.notes is not None:
            self._rows.notes.release()

    def settle(self) -> None:
        """Let go of what earlier steps held, once they were taken."""
        if self.idle:
            return
        self.release_taken()
        if self._rows.guests is not None:
            let_go(self._rows)
            self._grown = self._rows.residents.extra_rows > 0
        if self.in_pass:
            return
        if len(self._pending) >= MANY_LOOKUPS:
            self.let_go()
        if self._grown and not self._pending:
            capacity = self._rows.residents.capacity_rows
            if all(use.slots.max() < capacity for use in self._waiting()):
                # Also where nothing else may be written to by autograd later.
                with torch.inference_mode(False), torch.no_grad():
                    self._shrink()

    def let_go(self) -> bool:
        """Let rows leave whose gradient was set to zero; tell whether there were any."""
        grad = self._rows.parameter.grad
        if self._passes or grad is None or not self._pending:
            return False
        held = np.unique(np.concatenate([use.slots for use in self._pending]))
        slots = given_slots(grad, held)
        self._pending.clear()
        if len(slots):
            kept = Use(slots, self._rows.residents.id_of[slots])
            kept.used = True
            self._pending.append(kept)
        return len(slots) < len(held)

    def _shrink(self) -> None:
        """Send the rows that did not fit back to the host."""
        rows = self._rows
        residents, parameter = rows.residents, rows.parameter
        capacity = residents.capacity_rows
        slots = np.arange(capacity, len(residents.id_of))
        slots = slots[residents.id_of[slots] >= 0]
        ids = residents.id_of[slots]
        rows.write_back(slots[residents.dirty[slots]])
        for link in self.links:
            link.save(slots, ids)
        # From here on an interruption leaves at worst more rows than `residents` knows of, which
        # are cut off the next time.
        residents.shrink()
        for link in self.links:
            link.shrink(capacity)
        grad, parameter.grad = parameter.grad, None
        rows.watch.set_data(with_spare(parameter.data[:capacity].clone()))
        if grad is not None:
            parameter.grad = kept = resized(grad, parameter.shape)
            self.gradients.follow(grad, kept)
            if len(given_slots(grad, slots)):
                self.gradients.note_dropped(kept)
        self._grown = False

    # Steps

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Get ready for a step of an optimizer that has the parameter."""
        with self._rows.lock:
            link = self.link(optimizer)
            options = link.options
            link.check(options)
            self._rows.watch.check()
            self.gradients.check_cleared("optimizer")
            self.gradients.check(use.slots for use in self._pending)
            if type(optimizer) in (torch.optim.Adagrad, torch.optim.SparseAdam):
                self._sum_in_order(negated=bool(options.get("maximize")))
            link.align()

    def _sum_in_order(self, *, negated: bool) -> None:
        """Sum what a sparse gradient has of each row as torch does where ids are the indices.

        An optimizer that goes uphill sums what it has negated, which gives zeros of another sign.
        """
        rows = self._rows
        grad = rows.parameter.grad
        if grad is None or not grad.is_sparse or not self._on_host:
            return
        rows.parameter.grad = None
        given = self._by_id(grad)
        self._add_sparse(-(-given).coalesce() if negated else given.coalesce())
        self._summed = (rows.parameter.grad, grad)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of a step."""
        with self._rows.lock:
            self.link(optimizer).align(made_now=True)
            if self._summed is not None:
                # What comes next may be added to the gradient as it was.
                summed, grad = self._summed
                if self._rows.parameter.grad is summed:
                    self._rows.parameter.grad = grad
                self._summed = None
            self._rows.watch.accept_step()
            self.release()

    def link_of(self, optimizer: torch.optim.Optimizer) -> OptimizerLink | None:
        """Return what joins the rows and an optimizer, if anything does."""
        return next((link for link in self.links if link.optimizer is optimizer), None)

    def link(self, optimizer: torch.optim.Optimizer, *, row_wise: bool = False) -> OptimizerLink:
        """Return what joins the rows and an optimizer; make it if there is nothing yet."""
        self.links = [link for link in self.links if link.optimizer is not None]
        found = self.link_of(optimizer)
        if found is None:
            stores: dict[str, RowState] | None = None
            if self._orphans and has_stepped(optimizer, self._rows.parameter):
                stores, *self._orphans = self._orphans
            found = OptimizerLink(self._rows, optimizer, row_wise=row_wise, stores=stores)
            self.links.append(found)
        return found

    def save(self, slots: Array, ids: Array) -> None:
        """Keep the optimizers' state of rows that leave their slots."""
        for link in self.links:
            link.save(slots, ids)

    def restore(self, slots: Array, ids: Array) -> None:
        """Bring the optimizers' state of rows that came to slots."""
        for link in self.links:
            link.restore(slots, ids)

    def stores(self) -> list[dict[str, RowState]]:
        """Return the optimizers' state of all rows, for a copy."""
        return [*(link.complete() for link in self.links), *self._orphans]
