"""Sums of bags of one id each whose rows are all resident, on a CPU: found and copied in one go."""

from __future__ import annotations

import functools
from array import array
from typing import Any

import torch

from ..engine.kernels.cpu.compiling import compiling_with_cache_of
from ..engine.kernels.cpu.prepared import SlotMap
from ..engine.kernels.cpu.threads import team_of_torch, threads_for
from ..errors import load_optional
from .slots import SlotTable

#: Bits are made once an id was looked up for so many rows of the table: they save about that much
#: time for each id, and while resident rows change they would be made again and again.
ROWS_PER_ID = 16


class ResidentBags:
    """Looks such bags up by the threads of torch; callers hold the rows' lock."""

    def __init__(self) -> None:
        # The map of slots, after so many changes of it, and the ids looked up since.
        self._map: SlotMap | None = None
        self._changes = 0
        self._looked_up = 0
        self._part = 0  # address of `resident.part_of_copy`'s function

    def slot_map(self, slot_table: SlotTable, n_ids: int = 0) -> SlotMap:
        """Return the map of slots for a lookup.

        Parameters
        ----------
        slot_table : SlotTable
            Which rows lie in which slots.
        n_ids : int
            Ids for which bits, if there were some, would help.
        """
        found = self._map
        if (
            found is None
            or found.slot_of is not slot_table.slot_of
            or self._changes != slot_table.changes
        ):
            found = self._map = SlotMap(slot_table.slot_of)
            self._changes, self._looked_up = slot_table.changes, 0
        if found.bits_at == 0:
            self._looked_up += n_ids
            if self._looked_up * ROWS_PER_ID >= slot_table.n_rows:
                found.make_bits()
        return found

    def sums(
        self,
        slot_table: SlotTable,
        parameter: torch.Tensor,
        ids: torch.Tensor,
        offsets: torch.Tensor,
    ) -> torch.Tensor | None:
        """Return the sum of each bag, or None.

        Parameters
        ----------
        slot_table : SlotTable
            Which rows lie in which slots.
        parameter : torch.Tensor
            float32 or float64 ``[slots, D]``, contiguous.
        ids, offsets : torch.Tensor
            int64 ``[n]`` on the CPU, contiguous: rows, and where bags begin.

        Returns
        -------
        torch.Tensor or None
            ``[n, D]``. None where a row is not resident or an id out of range, bag n does not begin
            at id n, or torch has no threads that could be asked.
        """
        team = team_of_torch()
        if team is None:
            return None
        n, dim = ids.shape[0], parameter.shape[1]
        out = parameter.new_empty(n, dim)
        float_bytes = parameter.element_size()
        row_bytes = dim * float_bytes
        threads = threads_for(n * row_bytes)
        # In the order in which resident.py reads it.
        call = array(
            "q",
            (
                team.thread_number,
                team.thread_count,
                ids.data_ptr(),
                n,
                row_bytes,
                slot_table.n_rows,
                out.data_ptr(),
                offsets.data_ptr(),
                self.slot_map(slot_table).slots_at,
                parameter.data_ptr(),
                float_bytes,
                0,
                *(0,) * threads,
            ),
        )
        if self._part == 0:
            self._part = _part_of_copy().address
        team.run(self._part, call.buffer_info()[0], threads)
        return None if any(call[-threads:]) else out


@functools.cache
def _part_of_copy() -> Any:
    """Return `resident.part_of_copy`, compiled."""
    load_optional("numba", extra=None, purpose="looking up rows on the CPU")
    from ..engine.kernels.cpu import resident

    with compiling_with_cache_of(resident.copy_resident):
        return resident.part_of_copy()
