"""Rows rounded within a bound: to the nearest, stochastically, and what gradients lost kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..engine.kernels.vector_format import LEAST_STEP, MOST_CODE, MOST_STEP, STEP_SHARE, step_of
from ..errors import CorruptedDataError
from .feedback import ErrorFeedback

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
        ids: torch.Tensor | None,
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
        ids : torch.Tensor or None
            int64 ``[N]`` where the rows are, of each row.
        bound, stream
            As for `round_stochastically`.
        own : slice
            Rows of this rank for itself, which do not cross: they are not rounded.
        """
        if not (self.feedback_rows and ids is not None and len(ids)):
            return self._rounded(rows, bound, stream, own)
        feedback = self._of(table, rows.shape[1])
        met = feedback.met(ids)
        rows = feedback.add_to(rows, met)
        found = self._rounded(rows, bound, stream, own)
        # Also where nothing is lost now: what was lost before has been added.
        feedback.keep(rows - found, met)
        return found

    def _rounded(
        self, rows: torch.Tensor, bound: float | torch.Tensor, stream: int, own: slice
    ) -> torch.Tensor:
        if not isinstance(bound, torch.Tensor) and not bound:
            return rows
        found = round_stochastically(rows, bound, self._seed, stream)
        found[own] = rows[own]
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
