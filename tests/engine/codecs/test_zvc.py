"""Zero-value compression: its sizes, and both ways of its kernels on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

import bitslab
from bitslab.engine.codecs import Blob, ZvcCodec
from bitslab.engine.kernels.blob_format import (
    ALIGN_BYTES,
    HEADER_BYTES,
    ZVC_BLOCK_BYTES,
    ZVC_UNIT_BYTES,
    ZvcLayout,
)
from bitslab.engine.kernels.cpu import bytefields, zero_values
from tests.helpers import same_bits


def sparse(n: int, dtype: torch.dtype, zeros: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    t = torch.randn(n, generator=generator).to(dtype)
    t[torch.rand(n, generator=generator) < zeros] = 0
    return t


@pytest.mark.parametrize(
    ("dtype", "zeros", "times"),
    [
        (torch.float32, 0.5, 1.86),
        (torch.float32, 0.9, 7.4),
        (torch.bfloat16, 0.5, 1.76),
        (torch.bfloat16, 0.9, 6.0),
    ],
    ids=str,
)
def test_sizes_are_near_the_ideal(dtype, zeros, times):
    t = sparse(1 << 20, dtype, zeros)
    blob = ZvcCodec().encode(t)
    assert blob.raw_nbytes / blob.nbytes >= times
    kept = int((t != 0).sum())
    ideal = t.numel() / 8 + kept * t.element_size()
    assert ideal < blob.nbytes < 1.01 * ideal


def test_every_bit_pattern_but_zero_is_kept():
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    for dtype in (torch.bfloat16, torch.float16, torch.int16):
        t = patterns.view(dtype)
        blob = ZvcCodec().encode(t)
        assert same_bits(ZvcCodec().decode(blob), t)
        layout = ZvcLayout.of(t.shape, dtype)
        words = blob.data[layout.bitmap_at :][: 4 * layout.bitmap_words].numpy()
        assert np.unpackbits(words).sum() == (1 << 16) - 1  # -0.0 is not zero


def test_bools_are_bits_and_other_bytes_in_them_are_kept():
    t = torch.rand(100_000) < 0.5
    blob = ZvcCodec().encode(t)
    assert blob.nbytes <= t.numel() / 8 + HEADER_BYTES + ALIGN_BYTES
    assert same_bits(ZvcCodec().decode(blob), t)
    odd = t.to(torch.uint8)
    odd[70_000] = 2
    odd = odd.view(torch.bool)
    assert same_bits(ZvcCodec().decode(ZvcCodec().encode(odd)), odd)


def test_tensors_of_32_gib_are_refused():
    codec = ZvcCodec()
    assert codec.max_encoded_bytes([(1 << 33) - 4], torch.float32) > 1 << 35
    with pytest.raises(bitslab.ArgumentError, match="less than 32 GiB"):
        codec.max_encoded_bytes([1 << 33], torch.float32)


def test_every_start_and_the_end_are_checked():
    t = sparse(3 * ZVC_BLOCK_BYTES // 4, torch.float32, 0.5)
    good = ZvcCodec().encode(t).trimmed()
    layout = ZvcLayout.of(t.shape, t.dtype)
    for place in (*range(layout.starts_at, layout.bitmap_at - 4), 0, 1):
        data = good.data.clone()
        data[place] ^= 64
        with pytest.raises(bitslab.CorruptedDataError, match="blob: "):
            ZvcCodec().decode(Blob(data, t.shape, t.dtype))


def there_and_back(vectors: bool) -> Any:
    """Return a function that compresses all words of 32 elements, and expands them again."""
    compress_word, expand_word = zero_values.compressor(vectors), zero_values.expander(vectors)
    word_of: Any = zero_values.word_of

    @njit
    def run(x, kept, out):
        taken = count = 0
        for i in range(0, len(x), 32):
            count += compress_word(x, i, kept, count)
        for i in range(0, len(x), 32):
            taken += expand_word(word_of(x, i), kept, taken, out, i)
        return count, taken

    return run


@pytest.mark.drawn(2)
@pytest.mark.parametrize("unit_bytes", ZVC_UNIT_BYTES)
def test_words_are_alike_with_and_without_vectors(unit_bytes):
    """What serves processors without AVX-512, and what serves those with it."""
    dtype = np.dtype(f"u{unit_bytes}")
    rng = np.random.default_rng(unit_bytes)
    x = rng.integers(1, 1 << (8 * unit_bytes - 1), 64 * 8, dtype=np.int64).astype(dtype)
    for i in range(8):
        x[64 * i : 64 * (i + 1)][rng.random(64) < i / 7] = 0
    for vectors in [False, True] if bytefields.available() else [False]:
        kept, out = np.zeros(len(x) + 32, dtype), np.full_like(x, 7)
        count, taken = there_and_back(vectors)(x, kept, out)
        assert count == taken == np.count_nonzero(x)
        assert (kept[:count] == x[x != 0]).all() and (out == x).all()
