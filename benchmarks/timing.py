"""Timing and tables that the benchmarks share."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

import bitslab


def cpu_seconds(run: Callable[[int], object], repetitions: int) -> float:
    """Return the median time of ``run(i)``, i = 1.. `repetitions`, after ``run(0)`` unmeasured."""
    run(0)
    times = []
    for i in range(1, repetitions + 1):
        begin = time.perf_counter()
        run(i)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def cpu_seconds_in_turn(
    runs: Mapping[str, Callable[[int], object]], repetitions: int
) -> dict[str, float]:
    """Return median times of several runs that take turns, so that noise affects all alike.

    The first one changes from turn to turn, because it reuses the memory of the allocator.
    """
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(repetitions + 1):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            begin = time.perf_counter()
            runs[name](i)
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def gpu_seconds(run: Callable[[int], object], repetitions: int, warm_up: int = 2) -> float:
    """Return the median time of ``run(i)`` on torch's current stream, by CUDA events.

    The GPU waits a moment before each run, so that the time of the launch on the host is not in it.
    """
    for i in range(warm_up):
        run(i)
    torch.cuda.synchronize()
    times: list[float] = []
    for i in range(warm_up, warm_up + repetitions):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)
        begin.record()
        run(i)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def markdown(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table; numbers get three significant digits."""
    if not rows:
        return ""

    def text(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        return str(value)

    # The row that knows most gives the order of the columns.
    keys = list(dict.fromkeys(k for row in sorted(rows, key=len, reverse=True) for k in row))
    cells = [[text(row.get(key, "")) for key in keys] for row in rows]
    widths = [max(len(key), *(len(c[j]) for c in cells)) for j, key in enumerate(keys)]
    lines = [
        "| " + " | ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)) + " |"
        for line in [keys, ["-" * w for w in widths], *cells]
    ]
    return f"### {title}\n\n" + "\n".join(lines) + "\n"


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add `--json` and `--out`, as `print_tables` takes them."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--out", type=Path, help="also write the tables to this Markdown file")


def say(text: str) -> None:
    """Print what is being measured, apart from the tables."""
    print(text, file=sys.stderr, flush=True)


def run_parts(parts: Mapping[str, Callable[..., Any]], arguments: Any) -> dict[str, Any]:
    """Return the tables of the parts that `--only` names.

    Each is called with the arguments and `say`, and returns its tables by title.
    """
    tables: dict[str, Any] = {}
    for part in arguments.only:
        tables |= parts[part](arguments, say)
    return tables


def print_tables(
    tables: Mapping[str, Sequence[Mapping[str, Any]]], as_json: bool, out: Path | None
) -> None:
    """Print tables as Markdown, under version and date, or as JSON; write the Markdown to `out`."""
    if as_json:
        json.dump(tables, sys.stdout, indent=1)
        print()
        return
    head = f"bitslab {bitslab.__version__}, torch {torch.__version__}, {date.today()}\n\n"
    text = head + "\n".join(markdown(title, rows) for title, rows in tables.items())
    print(text)
    if out:
        out.write_text(text)
