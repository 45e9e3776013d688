"""Clicks that need no file: ids by a Zipf law over tables as large as Criteo's, hidden effects."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from common.report import Report

from .clicks import Batch, Clicks, Feature, tested_lines
from .criteo import KAGGLE_ROWS, N_DENSE, NAMES

#: Tables up to this many rows are not scaled down.
SMALL_ROWS = 1_000
#: The share of clicks in Criteo's log is near this.
CLICKED = 0.25
#: Standard deviation of what the id of one table adds to the logit, and of what all dense features
#: add together.
ID_EFFECT, DENSE_EFFECT = 0.35, 1.0


@dataclass(frozen=True)
class ZipfIds:
    """Draws ids of one table: the k-th most frequent one about ``k ** -exponent`` as often.

    Frequent ids are no neighbours, because ids are ranks times a number that has no
    common divisor with the rows.
    """

    rows: int
    exponent: float

    def draw(self, n: int, generator: torch.Generator) -> torch.Tensor:
        """Draw ids, int64 ``[n]``."""
        uniform = torch.rand(n, dtype=torch.float64, generator=generator)
        # The inverse of the integral of x ** -exponent from 1 to rows + 1: no table of sums, which
        # would take more memory than the embeddings of short rows.
        s = 1.0 - self.exponent
        if abs(s) < 1e-9:
            ranks = torch.exp(uniform * math.log(self.rows + 1))
        else:
            ranks = (uniform * ((self.rows + 1) ** s - 1) + 1) ** (1 / s)
        k = (ranks.long() - 1).clamp_(0, self.rows - 1)
        return k * self.multiplier % self.rows

    @property
    def multiplier(self) -> int:
        """A number near the golden section of the rows that has no common divisor with them."""
        near = max(1, round(self.rows * 0.6180339887))
        while math.gcd(near, self.rows) != 1:
            near += 1
        return near


def scaled_rows(scale: float) -> dict[str, int]:
    """Return the rows of Criteo's tables, those of large ones times `scale`."""
    return {
        name: min(rows, max(SMALL_ROWS, round(rows * scale)))
        for name, rows in zip(NAMES, KAGGLE_ROWS, strict=True)
    }


def draw_requests(
    table_rows: dict[str, int],
    n_dense: int,
    exponent: float,
    n: int,
    generator: torch.Generator,
) -> Batch:
    """Draw lines with no labels, for inference; an exponent of 0 is uniform."""
    offsets = torch.arange(n)
    bags = [(ZipfIds(rows, exponent).draw(n, generator), offsets) for rows in table_rows.values()]
    return Batch(torch.randn(n, n_dense, generator=generator), torch.zeros(n), bags)


def draw_clicks(
    n_lines: int,
    scale: float,
    exponent: float,
    seed: int,
    test_share: float = 0.1,
    report: Report | None = None,
) -> Clicks:
    """Draw lines to train on.

    Whether a line is clicked follows a logistic model: each id of each table and each dense
    feature adds its own amount to the logit, which the training does not know.

    Parameters
    ----------
    n_lines : int
        How many.
    scale : float
        Rows of the large tables as a share of Criteo Kaggle's.
    exponent : float
        Exponent of the Zipf law of ids.
    seed : int
        Seed of all random numbers.
    test_share : float
        Share of the lines to keep back for testing.
    report : callable, optional
        Called with the tables done, and how many there are.
    """
    generator = torch.Generator().manual_seed(seed)
    table_rows = scaled_rows(scale)
    dense = torch.randn(n_lines, N_DENSE, generator=generator)
    weights = torch.randn(N_DENSE, generator=generator)
    logits = dense @ (weights * (DENSE_EFFECT / weights.norm()))
    features = []
    for name, rows in table_rows.items():
        ids = ZipfIds(rows, exponent).draw(n_lines, generator)
        logits += (torch.randn(rows, generator=generator) * ID_EFFECT)[ids]
        features.append(Feature(name, rows, ids.int()))
        if report:
            report(len(features), len(table_rows))
    logits += math.log(CLICKED / (1 - CLICKED)) - logits.mean()
    labels = (torch.rand(n_lines, generator=generator) < logits.sigmoid()).float()
    n_tested = tested_lines(n_lines, test_share, "--lines")
    return Clicks("drawn", dense, labels, features, n_tested)
