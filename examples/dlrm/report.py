"""Output of the training script: a table of all ways, a verdict, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.report import same_bits  # next to this package
from rich.console import Console
from rich.table import Table

from .training import Run

TITLES = {
    "torch": "nn.EmbeddingBag",
    "cached": "CachedEmbeddingBag",
    "ebc": "TorchRec's own",
    "torchrec": "CompressedEmbeddingBagCollection",
}


def print_runs(console: Console, runs: Sequence[Run]) -> None:
    """Print a row for each epoch of each way."""
    names = "; ".join(f"{run.mode}: {TITLES[run.mode]}" for run in runs)
    shown = Table(caption=names)
    shown.add_column("embedding")
    for heading in (
        *("epoch", "loss", "test loss", "AUC", "seconds", "lookups/s", "hit rate", "moved MB"),
        *("host MB", "device MB", "ratio"),
    ):
        shown.add_column(heading, justify="right")
    for run in runs:
        memory = run.memory
        for epoch in run.epochs:
            last = epoch is run.epochs[-1]
            hit_rate = epoch.traffic.hit_rate
            shown.add_row(
                run.mode if epoch is run.epochs[0] else "",
                str(epoch.epoch),
                f"{epoch.loss:.6f}",
                f"{epoch.test_loss:.6f}",
                f"{epoch.auc:.6f}",
                f"{epoch.seconds:.2f}",
                f"{epoch.lookups_per_s:,.0f}",
                "" if hit_rate is None else f"{hit_rate:.1%}",
                "" if hit_rate is None else f"{epoch.traffic.moved_bytes / 1e6:,.2f}",
                f"{memory.host_bytes / 1e6:,.2f}" if last else "",
                f"{memory.device_bytes / 1e6:,.2f}" if last else "",
                "" if memory.ratio is None or not last else f"{memory.ratio:.2f}",
                end_section=last,
            )
    console.print(shown)


def all_equal(runs: Sequence[Run]) -> bool:
    """Whether every loss and every AUC is the same in all ways, to the last bit."""
    return all(same_bits(run.numbers, runs[0].numbers) for run in runs)


def verdict(runs: Sequence[Run], equal: bool, device: str) -> str:
    """Return a line on whether the ways agree."""
    n_losses = sum(len(epoch.losses) for epoch in runs[0].epochs)
    found = "equal to the last bit" if equal else "DIFFERENT"
    if not equal and device != "cpu":
        found += " (a GPU adds in no fixed order: compare last bits on a CPU)"
    return f"AUC and the losses of {n_losses:,} batches, {len(runs)} ways: {found}"


def draw(path: Path, runs: Sequence[Run]) -> None:
    """Draw the loss of each batch, the AUC of each epoch, the memory of the tables."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, areas, memory) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    for i, run in enumerate(runs):
        # Thinner and thinner, so that each shows on those that it equals.
        width = 2 * (len(runs) - i)
        values = [loss for epoch in run.epochs for loss in epoch.losses]
        losses.plot(range(1, len(values) + 1), values, label=run.mode, linewidth=width)
        epochs = [epoch.epoch for epoch in run.epochs]
        auc = [epoch.auc for epoch in run.epochs]
        areas.plot(epochs, auc, label=run.mode, linewidth=width, marker="o")
    losses.set(xlabel="batch", ylabel="loss")
    losses.legend()
    areas.set(xlabel="epoch", ylabel="AUC")
    areas.locator_params(axis="x", integer=True)
    modes = [run.mode for run in runs]
    bottom = [0.0] * len(runs)
    for part in ("host", "device"):
        heights = [getattr(run.memory, f"{part}_bytes") / 1e6 for run in runs]
        memory.bar(modes, heights, bottom=bottom, label=part)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    memory.set(ylabel="MB of the tables")
    memory.legend()
    figure.savefig(path)
    pyplot.close(figure)
