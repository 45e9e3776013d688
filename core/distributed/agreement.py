"""Whether ranks know the same of the messages between them, and what they say where they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..engine.on_host import on_host
from .faults import ExchangeError, Faults, cause_of, reason_of
from .pairs import TERMS
from .wire import (
    CAUSES,
    DISAGREEMENT,
    DTYPES,
    FAILED,
    MOST_TERMS,
    OTHER_CAUSE,
    TableTerms,
    Terms,
    checks_of_calls,
    descriptor,
    read_descriptor,
)


class TableSizes(NamedTuple):
    """What the sizes of a table's rows in an exchange are: by rank those sent and received."""

    name: str
    dtype: torch.dtype
    row_elements: int
    send_rows: tuple[int, ...]
    receive_rows: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.row_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Difference:
    """What ranks do not know alike.

    Parameters
    ----------
    reasons : list of str
        With which rank, and what.
    known_to_all : bool
        Whether all other ranks know that ranks disagree.
    most_pieces : int
        Of a rank that differs: so many times all cross something, before they raise.
    parted : bool
        Whether they differ in what all have alike, dtypes say: every rank of the group finds it.
    """

    reasons: list[str]
    known_to_all: bool
    most_pieces: int
    parted: bool

    def error(self, rank: int, faults: Faults) -> ExchangeError:
        """Note that this rank disagrees with others; return the error to raise."""
        said = "; ".join(self.reasons)
        reason = f"sizes stage: rank {rank} of the group disagrees with {said}"
        faults.failed(reason, known_to_all=self.known_to_all, cause=DISAGREEMENT)
        faults.parted = faults.parted or self.parted
        return ExchangeError(reason)


class Agreement:
    """What a rank knows of the rows between it and each other one, and whether they know the same.

    It depends on sizes alone, and serves any number of exchanges.

    Parameters
    ----------
    tables : sequence of TableSizes
        Of the exchange.
    rank, size : int
        Of the group.
    pieces, numbers, decide_every : int
        Pieces of a message, numbers that follow each descriptor, and calls from one decision to the
        next.
    """

    def __init__(
        self,
        tables: Sequence[TableSizes],
        rank: int,
        size: int,
        *,
        pieces: int = 1,
        numbers: int = 0,
        decide_every: int = 0,
    ) -> None:
        self._tables, self._rank, self._size = tables, rank, size
        self._pieces, self._numbers, self._every = pieces, numbers, decide_every
        self._terms = [self._terms_with(other) for other in range(size)]
        self._checks = [terms.check() for terms in self._terms]
        self._last: tuple[int | None, list[int]] = None, []
        self._own_fit = all(t.send_rows[rank] == t.receive_rows[rank] for t in tables)

    def descriptors(self, sizes: Sequence[int], calls: int = 0) -> list[int]:
        """Return the descriptors of messages of so many bytes for each rank."""
        checks = self._checks_of(calls)
        return [descriptor(check, n) for check, n in zip(checks, sizes, strict=True)]

    def _checks_of(self, calls: int) -> list[int]:
        kept, checks = self._last
        if kept != calls:
            checks = checks_of_calls(self._checks, calls)
            self._last = calls, checks
        return checks

    def sizes_of(self, descriptors: Sequence[int], faults: Faults) -> tuple[list[int], list[int]]:
        """Return checks and sizes of what comes.

        Raises
        ------
        ExchangeError
            When a rank says that it failed.
        """
        checks, sizes = zip(*map(read_descriptor, descriptors), strict=True)
        failed = {rank: checks[rank] for rank, n in enumerate(sizes) if n == FAILED}
        if failed:
            raise failed_elsewhere("this or an earlier exchange", failed, faults)
        return list(checks), list(sizes)

    def difference(
        self, checks: Sequence[int], calls: int, group: dist.ProcessGroup, device: torch.device
    ) -> Difference | None:
        """Return what differs, None where all others know the same, and this rank of its own rows.

        Ranks of a pair that differs find it alike, and send each other their terms: all call it
        behind the first piece of an exchange.

        Parameters
        ----------
        checks : sequence of int
            By rank, of its descriptor; that of this rank is not looked at.
        calls : int
            As for `descriptors`.
        group, device
            Where the terms cross.
        """
        others = [rank for rank in range(self._size) if rank != self._rank]
        own = self._checks_of(calls)
        wrong = [rank for rank in others if checks[rank] != own[rank]]
        if self._own_fit and not wrong:
            return None
        said, most_pieces, parted = [], self._pieces, False
        for rank in wrong:
            terms = self._terms[rank]
            other = dist.get_global_rank(group, rank)
            try:
                ours, first = terms.numbers(calls), self._rank < rank
                theirs = _swapped(ours, other, group, device, first=first)
            except RuntimeError as error:
                said.append(f"rank {rank}: other rows, dtype or version ({error})")
                continue
            names = [table.name for table in self._tables]
            said.append(f"rank {rank}: {terms.disagreement(theirs, names, calls)}")
            most_pieces = max(most_pieces, terms.pieces_of(theirs))
            parted = parted or terms.differ_but_in_rows(theirs, calls)
        for table in self._tables:
            sent, expected = table.send_rows[self._rank], table.receive_rows[self._rank]
            if sent != expected:
                of = f"table {table.name}: " if table.name else ""
                said.append(
                    f"rank {self._rank}: {of}{sent} rows sent, {expected} are expected here"
                )
        return Difference(said, parted or wrong == others, most_pieces, parted)

    def _terms_with(self, other: int) -> Terms:
        return Terms(
            [
                TableTerms(
                    DTYPES.index(table.dtype),
                    table.row_elements,
                    table.send_rows[other],
                    table.receive_rows[other],
                )
                for table in self._tables
            ],
            lower=self._rank <= other,
            pieces=self._pieces,
            numbers_beside=self._numbers,
            decide_every=self._every,
        )


def _swapped(
    ours: Sequence[int],
    other: int,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    first: bool,
) -> list[int]:
    """Exchange numbers with a rank, as many as each has; the `first` one sends first."""

    def send() -> None:
        for given in ([len(ours)], ours):
            numbers = torch.tensor(given, dtype=torch.int64, device=device)
            dist.send(numbers, other, group=group, tag=TERMS)

    def receive() -> list[int]:
        count = torch.empty(1, dtype=torch.int64, device=device)
        dist.recv(count, other, group=group, tag=TERMS)
        n = int(on_host(count))
        found = torch.empty(min(MOST_TERMS, n), dtype=torch.int64, device=device)
        dist.recv(found, other, group=group, tag=TERMS)
        return list(map(int, on_host(found).tolist()))

    if first:
        send()
        return receive()
    theirs = receive()
    send()
    return theirs


def failed_elsewhere(what: str, causes: Mapping[int, int], faults: Faults) -> ExchangeError:
    """Note that ranks said that they failed, by rank the cause; return the error to raise."""
    ranks, why = ", ".join(map(str, causes)), dict.fromkeys(map(_cause, causes.values()))
    reason = (
        f"sizes stage: {what} failed on rank{'s' * (len(causes) > 1)} {ranks} of the group "
        f"({', '.join(why)})"
    )
    faults.failed(reason, known_to_all=True)
    return ExchangeError(reason)


def agree(
    group: dist.ProcessGroup,
    device: torch.device,
    faults: Faults,
    numbers: Sequence[float] = (),
    error: Exception | None = None,
) -> list[float]:
    """Return the largest of each of all ranks' numbers, found by one small all-reduce.

    Where a rank has an `error`, all raise: it would not take part in what the others do next.

    Raises
    ------
    ExchangeError
        When the all-reduce fails, or another rank has an error.
    Exception
        The error.
    """
    failed = 0.0
    if error is not None:
        faults.failed(reason_of(error), known_to_all=False, cause=cause_of(error))
        failed = 1.0 + group.rank() * len(CAUSES) + faults.cause
    largest = torch.tensor([failed, *numbers], dtype=torch.float64, device=device)
    faults.stage("sizes", lambda: dist.all_reduce(largest, dist.ReduceOp.MAX, group=group))
    failed, *found = on_host(largest).tolist()
    if error is not None:
        faults.reported()
        raise error
    if failed:
        rank, cause = divmod(int(failed) - 1, len(CAUSES))
        raise failed_elsewhere("this exchange", {rank: cause}, faults)
    return found


def _cause(number: int) -> str:
    return CAUSES[number if number < len(CAUSES) else OTHER_CAUSE]
