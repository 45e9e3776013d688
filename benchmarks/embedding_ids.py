"""Tables and ids that the embedding benchmarks share."""

from __future__ import annotations

import torch

ZIPF_EXPONENT = 1.05


class Draw:
    """Ids of a table's rows, drawn uniformly or by a Zipf law over shuffled ids.

    Parameters
    ----------
    n_rows : int
        Rows of the table.
    kind : {"uniform", "zipf"}
        The law.
    seed : int
        Seed of the ids.
    """

    def __init__(self, n_rows: int, kind: str, seed: int = 0) -> None:
        self.n_rows = n_rows
        self.kind = kind
        self._generator = torch.Generator().manual_seed(seed)
        self._ids = torch.randperm(n_rows, generator=self._generator)
        ranks = torch.arange(1, n_rows + 1, dtype=torch.float64)
        self._ends = (ranks**-ZIPF_EXPONENT).cumsum(0)

    def ids(self, n: int) -> torch.Tensor:
        """Return int64 ``[n]`` ids on the CPU, new ones each time."""
        if self.kind == "uniform":
            return torch.randint(self.n_rows, (n,), generator=self._generator)
        at = torch.rand(n, generator=self._generator, dtype=torch.float64) * self._ends[-1]
        return self._ids[torch.searchsorted(self._ends, at).clamp_(max=self.n_rows - 1)]

    def counts(self) -> torch.Tensor:
        """Return how often rows are used, int64 ``[N]``, as counts of a data set."""
        if self.kind == "uniform":
            return torch.ones(self.n_rows, dtype=torch.int64)
        counts = torch.empty(self.n_rows, dtype=torch.int64)
        counts[self._ids] = torch.arange(self.n_rows, 0, -1)
        return counts


def trained_like(n_rows: int, row_bytes: int) -> torch.Tensor:
    """Return float32 rows that pack as trained ones do (1.14x to 1.17x)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n_rows, row_bytes // 4, generator=generator).mul_(0.05)
