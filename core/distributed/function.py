"""The autograd functions of an all-to-all: rows forward, their gradients back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ..engine.kernels.cuda.stream import current_stream
from ..tracing import not_traced
from .checks import check_names, checked_ids
from .modes import kept_tensors
from .parts import Call
from .passes import InFlight, Passes
from .streams import keep_on_current


class AllToAllFunction(torch.autograd.Function):
    """Rows of tables to the ranks; their gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        passes: Passes,
        group: dist.ProcessGroup,
        call: Call,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Exchange, and keep which rows repeat."""
        plan = call.plan
        results = passes.forward(group, call, tensors).finish()
        if not plan.flat:
            pairs = zip(results, plan.parts, strict=True)
            results = [_shaped(t, part.shape) for t, part in pairs]
        ctx.call = passes, group, call
        _mark(ctx, call, results)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Send gradients back, those of copies of a row as their sum.

        What was sent back is no function of the gradients for autograd: who differentiates once
        more is refused, and gets no zeros.
        """
        passes, group, call = ctx.call
        plan = call.plan
        given = [gradients[i] for i in plan.with_gradients]
        found = passes.back(group, call, given).finish()
        results: list[torch.Tensor | None] = [None] * len(plan.parts)
        for i, t in zip(plan.with_gradients, found, strict=True):
            part = plan.parts[i]
            results[i] = t if plan.flat else t.view(sum(part.send_rows), *part.shape)
        return None, None, None, *results


class BeginFunction(torch.autograd.Function):
    """Begins to exchange rows; its backward pass waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, in_flight: InFlight, *tensors: torch.Tensor) -> torch.Tensor:
        """Begin; return what `WaitFunction` is given, by which autograd knows of both."""
        in_flight.begin(tensors)
        ctx.in_flight = in_flight
        return _zero(tensors[0].device).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients that `WaitFunction` has begun to send."""
        in_flight: InFlight = ctx.in_flight
        plan = in_flight.call.plan
        results: list[torch.Tensor | None] = [None] * len(plan.parts)
        for i, t in zip(plan.with_gradients, in_flight.finish(), strict=True):
            results[i] = t
        return None, *results


class WaitFunction(torch.autograd.Function):
    """Waits for rows ``[M, row]``; its backward pass begins to send their gradients."""

    @staticmethod
    def forward(ctx: Any, in_flight: InFlight, begun: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what came."""
        results = in_flight.finish()
        ctx.in_flight = in_flight
        _mark(ctx, in_flight.call, results)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        """Begin; see `AllToAllFunction` for what is refused."""
        in_flight: InFlight = ctx.in_flight
        in_flight.begin_back(gradients)
        return None, _zero(gradients[0].device).detach()


class TablesInFlight:
    """Rows of tables under way: what `CompressedAllToAll.begin_tables` returns.

    Parameters
    ----------
    in_flight : InFlight
        The call.
    names : sequence of str or None
        Of its tables; None: nothing was asked for.
    tensors : sequence of torch.Tensor
        Their rows ``[N, row]``.
    """

    def __init__(
        self,
        in_flight: InFlight,
        names: Sequence[str | None],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self._in_flight: InFlight | None = in_flight
        self._call = in_flight.call
        self._names = names
        self._begun: torch.Tensor = BeginFunction.apply(in_flight, *tensors)  # type: ignore[no-untyped-call]
        self._found: dict[str, torch.Tensor] = {}
        self._waited_on: torch.cuda.Stream | None = None

    @not_traced
    def wait(self) -> dict[str, torch.Tensor]:
        """Return the rows that came, as `CompressedAllToAll.exchange_tables` does; again the same.

        Of tensors on a GPU torch's current stream waits, each time, the host until all is queued.

        Raises
        ------
        ExchangeError, CorruptedDataError
            As `CompressedAllToAll.exchange_tables` does, each time.
        BitslabError
            In a callback of an exchange's future, while this one goes on: its thread calls it.
        """
        if self._in_flight is not None:
            came = WaitFunction.apply(self._in_flight, self._begun)  # type: ignore[no-untyped-call]
            pairs = zip(self._names, came, strict=True)
            self._found = {name: t for name, t in pairs if name is not None}
            if came[0].is_cuda:
                self._waited_on = current_stream(came[0].device)
            self._in_flight = None
        elif self._waited_on is not None:
            stream = current_stream(self._waited_on.device)
            if stream != self._waited_on:
                stream.wait_stream(self._waited_on)
            keep_on_current(self._waited_on, self._found.values())
        return dict(self._found)

    def know_ids(self, received_ids: Mapping[str, torch.Tensor]) -> None:
        """Give the ids of rows that come, for ``error_feedback``, where they were not known before.

        Parameters
        ----------
        received_ids : mapping of str to torch.Tensor
            By table integers ``[M]``, before gradients go back.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            When they are not as above.
        """
        check_names([name for name in self._names if name is not None], received_ids=received_ids)
        for number, name in enumerate(self._names):
            if name is not None and name in received_ids:
                rows = sum(self._call.plan.parts[number].receive_rows)
                device = self._begun.device
                ids = checked_ids(name, received_ids[name], rows, device, needed=True)
                self._call.received_ids[number] = ids

    def know_no_ids(self) -> None:
        """Have gradients go back without ids of rows: nothing is kept of what they lose."""
        self._call.feeds_back = False


def _mark(ctx: Any, call: Call, results: Sequence[torch.Tensor]) -> None:
    """Have autograd know which of the tables have no gradients."""
    plan = call.plan
    if len(plan.with_gradients) < len(plan.parts):
        pairs = zip(results, plan.parts, strict=True)
        ctx.mark_non_differentiable(*(t for t, part in pairs if not part.has_gradient))


@lru_cache(64)
def _zero(device: torch.device) -> torch.Tensor:
    """Return a zero on a device, of which others are made without a kernel."""
    with kept_tensors():
        return torch.zeros((), device=device)


def _shaped(rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return rows ``[M, row]`` in their shape, as no view.

    Of views that a function made autograd refuses changes in place.
    """
    (found,) = torch.unsafe_split_with_sizes(rows.view(len(rows), *shape), [len(rows)])
    return found
