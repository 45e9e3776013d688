"""FlexGen and InfiniGen as the IBP paper measures them (section 6.4), by our own versions of both.

FlexGen: `generate_blocks` sends several batches through each layer while it is on the device. Raw
weights stand for FlexGen, packed ones for FlexGen with IBP; the rest is the same (figure 11).
InfiniGen: `InfiniGenSelector` fetches the tokens that a layer is expected to attend to, out of a
packed history by the GPU. Beside it stand what fetches every token, packed, and transformers'
offloaded cache; InfiniGen's gather of raw rows by the CPU is not written here (figure 12). Tokens
of the selector may differ from the plain ones, which is its own approximation, so `equal tokens %`
is printed in place of a check.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from typing import Any

import torch
from common.report import Steps
from llm_weights import link_rate, streamed_raw
from llm_workload import Row, Rows, Workload, left_out, show, wait, workload
from textgen.measure import Clock
from textgen.ways import CacheOptions, WeightOptions, load, make_cache

from bitslab.integrations.accelerate import generate_blocks
from bitslab.integrations.transformers import CompressedCache, InfiniGenSelector
from bitslab.offload import find_offloaded

#: Batches that a layer serves while it is on the device.
BLOCKS = 4
#: Tokens that skews are learnt from.
SAMPLE_TOKENS = 2048


def run(arguments: argparse.Namespace, steps: Steps) -> dict[str, Rows]:
    """Measure both systems and return their tables."""
    with workload(arguments, steps) as work:
        return {
            f"FlexGen's schedule, ours: {work.title}, in {BLOCKS} batches": flexgen(work),
            f"InfiniGen's kind, ours: {work.title}": infinigen(work),
        }


def flexgen(work: Workload) -> Rows:
    """Generate with weights that stream raw, then packed, one transfer for all batches."""
    rate = link_rate(work.device)
    rows: Rows = []
    tokens: dict[str, list[Any]] = {}
    for name in ("raw, streamed", "packed, streamed"):
        with work.steps.step(f"{name}: loading"):
            model = _streamed(work, name)
        seconds = []
        for i in range(work.arguments.repetitions + 1):
            prompt = work.prompt(i).to(work.device)
            blocks = [
                {"input_ids": ids, "attention_mask": mask}
                for ids, mask in zip(
                    prompt.ids.chunk(BLOCKS), prompt.mask.chunk(BLOCKS), strict=True
                )
            ]
            wait(work.device)
            begin = time.perf_counter()
            with work.steps.step(f"{name}: {i} of {work.arguments.repetitions}"):
                found = generate_blocks(
                    model,
                    blocks,
                    do_sample=False,
                    max_new_tokens=work.arguments.new_tokens,
                    min_new_tokens=work.arguments.new_tokens,
                )
            wait(work.device)
            seconds.append(time.perf_counter() - begin)
            tokens.setdefault(name, []).append([ids.tolist() for ids in found])
        stream = find_offloaded(model).stream
        moved = sum(stream.plan(unit).crossing_nbytes for unit in stream.units)
        row: Row = {
            "way": name,
            "latency s": statistics.median(seconds[1:]),
            "moved MB a pass": moved / 1e6,
        }
        if rate:
            row["link alone s"] = work.arguments.new_tokens * moved / rate
        rows.append(show(row))
        del model
        work.free()
    raw, packed = rows
    if tokens["raw, streamed"] != tokens["packed, streamed"]:
        raise SystemExit("packed, streamed: tokens differ from those of raw weights")
    packed["times as fast as raw"] = raw["latency s"] / packed["latency s"]
    return rows


def _streamed(work: Workload, name: str) -> Any:
    if name == "raw, streamed":
        return streamed_raw(work)
    return load(work.folder, work.dtype, "compressed", work.device, WeightOptions())


def infinigen(work: Workload) -> Rows:
    """Generate with K and V on the device, offloaded, packed, and packed with chosen tokens."""
    model = load(work.folder, work.dtype, "device", work.device, WeightOptions())
    sample = work.prompt(-1).ids[:1, :SAMPLE_TOKENS].to(work.device)
    with work.steps.step("learning the skews"):
        selector = InfiniGenSelector.fit(model, sample)
    rows: Rows = []
    plain: list[list[int]] = []
    for name, way in (
        ("DynamicCache", "dynamic"),
        ("transformers' offloaded", "offloaded"),
        ("all tokens, packed", "compressed"),
        ("chosen tokens, packed", "selected"),
    ):
        if way == "offloaded" and work.device.type == "cpu":
            left_out(name, "it needs a GPU")
            continue
        clocks: list[Clock] = []
        for i in range(work.arguments.repetitions + 1):
            with work.steps.step(f"{name}: {i} of {work.arguments.repetitions}"):
                found, cache, clock = _generated(work, model, way, selector, work.prompt(i))
            clocks.append(clock)
        plain = plain or found
        row = _row(name, clocks[1:])
        row["equal tokens %"] = _equal_percent(found, plain)
        if isinstance(cache, CompressedCache):
            stats = cache.stats()
            row["up MB/token"] = stats["moved_to_device_bytes"] / 1e6 / work.arguments.new_tokens
            row["packed ratio"] = stats["packed_ratio"]
            row["of the tokens"] = stats["selected"]
        rows.append(show(row))
    return rows


def _generated(
    work: Workload, model: Any, way: str, selector: InfiniGenSelector, prompt: Any
) -> tuple[list[list[int]], Any, Clock]:
    """Generate once; return the new tokens, the cache and the times."""
    prompt = prompt.to(work.device)
    selected = way == "selected"
    cache = (
        CompressedCache(model.config, device=work.device, select=selector)
        if selected
        else make_cache(way, model, work.device, CacheOptions())
    )
    clock = Clock()
    with selector.attached(model) if selected else contextlib.nullcontext(), torch.no_grad():
        found = model.generate(
            input_ids=prompt.ids,
            attention_mask=prompt.mask,
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=work.arguments.new_tokens,
            min_new_tokens=work.arguments.new_tokens,
            streamer=clock,
        )
    return found[:, prompt.ids.shape[1] :].tolist(), cache, clock


def _row(name: str, clocks: list[Clock]) -> Row:
    """Return medians of the times of several generations."""
    return {
        "way": name,
        "latency s": statistics.median(clock.times[-1] - clock.times[0] for clock in clocks),
        "prefill ms": 1e3 * statistics.median(clock.prefill_seconds for clock in clocks),
        "token ms": 1e3 * statistics.median(clock.token_seconds or 0.0 for clock in clocks),
    }


def _equal_percent(found: list[list[int]], plain: list[list[int]]) -> float:
    """Return the percent of tokens that are those of the plain run, at the same place."""
    pairs = [pair for lines in zip(found, plain, strict=True) for pair in zip(*lines, strict=True)]
    return 100 * sum(a == b for a, b in pairs) / len(pairs)
