"""Lossless tiles: every bit comes back, and codes are learnt from a sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bitslab
from bitslab.engine.codecs import TileCodec
from bitslab.engine.codecs.quantized import fit_lossless, fit_tiles, quantise
from bitslab.engine.codecs.quantized.config import plan_problem
from bitslab.engine.kernels.tile_format import (
    ESCAPE_SYMBOL,
    MAX_CODE_BITS,
    SHORT_BITS,
    TILE_BLOCK,
    Granularity,
    TileFormat,
)
from tests.engine.codecs.test_tiles import any_plan, any_rows, lossless_formats
from tests.helpers import dtype_id, same_bits

by_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)


def spread(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return values whose channels, the last dimension, are of several sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(3 * torch.randn(shape[-1], generator=generator))
    return (torch.randn(*shape, generator=generator) * sizes).to(dtype)


@by_dtype
@pytest.mark.parametrize("token_pairs", [False, True])
def test_every_bit_pattern_comes_back_coded_and_raw(dtype: torch.dtype, token_pairs: bool) -> None:
    usual = spread(dtype, 32, 64, 128)
    codec = TileCodec.fit(usual, granularity="lossless", token_pairs=token_pairs, heads=2)
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    rows = usual.repeat(8, 1, 1)
    mixed = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(1))
    rows.view(-1)[::32] = patterns[mixed]  # so few in each tile that it remains coded
    packed = codec.encode(rows)
    assert bool((packed.parts["lengths"] > 0).all())
    assert same_bits(codec.decode(packed), rows)
    rows = patterns[mixed].view(8, 64, 128)
    packed = codec.encode(rows)
    assert not packed.parts["lengths"].any()
    assert same_bits(codec.decode(packed), rows)


@settings(max_examples=60)
@given(lossless_formats, st.integers(0, 1 << 30))
def test_any_rows_come_back_by_any_plan(fmt: TileFormat, seed: int) -> None:
    codec = TileCodec(any_plan(seed, fmt, heads=2, rows_per_head=1))
    rows = any_rows(seed, 5, fmt)
    assert same_bits(codec.decode(codec.encode(rows)), rows)
    assert not codec.bounds(rows).any()


@by_dtype
def test_a_fit_is_the_same_each_time_and_for_values_in_any_order_of_tokens(
    dtype: torch.dtype,
) -> None:
    sample = spread(dtype, 2, 3, 192, 64)
    first, again, shuffled = (
        fit_lossless(x, tile_tokens=64, token_pairs=False)
        for x in (sample, sample.clone(), sample[:, :, torch.randperm(192)])
    )
    for name in ("order", "block_class", "radius", "lengths"):
        assert (getattr(first, name) == getattr(again, name)).all()
        assert (getattr(first, name) == getattr(shuffled, name)).all()
    assert first.lengths.max() <= SHORT_BITS


def test_channels_of_one_size_share_codes_that_suit_them() -> None:
    sample = spread(torch.bfloat16, 2, 2, 640, 64)
    sample[:, 1, :, ::2] *= 1024
    plan = fit_lossless(sample, tile_tokens=64, token_pairs=True)
    size = sample.float().abs().log2().clamp(-40, 40).mean(dim=(0, 2))
    for head, order in enumerate(plan.order):
        placed = size[head][torch.from_numpy(order.astype(np.int64))]
        by_block = placed.view(-1, TILE_BLOCK)
        assert bool((by_block[:-1].amax(1) <= by_block[1:].amin(1) + 0.5).all())
    codec = TileCodec(plan)
    rows = sample.view(2, 2, 10, 64, 64).transpose(1, 2).reshape(-1, 64, 64)
    share = float(codec.packed_bytes(rows).sum()) / rows.nbytes
    field = sample.view(torch.int16).int().bitwise_right_shift(7).bitwise_and(255)
    bits = 0.0
    for channel in range(64):
        for head in range(2):
            counted = field[:, head, :, channel].flatten().bincount().double()
            likely = counted[counted > 0] / counted.sum()
            bits -= float((likely * likely.log2()).sum()) / 128
    assert share < (8 + bits) / 16 + 0.05


SAMPLES = {
    "flat": lambda: torch.rand(1, 2, 64, 32) * 2 - 1,
    "narrow": lambda: (torch.rand(1, 2, 64, 32) + 0.5) * 0.5,
    "tiny": lambda: torch.randn(1, 2, 64, 32) * 1e-7,
    "constant": lambda: torch.full((1, 2, 64, 32), 0.3),
    "one exponent": lambda: 1 + torch.rand(1, 2, 64, 32) * 0.99,
    "zeros": lambda: torch.zeros(1, 2, 64, 32),
    "all sizes": lambda: torch.exp2(28 * torch.rand(1, 2, 64, 32) - 14),
    "no numbers": lambda: torch.full((1, 2, 64, 32), torch.nan),
}


@pytest.mark.drawn(50)
@by_dtype
@pytest.mark.parametrize("code_bits", range(1, MAX_CODE_BITS + 1))
@pytest.mark.parametrize("kind", SAMPLES)
def test_a_fit_to_any_sample_is_sound_and_codes_it(
    dtype: torch.dtype, code_bits: int, kind: str
) -> None:
    torch.manual_seed(code_bits)
    sample = SAMPLES[kind]().to(dtype)
    plan = fit_lossless(sample, tile_tokens=32, token_pairs=True, code_bits=code_bits)
    assert plan_problem(plan) is None
    assert plan.lengths[:, ESCAPE_SYMBOL].all()
    rows = sample.reshape(1, 2, 2, 32, 32).transpose(1, 2).reshape(-1, 32, 32)
    rows = torch.cat([rows, spread(dtype, 2, 32, 32)])
    codec = TileCodec(plan)
    assert same_bits(codec.decode(codec.encode(rows)), rows)


def test_values_that_are_not_finite_and_rare_symbols_alone_are_exceptions() -> None:
    rows = spread(torch.bfloat16, 4, 64, 64)
    codec = TileCodec.fit(rows, granularity="lossless")
    exceptions = []
    for changes in ({}, {7: float("nan")}, {7: float("inf"), 9: float("-inf"), 4095: 3e38}):
        tile = rows[:1].clone()
        for at, value in changes.items():
            tile.view(-1)[at] = value
        packed = codec.encode(tile)
        assert same_bits(codec.decode(packed), tile)
        exceptions.append(int(packed.parts["words"][0]) >> 16)
    assert [e - exceptions[0] for e in exceptions] == [0, 1, 3]


def test_what_lossless_tiles_do_not_take_is_refused() -> None:
    x = torch.randn(6, 16, 32)
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (x, {}, "dtype: torch.float32, accepted for lossless tiles"),
        (x.half(), {"coder": "fixed"}, "coder: 'fixed'"),
        (x.half(), {"weights": torch.ones(1, 32)}, "weights: given"),
        (x.half(), {"code_bits": 11}, "code_bits: 11"),
    ]
    for sample, options, says in refused:
        with pytest.raises(bitslab.ArgumentError, match=says):
            TileCodec.fit(sample, granularity="lossless", **options)
    codec = TileCodec.fit(x.half(), granularity="lossless")
    paired = {**vars(codec.plan), "radius": codec.plan.radius + np.uint8(1)}
    with pytest.raises(bitslab.ArgumentError, match="plan: radius is .* single codes alone"):
        TileCodec(type(codec.plan)(**paired))
    with pytest.raises(bitslab.ArgumentError, match="granularity: LOSSLESS"):
        fit_tiles(
            x.half()[None],
            tile_tokens=16,
            granularity=Granularity.LOSSLESS,
            token_pairs=False,
            scale=1.0,
        )
    with pytest.raises(bitslab.ArgumentError, match="granularity: LOSSLESS"):
        quantise(x.half()[None], codec.tables())
    assert codec.plan.lengths[:, ESCAPE_SYMBOL].all()
