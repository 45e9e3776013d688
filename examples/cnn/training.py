"""The loop that trains a model with saved tensors kept in any way, and what it measures."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from common.arguments import DTYPES  # next to this package
from common.memory import MemoryPeak
from common.report import Report
from common.reproducible import drawn_seed

from .images import Images
from .models import make_model
from .saved import loss_of, saved_tensors
from .ways import Decided, Kept, Traffic, keep

#: Steps of each run whose times do not count: kernels are compiled, the first profile is made.
WARM_UP_STEPS = 2

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}


@dataclass
class Epoch:
    """Results and costs of one epoch; times and traffic exclude the test."""

    epoch: int
    losses: list[float]
    test_accuracy: float
    step_seconds: list[float]
    traffic: Traffic
    decisions: list[Decided] = field(default_factory=list)

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)

    def as_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "loss": self.loss,
            "losses": self.losses,
            "test_accuracy": self.test_accuracy,
            "step_seconds": statistics.median(self.step_seconds),
            **asdict(self.traffic),
            "decisions": [asdict(decided) for decided in self.decisions],
        }


@dataclass
class Run:
    """Results of training in one way."""

    way: str
    epochs: list[Epoch]
    host_bytes: int
    device_bytes: int
    lossless: bool
    notes: list[str]
    equal: bool | None = None
    exposed_seconds: float | None = None

    @property
    def numbers(self) -> list[float]:
        """All that must be the same in every lossless way."""
        losses = [loss for epoch in self.epochs for loss in epoch.losses]
        return [*losses, *(epoch.test_accuracy for epoch in self.epochs)]

    @property
    def step_seconds(self) -> float:
        """The median of all steps but the first ones."""
        steps = [seconds for epoch in self.epochs for seconds in epoch.step_seconds]
        return statistics.median(steps[WARM_UP_STEPS:] or steps)

    @property
    def traffic(self) -> Traffic:
        """Of all epochs."""
        return sum((epoch.traffic for epoch in self.epochs), Traffic())

    @property
    def n_steps(self) -> int:
        return sum(len(epoch.losses) for epoch in self.epochs)

    def as_dict(self) -> dict[str, Any]:
        return {
            "way": self.way,
            "epochs": [epoch.as_dict() for epoch in self.epochs],
            "step_seconds": self.step_seconds,
            "exposed_swap_seconds": self.exposed_seconds,
            "peak_host_bytes": self.host_bytes,
            "peak_device_bytes": self.device_bytes,
            "down_bytes_per_step": self.traffic.down_bytes / self.n_steps,
            "up_bytes_per_step": self.traffic.up_bytes / self.n_steps,
            "crossed_down_bytes_per_step": self.traffic.crossed_down_bytes / self.n_steps,
            "crossed_up_bytes_per_step": self.traffic.crossed_up_bytes / self.n_steps,
            "lossless": self.lossless,
            "losses_equal_first": self.equal,
            "notes": self.notes,
        }


@dataclass
class Sparsity:
    """Shares of zeros in what a layer saves, by epoch; the first is before training."""

    layer: str
    kind: str
    shape: list[int]
    nbytes: int
    zeros: list[float]


class Trainer:
    """Trains one model from the same weights, with the same batches, in one way.

    Parameters
    ----------
    images : Images
        What to train and test on.
    way : str
        One of `ways.WAYS`.
    options : argparse.Namespace
        See `options.py`.
    device : torch.device
        Where it trains.
    """

    def __init__(
        self, images: Images, way: str, options: argparse.Namespace, device: torch.device
    ) -> None:
        self.images, self.way, self.options, self.device = images, way, options, device
        self.dtype = DTYPES[options.dtype]
        # Weights, and the masks of dropout after them.
        torch.manual_seed(options.seed)
        self.model = make_model(
            options.model, options.shape, images.classes, options.activation, options.width
        ).to(device)
        self.optimizer = OPTIMIZERS[options.optimizer](self.model.parameters(), lr=options.lr)
        self.n_batches = len(images.trained) // options.batch_size

    def train(
        self,
        begin_epoch: Callable[[int], Report],
        sparsity: list[Sparsity] | None = None,
    ) -> Run:
        """Train for all epochs.

        Parameters
        ----------
        begin_epoch : callable
            Called with the number of an epoch, from 1; returns what is reported of its batches.
        sparsity : list, optional
            Takes the zeros of what is saved, before training and after each epoch.
        """
        epochs = []
        host_bytes = device_bytes = 0
        if sparsity is not None:
            self.count_zeros(sparsity)
        with keep(self.way, self.model, self.options) as kept:
            for number in range(1, self.options.epochs + 1):
                # Each epoch by itself, so that counting zeros is in none.
                with MemoryPeak(self.device) as peak:
                    epochs.append(self.train_epoch(number, kept, begin_epoch(number)))
                host_bytes = max(host_bytes, peak.host_bytes)
                device_bytes = max(device_bytes, peak.device_bytes)
                if sparsity is not None:
                    self.count_zeros(sparsity)
            return Run(self.way, epochs, host_bytes, device_bytes, kept.lossless, kept.notes())

    def train_epoch(self, number: int, kept: Kept, report: Report) -> Epoch:
        """Train on each batch once, and test."""
        generator = torch.Generator().manual_seed(drawn_seed(self.options.seed, number))
        self.model.train()
        kept.begin_epoch(number)
        before = kept.traffic()
        losses, seconds = [], []
        for images, labels in self.images.epoch(self.options.batch_size, generator):
            begin = time.perf_counter()
            self.optimizer.zero_grad(set_to_none=True)
            with kept.step():
                loss = loss_of(self.model, images, labels, self.dtype)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())  # waits for the device
            seconds.append(time.perf_counter() - begin)
            report(len(losses), self.n_batches)
        traffic = kept.traffic() - before
        return Epoch(number, losses, self.test(), seconds, traffic, kept.decisions())

    @torch.no_grad()
    def test(self) -> float:
        """Return the share of the tested images that the model gets right."""
        self.model.eval()
        correct = 0
        for ids in self.images.tested.split(self.options.batch_size):
            images, labels = self.images.batch(ids)
            correct += int((self.model(images).argmax(1) == labels).sum())
        return correct / len(self.images.tested)

    def count_zeros(self, sparsity: list[Sparsity]) -> None:
        """Add the zeros of what a batch saves to each row, or make the rows."""
        self.model.train()
        ids = self.images.trained[: self.options.batch_size]
        found = saved_tensors(self.model, *self.images.batch(ids), dtype=self.dtype)
        kept = [s for s in found if s.layer and s.kind != "statistics"]
        if not sparsity:
            sparsity += [
                Sparsity(s.layer, s.kind, list(s.shape), s.values.nbytes, []) for s in kept
            ]
        for row, saved in zip(sparsity, kept, strict=True):
            row.zeros.append(saved.zeros)
