"""The first token: prompts with a compressed K/V cache beside DynamicCache, request by request.

Each case and place of the cache runs in a process of its own, since the first request of a process
takes page-locked memory and chooses codecs, and later ones do not. DynamicCache runs the same fresh
prompts in the same process, in turn, after one that warms the model up; the tokens of both are
compared. Making the first cache of a process loads kernels, which has a column of its own. The last
layers of a prompt are packed in the pass of the next token, whose time is in the table. A second
table says what differs between processes: where memory and thread lie, what the link copies, and
whether the cache's streams run beside the model's.

What was imported is frozen for Python's garbage collector, as servers do: one collection of all
modules' objects takes a fifth of a second, in whichever request it is due, with any cache. What the
collector still takes in a prompt is in the table.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
from common.report import Steps
from prompt_process import facts
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from bitslab.integrations.transformers import CompressedCache

Row = dict[str, Any]

#: New tokens after each prompt.
NEW_TOKENS = 8


@dataclass(frozen=True)
class Case:
    """A model of random weights and its prompts.

    Parameters
    ----------
    first, second : float
        What the first and the second request of a process may take, in times of DynamicCache's.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    batch: int
    tokens: int
    first: float
    second: float

    def model(self, device: torch.device) -> Any:
        config = LlamaConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.mlp,
            max_position_embeddings=self.tokens + NEW_TOKENS + 1,
            vocab_size=32_000,
        )
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with device:
                return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)


_8B = Case(32, 4096, 32, 8, 14336, 1, 8192, first=1.3, second=1.08)
CASES = {
    "8k": _8B,
    "32k": replace(_8B, tokens=32_768),
    "paper": Case(8, 4096, 32, 32, 11008, 20, 1920, first=1.8, second=1.25),
}
MODES = ("host", "device")


def scaled_to_cpu(case: Case) -> Case:
    """Return a case that a CPU does in seconds: two narrow layers and a twentieth of the prompt."""
    heads = 4 * case.kv_heads // case.heads
    tokens = max(256, case.tokens // 20)
    return replace(
        case, layers=2, hidden=256, heads=4, kv_heads=max(1, heads), mlp=512, tokens=tokens
    )


def run(arguments: argparse.Namespace, steps: Steps) -> dict[str, list[Row]]:
    """Measure each case and mode in processes of their own."""
    rows: list[Row] = []
    processes: list[Row] = []
    device: torch.device = arguments.device
    if device.type == "cuda":  # what they compile is on disk for the processes that are measured
        with steps.step("compiling kernels"):
            few = replace(_8B, layers=1, tokens=600)
            _in_process(few, "host", 1, device)
    for name in arguments.prompt_cases:
        case = CASES[name] if device.type == "cuda" else scaled_to_cpu(CASES[name])
        for mode in arguments.prompt_modes:
            for process in range(1, arguments.processes + 1):
                label = {"case": name, "cache": mode, "process": process}
                with steps.step(f"{name}, {mode}, process {process} of {arguments.processes}"):
                    found = _in_process(case, mode, arguments.repetitions, device)
                rows += [{**label, **row} for row in found["rows"]]
                processes.append({**label, **found["process"]})
                for row in rows[-len(found["rows"]) :]:
                    print(json.dumps(row), file=sys.stderr)
    return {"Prompts: requests of a process": rows, "Prompts: the processes": processes}


def _in_process(case: Case, mode: str, repetitions: int, device: torch.device) -> Any:
    given = json.dumps(
        {
            "case": asdict(case),
            "mode": mode,
            "repetitions": repetitions,
            "device": str(device),
            "threads": torch.get_num_threads(),
        }
    )
    done = subprocess.run(
        [sys.executable, __file__, given], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{mode}: its process ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


@dataclass
class Request:
    """Times of one request, in milliseconds, and its tokens.

    Parameters
    ----------
    prompt_ms : float
        From the call of the model until the device is done.
    host_ms : float
        Until the call returned; as long as the prompt where the host waits for the device.
    device_ms : float
        Between events before and behind the call.
    next_ms, token_ms : float
        The pass of the first new token, and the median of the others.
    collector_ms : float
        What the garbage collector took in the prompt's pass.
    """

    prompt_ms: float
    host_ms: float
    device_ms: float
    next_ms: float
    token_ms: float
    collector_ms: float
    tokens: list[list[int]]


class Collector:
    """Measures Python's garbage collector, as one of ``gc.callbacks``."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __call__(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began


@torch.no_grad()
def request(model: Any, cache: Any, ids: torch.Tensor) -> Request:
    """Run a prompt and some tokens."""
    on_gpu = ids.device.type == "cuda"
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 if on_gpu else 0)]
    collector = Collector()
    _wait(ids.device)
    gc.callbacks.append(collector)
    start = time.perf_counter()
    if on_gpu:
        events[0].record()
    try:
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    finally:
        gc.callbacks.remove(collector)
    host = time.perf_counter() - start
    if on_gpu:
        events[1].record()
    _wait(ids.device)
    prompt = time.perf_counter() - start
    times, tokens = [], [logits[:, -1].argmax(-1)]
    for _ in range(NEW_TOKENS - 1):
        start = time.perf_counter()
        logits = model(tokens[-1][:, None], past_key_values=cache).logits
        tokens.append(logits[:, -1].argmax(-1))
        _wait(ids.device)
        times.append(1e3 * (time.perf_counter() - start))
    on_device = events[0].elapsed_time(events[1]) if on_gpu else 1e3 * prompt
    return Request(
        1e3 * prompt,
        1e3 * host,
        on_device,
        times[0],
        statistics.median(times[1:]),
        1e3 * collector.seconds,
        torch.stack(tokens, dim=1).tolist(),
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(case: Case, mode: str, repetitions: int, device: torch.device) -> dict[str, Any]:
    """Run requests with both caches in turn; the first two of CompressedCache and the others."""
    model = case.model(device)
    gc.collect()
    gc.freeze()
    plain: list[Request] = []
    packed: list[Request] = []
    made_ms: list[float] = []  # by cache: the first one of a process loads kernels
    for i in range(repetitions + 2):
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(32_000, (case.batch, case.tokens), generator=generator).to(device)
        plain.append(request(model, DynamicCache(config=model.config), ids))
        if not i:  # the model and the allocator are warm now
            plain[0] = request(model, DynamicCache(config=model.config), ids)
        begin = time.perf_counter()
        cache = CompressedCache(model.config, offload=mode == "host", device=device)
        made_ms.append(1e3 * (time.perf_counter() - begin))
        packed.append(request(model, cache, ids))
        if packed[i].tokens != plain[i].tokens:
            raise SystemExit(f"CompressedCache, {mode}: tokens differ from DynamicCache's")
        if i == repetitions + 1:
            try:
                process = facts(cache, device)
            except RuntimeError as error:  # what was measured is worth more
                process = {"not known": str(error)}
        ratio = cache.stats()["packed_ratio"]
        del cache
    dynamic_ms = statistics.median(each.prompt_ms for each in plain)
    dynamic_token_ms = statistics.median(each.token_ms for each in plain)
    rows = []
    for name, which, limit in (
        ("first", slice(1), case.first),
        ("second", slice(1, 2), case.second),
        ("later", slice(2, None), case.second),
    ):
        some = packed[which]
        if not some:
            continue
        ms = {
            key: statistics.median(getattr(each, key) for each in some)
            for key in ("prompt_ms", "host_ms", "device_ms", "next_ms", "token_ms", "collector_ms")
        }
        rows.append(
            {
                "request": name,
                "making the cache ms": statistics.median(made_ms[which]),
                "prompt ms": ms["prompt_ms"],
                "DynamicCache ms": dynamic_ms,
                "times": ms["prompt_ms"] / dynamic_ms,
                "asked": limit,
                "host ms": ms["host_ms"],
                "device ms": ms["device_ms"],
                "next token ms": ms["next_ms"],
                "token ms": ms["token_ms"],
                "DynamicCache token ms": dynamic_token_ms,
                "collector ms": ms["collector_ms"],
                "ratio": ratio,
            }
        )
    return {"rows": rows, "process": process}


def main(given: str) -> int:
    """Measure one case in this process, and print the result as JSON."""
    options = json.loads(given)
    torch.set_num_threads(options["threads"])
    # cuDNN's attention makes a plan for each new length, so that each token would wait for one.
    torch.backends.cuda.enable_cudnn_sdp(False)
    case = Case(**options["case"])
    found = measure(case, options["mode"], options["repetitions"], torch.device(options["device"]))
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # nothing of it is needed, and unlocking its pages takes seconds


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
