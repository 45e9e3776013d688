"""Weights in host memory: accelerate, raw and packed streaming, and packed on the device.

The cache is DynamicCache throughout. "raw, streamed" moves the weights as they are with the same
prefetch as the packed ones. The ideal of a way is the time that its bytes take at the link's
measured rate; on a GPU the table has how much of it is reached.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import llm_peers
import torch
import transformers
from common.report import Steps
from llm_workload import Row, Rows, Workload, line, pass_seconds, show, workload
from textgen.generation import Run

from bitslab.offload import find_offloaded, offload_weights

#: In this order, because the plain one's tokens are what the others are compared with.
WAYS = {
    "plain, on the device": "device",
    "accelerate cpu_offload": "offload",
    "raw, streamed": "raw",
    "packed, streamed": "compressed",
    "packed, on the device": "packed",
}


def run(arguments: argparse.Namespace, steps: Steps) -> dict[str, Rows]:
    """Measure generation, and single forward passes of one token."""
    with workload(arguments, steps) as work:
        rate = link_rate(work.device)
        generated: Rows = []
        passes: Rows = []
        plain: Run | None = None
        for name, weights in WAYS.items():

            def one_pass(model: Any, name: str = name, weights: str = weights) -> None:
                passes.append(show(_pass(work, name, weights, model, rate)))

            if weights == "raw":
                one_pass(streamed_raw(work))
                work.free()
                continue
            found = work.measure(weights, "dynamic", then=one_pass)
            plain = plain or found
            generated.append(show(line(name, found, plain, arguments.batch)))
        _compare_passes(passes)
        if work.device.type == "cuda":
            passes += llm_peers.run(work, rate)
        return {f"Weights: {work.title}": generated, "Weights: one forward pass": passes}


def streamed_raw(work: Workload) -> Any:
    """Load the model with weights that stream as they are."""
    model = transformers.AutoModelForCausalLM.from_pretrained(work.folder, dtype=work.dtype)
    offload_weights(model, execution_device=work.device, codec="raw", progress=False)
    return model


def _pass(work: Workload, name: str, weights: str, model: Any, rate: float) -> Row:
    """Measure a forward pass of one token, at a link of `rate` bytes/s."""
    with work.steps.step(f"{name}: one pass after the other"):
        seconds = pass_seconds(work, model)
    moved = _moved_bytes(model, weights)
    row: Row = {"way": name, "pass ms": 1e3 * seconds, "moved MB": moved / 1e6}
    if rate and moved:
        row["ideal ms"] = 1e3 * moved / rate
        row["of the link"] = f"{100 * moved / rate / seconds:.0f} %"
    return row


def _compare_passes(passes: Rows) -> None:
    """Write to the rows of bitslab how much faster their passes are than the others'."""
    ms = {WAYS[row["way"]]: row["pass ms"] for row in passes}
    for row in passes:
        weights = WAYS[row["way"]]
        if weights not in ("device", "offload"):
            row["times faster than accelerate"] = ms["offload"] / row["pass ms"]
        if weights == "compressed":
            row["times faster than raw"] = ms["raw"] / row["pass ms"]


def _moved_bytes(model: Any, weights: str) -> int:
    """Return the bytes that cross for a pass; on a CPU, those that would."""
    if weights == "offload":
        return sum(p.nbytes for _, p in model.named_parameters(remove_duplicate=False))
    if weights in ("device", "packed"):
        return 0
    stream = find_offloaded(model).stream
    return sum(stream.plan(unit).crossing_nbytes for unit in stream.units)


def link_rate(device: torch.device, nbytes: int = 1 << 28) -> float:
    """Return bytes/s from page-locked memory to the device by the copy engine; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    source = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=device)
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(nbytes / statistics.median(times))
