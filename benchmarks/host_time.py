"""Measure the host's time of one call: a gather, a lookup, a decode, a streamed layer, a token.

python benchmarks/host_time.py                 # on a GPU where there is one, else on the CPU
python benchmarks/host_time.py --device cpu

On a GPU a call returns before its work is done. Calls are timed by the clock of the host in runs of
--calls with fresh ids, the GPU idle before each run; a figure is the median of the runs, in
microseconds a call. On the CPU the work itself is in it, so inputs are small there. Beside each
stands torch's own call for the same rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from timing import add_output, print_tables

import bitslab
from bitslab.integrations.embedding import CachedEmbeddingBag
from bitslab.offload import WeightPacker, WeightStream

ROWS, WIDTH, IDS = 20_000, 128, 256
LAYERS, TOKENS = 4, 512


def host_us(run: Callable[[int], object], device: torch.device, calls: int, runs: int) -> float:
    """Return the median over runs of the microseconds a call takes on the host."""
    for i in range(3):
        run(i)
    times = []
    for number in range(runs):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for i in range(calls):
            run(number * calls + i)
        times.append(1e6 * (time.perf_counter() - begin) / calls)
    return statistics.median(times)


def rows_by_id(device: torch.device, ids: list[torch.Tensor]) -> dict[str, Callable[[int], object]]:
    """Return gathers of rows out of host memory, a cache and a tensor on the device."""
    rows = torch.randn(ROWS, WIDTH).to(torch.bfloat16)
    table = bitslab.CompressedTable.from_tensor(rows)
    raw = bitslab.CompressedTable.from_tensor(rows, codec="raw")
    plain = rows.to(device)
    unified = bitslab.unified(rows)
    ways: dict[str, Callable[[int], object]] = {
        "torch.index_select, on the device": lambda i: plain.index_select(0, ids[i % len(ids)]),
        "CompressedTable.gather, packed": lambda i: table.gather(ids[i % len(ids)], device=device),
        "CompressedTable.gather, raw": lambda i: raw.gather(ids[i % len(ids)], device=device),
        "UnifiedTensor[ids]": lambda i: unified[ids[i % len(ids)]],
    }
    if device.type == "cuda":
        cache = bitslab.SlabCache(table, capacity_bytes=rows.nbytes // 2, devices=[device])
        cache.fill(torch.arange(ROWS // 4))
        ways["SlabCache.gather"] = lambda i: cache.gather(ids[i % len(ids)])
    packed = bitslab.compress(rows).to(device)
    ways["CompressedTensor[ids], on the device"] = lambda i: packed[ids[i % len(ids)]]
    return ways


def lookups(device: torch.device, ids: list[torch.Tensor]) -> dict[str, Callable[[int], object]]:
    """Return lookups of an embedding bag."""
    weight = torch.randn(ROWS, WIDTH)
    offsets = torch.arange(IDS, device=device)
    bag = CachedEmbeddingBag.from_pretrained(
        weight, mode="sum", device=device, cache_ratio=0.5, freeze=True
    )
    plain = torch.nn.EmbeddingBag.from_pretrained(weight.to(device), mode="sum")

    def lookup(module: torch.nn.Module) -> Callable[[int], object]:
        def run(i: int) -> object:
            with torch.no_grad():
                return module(ids[i % len(ids)], offsets)

        return run

    return {"nn.EmbeddingBag, on the device": lookup(plain), "CachedEmbeddingBag": lookup(bag)}


def streams(device: torch.device) -> dict[str, Callable[[int], object]]:
    """Return a layer of streamed weights, and a token's keys and values of a layer."""
    side = 256
    packer = WeightPacker({f"{n}": [f"{n}.weight"] for n in range(LAYERS)})
    for n in range(LAYERS):
        packer.add(f"{n}.weight", (0.02 * torch.randn(side, side)).to(torch.bfloat16))
    stream = WeightStream(packer.finish(), device=device)

    def layer(i: int) -> None:
        unit = stream.units[i % LAYERS]
        stream.acquire(unit)
        stream.release(unit)

    return {"WeightStream: a layer": layer}


def tokens(device: torch.device) -> dict[str, Callable[[int], object]]:
    """Return reads of a layer's packed keys and values with one more token."""
    from transformers import DynamicCache, LlamaConfig

    from bitslab.integrations.transformers import CompressedCache

    heads, width = 8, 64
    config = LlamaConfig(
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        hidden_size=heads * width,
    )
    made = {
        "DynamicCache.update, a layer": DynamicCache(config=config),
        "CompressedCache.update, a layer": CompressedCache(config),
    }
    prompt = torch.randn(1, heads, TOKENS, width, dtype=torch.bfloat16, device=device)
    new = torch.randn(1, heads, 1, width, dtype=torch.bfloat16, device=device)
    ways: dict[str, Callable[[int], object]] = {}
    for name, cache in made.items():
        for n in range(LAYERS):
            cache.update(prompt, prompt, n)

        def token(i: int, cache: Any = cache) -> None:
            cache.update(new, new, i % LAYERS)

        ways[name] = token
    return ways


def main() -> int:
    """Measure all calls and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=found, help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=40, help="of a run (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=15, help="default: %(default)s")
    add_output(parser)
    arguments = parser.parse_args()
    device = torch.empty(0, device=arguments.device).device
    torch.manual_seed(0)
    ids = [torch.randint(ROWS, (IDS,)).to(device) for _ in range(arguments.calls)]
    table = []
    for make in (rows_by_id, lookups):
        for name, run in make(device, ids).items():
            taken = host_us(run, device, arguments.calls, arguments.runs)
            table.append({"call": name, "host us": taken})
    for make_more in (streams, tokens):
        for name, run in make_more(device).items():
            taken = host_us(run, device, arguments.calls, arguments.runs)
            table.append({"call": name, "host us": taken})
    title = f"Host time of a call on {arguments.device}, {IDS} ids of {2 * WIDTH} B"
    print_tables({title: table}, arguments.json, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
