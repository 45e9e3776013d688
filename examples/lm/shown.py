"""Output of the script: a table of the ways, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .training import Run
from .ways import PEER


def print_runs(console: Console, runs: Sequence[Run]) -> None:
    """Print a row for each way."""
    shown = Table(
        caption="step: the median, in ms; CPU: seconds of the cheapest step, of all threads; peak: "
        "MB beyond what was there before training; MB a step of the tensors that left the device "
        "(as they were > as they crossed), remained on the host, were written to the disk, read, "
        "and wanted before they were written; waits: ms a step for host memory and for the disk",
        caption_justify="left",
    )
    shown.add_column("way")
    for heading in (
        *("loss", "step", "tokens/s", "CPU", "peak", "out", "host", "written", "read", "forwarded"),
        *("waits: host", "disk", "losses"),
    ):
        shown.add_column(heading, justify="right")
    for run in runs:
        verdict = {None: "", True: "equal", False: "DIFFER"}[run.equal]
        out = host = ""
        if run.counted["moved_out_bytes"]:
            out = f"{megabytes(run, 'moved_out_bytes')} > {megabytes(run, 'crossed_out_bytes')}"
            host = f"{run.on_host_bytes / 1e6:,.1f}"
        shown.add_row(
            run.way,
            f"{run.losses[-1]:.6f}",
            f"{run.seconds * 1e3:,.1f}",
            f"{run.tokens_per_second:,.0f}",
            f"{run.cpu:.3f}",
            f"{run.peak_bytes / 1e6:,.0f}",
            out,
            host,
            *(
                megabytes(run, f"disk_{what}_bytes") if run.has_disk else ""
                for what in ("written", "read", "forwarded")
            ),
            f"{run.a_step('host_stall_us') / 1e3:,.1f}" if out else "",
            f"{run.a_step('disk_stall_us') / 1e3:,.1f}" if run.has_disk else "",
            verdict,
        )
    console.print(shown)
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        console.print(note, markup=False)


def megabytes(run: Run, name: str) -> str:
    """Return the megabytes of a step."""
    return f"{run.a_step(name) / 1e6:,.1f}"


def verdict(runs: Sequence[Run], equal: bool, device: str) -> str:
    """Return a line on whether the ways agree."""
    differs = any(run.way == PEER and run.equal is False for run in runs)
    found = "equal to the last bit" if equal else "DIFFERENT"
    if not equal and device != "cpu":
        found += " (some of a GPU's operators add in no fixed order: compare last bits on a CPU)"
    if differs:
        # A GPU's operators may add in another order for other strides, which it does not keep.
        found += f"; those of torch's {PEER} differ"
    return f"the losses of {len(runs[0].losses)} steps, {len(runs) - differs} ways: {found}"


def draw(path: Path, runs: Sequence[Run]) -> None:
    """Draw throughput over peak, as figure 5.12 of SSDTrain, and memory over the last step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rates, curves) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for run in runs:
        rates.plot(run.peak_bytes / 1e6, run.tokens_per_second, "o", label=run.way)
        rates.annotate(run.way, (run.peak_bytes / 1e6, run.tokens_per_second))
        seconds, nbytes = zip(*run.curve, strict=True)
        curves.plot([1e3 * s for s in seconds], [n / 1e6 for n in nbytes], label=run.way)
    rates.set(xlabel="peak, MB", ylabel="tokens/s", xlim=(0, None), ylim=(0, None))
    curves.set(xlabel="ms of a step", ylabel="MB beyond what was there before")
    curves.legend()
    figure.savefig(path)
    pyplot.close(figure)
