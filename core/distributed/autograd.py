"""The all-to-all with gradients, both ways compressed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..devices import checked_device
from ..engine.codecs import check_tensor_argument
from ..engine.codecs.base import check_integer
from ..errors import ArgumentError, ArgumentTypeError, CorruptedDataError
from ..tracing import not_traced
from .bounds import ErrorBound, checked_bound
from .buffers import MOST_BYTES
from .caller import Caller, checked_codec
from .checks import (
    check_backend,
    check_names,
    check_rows,
    checked_group,
    checked_ids,
    device_of_group,
    refuse_capture,
    repeats_of,
    sizes_by_table,
    sizes_of,
)
from .function import AllToAllFunction, TablesInFlight
from .layout import Kept
from .parts import Call, CallPlan, Given, plan_of
from .passes import BACKWARD, FORWARD, InFlight, Passes
from .plan import Bound, Table, check_bounds_of, either_bound, row_elements_of, states_of
from .rounding import GradientRounder

VERSION = 3


class CompressedAllToAll:
    """An all-to-all of rows that autograd knows: gradients go back compressed, too.

    Tensors on the CPU cross by gloo. Those on a GPU are coded there and cross by NCCL, on a stream
    and a communicator of their own; of calls with `row_ids` the ones that decide wait for the GPU.
    Calls that torch's own collective served are counted in `stats` as ``plain_calls``.

    Parameters
    ----------
    group : ProcessGroup, optional
        All ranks when left out.
    tables : sequence of Table, optional
        The tables whose rows `exchange_tables` carries, the same ones in the same order on all
        ranks: each has its bound, its class and its way to write rows. Left out: one exchange is of
        one tensor.
    error_bound : float, ErrorBound, AdaptiveBound or "adaptive", optional
        Of what is sent forward: a number as a share of the range of the rows of a table that a rank
        sends to another; ``"adaptive"``: `AdaptiveBound` with the paper's figures. Every bit is
        kept when left out. The gradient passes as if nothing had been rounded. Schedules count
        forward calls with gradients enabled.
    backward : "lossless", float or ErrorBound
        Of gradients. Within a bound they are rounded stochastically: of two multiples of a step the
        nearer one is taken the more often, so that the mean remains, and the error is below two
        bounds. What is drawn depends on `seed`, the rank, the table and the number of the call
        alone.
    error_feedback : int
        Rows of each table of which what rounding took from their gradients is kept, by their id,
        and added the next time; those that were met longest ago go first. It takes memory where
        gradients are: up to twice that of the rows that were met. 0: none. Only with a bound of
        gradients; calls then need `received_ids`.
    codec : str
        As for `all_to_all_single`, decided for each way of its own, and on the CPU how rows are
        written for each table; the ranks' tables need not be written alike.
    pieces : int
        Each table's rows for a rank are cut into so many pieces, and one is encoded while another
        crosses; with ``codec="auto"`` where that takes less time, as measured.
    seed : int
        Of what is drawn.
    buffer_bytes : int
        Of buffers for messages that are kept between calls at most.
    decide_every : int
        Calls from one decision of ``codec="auto"`` to the next, forward and backward counted
        apart; the first is the ninth one, or that behind so many. On a GPU up to 16 times as many
        where decisions change nothing. Ranks that differ in it all raise in their first call.
    device : torch.device or str, optional
        Where rows are; others are refused, and a rank that has no input in a call receives there.
        Left out: where they are in each call, and without input where those of the last call were,
        or what the group has a backend for.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When an argument is not as above.

    Notes
    -----
    One thread at a time: a second one is refused. After an exchange that failed, every call raises:
    ranks may have come apart. Gradients have none of their own: who differentiates a second time is
    refused. `copy.deepcopy` makes another object with the same group and state.

    Examples
    --------
    >>> from bitslab.distributed import CompressedAllToAll, Table
    >>> tables = [Table("users", 64), Table("items", 32, error_bound=0.02)]
    >>> exchange = CompressedAllToAll(tables=tables, error_bound="adaptive", backward=0.01)
    >>> exchange.stats()["tables"]["items"]["error_bound"]
    0.02
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        tables: Sequence[Table] | None = None,
        *,
        error_bound: Bound = None,
        backward: str | float | ErrorBound = "lossless",
        error_feedback: int = 0,
        codec: str = "auto",
        pieces: int = 1,
        seed: int = 0,
        decide_every: int = 64,
        buffer_bytes: int = MOST_BYTES,
        device: torch.device | str | None = None,
    ) -> None:
        self.group = group
        self._planned_device = None if device is None else checked_device(device)
        #: Where the rows of the last call were.
        self.last_device: torch.device | None = None
        self.error_bound = either_bound(error_bound)
        if isinstance(backward, str) and backward != "lossless":
            raise ArgumentError(
                f"backward: {backward!r:.60}, accepted are 'lossless', numbers and ErrorBound"
            )
        self.backward_bound = None if isinstance(backward, str) else checked_bound(backward)
        check_integer("error_feedback", error_feedback, range(1 << 31))
        if error_feedback and self.backward_bound is None:
            raise ArgumentError(
                "error_feedback: given with backward='lossless', which loses nothing"
            )
        check_integer("pieces", pieces, range(1, 1025))
        check_integer("seed", seed, range(1 << 63))
        check_integer("decide_every", decide_every, range(1, 1 << 31))
        check_integer("buffer_bytes", buffer_bytes, range(1 << 63))
        self._options: dict[str, Any] = {
            "error_bound": self.error_bound,
            "backward": backward,
            "error_feedback": error_feedback,
            "codec": codec,
            "pieces": pieces,
            "seed": seed,
            "decide_every": decide_every,
            "buffer_bytes": buffer_bytes,
        }
        self.iteration = 0
        self._planned = tables is not None
        self._states = states_of(tables, self.error_bound)
        check_bounds_of(checked_codec(codec), self._states, self.error_bound or self.backward_bound)
        self._pieces = pieces
        self._rounder = GradientRounder(seed, error_feedback)
        self._caller = Caller(
            codec=codec,
            lasting=True,
            ways=2,
            pieces=pieces,
            every=decide_every,
            buffer_bytes=buffer_bytes,
        )
        self._plans = Kept[CallPlan]()
        self._passes = Passes(self._caller, self._rounder, self.backward_bound)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedAllToAll:
        """Return another one of the same group and state, as all ranks do; it counts anew."""
        tables = [each.table for each in self._states.values() if each.table is not None]
        device = self._planned_device
        made = CompressedAllToAll(self.group, tables or None, device=device, **self._options)
        made.last_device = self.last_device
        made.load_state_dict(copy.deepcopy(self.state_dict(), memo))
        return made

    def __copy__(self) -> CompressedAllToAll:
        """Return what `copy.deepcopy` does: no two share what they count."""
        return copy.deepcopy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, with `ArgumentTypeError`."""
        raise ArgumentTypeError(
            "CompressedAllToAll: its group is of this process alone, and it cannot be pickled; "
            "save its state_dict()"
        )

    @not_traced
    def __call__(
        self,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        row_ids: torch.Tensor | None = None,
        received_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return what the ranks sent to this one.

        Parameters
        ----------
        input : torch.Tensor
            ``[N, ...]``: rows for each rank, rank after rank.
        output_split_sizes, input_split_sizes : sequence of int, optional
            Rows of and for each rank; equal ones when left out.
        row_ids : torch.Tensor, optional
            Integers ``[N]`` on the CPU or where the rows are: rows of one id are the same row of a
            table, looked up more than once. Each crosses once for each rank, and the gradient that
            comes back for it is the sum of those of its copies, given to the first one; the others
            get 0. What reaches the row of the table is the same but for the order of additions.
            Rows that are only equal, or made equal by a bound, are not summed. Decisions count what
            that saves on the way back. Not with pieces.
        received_ids : torch.Tensor, optional
            Integers ``[M]``, for `error_feedback`: the ids of the rows that come. Below 0: of a row
            of which nothing is kept.

        Returns
        -------
        torch.Tensor
            ``[M, ...]``, of the dtype of `input`.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            When an argument is not as above, before anything is sent.
        ExchangeError
            When a rank fails or ranks disagree, and in every later call. Ranks that agreed with all
            others raise in their next call.
        """
        if self._planned:
            raise ArgumentError("input: one tensor, tables were planned; call exchange_tables")
        group = checked_group(self.group)
        check_tensor_argument("input", input)
        if input.dim() < 1:
            raise ArgumentError("input: 0 dimensions, expected [N, ...]")
        if self._planned_device not in (None, input.device):
            raise ArgumentTypeError(f"input: on {input.device}, planned is {self._planned_device}")
        received = sizes_of("output_split_sizes", output_split_sizes)
        sent = sizes_of("input_split_sizes", input_split_sizes)
        key = input.shape, input.dtype, received, sent
        call = self._call(group, key, [input], [received], [sent], [row_ids], [received_ids])
        return self._apply(group, call, [input])[0]

    @not_traced
    def exchange_tables(
        self,
        inputs: Mapping[str, torch.Tensor],
        output_split_sizes: Mapping[str, Sequence[int]],
        input_split_sizes: Mapping[str, Sequence[int]],
        *,
        row_ids: Mapping[str, torch.Tensor] | None = None,
        received_ids: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Exchange the rows of all tables at once; return those that came, by table.

        Parameters
        ----------
        inputs : mapping of str to torch.Tensor
            By table ``[N, row_elements]``, all on one device: rows for each rank, rank after rank.
            A table of which this rank has no rows is left out.
        output_split_sizes, input_split_sizes : mapping of str to sequence of int
            By table, rows of and for each rank. Left out: none, except that a table with an input
            needs its sizes.
        row_ids, received_ids : mapping of str to torch.Tensor, optional
            By table, as for one tensor.

        Returns
        -------
        dict of str to torch.Tensor
            ``[M, row_elements]`` of each table of which rows came, in the order of the tables.
            Those of tables of one dtype and width are parts of one tensor's memory, as their
            gradients are: none has an element of another, so that changes in place are its own, but
            one that is kept keeps all; keep a clone.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            When an argument is not as above, before anything is sent.
        ExchangeError
            As for one tensor.
        """
        group, call, tensors = self._tables_call(
            inputs, output_split_sizes, input_split_sizes, row_ids, received_ids
        )
        found = zip(self._states, self._apply(group, call, tensors), strict=True)
        return {name: t for name, t in found if name in output_split_sizes}

    @not_traced
    def begin_tables(
        self,
        inputs: Mapping[str, torch.Tensor],
        output_split_sizes: Mapping[str, Sequence[int]],
        input_split_sizes: Mapping[str, Sequence[int]],
        *,
        row_ids: Mapping[str, torch.Tensor] | None = None,
        received_ids: Mapping[str, torch.Tensor] | None = None,
    ) -> TablesInFlight:
        """Begin what `exchange_tables` does, and return at once.

        Gradients begin to go back where autograd comes to what `TablesInFlight.wait` returned, and
        are waited for where it comes to what was given here: what it differentiates between the two
        is worked out meanwhile. Rows on the CPU cross in a thread with a communicator of its own,
        which all ranks of the group make in their first such call: where one rank calls this, all
        do. Several may be under way, also of several objects: all ranks begin them in one order,
        and wait for them in one, by which their gradients go back.

        Parameters
        ----------
        inputs, output_split_sizes, input_split_sizes, row_ids, received_ids
            As for `exchange_tables`. Inputs are not to be changed until ``wait()`` returned. Ids
            that come with the rows themselves may be given to `TablesInFlight.know_ids`.

        Returns
        -------
        TablesInFlight
            Whose ``wait()`` returns the rows that came, by table.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            When an argument is not as for `exchange_tables`, before anything is sent.
        """
        group, call, tensors = self._tables_call(
            inputs, output_split_sizes, input_split_sizes, row_ids, received_ids, async_op=True
        )
        self._caller.faults.check()
        names = [name if name in output_split_sizes else None for name in self._states]
        found = TablesInFlight(InFlight(self._passes, group, call), names, tensors)
        if torch.is_grad_enabled():
            self.iteration += 1
        return found

    @contextmanager
    def preparing(self, device: torch.device) -> Iterator[None]:
        """Have the other ranks know where the block raises, which makes inputs of `begin_tables`.

        They raise in that call, for which they would wait else until the group's time is over. What
        is wrong with an argument (`ArgumentError`, `ArgumentTypeError`) this rank raises alone.

        Parameters
        ----------
        device : torch.device
            Where the rows are.
        """
        try:
            yield
        except Exception as error:
            self._passes.fail(checked_group(self.group), device, error, async_op=True)
            raise

    def _tables_call(
        self,
        inputs: Mapping[str, torch.Tensor],
        output_split_sizes: Mapping[str, Sequence[int]],
        input_split_sizes: Mapping[str, Sequence[int]],
        row_ids: Mapping[str, torch.Tensor] | None,
        received_ids: Mapping[str, torch.Tensor] | None,
        *,
        async_op: bool = False,
    ) -> tuple[dist.ProcessGroup, Call, list[torch.Tensor]]:
        """Return a call of planned tables, checked, and their rows."""
        if not self._planned:
            raise ArgumentError("inputs: tables, none were planned; give tables=")
        group = checked_group(self.group)
        check_names(
            self._states,
            inputs=inputs,
            output_split_sizes=output_split_sizes,
            input_split_sizes=input_split_sizes,
            row_ids={} if row_ids is None else row_ids,
            received_ids={} if received_ids is None else received_ids,
        )
        none = (0,) * group.size()
        receive = sizes_by_table("output_split_sizes", output_split_sizes)
        send = sizes_by_table("input_split_sizes", input_split_sizes)
        device = self._device_of(inputs, group)
        tensors = []
        for name, state in self._states.items():
            t, table = inputs.get(name), state.table
            assert table is not None  # planned
            if t is None:
                t = torch.empty(0, table.row_elements, dtype=table.dtype, device=device)
            else:
                check_rows(name, t, table.row_elements, table.dtype, device)
            tensors.append(t)
        received = [receive.get(name, none) for name in self._states]
        sent = [send.get(name, none) for name in self._states]
        # Dtypes and rows were planned.
        key = (*[t.shape[0] for t in tensors], *received, *sent)
        call = self._call(
            group,
            key,
            tensors,
            received,
            sent,
            [row_ids.get(name) for name in self._states] if row_ids else None,
            [received_ids.get(name) for name in self._states] if received_ids else None,
            async_op=async_op,
        )
        return group, call, tensors

    def looks_at_ids(self, device: torch.device) -> bool:
        """Return whether ids of rows on a device count in the next call; else all rows cross.

        Of rows on the CPU that is not known while exchanges are under way: they count.
        """
        if not self._caller.coded_on_device(device):
            return True
        return self._caller.looks_at_rows(FORWARD) or self.feeds_back(device)

    def feeds_back(self, device: torch.device) -> bool:
        """Return whether error feedback counts in the next call back, of rows on a device.

        Not where torch's own collective delivers gradients, which loses nothing. All ranks have the
        same. Of rows on the CPU that is not known while exchanges are under way: it counts.
        """
        if not self._rounder.feedback_rows:
            return False
        return not self._caller.coded_on_device(device) or self._caller.looks_at_rows(BACKWARD)

    def _device_of(
        self, inputs: Mapping[str, torch.Tensor], group: dist.ProcessGroup
    ) -> torch.device:
        """Return where the tables' rows are in a call; refuse those that are not where planned."""
        planned = self._planned_device
        for name, t in inputs.items():
            if isinstance(t, torch.Tensor):
                if planned not in (None, t.device):
                    raise ArgumentTypeError(f"inputs: {name}: on {t.device}, planned is {planned}")
                self.last_device = t.device
                return t.device
        return planned or self.last_device or device_of_group(group)

    def _call(
        self,
        group: dist.ProcessGroup,
        key: Hashable,
        tensors: list[torch.Tensor],
        received: Sequence[tuple[int, ...] | None],
        sent: Sequence[tuple[int, ...] | None],
        row_ids: Sequence[torch.Tensor | None] | None,
        received_ids: Sequence[torch.Tensor | None] | None,
        *,
        async_op: bool = False,
    ) -> Call:
        """Return a call, checked; what its sizes say is known where an earlier one had its key.

        By table its tensor ``[N, ...]``, and rows of each rank and for each, where they were given.
        """
        device = tensors[0].device
        refuse_capture(tensors[0])
        key = group.rank(), group.size(), device, key
        try:
            plan = self._plans.get(key)
            if plan is None:
                check_backend(group, device, self._caller.codec)
                given = list(map(Given, self._states.values(), tensors, received, sent))
                plan = self._plans.keep(key, plan_of(group, given, self._caller.copied_rank(group)))
            if row_ids is not None:
                self._check_ids(plan, tensors, row_ids)
            return Call(
                plan,
                row_ids or (),
                self._received_ids(plan, received_ids, device, needed=not async_op),
                summed_back=row_ids is not None and torch.is_grad_enabled(),
                iteration=self.iteration,
            )
        except Exception as error:
            self._passes.fail(group, device, error, async_op=async_op)
            raise

    def _check_ids(
        self,
        plan: CallPlan,
        tensors: Sequence[torch.Tensor],
        row_ids: Sequence[torch.Tensor | None],
    ) -> None:
        """Refuse ids that do not fit their rows; what they hold is looked at by the pass."""
        for part, t, ids in zip(plan.parts, tensors, row_ids, strict=True):
            if ids is not None and self._pieces > 1:
                raise ArgumentError(f"row_ids: given with pieces={self._pieces}")
            repeats_of(part.state.name, t, part.send_rows, ids, needed=False)

    def _received_ids(
        self,
        plan: CallPlan,
        received_ids: Sequence[torch.Tensor | None] | None,
        device: torch.device,
        *,
        needed: bool,
    ) -> list[torch.Tensor | None]:
        """Return by table the ids of the rows that come."""
        if received_ids is None and not self._rounder.feedback_rows:
            return [None] * len(plan.parts)
        return [
            checked_ids(
                part.state.name,
                None if received_ids is None else received_ids[number],
                sum(part.receive_rows),
                device,
                needed=needed and self._rounder.feedback_rows > 0,
            )
            for number, part in enumerate(plan.parts)
        ]

    def _apply(
        self, group: dist.ProcessGroup, call: Call, tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = AllToAllFunction.apply(  # type: ignore[no-untyped-call]
            self._passes, group, call, *tensors
        )
        if torch.is_grad_enabled():
            self.iteration += 1
        return found

    def stats(self) -> dict[str, Any]:
        """Return what crossed.

        Returns
        -------
        dict
            ``"forward"`` and ``"backward"``: calls, bytes and the seconds of each stage.
            ``"tables"``: by name raw and moved bytes each way, how rows and gradients are written,
            class, homogenisation index and the bound of the next call; of one without a name when
            none were planned. ``"modes"``: each way ``"compressed"``, ``"pieces"`` or ``"plain"``,
            which is torch's own collective.
            ``"feedback_bytes"``: the slots of error feedback; ``"buffer_bytes"``: buffers of
            messages, those that are kept and those of calls under way.
        """
        forward, backward = self._caller.counters
        return {
            "forward": dataclasses.asdict(forward),
            "backward": dataclasses.asdict(backward),
            "tables": {name: s.stats(self.iteration) for name, s in self._states.items()},
            "modes": dict(zip(("forward", "backward"), self._caller.modes, strict=True)),
            "feedback_bytes": self._rounder.nbytes,
            "buffer_bytes": self._caller.buffers.nbytes,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all by which a resumed run goes on with the same bounds.

        Returns
        -------
        dict
            The iteration, the number of backward passes, by table its class and how it is written,
            what was decided, and what error feedback keeps, as tensors. Classes and feedback are of
            this rank: each saves its own. It waits for what `begin_tables` began.
        """
        self._passes.wait()
        return {
            "version": VERSION,
            "iteration": self.iteration,
            "backward_calls": self._passes.backward_calls,
            "tables": {name: state.state_dict() for name, state in self._states.items()},
            "decision": self._caller.decision.state_dict(),
            "feedback": self._rounder.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; all ranks do.

        Raises
        ------
        CorruptedDataError
            When the state is of another version, of other tables, or damaged; nothing is changed
            but what was read before the damage.
        """
        known = isinstance(state, Mapping) and set(state) == set(self.state_dict())
        if not known or state["version"] != VERSION:
            raise CorruptedDataError(f"state: {state!r:.80}, expected version {VERSION}")
        counts = [state["iteration"], state["backward_calls"]]
        if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in counts):
            raise CorruptedDataError(f"state: {counts}, expected numbers of calls")
        tables, feedback = state["tables"], state["feedback"]
        if not isinstance(tables, Mapping) or set(tables) != set(self._states):
            raise CorruptedDataError(f"state: tables {tables!r:.80}, here {sorted(self._states)}")
        if not isinstance(feedback, Mapping) or not set(feedback) <= set(self._states):
            raise CorruptedDataError(f"state: feedback {feedback!r:.80}")
        self._caller.decision.load_state_dict(state["decision"])
        for name, of_table in tables.items():
            self._states[name].load_state_dict(of_table)
        self._rounder.load_state_dict(feedback, row_elements_of(self._states))
        self.iteration, self._passes.backward_calls = counts
