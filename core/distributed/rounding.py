"""Rows rounded within a bound: to the nearest, stochastically, and what gradients lost kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..engine.kernels.vector_format import LEAST_STEP, MOST_CODE, MOST_STEP, STEP_SHARE, step_of
from ..errors import CorruptedDataError
from .messages import Array

_WEYL, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = 53


def counter_uniforms(seed: int, stream: int, count: int, device: torch.device) -> torch.Tensor:
    """Return uniform numbers float64 ``[count]`` from 0 up to 1, the same on every device.

    Number i is a hash (SplitMix64) of seed, stream and i: no state, no order of calls.
    """
    start = _mixed_number(_mixed_number(seed) ^ (stream & _MASK))
    counters = torch.arange(count, dtype=torch.int64, device=device)
    mixed = _mixed(counters * _signed(_WEYL) + _signed(start))
    return _shifted(mixed, 64 - _BITS).to(torch.float64) * 2.0**-_BITS


def round_to_codes(rows: torch.Tensor, bound: float) -> torch.Tensor:
    """Return rows as the codec of a bound delivers them, without coding them.

    Parameters
    ----------
    rows : torch.Tensor
        ``[N, row]``, float32, float16 or bfloat16, on any device.
    bound : float
        In the units of the elements, positive.

    Returns
    -------
    torch.Tensor
        Of the same shape, dtype and device; elements without a code are as they were.
    """
    step = torch.full((), step_of(bound), dtype=torch.float32, device=rows.device)
    scaled = torch.round(rows.float() * (1 / step))
    found = (scaled * step).to(rows.dtype)
    error = (found.to(torch.float64) - rows.to(torch.float64)).abs()
    usable = (step > 0) & (scaled.abs() <= MOST_CODE) & (error <= bound)
    return torch.where(usable, found, rows)


def round_stochastically(
    rows: torch.Tensor, bound: float | torch.Tensor, seed: int, stream: int
) -> torch.Tensor:
    """Return rows whose elements are multiples of the step of a bound, the mean unchanged.

    Parameters
    ----------
    rows : torch.Tensor
        ``[N, row]``, float32, float16 or bfloat16.
    bound : float or torch.Tensor
        In the units of the elements, a tensor on their device, float64 without dimensions: the
        codec of the same bound keeps every bit of the result. 0: nothing is rounded.
    seed, stream : int
        Of the random numbers: those of one stream are used once.

    Returns
    -------
    torch.Tensor
        Of the same shape and dtype, the same bits on every device. An element is one of the two
        multiples around the given one, the nearer one the more often, so that the error is below
        two bounds. Elements without such a multiple in the dtype, NaN and infinities are as they
        were.
    """
    if not isinstance(bound, torch.Tensor):
        bound = torch.full((), bound, dtype=torch.float64, device=rows.device)
    step = _step_of(bound)
    wide = step.to(torch.float64)
    exact = rows.to(torch.float64) / wide
    drawn = counter_uniforms(seed, stream, rows.numel(), rows.device).view(rows.shape)
    codes = torch.floor(exact + drawn)
    # As the codec decodes: a product in float32, rounded to the dtype.
    found = (codes.to(torch.float32) * step).to(rows.dtype)
    error = (found.to(torch.float64) - rows.to(torch.float64)).abs()
    usable = (step > 0) & (codes.abs() <= MOST_CODE) & (error <= 2 * bound)
    if rows.dtype != torch.float32:
        # A multiple that was rounded to 16 bits must be what the codec makes of it.
        again = torch.round(found.to(torch.float64) / wide).to(torch.float32)
        usable &= (again * step).to(rows.dtype) == found
    return torch.where(usable, found, rows)


def _step_of(bound: torch.Tensor) -> torch.Tensor:
    """Return what `vector_format.step_of` does, float32, where the bound is."""
    wanted = 2 * bound * STEP_SHARE
    step = wanted.to(torch.float32)
    return torch.where((wanted <= MOST_STEP) & (step >= LEAST_STEP), step, torch.zeros_like(step))


class ErrorFeedback:
    """What rounding took from the gradients of rows, by id, until the rows are met again.

    Parameters
    ----------
    rows : int
        Ids that are kept at most; those that were met longest ago go first.
    row_elements : int
        Elements of a row.
    """

    def __init__(self, rows: int, row_elements: int) -> None:
        self._rows = rows
        self._ids = np.empty(0, np.int64)  # rising
        self._ages = np.empty(0, np.int64)
        self._lost = np.empty((0, row_elements), np.float32)
        self._time = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self._ids.nbytes + self._ages.nbytes + self._lost.nbytes

    def __len__(self) -> int:
        """Return the ids that are kept."""
        return len(self._ids)

    def add_to(self, gradients: torch.Tensor, ids: Array) -> torch.Tensor:
        """Return gradients ``[N, row]`` with what their rows lost, at the first place of each id.

        Parameters
        ----------
        gradients : torch.Tensor
            On any device; what was lost is on the CPU.
        ids : numpy.ndarray
            int64 ``[N]``.
        """
        distinct, first = np.unique(ids, return_index=True)
        at = np.searchsorted(self._ids, distinct)
        known = at < len(self._ids)
        known[known] = self._ids[at[known]] == distinct[known]
        result = gradients.clone()
        places = torch.from_numpy(first[known]).to(result.device)
        lost = torch.from_numpy(self._lost[at[known]]).to(result.device)
        result[places] = (result[places].float() + lost).to(result.dtype)
        return result

    def keep(self, lost: torch.Tensor, ids: Array) -> None:
        """Keep what rows ``[N, row]`` lost, in place of what was kept of them; waits for a GPU.

        Elements that are no finite numbers count as 0; of ids below 0 nothing is kept.
        """
        self._time += 1
        named = ids >= 0
        distinct, places = np.unique(ids[named], return_inverse=True)
        sums = np.zeros((len(distinct), self._lost.shape[1]), np.float32)
        finite = torch.nan_to_num(lost.float(), 0.0, 0.0, 0.0).cpu().numpy()
        np.add.at(sums, places.reshape(-1), finite[named])
        others = ~np.isin(self._ids, distinct, assume_unique=True)
        all_ids = np.concatenate([self._ids[others], distinct])
        ages = np.concatenate([self._ages[others], np.full(len(distinct), self._time)])
        table = np.concatenate([self._lost[others], sums])
        # The youngest first; of one age the lowest ids.
        kept = np.lexsort((all_ids, -ages))[: self._rows]
        kept = kept[np.argsort(all_ids[kept])]
        self._ids, self._ages, self._lost = all_ids[kept], ages[kept], table[kept]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return ids, ages and what was lost."""
        return {
            "ids": torch.from_numpy(self._ids.copy()),
            "ages": torch.from_numpy(self._time - self._ages),
            "lost": torch.from_numpy(self._lost.copy()),
        }

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
                and tuple(lost.shape) == (len(ids), self._lost.shape[1])
                and bool((ids[1:] > ids[:-1]).all())
            )
        if not sound:
            raise CorruptedDataError("state: error feedback is damaged, or of other rows")
        self._time = int(ages.max()) if len(ages) else 0
        youngest = np.sort(np.argsort(ages.numpy(), kind="stable")[: self._rows])
        self._ids, self._lost = ids.numpy()[youngest].copy(), lost.numpy()[youngest].copy()
        self._ages = self._time - ages.numpy()[youngest]


class GradientRounder:
    """Rounds the gradients of tables, and keeps by table what their rows lost.

    Parameters
    ----------
    seed : int
        Of the random numbers.
    feedback_rows : int
        As for `ErrorFeedback`, of each table; 0: nothing is kept.
    """

    def __init__(self, seed: int, feedback_rows: int) -> None:
        self._seed, self.feedback_rows = seed, feedback_rows
        self._feedback: dict[str, ErrorFeedback] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(kept.nbytes for kept in self._feedback.values())

    def rounded(
        self,
        table: str,
        rows: torch.Tensor,
        ids: Array | None,
        bound: float | torch.Tensor,
        stream: int,
        own: slice,
    ) -> torch.Tensor:
        """Return gradients of a table rounded, with what their rows lost before.

        Parameters
        ----------
        table : str
            Its name.
        rows : torch.Tensor
            ``[N, row]``.
        ids : numpy.ndarray or None
            Of each row.
        bound, stream
            As for `round_stochastically`.
        own : slice
            Rows of this rank for itself, which do not cross: they are not rounded.
        """
        feedback = None
        if self.feedback_rows and ids is not None and len(ids):
            feedback = self._of(table, rows.shape[1])
            rows = feedback.add_to(rows, ids)
        found = rows
        if isinstance(bound, torch.Tensor) or bound:
            found = round_stochastically(rows, bound, self._seed, stream)
            found[own] = rows[own]
        # Also where nothing is lost now: what was lost before has been added.
        if feedback is not None and ids is not None:
            feedback.keep(rows - found, ids)
        return found

    def _of(self, table: str, row_elements: int) -> ErrorFeedback:
        if table not in self._feedback:
            self._feedback[table] = ErrorFeedback(self.feedback_rows, row_elements)
        return self._feedback[table]

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return by table what is kept."""
        return {table: kept.state_dict() for table, kept in self._feedback.items()}

    def load_state_dict(self, state: Mapping[str, Any], rows: Mapping[str, int]) -> None:
        """Take what `state_dict` returned; `rows` are the elements of tables' rows, if planned.

        Raises
        ------
        CorruptedDataError
            When it is damaged, or of rows of another size.
        """
        for table, kept in state.items():
            lost = kept.get("lost") if isinstance(kept, Mapping) else None
            row = rows.get(table)
            if not isinstance(lost, torch.Tensor) or lost.dim() != 2:
                raise CorruptedDataError("state: error feedback is damaged, or of other rows")
            if row is not None and lost.shape[1] != row:
                raise CorruptedDataError(
                    f"state: error feedback of rows of {lost.shape[1]}, table {table} has {row}"
                )
            self._of(table, lost.shape[1]).load_state_dict(kept)


_MASK = (1 << 64) - 1


def _signed(number: int) -> int:
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


def _mixed_number(number: int) -> int:
    z = (number + _WEYL) & _MASK
    z = (z ^ z >> 30) * _FIRST & _MASK
    z = (z ^ z >> 27) * _SECOND & _MASK
    return z ^ z >> 31


def _shifted(t: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int64 shifted to the right as unsigned numbers."""
    return t >> bits & (1 << 64 - bits) - 1


def _mixed(t: torch.Tensor) -> torch.Tensor:
    z = (t ^ _shifted(t, 30)) * _signed(_FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(_SECOND)
    return z ^ _shifted(z, 31)
