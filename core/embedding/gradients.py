"""Autograd functions that route gradients of looked-up rows to the parameter or to a bypass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

Array = np.ndarray[Any, Any]
NONE: Array = np.empty(0, np.int64)
#: Larger copies from pageable memory to a GPU may make the host wait for the GPU.
STAGED_BYTES = 1 << 16


class PinnedLookup:
    """A lookup whose gradient may still be computed; its rows keep their slots until then.

    It lives as long as the autograd graph that `track` or `bypass` put it into.

    Parameters
    ----------
    slots, ids : numpy.ndarray
        int64 ``[u]``: the different slots of the lookup, and the rows in them; no slots where the
        lookup bypassed the cache.
    changes : int
        `RowStore.changes` at the lookup.
    on_device : torch.Tensor, optional
        int64 ``[n]`` slots on the device, with repetitions, where only the GPU knows them.
    number : int
        Of the batch, where the GPU has looked it up.
    """

    __slots__ = ("__weakref__", "changes", "ids", "number", "on_device", "origin", "slots", "used")

    def __init__(
        self,
        slots: Array,
        ids: Array,
        changes: int = 0,
        on_device: torch.Tensor | None = None,
        number: int = 0,
    ) -> None:
        self.slots = slots
        self.ids = ids
        self.changes = changes
        self.on_device = on_device
        self.number = number
        #: Whether backward has passed through it.
        self.used = False
        #: See `GradientWatch.origin`; kept as long as the graph. None where the gradient goes to
        #: the parameter directly.
        self.origin: torch.Tensor | None = None

    @property
    def bypassed(self) -> bool:
        """Whether the lookup bypassed the cache."""
        return not len(self.slots) and len(self.ids) > 0


class Owner(Protocol):
    """Receiver of gradients of lookups."""

    def on_gradient(
        self,
        node: Any,
        lookup: PinnedLookup,
        grad: torch.Tensor,
        slots: torch.Tensor | None,
        shape: torch.Size,
    ) -> torch.Tensor | None:
        """Handle the gradient of a lookup; return the parameter's, or None if the pass sums it."""

    def take(
        self, node: Any, lookup: PinnedLookup, found: torch.Tensor | None, grad: torch.Tensor
    ) -> None:
        """Handle the gradient of a lookup that bypassed the cache."""


class _Origin(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        ctx.hook = hook
        ctx.set_materialize_grads(False)
        # No view, whose history a write to the parameter would change. One element of memory.
        shape, strides = parameter.shape, (0,) * parameter.dim()
        return torch.empty_strided(shape, strides, dtype=parameter.dtype, device=parameter.device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is not None:
            ctx.hook(grads[0])
        return grads[0], None


class _Track(torch.autograd.Function):
    # Few arguments, since torch looks at each one both ways.
    @staticmethod
    def forward(
        ctx: Any,
        origin: torch.Tensor,
        matrix: torch.Tensor | None,
        tracked: tuple[Owner, PinnedLookup, torch.Tensor | None, torch.Size],
    ) -> torch.Tensor:
        ctx.tracked = tracked
        return origin.detach() if matrix is None else matrix.view_as(matrix)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        owner, lookup, slots, shape = ctx.tracked
        return owner.on_gradient(ctx, lookup, grads[0], slots, shape), None, None


class _Bypass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, rows: torch.Tensor, owner: Owner, lookup: PinnedLookup
    ) -> torch.Tensor:
        ctx.owner, ctx.lookup, ctx.rows = owner, lookup, rows
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.owner.take(ctx, ctx.lookup, ctx.rows, grads[0])
        return None, None, None, None


_origin: Callable[..., torch.Tensor] = _Origin.apply
_track: Callable[..., torch.Tensor] = _Track.apply
_bypass: Callable[..., torch.Tensor] = _Bypass.apply


def origin_of(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Return a stand-in of a parameter in the graph; backward calls `hook` with its gradient.

    It has the parameter's shape and no values; its gradient goes on to the parameter.
    """
    return _origin(parameter, hook)


def track(
    origin: torch.Tensor,
    matrix: torch.Tensor | None,
    slots: torch.Tensor | None,
    owner: Owner,
    lookup: PinnedLookup,
) -> torch.Tensor:
    """Return rows whose gradient goes through `owner.on_gradient` to the parameter.

    Parameters
    ----------
    origin : torch.Tensor
        ``[C, D]``, the parameter, or its stand-in; see `origin_of`.
    matrix : torch.Tensor or None
        Rows `slots` of the parameter and one row of zeros behind them; or the whole parameter,
        which `origin` is when this is left out.
    slots : torch.Tensor or None
        int64 ``[u]``; None for all.
    owner : Owner
        Receives the gradient.
    lookup : PinnedLookup
        The lookup.
    """
    return _track(origin, matrix, (owner, lookup, slots, origin.shape))


def track_result(result: torch.Tensor, owner: Owner, lookup: PinnedLookup) -> None:
    """Send the gradient that an operation passes to the parameter through `owner.on_gradient`.

    It is as `track`, but no node is added to the graph.

    Parameters
    ----------
    result : torch.Tensor
        What torch has computed from the whole parameter, its first argument with a gradient.
    owner : Owner
        Receives the gradient.
    lookup : PinnedLookup
        The lookup; it lives as long as the graph.
    """
    node: Any = result.grad_fn
    # Not the node itself, which would keep itself alive.
    leaf = node.next_functions[0][0]
    shape = leaf.variable.shape

    def on_gradients(
        grads: tuple[torch.Tensor | None, ...], _: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...] | None:
        grad = grads[0]
        if grad is None:
            return None
        kept = owner.on_gradient(leaf, lookup, grad, None, shape)
        return None if kept is grad else (kept, *grads[1:])

    node.register_hook(on_gradients)


def bypass(
    parameter: torch.Tensor, rows: torch.Tensor, owner: Owner, lookup: PinnedLookup
) -> torch.Tensor:
    """Return `rows`, whose gradient goes to `owner.take` instead of the parameter."""
    return _bypass(parameter, rows, owner, lookup)


class BackwardPass:
    """Gradients that a backward pass has collected for lookups that bypassed the cache.

    Autograd holds it until the pass has ended or failed, and calls it if it has ended.

    Parameters
    ----------
    number : int
        What `pass_number` returns in it.
    accumulates : bool
        Whether it adds gradients to ``grad``; see `accumulates`.
    end : callable
        Called with this object at the end of the pass.
    """

    def __init__(self, number: int, accumulates: bool, end: Callable[[BackwardPass], None]) -> None:
        self.number = number
        self.accumulates = accumulates
        #: Lookups, the rows that they found, and their gradients: sparse ones have ids as indices,
        #: dense ones ``[u + 1, D]`` have a row for each id of the lookup and one more.
        self.taken: list[tuple[PinnedLookup, torch.Tensor | None, torch.Tensor]] = []
        #: Mark of the sum of lookups' gradients, if autograd sums them.
        self.of_lookups: tuple[int, int] | None = None
        #: Whether lookups have made several gradients, whose sum nobody has seen.
        self.has_several = False
        self._end = end

    def add(self, grad: torch.Tensor) -> None:
        """Record a gradient that goes on to the parameter, made by lookups."""
        self.has_several = self.of_lookups is not None
        self.of_lookups = sum_mark(grad)

    def __call__(self) -> None:
        """End the pass."""
        self._end(self)


class BackwardPasses:
    """The backward passes under way that have reached a lookup; autograd holds each."""

    def __init__(self) -> None:
        self._by_number: dict[int, weakref.ref[BackwardPass]] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._by_number)

    def current(self) -> BackwardPass | None:
        """Return the pass that this code runs in, if it has reached a lookup."""
        if not self._by_number:
            return None
        known = self._by_number.get(pass_number())
        return None if known is None else known()

    def reached(self, node: Any, end: Callable[[BackwardPass], None]) -> BackwardPass:
        """Return the pass that has reached a node; `end` as for `BackwardPass`, if it is new."""
        number, passes = pass_number(), self._by_number
        known = passes.get(number)
        this = None if known is None else known()
        if this is None:
            this = BackwardPass(number, accumulates(node), end)

            def forget(gone: weakref.ref[BackwardPass]) -> None:  # it has failed
                if passes.get(number) is gone:
                    del passes[number]

            passes[number] = weakref.ref(this, forget)
            at_end_of_backward(this)
        return this

    def forget(self, this: BackwardPass) -> None:
        """Record that a pass has ended."""
        self._by_number.pop(this.number, None)


def pass_number() -> int:
    """Return the number of the backward pass that this code runs in, -1 for none."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function once the backward pass that is under way has reached all leaves."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def accumulates(node: Any) -> bool:
    """Return whether the leaf behind a node accumulates into ``grad`` in this pass.

    It does not in `torch.autograd.grad`.
    """
    while following := node.next_functions:
        node = following[0][0]
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch's answer to a leaf in torch.autograd.grad
        return False


def sparse_rows(ids: torch.Tensor, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a sparse tensor of rows ``[n, ...]`` by int64 ``[n]`` ids, repeated or not."""
    return torch.sparse_coo_tensor(ids[None], values, tuple(shape), check_invariants=False)


def renumbered(grad: torch.Tensor, numbers: Array, shape: Sequence[int]) -> torch.Tensor:
    """Return a sparse gradient ``shape`` with ``numbers[i]`` in the place of each index i."""
    rows = torch.from_numpy(numbers)[grad._indices()[0].cpu()]
    return sparse_rows(rows.to(grad.device, torch.int64), grad._values(), shape)


def sum_mark(grad: torch.Tensor) -> tuple[int, int]:
    """Return what identifies a gradient: its address and its version."""
    return (grad._values() if grad.is_sparse else grad).data_ptr(), grad._version


def to_device(numbers: Array, device: torch.device) -> torch.Tensor:
    """Return int64 numbers on a device; the host does not wait for a GPU."""
    t = torch.from_numpy(numbers)
    if device.type == "cpu":
        return t
    if t.nbytes > STAGED_BYTES:
        t = t.pin_memory()
    return t.to(device, non_blocking=True)


def on_device_of(like: torch.Tensor, numbers: Array) -> torch.Tensor:
    """Return int64 numbers on the device of a tensor; the host does not wait for a GPU."""
    return to_device(numbers, like.device)


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
