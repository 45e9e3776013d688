"""Packed inputs between a forward pass and its backward pass, which reads their rows again.

Autograd notices a saved tensor that was changed in place by its version. Packed rows have none: a
`PackedWatch` hears of their changes as the caches over a table do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from ..errors import BitslabError, ModifiedInPlaceError
from ..tables import CompressedFeature, CompressedTable, SlabCache
from ..tables.cache import CacheView
from ..tables.counters import Counters

Packed = CompressedTable | CompressedFeature | SlabCache
_CPU = torch.device("cpu")


class PackedWatch:
    """Notices whether the rows of a packed input change, from when it is made on.

    The table holds it weakly, as one of the caches that it notifies of updates: while it lives rows
    change by `CompressedTable.update` alone, not by kernels of a GPU.

    Parameters
    ----------
    name : str
        The input's, for messages.
    x : CompressedTable or CompressedFeature or SlabCache
        The input.

    Raises
    ------
    BitslabError
        When the input is closed.
    """

    def __init__(self, name: str, x: Packed) -> None:
        self.name, self.x, self._changed = name, x, False
        with _readable(name, x):  # no update runs meanwhile, which would look at all caches
            (x if isinstance(x, CompressedTable) else x.table).add_cache(self)

    def check(self) -> None:
        """Raise an error if the rows were changed, or the input is closed.

        Raises
        ------
        ModifiedInPlaceError
            When rows were updated. Rows that were packed again by another codec look the same here.
        BitslabError
            When the input is closed.
        """
        with _readable(self.name, self.x):
            changed = self._changed
        if changed:
            raise ModifiedInPlaceError(
                f"input {self.name!r}: rows of this {type(self.x).__name__} were changed after "
                "the forward pass, and the backward pass reads them again; change them after "
                "backward, or run the forward pass again"
            )

    # Interface for the table; see `tables.cache.Cache`

    def storage(self, device: torch.device) -> CacheView | None:
        """Return None: there are no copies of rows."""
        return None

    @property
    def counters(self) -> Counters:
        """Counts of no rows."""
        return Counters()

    def forget(self, ids: torch.Tensor) -> None:
        """Record that rows are about to be overwritten."""
        self._changed = True


@contextlib.contextmanager
def naming_closed(inputs: Sequence[tuple[str, Packed]]) -> Iterator[None]:
    """Name the input in an error that is raised inside because it is closed."""
    try:
        yield
    except BitslabError as error:
        for name, x in inputs:
            for part in (x, getattr(x, "cache", None)):
                closed = None if part is None else _closed_error(part)
                if closed is not None and str(closed) == str(error):
                    raise _named(name, x, closed) from error
        raise


@contextlib.contextmanager
def _readable(name: str, x: Packed) -> Iterator[None]:
    """Keep rows from being changed inside."""
    closed = _closed_error(x)
    if closed is not None:
        raise _named(name, x, closed)
    with x.read_by_products(_CPU):
        yield


def _closed_error(x: Packed) -> BitslabError | None:
    """Return what reading rows raises where they are closed, else None."""
    try:
        with x.read_by_products(_CPU):
            return None
    except BitslabError as error:
        return error


def _named(name: str, x: Packed, closed: BitslabError) -> BitslabError:
    return BitslabError(
        f"input {name!r} is a {type(x).__name__} that is closed ({closed}); accepted is one that "
        "is open until its backward pass is done"
    )
