"""The loop that both frameworks train in, and what it measures."""

from __future__ import annotations

import abc
import argparse
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from common.ranks import Ranks
from common.report import Report
from common.reproducible import drawn_seed
from torch.nn import functional

from .datasets import DatasetError, Graph
from .modes import Column, Traffic
from .pipeline import Spent, prepared

#: Stands for the number of an epoch in the seeds of what is drawn for validation.
VALIDATION = 1 << 30


@dataclass
class Seeds:
    """The nodes of one batch, int64 ``[n]`` on the CPU, and the seed of what is sampled there."""

    ids: torch.Tensor
    seed: int


@dataclass
class Fetched:
    """A batch with its features.

    `inputs` go to the model; `labels` are int64 ``[n]``; `rows` counts what was asked of each
    column.
    """

    inputs: tuple[Any, ...]
    labels: torch.Tensor
    rows: dict[str, int]

    def record_stream(self, stream: Any) -> None:
        """Record this stream on all tensors, which are on a GPU, so that their memory is kept."""
        for value in (*self.inputs, self.labels):
            for part in value if isinstance(value, list) else [value]:
                part.record_stream(stream)


@dataclass
class Epoch:
    """Results and costs of one epoch.

    Seconds: `sampling` and `fetching` of the thread that prepares batches, `waiting` of the one
    that trains, `training` the rest of its time. Without a pipeline it waits for both.
    """

    epoch: int
    losses: list[float]
    accuracy: float
    seconds: float
    sampling_seconds: float
    fetching_seconds: float
    training_seconds: float
    waiting_seconds: float
    traffic: Traffic

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)

    def as_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "loss": self.loss,
            "losses": self.losses,
            "accuracy": self.accuracy,
            "seconds": self.seconds,
            "sampling_seconds": self.sampling_seconds,
            "fetching_seconds": self.fetching_seconds,
            "training_seconds": self.training_seconds,
            "waiting_seconds": self.waiting_seconds,
            "gathered_bytes": self.traffic.gathered_bytes,
            "moved_bytes": self.traffic.moved_bytes,
            "ratio": self.traffic.ratio,
            "hit_rate": self.traffic.hit_rate,
        }


class Trainer(abc.ABC):
    """Trains a model on one graph whose features are kept in one mode.

    A framework adds what samples, what fetches features, and the model.

    Parameters
    ----------
    graph : Graph
        The graph.
    mode : str
        One of `modes.MODES`.
    options : argparse.Namespace
        See `options.add_options`.
    device : torch.device
        Where it trains.
    ranks : Ranks
        The processes that train together.
    """

    #: Set by `prepare`.
    columns: dict[str, Column]

    def __init__(
        self,
        graph: Graph,
        mode: str,
        options: argparse.Namespace,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        self.graph, self.mode, self.options = graph, mode, options
        self.device, self.ranks = device, ranks
        begin = time.perf_counter()
        self.columns = self.prepare()
        self.prepare_seconds = time.perf_counter() - begin
        torch.manual_seed(options.seed)
        self.model = ranks.wrapped(self.make_model().to(device))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=options.lr)
        # A batch is cut into equal parts, one for each rank.
        self.n_train = min(len(graph.train), options.max_train or len(graph.train))
        fits = min(options.batch_size, self.n_train)
        self.batch_size = fits - fits % ranks.size
        if not self.batch_size:
            raise DatasetError(
                f"{graph.name}: {self.n_train} nodes to train on, which is none for some of "
                f"{ranks.size} ranks"
            )

    # What a framework adds

    @abc.abstractmethod
    def prepare(self) -> dict[str, Column]:
        """Convert the graph to the framework's form; return its feature columns by name."""

    @abc.abstractmethod
    def make_model(self) -> torch.nn.Module:
        """Return a model that takes the `inputs` of a `Fetched` to scores ``[n, classes]``."""

    @abc.abstractmethod
    def sampled(self, batches: Sequence[Seeds]) -> Iterator[Any]:
        """Sample around the nodes of each batch, in order."""

    @abc.abstractmethod
    def fetch(self, sampled: Any) -> Fetched:
        """Add features to what was sampled."""

    # The loop

    def train_epoch(self, epoch: int, report: Report | None = None) -> Epoch:
        """Train on all training nodes once, or on as many as the options allow."""
        generator = torch.Generator().manual_seed(drawn_seed(self.options.seed, epoch))
        order = self.graph.train[torch.randperm(len(self.graph.train), generator=generator)]
        # What fills no batch is left out, other nodes in each epoch.
        batches = self._batches(order[: self.n_train - self.n_train % self.batch_size], epoch)
        self.model.train()
        spent = Spent()
        losses: list[float] = []
        correct = n_scored = 0
        before = self._traffic()
        begin = time.perf_counter()
        with closing(self._prepared(batches, spent)) as prepared_batches:
            for fetched in prepared_batches:
                scores = self.model(*fetched.inputs)
                loss = functional.cross_entropy(scores, fetched.labels)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()
                losses.append(loss.item())
                correct += int((scores.detach().argmax(1) == fetched.labels).sum())
                n_scored += len(fetched.labels)
                if report:
                    report(len(losses), len(batches))
        seconds = time.perf_counter() - begin
        traffic = self._traffic() - before
        # Every rank has as many nodes, so the loss of all is the mean of theirs.
        *losses, right, scored = self.ranks.summed([*losses, correct, n_scored], self.device)
        return Epoch(
            epoch=epoch,
            losses=[loss / self.ranks.size for loss in losses],
            accuracy=right / scored,
            seconds=seconds,
            sampling_seconds=spent.sampling,
            fetching_seconds=spent.fetching,
            training_seconds=seconds - spent.waiting,
            waiting_seconds=spent.waiting,
            traffic=Traffic(*map(int, self.ranks.summed([*traffic.numbers()], self.device))),
        )

    def validate(self) -> float | None:
        """Return the share of the validation nodes that the model gets right; None without any.

        The first ones, where the options limit how many nodes are trained on.
        """
        ids = self.graph.validated[: self.options.max_train]
        ids = ids[: len(ids) - len(ids) % self.ranks.size]
        if not len(ids):
            return None
        self.model.eval()
        correct = 0
        batches = self._prepared(self._batches(ids, VALIDATION), Spent())
        with torch.no_grad(), closing(batches):
            for fetched in batches:
                # Without the wrapper, which would have the ranks wait for each other.
                scores = getattr(self.model, "module", self.model)(*fetched.inputs)
                correct += int((scores.argmax(1) == fetched.labels).sum())
        return self.ranks.summed([correct], self.device)[0] / len(ids)

    def _batches(self, ids: torch.Tensor, epoch: int) -> list[Seeds]:
        return [
            Seeds(self.ranks.part(batch), drawn_seed(self.options.seed, epoch, i))
            for i, batch in enumerate(ids.split(self.batch_size))
        ]

    def _prepared(self, batches: list[Seeds], spent: Spent) -> Generator[Fetched, None, None]:
        def fetch(sampled: Any) -> Fetched:
            fetched = self.fetch(sampled)
            for name, n_rows in fetched.rows.items():
                self.columns[name].count(n_rows)
            return fetched

        ahead = 1 if self.options.pipeline else 0
        return prepared(lambda: iter(self.sampled(batches)), fetch, ahead, spent, self.device)

    def _traffic(self) -> Traffic:
        return sum((column.traffic() for column in self.columns.values()), Traffic())
