"""Sources of the rows of a table before they are packed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from bitslab.integrations.torchrec.grouping import sample_of
from bitslab.tables import Rows, rows_per_batch, slices_of


class Source(Protocol):
    """Rows of a table."""

    def sample(self) -> torch.Tensor:
        """Return some rows ``[n, D]``, all when they are few."""

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield all rows in order, ``[n, D]`` each time."""


class RowsSource:
    """Rows that are there: a tensor, or an array, which may be memory-mapped.

    Parameters
    ----------
    rows : torch.Tensor or numpy.ndarray
        ``[N, D]``.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows.detach() if isinstance(rows, torch.Tensor) else rows

    def sample(self) -> torch.Tensor:
        """Return some rows."""
        return sample_of(self._rows)

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield all rows."""
        if self._rows.shape[0]:
            yield from slices_of(self._rows)


class FilledSource:
    """Rows that a function fills, drawing from torch's generator.

    What `torch.nn.init.uniform_` draws is drawn again when it is needed, so that only one table is
    there unpacked at a time. Another function is called once and its rows are kept until then.

    Parameters
    ----------
    n_rows, row_dim, dtype
        The table.
    fill : function
        Fills a tensor in place.
    """

    def __init__(
        self, n_rows: int, row_dim: int, dtype: torch.dtype, fill: Callable[[torch.Tensor], Any]
    ) -> None:
        self._shape, self._dtype = (n_rows, row_dim), dtype
        self._fill = fill
        self._state = torch.get_rng_state()
        rows = self._filled()
        self._sample = sample_of(rows).clone()
        repeatable = isinstance(fill, functools.partial) and fill.func is torch.nn.init.uniform_
        self._rows = None if repeatable else rows

    def _filled(self) -> torch.Tensor:
        rows = torch.empty(self._shape, dtype=self._dtype)
        with torch.no_grad():
            # TorchRec hands parameters to these functions.
            self._fill(torch.nn.Parameter(rows))
        return rows

    def sample(self) -> torch.Tensor:
        """Return some rows."""
        return self._sample

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield all rows."""
        if self._rows is not None:
            yield self._rows
            return
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._state)
            rows = self._filled()
        step = rows_per_batch(rows[:1].nbytes)
        for first in range(0, rows.shape[0], step):
            yield rows[first : first + step]


def skip_first_draw(n_rows: int, row_dim: int, dtype: torch.dtype) -> None:
    """Draw what `torch.nn.Embedding` draws when it is made, and forget it.

    TorchRec makes its tables so and fills them afterwards: with one seed both have the same rows.
    """
    torch.nn.init.normal_(torch.empty(n_rows, row_dim, dtype=dtype))
