"""Changes of a parameter that no lookup and no step has made."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from ..errors import BitslabError
from .ownership import sync_from_device
from .sizes import set_data
from .state import CacheState
from .written import differing

#: What to do instead.
ADVICE = (
    "only the resident rows would follow, not the whole table: give rows new values with "
    "load_state_dict() or rows.load(), make all rows resident with cache_ratio=1.0, or leave the "
    "table uncompressed"
)


class ParameterWatch:
    """Detects writes to a parameter by its version and address after lookups and steps.

    Where all rows are resident, the parameter is the table: everybody may write to it. Else what
    others write would reach the resident rows alone, and is refused. Writes through
    ``parameter.data`` leave the version as it is, and are not seen.

    Parameters
    ----------
    rows : CacheState
        The rows; callers hold their lock.
    """

    def __init__(self, rows: CacheState) -> None:
        self._owner = weakref.ref(rows)
        self._version = 0
        self._addresses: tuple[int, ...] = ()
        # Rows that were loaded since a change that is refused: from, to; and the mark of the
        # change.
        self._loaded: list[tuple[int, int]] = []
        self._loaded_after: tuple[int, int] = (0, 0)
        self.accept()

    @property
    def _rows(self) -> CacheState:
        rows = self._owner()
        assert rows is not None
        return rows

    def accept(self) -> None:
        """Accept the parameter as it is now."""
        parameter = self._rows.parameter
        self._version, self._addresses = parameter._version, (parameter.data_ptr(),)
        self._loaded.clear()

    def accept_step(self) -> None:
        """Accept what an optimizer's step has written."""
        rows = self._owner()
        assert rows is not None
        version = rows.parameter._version
        # One write is the step's. More may be those of a hook of the optimizer.
        one = version - self._version <= 1
        if one or rows.all_resident or not self._clean_rows_differ():
            self._version = version

    @property
    def changed(self) -> bool:
        """Whether the parameter was written to, or has other memory."""
        return self._rows.parameter._version != self._version or self._replaced

    @property
    def _replaced(self) -> bool:
        return self._rows.parameter.data_ptr() not in self._addresses

    def set_data(self, data: torch.Tensor) -> None:
        """Give the parameter other memory, also of another number of rows."""
        parameter = self._rows.parameter
        # Both are accepted until it is there, so that an interruption leaves nothing unexplained.
        self._addresses = (*self._addresses, data.data_ptr())
        set_data(parameter, data)
        self._addresses = (parameter.data_ptr(),)
        self._rows.training.gradients.forget_origin()

    def check(self) -> None:
        """Refuse writes to the parameter outside of an optimizer's step.

        Where not all rows are resident only a step by hand may do that: it changes no rows but
        those that have a gradient. So may a write that changes nothing, such as the broadcast of
        DistributedDataParallel, while no row that has been trained waits to be written back.

        Raises
        ------
        BitslabError
            When something else has changed it.
        """
        rows = self._owner()
        assert rows is not None
        rows.training.gradients.raise_known()
        parameter = rows.parameter
        if parameter._version == self._version and parameter.data_ptr() in self._addresses:
            return
        if self.refuses():
            raise BitslabError(
                "weight: the module's parameter was changed in place, or given other memory, "
                f"outside of an optimizer's step; {ADVICE}"
            )

    def refuses(self) -> bool:
        """Return whether `check` refuses what was written; else accept it."""
        if not self.changed:
            return False
        rows = self._rows
        if not rows.all_resident and (self._replaced or self._others_changed()):
            return True
        if not rows.training.in_pass:
            rows.training.release()
        self.accept()
        return False

    def accept_loaded(self, begin: int, end: int) -> None:
        """Record that rows begin..end were loaded; accept the parameter once all were.

        Rows that were loaded before another change do not count.
        """
        parameter = self._rows.parameter
        now = parameter._version, parameter.data_ptr()
        if now != self._loaded_after:
            self._loaded, self._loaded_after = [], now
        self._loaded.append((begin, end))
        if covers(self._loaded, len(self._rows)):
            self.accept()

    def _others_changed(self) -> bool:
        """Return whether rows without a gradient have changed, or may have."""
        rows = self._rows
        sync_from_device(rows)
        # The old value of a row that a step has changed is unknown.
        unknown = not rows.training.held and bool(rows.slot_table.dirty.any())
        return unknown or self._clean_rows_differ()

    def _clean_rows_differ(self) -> bool:
        """Return whether resident rows that no gradient has reached differ from the host's."""
        rows = self._rows
        sync_from_device(rows)
        clean = rows.slot_table.resident()
        return len(differing(rows, clean[~rows.slot_table.dirty[clean]])) > 0


def covers(ranges: Iterable[tuple[int, int]], n_rows: int) -> bool:
    """Return whether ranges of rows, from and to, have all of 0..n_rows."""
    reached = 0
    for begin, end in sorted(ranges):
        if begin > reached:
            return False
        reached = max(reached, end)
    return reached >= n_rows
