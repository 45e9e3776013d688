"""Rows of which equal ones are kept once: references, bounds, and every damaged byte refused."""

from __future__ import annotations

import math
from typing import Any, cast

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bitslab
from bitslab.engine.codecs import Blob, BoundedVectorCodec, VectorLzCodec
from bitslab.engine.codecs.blob import HEADER_BYTES
from bitslab.engine.codecs.vectors import (
    decode_body,
    decoding,
    encode_body,
    encoding,
    finite_range,
)
from bitslab.engine.kernels.cpu import floats, vectors
from bitslab.engine.kernels.vector_format import (
    KINDS,
    WINDOWS,
    BodyHeader,
    References,
    RowCoding,
    raw_body_bytes,
)
from tests.helpers import same_bits
from tests.simt.module import guarded

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def header_of(blob: Blob) -> BodyHeader:
    found = BodyHeader.from_bytes(blob.data[HEADER_BYTES : HEADER_BYTES + 24].numpy().tobytes())
    assert found is not None
    return found


def rows_of(n: int, row: int, distinct: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(distinct, row, generator=generator)
    return table[torch.randint(distinct, (n,), generator=generator)]


def assert_within(t: torch.Tensor, codec: BoundedVectorCodec) -> torch.Tensor:
    found = codec.decode(codec.encode(t).trimmed())
    finite = t.isfinite()
    assert same_bits(found[~finite], t[~finite])
    assert bool(found[finite].isfinite().all())
    errors = (found[finite].double() - t[finite].double()).abs()
    assert bool((errors <= codec.bounds(t)[finite]).all())
    return found


def test_kinds_are_those_of_the_kernels():
    assert KINDS == {
        torch.bfloat16: floats.BFLOAT16,
        torch.float16: floats.FLOAT16,
        torch.float32: floats.FLOAT32,
    }


# References


def test_a_row_that_repeats_is_kept_once():
    t = rows_of(2000, 64, 50)
    codec = VectorLzCodec()
    blob = codec.encode(t)
    assert header_of(blob).distinct_rows == 50
    assert header_of(blob).references is References.CODED
    assert blob.raw_nbytes / blob.nbytes > 30
    assert torch.equal(codec.decode(blob), t)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_reference_reaches_back_as_far_as_its_window(window):
    apart = torch.randn(window + 1, 16)
    for distance, distinct in ((window, window), (window + 1, window + 1)):
        t = apart[torch.arange(3 * distance) % distance]
        blob = VectorLzCodec(window).encode(t)
        expected = distinct if distance <= window else len(t)
        assert header_of(blob).distinct_rows == expected
        assert torch.equal(VectorLzCodec(window).decode(blob), t)
        assert header_of(VectorLzCodec().encode(t)).distinct_rows == distance


def test_references_can_be_left_out():
    t = rows_of(500, 64, 5)
    assert header_of(VectorLzCodec(references=False).encode(t)).distinct_rows == 500
    with_them, without = (
        BoundedVectorCodec(0.01, references=r).encode(t).nbytes for r in (True, False)
    )
    assert without > 20 * with_them


def test_rows_with_equal_hashes_are_compared(monkeypatch):
    class Alike:
        """Gives all rows one hash."""

        def __init__(self, real: Any) -> None:
            self.__dict__.update(real.__dict__)

        @staticmethod
        def hash_rows(rows: Any, hashes: Any, begin: int, end: int) -> None:
            hashes[begin:end] = 7

    t = rows_of(300, 24, 40)
    expected = VectorLzCodec().encode(t).trimmed().data
    expected_window = VectorLzCodec(64).encode(t).trimmed().data
    real_call = getattr(encoding, "call")  # noqa: B009 - mypy: a name that it does not export
    alike = Alike(vectors)
    monkeypatch.setattr(encoding, "equal_rows", lambda: alike)
    monkeypatch.setattr(
        encoding,
        "call",
        lambda k, *a: k(*a) if k is Alike.hash_rows else real_call(k, *a),
    )
    assert torch.equal(VectorLzCodec().encode(t).trimmed().data, expected)
    assert torch.equal(VectorLzCodec(64).encode(t).trimmed().data, expected_window)


def test_signed_zeros_and_nan_payloads_are_not_made_equal():
    t = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [0.0, 1.0]]).repeat(50, 8)
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    t[::7, 3], t[1::7, 3] = nan[0], nan[1]
    assert same_bits(VectorLzCodec().decode(VectorLzCodec().encode(t)), t)


def test_quantised_rows_that_are_close_become_equal():
    t = rows_of(400, 32, 10)
    t += 1e-4 * torch.rand(t.shape, generator=torch.Generator().manual_seed(1))
    assert header_of(VectorLzCodec().encode(t)).distinct_rows == 400
    assert header_of(BoundedVectorCodec(0.05).encode(t)).distinct_rows < 80


# Bounds


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bound", [1e-7, 1e-6, 1e-5, 1e-3, 0.03, 0.3, 1.0])
def test_every_element_is_within_the_bound(dtype, bound):
    generator = torch.Generator().manual_seed(3)
    info = torch.finfo(dtype)
    t = torch.randn(200, 33, generator=generator)
    wide = torch.exp2(torch.randint(-13, 13, t.shape, generator=generator)) * t
    edges = torch.tensor([info.max, info.min, info.tiny, info.tiny / 8, 0.0, -0.0, math.inf])
    mixed = t.clone()
    mixed[::9, ::5] = edges[torch.randint(len(edges), mixed[::9, ::5].shape, generator=generator)]
    mixed[5, 5] = math.nan
    for x in (t, wide, mixed, t * info.tiny, torch.full((40, 7), 2.5), t[:1], t[:, :1]):
        for relative in (False, True):
            assert_within(x.to(dtype), BoundedVectorCodec(bound, relative=relative))


@settings(max_examples=150, deadline=None)
@given(
    arrays.arrays(
        np.int32,
        st.tuples(st.integers(0, 20), st.integers(1, 9)),
        elements=st.integers(-(2**31), 2**31 - 1),
    ),
    st.sampled_from(FLOATS),
    st.floats(1e-40, 1e38),
    st.booleans(),
    st.sampled_from([None, 32, 255]),
)
def test_any_bits_are_within_any_bound(bits, dtype, bound, relative, window):
    row = bits.shape[1] * 4 // dtype.itemsize
    numbers = torch.tensor(bits.flatten().tolist(), dtype=torch.int32)
    t = numbers.view(dtype).view(len(bits), row)
    t = t.repeat_interleave(3, 0)
    assert_within(t, BoundedVectorCodec(bound, relative=relative, window=window))
    codec = VectorLzCodec(window)
    assert same_bits(codec.decode(codec.encode(t)), t)


def test_what_has_no_code_is_kept_by_its_bits():
    t = rows_of(300, 16, 300)
    t[7, 3], t[8, 0], t[299, 15] = math.nan, 1e30, -math.inf
    codec = BoundedVectorCodec(0.01)
    found = assert_within(t, codec)
    assert header_of(codec.encode(t)).outliers == 3
    assert same_bits(found[[7, 8, 299], [3, 0, 15]], t[[7, 8, 299], [3, 0, 15]])


def test_rows_with_outliers_are_no_references():
    t = torch.ones(50, 8)
    t[::2, 0] = 1e30
    t[::4, 0] = 2e30
    assert same_bits(assert_within(t, BoundedVectorCodec(0.01))[::2, 0], t[::2, 0])


def test_codes_of_many_values_are_fixed_fields():
    t = torch.rand(100, 64, generator=torch.Generator().manual_seed(2))
    fine = BoundedVectorCodec(1e-4, relative=True).encode(t)
    assert header_of(fine).coding is RowCoding.FIXED
    coarse = BoundedVectorCodec(0.03, relative=True).encode(torch.randn(500, 64))
    assert header_of(coarse).coding is RowCoding.HUFFMAN


def test_the_range_is_that_of_finite_elements():
    t = torch.tensor([math.nan, -2.0, 5.0, math.inf, -math.inf])
    assert finite_range(t) == (-2.0, 5.0)
    assert finite_range(t[:1]) == (math.inf, -math.inf)
    assert finite_range(t.bfloat16()) == (-2.0, 5.0)
    assert finite_range(torch.empty(0)) == (math.inf, -math.inf)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("values", [(-3.0, -0.5), (0.25, 8.0), (-0.0, 0.0), (-1e-40, 1e-40)])
def test_the_range_is_that_of_any_signs(dtype, values):
    odd = [-math.inf, math.nan, -math.nan, math.inf]
    t = torch.tensor([*odd, *values[::-1], *odd, *values]).to(dtype)
    expected = tuple(torch.tensor(values).to(dtype).tolist())
    assert finite_range(t) == expected


def test_noise_is_kept_raw():
    t = torch.randint(0, 256, (100, 64), dtype=torch.uint8)
    blob = VectorLzCodec().encode(t)
    assert blob.nbytes == HEADER_BYTES + raw_body_bytes(t.nbytes)
    assert torch.equal(VectorLzCodec().decode(blob), t)


def with_outliers(t: torch.Tensor) -> torch.Tensor:
    t[3, 1], t[40, 2], t[41, 0] = math.nan, math.inf, 3e4
    return t


#: Rows, bound and window by what their bodies have.
BODIES: dict[str, tuple[torch.Tensor, float, int | None]] = {
    "references by number": (rows_of(700, 16, 400), 0.03, None),
    "references that are coded": (rows_of(3000, 8, 9), 0.03, None),
    "references in a window": (rows_of(500, 16, 30), 0.03, 64),
    "no references": (rows_of(300, 40, 300), 0.1, -1),
    "outliers": (with_outliers(rows_of(700, 16, 400)), 0.03, None),
    "codes of many values": (rows_of(64, 50, 64), 1e-5, None),
    "codes of a bit": (torch.sign(rows_of(2000, 16, 1999)), 1.0, None),
    "one value": (torch.ones(40, 5), 0.5, None),
    "one value, no references": (torch.ones(40, 5), 0.5, -1),
    "one row": (rows_of(1, 3000, 1), 0.1, None),
}


@pytest.mark.drawn(10)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", BODIES)
def test_one_kernel_codes_as_several_threads_do(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, bound, window = BODIES[name]
    rows = rows.to(dtype)
    bodies, found, refused = [], [], []
    damaged = np.random.default_rng(len(name))
    for threads in (1, 2):
        for module in (encoding, decoding):
            monkeypatch.setattr(module, "threads_of", lambda *_, n=threads: n)
        out = np.zeros(raw_body_bytes(rows.nbytes), np.uint8)
        used = encode_body(
            rows, bound, None if window == -1 else window, out, references=window != -1
        )
        bodies.append(out[:used].tobytes())
        t = torch.empty_like(rows)
        decode_body(out[:used], t, bounded=True)
        found.append(t)
    assert bodies[0] == bodies[1] and len(bodies[0]) < rows.nbytes
    assert same_bits(*found)
    finite = rows.isfinite()
    assert bool(((found[0].double() - rows.double()).abs()[finite] <= bound).all())
    for _ in range(30):
        body = np.frombuffer(bodies[0], np.uint8).copy()
        body[damaged.integers(len(body))] ^= 1 << int(damaged.integers(8))
        body = body[: len(body) - int(damaged.integers(6)) * int(damaged.integers(2))]
        for threads in (1, 2):
            monkeypatch.setattr(decoding, "threads_of", lambda *_, n=threads: n)
            t = torch.full_like(rows, 7)
            try:
                decode_body(body, t, bounded=True)
                refused.append("")
            except bitslab.CorruptedDataError as error:
                refused.append(str(error))
                assert bool((t == 7).all())
            found.append(t)
        assert refused[-1] == refused[-2] and same_bits(found[-1], found[-2])
    assert any(refused)


def test_large_tensors_are_coded_by_several_threads():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        t = rows_of(20000, 64, 9000)
        several = [c.encode(t).trimmed().data for c in (VectorLzCodec(), BoundedVectorCodec(0.1))]
        assert torch.equal(VectorLzCodec().decode(VectorLzCodec().encode(t)), t)
        torch.set_num_threads(1)
        one = [c.encode(t).trimmed().data for c in (VectorLzCodec(), BoundedVectorCodec(0.1))]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(several, one, strict=True))
    assert_within(t, BoundedVectorCodec(0.1))


# Damage


DAMAGED = {
    "coded": (VectorLzCodec(), rows_of(200, 16, 3)),
    "index": (VectorLzCodec(), rows_of(60, 16, 45)),
    "window": (VectorLzCodec(32), rows_of(60, 16, 9)),
    "huffman": (BoundedVectorCodec(0.2), rows_of(70, 64, 60)),
    "fixed": (BoundedVectorCodec(1e-3), rows_of(40, 16, 30)),
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", DAMAGED)
def test_flipped_bytes_are_refused_or_give_wrong_values_alone(name):
    codec, t = DAMAGED[name]
    blob = codec.encode(t).trimmed()
    padded = torch.cat([blob.data, torch.zeros(-len(blob.data) % 16, dtype=torch.uint8)])
    data = guarded(padded)
    memory = torch.full((t.numel() + 2,), 7.0)
    out = memory[1:-1].view(t.shape)
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(3000):
        places = generator.integers(HEADER_BYTES, len(blob.data), generator.integers(1, 4))
        kept = data[places].clone()
        data[places] = torch.from_numpy(generator.integers(0, 256, len(places), dtype=np.uint8))
        memory[:] = 7
        try:
            codec.decode(Blob(data, t.shape, t.dtype), out)
        except bitslab.CorruptedDataError:
            refused += 1
            assert bool((memory == 7).all())
        assert memory[0] == memory[-1] == 7
        data[places] = kept
    assert refused > 50


# Arguments


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: VectorLzCodec(31), bitslab.ArgumentError, "window: 31, accepted are 32, 64"),
        (lambda: VectorLzCodec(True), bitslab.ArgumentError, "window: True"),
        (lambda: BoundedVectorCodec(0.0), bitslab.ArgumentError, "error_bound: 0.0, accepted"),
        (lambda: BoundedVectorCodec(math.nan), bitslab.ArgumentError, "error_bound: nan"),
        (lambda: BoundedVectorCodec(math.inf), bitslab.ArgumentError, "error_bound: inf"),
        (
            lambda: BoundedVectorCodec(cast(Any, "1")),
            bitslab.ArgumentTypeError,
            "error_bound: expected a f",
        ),
        (
            lambda: VectorLzCodec(references=cast(Any, 1)),
            bitslab.ArgumentTypeError,
            "references: expected",
        ),
        (
            lambda: BoundedVectorCodec(1.0, relative=cast(Any, 1)),
            bitslab.ArgumentTypeError,
            "relative: expected a bool",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_bad_options_are_refused(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)


def test_integers_have_no_bound():
    with pytest.raises(bitslab.ArgumentTypeError, match="t: dtype torch.int64 is not"):
        BoundedVectorCodec(0.1).encode(torch.arange(4))
