"""Measure what saving tensors through hooks costs the host: a tensor kept, moved, and profiled.

python benchmarks/activation_hooks.py                 # on a GPU where there is one, else on the CPU
python benchmarks/activation_hooks.py --device cpu

A chain of operators saves one tensor each. Its forward and backward pass are timed with hooks and
without, and the difference is given by tensor, in microseconds: `host us` is the time that the
thread computed (work of other threads and waiting are not in it), `wall us` the time that went by,
on a CPU with the work of the threads that copy and encode. `calls` are those of Python functions in
these threads, which other work of the machine does not change. Tensors are small, since bytes cost
the host nothing. Peers of the same run: hooks of torch that do nothing, and torch's save_on_cpu.
Every run has fresh inputs, the device is idle before it, runs of all ways take turns, and a figure
is the best of the runs: other work of the machine only ever adds.

The second table is a model trained with policy "auto": what a profile takes, with the decisions by
it, the share of a step that is when every 200th pass is profiled, and of which number of passes the
library profiles one by default, as its report says, with the share that is.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from timing import add_output, print_tables
from torch import nn

import bitslab
from bitslab.activations.auto import PROFILE_EVERY

#: Operators of the chain, and elements of the tensor that each saves.
TENSORS, ELEMENTS = 40, 1024
#: Passes before those that are timed: they compile, fit and take host memory.
WARM_UP = 4
#: Runs whose calls are counted: a compilation or a fit may fall into one.
CALL_RUNS = 5
Way = Callable[[], AbstractContextManager[Any]]


def empty_hooks() -> AbstractContextManager[Any]:
    """Return hooks that do nothing."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def ways(device: torch.device) -> dict[str, Way]:
    """Return ways to save tensors."""

    def offloaded(policy: str, **options: Any) -> Way:
        offload = bitslab.ActivationOffload(policy, **{"min_bytes": 1, **options})
        return lambda: offload

    on_gpu = device.type == "cuda"
    return {
        "no hooks": nullcontext,
        "torch's hooks, that do nothing": empty_hooks,
        "torch's save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(pin_memory=on_gpu),
        "kept: too small": offloaded("raw", min_bytes=1 << 20),
        "kept: policy 'keep'": offloaded("keep"),
        "moved raw": offloaded("raw"),
        "moved, packed by zvc": offloaded("static", codecs="zvc"),
        "moved, packed by zvc+ibp": offloaded("static", codecs="zvc+ibp"),
    }


def times_of(way: Way, device: torch.device) -> tuple[float, float]:
    """Return the microseconds of the host and of the clock that a tensor takes."""
    x = torch.randn(ELEMENTS, device=device).requires_grad_()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter(), time.thread_time()
    with way():
        y = x
        for _ in range(TENSORS):
            y = y.sin()
    loss = y.sum()
    forward_host = time.thread_time() - begin[1]
    # On a GPU a thread of autograd runs it; its hooks are timed where they run.
    run = Backward(loss)
    loss.backward()  # type: ignore[no-untyped-call]
    wall = time.perf_counter() - begin[0]
    return 1e6 * (forward_host + run.seconds()) / TENSORS, 1e6 * wall / TENSORS


def calls_of(way: Way, device: torch.device) -> float:
    """Return the calls of Python functions that a tensor takes."""
    x = torch.randn(ELEMENTS, device=device).requires_grad_()
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    try:
        with way():
            y = x
            sys.setprofile(count)
            for _ in range(TENSORS):
                y = y.sin()
            sys.setprofile(None)
        # In the thread that runs the backward pass.
        first: Any = y.grad_fn
        first.register_prehook(lambda *gradients: sys.setprofile(count))
        leaf: Any = x
        leaf.register_hook(lambda gradient: sys.setprofile(None))
        y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]
    finally:
        sys.setprofile(None)
    return round(calls / TENSORS, 1)


class Backward:
    """Times the thread that runs a backward pass, from its first node to its last.

    Parameters
    ----------
    loss : torch.Tensor
        What it begins with.
    """

    def __init__(self, loss: torch.Tensor) -> None:
        self._marks: list[float] = []
        node: Any = loss.grad_fn
        node.register_prehook(self._mark)
        while node.next_functions:
            last, node = node, node.next_functions[0][0]
        last.register_hook(self._mark)

    def _mark(self, *gradients: Any) -> None:
        self._marks.append(time.thread_time())

    def seconds(self) -> float:
        """Return the seconds of the thread."""
        begin, end = self._marks
        return end - begin


def hook_rows(device: torch.device, runs: int) -> list[dict[str, Any]]:
    """Return a row for the operators without hooks, and one for each way, less that."""
    found = ways(device)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for number in range(WARM_UP + runs):
        for name, way in found.items():
            taken = times_of(way, device)
            if number >= WARM_UP:
                times[name].append(taken)
    best = {
        name: [min(column) for column in zip(*rows, strict=True)] for name, rows in times.items()
    }
    calls = {
        name: min(calls_of(way, device) for _ in range(CALL_RUNS)) for name, way in found.items()
    }
    plain_host, plain_wall = best.pop("no hooks")
    rows: list[dict[str, Any]] = [
        {"a tensor": "the operator itself", "host us": plain_host, "wall us": plain_wall}
    ]
    return rows + [
        {
            "a tensor": name,
            "host us": host - plain_host,
            "wall us": wall - plain_wall,
            "calls": calls[name] - calls["no hooks"],
        }
        for name, (host, wall) in best.items()
    ]


def profile_rows(device: torch.device, runs: int) -> list[dict[str, Any]]:
    """Return what a profile and its decisions take, and the share of a step."""
    side = 4096 if device.type == "cuda" else 512
    torch.manual_seed(0)
    models = {}
    for name, every in (("not profiled", 1 << 30), ("profiled", 2), ("by default", None)):
        layers = [m for _ in range(6) for m in (nn.Linear(side, side), nn.ReLU())]
        model = nn.Sequential(*layers).to(device)
        models[name] = model, bitslab.offload_activations(model, profile_every=every)
    pairs: dict[str, list[float]] = {name: [] for name in models}
    for number in range(WARM_UP + runs):
        for name, (model, _) in models.items():
            begin = time.perf_counter()
            for _ in range(2):  # the second one decides by the profile of the first
                x = torch.randn(side, side, device=device)
                model(x).square().sum().backward()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            if number >= WARM_UP:
                pairs[name].append(time.perf_counter() - begin)
    notes = " ".join(models["by default"][1].report().notes)
    for _, offload in models.values():
        offload.detach()
    plain, profiled, _ = (statistics.quantiles(taken, n=4)[0] for taken in pairs.values())
    profile_steps = (profiled - plain) / (plain / 2)
    found = re.search(r"One of (\d+) passes is profiled", notes)
    every = int(found[1]) if found else PROFILE_EVERY
    return [
        {
            "step ms": 1e3 * plain / 2,
            "a profile ms": 1e3 * (profiled - plain),
            f"share of a step, one of {PROFILE_EVERY} profiled, %": 100
            * profile_steps
            / PROFILE_EVERY,
            "by default one of": every,
            "share of a step, %": 100 * profile_steps / every,
        }
    ]


def main() -> int:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=found, help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=60, help="default: %(default)s")
    add_output(parser)
    arguments = parser.parse_args()
    device = torch.empty(0, device=arguments.device).device
    title = f"Hooks on {arguments.device}: microseconds a tensor, pack and unpack together"
    tables = {
        title: hook_rows(device, arguments.runs),
        "Profiles of policy 'auto'": profile_rows(device, arguments.runs),
    }
    print_tables(tables, arguments.json, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
