"""Changes of a parameter that no lookup and no step has made."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from ..errors import BitslabError
from .device_notes import take_notes
from .sizes import set_data
from .written import differing

if TYPE_CHECKING:
    from .rows import CachedRows

#: What to do instead.
ADVICE = (
    "only the resident rows would follow, not the whole table: give rows new values with "
    "load_state_dict() or rows.load(), make all rows resident with cache_ratio=1.0, or leave the "
    "table uncompressed"
)


class ParameterWatch:
    """Version and memory of a parameter as lookups and steps have left them, and its gradients.

    Where all rows are resident, the parameter is the table: everybody may write to it. Else what
    others write, or their gradients, would reach the resident rows alone, and are refused. Writes
    through ``parameter.data`` leave the version as it is, and are not seen.

    Parameters
    ----------
    rows : CachedRows
        The rows, whose lock is held by whoever calls.
    """

    def __init__(self, rows: CachedRows) -> None:
        self._owner = weakref.ref(rows)
        self._hooked: weakref.ref[torch.nn.Parameter] | None = None
        self._hook: Any = None
        self._version = 0
        self._addresses: tuple[int, ...] = ()
        self.accept()

    @property
    def _rows(self) -> CachedRows:
        rows = self._owner()
        assert rows is not None
        return rows

    def accept(self) -> None:
        """Take the parameter as it is now for what it should be."""
        parameter = self._rows.parameter
        self._version, self._addresses = parameter._version, (parameter.data_ptr(),)

    def accept_step(self) -> None:
        """Take what an optimizer's step has written for what should be there."""
        rows = self._rows
        # One write is the step's. More may be those of a hook of the optimizer.
        one = rows.parameter._version - self._version <= 1
        if one or rows.all_resident or not self._clean_rows_differ():
            self._version = rows.parameter._version

    @property
    def changed(self) -> bool:
        """Whether the parameter was written to, or has other memory."""
        return self._rows.parameter._version != self._version or self._replaced

    @property
    def _replaced(self) -> bool:
        return self._rows.parameter.data_ptr() not in self._addresses

    def set_data(self, data: torch.Tensor) -> None:
        """Give the parameter other memory, also of another number of rows."""
        parameter = self._rows.parameter
        # Both are accepted until it is there, so that an interruption leaves nothing unexplained.
        self._addresses = (*self._addresses, data.data_ptr())
        set_data(parameter, data)
        self._addresses = (parameter.data_ptr(),)

    def check(self) -> None:
        """Take note of writes to the parameter outside of an optimizer's step.

        Where not all rows are resident only a step by hand may do that: it changes no rows but
        those that have a gradient. So may a write that changes nothing, such as the broadcast of
        DistributedDataParallel, while no row that has been trained waits to be written back.

        Raises
        ------
        BitslabError
            When something else has changed it.
        """
        if not self.changed:
            return
        rows = self._rows
        training = rows.training
        if not rows.all_resident and (self._replaced or self._others_changed()):
            raise BitslabError(
                "weight: the module's parameter was changed in place, or given other memory, "
                f"outside of an optimizer's step; {ADVICE}"
            )
        if not training.in_pass:
            training.release()
        self.accept()

    def _others_changed(self) -> bool:
        """Return whether rows without a gradient have changed, or may have."""
        rows = self._rows
        take_notes(rows)
        # Of a row that a step has changed since it came nobody knows what it was.
        unknown = not rows.training.held and bool(rows.residents.dirty.any())
        return unknown or self._clean_rows_differ()

    def _clean_rows_differ(self) -> bool:
        """Return whether resident rows that no gradient has reached differ from the host's."""
        rows = self._rows
        take_notes(rows)
        clean = rows.residents.resident()
        return len(differing(rows, clean[~rows.residents.dirty[clean]])) > 0

    # Gradients

    def watch_gradients(self) -> None:
        """Refuse gradients that come from elsewhere than from lookups, from now on.

        Nothing is done where all rows are resident, or the parameter takes no gradient.
        """
        rows = self._rows
        parameter = rows.parameter
        if rows.all_resident or not parameter.requires_grad:
            return
        if self._hooked is not None and self._hooked() is parameter:
            return
        if self._hook is not None:
            self._hook.remove()
        owner = self._owner  # the parameter may outlive the rows

        def check(grad: torch.Tensor | None) -> None:
            rows = owner()
            if rows is not None and grad is not None and _accumulates(rows.parameter):
                _check_origin(rows, grad)

        # Copies for other processes leave it out, without a warning.
        torch.utils.hooks.unserializable_hook(check)  # type: ignore[no-untyped-call]
        self._hook = parameter.register_hook(check)  # type: ignore[no-untyped-call]
        self._hooked = weakref.ref(parameter)

    @property
    def has_other_hooks(self) -> bool:
        """Whether somebody else has registered a hook on the parameter."""
        ours = None if self._hook is None else self._hook.id
        return any(key != ours for key in self._rows.parameter._backward_hooks or ())


def _check_origin(rows: CachedRows, grad: torch.Tensor) -> None:
    """Refuse a gradient that is to be added and does not come from lookups alone."""
    if not rows.training.has_returned(grad):
        raise BitslabError(
            "backward: the module's parameter has a gradient that no lookup made, such as that "
            f"of a penalty over parameters(); {ADVICE}"
        )


def _accumulates(parameter: torch.nn.Parameter) -> bool:
    """Return whether the gradient of a parameter is added to ``grad`` in this backward pass."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad, which returns it instead
        return False
