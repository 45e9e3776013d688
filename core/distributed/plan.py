"""Tables whose rows one exchange carries, and what is known of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..dtypes import dtype_name
from ..engine.codecs.base import check_integer
from ..engine.kernels.vector_format import KINDS
from ..errors import ArgumentError, ArgumentTypeError, CorruptedDataError
from .bounds import AdaptiveBound, ErrorBound, checked_bound, value_of
from .selection import TableChoice
from .stats import TableCounters
from .wire import DTYPES, MOST_ELEMENTS

#: What `error_bound` accepts.
Bound = float | ErrorBound | AdaptiveBound | str | None


@dataclass(frozen=True)
class Table:
    """A table whose looked-up rows cross.

    Parameters
    ----------
    name : str
        Not empty.
    row_elements : int
        Elements of a row, from 1.
    dtype : torch.dtype
        Of the rows.
    error_bound : float, ErrorBound, AdaptiveBound or "adaptive", optional
        As for `CompressedAllToAll`, whose own counts when left out, for float32, bfloat16 and
        float16.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When a value is not as above.
    """

    name: str
    row_elements: int
    dtype: torch.dtype = torch.float32
    error_bound: Bound = None

    def __post_init__(self) -> None:
        """Refuse what is no table."""
        if not isinstance(self.name, str) or not self.name:
            raise ArgumentTypeError(
                f"name: expected a str that is not empty, got {self.name!r:.60}"
            )
        check_integer("row_elements", self.row_elements, range(1, MOST_ELEMENTS))
        if self.dtype not in DTYPES:
            accepted = ", ".join(map(dtype_name, DTYPES))
            raise ArgumentTypeError(f"dtype: {self.dtype}, accepted are {accepted}")
        if either_bound(self.error_bound) is not None and self.dtype not in KINDS:
            raise ArgumentTypeError(
                f"error_bound: of {self.dtype}, bounds are for float32, bfloat16 and float16"
            )


def either_bound(error_bound: Bound) -> ErrorBound | AdaptiveBound | None:
    """Return a bound as an object, or refuse what is none."""
    if isinstance(error_bound, str):
        if error_bound != "adaptive":
            raise ArgumentError(
                f"error_bound: {error_bound!r:.60}, accepted are numbers, ErrorBound, "
                "AdaptiveBound and 'adaptive'"
            )
        return AdaptiveBound()
    if isinstance(error_bound, AdaptiveBound):
        return error_bound
    return checked_bound(error_bound)


@dataclass
class TableState:
    """What an object knows of a table.

    Parameters
    ----------
    name : str
        Of the table.
    bound : ErrorBound, AdaptiveBound or None
        As it was asked for.
    table : Table or None
        None: rows of any size.

    Attributes
    ----------
    kind : str or None
        Of an adaptive bound: ``"large"``, ``"medium"`` or ``"small"``, once rows were seen.
    index : float or None
        The homogenisation index of those rows.
    forward, backward : TableCounters
        What crossed.
    choice, backward_choice : TableChoice
        How rows are written, and gradients.
    """

    name: str
    bound: ErrorBound | AdaptiveBound | None
    table: Table | None = None
    kind: str | None = None
    index: float | None = None
    forward: TableCounters = field(default_factory=TableCounters)
    backward: TableCounters = field(default_factory=TableCounters)
    choice: TableChoice = field(default_factory=TableChoice)
    backward_choice: TableChoice = field(default_factory=TableChoice)

    def bound_of(self, rows: torch.Tensor, iteration: int) -> tuple[float, bool]:
        """Return the bound of rows ``[N, row]``, and whether it is a share of a range; 0: none.

        A share is that of the range of the rows of each message. Rows are not looked at, but once
        for the class of an adaptive bound.
        """
        bound = self.bound
        if isinstance(bound, AdaptiveBound):
            if self.kind is None and len(rows) > 1:
                self.index, self.kind = bound.classify(rows[: bound.sample_rows].cpu())
            bound = bound.of_class(self.kind or "small")
        if bound is None:
            return 0.0, False
        return value_of(bound, iteration)

    def stats(self, iteration: int) -> dict[str, Any]:
        """Return what crossed, and how."""
        bound = self.bound
        if isinstance(bound, AdaptiveBound):
            bound = bound.of_class(self.kind or "small")
        return {
            "raw_bytes": self.forward.raw_bytes,
            "moved_bytes": self.forward.moved_bytes,
            "backward_raw_bytes": self.backward.raw_bytes,
            "backward_moved_bytes": self.backward.moved_bytes,
            "codec": self.choice.candidate.name,
            "backward_codec": self.backward_choice.candidate.name,
            "class": self.kind,
            "homogenisation_index": self.index,
            "error_bound": None if bound is None else bound.at(iteration),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return class, index and ways to write rows."""
        return {
            "class": self.kind,
            "index": self.index,
            "codec": self.choice.state_dict(),
            "backward_codec": self.backward_choice.state_dict(),
        }

    def load_state_dict(self, state: Any) -> None:
        """Take what `state_dict` returned.

        Raises
        ------
        CorruptedDataError
            When it is damaged.
        """
        sound = (
            isinstance(state, Mapping)
            and set(state) == set(self.state_dict())
            and state["class"] in (None, *AdaptiveBound.CLASSES)
            and (state["index"] is None or isinstance(state["index"], float))
        )
        if not sound:
            raise CorruptedDataError(f"state: table {self.name}: {state!r:.80}")
        self.choice.load_state_dict(state["codec"])
        self.backward_choice.load_state_dict(state["backward_codec"])
        self.kind, self.index = state["class"], state["index"]


def states_of(
    tables: Sequence[Table] | None, error_bound: ErrorBound | AdaptiveBound | None
) -> dict[str, TableState]:
    """Return the states of tables by name; of one without a name where no tables are given.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When there are none, or two of one name.
    """
    if tables is None:
        return {"": TableState("", error_bound)}
    found: dict[str, TableState] = {}
    for table in tables:
        if not isinstance(table, Table):
            raise ArgumentTypeError(f"tables: expected a Table, got {table!r:.60}")
        if table.name in found:
            raise ArgumentError(f"tables: two of the name {table.name!r}")
        own = either_bound(table.error_bound)
        of_all = error_bound if table.dtype in KINDS else None
        found[table.name] = TableState(table.name, own or of_all, table)
    if not found:
        raise ArgumentError("tables: none given")
    return found


def check_bounds_of(codec: str, states: Mapping[str, TableState], other: object | None) -> None:
    """Refuse bounds of tables, or another one, with a codec that keeps every bit."""
    if codec == "raw" and (other or any(state.bound for state in states.values())):
        raise ArgumentError("error_bound, backward: a bound with codec='raw', which loses nothing")


def row_elements_of(states: Mapping[str, TableState]) -> dict[str, int]:
    """Return the elements of a row of each planned table."""
    tables = {name: state.table for name, state in states.items()}
    return {name: table.row_elements for name, table in tables.items() if table is not None}
