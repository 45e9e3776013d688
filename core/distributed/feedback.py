"""What rounding took from the gradients of rows, kept where gradients are until they come again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..engine.kernels.cuda.stream import current_stream
from ..engine.transfer import record_on
from ..errors import CorruptedDataError
from .modes import kept_tensors
from .streams import keep_on_current

#: The id of a slot that keeps nothing. Of ids below 0 nothing is kept.
_FREE = -1


class Met(NamedTuple):
    """Rows of which gradients came, by id: as many groups as rows, of which the last have none.

    Parameters
    ----------
    order : torch.Tensor
        int64 ``[N]``: the rows, those of one id behind each other.
    group : torch.Tensor
        int64 ``[N]``: the group of each of these.
    ids, first : torch.Tensor
        int64 ``[N]``: of each group its id, `_FREE` for none, and its first row.
    slot : torch.Tensor
        int64 ``[N]``: of each group where it is kept, the last slot where it is not.
    by_id : torch.Tensor
        int64 ``[slots]``: slots by their ids, the least in front.
    """

    order: torch.Tensor
    group: torch.Tensor
    ids: torch.Tensor
    first: torch.Tensor
    slot: torch.Tensor
    by_id: torch.Tensor


class ErrorFeedback:
    """What rounding took from the gradients of rows, by id, until the rows are met again.

    It is kept in slots on the device of the gradients, which finds them by sorting: the host waits
    for nothing, but in `state_dict` and ``len()``.

    Parameters
    ----------
    rows : int
        Ids that are kept at most; those that were met longest ago go first.
    row_elements : int
        Elements of a row.
    """

    def __init__(self, rows: int, row_elements: int) -> None:
        self._rows, self._row = rows, row_elements
        self._time = 0
        #: Ids that are kept at most as far as the host knows, and the number that is on its way.
        self._most = 0
        self._count: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self._used_on: torch.cuda.Stream | None = None
        self._make(0, torch.device("cpu"))

    def _make(self, slots: int, device: torch.device) -> None:
        """Make slots, and one more behind them for what is not kept."""
        with kept_tensors():
            self._ids = torch.full((slots + 1,), _FREE, device=device)
            self._ages = torch.full((slots + 1,), -1, device=device)
            self._lost = torch.zeros(slots + 1, self._row, dtype=torch.float32, device=device)

    @property
    def _slots(self) -> int:
        return len(self._ids) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return self._slots * (self._row * 4 + 2 * 8)

    def __len__(self) -> int:
        """Return the ids that are kept; waits for a GPU."""
        self._follow()
        return int((self._ids[:-1] >= 0).sum())

    def met(self, ids: torch.Tensor) -> Met:
        """Return which rows are of one id, and where these are kept.

        Parameters
        ----------
        ids : torch.Tensor
            int64 ``[N]``, one or more, on the device of the gradients.
        """
        n, device = len(ids), ids.device
        self._make_room(n, device)
        sorted_ids, order = torch.sort(ids, stable=True)
        begins = torch.ones(n, dtype=torch.bool, device=device)
        begins[1:] = sorted_ids[1:] != sorted_ids[:-1]
        group = torch.cumsum(begins, 0) - 1
        of_group = torch.full((n,), _FREE, device=device)
        of_group[group] = sorted_ids
        first = torch.zeros(n + 1, dtype=torch.int64, device=device)
        first[torch.where(begins, group, n)] = order
        kept, by_id = torch.sort(self._ids[:-1])
        at = torch.searchsorted(kept, of_group).clamp(max=len(kept) - 1)
        known = (of_group >= 0) & (kept[at] == of_group)
        slot = torch.where(known, by_id[at], self._slots)
        return Met(order, group, of_group, first[:n], slot, by_id)

    def add_to(self, gradients: torch.Tensor, met: Met) -> torch.Tensor:
        """Return gradients ``[N, row]`` with what their rows lost, at the first row of each id."""
        n = len(gradients)
        known = met.slot < self._slots
        slot = torch.full((n + 1,), self._slots, device=gradients.device)
        slot[torch.where(known, met.first, n)] = torch.where(known, met.slot, self._slots)
        slot = slot[:n]
        summed = (gradients.float() + self._lost[slot]).to(gradients.dtype)
        return torch.where((slot < self._slots)[:, None], summed, gradients)

    def keep(self, lost: torch.Tensor, met: Met) -> None:
        """Keep what rows ``[N, row]`` lost, in place of what was kept of them.

        Elements that are no finite numbers count as 0; of ids below 0 nothing is kept.
        """
        slots, n = self._slots, len(lost)
        self._time += 1
        sums = torch.zeros(n, self._row, dtype=torch.float32, device=lost.device)
        finite = torch.nan_to_num(lost.float(), 0.0, 0.0, 0.0)
        sums.index_add_(0, met.group, finite[met.order])
        # A fill: a number that is assigned by index is uploaded, and waited for.
        self._ages.index_fill_(0, met.slot, self._time)
        # New ids take the slots that were met longest ago, of these the highest ids first.
        by_id = met.by_id.flip(0)
        oldest = by_id[torch.argsort(self._ages[by_id], stable=True)]
        known = met.slot < slots
        new = (met.ids >= 0) & ~known
        number = torch.cumsum(new, 0) - 1
        new &= number < slots - known.sum()  # else all slots are of this call
        slot = torch.where(new, oldest[number.clamp(0, slots - 1)], met.slot)
        self._ids[slot] = met.ids
        self._ages.index_fill_(0, slot, self._time)
        self._lost[slot] = sums
        self._most = min(self._rows, self._most + n)
        self._count_later()

    def _count_later(self) -> None:
        """Have the host know how many ids are kept, without waiting for it."""
        count = (self._ids[:-1] >= 0).sum()
        if not count.is_cuda:
            self._most = int(count)
            return
        host = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
        host.copy_(count, non_blocking=True)
        self._count = host, record_on(current_stream(count.device))

    def _make_room(self, more: int, device: torch.device) -> None:
        """Go on where gradients are, with slots for so many more ids."""
        self._follow()
        if self._count is not None and self._count[1].query():  # type: ignore[no-untyped-call]
            self._most, self._count = int(self._count[0]), None
        wanted = min(self._rows, self._most + more)
        slots = self._slots
        if wanted > slots:
            slots = min(self._rows, max(wanted, 2 * slots))
        if slots > self._slots or device != self._ids.device:
            before, kept = (self._ids, self._ages, self._lost), self._slots
            self._make(slots, device)
            for new, old in zip((self._ids, self._ages, self._lost), before, strict=True):
                new[:kept] = old[:kept]
        if device.type == "cuda":
            self._used_on = current_stream(device)

    def _follow(self) -> None:
        """Have torch's current stream go on behind the one that used the slots last."""
        if self._used_on is not None:
            stream = current_stream(self._used_on.device)
            if stream != self._used_on:
                stream.wait_stream(self._used_on)
                keep_on_current(self._used_on, (self._ids, self._ages, self._lost))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return ids, rising, ages and what was lost, on the CPU; waits for a GPU."""
        self._follow()
        ids, ages, lost = (t[:-1].cpu() for t in (self._ids, self._ages, self._lost))
        kept = torch.argsort(ids)[int((ids < 0).sum()) :]
        return {"ids": ids[kept], "ages": self._time - ages[kept], "lost": lost[kept]}

    def load_state_dict(self, state: Any) -> None:
        """Take what `state_dict` returned.

        Raises
        ------
        CorruptedDataError
            When it is damaged, or of rows of another size.
        """
        sound = (
            isinstance(state, Mapping)
            and set(state) == {"ids", "ages", "lost"}
            and all(isinstance(t, torch.Tensor) for t in state.values())
        )
        if sound:
            ids, ages, lost = (state[name].cpu() for name in ("ids", "ages", "lost"))
            sound = (
                ids.dtype == ages.dtype == torch.int64
                and lost.dtype == torch.float32
                and ids.dim() == 1
                and ids.shape == ages.shape
                and tuple(lost.shape) == (len(ids), self._row)
                and bool((ids[1:] > ids[:-1]).all())
                and bool((ids >= 0).all())
            )
        if not sound:
            raise CorruptedDataError("state: error feedback is damaged, or of other rows")
        self._time = int(ages.max()) if len(ages) else 0
        youngest = torch.argsort(ages, stable=True)[: self._rows].sort().values
        self._most, self._count, self._used_on = len(youngest), None, None
        self._make(len(youngest), torch.device("cpu"))
        self._ids[:-1], self._lost[:-1] = ids[youngest], lost[youngest]
        self._ages[:-1] = self._time - ages[youngest]
