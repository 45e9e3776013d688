"""Output of the script: runs, zeros by layer and epoch, decisions by epoch, a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .training import Run, Sparsity
from .ways import PEER


def print_runs(console: Console, runs: Sequence[Run]) -> None:
    """Print a row for each way."""
    shown = Table(
        caption="times in ms, medians; exposed: more than the plain step; peaks of memory in MB, "
        "on the host beyond what was there before; out and back: MB a step of the tensors that "
        "left and came back, as they were > as they crossed",
        caption_justify="left",
    )
    shown.add_column("saved tensors")
    for heading in (
        *("loss", "test", "step", "exposed", "host peak", "device peak", "out", "back"),
        "losses",
    ):
        shown.add_column(heading, justify="right")
    for run in runs:
        exposed = run.exposed_seconds
        verdict = {None: "", True: "equal", False: "DIFFER" if run.lossless else "lossy"}
        traffic = run.traffic
        shown.add_row(
            run.way,
            f"{run.epochs[-1].loss:.6f}",
            f"{run.epochs[-1].test_accuracy:.1%}",
            f"{run.step_seconds * 1e3:,.1f}",
            "" if exposed is None else f"{exposed * 1e3:,.1f}",
            f"{run.host_bytes / 1e6:,.0f}",
            f"{run.device_bytes / 1e6:,.0f}",
            megabytes(run, traffic.down_bytes, traffic.crossed_down_bytes),
            megabytes(run, traffic.up_bytes, traffic.crossed_up_bytes),
            verdict[run.equal],
        )
    console.print(shown)
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        console.print(note)


def megabytes(run: Run, n_bytes: int, crossed_bytes: int) -> str:
    """Return the megabytes of a step, and those that crossed for them."""
    before, after = (f"{n / run.n_steps / 1e6:,.2f}" for n in (n_bytes, crossed_bytes))
    return f"{before} > {after}" if n_bytes else ""


def print_sparsity(console: Console, sparsity: Sequence[Sparsity]) -> None:
    """Print the share of zeros of what each layer saves, before training and after each epoch."""
    shown = Table(
        caption="per cent zeros of what a batch saves, before training and after each epoch",
        caption_justify="left",
    )
    for heading, justify in (("layer", "left"), ("what", "left"), ("MB", "right")):
        shown.add_column(heading, justify=justify)  # type: ignore[arg-type]
    columns = chosen_epochs(len(sparsity[0].zeros))
    for epoch in columns:
        shown.add_column("start" if not epoch else f"{epoch}", justify="right")
    for row in sparsity:
        cells = [f"{100 * row.zeros[epoch]:.0f}" for epoch in columns]
        shown.add_row(row.layer, row.kind, f"{row.nbytes / 1e6:,.3f}", *cells)
    console.print(shown)


def chosen_epochs(n: int, most: int = 9) -> list[int]:
    """Return at most `most` of `n` numbers, evenly apart, with the first and the last."""
    if n <= most:
        return list(range(n))
    return sorted({round(i * (n - 1) / (most - 1)) for i in range(most)})


def print_decisions(console: Console, run: Run) -> None:
    """Print what became of each tensor, epoch by epoch, and why in the last one."""
    last = run.epochs[-1].decisions
    if not last:
        return
    columns = [run.epochs[i] for i in chosen_epochs(len(run.epochs), 6)]
    taken = [{d.site: d.codec or d.action for d in epoch.decisions} for epoch in columns]
    if len({what for choices in taken for what in choices.values()}) == 1:
        (what,) = {d.codec or d.action for d in last}
        console.print(f"{run.way}: all {len(last)} tensors {what}, in every epoch")
        return
    shown = Table(title=f"{run.way}: decisions by epoch", title_justify="left")
    shown.add_column("saved tensor")
    for epoch in columns:
        shown.add_column(str(epoch.epoch))
    shown.add_column("why, in the last")
    for decided in last:
        cells = [choices.get(decided.site, "") for choices in taken]
        shown.add_row(decided.site, *cells, decided.reason)
    console.print(shown)
    for epoch in columns:
        counts = Counter(d.codec or d.action for d in epoch.decisions)
        parts = ", ".join(f"{n} {name}" for name, n in counts.most_common())
        console.print(f"{run.way}, epoch {epoch.epoch}: {parts}")


def verdict(runs: Sequence[Run], equal: bool, device: str) -> str:
    """Return a line on whether the ways agree."""
    differs = any(run.way == PEER and run.equal is False for run in runs)
    compared = [run for run in runs if run.lossless and not (differs and run.way == PEER)]
    found = "equal to the last bit" if equal else "DIFFERENT"
    if not equal and device != "cpu":
        found += " (some of a GPU's operators add in no fixed order: compare last bits on a CPU)"
    if differs:
        found += f"; those of torch's {PEER} differ"
    return f"the losses of {runs[0].n_steps:,} batches, {len(compared)} ways: {found}"


def draw(path: Path, runs: Sequence[Run], sparsity: Sequence[Sparsity]) -> None:
    """Draw losses, zeros by layer, decisions, steps with their exposed part, and bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 5, figsize=(25, 4.5), layout="constrained")
    losses, zeros, decided, steps, moved = axes
    for i, run in enumerate(runs):
        # Thinner and thinner, so that each shows on those that it equals.
        values = [loss for epoch in run.epochs for loss in epoch.losses]
        losses.plot(range(1, len(values) + 1), values, label=run.way, linewidth=len(runs) - i)
    losses.set(xlabel="batch", ylabel="loss", yscale="log")
    losses.legend()
    for row in sparsity:
        if row.kind == "activation":
            zeros.plot([100 * share for share in row.zeros], label=f"{row.layer}", marker=".")
    zeros.set(xlabel="epoch", ylabel="% zeros behind activations", ylim=(0, 100))
    zeros.locator_params(axis="x", integer=True)
    if any(row.kind == "activation" for row in sparsity):
        zeros.legend(fontsize="x-small", ncols=2)
    shown = next((run for run in runs if run.way == "auto"), runs[-1])
    draw_decisions(decided, shown)
    ways = [run.way for run in runs]
    heights = [run.step_seconds * 1e3 for run in runs]
    exposed = [max(0.0, run.exposed_seconds or 0.0) * 1e3 for run in runs]
    hidden = [height - more for height, more in zip(heights, exposed, strict=True)]
    steps.bar(ways, hidden, label="as plain")
    steps.bar(ways, exposed, bottom=hidden, label="exposed")
    steps.set(ylabel="ms a step")
    steps.legend()
    for part, name in (
        ("crossed_down_bytes", "to the host"),
        ("crossed_up_bytes", "to the device"),
    ):
        crossed = [getattr(run.traffic, part) / run.n_steps / 1e6 for run in runs]
        sign = 1 if name == "to the host" else -1
        moved.bar(ways, [sign * height for height in crossed], label=name)
    moved.set(ylabel="MB a step that cross")
    moved.legend()
    for axis in (steps, moved):
        axis.tick_params(axis="x", rotation=45)
    figure.savefig(path)
    pyplot.close(figure)


def draw_decisions(axis: Any, run: Run) -> None:
    """Draw how many tensors went which way in each epoch: figure 8 of CSWAP+."""
    counts = [Counter(d.codec or d.action for d in epoch.decisions) for epoch in run.epochs]
    numbers = [epoch.epoch for epoch in run.epochs]
    bottom = [0] * len(counts)
    for name in sorted({name for count in counts for name in count}):
        heights = [count[name] for count in counts]
        axis.bar(numbers, heights, bottom=bottom, label=name)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axis.set(xlabel="epoch", ylabel=f"saved tensors, {run.way}")
    axis.locator_params(axis="x", integer=True)
    if any(bottom):
        axis.legend()
