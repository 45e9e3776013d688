"""Gradient watch: finds changes of the parameter's gradient that no lookup has made."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ..errors import BitslabError
from .device_slots import DeviceSlots
from .gradients import (
    Array,
    BackwardPass,
    PinnedLookup,
    given_slots,
    on_device_of,
    origin_of,
    sum_mark,
    values_of,
)
from .parameter_watch import ADVICE
from .state import CacheState

NOT_CLEARED = (
    "gradients of an earlier step were not cleared, and their rows have left the cache; call "
    "optimizer.zero_grad() after each step"
)


class GradientWatch:
    """Refuses gradients of resident rows that the other rows of the table would lack.

    All lookups use one stand-in of the parameter in the graph, `origin`. Its gradient is the sum of
    what lookups have made, and no other gradient may reach the parameter. Changes of
    ``parameter.grad`` between backward and step are seen by its address and version, as of a tensor
    that is assigned or written to: rows that no lookup of the step holds must be zero then.

    Nothing is done where all rows are resident, or the parameter takes no gradient. Writes through
    ``parameter.grad.data`` leave the version as it is, and are not seen.

    Parameters
    ----------
    rows : CacheState
        The rows; callers hold their lock.
    """

    def __init__(self, rows: CacheState) -> None:
        self._owner = weakref.ref(rows)
        self._hooked: weakref.ref[torch.nn.Parameter] | None = None
        self._hooks: list[Any] = []
        self._origin: weakref.ref[torch.Tensor] | None = None
        # Mark of `parameter.grad` as the last backward pass left it.
        self._left: tuple[int, int] | None = None
        # Whether it was changed before that.
        self._changed_before = False
        # A gradient, and slots that got other rows while it stands in them.
        self._reused: tuple[torch.Tensor, Array] | None = None
        # A gradient, and the first batch whose rows a GPU put into slots while values of earlier
        # ones may stand in it.
        self._reused_on_device: tuple[torch.Tensor, int] | None = None
        # A gradient that has lost rows, and its version then.
        self._dropped: tuple[torch.Tensor, int] | None = None
        # Whether several lookups had a backward pass in common that shared no stand-in.
        self._shares = False
        # Whether the sum of such gradients is in the parameter's, which is looked at in a step.
        self._unseen = False
        # Page-locked flag that a GPU sets when it has found a gradient to refuse.
        self._found: torch.Tensor | None = None

    @property
    def _rows(self) -> CacheState:
        rows = self._owner()
        assert rows is not None
        return rows

    # In backward

    def origin(self) -> torch.Tensor:
        """Return the stand-in of the parameter in the graphs of lookups.

        Lookups share one as long as a graph holds it and the shape is the same.
        """
        self.raise_known()
        self.watch()
        parameter = self._rows.parameter
        if self._rows.all_resident:
            return parameter
        kept = None if self._origin is None else self._origin()
        if kept is not None and (kept.shape, kept.dtype, kept.device) == (
            parameter.shape,
            parameter.dtype,
            parameter.device,
        ):
            return kept
        owner = self._owner

        def on_gradient(grad: torch.Tensor) -> None:
            rows = owner()
            this = None if rows is None else rows.training.pass_under_way
            if this is not None:
                this.add(grad)

        origin = origin_of(parameter, on_gradient)
        self._origin = weakref.ref(origin)
        return origin

    def is_direct(self) -> bool:
        """Return whether a lookup on the device needs no stand-in: it is the only one of a pass.

        That is assumed until a pass has had two.
        """
        self.watch()
        return not self._shares

    def forget_origin(self) -> None:
        """Make a new `origin` next time, after the parameter was given other memory."""
        self._origin = None

    def watch(self) -> None:
        """Register hooks on the parameter, unless they are there."""
        rows = self._rows
        parameter = rows.parameter
        if self._hooked is not None and self._hooked() is parameter:
            return
        if rows.all_resident or not parameter.requires_grad:
            return
        for hook in self._hooks:
            hook.remove()
        self._origin = None
        owner = self._owner  # the parameter may outlive the rows

        def before_accumulation(grad: torch.Tensor | None) -> None:
            rows = owner()
            if rows is None or grad is None:
                return
            this = rows.training.pass_under_way
            # Without one, no lookup has made the gradient.
            if _accumulates(rows.parameter) if this is None else this.accumulates:
                rows.training.gradients.before_backward(grad, this)

        def after_accumulation(parameter: torch.Tensor) -> None:
            rows = owner()
            if rows is not None and rows.parameter is parameter:
                rows.training.gradients.after_backward()

        # Copies for other processes leave it out, without a warning.
        torch.utils.hooks.unserializable_hook(before_accumulation)  # type: ignore[no-untyped-call]
        self._hooks = [
            parameter.register_hook(before_accumulation),  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(after_accumulation),  # type: ignore[no-untyped-call]
        ]
        self._hooked = weakref.ref(parameter)

    @property
    def has_other_hooks(self) -> bool:
        """Whether somebody else has registered a hook on the parameter."""
        ours = self._hooks[0].id if self._hooks else None
        hooks = self._rows.parameter._backward_hooks or ()
        return len(hooks) > (ours in hooks)

    def before_backward(
        self, grad: torch.Tensor | None = None, this: BackwardPass | None = None
    ) -> None:
        """Record whether others have changed the gradient before a pass adds to it.

        Parameters
        ----------
        grad : torch.Tensor, optional
            The sum that autograd is about to add; lookups alone must have made it.
        this : BackwardPass, optional
            The pass, where it is under way.
        """
        if this is not None and this.has_several:
            # By what the GPU knows of held rows: see `check`.
            self._shares = self._unseen = True
        elif grad is not None and (this is None or this.of_lookups != sum_mark(grad)):
            raise BitslabError(
                "backward: the module's parameter has a gradient that no lookup made, such as that "
                f"of a penalty over parameters(); {ADVICE}"
            )
        old = self._rows.parameter.grad
        as_made = old is None or self._is_as_left(old) or _is_known_zero(old)
        self._changed_before = not as_made

    def after_backward(self) -> None:
        """Record the mark of the gradient after a pass."""
        grad = self._rows.parameter.grad
        self._left = None if grad is None else sum_mark(grad)

    def _is_as_left(self, grad: torch.Tensor) -> bool:
        return not self._changed_before and self._left == sum_mark(grad)

    def follow(self, old: torch.Tensor | None, new: torch.Tensor | None) -> None:
        """Treat a gradient as its predecessor, such as one with another number of rows."""
        if old is None or new is None:
            return
        if self._left == sum_mark(old):
            self._left = sum_mark(new)
        if self._reused is not None and self._reused[0] is old:
            self._reused = (new, self._reused[1])
        if self._reused_on_device is not None and self._reused_on_device[0] is old:
            self._reused_on_device = (new, self._reused_on_device[1])

    # Between steps

    def record_reuse(self, slots: Array) -> None:
        """Record that slots get other rows while an old gradient has values there."""
        grad = self._rows.parameter.grad
        if grad is None:
            self._reused = None
            return
        if self._reused is not None and self._reused[0] is grad:
            slots = np.union1d(self._reused[1], slots)
        self._reused = (grad, slots)

    def record_reuse_from(self, number: int) -> None:
        """Record that a GPU gives slots to the rows of batch `number`; see `record_reuse`."""
        grad, reused = self._rows.parameter.grad, self._reused_on_device
        if grad is None:
            self._reused_on_device = None
        elif reused is None or reused[0] is not grad:
            self._reused_on_device = (grad, number)

    def reuse_known(self, device_slots: DeviceSlots) -> None:
        """Read from the GPU which slots have got other rows; see `record_reuse`."""
        on_device, self._reused_on_device = self._reused_on_device, None
        if on_device is not None and on_device[0] is self._rows.parameter.grad:
            self.record_reuse(device_slots.reused_from(on_device[1]))

    def record_dropped(self, grad: torch.Tensor) -> None:
        """Record that rows were cut off a gradient."""
        self._dropped = (grad, grad._version)

    def check_cleared(self, what: str) -> None:
        """Raise if a gradient still has values of rows that have left their slots."""
        reused, dropped, on_device = self._reused, self._dropped, self._reused_on_device
        if reused is None and dropped is None and on_device is None:
            return
        self._reused = self._dropped = self._reused_on_device = None
        grad = self._rows.parameter.grad
        if grad is None:
            return
        if on_device is not None and on_device[0] is grad:
            self._check_reused(what, grad, on_device[1])
        left = reused is not None and reused[0] is grad and bool(len(given_slots(grad, reused[1])))
        if dropped is not None and dropped[0] is grad:
            left |= dropped[1] == grad._version or bool((values_of(grad) != 0).any())
        if left:
            self._reused, self._dropped = reused, dropped
            raise BitslabError(f"{what}: {NOT_CLEARED}")

    def _check_reused(self, what: str, grad: torch.Tensor, number: int) -> None:
        """Refuse values of a gradient in slots that batches from `number` on have got."""
        device_slots = self._rows.device_slots
        since = None if device_slots is None else device_slots.columns.since
        values = values_of(grad)
        if since is None or not values.numel():
            return
        with torch.no_grad():
            fresh = since >= number
            fresh = fresh[grad._indices()[0]] if grad.is_sparse else fresh[: grad.shape[0]]
            found = fresh & (values.abs().amax(1) != 0)
            if grad.device.type == "cpu":
                if bool(found.any()):
                    self._reused_on_device = (grad, number)
                    raise BitslabError(f"{what}: {NOT_CLEARED}")
                return
            as_left = self._is_as_left(grad)
            values.masked_fill_(found[:, None], 0)
            self._report_later(found.any())
            if as_left:
                self._left = sum_mark(grad)

    # In steps

    def check_step(self, held: Iterable[PinnedLookup]) -> None:
        """Refuse what `check_cleared` and `check` refuse, before a step."""
        self.check_cleared("optimizer")
        self.check(held)

    def check(self, held: Iterable[PinnedLookup]) -> None:
        """Refuse a gradient that was changed so that others than the rows of lookups have one.

        Parameters
        ----------
        held : iterable of PinnedLookup
            Lookups that have made gradients, as far as the host knows.

        Raises
        ------
        BitslabError
            On a GPU only by the next call that looks rows up or takes a step: nothing waits. Rows
            that no lookup holds do not move.
        """
        rows = self._rows
        grad = rows.parameter.grad
        if grad is None or rows.all_resident or not values_of(grad).numel():
            return
        unseen, self._unseen = self._unseen, False
        if self._is_as_left(grad) and not self.has_other_hooks and not unseen:
            return
        on_gpu = rows.device.type == "cuda"
        with torch.no_grad():
            free = torch.ones(rows.parameter.shape[0], dtype=torch.bool, device=grad.device)
            for lookup in held:
                free.index_fill_(0, on_device_of(grad, lookup.slots), False)
            if rows.device_slots is not None and rows.device_slots.holding:
                free &= ~rows.device_slots.held()
            values = values_of(grad)
            strays = free[grad._indices()[0]] if grad.is_sparse else free
            # NaN counts as well; twice as fast as `any` over nonzeros.
            found = strays & (values.abs().amax(1) != 0)
            if not on_gpu:
                if bool(found.any()):
                    raise _refused()
                return
            values.masked_fill_(found[:, None], 0)
            self._report_later(found.any())
            self._left = sum_mark(grad)

    def _report_later(self, found: torch.Tensor) -> None:
        if self._found is None:
            self._found = torch.zeros(1, dtype=torch.bool).pin_memory()
        # Once true, it remains true.
        total = self._found.to(found.device, non_blocking=True) | found
        self._found.copy_(total, non_blocking=True)

    def raise_known(self) -> None:
        """Raise if a GPU has reported a gradient that `check` refuses."""
        if self._found is not None and bool(self._found):
            self._found = None
            raise _refused()


def _refused() -> BitslabError:
    return BitslabError(
        "optimizer: the gradient of the module's parameter was changed by hand, or not cleared "
        "after an earlier step, and is not zero in rows that no lookup of this step holds: only "
        "the resident rows would follow, not the whole table. Scale gradients instead, call "
        "optimizer.zero_grad() after each step, make all rows resident with cache_ratio=1.0, or "
        "leave the table uncompressed"
    )


def _is_known_zero(grad: torch.Tensor) -> bool:
    """Return whether a gradient was set to zero, as far as that can be known without a GPU."""
    values = values_of(grad)
    if values.device.type != "cpu":
        return False
    return not values.numel() or all(float(end) == 0 for end in torch.aminmax(values))


def _accumulates(parameter: torch.nn.Parameter) -> bool:
    """Return whether the gradient of a parameter is added to ``grad`` in this backward pass."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad, which returns it instead
        return False
