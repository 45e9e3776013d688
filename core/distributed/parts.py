"""Rows of one table in a call, and the gradients of its copies of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..errors import ArgumentError
from .agreement import TableSizes
from .checks import check_dtype, cut_rows, named, row_of
from .layout import Layout
from .messages import Array, Repeats, on_device
from .plan import TableState


@dataclass(frozen=True)
class Part:
    """Rows of one table in calls of the same sizes.

    Parameters
    ----------
    state : TableState
        Of the table.
    shape, dtype, row : tuple of int, torch.dtype, int
        Of a row; its elements.
    send_rows, receive_rows : list of int
        Rows for each rank and of each.
    """

    state: TableState
    shape: tuple[int, ...]
    dtype: torch.dtype
    row: int
    send_rows: list[int]
    receive_rows: list[int]

    @property
    def has_gradient(self) -> bool:
        """Whether rows have gradients; all ranks know the tables' dtypes."""
        return self.dtype.is_floating_point or self.dtype.is_complex


@dataclass(frozen=True)
class CallPlan:
    """What calls of the same sizes have in common.

    Parameters
    ----------
    parts : list of Part
        Of the tables.
    forward, backward : Layout
        Of rows, and of gradients where those of copies of a row are not summed.
    with_gradients : list of int
        Tables whose rows have gradients.
    flat : bool
        Whether all tables' tensors are ``[N, row]``.
    """

    parts: list[Part]
    forward: Layout
    backward: Layout
    with_gradients: list[int]
    flat: bool


class Given(NamedTuple):
    """A tensor in a call ``[N, ...]``, and the rows for each rank as they were given."""

    state: TableState
    rows: torch.Tensor
    received: tuple[int, ...] | None
    sent: tuple[int, ...] | None


def plan_of(group: dist.ProcessGroup, given: Sequence[Given], copied: int | None) -> CallPlan:
    """Return what calls of these sizes have in common.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When sizes do not fit the tensors, or each other.
    """
    parts = [_part_of(group, each) for each in given]
    with_gradients = [i for i, part in enumerate(parts) if part.has_gradient]
    back = [parts[i] for i in with_gradients]
    return CallPlan(
        parts,
        layout_of(group, [(p, p.send_rows, p.receive_rows) for p in parts], copied),
        layout_of(group, [(p, p.receive_rows, p.send_rows) for p in back], copied),
        with_gradients,
        all(len(part.shape) == 1 for part in parts),
    )


def layout_of(
    group: dist.ProcessGroup,
    sizes: Sequence[tuple[Part, Sequence[int], Sequence[int]]],
    copied: int | None,
) -> Layout:
    """Return the layout of tables with so many rows for each rank, and of each."""
    tables = [
        TableSizes(part.state.name, part.dtype, part.row, tuple(sent), tuple(received))
        for part, sent, received in sizes
    ]
    return Layout(tables, group.rank(), group.size(), copied)


def _part_of(group: dist.ProcessGroup, given: Given) -> Part:
    t, received, sent, name = given.rows, given.received, given.sent, given.state.name
    rows, size = t.shape[0], group.size()
    if (sent is None or received is None) and rows % size:
        raise ArgumentError(f"input: {rows} rows for {size} ranks")
    equal = (rows // size,) * size
    received = equal if received is None else received
    if min(received, default=0) < 0 or len(received) != size:
        raise ArgumentError(
            f"{named('output_split_sizes', name)}: {list(received)}, expected a size from 0 for "
            f"each of {size} ranks"
        )
    row = row_of(t, None)
    check_dtype(t.dtype, given.state.bound)
    sent = equal if sent is None else sent
    _, counts = cut_rows("input", t.detach(), row, sent, group, name)
    return Part(given.state, tuple(t.shape[1:]), t.dtype, row, counts, list(received))


@dataclass
class Call:
    """Rows of tables in a call, and what its backward pass needs.

    Parameters
    ----------
    plan : CallPlan
        Of the sizes.
    row_ids : sequence of torch.Tensor or None
        By table; empty where none has some.
    received_ids : list
        By table int64 where the rows are, the ids of those that come, or None.
    summed_back : bool
        Whether gradients go back.
    iteration : int
        By which its bounds are scheduled, both ways.
    repeats : list
        After the exchange forward, by table and rank the `Repeats` by which rows crossed, or None.
    places : list
        Then, by table, as of `Rows`.
    feeds_back : bool
        Whether ids of the rows that come are needed where error feedback keeps something.
    """

    plan: CallPlan
    row_ids: Sequence[torch.Tensor | None]
    received_ids: list[torch.Tensor | None]
    summed_back: bool
    iteration: int
    repeats: list[list[Repeats | None] | None] = field(default_factory=list)
    places: list[list[Array | None]] = field(default_factory=list)
    feeds_back: bool = True


@dataclass(frozen=True)
class Sums:
    """Gradients of a table that go back.

    Parameters
    ----------
    rows : torch.Tensor
        ``[N, row]``, rank after rank; those of copies of a row as one.
    counts, back : list of int
        Rows for each rank, and of each.
    ids : torch.Tensor or None
        int64 ``[N]``, of each row.
    are_fewer : bool
        Whether fewer rows go back than came, or come back than were given.
    """

    rows: torch.Tensor
    counts: list[int]
    back: list[int]
    ids: torch.Tensor | None
    are_fewer: bool

    def own(self, rank: int | None) -> slice:
        """Return which rows are this rank's for itself, which do not cross; none for None."""
        if rank is None:
            return slice(0, 0)
        begin = sum(self.counts[:rank])
        return slice(begin, begin + self.counts[rank])


def sums_of(call: Call, table: int, gradient: torch.Tensor) -> Sums:
    """Return what goes back of gradients ``[M, row]`` of a table."""
    part, places_of, ids_of = call.plan.parts[table], call.places[table], call.received_ids[table]
    repeats = call.repeats[table]
    back = part.send_rows
    if repeats and any(repeats):
        back = [
            n if repeated is None else len(repeated.first)
            for n, repeated in zip(part.send_rows, repeats, strict=True)
        ]
    if not places_of or all(places is None for places in places_of):
        return Sums(gradient, part.receive_rows, back, ids_of, back is not part.send_rows)
    ids: Sequence[torch.Tensor | None] = [None] * len(part.receive_rows)
    if ids_of is not None:
        ids = ids_of.split_with_sizes(part.receive_rows)
    sent, kept = [], []
    for rows, places, of_rows in zip(
        torch.split(gradient, part.receive_rows), places_of, ids, strict=True
    ):
        at = None if places is None else on_device(places, rows.device)
        count = len(rows) if places is None else int(places.max()) + 1
        sent.append(rows if at is None else _summed(rows, at, count))
        if of_rows is not None:
            kept.append(of_rows if at is None else _ids_of_sums(of_rows, at, count))
    of_sums = torch.cat(kept) if kept else None
    return Sums(torch.cat(sent), [len(rows) for rows in sent], back, of_sums, True)


def _ids_of_sums(ids: torch.Tensor, at: torch.Tensor, count: int) -> torch.Tensor:
    return ids.new_empty(count).scatter_(0, at, ids)


def _summed(rows: torch.Tensor, at: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sums of rows ``[n, row]`` that are copies of one; 16 bits are added as 32."""
    wide = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
    sums = torch.zeros((count, rows.shape[1]), dtype=wide, device=rows.device)
    return sums.index_add_(0, at, rows.to(wide)).to(rows.dtype)


def spread_to_copies(
    call: Call, table: int, found: torch.Tensor, back: Sequence[int]
) -> torch.Tensor:
    """Return gradients of the rows that were given: sums to the first copy of each."""
    part = call.plan.parts[table]
    if back == part.send_rows:
        return found
    result = torch.zeros((sum(part.send_rows), part.row), dtype=found.dtype, device=found.device)
    pieces = zip(
        torch.split(result, part.send_rows),
        torch.split(found, list(back)),
        call.repeats[table] or [],
        strict=True,
    )
    for to, given, repeated in pieces:
        if repeated is None:
            to.copy_(given)
        else:
            to[repeated.first_on(to.device)] = given
    return result
