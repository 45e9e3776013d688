"""Steps of a planner that has nothing to do, beside plain ones: its limit is far above the peak.

Models with the same weights take turns step by step in one process; another one begins from turn to
turn, and inputs are fresh in each turn and the same for all. Of the ratios of a turn the median
counts; that of plain training once more is what the machine's noise leaves.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import bitslab

Rows = list[dict[str, Any]]
PLAIN, IDLE = "plain", "planned, nothing to do"
WAYS = (PLAIN, "plain, once more", IDLE)
#: Above what any model here keeps, in bytes.
LIMIT_BYTES = 1 << 50
#: Until the plan is there, and declined.
WARM_STEPS = 8


def timed(model: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Run a forward and a backward pass; return its seconds, and the CPU's."""
    model.zero_grad(set_to_none=False)
    began, begin = time.perf_counter(), time.process_time()
    model(x).square().mean().backward()
    return time.perf_counter() - began, time.process_time() - begin


def nothing_to_do(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    turns: int,
    progress: Callable[[str], None],
) -> Rows:
    """Return a row for each of `WAYS`.

    Parameters
    ----------
    make : callable
        Makes a model; all are given the weights of the first one.
    shape : tuple of int
        Of its inputs.
    turns : int
        In which each way has one step.
    progress : callable
        Is called every tenth turn.
    """
    models = {way: make() for way in WAYS}
    for model in models.values():
        model.load_state_dict(models[PLAIN].state_dict())
    offload = bitslab.offload_activations(models[IDLE], memory=LIMIT_BYTES)
    for _ in range(WARM_STEPS):
        x = torch.randn(shape)
        for model in models.values():
            timed(model, x)
    plan = offload.plan
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    equal = True
    for turn in range(turns):
        if turn % 10 == 0:
            progress(f"cpu: {IDLE}: turn {turn + 1} of {turns}")
        x = torch.randn(shape)
        first = turn % len(WAYS)
        for way in WAYS[first:] + WAYS[:first]:
            torch.manual_seed(turn)  # of dropout
            found[way].append(timed(models[way], x))
        grads = [[p.grad for p in models[way].parameters()] for way in (PLAIN, IDLE)]
        equal = equal and all(
            a is not None and b is not None and torch.equal(a, b)
            for a, b in zip(*grads, strict=True)
        )
    offload.close()

    def times_plain(way: str, which: int) -> float:
        pairs = zip(found[way], found[PLAIN], strict=True)
        return statistics.median(a[which] / b[which] for a, b in pairs)

    rows: Rows = []
    for way in WAYS:
        rows.append(
            {
                "way": way,
                "step ms": 1e3 * statistics.median(s for s, _ in found[way]),
                "CPU ms": 1e3 * statistics.median(s for _, s in found[way]),
                # Four digits, as thousandths are what is asked for.
                "times plain": f"{times_plain(way, 0):.4f}",
                "CPU, times plain": f"{times_plain(way, 1):.4f}",
            }
        )
    rows[-1]["plan"] = "none" if plan is None else plan.reason
    rows[-1]["gradients"] = "equal" if equal else "OTHER"
    return rows


def table(
    arguments: argparse.Namespace,
    make: Callable[[], nn.Module],
    hidden: int,
    progress: Callable[[str], None],
) -> dict[str, Rows]:
    """Return the table of a planner that has nothing to do, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        shape = arguments.cpu_batch, arguments.cpu_tokens, hidden
        rows = nothing_to_do(make, shape, arguments.idle_turns, progress)
    finally:
        torch.set_num_threads(threads)
    title = (
        f"{IDLE}: {arguments.cpu_batch} x {arguments.cpu_tokens} tokens, medians of "
        f"{arguments.idle_turns} turns"
    )
    return {title: rows}
