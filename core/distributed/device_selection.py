"""How tables' rows on a GPU are written: each way measured there, of all tables at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from ..engine.advisor import NetworkModel
from .agreement import agree
from .faults import Faults
from .layout import Rows
from .messages import RAW, REFERENCES, Candidate
from .selection import CODES, EVERY_BIT, WITHIN_BOUND, Measured, TableChoice
from .streams import wait_for_stream


@dataclass(frozen=True)
class Trial:
    """What coding rows took that are sent, by tables as they are written.

    Parameters
    ----------
    encode_s, decode_s : float
        Seconds of all tables.
    raw_bytes, moved_bytes : list of int
        By table, of its rows for other ranks, and of what would cross for them.
    """

    encode_s: float
    decode_s: float
    raw_bytes: list[int]
    moved_bytes: list[int]


class Tries(Protocol):
    """Codes rows of tables as `Rows.candidate` has it, and sends nothing."""

    def trial(self) -> Trial:
        """Return what that takes; waits for the device."""


class Crosses(Protocol):
    """An exchange of tables."""

    @property
    def crossed(self) -> bool:
        """Whether what failed, failed on this rank alone, behind all that crosses."""

    def run(self) -> object:
        """Exchange."""


def seconds_of(
    made: Callable[[Sequence[Rows]], Crosses],
    tables: Sequence[Rows],
    group: dist.ProcessGroup,
    faults: Faults,
) -> float:
    """Return the seconds of an exchange of copies of tables, begun by all ranks at once; waits.

    What is received is written, as it is again by the exchange that counts.

    Parameters
    ----------
    made : callable
        ``made(tables)`` returns the exchange.
    tables : sequence of Rows
        On their device.
    group, faults
        Where ranks agree, and of the caller.
    """
    device = tables[0].sent.device
    copies = [
        replace(t, repeats=None if t.repeats is None else list(t.repeats), places=[])
        for t in tables
    ]
    agree(group, device, faults)
    started, failed = time.perf_counter(), None
    exchange = made(copies)
    try:
        exchange.run()
        wait_for_stream(device)
    except Exception as error:
        if not exchange.crossed:  # all raise, or the group is of no more use
            raise
        failed = error
    seconds = time.perf_counter() - started
    agree(group, device, faults, error=failed)
    return seconds


def choose_on_device(
    tries: Tries, tables: Sequence[Rows], choices: Sequence[TableChoice], model: NetworkModel
) -> None:
    """Measure all candidates of tables whose rows are coded where they are; choose the fastest.

    One pipeline codes all tables, so that each has a share of its seconds, by its bytes: alone a
    small table would have to pay for all of its launches.

    Parameters
    ----------
    tries : Tries
        Of these tables.
    tables : sequence of Rows
        They have the chosen candidates then.
    choices : sequence of TableChoice
        One a table.
    model : NetworkModel
        What the group's link takes.
    """
    candidates = [WITHIN_BOUND if _is_bounded(table) else EVERY_BIT for table in tables]
    found: list[dict[Candidate, Measured]] = [{} for _ in tables]
    for candidate in dict.fromkeys(c for of_table in candidates for c in of_table):
        # All tables share the seconds: those of other ways look for references where these do.
        others = REFERENCES if candidate.references else CODES
        for table, of_table in zip(tables, candidates, strict=True):
            table.candidate = candidate if candidate in of_table else others
        trial = tries.trial()
        total = sum(trial.raw_bytes) or 1
        encode, decode = trial.encode_s / total, trial.decode_s / total
        if candidate == RAW:
            encode = decode = 0.0  # they are not coded
        for number, (raw, moved) in enumerate(zip(trial.raw_bytes, trial.moved_bytes, strict=True)):
            if raw and candidate in candidates[number]:
                found[number][candidate] = Measured(raw / max(1, moved), encode, decode)
    for table, choice, measured in zip(tables, choices, found, strict=True):
        if measured:
            choice.take_fastest(measured, model)
        table.candidate = choice.candidate


def _is_bounded(table: Rows) -> bool:
    return isinstance(table.bound, torch.Tensor) or table.bound > 0
