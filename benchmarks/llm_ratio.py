"""Packed sizes of MiniLM's weights, keys and values, all metadata counted."""

from __future__ import annotations

from typing import Any

import llm_minilm
import torch
from llm_workload import Rows, left_out

from bitslab import InvariantCodec
from bitslab.dtypes import dtype_name
from bitslab.kvcache.packing import TokenRows, draw_rows
from bitslab.offload import WeightPacker

#: The least that each should save, in percent.
WEIGHTS = {torch.bfloat16: 28.8, torch.float32: 14.3}
CACHE = {torch.bfloat16: 28.0}
PUBLISHED: dict[str, Any] = {
    "chunk_bytes": 4,
    "code_bits": 1,
    "grouped": False,
    "uniform": False,
}
LINES, TOKENS = 16, 256


def run() -> dict[str, Rows]:
    """Return one table for weights and one for keys and values."""
    try:
        llm_minilm.folder()
    except FileNotFoundError as error:
        left_out("MiniLM", error)
        return {}
    return {
        "MiniLM, all 2-D weights": [_weights(dtype) for dtype in WEIGHTS],
        f"MiniLM, keys and values of {LINES} x {TOKENS} tokens of text": [
            row for dtype in (torch.bfloat16, torch.float32) for row in _cache(dtype)
        ],
    }


def _weights(dtype: torch.dtype) -> dict[str, Any]:
    model = llm_minilm.load(dtype)
    named = {name: p.detach() for name, p in model.named_parameters() if p.dim() == 2}
    with WeightPacker({name: [name] for name in named}) as packer:
        for name, weight in named.items():
            packer.add(name, weight)
        weights = packer.finish()
    for name, weight in named.items():
        if not torch.equal(weights.read(name).view(torch.uint8), weight.view(torch.uint8)):
            raise SystemExit(f"{name}: decoded weights differ")
    saved = 100 * (1 - weights.nbytes / weights.raw_nbytes)
    row = {
        "dtype": dtype_name(dtype),
        "tensors": len(named),
        "raw MB": weights.raw_nbytes / 1e6,
        "packed MB": weights.nbytes / 1e6,
        "ratio": weights.ratio,
        "saved %": saved,
        "asked": _verdict(saved, WEIGHTS[dtype]),
    }
    weights.close()
    return row


def _cache(dtype: torch.dtype) -> Rows:
    """Fit the codec on one batch of text, as a prompt, and pack another with it."""
    model = llm_minilm.load(dtype)
    prompt = llm_minilm.keys_and_values(model, llm_minilm.batch(LINES, TOKENS))
    later = llm_minilm.keys_and_values(model, llm_minilm.batch(LINES, TOKENS, seed=1))
    found = []
    for which, data in (("prompt", prompt), ("other text", later)):
        for name, at in (("keys", 0), ("values", 1), ("both", None)):
            raw = packed = published = 0
            for fitted, layer in zip(prompt, data, strict=True):
                for part in (0, 1) if at is None else (at,):
                    sizes = _sizes(fitted[part], layer[part])
                    raw, packed, published = (
                        total + size
                        for total, size in zip((raw, packed, published), sizes, strict=True)
                    )
            saved = 100 * (1 - packed / raw)
            row = {
                "dtype": dtype_name(dtype),
                "profile from": "prompt",
                "data": which,
                "part": name,
                "raw MB": raw / 1e6,
                "saved %": saved,
                "published options %": 100 * (1 - published / raw),
            }
            if at is None and dtype in CACHE:
                row["asked"] = _verdict(saved, CACHE[dtype])
            found.append(row)
    return found


def _sizes(prompt: torch.Tensor, tokens: torch.Tensor) -> tuple[int, int, int]:
    """Return raw and packed bytes of tokens, and those with the options of the published IBP.

    Rows and the sample are those of the cache; offsets, lengths and the profile are counted.
    """
    _, heads, _, dim = prompt.shape
    layout = TokenRows(heads, dim, prompt.dtype, block_tokens=64)
    sample, rows = draw_rows(layout, prompt), layout.rows_of(tokens)
    sizes = []
    for options in ({}, PUBLISHED):
        codec = InvariantCodec.fit(sample, n_rows=len(rows), **options)
        sizes.append(
            int(codec.packed_bytes(rows).sum())
            + codec.row_metadata_bytes(len(rows))
            + codec.profile_bytes
        )
    return tokens.nbytes, sizes[0], sizes[1]


def _verdict(saved: float, asked: float) -> str:
    return f">= {asked:g} %: {'ok' if saved >= asked else 'missed'}"
