"""Weights in host memory: accelerate, raw and packed streaming, and packed on the device.

The cache is DynamicCache throughout. "raw, streamed" moves the weights as they are with the same
prefetch as the packed ones. The ideal of a way is the time that its bytes take at the link's
measured rate; on a GPU the table has how much of it is reached.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import tempfile
import time
from typing import Any

import torch
import transformers
from graphsage.report import Steps
from llm_workload import Rows, Workload, left_out, line, workload
from textgen.generation import Run
from textgen.ways import WeightOptions, load

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
        generated: Rows = []
        plain: Run | None = None
        for name, weights in WAYS.items():
            if weights == "raw":
                continue
            found = work.measure(weights, "dynamic")
            plain = plain or found
            generated.append(line(name, found, plain, arguments.batch))
        passes = _passes(work)
        tables = {f"Weights: {work.title}": generated, "Weights: one forward pass": passes}
    return tables


def _passes(work: Workload) -> Rows:
    """Measure a forward pass of one token for each way, and the link."""
    rate = _link_rate(work.device)
    found: Rows = []
    baseline = None
    for name, weights in WAYS.items():
        with work.steps.step(f"{name}: one pass after the other"):
            model = _loaded(work, weights)
            seconds = _pass_seconds(work, model)
        moved = _moved_bytes(model, weights)
        row: dict[str, Any] = {"way": name, "pass ms": 1e3 * seconds, "moved MB": moved / 1e6}
        if weights == "offload":
            baseline = seconds
        if baseline is not None and weights not in ("device", "offload"):
            row["times faster than accelerate"] = baseline / seconds
        if rate and moved:
            row["ideal ms"] = 1e3 * moved / rate
            row["of the link"] = f"{100 * moved / rate / seconds:.0f} %"
        found.append(row)
        del model
        gc.collect()
        if work.device.type == "cuda":
            torch.cuda.empty_cache()
    raw = next(row for row in found if row["way"] == "raw, streamed")["pass ms"]
    for row in found:
        if row["way"] == "packed, streamed":
            row["times faster than raw"] = raw / row["pass ms"]
    if work.device.type == "cuda":
        found += _peers(work, rate)
    return found


def _loaded(work: Workload, weights: str) -> Any:
    if weights != "raw":
        return load(work.folder, work.dtype, weights, work.device, WeightOptions())
    model = transformers.AutoModelForCausalLM.from_pretrained(work.folder, dtype=work.dtype)
    offload_weights(model, execution_device=work.device, codec="raw", progress=False)
    return model


@torch.no_grad()
def _pass_seconds(work: Workload, model: Any) -> float:
    """Return the median time of a pass of one token, others each."""
    times = []
    for i in range(2 + 3 * work.arguments.repetitions):
        ids = torch.randint(work.shape.vocabulary, (1, 1), device=work.device)
        _wait(work.device)
        begin = time.perf_counter()
        model(input_ids=ids, use_cache=False)
        _wait(work.device)
        if i >= 2:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _moved_bytes(model: Any, weights: str) -> int:
    """Return the bytes that cross for a pass; on a CPU, those that would."""
    if weights == "offload":
        return sum(p.nbytes for _, p in model.named_parameters(remove_duplicate=False))
    if weights in ("device", "packed"):
        return 0
    stream = find_offloaded(model).stream
    return sum(stream.plan(unit).crossing_nbytes for unit in stream.units)


def _link_rate(device: torch.device, nbytes: int = 1 << 28) -> float:
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


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peers(work: Workload, rate: float) -> Rows:
    """Measure nvCOMP and DFloat11 where they can be imported."""
    found: Rows = []
    try:
        found.append(_nvcomp(work, importlib.import_module("nvidia.nvcomp"), rate))
    except ImportError as error:
        left_out("nvCOMP", error)
    try:
        found.append(_dfloat11(work, importlib.import_module("dfloat11")))
    except ImportError as error:
        left_out("DFloat11", error)
    return found


def _nvcomp(work: Workload, nvcomp: Any, rate: float) -> dict[str, Any]:
    """Decode every matrix of the model with nvCOMP's ANS after a copy from page-locked memory.

    Nothing is computed, so this is the least that a pass with nvCOMP would take when copies and
    decoding do not overlap.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(work.folder, dtype=work.dtype)
    stream = torch.cuda.current_stream().cuda_stream
    codec = nvcomp.Codec(algorithm="ANS", data_type="<f2", cuda_stream=stream)
    packed = []
    for parameter in model.parameters():
        raw = parameter.detach().to(work.device).view(torch.uint8).flatten()
        encoded = torch.utils.dlpack.from_dlpack(codec.encode(nvcomp.as_array(raw))).view(
            torch.uint8
        )
        packed.append(encoded.cpu().pin_memory())
    moved = sum(part.nbytes for part in packed)

    def one_pass() -> None:
        for part in packed:
            staged = part.to(work.device, non_blocking=True)
            codec.decode(nvcomp.as_array(staged))

    times = []
    for i in range(2 + work.arguments.repetitions):
        _wait(work.device)
        begin = time.perf_counter()
        one_pass()
        _wait(work.device)
        if i >= 2:
            times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    return {
        "way": "nvCOMP ANS: copy and decode, nothing computed",
        "pass ms": 1e3 * seconds,
        "moved MB": moved / 1e6,
        "ideal ms": 1e3 * moved / rate,
        "of the link": f"{100 * moved / rate / seconds:.0f} %",
    }


def _dfloat11(work: Workload, dfloat11: Any) -> dict[str, Any]:
    """Measure a pass with DFloat11, which keeps packed weights on the device."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(work.folder, dtype=work.dtype)
    patterns = {
        r"lm_head": [],
        r"model\.layers\.\d+": [
            f"{part}.{name}_proj"
            for part, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down")))
            for name in names
        ],
    }
    with tempfile.TemporaryDirectory() as folder:
        dfloat11.compress_model(
            model=model.to(work.device),
            pattern_dict=patterns,
            save_path=folder,
            save_single_file=True,
        )
        packed = dfloat11.DFloat11Model.from_pretrained(folder, device=str(work.device))
        seconds = _pass_seconds(work, packed)
    return {"way": "DFloat11, packed on the device", "pass ms": 1e3 * seconds, "moved MB": 0.0}
