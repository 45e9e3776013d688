"""Output of the scripts: a table for each way of keeping features, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .modes import PAPER_NAMES
from .training import Epoch


@dataclass
class Run:
    """Results of training in one mode."""

    mode: str
    raw_bytes: int
    host_bytes: int
    copies: int
    prepare_seconds: float
    epochs: list[Epoch]
    validation_accuracy: float | None

    @property
    def losses(self) -> list[float]:
        """The loss of every batch."""
        return [loss for epoch in self.epochs for loss in epoch.losses]

    def as_dict(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "raw_bytes": self.raw_bytes,
            "host_bytes": self.host_bytes,
            "copies": self.copies,
            "memory_ratio": self.raw_bytes / self.host_bytes,
            "prepare_seconds": self.prepare_seconds,
            "epochs": [epoch.as_dict() for epoch in self.epochs],
            "validation_accuracy": self.validation_accuracy,
        }


def print_run(console: Console, run: Run, n_ranks: int) -> None:
    """Print the epochs of one mode."""
    copies = "one copy" if run.copies == 1 else f"{run.copies} copies"
    shared = f", {copies} for {n_ranks} ranks" if n_ranks > 1 else ""
    known = f", {PAPER_NAMES[run.mode]}" if run.mode in PAPER_NAMES else ""
    shown = Table(
        title=f"{run.mode}{known}: features of {run.raw_bytes / 1e6:,.2f} MB take "
        f"{run.host_bytes / 1e6:,.2f} MB of host memory "
        f"({run.raw_bytes / run.host_bytes:.2f}x){shared}",
        title_justify="left",
    )
    for heading in (
        "epoch",
        "loss",
        "accuracy",
        "seconds",
        "sampling",
        "fetching",
        "training",
        "waiting",
        "moved MB",
        "ratio",
        "hit rate",
    ):
        shown.add_column(heading, justify="right")
    for epoch in run.epochs:
        ratio, hit_rate = epoch.traffic.ratio, epoch.traffic.hit_rate
        shown.add_row(
            str(epoch.epoch),
            f"{epoch.loss:.6f}",
            f"{epoch.accuracy:.1%}",
            f"{epoch.seconds:.2f}",
            f"{epoch.sampling_seconds:.2f}",
            f"{epoch.fetching_seconds:.2f}",
            f"{epoch.training_seconds:.2f}",
            f"{epoch.waiting_seconds:.2f}",
            f"{epoch.traffic.moved_bytes / 1e6:,.2f}",
            "" if ratio is None else f"{ratio:.2f}",
            "" if hit_rate is None else f"{hit_rate:.1%}",
        )
    console.print(shown)
    if run.validation_accuracy is not None:
        console.print(f"validation accuracy {run.validation_accuracy:.1%}")


def draw(path: Path, runs: Sequence[Run]) -> None:
    """Draw the loss of each batch, and what an epoch of each way takes: seconds, bytes moved."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, seconds, moved) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    for i, run in enumerate(runs):
        # Thinner and thinner, so that each shows on those that it equals.
        batches, width = range(1, len(run.losses) + 1), 2 * (len(runs) - i)
        losses.plot(batches, run.losses, label=run.mode, linewidth=width, marker=".")
    losses.set(xlabel="batch", ylabel="loss")
    losses.legend()
    modes = [run.mode for run in runs]
    bottom = [0.0] * len(runs)
    for part in ("waiting", "training"):
        heights = [
            sum(getattr(epoch, f"{part}_seconds") for epoch in run.epochs) / len(run.epochs)
            for run in runs
        ]
        seconds.bar(modes, heights, bottom=bottom, label=part)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    seconds.set(ylabel="seconds of an epoch")
    seconds.legend()
    megabytes = [
        sum(epoch.traffic.moved_bytes for epoch in run.epochs) / len(run.epochs) / 1e6
        for run in runs
    ]
    moved.bar(modes, megabytes)
    moved.set(ylabel="MB moved in an epoch")
    figure.savefig(path)
    pyplot.close(figure)
