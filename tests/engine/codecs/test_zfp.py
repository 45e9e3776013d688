"""zfp at a fixed rate: its stream is zfpy's, its errors are in their bounds."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
import zfpy
from hypothesis import given
from hypothesis import strategies as st

import bitslab
from bitslab.engine.codecs import ZfpCodec
from bitslab.engine.codecs.blob import HEADER_BYTES
from bitslab.engine.kernels import zfp_format
from bitslab.engine.kernels.kept_format import RAW
from tests.helpers import same_bits

BITS = (12, 13, 16, 20, 33, 47, 64, 100, 127)
SIZES = (1, 2, 3, 4, 6, 127, 5000)
NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


def values(kind: str, n: int) -> torch.Tensor:
    """float64 values: alike, half zeros, growing, or of all sizes that zfp itself can take."""
    generator = torch.Generator().manual_seed(n)
    t = torch.randn(n, generator=generator, dtype=torch.float64)
    if kind == "sparse":
        return t * (torch.rand(n, generator=generator) < 0.5)
    if kind == "smooth":
        return t.cumsum(0)
    if kind == "ranges":
        return t * torch.exp2(torch.randint(-60, 120, (n,), generator=generator).double())
    return t


def stream_of(t: torch.Tensor, bits: int) -> bytes:
    """Return the stream of a codec, which is not raw and keeps nothing after it."""
    codec = ZfpCodec(bits)
    blob = codec.encode(t).trimmed()
    assert blob.data[24:32].view(torch.int64).tolist() == [0]
    return blob.data[HEADER_BYTES:].numpy().tobytes()


def decoded_by_zfpy(stream: bytes, dtype: torch.dtype, n: int, bits: int) -> torch.Tensor:
    kind = zfpy.dtype_to_ztype(np.dtype(NUMPY[dtype]))
    return torch.from_numpy(zfpy._decompress(stream, kind, (n,), rate=bits / 4).reshape(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["alike", "sparse", "smooth", "ranges"])
def test_the_stream_is_that_of_zfpy_and_decodes_alike(dtype, kind):
    compared = 0
    for n in SIZES:
        t = values(kind, n).to(dtype)
        for bits in BITS:
            if zfp_format.stream_bytes(n, bits) >= t.nbytes:
                continue  # kept raw
            expected = zfpy.compress_numpy(t.numpy(), rate=bits / 4, write_header=False)
            assert stream_of(t, bits) == expected, (n, bits)
            found = ZfpCodec(bits).decode(ZfpCodec(bits).encode(t))
            theirs = decoded_by_zfpy(expected, dtype, n, bits)
            assert torch.equal(found, theirs), (n, bits)
            compared += 1
    assert compared >= 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_widened_and_rounded_once(dtype):
    t = values("sparse", 5000).to(dtype)
    for bits in (12, 16, 31, 48, 63):
        stream = stream_of(t, bits)
        assert stream == stream_of(t.float(), bits)
        exact = decoded_by_zfpy(stream, torch.float32, len(t), bits).double()
        found = ZfpCodec(bits).decode(ZfpCodec(bits).encode(t))
        # A value of float32 that lies between two of 16 bits may have been rounded to the middle.
        differ = found != exact.to(dtype)
        step = (found.double() - exact).abs() * 2 ** (7 if dtype == torch.bfloat16 else 10)
        assert differ.float().mean() < 0.01 and (step <= exact.abs() * 1.001 + 1e-6).all()


def test_sizes_are_shares_of_p():
    n = 1 << 16
    for dtype, most in ((torch.float32, 128), (torch.bfloat16, 64), (torch.float64, 256)):
        t = values("alike", n).to(dtype)
        for bits in (12, 32, 48):
            assert ZfpCodec(bits).encode(t).nbytes - HEADER_BYTES == t.nbytes * bits / most


# Bounds


def assert_in_bounds(t: torch.Tensor, bits: int) -> None:
    codec = ZfpCodec(bits)
    found, bounds = codec.decode(codec.encode(t)), codec.bounds(t)
    assert bounds.dtype == torch.float64 and bounds.shape == t.shape
    finite = t.isfinite()
    assert same_bits(found[~finite], t[~finite])
    assert found[finite].isfinite().all() and (bounds[~finite] == 0).all()
    errors = (found[finite].double() - t[finite].double()).abs()
    assert (errors <= bounds[finite]).all(), (errors - bounds[finite]).max()


def floats(dtype: torch.dtype) -> st.SearchStrategy[torch.Tensor]:
    """Tensors of any values, and of neighbours that are close in size."""
    width = 8 * dtype.itemsize
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    anything = arrays.arrays(
        np.dtype(f"i{dtype.itemsize}"),
        st.integers(1, 40),
        elements=st.integers(-(1 << (width - 1)), (1 << (width - 1)) - 1),
    ).map(lambda x: torch.from_numpy(x).view(integers).view(dtype))
    close = st.tuples(
        st.floats(-1, 1), st.integers(-1100, 1023), st.lists(st.floats(-1, 1), min_size=9)
    ).map(
        lambda given: torch.tensor(
            [math.ldexp(given[0] + x, given[1]) if given[1] < 1020 else x for x in given[2]],
            dtype=torch.float64,
        ).to(dtype)
    )
    return anything | close


@pytest.mark.parametrize("dtype", zfp_format.FLOAT_KINDS, ids=str)
def test_no_error_exceeds_its_bound(dtype):
    @given(floats(dtype), st.integers(12, 128))
    def errors_are_bound(t, bits):
        assert_in_bounds(t, bits)

    errors_are_bound()


@pytest.mark.parametrize("dtype", zfp_format.FLOAT_KINDS, ids=str)
def test_no_error_exceeds_its_bound_where_much_is_random(dtype):
    generator = torch.Generator().manual_seed(5)
    info = torch.finfo(dtype)
    scale = {torch.float16: 6, torch.float64: 1000}.get(dtype, 120)
    exponents = torch.randint(-scale, scale, (5000, 1), generator=generator).double()
    near = torch.exp2(exponents + torch.randint(-9, 2, (5000, 4), generator=generator))
    t = (torch.randn(5000, 4, generator=generator, dtype=torch.float64) * near).to(dtype)
    ends = torch.tensor([info.max, info.min, info.smallest_normal, info.tiny / 8, 0.0, -0.0])
    edge = ends.double()[torch.randint(6, (500, 4), generator=generator)].to(dtype)
    for bits in (12, 13, 15, 16, 18, 21, 25, 32, 48, 63, 64, 96, 127):
        for x in (t[t.isfinite().all(1)], edge):
            assert_in_bounds(x, bits)


def test_bounds_are_not_far_from_errors():
    t = values("alike", 1 << 14).float()
    for bits in (32, 64, 96):
        codec = ZfpCodec(bits)
        errors = (codec.decode(codec.encode(t)).double() - t.double()).abs()
        assert 0.02 < float(errors.max() / codec.bounds(t).max()) <= 1


# What is not finite


def test_what_is_not_finite_comes_back_bit_for_bit():
    t = values("alike", 9000).float()
    odd = torch.tensor([0x7FC00000, 0x7F800001, -1, 0x7F800000, -8388608], dtype=torch.int32)
    t.view(torch.int32)[torch.arange(5) * 1800 + 7] = odd
    blob = ZfpCodec(32).encode(t)
    assert blob.data[24:32].view(torch.int64).tolist() == [5]
    assert blob.nbytes < t.nbytes / 4 + 200
    assert_in_bounds(t, 32)
    # The stream is that of zeros in their place.
    other = ZfpCodec(32).encode(t.nan_to_num(0, 0, 0))
    assert torch.equal(
        blob.data[HEADER_BYTES : other.nbytes], other.data[HEADER_BYTES : other.nbytes]
    )


def test_too_much_that_is_not_finite_is_raw():
    t = torch.full((5000,), float("nan"))
    for codec, x in ((ZfpCodec(32), t), (ZfpCodec(64), t.bfloat16()), (ZfpCodec(128), t[:7])):
        blob = codec.encode(x)
        assert blob.data[24:32].view(torch.int64).tolist() == [RAW]
        assert blob.nbytes == HEADER_BYTES + x.nbytes
        assert same_bits(codec.decode(blob), x)


def test_a_tensor_that_would_not_shrink_is_exact():
    for t, bits in ((values("alike", 999).bfloat16(), 64), (values("alike", 999).float(), 128)):
        codec = ZfpCodec(bits)
        assert same_bits(codec.decode(codec.encode(t)), t)
        assert not codec.bounds(t).any()


# Arguments


def test_bits_outside_their_range_are_refused():
    for bits in (-1, 0, 11, 129):
        with pytest.raises(bitslab.ArgumentError, match=f"block_bits: {bits}, accepted are 12 to"):
            ZfpCodec(bits)
    wrongs: tuple[Any, ...] = (32.0, "32", True, None)
    for wrong in wrongs:
        with pytest.raises(bitslab.ArgumentTypeError, match="block_bits: expected an int"):
            ZfpCodec.fit(torch.zeros(4), block_bits=wrong)
    for config in ({"block_bits": 11}, {"block_bits": "32"}, {"block_bits": 32, "more": 1}):
        with pytest.raises(bitslab.CorruptedDataError, match="configuration"):
            ZfpCodec.from_config(config)


def test_integers_and_bools_are_never_lossy():
    codec = ZfpCodec(32)
    for dtype in (torch.int64, torch.bool, torch.uint8, torch.complex64):
        assert not codec.takes(dtype)
        with pytest.raises(bitslab.ArgumentTypeError, match="is not one that codec 'zfp' takes"):
            codec.encode(torch.zeros(8, dtype=dtype))


def test_a_blob_of_other_bits_is_refused():
    blob = ZfpCodec(32).encode(values("alike", 400).float())
    with pytest.raises(bitslab.CorruptedDataError, match="blob: its zfp form"):
        ZfpCodec(33).decode(blob)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_subnormal_values_are_decoded_where_torch_flushes_them(dtype):
    least = torch.finfo(dtype).smallest_normal
    t = (torch.arange(1, 257, dtype=torch.float64) * least / 200).to(dtype)
    codec = ZfpCodec(60)
    blob = codec.encode(t)
    expected = codec.decode(blob)
    assert ((expected != 0) & (expected < least)).sum() > 150
    assert torch.set_flush_denormal(True)
    try:
        found = codec.decode(blob)
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(found, expected)
