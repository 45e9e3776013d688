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

    __slots__ = ("__weakref__", "changes", "ids", "on_device", "origin", "slots", "used")

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
        #: What lookups take the parameter from; kept as long as the graph.
        self.origin: torch.Tensor | None = None

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


class _Origin(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, came: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        ctx.came = came
        ctx.set_materialize_grads(False)
        # No view: writes to the parameter would give it another history. One number of memory.
        shape, strides = parameter.shape, (0,) * parameter.dim()
        return torch.empty_strided(shape, strides, dtype=parameter.dtype, device=parameter.device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is not None:
            ctx.came(grads[0])
        return grads[0], None


class _Track(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        origin: torch.Tensor,
        matrix: torch.Tensor,
        slots: torch.Tensor | None,
        owner: Owner,
        use: Use,
    ) -> torch.Tensor:
        ctx.owner, ctx.use, ctx.slots, ctx.shape = owner, use, slots, origin.shape
        return matrix.view_as(matrix)

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


_origin: Callable[..., torch.Tensor] = _Origin.apply
_track: Callable[..., torch.Tensor] = _Track.apply
_detour: Callable[..., torch.Tensor] = _Detour.apply


def origin_of(parameter: torch.Tensor, came: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Return what hands its gradient on to a parameter, after `came` was called with it.

    It has the parameter's shape, and no values.
    """
    return _origin(parameter, came)


def track(
    origin: torch.Tensor,
    matrix: torch.Tensor,
    slots: torch.Tensor | None,
    owner: Owner,
    use: Use,
) -> torch.Tensor:
    """Return rows whose gradient goes to the parameter, with `owner` told when it passes.

    Parameters
    ----------
    origin : torch.Tensor
        ``[C, D]``, the parameter, or what hands its gradient on to it.
    matrix : torch.Tensor
        Its rows `slots`, and one more that is none; or all of it.
    slots : torch.Tensor or None
        int64 ``[u]``; None for all.
    owner : Owner
        Who is told.
    use : Use
        The lookup.
    """
    return _track(origin, matrix, slots, owner, use)


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
        #: Mark of the gradient that lookups have made, where autograd sums it.
        self.of_lookups: tuple[int, int] | None = None
        self._end = end

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
    """Tell whether what a node hands on first is added to the ``grad`` of the leaf it comes to.

    `torch.autograd.grad` returns it instead.
    """
    while node.next_functions:
        node = node.next_functions[0][0]
    try:
        return bool(torch._C._will_engine_execute_node(node))
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
