"""On a CPU: packing a checkpoint, and a forward pass of MiniLM that decodes every weight."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import llm_minilm
import torch
import transformers
from llm_workload import Rows, left_out
from textgen.models import SIZES, write_random_model

from bitslab.dtypes import dtype_name
from bitslab.integrations.transformers import BitslabConfig
from bitslab.offload import WeightPacker, offload_report

#: Asked: MB/s of bfloat16 packed on two cores; a pass that decodes, of a plain one; a pass with
#: all weights kept on the device, of a plain one.
PACKED_MB_S, DECODING_PASS, KEPT_PASS = 200, 3.0, 1.1
#: Shapes of a layer's matrices, those of a 1b Llama.
LAYER = ((2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048))
LAYERS = 2
#: What is loaded: three layers of that kind, and embeddings and a head of 32,000 words.
CHECKPOINT = replace(SIZES["1b"], layers=3)
#: Lines and tokens of a pass: a prompt of a thousand tokens, and one token.
PASSES = ((8, 128), (1, 1))


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Return a table of packing, and one for each size of a pass."""
    threads = torch.get_num_threads()
    tables = {
        f"Packing a checkpoint on {threads} CPU cores": [
            measure(dtype, arguments.repetitions)
            for measure in (_packing, _loading)
            for dtype in (torch.bfloat16, torch.float32)
        ]
    }
    try:
        llm_minilm.folder()
    except FileNotFoundError as error:
        left_out("MiniLM", error)
        return tables
    for lines, tokens in PASSES:
        tables[f"MiniLM on {threads} CPU cores, {lines} x {tokens} tokens"] = [
            row
            for dtype in (torch.float32, torch.bfloat16)
            for row in _passes(dtype, lines, tokens, arguments)
        ]
    return tables


def _packing(dtype: torch.dtype, repetitions: int) -> dict[str, Any]:
    """Measure the packing of layers of new weights each time."""
    rates, ratio = [], 1.0
    for i in range(repetitions + 1):
        generator = torch.Generator().manual_seed(i)
        named = {
            f"layers.{j}.{k}": (torch.randn(shape, generator=generator) * 0.02).to(dtype)
            for j in range(LAYERS)
            for k, shape in enumerate(LAYER)
        }
        units = {
            f"layers.{j}": [f"layers.{j}.{k}" for k in range(len(LAYER))] for j in range(LAYERS)
        }
        begin = time.perf_counter()
        with WeightPacker(units) as packer:
            for name, weight in named.items():
                packer.add(name, weight)
            weights = packer.finish()
        seconds = time.perf_counter() - begin
        ratio = weights.ratio
        if i:  # the first one compiles
            rates.append(weights.raw_nbytes / seconds / 1e6)
        weights.close()
    return _row("tensors in memory", dtype, ratio, rates)


def _loading(dtype: torch.dtype, repetitions: int) -> dict[str, Any]:
    """Measure from_pretrained with BitslabConfig, a new checkpoint each time."""
    rates, ratio = [], 1.0
    for i in range(repetitions + 1):
        with tempfile.TemporaryDirectory(prefix="bitslab-llm-") as folder:
            write_random_model("llama", CHECKPOINT, dtype, 128, i, Path(folder))
            config = BitslabConfig(execution_device="cpu")
            begin = time.perf_counter()
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, quantization_config=config
            )
            seconds = time.perf_counter() - begin
        found = offload_report(model)
        ratio = found.ratio
        if i:
            rates.append(found.raw_bytes / seconds / 1e6)
        del model
    return _row("a checkpoint, by from_pretrained", dtype, ratio, rates)


def _align(model: torch.nn.Module) -> None:
    """Move weights from the map of the file, where they begin anywhere, to memory of their own.

    torch's sums of a one-token pass differ in the last bit by where the weights begin.
    """
    for parameter in model.parameters():
        if type(parameter) is torch.nn.Parameter:
            parameter.data = parameter.data.clone()


def _row(what: str, dtype: torch.dtype, ratio: float, rates: list[float]) -> dict[str, Any]:
    rate = statistics.median(rates)
    row: dict[str, Any] = {"what": what, "dtype": dtype_name(dtype), "ratio": ratio, "MB/s": rate}
    if dtype == torch.bfloat16:
        row["asked"] = f">= {PACKED_MB_S}: {'ok' if rate >= PACKED_MB_S else 'missed'}"
    return row


def _passes(dtype: torch.dtype, lines: int, tokens: int, arguments: argparse.Namespace) -> Rows:
    """Measure a forward pass with fresh text, and compare with the plain model's bit for bit."""
    repetitions = max(5, arguments.repetitions)
    batches = [llm_minilm.batch(lines, tokens, seed) for seed in range(repetitions + 1)]
    ways: dict[str, Any] = {"plain": llm_minilm.load(dtype)}
    kept: dict[str, Literal["all"] | None] = {"compressed": None, "keep=all": "all"}
    for name, keep in kept.items():
        config = BitslabConfig(execution_device="cpu", keep=keep)
        ways[name] = llm_minilm.load(dtype, quantization_config=config)
    for model in ways.values():
        _align(model)
    found: Rows = []
    with torch.no_grad():
        expected = ways["plain"](**batches[0]).last_hidden_state
        for name, model in ways.items():
            if not torch.equal(model(**batches[0]).last_hidden_state, expected):
                raise SystemExit(f"{name}: embeddings differ from the plain model's")
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(3):
            for given in batches[1:]:
                # In turns, so that what else the machine does slows all of them.
                for name, model in ways.items():
                    begin = time.perf_counter()
                    model(**given)
                    seconds[name].append(time.perf_counter() - begin)
    for name, times in seconds.items():
        ratios = (time / plain for time, plain in zip(times, seconds["plain"], strict=True))
        row: dict[str, Any] = {
            "dtype": dtype_name(dtype),
            "weights": name,
            "ms": 1e3 * statistics.median(times),
            "times plain": statistics.median(ratios),
        }
        asked = {"compressed": DECODING_PASS, "keep=all": KEPT_PASS}.get(name)
        # Decoding takes as long for one token as for a thousand, and the rest of the pass does not.
        if asked is not None and lines * tokens > 1:
            row["asked"] = f"<= {asked:g}: {'ok' if row['times plain'] <= asked else 'missed'}"
        found.append(row)
    return found
