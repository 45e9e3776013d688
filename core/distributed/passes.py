"""The passes of an object: rows of its tables forward, and their gradients back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..engine.kernels.cuda.stream import current_stream
from ..engine.kernels.vector_format import KINDS
from ..engine.tasks import ThreadTask
from ..errors import ArgumentError
from .bounds import AdaptiveBound, ErrorBound
from .caller import Caller
from .checks import named, repeats_of, rows_of
from .device_repeats import DeferredRepeats, FoundRepeats, RowsById
from .faults import ContentError, ExchangeError
from .helpers import helper_of
from .layout import Layout, Memory, Rows, memory_of
from .messages import REFERENCES, Repeats
from .parts import Call, Part, Sums, layout_of, spread_to_copies, sums_of
from .rounding import GradientRounder
from .streams import keep_on_current
from .work import OVER, OfThread, UnderWay, refuse_to_wait, this_thread

FORWARD, BACKWARD = 0, 1


class Pass:
    """Rows, or gradients, of tables under way.

    Parameters
    ----------
    begun : UnderWay
        The exchange.
    then : callable
        ``then()`` returns what came, once the exchange is over.
    used : sequence of torch.Tensor
        What ``then()`` reads or returns, where that may be on another stream of a GPU than torch's
        current one, on which it was made.
    """

    def __init__(
        self,
        begun: UnderWay,
        then: Callable[[], Sequence[torch.Tensor]],
        used: Sequence[torch.Tensor] = (),
    ) -> None:
        self._begun, self._then, self._used = begun, then, used
        on_gpu = bool(used) and used[0].is_cuda
        self._begun_on = current_stream(used[0].device) if on_gpu else None

    def finish(self) -> Sequence[torch.Tensor]:
        """Return what came; torch's current stream waits for it. Not called again once it has.

        Raises
        ------
        ExchangeError, CorruptedDataError
            Of the exchange.
        """
        if self._begun is not OVER:
            self._begun.finish()
        if self._begun_on is not None:
            keep_on_current(self._begun_on, self._used)
        return self._then()


class Passes:
    """Exchanges of rows forward, and of their gradients back, of one object.

    Asynchronous ones of rows on the CPU take place in the thread of the group's helper, all that is
    decided there included, in the order of the calls. Those on a GPU begin in the calling thread.

    Parameters
    ----------
    caller : Caller
        Whose exchanges they are, of both ways.
    rounder : GradientRounder
        Of gradients.
    backward_bound : ErrorBound or None
        Of gradients; None: every bit.

    Attributes
    ----------
    backward_calls : int
        Passes back so far.
    """

    _inside: object | None = None  # the call that is in an exchange

    def __init__(
        self, caller: Caller, rounder: GradientRounder, backward_bound: ErrorBound | None
    ) -> None:
        self._caller, self._rounder, self._backward_bound = caller, rounder, backward_bound
        self.backward_calls = 0
        self._last: ThreadTask[Sequence[torch.Tensor]] | None = None

    def forward(
        self,
        group: dist.ProcessGroup,
        call: Call,
        tensors: Sequence[torch.Tensor],
        *,
        async_op: bool = False,
    ) -> Pass:
        """Exchange rows; what came is ``[M, row]``, and the call knows how once it is finished."""
        return self._begun(self._forward, group, call, tensors, async_op)

    def back(
        self,
        group: dist.ProcessGroup,
        call: Call,
        gradients: Sequence[torch.Tensor],
        *,
        async_op: bool = False,
    ) -> Pass:
        """Exchange gradients ``[M, ...]`` of tables that have some; what comes is of their rows."""
        return self._begun(self._back, group, call, gradients, async_op)

    def fail(
        self, group: dist.ProcessGroup, device: torch.device, error: Exception, *, async_op: bool
    ) -> None:
        """Have the other ranks know that this one failed before a call; see `Caller.fail_call`."""
        given = device, FORWARD, error
        if async_op and self._in_thread(device):
            helper = helper_of(group)
            helper.submit(self._caller.fail_call, helper.group, *given).wait()
        else:
            self._caller.fail_call(group, *given)

    def wait(self) -> None:
        """Wait for what helpers' threads have of this object; its errors are not raised.

        Raises
        ------
        BitslabError
            In that thread, which would wait for itself.
        """
        last = self._last
        if last is not None and not last.done():
            if this_thread.completes:
                refuse_to_wait()
            last.wait()
        self._caller.wait()

    def _in_thread(self, device: torch.device) -> bool:
        return not self._caller.coded_on_device(device)

    def _begun(
        self,
        work: Callable[[dist.ProcessGroup, Call, Sequence[torch.Tensor], bool], Pass],
        group: dist.ProcessGroup,
        call: Call,
        tensors: Sequence[torch.Tensor],
        async_op: bool,
    ) -> Pass:
        """Begin a pass in this thread or that of the helper."""
        if not (async_op and self._in_thread(tensors[0].device)):
            if self._last is not None:
                self.wait()  # calls are counted in one order
            return work(group, call, tensors, async_op)
        helper = helper_of(group)

        def done() -> Sequence[torch.Tensor]:
            return work(helper.group, call, tensors, False).finish()

        task = self._last = helper.submit(done)
        return Pass(OfThread(task), task.result)

    # Forward

    def _forward(
        self,
        group: dist.ProcessGroup,
        call: Call,
        tensors: Sequence[torch.Tensor],
        async_op: bool,
    ) -> Pass:
        plan, device = call.plan, tensors[0].device
        try:
            memory = plan.forward.memory_on(device)
            rows = self._rows(call, tensors, memory)
        except Exception as error:
            self._caller.fail_call(group, device, FORWARD, error)
            raise
        begun = self._exchange(group, rows, plan.parts, FORWARD, plan.forward, async_op)

        def came() -> Sequence[torch.Tensor]:
            self._count(rows, plan.parts, FORWARD, plan.forward)
            call.repeats = [each.repeats for each in rows]
            call.places = [each.places for each in rows]
            return memory.received

        return Pass(begun, came, _used_by(rows) if async_op else ())

    def _rows(self, call: Call, tensors: Sequence[torch.Tensor], memory: Memory) -> list[Rows]:
        """Return rows as they are sent forward, with their bounds, and those that share an id."""
        plan, rows = call.plan, []
        on_device = bool(call.row_ids) and self._caller.coded_on_device(tensors[0].device)
        by_id: dict[int, RowsById] = {}
        looked_at: bool | None = None  # asked once, where a table has a bound or ids
        bounds: dict[int, tuple[float, bool]] = {}  # of tables that share one object
        for number, (part, t) in enumerate(zip(plan.parts, tensors, strict=True)):
            flat, bound, relative = rows_of(t, part.row), 0.0, False
            repeats: list[Repeats | None] | None = None
            ids = call.row_ids[number] if call.row_ids else None
            if part.state.bound is not None or ids is not None:
                if looked_at is None:
                    looked_at = self._caller.looks_at_rows(FORWARD)
                if looked_at and ids is not None and on_device:
                    by_id[number] = RowsById(part.state.name, flat, part.send_rows, ids.long())
                elif looked_at and ids is not None:
                    repeats = repeats_of(part.state.name, flat, part.send_rows, ids, needed=True)
                if looked_at and part.state.bound is not None:
                    shared = id(part.state.bound)
                    if shared not in bounds or isinstance(part.state.bound, AdaptiveBound):
                        bounds[shared] = part.state.bound_of(flat, call.iteration)
                    bound, relative = bounds[shared]
            rows.append(
                Rows(
                    flat,
                    memory.received[number],
                    part.send_rows,
                    part.receive_rows,
                    bound,
                    relative,
                    REFERENCES,
                    repeats,
                    part.state.name,
                    memory.parts[number],
                    memory.whole[number],
                    call.summed_back and t.requires_grad and part.has_gradient,
                )
            )
        if by_id:
            found = FoundRepeats(list(by_id.values()))
            for place, number in enumerate(by_id):
                rows[number].deferred = DeferredRepeats(found, place)
        return rows

    # Back

    def _back(
        self,
        group: dist.ProcessGroup,
        call: Call,
        gradients: Sequence[torch.Tensor],
        async_op: bool,
    ) -> Pass:
        numbers = call.plan.with_gradients
        parts = [call.plan.parts[number] for number in numbers]
        try:
            sums, rows, layout = self._rows_back(group, call, gradients)
        except Exception as error:
            self._caller.fail_call(group, gradients[0].device, BACKWARD, error)
            raise
        self.backward_calls += 1
        begun = self._exchange(group, rows, parts, BACKWARD, layout, async_op)

        def came() -> Sequence[torch.Tensor]:
            self._count(rows, parts, BACKWARD, layout)
            return [
                spread_to_copies(call, number, each.received, of_sums.back)
                for number, each, of_sums in zip(numbers, rows, sums, strict=True)
            ]

        return Pass(begun, came, [*_used_by(rows), *_first_of(call)] if async_op else ())

    def _rows_back(
        self, group: dist.ProcessGroup, call: Call, gradients: Sequence[torch.Tensor]
    ) -> tuple[list[Sums], list[Rows], Layout]:
        """Return sums of gradients, as rows too, within their bounds, and the layout of these."""
        plan, copied = call.plan, self._caller.copied_rank(group)
        parts = [plan.parts[number] for number in plan.with_gradients]
        sums = [
            sums_of(call, number, rows_of(gradient, part.row))
            for number, gradient, part in zip(plan.with_gradients, gradients, parts, strict=True)
        ]
        layout = plan.backward
        if any(each.are_fewer for each in sums):
            sizes = [(p, s.counts, s.back) for p, s in zip(parts, sums, strict=True)]
            layout = layout_of(group, sizes, copied)
        memory = layout.memory_on(gradients[0].device)
        rows = []
        looked_at = self._backward_bound is not None and self._caller.looks_at_rows(BACKWARD)
        for number, (part, each) in enumerate(zip(parts, sums, strict=True)):
            flat = each.rows
            bound: float | torch.Tensor = 0.0
            if self._backward_bound is not None and flat.dtype in KINDS:
                unknown = each.ids is None and call.feeds_back
                if self._rounder.feedback_rows and unknown and len(flat):
                    argument = named("received_ids", part.state.name)
                    raise ContentError(
                        f"{argument}: None, error_feedback keeps what was lost by id"
                    )
                own = each.own(copied)
                if looked_at:
                    crossing = (flat[: own.start], flat[own.stop :])
                    bound = self._backward_bound.where_rows_are(crossing, call.iteration)
                # One stream a rank, table and call.
                stream = (self.backward_calls << 32) ^ (number << 16) ^ group.rank()
                flat = self._rounder.rounded(part.state.name, flat, each.ids, bound, stream, own)
            rows.append(
                Rows(
                    flat,
                    memory.received[number],
                    each.counts,
                    each.back,
                    bound,
                    name=part.state.name,
                    parts=memory.parts[number],
                    memory=memory.whole[number],
                )
            )
        return sums, rows, layout

    # Both

    def _exchange(
        self,
        group: dist.ProcessGroup,
        rows: list[Rows],
        parts: Sequence[Part],
        way: int,
        layout: Layout,
        async_op: bool,
    ) -> UnderWay:
        this_call = object()
        try:
            # Inside of what ends it: no interrupt comes between.
            if self.__dict__.setdefault("_inside", this_call) is not this_call:
                raise ArgumentError(
                    "CompressedAllToAll: another thread is in a call of this object"
                )
            choices = [p.state.choice if way == FORWARD else p.state.backward_choice for p in parts]
            return self._caller.exchange(group, rows, choices, layout, way, async_op=async_op)
        finally:
            if self._inside is this_call:
                del self._inside

    def _count(self, rows: list[Rows], parts: Sequence[Part], way: int, layout: Layout) -> None:
        """Add what crossed to the tables' counters."""
        for part, each, raw_bytes in zip(parts, rows, layout.raw_bytes, strict=True):
            counters = part.state.forward if way == FORWARD else part.state.backward
            counters.raw_bytes += raw_bytes
            counters.moved_bytes += each.moved_bytes


def _used_by(rows: Sequence[Rows]) -> list[torch.Tensor]:
    """Return the memory of tables' rows: torch's own collective reads what is sent of one table.

    It keeps that until a stream waits for it, which need not be the one that it was allocated on.
    """
    return [*memory_of(rows), *(each.sent for each in rows)]


def _first_of(call: Call) -> list[torch.Tensor]:
    """Return which rows crossed of those that share an id, as far as that is on a device."""
    of_ranks = (each for repeats in call.repeats for each in repeats or ())
    first = (each.first_on_device for each in of_ranks if each is not None)
    return [t for t in first if t is not None]


class InFlight:
    """One call whose passes are begun and finished apart; what autograd's functions share.

    Parameters
    ----------
    passes : Passes
        Of the object.
    group : ProcessGroup
        Whose ranks exchange.
    call : Call
        Of which rows.
    """

    def __init__(self, passes: Passes, group: dist.ProcessGroup, call: Call) -> None:
        self._passes, self._group, self.call = passes, group, call
        self._pass: Pass | None = None
        self._begun_on: torch.cuda.Stream | None = None
        self._held: Sequence[torch.Tensor] = ()

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to exchange rows ``[N, row]`` of all tables."""
        if tensors[0].is_cuda:
            self._begun_on = current_stream(tensors[0].device)
        self._pass = self._passes.forward(self._group, self.call, tensors, async_op=True)

    def begin_back(self, gradients: Sequence[torch.Tensor]) -> None:
        """Begin to exchange gradients, as autograd gives them, of all tables."""
        given = [gradients[i] for i in self.call.plan.with_gradients]
        # Autograd writes to gradients that nobody else has.
        self._held = gradients
        if self._begun_on is not None:
            ids = (t for t in self.call.received_ids if t is not None)
            keep_on_current(self._begun_on, ids)
        self._pass = self._passes.back(self._group, self.call, given, async_op=True)

    def finish(self) -> Sequence[torch.Tensor]:
        """Return what came, once; see `Pass.finish`.

        Raises
        ------
        ExchangeError
            Again, where an interrupt kept the caller from what was returned before.
        """
        if self._pass is None:
            raise ExchangeError("wait: an interrupt came when rows were to be returned")
        found = self._pass.finish()
        self._pass, self._held = None, ()
        return found
