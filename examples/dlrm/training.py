"""The loop that trains DLRM with tables kept in any way, and what it measures."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from common.report import Report
from common.reproducible import drawn_seed  # next to this package
from torch.nn import functional

from .auc import auc
from .clicks import Batch, Clicks, ahead
from .model import Dlrm
from .tables import Memory, Tables, Traffic

MakeOptimizer = Callable[..., torch.optim.Optimizer]
#: What trains the tables, and what trains the perceptrons: SparseAdam takes no dense gradients.
OPTIMIZERS: dict[str, tuple[MakeOptimizer, MakeOptimizer]] = {
    "sgd": (torch.optim.SGD, torch.optim.SGD),
    # An eps that float16 has: with 0 rows that were never looked up become 0 / 0.
    "adagrad": (partial(torch.optim.Adagrad, eps=1e-7), partial(torch.optim.Adagrad, eps=1e-7)),
    "sparse-adam": (torch.optim.SparseAdam, torch.optim.Adam),
}


@dataclass
class Epoch:
    """Results and costs of one epoch; time and traffic exclude the test."""

    epoch: int
    losses: list[float]
    test_loss: float
    auc: float
    seconds: float
    n_lookups: int
    traffic: Traffic

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)

    @property
    def lookups_per_s(self) -> float:
        return self.n_lookups / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "loss": self.loss,
            "losses": self.losses,
            "test_loss": self.test_loss,
            "auc": self.auc,
            "seconds": self.seconds,
            "lookups": self.n_lookups,
            "lookups_per_s": self.lookups_per_s,
            "hit_rate": self.traffic.hit_rate,
            **asdict(self.traffic),
        }


@dataclass
class Run:
    """Results of training in one mode."""

    mode: str
    prepare_seconds: float
    epochs: list[Epoch]
    memory: Memory
    codecs: list[str]

    @property
    def numbers(self) -> list[float]:
        """All that must be the same in every mode: losses, and what each test gave."""
        tested = [number for epoch in self.epochs for number in (epoch.test_loss, epoch.auc)]
        return [*(loss for epoch in self.epochs for loss in epoch.losses), *tested]

    def as_dict(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "prepare_seconds": self.prepare_seconds,
            "epochs": [epoch.as_dict() for epoch in self.epochs],
            **asdict(self.memory),
            "ratio": self.memory.ratio,
            "codecs": self.codecs,
        }


class Trainer:
    """Trains a model whose tables are kept in one way.

    Parameters
    ----------
    clicks : Clicks
        What to train and test on.
    tables : Tables
        The embeddings.
    options : argparse.Namespace
        See `options.py`.
    device : torch.device
        Where it trains.
    """

    def __init__(
        self, clicks: Clicks, tables: Tables, options: argparse.Namespace, device: torch.device
    ) -> None:
        self.clicks, self.tables, self.options, self.device = clicks, tables, options, device
        torch.manual_seed(options.seed)
        n_dense = clicks.dense.shape[1]
        self.model = Dlrm(tables, n_dense, options.bottom, options.top).to(device)
        for_tables, for_perceptrons = OPTIMIZERS[options.optimizer]
        self.optimizers = [
            for_tables(tables.module.parameters(), lr=options.lr),
            for_perceptrons(self.model.perceptrons(), lr=options.lr),
        ]

    def train_epoch(self, number: int, report: Report | None = None) -> Epoch:
        """Train on all lines but those kept back, once, and test on these."""
        generator = torch.Generator().manual_seed(drawn_seed(self.options.seed, number))
        lines = self.clicks.epoch(self.options.batch_size, generator)
        self.model.train()
        before = self.tables.traffic()
        losses: list[torch.Tensor] = []
        n_lookups = 0
        begin = time.perf_counter()
        for batch, following in ahead(self._batches(lines)):
            loss = functional.binary_cross_entropy_with_logits(self.model(batch), batch.labels)
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if self.options.pipelined and following is not None:
                self.tables.prefetch(following)
            for optimizer in self.optimizers:
                optimizer.step()
            # Read at the end: to wait for each loss would keep a GPU from working ahead.
            losses.append(loss.detach())
            n_lookups += batch.n_lookups
            if report:
                report(len(losses), len(lines))
        losses_read = torch.stack(losses).tolist()
        seconds = time.perf_counter() - begin
        traffic = self.tables.traffic() - before
        test_loss, area = self.test()
        return Epoch(number, losses_read, test_loss, area, seconds, n_lookups, traffic)

    def test(self) -> tuple[float, float]:
        """Return the mean loss and the AUC of the lines kept back."""
        lines = self.clicks.tested(self.options.batch_size)
        self.model.eval()
        with torch.no_grad():
            logits = torch.cat([self.model(batch) for batch in self._batches(lines)]).cpu()
        labels = self.clicks.labels[self.clicks.n_trained :]
        loss = functional.binary_cross_entropy_with_logits(logits, labels)
        return float(loss), auc(labels, logits)

    def _batches(self, lines: Sequence[torch.Tensor]) -> Iterator[Batch]:
        return (self.clicks.batch(part).to(self.device) for part in lines)
