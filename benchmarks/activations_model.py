"""What larger micro-batches gain, and what larger systems would write: from measured layers.

Layers of GPT are timed on this device, forward and backward for several micro-batches, and one
update of their weights. The rest is arithmetic over these times and the size model of
`bitslab.activations.layer_sizes`, whose bytes stand beside those that torch saves here.

Tables: the gain of a larger micro-batch over one sequence, by kernels and by fewer updates
(SSDTrain, table 5.6); the same in a pipeline, whose bubbles grow with it (section 5.4.4, BLOOM's
shape); what a GPU of a larger system writes, the rate that this needs and the years that drives
last (sections 5.3.6 and 5.4.4, figures 5.10 and 5.13), and the largest micro-batch with two layers
on the device and the rest elsewhere (upper ends).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bitslab.activations.disk.endurance import (
    DRIVES,
    YEAR_DAYS,
    lifespan_days,
    required_bytes_per_s,
)
from bitslab.activations.layer_sizes import TransformerLayer

Rows = list[dict[str, Any]]
HEAD_DIM = 128
#: Drives beside each GPU, as in the paper.
DRIVES_OF_A_GPU = 4
#: Pipeline stages and sequences of a data-parallel rank in BLOOM's training.
STAGES, RANK_SEQUENCES = 12, 32
#: Bytes that a parameter takes in training: bfloat16 weight and gradient, float32 weight and Adam.
PARAMETER_BYTES = 16
#: Hidden width, layers, ranks of tensor parallelism (with sequence parallelism), pipeline stages.
SYSTEMS = (
    (8192, 80, 8, 1),
    (12288, 96, 8, 8),
    (16384, 96, 8, 16),
    (20480, 105, 8, 35),
    (25600, 128, 8, 64),
)


class Layer(nn.Module):
    """A layer of GPT: attention and MLP behind a norm each, no dropout."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // HEAD_DIM)
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.project, self.output = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x.shape
        parts = self.project(self.first(x)).view(batch, sequence, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, sequence, hidden))
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return result


@dataclass
class LayerTimes:
    """Seconds of one layer, by the number of sequences of a micro-batch; bytes it keeps for one."""

    hidden: int
    sequence: int
    dtype_bytes: int
    forward: dict[int, float]
    backward: dict[int, float]
    update: float
    saved_bytes: int

    def kernels(self, batch: int) -> float:
        """Return the seconds of forward and backward for each sequence."""
        return (self.forward[batch] + self.backward[batch]) / batch


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the time of a call, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def saved_bytes(layer: Layer, x: torch.Tensor) -> int:
    """Return the bytes of storages that a forward pass keeps, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        address = t.untyped_storage().data_ptr()
        if address not in own:
            kept[address] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def measure(
    hidden: int, sequence: int, batches: list[int], device: torch.device, repetitions: int
) -> LayerTimes:
    """Time a layer: forward, backward, and an update by Adam, with fresh inputs each time.

    Batches take turns, so that what else the machine does affects all alike.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = Layer(hidden).to(device, dtype)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4)

    def drawn(batch: int) -> torch.Tensor:
        shape = batch, sequence, hidden
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    times: dict[int, list[tuple[float, float]]] = {batch: [] for batch in batches}
    for _ in range(repetitions + 1):
        for batch in batches:
            x = drawn(batch)
            outputs: list[torch.Tensor] = []
            ahead = seconds_of(lambda x=x, to=outputs: to.append(layer(x)), device)  # type: ignore[misc]
            loss = outputs.pop().square().mean()
            times[batch].append((ahead, seconds_of(loss.backward, device)))
    forward, backward = {}, {}
    for batch, each in times.items():
        forward[batch], backward[batch] = map(statistics.median, zip(*each[1:], strict=True))
    update = statistics.median([seconds_of(optimizer.step, device) for _ in range(repetitions + 1)])
    kept = saved_bytes(layer, drawn(1))
    return LayerTimes(hidden, sequence, dtype.itemsize, forward, backward, update, kept)


def shape_of(hidden: int) -> TransformerLayer:
    """Return the shape of `Layer` for the size model."""
    return TransformerLayer(hidden=hidden, heads=max(1, hidden // HEAD_DIM))


def gain_rows(times: LayerTimes) -> Rows:
    """Return what a larger batch gains over one sequence, by kernels and by the update."""
    alone = times.kernels(1) + times.update
    rows = []
    for batch in times.forward:
        taken = times.kernels(batch) + times.update / batch
        saved = alone - taken
        by_update = times.update - times.update / batch
        rows.append(
            {
                "hidden": times.hidden,
                "sequences": batch,
                "ms a sequence": 1e3 * taken,
                "of it update": 1e3 * times.update / batch,
                "throughput over one %": 100 * (alone / taken - 1),
                "by kernels, of the gain %": 100 * (saved - by_update) / saved if saved else None,
                "by updates, of the gain %": 100 * by_update / saved if saved else None,
            }
        )
    return rows


def pipeline_rows(times: LayerTimes) -> Rows:
    """Return the throughput of micro-batches in a pipeline whose ranks have so many sequences."""
    rows: Rows = []
    for batch in times.forward:
        if RANK_SEQUENCES % batch:
            continue
        number = RANK_SEQUENCES // batch
        busy = RANK_SEQUENCES * times.kernels(batch)
        bubble = busy / number * (STAGES - 1)
        step = busy + bubble + times.update
        rows.append(
            {
                "hidden": times.hidden,
                "sequences": batch,
                "micro-batches": number,
                "bubbles, of the step %": 100 * bubble / step,
                "(p - 1) / (p m), as the paper %": 100 * (STAGES - 1) / (STAGES * number),
                "update, of the step %": 100 * times.update / step,
                "ms a sequence": 1e3 * step / RANK_SEQUENCES,
            }
        )
        rows[-1]["throughput over one"] = rows[0]["ms a sequence"] / rows[-1]["ms a sequence"]
    return rows


def size_row(times: LayerTimes) -> dict[str, Any]:
    """Return the bytes that a layer keeps for a sequence, as modelled and as measured."""
    model = shape_of(times.hidden).saved_bytes(1, times.sequence, dtype_bytes=times.dtype_bytes)
    batch = max(times.forward)
    step = 3 * times.forward[batch]
    return {
        "hidden": times.hidden,
        "model MB": model / 1e6,
        "measured MB": times.saved_bytes / 1e6,
        "off %": 100 * (model / times.saved_bytes - 1),
        "backward / forward": times.backward[batch] / times.forward[batch],
        "TFLOP/s": _flop(times.hidden, times.sequence) * batch / times.forward[batch] / 1e12,
        "GB/s to move all": required_bytes_per_s(times.saved_bytes * batch, step) / 1e9,
    }


def system_rows(times: LayerTimes, device_bytes: float) -> Rows:
    """Return what GPUs of larger systems would write, at the rate of computing measured here."""
    batch = max(times.forward)
    flop_per_s = _flop(times.hidden, times.sequence) * batch / times.forward[batch]
    rows: Rows = []
    for hidden, layers, tensor, stages in SYSTEMS:
        shape, own = shape_of(hidden), layers / stages
        one = shape.saved_bytes(1, times.sequence, tensor_parallel=tensor, sequence_parallel=True)
        step = 3 * _flop(hidden, times.sequence) / tensor / flop_per_s
        parameters = 12 * hidden**2 * own / tensor
        room = device_bytes - PARAMETER_BYTES * parameters
        most = int(room / (2 * one)) if room > 0 else 0
        years = {
            name: lifespan_days(
                replace(DRIVES[name], count=DRIVES_OF_A_GPU).endurance_bytes(
                    relaxed_retention=relaxed
                ),
                one,
                step,
            )
            / YEAR_DAYS
            for name, relaxed in (("d7-p5620", False), ("980-pro", True))
        }
        rows.append(
            {
                "hidden": hidden,
                "layers": layers,
                "tensor x pipeline": f"{tensor} x {stages}",
                "GB a sequence": own * one / 1e9,
                "ms a layer": 1e3 * step,
                "GB/s to write": required_bytes_per_s(one, step) / 1e9,
                "years, D7-P5620": years["d7-p5620"],
                "years, 980 PRO, a day's retention": years["980-pro"],
                "parameters GB": PARAMETER_BYTES * parameters / 1e9,
                "largest micro-batch": most,
                "GB it keeps": own * one * most / 1e9,
            }
        )
    return rows


def _flop(hidden: int, sequence: int) -> float:
    """Return the operations of a layer's forward pass for a sequence; causal attention half."""
    return sequence * (24 * hidden**2 + 2 * sequence * hidden)


def model(arguments: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Rows]:
    """Return the tables."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    hidden = arguments.widths or ([8192, 12288, 16384] if on_gpu else [256, 512])
    sequence = 1024 if on_gpu else 256
    device_bytes = torch.cuda.get_device_properties(device).total_memory if on_gpu else 80e9
    name = torch.cuda.get_device_name(device) if on_gpu else f"{torch.get_num_threads()} CPU cores"
    measured = []
    for width in hidden:
        say(f"model: a layer of {width}, {sequence} tokens")
        batches = [1, 2, 4, 8, 16]
        measured.append(measure(width, sequence, batches, device, arguments.repetitions))
    largest = measured[-1]
    speed = f"at {size_row(largest)['TFLOP/s']:.3g} TFLOP/s, {device_bytes / 1e9:.0f} GB of memory"
    return {
        f"A layer's bytes for {sequence} tokens, {name}": [size_row(t) for t in measured],
        "Larger micro-batches (table 5.6)": [row for t in measured for row in gain_rows(t)],
        f"In a pipeline of {STAGES} stages, {RANK_SEQUENCES} sequences a rank": [
            row for t in measured for row in pipeline_rows(t)
        ],
        f"A GPU of larger systems, {speed} (figures 5.10, 5.13)": system_rows(
            largest, device_bytes
        ),
    }
