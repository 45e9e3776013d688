"""Steps of planners beside plain ones: what they cost where they have nothing to do, or a disk.

Models with the same weights take turns step by step in one process; another one begins from turn to
turn, and inputs are fresh in each turn and the same for all. Of the ratios of a turn the median
counts; that of plain training once more is what the machine's noise leaves.

"nothing to do" has a limit far above the peak, "peak near its limit" one that the peak is nine
tenths of, so that two steps of five are looked at; "3%, disk" takes the least memory that the disk
alone gives for 3 % of a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from activations_rok import kept_bytes
from torch import nn

import bitslab

Rows = list[dict[str, Any]]
PLAIN, PLAIN_AGAIN = "plain", "plain, once more"
IDLE, NEAR = "planned, nothing to do", "planned, peak near its limit"
PLANNED_DISK = "planned 3%, disk"
WAYS = (PLAIN, PLAIN_AGAIN, IDLE, NEAR, PLANNED_DISK)
#: Above what any model here keeps, in bytes.
LIMIT_BYTES = 1 << 50
#: What keeping everything takes of the limit of `NEAR`: passes run with hooks.
NEAR_SHARE = 0.9
#: Of a step, what moving to the disk may cost.
SLOWDOWN = 0.03
#: Until plans are there, and compared or declined.
WARM_STEPS = 24


def timed(model: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Run a forward and a backward pass; return its seconds, and the CPU's."""
    model.zero_grad(set_to_none=False)
    began, begin = time.perf_counter(), time.process_time()
    model(x).square().mean().backward()
    return time.perf_counter() - began, time.process_time() - begin


def options_of(way: str, peak_bytes: int, folder: str) -> dict[str, Any]:
    """Return the arguments of `bitslab.offload_activations`.

    Parameters
    ----------
    way : str
        One of `WAYS` that plans.
    peak_bytes : int
        What keeping everything takes.
    folder : str
        On the disk.
    """
    if way == PLANNED_DISK:
        return {"slowdown": SLOWDOWN, "disk": folder, "tiers": "disk"}
    return {"memory": LIMIT_BYTES if way == IDLE else int(peak_bytes / NEAR_SHARE)}


def turns_rows(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    turns: int,
    folder: str,
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
    folder : str
        On the disk.
    progress : callable
        Is called every tenth turn.
    """
    models = {way: make() for way in WAYS}
    for model in models.values():
        model.load_state_dict(models[PLAIN].state_dict())
    peak_bytes = kept_bytes(models[PLAIN], lambda: timed(models[PLAIN], torch.randn(shape)))
    offloads = {
        way: bitslab.offload_activations(models[way], **options_of(way, peak_bytes, folder))
        for way in WAYS
        if way not in (PLAIN, PLAIN_AGAIN)
    }
    for _ in range(WARM_STEPS):
        x = torch.randn(shape)
        for model in models.values():
            timed(model, x)
    before = {way: each.stats() for way, each in offloads.items()}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    equal = dict.fromkeys(WAYS, True)
    for turn in range(turns):
        if turn % 10 == 0:
            progress(f"cpu: planned steps beside plain ones: turn {turn + 1} of {turns}")
        x = torch.randn(shape)
        first = turn % len(WAYS)
        for way in WAYS[first:] + WAYS[:first]:
            torch.manual_seed(turn)  # of dropout
            found[way].append(timed(models[way], x))
        right = [p.grad for p in models[PLAIN].parameters()]
        for way in WAYS:
            grads = [p.grad for p in models[way].parameters()]
            equal[way] &= all(
                a is not None and b is not None and torch.equal(a, b)
                for a, b in zip(grads, right, strict=True)
            )

    def times_plain(way: str, which: int) -> float:
        pairs = zip(found[way], found[PLAIN], strict=True)
        return statistics.median(a[which] / b[which] for a, b in pairs)

    rows: Rows = []
    for way in WAYS:
        row = {
            "way": way,
            "step ms": 1e3 * statistics.median(s for s, _ in found[way]),
            "CPU ms": 1e3 * statistics.median(s for _, s in found[way]),
            # Four digits, as thousandths are what is asked for.
            "times plain": f"{times_plain(way, 0):.4f}",
            "CPU, times plain": f"{times_plain(way, 1):.4f}",
            "gradients": "equal" if equal[way] else "OTHER",
        }
        if way in offloads:
            row |= planned_columns(offloads[way], before[way], turns)
        rows.append(row)
    return rows


def planned_columns(
    offload: bitslab.ActivationOffload, before: dict[str, int], turns: int
) -> dict[str, Any]:
    """Return what a way that plans moves in a step, and why; detach it."""
    after, plan = offload.stats(), offload.plan
    offload.detach()

    def a_step(name: str) -> float:
        return (after.get(name, 0) - before.get(name, 0)) / turns

    return {
        "written MB": a_step("disk_written_bytes") / 1e6,
        "waits ms": a_step("stall_us") / 1e3,
        "plan": "none" if plan is None else plan.reason,
    }


def table(
    arguments: argparse.Namespace,
    make: Callable[[], nn.Module],
    hidden: int,
    folder: str,
    progress: Callable[[str], None],
) -> dict[str, Rows]:
    """Return the table of planned steps beside plain ones, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        shape = arguments.cpu_batch, arguments.cpu_tokens, hidden
        rows = turns_rows(make, shape, arguments.turns, folder, progress)
    finally:
        torch.set_num_threads(threads)
    title = (
        f"planned steps beside plain ones: {arguments.cpu_batch} x {arguments.cpu_tokens} tokens, "
        f"medians of {arguments.turns} turns"
    )
    return {title: rows}
