"""Generation with Llama's shape on a GPU: a prompt, its tokens and the memory, by cache."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from llm_prompt import CASES as PROMPTS
from llm_prompt import Case, scaled_to_cpu
from llm_workload import Rows, left_out
from transformers import DynamicCache, QuantizedCache

from bitslab.integrations.transformers import CompressedCache, KVCompCache

#: Tokens behind a prompt: the first few learn the order of layers and begin what is packed late.
NEW_TOKENS, WARM_TOKENS = 20, 4
#: In place of WARM_TOKENS where layers are moved by measuring: seven for each of six moves, which
#: are the most in simulated passes, and some.
BALANCE_TOKENS = 48
#: Tokens within which each layer of a packed cache packs a block of 64 at some time: the slowest of
#: them is the worst case. Other caches, which do the same for each token, take NEW_TOKENS.
BLOCK_TOKENS = 68
DYNAMIC, OFFLOADED, KVCOMP_HOST = "DynamicCache", "transformers' offloaded", "KVCompCache, host"
KVCOMP_DEVICE = "KVCompCache, device"
LOSSLESS_TILES = "KVCompCache, lossless tiles, device"
#: Of these the tokens that are measured are replays of a CUDA graph, of one block of steps in which
#: nothing is packed.
GRAPHS = KVCOMP_DEVICE + ", CUDA graphs", LOSSLESS_TILES + ", CUDA graphs"
NEEDS_GPU = OFFLOADED, *GRAPHS
CASES: dict[str, Case] = {
    "32k, 8 K/V heads": replace(PROMPTS["32k"], layers=16),
    "32k, 32 K/V heads": replace(PROMPTS["32k"], layers=16, kv_heads=32),
    "batch 20, 32 K/V heads": PROMPTS["paper"],
}
#: What other caches cannot do on a card of 141 GB: 344 GB of K and V, raw; only where it is named.
#: Prompts go through the model in chunks of so many tokens, whose activations fit beside it.
LARGE: dict[str, Case] = {
    "7b, batch 20 at 32k": replace(PROMPTS["paper"], layers=32, tokens=32_768),
}
LARGE_CHUNK_TOKENS = 2048
#: What a token of KVCompCache on the host may take, in milliseconds.
ASKED_MS = dict(zip(CASES, (14.0, 30.0, 20.0), strict=True))
#: Beyond a token of DynamicCache's, with K and V on the device; and times its prompt.
ASKED_DEVICE_MS, ASKED_PROMPT = 2.0, 1.2
#: Tokens behind a prompt of LARGE, of which one request is measured and none warms up: a token of
#: 52 GB in host memory takes a second.
LARGE_NEW_TOKENS = 16
#: Makes a cache of a config, on a device; options of KVCompCache are all that it is given besides.
Make = Callable[..., Any]
WAYS: dict[str, Make] = {
    DYNAMIC: lambda config, device: DynamicCache(config=config),
    OFFLOADED: lambda config, device: DynamicCache(config=config, offloading=True),
    "CompressedCache, host": lambda config, device: CompressedCache(config, device=device),
    "CompressedCache, device": lambda config, device: CompressedCache(
        config, device=device, offload=False
    ),
    KVCOMP_HOST: lambda config, device, **how: KVCompCache(config, device=device, **how),
    "KVCompCache, half on the host": lambda config, device, **how: KVCompCache(
        config, device=device, offload=0.5, **how
    ),
    "KVCompCache, auto": lambda config, device, **how: KVCompCache(
        config, device=device, offload="auto", **how
    ),
    **dict.fromkeys(
        (KVCOMP_DEVICE, GRAPHS[0]),
        lambda config, device, **how: KVCompCache(config, device=device, offload=False, **how),
    ),
    **dict.fromkeys(
        (LOSSLESS_TILES, GRAPHS[1]),
        lambda config, device, **how: KVCompCache(
            config, device=device, offload=False, **{**how, "coder": "lossless"}
        ),
    ),
    "QuantizedCache, quanto, 4 bits": lambda config, device: QuantizedCache(
        "quanto", config, nbits=4
    ),
    "QuantizedCache, quanto, 2 bits": lambda config, device: QuantizedCache(
        "quanto", config, nbits=2
    ),
    "QuantizedCache, hqq, 4 bits": lambda config, device: QuantizedCache(
        "hqq", config, nbits=4, axis_key=1, axis_value=1
    ),
    "QuantizedCache, hqq, 2 bits": lambda config, device: QuantizedCache(
        "hqq", config, nbits=2, axis_key=1, axis_value=1
    ),
}


@dataclass
class Request:
    """One prompt and its tokens; memory beyond what was allocated before, in bytes.

    `worst_ms` is a token's in which blocks are packed, the slowest, or one in which "auto" moves a
    layer, once it has found how many remain on the host; `host_ms` is the time until a
    token's last kernel is queued: where that is nearly `token_ms`, the host decides, else the GPU
    or the link. `capture_ms` is what packing what is due, making room and capturing a step take.
    """

    prompt_ms: float
    next_ms: float
    token_ms: float
    worst_ms: float
    host_ms: float
    prompt_peak_bytes: int
    held_bytes: int
    token_peak_bytes: int
    tokens: list[list[int]]
    capture_ms: float | None = None


def run(arguments: argparse.Namespace, report: Any) -> dict[str, Rows]:
    """Return a table for each case; without a GPU of narrow models, with no link to cross."""
    device: torch.device = arguments.device
    # cuDNN's attention makes a plan for each new length, so that each token would wait for one.
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        tables: dict[str, Rows] = {}
        for name in arguments.cases:
            case = {**CASES, **LARGE}[name]
            case = case if device.type == "cuda" else scaled_to_cpu(case)
            title = (
                f"Generation, {name}: {case.layers} layers, {case.batch} x {case.tokens} tokens, "
                f"bfloat16, on {_device_name(device)}"
            )
            if arguments.scales:
                title += ", scales of K and V {:g} and {:g}".format(*arguments.scales[0])
            tables[title] = _case_rows(name, case, arguments, report)
        return tables
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _case_rows(name: str, case: Case, arguments: argparse.Namespace, report: Any) -> Rows:
    model = case.model(arguments.device)
    measured: dict[str, _Measured] = {way: _Measured() for way in arguments.ways}
    for way in NEEDS_GPU:
        if arguments.device.type == "cpu" and way in measured:
            measured[way].problem = "it needs a GPU"
    how: dict[str, Any] = {}
    if arguments.scales:
        how["key_scale"], how["value_scale"] = arguments.scales[0]
    # The first request warms up, but in LARGE. In turns, since the speed of a shared host changes
    # from one minute to the next.
    first, turns = (1, 2) if name in LARGE else (0, arguments.repetitions + 1)
    for turn in range(first, turns):
        for done, (way, found) in enumerate(measured.items()):
            report(turn * len(measured) + done, turns * len(measured))
            if not found.problem:
                _take_turn(found, way, model, case, turn, name in LARGE, how)
    rows: Rows = []
    plain: dict[str, Any] | None = None
    for way, found in measured.items():
        if found.problem:
            left_out(way, found.problem)
            if way not in NEEDS_GPU or arguments.device.type != "cpu":
                rows.append({"cache": way, "note": f"left out: {found.problem:.90}"})
            continue
        row = _row(way, found.requests)
        if way == DYNAMIC:
            plain = row
        if plain is not None:
            row["prompt times Dynamic"] = row["prompt ms"] / plain["prompt ms"]
            row["token times Dynamic"] = row["token ms"] / plain["token ms"]
            expected = [each.tokens for each in measured[DYNAMIC].requests]
            row["same tokens %"] = _same(found.requests, expected)
        if found.stats:
            row["ratio"] = found.stats["packed_ratio"]
            row["packed MB"] = found.stats["packed_bytes"] / 1e6
            row["raw MB"] = found.stats["raw_bytes"] / 1e6
        if way.startswith("KVComp") and arguments.device.type == "cuda":
            row["asked"] = _verdict(name, way, row, plain)
        rows.append(row)
        print(json.dumps(row), file=sys.stderr)
    del model
    _free(arguments.device)
    return rows


@dataclass
class _Measured:
    """Requests of one way, the stats of the last one's cache, and why there are none, if so."""

    requests: list[Request] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def _take_turn(
    found: _Measured,
    way: str,
    model: Any,
    case: Case,
    turn: int,
    large: bool,
    how: dict[str, Any],
) -> None:
    """Measure one request, with these options of KVCompCache; that of turn 0 warms up."""
    device: torch.device = model.device
    model.set_attn_implementation("bitslab" if way.startswith("KVComp") else "sdpa")
    generator = torch.Generator().manual_seed(turn)
    ids = torch.randint(32_000, (case.batch, case.tokens), generator=generator).to(device)
    _free(device)
    try:
        blocks = device.type == "cuda" and way.startswith(("Compressed", "KVComp"))
        warm = BALANCE_TOKENS if blocks and way.endswith("auto") else WARM_TOKENS
        n = warm + BLOCK_TOKENS if blocks else NEW_TOKENS
        if large:
            n = warm + LARGE_NEW_TOKENS
            # So that histories that grow from chunk to chunk are not copied to larger memory.
            how = {**how, "reserve_tokens": case.tokens + n}
        cache = WAYS[way](model.config, device, **(how if way.startswith("KVComp") else {}))
        chunk_tokens = LARGE_CHUNK_TOKENS if large else case.tokens
        request = _request(model, cache, ids, chunk_tokens, n, warm, graphs=way in GRAPHS)
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        # Backends that are missing say so by one of these, and memory that runs out.
        found.problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        return
    if turn:
        found.requests.append(request)
    found.stats = cache.stats() if hasattr(cache, "stats") else {}


@torch.no_grad()
def _request(
    model: Any,
    cache: Any,
    ids: torch.Tensor,
    chunk_tokens: int,
    new_tokens: int,
    warm_tokens: int,
    *,
    graphs: bool,
) -> Request:
    device = ids.device
    before = _allocated(device)
    _reset_peak(device)
    start = _now(device)
    for chunk in ids.split(chunk_tokens, dim=1):
        logits = model(chunk, past_key_values=cache, logits_to_keep=1).logits
    tokens = [logits[:, -1].argmax(-1)]
    prompt = _now(device) - start
    prompt_peak = _peak(device) - before
    times, queued = [], []
    capture_ms = None

    def forward(ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(ids, past_key_values=cache).logits
        return found

    step: Callable[[torch.Tensor], torch.Tensor] = forward
    with ExitStack() as stack:
        for i in range(new_tokens - 1):
            if i == warm_tokens:
                _reset_peak(device)
                if graphs:
                    start = _now(device)
                    steps = stack.enter_context(cache.captured_steps(new_tokens - 1 - i))
                    step = _captured(model, cache, tokens[-1][:, None], steps)
                    capture_ms = 1e3 * (_now(device) - start)
            start = _now(device)
            logits = step(tokens[-1][:, None])
            tokens.append(logits[:, -1].argmax(-1))
            queued.append(time.perf_counter() - start)
            times.append(_now(device) - start)
    del logits, step
    return Request(
        1e3 * prompt,
        1e3 * times[0],
        1e3 * statistics.median(times[warm_tokens:]),
        1e3 * max(times[warm_tokens:]),
        1e3 * statistics.median(queued[warm_tokens:]),
        prompt_peak,
        _allocated(device) - before,
        _peak(device) - before,
        torch.stack(tokens, dim=1).tolist(),
        capture_ms,
    )


def _captured(
    model: Any, cache: Any, ids: torch.Tensor, steps: Any
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what replays a step of ids ``[B, 1]``; its logits last until the next one."""
    ids = ids.clone()
    at = torch.full_like(ids, cache.get_seq_length())
    with steps.capture() as captured:
        logits: torch.Tensor = model(ids, position_ids=at, past_key_values=cache).logits

    def step(new: torch.Tensor) -> torch.Tensor:
        ids.copy_(new)
        captured.replay()
        at.add_(1)
        return logits

    return step


def _row(way: str, requests: list[Request]) -> dict[str, Any]:
    def median(name: str) -> float:
        return float(statistics.median(getattr(each, name) for each in requests))

    captures = [each.capture_ms for each in requests if each.capture_ms is not None]
    return {
        "cache": way,
        "prompt ms": median("prompt_ms"),
        "next token ms": median("next_ms"),
        "token ms": median("token_ms"),
        "worst token ms": max(each.worst_ms for each in requests),
        "of the host": median("host_ms"),
        "device MB": median("held_bytes") / 1e6,
        "peak of a token MB": median("token_peak_bytes") / 1e6,
        "peak of a prompt MB": median("prompt_peak_bytes") / 1e6,
        **({"capture ms": statistics.median(captures)} if captures else {}),
    }


def _verdict(name: str, way: str, row: dict[str, Any], plain: dict[str, Any] | None) -> str:
    asked = []
    if way == KVCOMP_HOST:
        most = ASKED_MS.get(name)
        if most is not None:
            asked.append((f"token <= {most:g} ms", row["token ms"] <= most))
    elif plain is not None:
        most = plain["token ms"] + ASKED_DEVICE_MS
        asked.append((f"token <= {most:.3g} ms", row["token ms"] <= most))
    if plain is not None:
        asked.append((f"prompt <= {ASKED_PROMPT}x", row["prompt times Dynamic"] <= ASKED_PROMPT))
    return ", ".join(f"{text}: {'ok' if fine else 'missed'}" for text, fine in asked)


def _same(requests: list[Request], expected: list[list[list[int]]]) -> float:
    """Return how many tokens are DynamicCache's, in percent."""
    pairs = [
        (a, b)
        for each, plain in zip(requests, expected, strict=True)
        for line, other in zip(each.tokens, plain, strict=True)
        for a, b in zip(line, other, strict=False)  # of as many as both have
    ]
    return 100 * sum(a == b for a, b in pairs) / len(pairs)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
