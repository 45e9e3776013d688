"""How autograd and a cache of rows hear of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

Array = np.ndarray[Any, Any]
NONE: Array = np.empty(0, np.int64)


class Use:
    """A lookup whose gradient may come: its rows must stay where they are until then.

    It lives as long as the graph that `track` or `detour` put it into.

    Parameters
    ----------
    slots, ids : numpy.ndarray
        int64 ``[u]``: the different slots of the lookup, and the rows in them; no slots where the
        rows were looked up beside the parameter.
    changes : int
        How often the table had changed when they were looked up.
    on_device : torch.Tensor, optional
        int64 ``[n]`` slots on the device, repeated or not, where the host knows none of them.
    """

    __slots__ = ("__weakref__", "changes", "ids", "on_device", "slots", "used")

    def __init__(
        self,
        slots: Array,
        ids: Array,
        changes: int = 0,
        on_device: torch.Tensor | None = None,
    ) -> None:
        self.slots = slots
        self.ids = ids
        self.changes = changes
        self.on_device = on_device
        #: Whether backward went through.
        self.used = False

    @property
    def beside(self) -> bool:
        """Whether the rows were looked up beside the parameter."""
        return not len(self.slots) and len(self.ids) > 0


class Owner(Protocol):
    """What hears of backward passes."""

    def arrived(
        self,
        node: Any,
        use: Use,
        grad: torch.Tensor,
        slots: torch.Tensor | None,
        shape: torch.Size,
    ) -> torch.Tensor | None:
        """Hear of the gradient of a lookup; return what autograd adds to that of the parameter."""

    def take(self, node: Any, use: Use, found: torch.Tensor | None, grad: torch.Tensor) -> None:
        """Take the gradient of rows that were looked up beside the parameter."""


class _Track(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        parameter: torch.Tensor,
        matrix: torch.Tensor,
        slots: torch.Tensor | None,
        owner: Owner,
        use: Use,
    ) -> torch.Tensor:
        ctx.owner, ctx.use, ctx.slots, ctx.shape = owner, use, slots, parameter.shape
        return parameter.view_as(parameter) if slots is None else matrix.view_as(matrix)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = ctx.owner.arrived(ctx, ctx.use, grads[0], ctx.slots, ctx.shape)
        return grad, None, None, None, None


class _Detour(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, rows: torch.Tensor, owner: Owner, use: Use
    ) -> torch.Tensor:
        ctx.owner, ctx.use, ctx.rows = owner, use, rows
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.owner.take(ctx, ctx.use, ctx.rows, grads[0])
        return None, None, None, None


_track: Callable[..., torch.Tensor] = _Track.apply
_detour: Callable[..., torch.Tensor] = _Detour.apply


def track(
    parameter: torch.Tensor,
    matrix: torch.Tensor,
    slots: torch.Tensor | None,
    owner: Owner,
    use: Use,
) -> torch.Tensor:
    """Return rows whose gradient goes to the parameter, with `owner` told when it passes.

    Parameters
    ----------
    parameter : torch.Tensor
        ``[C, D]``.
    matrix : torch.Tensor
        Its rows `slots`, and one more that is none.
    slots : torch.Tensor or None
        int64 ``[u]``; None to return the parameter itself.
    owner : Owner
        Who is told.
    use : Use
        The lookup.
    """
    return _track(parameter, matrix, slots, owner, use)


def detour(parameter: torch.Tensor, rows: torch.Tensor, owner: Owner, use: Use) -> torch.Tensor:
    """Return `rows`, whose gradient goes to `owner` instead of to the parameter."""
    return _detour(parameter, rows, owner, use)


class BackwardPass:
    """What a backward pass has brought to rows beside the parameter so far.

    Autograd holds it until the pass has ended or failed, and calls it in the first case.

    Parameters
    ----------
    end : callable
        Takes what was brought.
    """

    def __init__(self, end: Callable[[BackwardPass], None]) -> None:
        #: Lookups, what their rows were then, and their gradients; a sparse one has the ids as
        #: indices, another ``[u + 1, D]`` has a row for each id of the lookup and one more.
        self.taken: list[tuple[Use, torch.Tensor | None, torch.Tensor]] = []
        #: Lookups whose gradients autograd sums, and the mark of each gradient.
        self.returned: list[tuple[Use, tuple[int, int]]] = []
        self._end = end

    def has_returned(self, grad: torch.Tensor) -> bool:
        """Return whether a gradient is the sum of those that the lookups have returned.

        Autograd adds gradients to the first one in place, so that the memory and the number of
        writes to it tell. Where it did not, rows that no lookup has must have no gradient.
        """
        if not self.returned:
            return False
        _, (address, version) = self.returned[0]
        if sum_mark(grad) == (address, version + len(self.returned) - 1):
            return True
        if len(self.returned) == 1:
            return False
        values = values_of(grad)
        given = (values != 0).any(1).nonzero()[:, 0]
        if grad.is_sparse:
            given = grad._indices()[0][given]
        looked_up = torch.zeros(grad.shape[0], dtype=torch.bool, device=grad.device)
        for use, _ in self.returned:
            slots = on_device_of(grad, use.slots) if use.on_device is None else use.on_device
            looked_up[slots] = True
        return bool(looked_up[given].all())

    def __call__(self) -> None:
        """Hand over what was brought."""
        self._end(self)


def pass_number() -> int:
    """Return the number of the backward pass that this code runs in, -1 for none."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function once the backward pass that is under way has reached all leaves."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def accumulates(node: Any) -> bool:
    """Tell whether what a node hands to its first input is added to that input's ``grad``.

    `torch.autograd.grad` returns it instead.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node.next_functions[0][0]))
    except RuntimeError:  # torch's answer to a leaf in torch.autograd.grad
        return False


def sparse_rows(ids: torch.Tensor, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a sparse tensor of rows ``[n, ...]`` by int64 ``[n]`` ids, repeated or not."""
    return torch.sparse_coo_tensor(ids[None], values, tuple(shape), check_invariants=False)


def sum_mark(grad: torch.Tensor) -> tuple[int, int]:
    """Return what tells a gradient from others: its address, and how often it was written to."""
    return values_of(grad).data_ptr(), grad._version


def on_device_of(like: torch.Tensor, numbers: Array) -> torch.Tensor:
    """Return int64 numbers on the device of a tensor."""
    return torch.from_numpy(numbers).to(like.device)


def values_of(grad: torch.Tensor) -> torch.Tensor:
    """Return the values of a gradient, sparse or not."""
    return grad._values() if grad.is_sparse else grad


def given_slots(grad: torch.Tensor, slots: Array) -> Array:
    """Return those of the slots whose gradient is not zero."""
    if grad.is_sparse:
        nonzero = (grad._values() != 0).any(1)
        found: Array = np.intersect1d(slots, grad._indices()[0][nonzero].cpu().numpy())
        return found
    slots = slots[slots < grad.shape[0]]
    nonzero = (grad[on_device_of(grad, slots)] != 0).any(1)
    kept: Array = slots[nonzero.cpu().numpy()]
    return kept
