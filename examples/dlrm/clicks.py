"""Clicks: features and labels of impressions, and batches of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


class ClicksError(Exception):
    """The data cannot be had; the message says why and what to do."""


@dataclass
class Feature:
    """A sparse feature: an id for each line, or any number of ids.

    `ids` are integers from 0 to ``rows - 1``: one for each line, or with `begins`, int64
    ``[N + 1]``, those of line i from ``begins[i]`` to ``begins[i + 1]``.
    """

    name: str
    rows: int
    ids: torch.Tensor
    begins: torch.Tensor | None = None

    def of(self, lines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids of some lines and where those of each begin, both int64."""
        if self.begins is None:
            return self.ids[lines].long(), torch.arange(len(lines))
        begins, counts = self.begins[lines], self.begins.diff()[lines]
        offsets = counts.cumsum(0) - counts
        # Each line's ids, one line after the other: where they begin in the file plus how far on.
        moved = torch.repeat_interleave(begins - offsets, counts)
        return self.ids[moved + torch.arange(len(moved))].long(), offsets


@dataclass
class Batch:
    """Some lines: `dense` float32 ``[B, F]``, `labels` float32 ``[B]``, the ids of each feature.

    `bags` has, feature by feature, ids int64 ``[n]`` and where those of each line begin,
    int64 ``[B]``, as nn.EmbeddingBag takes them.
    """

    dense: torch.Tensor
    labels: torch.Tensor
    bags: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def n_lookups(self) -> int:
        return sum(len(ids) for ids, _ in self.bags)

    def to(self, device: torch.device) -> Batch:
        """Move to a device, by one copy for all ids and one for each other part."""
        if device == self.labels.device:
            return self
        counts = [len(part) for bag in self.bags for part in bag]
        together = torch.cat([part for bag in self.bags for part in bag])
        parts = iter(sent(together, device).split(counts))
        bags = list(zip(parts, parts, strict=True))
        return Batch(sent(self.dense, device), sent(self.labels, device), bags)


def sent(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to a device; from page-locked memory to a GPU, so that the copy runs by itself."""
    return part.cpu() if device.type == "cpu" else part.pin_memory().to(device, non_blocking=True)


@dataclass
class Clicks:
    """Lines to train and test on; all tensors are on the CPU.

    `dense` is float32 ``[N, F]``; `labels` float32 ``[N]``, 1 for a click. The last `n_tested`
    lines are kept back for testing, as the last day of a log is.
    """

    name: str
    dense: torch.Tensor
    labels: torch.Tensor
    features: list[Feature]
    n_tested: int

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def n_trained(self) -> int:
        return len(self) - self.n_tested

    @property
    def table_rows(self) -> dict[str, int]:
        """The rows of each feature's table."""
        return {feature.name: feature.rows for feature in self.features}

    def batch(self, lines: torch.Tensor) -> Batch:
        """Return some lines, int64 ``[B]``."""
        bags = [feature.of(lines) for feature in self.features]
        return Batch(self.dense[lines], self.labels[lines], bags)

    def epoch(self, batch_size: int, generator: torch.Generator) -> list[torch.Tensor]:
        """Shuffle the lines to train on; what fills no batch is left out, others each time."""
        order = torch.randperm(self.n_trained, generator=generator)
        size = min(batch_size, self.n_trained)
        return list(order[: self.n_trained - self.n_trained % size].split(size))

    def tested(self, batch_size: int) -> list[torch.Tensor]:
        """Return the lines kept back, in order."""
        return list(torch.arange(self.n_trained, len(self)).split(batch_size))


def tested_lines(n_lines: int, share: float, name: str) -> int:
    """Return how many lines to keep back; at least one, and at least one is left to train on."""
    if n_lines < 2:
        raise ClicksError(f"{name}: {n_lines} lines, which are too few to train on some of them")
    return min(max(1, round(n_lines * share)), n_lines - 1)


def ahead(items: list[Batch] | Iterator[Batch]) -> Iterator[tuple[Batch, Batch | None]]:
    """Yield each batch and the next one, None after the last."""
    present: Batch | None = None
    for following in items:
        if present is not None:
            yield present, following
        present = following
    if present is not None:
        yield present, None
