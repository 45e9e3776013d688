"""Output of the distributed script: a row for each way, one for each table, a verdict, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.report import same_bits  # next to this package
from rich.console import Console
from rich.table import Table

from .exchanges import DIRECTIONS, STAGES, WAYS
from .sharded import ShardedRun, ratio_of


def print_runs(console: Console, runs: Sequence[ShardedRun]) -> None:
    """Print a row for each way of exchanging."""
    shown = Table(caption="; ".join(f"{run.way}: {WAYS[run.way]}" for run in runs))
    shown.add_column("exchange")
    for heading in (
        *("loss", "test loss", "AUC", "seconds", "raw MB", "moved MB", "ratio"),
        *("back raw MB", "moved MB", "ratio"),
    ):
        shown.add_column(heading, justify="right")
    for run in runs:
        moved = [
            text
            for direction, prefix in zip(DIRECTIONS, ("", "backward_"), strict=True)
            for text in (
                f"{run.total('raw_bytes') / 1e6:,.2f}",
                f"{run.total(f'{prefix}moved_bytes') / 1e6:,.2f}",
                f"{run.ratios[direction]:.2f}",
            )
        ]
        shown.add_row(
            run.way,
            f"{sum(run.losses) / len(run.losses):.6f}",
            f"{run.test_loss:.6f}",
            f"{run.auc:.6f}",
            f"{run.seconds:.2f}",
            *moved,
        )
    console.print(shown)
    stages = Table(caption="seconds of all ranks together; the first encoding may compile")
    for heading in ("exchange", "way"):
        stages.add_column(heading)
    for stage in STAGES:
        stages.add_column(stage.removesuffix("_s"), justify="right")
    for run in runs:
        for direction in DIRECTIONS:
            seconds = [run.stages[direction][stage] for stage in STAGES]
            cells = [f"{part:.3f}" if any(seconds) else "" for part in seconds]
            stages.add_row(run.way, direction, *cells)
    console.print(stages)


def print_tables(console: Console, run: ShardedRun) -> None:
    """Print the ratios of each table, and its class where bounds are adaptive."""
    shown = Table(title=f"{run.way}: each table")
    shown.add_column("table")
    for heading in ("class", "raw MB", "ratio forward", "ratio back"):
        shown.add_column(heading, justify="right")
    for name, counts in run.tables.items():
        ratios = [f"{ratio_of(counts.__getitem__, prefix):.2f}" for prefix in ("", "backward_")]
        shown.add_row(name, counts["class"] or "", f"{counts['raw_bytes'] / 1e6:,.3f}", *ratios)
    console.print(shown)


def lossless_is_raw(runs: Sequence[ShardedRun]) -> bool | None:
    """Return whether lossless and raw gave the same losses and AUC; None without both."""
    found = {run.way: run for run in runs}
    if not {"raw", "lossless"} <= found.keys():
        return None
    numbers = [
        [*found[way].losses, found[way].test_loss, found[way].auc] for way in ("raw", "lossless")
    ]
    return same_bits(*numbers)


def verdict(runs: Sequence[ShardedRun], equal: bool, row_ids: bool) -> str:
    """Return a line on whether raw and lossless agree."""
    found = {run.way: run for run in runs}
    both = zip(found["raw"].losses, found["lossless"].losses, strict=True)
    largest = max(abs(a - b) for a, b in both)
    text = "equal to the last bit" if equal else f"DIFFERENT, by up to {largest:.2g}"
    if not equal and row_ids:
        text += " (--row-ids adds gradients in another order)"
    return f"AUC and the losses of {len(found['raw'].losses):,} steps, raw and lossless: {text}"


def draw(path: Path, runs: Sequence[ShardedRun]) -> None:
    """Draw ratio and factor of the bounds over the steps, and the losses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (ratios, factors, losses) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    for run in runs:
        steps = range(1, len(run.steps) + 1)
        values = [s["raw_bytes"] / s["moved_bytes"] if s["moved_bytes"] else 1 for s in run.steps]
        ratios.plot(steps, values, label=run.way)
        if run.steps and "factor" in run.steps[0]:
            factors.plot(steps, [step["factor"] for step in run.steps], label=run.way)
        losses.plot(steps, run.losses, label=run.way)
    ratios.set(xlabel="step", ylabel="ratio forward")
    factors.set(xlabel="step", ylabel="bound, as a multiple of the last")
    losses.set(xlabel="step", ylabel="loss")
    ratios.legend()
    losses.legend()
    figure.savefig(path)
    pyplot.close(figure)
