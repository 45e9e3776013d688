"""Output of the script: tokens, a row for each run, a row for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .generation import Run
from .ways import Size

SHOWN_TOKENS = 16


def print_tokens(console: Console, run: Run, tokenizer: Any) -> None:
    """Print the first lines of what was generated, as text where there is a tokenizer."""
    for i, line in enumerate(run.tokens[:4]):
        if tokenizer is not None:
            text = repr(tokenizer.decode(line))
        else:
            cut = " ..." if len(line) > SHOWN_TOKENS else ""
            text = " ".join(map(str, line[:SHOWN_TOKENS])) + cut
        console.print(Text(f"line {i}: {text}"))
    if len(run.tokens) > 4:
        console.print(f"and {len(run.tokens) - 4} more lines")


def print_runs(console: Console, runs: Sequence[Run]) -> None:
    """Print times, bytes moved and memory, a row for each run."""
    shown = Table(
        caption="up: to the device, down: to the host, MB for each token after the first; peaks of "
        "memory in MB, on the host beyond what was there before; mapped: files that it reads",
        caption_justify="left",
    )
    shown.add_column("weights, cache")
    for heading in (
        *("load s", "prefill ms", "token ms", "weights up", "cache up", "cache down"),
        *("host peak", "mapped", "device peak", "tokens"),
    ):
        shown.add_column(heading, justify="right")
    for run in runs:
        verdict = {None: "", True: "equal", False: "DIFFER"}[run.equal]
        shown.add_row(
            f"{run.weights_way}, {run.cache_way}",
            f"{run.load_seconds:.2f}",
            f"{run.prefill_seconds * 1e3:,.1f}",
            "" if run.token_seconds is None else f"{run.token_seconds * 1e3:,.2f}",
            f"{run.up.weights / 1e6:,.3f}",
            f"{run.up.cache / 1e6:,.3f}",
            f"{run.down.cache / 1e6:,.4f}",
            f"{run.host_bytes / 1e6:,.0f}",
            f"{run.mapped_bytes / 1e6:,.0f}",
            f"{run.device_bytes / 1e6:,.0f}",
            verdict,
        )
    console.print(shown)


def print_layers(console: Console, run: Run) -> None:
    """Print the size of each unit of weights and of each layer's cache, where they are packed."""
    if not run.weights and not run.cache:
        return
    shown = Table(show_footer=True)
    weights, cache = _sum(run.weights), _sum(run.cache)
    for heading, footer, right in (
        ("weights", "all", False),
        *_figures(weights),
        ("keys and values", "all", False),
        *_figures(cache),
    ):
        shown.add_column(heading, footer, justify="right" if right else "left", overflow="fold")
    for unit, layer in zip_longest(run.weights, run.cache):
        shown.add_row(*_cells(unit), *_cells(layer))
    console.print(shown)


def _sum(sizes: Sequence[Size]) -> Size:
    return Size("all", sum(s.raw_bytes for s in sizes), sum(s.packed_bytes for s in sizes))


def _figures(size: Size) -> list[tuple[str, str, bool]]:
    cells = _cells(size)[1:]
    return [
        (heading, cell, True)
        for heading, cell in zip(("raw MB", "packed MB", "ratio"), cells, strict=True)
    ]


def _cells(size: Size | None) -> list[str]:
    if size is None or not size.raw_bytes:
        return ["" if size is None else size.name, "", "", ""]
    return [
        size.name,
        f"{size.raw_bytes / 1e6:,.2f}",
        f"{size.packed_bytes / 1e6:,.2f}",
        "" if size.ratio is None else f"{size.ratio:.2f}",
    ]
