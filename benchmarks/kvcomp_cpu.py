"""Coded tiles on one core of a CPU: encode and decode, beside the lossless codec and roundings."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from llm_workload import Rows
from textgen.rounded import kivi
from timing import cpu_seconds_in_turn

from bitslab.engine.codecs.invariant.codec import InvariantCodec
from bitslab.engine.codecs.quantized import TileCodec, fit_tiles
from bitslab.engine.kernels.tile_format import Granularity

#: Heads and head_dim of SmolLM2, and of Llama 3.
SHAPES = ((3, 64), (8, 128))
TOKENS, TILE_TOKENS = 2048, 64
#: Steps over rms of K's channels and of V's tokens: those of an error of about 0.1.
SCALES = {"K": 1.0, "V": 1.0}
#: Asked: MB/s of bfloat16 a core.
ENCODE_MB_S, DECODE_MB_S = 60, 150


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Return the table."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [
            _row(side, heads, dim, arguments.repetitions)
            for heads, dim in SHAPES
            for side in ("K", "V")
        ]
    finally:
        torch.set_num_threads(threads)
    return {f"Coded tiles on one CPU core, {TOKENS:,} tokens in bfloat16": rows}


def _states(side: str, heads: int, dim: int, seed: int) -> torch.Tensor:
    """Return normal values of channels that are spread differently, ``[1, H, TOKENS, dim]``."""
    channels = torch.Generator().manual_seed(7)  # the same in every input
    width = torch.randn(1, heads, 1, dim, generator=channels).mul(0.5).exp()
    center = torch.randn(1, heads, 1, dim, generator=channels) if side == "K" else 0.0
    noise = torch.randn(1, heads, TOKENS, dim, generator=torch.Generator().manual_seed(seed))
    return (noise * width + center).to(torch.bfloat16)


def _row(side: str, heads: int, dim: int, repetitions: int) -> dict[str, Any]:
    inputs = [_states(side, heads, dim, seed) for seed in range(repetitions + 1)]
    plan = fit_tiles(
        inputs[0],
        tile_tokens=TILE_TOKENS,
        granularity=Granularity.CHANNEL if side == "K" else Granularity.TOKEN_LEVEL,
        token_pairs=side == "V",
        scale=SCALES[side],
    )
    codec = TileCodec(plan, (TILE_TOKENS * dim,))
    tiles = [x.unflatten(2, (-1, TILE_TOKENS)).transpose(1, 2).flatten(0, 2) for x in inputs]
    tiles = [x.reshape(-1, TILE_TOKENS * dim) for x in tiles]
    tokens = [x.transpose(1, 2).reshape(-1, dim) for x in inputs]
    lossless = InvariantCodec.fit(tokens[0], chunk_bytes=2, uniform=True)
    packed, kept = [codec.encode(x) for x in tiles], [lossless.encode(x) for x in tokens]
    for x, p in zip(tiles, packed, strict=True):
        apart = (codec.decode(p).double() - x.double()).abs()
        if not (apart <= codec.bounds(x)).all():
            raise SystemExit("a decoded value is beyond its bound")
    out, back = torch.empty_like(tiles[0]), torch.empty_like(tokens[0])
    peer = kivi(2)
    rounding = peer.keys if side == "K" else peer.values
    runs: dict[str, Callable[[int], object]] = {
        "encode": lambda i: codec.encode(tiles[i]),
        "decode": lambda i: codec.decode(packed[i], out=out),
        "lossless encode": lambda i: lossless.encode(tokens[i]),
        "lossless decode": lambda i: lossless.decode(kept[i], out=back),
        "KIVI rounding in torch": lambda i: rounding(inputs[i].float()),
    }
    seconds = cpu_seconds_in_turn(runs, repetitions)
    megabytes = inputs[0].nbytes / 1e6
    rates = {name: megabytes / each for name, each in seconds.items()}
    fine = rates["encode"] >= ENCODE_MB_S and rates["decode"] >= DECODE_MB_S
    return {
        "data": f"{side}, {heads} heads of {dim}",
        "ratio": inputs[0].nbytes / packed[0].nbytes,
        **{f"{name} MB/s": rate for name, rate in rates.items()},
        "encode / lossless": rates["encode"] / rates["lossless encode"],
        "decode / lossless": rates["decode"] / rates["lossless decode"],
        "asked": f">= {ENCODE_MB_S}, {DECODE_MB_S}: {'ok' if fine else 'missed'}",
    }
