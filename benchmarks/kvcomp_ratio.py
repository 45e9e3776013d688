"""Bytes that K and V of trained models take at an error of attention, all metadata counted."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import llm_minilm
import torch
from kvcomp_states import (
    ERROR,
    POSITIONS,
    SINKS,
    TILE_TOKENS,
    WINDOW,
    Attended,
    attended,
    smollm2,
    text,
)
from llm_workload import Rows, left_out
from textgen.compared import PUBLISHED
from textgen.rounded import PEERS, Peer, kivi

from bitslab.engine.codecs.quantized import TileCodec, TilePlan, fit_error, fit_tiles
from bitslab.engine.kernels.tile_format import Granularity
from bitslab.integrations.transformers import KVCompCache
from bitslab.integrations.transformers.handles import update_of
from bitslab.integrations.transformers.kvcomp_layer import KVCompLayer, LayerUpdate

Row = dict[str, Any]
#: The least ratio at an error of attention.
ASKED = {0.04: 4.5, 0.10: 6.6, 0.16: 8.0}
#: The same of MiniLM, whose K and V are all packed.
MINILM_ASKED = {0.093: 4.3, 0.31: 7.0}
#: Tokens of the ratio's tables by device, the first of all rows (figure 8 of the paper).
CONTEXTS = {"cpu": (2048, 4096, 8192), "cuda": (2048, 4096, 8192, 16384, 32768)}
#: MiniLM's text: lines and tokens.
LINES, TOKENS = 4, 512


def run(
    arguments: argparse.Namespace, scales: Sequence[tuple[float, float]], report: Any
) -> dict[str, Rows]:
    """Return the tables of SmolLM2 and, where it is installed, of MiniLM."""
    given = arguments.scales if arguments.scales is not None else scales
    tables = _smollm2(arguments, given, report)
    try:
        llm_minilm.folder()
    except FileNotFoundError as error:
        left_out("MiniLM", error)
        return tables
    return tables | _minilm(arguments)


# SmolLM2


def _smollm2(
    arguments: argparse.Namespace, scales: Sequence[tuple[float, float]], report: Any
) -> dict[str, Rows]:
    model = smollm2(arguments.device)
    contexts = arguments.contexts or CONTEXTS[arguments.device.type]
    ids = text(max(contexts), arguments.device)
    model.set_attn_implementation("bitslab")
    caches: dict[str, Callable[[], KVCompCache]] = {}
    ours = partial(KVCompCache, model.config, sinks=SINKS, window=WINDOW)
    for error in arguments.error:
        caches[f"KVCompCache, error {error:g}"] = partial(ours, error=error)
    for k, v in scales:
        caches[f"KVCompCache, scales {k:g} and {v:g}"] = partial(ours, key_scale=k, value_scale=v)
    if arguments.peers:
        caches |= {name: partial(ours, **options) for name, options in PUBLISHED.items()}
    first = contexts[0]
    layers = attended(model, ids[:, :first], torch.bfloat16)
    rows: Rows = []
    for done, (name, make) in enumerate(caches.items()):
        report(done, len(caches))
        row = {"cache": name, **packed_row(make(), layers)}
        for error, ratio in ASKED.items():
            if name == f"KVCompCache, error {error:g}":
                fine = row["ratio"] >= ratio and row["error"] <= error
                row["asked"] = f">= {ratio} at {error:g}: {'ok' if fine else 'missed'}"
        rows.append(_shown(row))
    if arguments.peers:
        for name, (of_keys, of_values) in _published_scales().items():
            rows.append(_shown({"cache": name, **entropy_row(layers, of_keys, of_values)}))
        rows += [_shown({"cache": name, **rounded_row(p, layers)}) for name, p in PEERS.items()]
    tables = {f"SmolLM2, 30 layers, {first:,} tokens: K and V in bfloat16": rows}
    if len(contexts) > 1:
        named = [f"KVCompCache, error {_default_error(arguments.error):g}", *PUBLISHED]
        shown = {name: caches[name] for name in named if name in caches}
        title = "SmolLM2: ratio over the context, and the error of attention"
        tables[title] = _context_rows(model, ids, contexts, shown, report)
    return tables


def _default_error(errors: Sequence[float]) -> float:
    """Return of these the one that is nearest to what KVCompCache aims at by default."""
    return min(errors, key=lambda error: abs(error - ERROR))


def _context_rows(
    model: Any,
    ids: torch.Tensor,
    contexts: Sequence[int],
    caches: Mapping[str, Callable[[], KVCompCache]],
    report: Any,
) -> Rows:
    rows: Rows = []
    for done, context in enumerate(sorted(contexts)):
        report(done, len(contexts))
        # Queries of the end of the context, as the fit needs them: a pass for each.
        layers = attended(model, ids[:, :context], torch.bfloat16)
        row: Row = {"context": context}
        if context > POSITIONS:
            row["rotations"] = f"slower, the model knows {POSITIONS:,} positions"
        for name, make in caches.items():
            found = packed_row(make(), layers)
            row[name.removeprefix("KVCompCache, ")] = found["ratio"]
            row[f"{name.removeprefix('KVCompCache, ')}: measured"] = found["error"]
        row["KIVI, 2 bits"] = 16 / kivi(2).bits
        rows.append(_shown(row))
    return rows


@torch.no_grad()
def packed_row(cache: KVCompCache, layers: Sequence[Attended]) -> Row:
    """Return what a cache takes and does that is given the K and V of a prompt."""
    errors: list[tuple[float, float, float]] = []
    for i, a in enumerate(layers):
        update = update_of(*cache.update(a.keys, a.values, i))
        assert isinstance(update, LayerUpdate)
        update.see(a.queries, None, {})
        layer = cache.layers[i]
        assert isinstance(layer, KVCompLayer)
        layer.settle()
        keys, values = (history.decode() for history in layer.histories)
        errors.append((a.error(keys, None), a.error(None, values), a.error(keys, values)))
    stats = cache.stats()
    k, v, both = (sum(each) / len(errors) for each in zip(*errors, strict=True))
    bits = [bits_of(cache, kind) for kind in (0, 1)]
    return {
        "error K": k,
        "error V": v,
        "error": both,
        "worst layer": max(each[2] for each in errors),
        "bits K": bits[0],
        "bits V": bits[1],
        "ratio": stats["packed_ratio"],
        "lossless layers": len(stats["lossless"]),
    }


def bits_of(cache: KVCompCache, kind: int) -> float:
    """Return the bits of a packed value of all layers' K, 0, or V, 1."""
    layers: list[Any] = list(cache.layers)
    stats = [layer.histories[kind].stats() for layer in layers]
    packed, raw = (
        sum(each[name] for each in stats) for name in ("packed_bytes", "packed_raw_bytes")
    )
    return float(8 * layers[0].dtype.itemsize * packed / raw)


# Peers


def _coded(a: Attended) -> slice:
    """Return the tokens that methods may round: whole tiles between the raw ones."""
    tiles = (a.keys.shape[2] - SINKS - WINDOW) // TILE_TOKENS
    return slice(SINKS, SINKS + tiles * TILE_TOKENS)


def rounded_row(peer: Peer, layers: Sequence[Attended]) -> Row:
    """Return what a peer's rounding does to the same tokens."""
    errors = []
    for a in layers:
        some, (keys, values) = _coded(a), (a.keys.clone(), a.values.clone())
        keys[:, :, some] = peer.keys(keys[:, :, some].float()).to(keys.dtype)
        values[:, :, some] = peer.values(values[:, :, some].float()).to(values.dtype)
        errors.append((a.error(keys, None), a.error(None, values), a.error(keys, values)))
    k, v, both = (sum(each) / len(errors) for each in zip(*errors, strict=True))
    worst = max(each[2] for each in errors)
    return {
        "error K": k,
        "error V": v,
        "error": both,
        "worst layer": worst,
        "bits K": peer.bits,
        "bits V": peer.bits,
        "ratio": 16 / peer.bits,
    }


def _published_scales() -> dict[str, tuple[tuple[int, float], tuple[int, float]]]:
    """Return settings of the paper by name: dims that a range is of, and step over range."""
    return {
        "block 0.05, token 0.15: entropy": ((2, 0.05), (1, 0.15)),
        "channel 0.25, token 0.15: entropy": ((0, 0.25), (1, 0.15)),
    }


def entropy_row(
    layers: Sequence[Attended], of_keys: tuple[int, float], of_values: tuple[int, float]
) -> Row:
    """Return the bits that an ideal coder needs for the paper's codes: a reference for ours.

    One table a layer for K and one for V, as published; ranges as two numbers of 16 bits.
    """
    bits = []
    for a in layers:
        some = _coded(a)
        pair = []
        for states, (kind, share) in ((a.keys, of_keys), (a.values, of_values)):
            blocks = states[:, :, some].float().unflatten(2, (-1, TILE_TOKENS))
            dims = {0: (-2,), 1: (-1,), 2: (-2, -1)}[kind]
            low, high = blocks.amin(dims, keepdim=True), blocks.amax(dims, keepdim=True)
            step = (share * (high - low)).clamp(min=1e-8)
            counts = ((blocks - low) / step).round().long().flatten().bincount().double()
            p = counts[counts > 0] / counts.sum()
            pair.append(float(-(p * p.log2()).sum()) + 32 * low.numel() / blocks.numel())
        bits.append(pair)
    k, v = (sum(each) / len(bits) for each in zip(*bits, strict=True))
    return {"bits K": k, "bits V": v, "ratio": 32 / (k + v)}


def _shown(row: Row) -> Row:
    print(json.dumps(row), file=sys.stderr)
    return row


# MiniLM


def _minilm(arguments: argparse.Namespace) -> dict[str, Rows]:
    model = llm_minilm.load(torch.float32)
    parts = llm_minilm.attention_inputs(model, llm_minilm.batch(LINES, TOKENS))
    layers = [
        Attended(q, k, v, causal=False)
        for q, k, v in ([x.to(arguments.device, torch.bfloat16) for x in each] for each in parts)
    ]
    rows: Rows = []
    for error, ratio in MINILM_ASKED.items():
        row = {"cache": f"error {error:g}", **_tiles_row(layers, partial(_fit_error, error=error))}
        fine = row["ratio"] >= ratio and row["error"] <= 1.02 * error
        row["asked"] = f">= {ratio} at {error:g}: {'ok' if fine else 'missed'}"
        rows.append(_shown(row))
    if arguments.peers:
        fits = {
            "published, block 0.05, token 0.15": (Granularity.BLOCK_RANGE, 0.05, 0.15),
            "published, channel 0.1, token 0.1": (Granularity.CHANNEL_RANGE, 0.1, 0.1),
        }
        for name, (granularity, k, v) in fits.items():
            fit = partial(_fit_ranges, granularity=granularity, key_scale=k, value_scale=v)
            rows.append(_shown({"cache": name, **_tiles_row(layers, fit)}))
        for name, peer in PEERS.items():
            if peer.bits > 3 or "KIVI" in name:
                rows.append(_shown({"cache": name, **_whole_row(layers, peer)}))
    return {f"MiniLM, heads of 32, {LINES} x {TOKENS} tokens, all of them packed": rows}


def _fit_error(a: Attended, *, error: float) -> tuple[TilePlan, TilePlan]:
    found = fit_error(
        a.keys, a.values, a.queries, error=error, tile_tokens=TILE_TOKENS, sinks=0, window=0
    )
    if found is None:
        raise SystemExit(f"MiniLM: no steps keep the error of attention under {error}")
    return found.keys, found.values


def _fit_ranges(
    a: Attended, *, granularity: Granularity, key_scale: float, value_scale: float
) -> tuple[TilePlan, TilePlan]:
    k = fit_tiles(
        a.keys, tile_tokens=TILE_TOKENS, granularity=granularity, token_pairs=False, scale=key_scale
    )
    v = fit_tiles(
        a.values,
        tile_tokens=TILE_TOKENS,
        granularity=Granularity.TOKEN_RANGE,
        token_pairs=True,
        scale=value_scale,
    )
    return k, v


def _tiles_row(
    layers: Sequence[Attended], fit: Callable[[Attended], tuple[TilePlan, TilePlan]]
) -> Row:
    """Return what the tiles of all tokens take, with the plans' own tables, and their error."""
    errors, sizes = [], [0, 0]
    for a in layers:
        decoded = []
        for i, (states, plan) in enumerate(zip((a.keys, a.values), fit(a), strict=True)):
            codec = TileCodec(plan, (TILE_TOKENS * states.shape[3],))
            tiles = states.unflatten(2, (-1, TILE_TOKENS)).transpose(1, 2)
            packed = codec.encode(tiles.reshape(-1, TILE_TOKENS * states.shape[3]))
            sizes[i] += packed.nbytes + codec.profile_bytes
            back = codec.decode(packed).view(tiles.shape).transpose(1, 2)
            decoded.append(back.reshape(states.shape))
        keys, values = decoded
        errors.append((a.error(keys, None), a.error(None, values), a.error(keys, values)))
    k, v, both = (sum(each) / len(errors) for each in zip(*errors, strict=True))
    values_of_all = sum(a.keys.numel() for a in layers)
    return {
        "error K": k,
        "error V": v,
        "error": both,
        "worst layer": max(each[2] for each in errors),
        "bits K": 8 * sizes[0] / values_of_all,
        "bits V": 8 * sizes[1] / values_of_all,
        "ratio": 4 * values_of_all / sum(sizes),
    }


def _whole_row(layers: Sequence[Attended], peer: Peer) -> Row:
    """Return what a peer does to all tokens."""
    errors = []
    for a in layers:
        keys, values = peer.keys(a.keys.float()), peer.values(a.values.float())
        errors.append((a.error(keys, None), a.error(None, values), a.error(keys, values)))
    k, v, both = (sum(each) / len(errors) for each in zip(*errors, strict=True))
    return {
        "error K": k,
        "error V": v,
        "error": both,
        "worst layer": max(each[2] for each in errors),
        "bits K": peer.bits,
        "bits V": peer.bits,
        "ratio": 16 / peer.bits,
    }
