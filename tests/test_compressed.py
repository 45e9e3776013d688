"""compress, decompress, and CompressedTensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bitslab
from bitslab.engine.row_map import natural_row_elements, row_map
from tests.helpers import DTYPES, dtype_id, packable, random_bits, same_bits, take, traits

SHAPES = {
    "0-d": (),
    "one-element": (1,),
    "short-1-d": (5,),
    "1-d-with-tail": (1003,),
    "no-rows": (0, 7),
    "empty-1-d": (0,),
    "no-columns": (5, 0, 3),
    "one-row": (1, 50),
    "tiny-items": (1003, 3),
    "tiny-items-3-d": (301, 2, 3),
    "weights": (64, 96),
    "odd-columns": (40, 67),
    "kv": (2, 3, 17, 32),
    "narrow-kv": (3, 8, 5, 2),
}
CODECS = ["auto", "ibp", "raw"]


def shape_cases(*names: str) -> Any:
    chosen = {name: SHAPES[name] for name in names or SHAPES}
    return pytest.mark.parametrize("shape", chosen.values(), ids=chosen.keys())


# Round trips


@pytest.mark.pairwise(dtype=traits)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("make", [packable, random_bits], ids=["packable", "random"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_every_dtype_comes_back_bit_for_bit(
    dtype: torch.dtype, make: Callable[..., torch.Tensor], codec: str
) -> None:
    for shape in ((70, 40), (777,)):
        t = make(dtype, shape)
        ct = bitslab.compress(t, codec)
        assert same_bits(ct.decompress(), t)
        assert same_bits(bitslab.decompress(ct), t)


@pytest.mark.pairwise(dtype=traits)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.complex128], ids=dtype_id)
@shape_cases()
def test_every_shape_comes_back(shape: tuple[int, ...], dtype: torch.dtype, codec: str) -> None:
    t = packable(dtype, shape)
    ct = bitslab.compress(t, codec)
    assert ct.shape == t.shape
    assert ct.dtype == dtype
    assert ct.device == t.device
    assert ct.ndim == t.ndim
    assert ct.raw_nbytes == t.nbytes
    assert same_bits(ct.decompress(), t)


@pytest.mark.parametrize(
    "bits",
    [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001, 0x7F800000, 0xFF800000],
    ids=hex,
)
def test_special_floats_keep_their_bits(bits: int) -> None:
    pattern = torch.from_numpy(np.full((40, 16), bits, np.uint32).view(np.float32))
    mixed = torch.randn(40, 16)
    mixed[::3] = pattern[::3]
    for t in (pattern, mixed):
        for codec in CODECS:
            assert same_bits(bitslab.compress(t, codec).decompress(), t)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.T,
        lambda t: t[::3, 1::2],
        lambda t: t.flip(0),
        lambda t: t[5:6].expand(20, -1),
        lambda t: t[:, 3],
        lambda t: t.view(8, 8, 8, 12).permute(2, 0, 3, 1),
    ],
    ids=["transposed", "strided", "flipped", "expanded", "column", "permuted"],
)
def test_tensors_that_are_not_contiguous_work(view: Callable[..., torch.Tensor]) -> None:
    t = view(packable(torch.bfloat16, (64, 96)))
    ct = bitslab.compress(t)
    assert same_bits(ct.decompress(), t)
    assert same_bits(ct[2], t[2])


def test_conjugated_and_negated_views_work() -> None:
    t = packable(torch.complex64, (30, 20))
    assert same_bits(bitslab.compress(t.conj()).decompress(), t.conj())
    assert same_bits(bitslab.compress(t.conj().imag).decompress(), t.conj().imag)


def test_tensors_that_require_grad_work() -> None:
    parameter = torch.nn.Parameter(packable(torch.float32, (64, 32)))
    back = bitslab.compress(parameter).decompress()
    assert same_bits(back, parameter)
    assert not back.requires_grad


@pytest.mark.parametrize("codec", CODECS)
def test_later_changes_of_the_tensor_do_not_reach_the_packed_rows(codec: str) -> None:
    t = packable(torch.float32, (64, 32))
    before = t.clone()
    ct = bitslab.compress(t, codec)
    t.zero_()
    assert same_bits(ct.decompress(), before)
    ct.decompress().zero_()
    assert same_bits(ct.decompress(), before)


# Sizes


@pytest.mark.pairwise(dtype=traits)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@shape_cases()
def test_auto_is_never_larger_than_raw(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for make in (packable, random_bits):
        ct = bitslab.compress(make(dtype, shape))
        assert ct.nbytes <= ct.raw_nbytes
        assert ct.ratio >= 1


def test_what_cannot_be_packed_is_kept_raw_and_costs_nothing() -> None:
    ct = bitslab.compress(random_bits(torch.int32, (100, 64)))
    assert ct.codec.name == "raw"
    assert ct.nbytes == ct.raw_nbytes
    assert ct.ratio == 1


def test_nbytes_counts_everything() -> None:
    ct = bitslab.compress(packable(torch.float32, (500, 64)))
    assert isinstance(ct.codec, bitslab.InvariantCodec)
    parts = sum(t.nbytes for t in ct.packed.parts.values())
    assert ct.nbytes == parts + ct.codec.profile_bytes
    assert ct.ratio == ct.raw_nbytes / ct.nbytes > 1


def test_trained_weights_and_sparse_features_shrink() -> None:
    assert bitslab.compress(packable(torch.bfloat16, (512, 256))).ratio > 1.2
    features = torch.zeros(500, 300)
    features[torch.arange(500), torch.arange(500) % 300] = 0.25
    assert bitslab.compress(features).ratio > 20


# Rows


@pytest.mark.parametrize(
    ("shape", "itemsize", "expected"),
    [
        ((384, 1536), 4, 1536),
        ((30522, 16), 4, 16),
        ((2, 8, 100, 64), 2, 64),
        ((2, 8, 100, 16), 2, 1600),
        ((10, 4, 12), 4, 48),
        ((1000, 8), 4, 256),
        ((100, 2, 3), 4, 204),
        ((4096,), 4, 256),
        ((384,), 4, 192),
        ((3,), 4, 4),
        ((1, 5_000_000), 4, 250_000),
        ((7, 0), 4, 0),
        ((), 8, 1),
    ],
    ids=str,
)
def test_natural_rows(shape: tuple[int, ...], itemsize: int, expected: int) -> None:
    row = natural_row_elements(shape, itemsize)
    assert row == expected
    rows = row_map(shape, row)
    assert rows.filler_items < max(rows.items_per_row, 1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=4), st.sampled_from([1, 2, 4, 8, 16]))
def test_rows_cover_every_tensor(shape: list[int], itemsize: int) -> None:
    row = natural_row_elements(shape, itemsize)
    rows = row_map(shape, row)
    numel = int(np.prod(shape))
    assert numel <= rows.n_rows * row < numel + row
    # Rows are short of 64 bytes only where the tensor is.
    assert row * itemsize >= min(64, numel * itemsize)
    assert rows.rows_per_item == 1 or rows.items_per_row == 1


# Indexing


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=dtype_id)
@shape_cases("1-d-with-tail", "tiny-items", "tiny-items-3-d", "weights", "kv", "narrow-kv")
def test_indexing_gives_what_torch_gives(
    shape: tuple[int, ...], dtype: torch.dtype, codec: str
) -> None:
    t = packable(dtype, shape)
    ct = bitslab.compress(t, codec)
    n = len(t)
    assert len(ct) == n
    for i in (0, 1, n - 1, -1, -n):
        assert same_bits(ct[i], t[i])
    for part in (
        slice(None),
        slice(1, 2),
        slice(1, n - 1),
        slice(-2, None),
        slice(None, None, 2),
        slice(1, 1),
        slice(5, 2),
        slice(-10 * n, 10 * n, 3),
    ):
        assert same_bits(ct[part], t[part]), part
    assert same_bits(ct[::-1], t.flip(0))
    generator = torch.Generator().manual_seed(1)
    for index_shape in ((), (1,), (0,), (4,), (2, 3), (2, 0), (2 * n,)):
        ids = torch.randint(-n, n, index_shape, generator=generator)
        assert same_bits(ct[ids], t[ids]), index_shape
    mask = torch.arange(n) % 2 == 1
    assert same_bits(ct[mask], t[mask])
    assert same_bits(ct[[0, -1, 1]], t[[0, -1, 1]])
    assert same_bits(ct[[[0, -1], [1, 1]]], t[torch.tensor([[0, -1], [1, 1]])])
    assert same_bits(ct[[]], t[torch.empty(0, dtype=torch.int64)])
    assert same_bits(ct[mask.tolist()], t[mask])
    assert same_bits(ct[np.int32(1)], t[1])
    assert same_bits(ct[np.array([1, 0])], t[[1, 0]])
    assert all(same_bits(a, b) for a, b in zip(ct[:3], t[:3], strict=True))


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=dtype_id
)
def test_every_integer_dtype_indexes(dtype: torch.dtype) -> None:
    t = packable(torch.float32, (50, 32))
    ids = torch.tensor([3, 0, 49, 3], dtype=dtype)
    assert same_bits(bitslab.compress(t)[ids], t[ids.long()])


def test_iterating_gives_every_item_once() -> None:
    t = packable(torch.float32, (7, 32))
    items = list(bitslab.compress(t))  # type: ignore[call-overload]
    assert same_bits(torch.stack(items), t)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_every_dtype_can_be_indexed(dtype: torch.dtype) -> None:
    ids = torch.tensor([4, 0, -1])
    for shape in ((9, 32), (2000,)):
        for codec in ("ibp", "auto"):
            t = packable(dtype, shape)
            assert same_bits(bitslab.compress(t, codec)[ids], take(t, ids))


@pytest.mark.parametrize("shape", [(0, 7), (5, 0, 3), (0,)], ids=str)
def test_empty_tensors_can_be_indexed(shape: tuple[int, ...]) -> None:
    t = torch.empty(shape)
    ct = bitslab.compress(t)
    assert same_bits(ct[:], t)
    assert same_bits(ct[1:3], t[1:3])
    assert ct.ratio == 1


class Recording(bitslab.RawCodec):
    """Records which rows are decoded."""

    name = "recording"
    decoded: list[int]

    def decode(
        self,
        packed: Any,
        indices: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        start: int = 0,
        stop: int | None = None,
    ) -> torch.Tensor:
        end = packed.n_rows if stop is None else stop
        self.decoded = list(range(start, end)) if indices is None else indices.tolist()
        return super().decode(packed, indices, out, start=start, stop=stop)


@pytest.mark.parametrize(
    ("shape", "row", "index", "expected"),
    [
        ((20, 32), 32, 3, {3}),
        ((20, 32), 32, slice(4, 7), {4, 5, 6}),
        ((20, 32), 32, torch.tensor([9, 1]), {9, 1}),
        ((4, 3, 32), 32, 2, {6, 7, 8}),
        ((4, 3, 32), 32, slice(1, 3), {3, 4, 5, 6, 7, 8}),
        ((1000,), 100, 399, {3}),
        ((1000,), 100, torch.tensor([0, 999]), {0, 9}),
        ((1000,), 100, slice(100, 105), {1}),
        ((200, 3), 30, -1, {19}),
    ],
    ids=str,
)
def test_only_the_rows_that_are_asked_for_are_decoded(
    shape: tuple[int, ...], row: int, index: Any, expected: set[int]
) -> None:
    t = packable(torch.float32, shape)
    codec = Recording((row,), torch.float32)
    ct = bitslab.compress(t, codec)
    assert same_bits(ct[index], t[index])
    assert set(codec.decoded) == expected


@pytest.mark.pairwise(dtype=traits)
@pytest.mark.parametrize(
    "index", [20, -21, 10**30, -(10**30), [0, 20], [-21], [[3], [99]]], ids=str
)
@pytest.mark.parametrize("shape", [(20,), (20, 3), (20, 32), (20, 3, 32)], ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_index_out_of_range_is_refused(codec: str, shape: tuple[int, ...], index: Any) -> None:
    ct = bitslab.compress(packable(torch.float32, shape), codec)
    with pytest.raises(bitslab.IndexRangeError, match="out of range for 20 rows"):
        ct[index]
    if not isinstance(index, int):
        with pytest.raises(IndexError):
            ct[torch.tensor(index)]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (1.5, "dtype torch.float32, accepted are int64"),
        ("1", "is not accepted"),
        (None, "is not accepted"),
        (..., "is not accepted"),
        (True, "is not accepted"),
        ((1, 2), "only the first dimension"),
        ([1.0, 2.0], "dtype torch.float32, accepted are int64"),
        (torch.ones(2), "dtype torch.float32, accepted are int64"),
        (torch.ones(2, dtype=torch.uint16), "dtype torch.uint16, accepted are int64"),
        (object(), "got object"),
        ({}, "got dict"),
        ([[1], [2, 3]], "got list"),
    ],
    ids=["float", "str", "None", "...", "bool", "tuple", "float-list", "float-tensor", "uint16",
         "object", "dict", "ragged"],
)  # fmt: skip
def test_index_of_a_wrong_kind_is_refused(index: Any, message: str) -> None:
    ct = bitslab.compress(packable(torch.float32, (20, 32)))
    with pytest.raises(bitslab.ArgumentTypeError, match=message):
        ct[index]


@pytest.mark.parametrize("shape", [(19,), (20, 32), ()], ids=str)
def test_mask_of_a_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    ct = bitslab.compress(packable(torch.float32, (20, 32)))
    with pytest.raises(bitslab.ArgumentError, match=r"mask of shape .*, expected \[20\]"):
        ct[torch.ones(shape, dtype=torch.bool)]


def test_0_d_tensor_has_no_items_and_no_length() -> None:
    ct = bitslab.compress(torch.tensor(3.0))
    with pytest.raises(bitslab.ArgumentTypeError, match="0-d"):
        ct[0]
    with pytest.raises(bitslab.ArgumentTypeError, match="0-d"):
        len(ct)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_index_of_any_tensor_gives_what_torch_gives(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]))
    t = packable(dtype, shape)
    ct = bitslab.compress(t, data.draw(st.sampled_from(CODECS)))
    n = shape[0]
    numbers = st.integers(-n, n - 1)
    ids = data.draw(st.lists(numbers, max_size=3 * n))
    assert same_bits(ct[torch.tensor(ids, dtype=torch.int64)], t[torch.tensor(ids).long()])
    edge = st.none() | st.integers(-2 * n, 2 * n)
    part = slice(data.draw(edge), data.draw(edge), data.draw(st.integers(1, 5)))
    assert same_bits(ct[part], t[part])
    assert same_bits(ct.decompress(), t)


# decompress(out=)


@pytest.mark.parametrize("codec", CODECS)
@shape_cases()
def test_out_is_filled_and_returned(shape: tuple[int, ...], codec: str) -> None:
    t = packable(torch.float32, shape)
    ct = bitslab.compress(t, codec)
    out = torch.full(shape, 7.0)
    assert ct.decompress(out) is out
    assert same_bits(out, t)
    assert same_bits(bitslab.decompress(ct, out=torch.empty(shape)), t)


@pytest.mark.parametrize("shape", [(64, 96), (1003, 3)], ids=str)
def test_out_need_not_be_contiguous(shape: tuple[int, int]) -> None:
    t = packable(torch.float32, shape)
    around = torch.full((shape[1] + 2, shape[0]), 7.0)
    out = around[1:-1].T
    assert bitslab.compress(t).decompress(out) is out
    assert same_bits(out, t)
    assert (around[[0, -1]] == 7).all()


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (
            torch.full((64, 95), 7.0),
            bitslab.ArgumentError,
            r"shape \[64, 95\], expected \[64, 96\]",
        ),
        (torch.full((64 * 96,), 7.0), bitslab.ArgumentError, r"expected \[64, 96\]"),
        (torch.full((64, 96), 7.0).double(), bitslab.ArgumentTypeError, "dtype torch.float64"),
        (torch.full((96,), 7.0).expand(64, 96), bitslab.ArgumentError, "share memory"),
        (torch.full((64, 96), 7.0, requires_grad=True), bitslab.ArgumentError, "requires grad"),
        (
            torch.empty((64, 96), device="meta"),
            bitslab.ArgumentTypeError,
            "on meta, accepted are cpu and cuda",
        ),
        (np.full((64, 96), 7.0), bitslab.ArgumentTypeError, "expected a torch.Tensor, got ndarray"),
    ],
    ids=["shape", "flat", "dtype", "expanded", "requires-grad", "device", "numpy"],
)
@pytest.mark.parametrize("codec", CODECS)
def test_wrong_out_is_refused_and_untouched(
    codec: str, out: Any, error: type[Exception], message: str
) -> None:
    ct = bitslab.compress(packable(torch.float32, (64, 96)), codec)
    with pytest.raises(error, match=message):
        ct.decompress(out)
    if not isinstance(out, torch.Tensor) or not out.is_meta:
        assert (out == 7).all()


def test_out_that_shares_memory_with_the_packed_rows_is_refused() -> None:
    t = packable(torch.float32, (64, 96))
    ct = bitslab.compress(t, "raw")
    with pytest.raises(bitslab.ArgumentError, match="shares memory with the packed rows"):
        ct.decompress(ct.packed.parts["rows"])
    assert same_bits(ct.decompress(), t)


def test_damaged_rows_leave_out_untouched() -> None:
    t = packable(torch.float32, (1003,))
    ct = bitslab.compress(t, "ibp")
    parts = {name: part.clone() for name, part in ct.packed.parts.items()}
    parts["lengths"][-1] = 1
    damaged = bitslab.PackedRows(ct.packed.n_rows, parts, ct.packed.facts)
    out = torch.full((1003,), 7.0)
    with pytest.raises(bitslab.CorruptedDataError):
        bitslab.CompressedTensor(ct.codec, damaged, t.shape).decompress(out)
    assert (out == 7).all()


# Arguments of compress


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have them gone
        return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [1.0], "expected a torch.Tensor, got list"),
        (lambda: np.ones(3), "expected a torch.Tensor, got ndarray"),
        (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo; only dense"),
        (quantised, "quantised torch.qint8"),
        (lambda: torch.empty(3, device="meta"), "meta device"),
    ],
    ids=["list", "numpy", "sparse", "quantised", "meta"],
)
def test_what_is_no_dense_tensor_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(bitslab.ArgumentTypeError, match=message):
        bitslab.compress(make())


@pytest.mark.parametrize("given", [None, 3, bitslab.InvariantCodec], ids=str)
def test_codec_that_is_neither_name_nor_codec_is_refused(given: Any) -> None:
    with pytest.raises(bitslab.ArgumentTypeError, match="expected a name or a codec"):
        bitslab.compress(torch.ones(3), given)


def test_unknown_codec_name_is_refused() -> None:
    with pytest.raises(
        bitslab.ArgumentError, match="'zip' is not known; known are csr, ibp, ibp-blob"
    ):
        bitslab.compress(torch.ones(3), "zip")


@pytest.mark.parametrize(
    ("shape", "fitted"),
    [
        ((64, 96), (100, 96)),
        ((4, 5, 32), (100, 32)),
        ((4, 5, 32), (100, 5, 32)),
        ((1000, 3), (50, 3)),
        ((1000, 3), (50, 24)),
        ((1000,), (50, 64)),
    ],
    ids=str,
)
def test_fitted_codec_serves_tensors_with_its_rows(
    shape: tuple[int, ...], fitted: tuple[int, ...]
) -> None:
    codec = bitslab.InvariantCodec.fit(packable(torch.float32, fitted, seed=1))
    t = packable(torch.float32, shape)
    ct = bitslab.compress(t, codec)
    assert ct.codec is codec
    assert same_bits(ct.decompress(), t)
    assert same_bits(ct[[3, -1]], t[[3, -1]])


@pytest.mark.parametrize(
    ("shape", "fitted"),
    [((64, 96), (100, 95)), ((64, 96), (100, 48)), ((4, 5, 32), (9, 16)), ((1000, 3), (50, 4))],
    ids=str,
)
def test_fitted_codec_of_other_rows_is_refused(
    shape: tuple[int, ...], fitted: tuple[int, ...]
) -> None:
    codec = bitslab.InvariantCodec.fit(packable(torch.float32, fitted))
    with pytest.raises(bitslab.ArgumentError, match="the codec was fitted for"):
        bitslab.compress(packable(torch.float32, shape), codec)


def test_fitted_codec_of_another_dtype_is_refused() -> None:
    codec = bitslab.InvariantCodec.fit(packable(torch.float16, (100, 96)))
    with pytest.raises(bitslab.ArgumentTypeError, match="fitted for torch.float16"):
        bitslab.compress(packable(torch.float32, (64, 96)), codec)


def test_options_of_a_fitted_codec_are_refused() -> None:
    codec = bitslab.InvariantCodec.fit(packable(torch.float32, (100, 96)))
    with pytest.raises(bitslab.ArgumentTypeError, match="'clusters'.* for fitting"):
        bitslab.compress(packable(torch.float32, (64, 96)), codec, clusters=2)


@pytest.mark.parametrize("codec", ["ibp", "auto"])
def test_options_reach_the_codec(codec: str) -> None:
    options: Mapping[str, Any] = {"chunk_bytes": 2, "code_bits": 2, "grouped": False}
    ct = bitslab.compress(packable(torch.bfloat16, (200, 96)), codec, **options)
    assert isinstance(ct.codec, bitslab.InvariantCodec)
    fmt = ct.codec.profile.format
    assert (fmt.chunk_bytes, fmt.code_bits, fmt.grouped) == (2, 2, False)


def test_option_out_of_range_is_refused() -> None:
    with pytest.raises(bitslab.ArgumentError, match="code_bits: 9"):
        bitslab.compress(torch.ones(30, 32), "ibp", code_bits=9)
    with pytest.raises(bitslab.ArgumentTypeError, match="raw: takes no options"):
        bitslab.compress(torch.ones(30, 32), "raw", code_bits=2)


def test_the_same_seed_gives_the_same_bytes() -> None:
    t = packable(torch.float32, (20_000, 64))
    first, second = (bitslab.compress(t, seed=3) for _ in range(2))
    assert first.codec == second.codec
    for name, part in first.packed.parts.items():
        assert torch.equal(part, second.packed.parts[name])


def test_empty_tensors_are_raw_whatever_the_codec() -> None:
    codecs: list[str | bitslab.RowCodec] = [*CODECS]
    for codec in [*codecs, bitslab.InvariantCodec.fit(torch.ones(4, 8))]:
        ct = bitslab.compress(torch.empty(0, 8), codec)
        assert ct.codec.name == "raw"
        assert ct.decompress().shape == (0, 8)


def test_rows_too_long_for_a_plan_are_kept_raw() -> None:
    prime = 268_435_399  # no divisor, so that the row cannot be cut
    t = torch.zeros(1, dtype=torch.uint8).expand(1, prime)
    assert natural_row_elements(t.shape, 1) == prime
    assert bitslab.compress(t).codec.name == "raw"


# The object


def test_repr_says_what_matters() -> None:
    text = repr(bitslab.compress(packable(torch.bfloat16, (512, 256)), chunk_bytes=2))
    assert text.startswith("CompressedTensor([512, 256], bfloat16, cpu, ibp 2B ")
    assert text.endswith("x)")


def test_to_keeps_the_tensor() -> None:
    t = packable(torch.float32, (64, 96))
    ct = bitslab.compress(t).to("cpu")
    assert ct.device == torch.device("cpu")
    assert same_bits(ct.decompress(), t)


def test_pin_memory_keeps_the_tensor() -> None:
    t = packable(torch.float32, (64, 96))
    assert same_bits(bitslab.compress(t).pin_memory().decompress(), t)


@pytest.mark.parametrize("shape", [(63, 96), (64, 95), (64, 96, 2)], ids=str)
def test_shape_that_does_not_fit_the_rows_is_refused(shape: tuple[int, ...]) -> None:
    ct = bitslab.compress(packable(torch.float32, (64, 96)), "ibp")
    with pytest.raises(bitslab.ArgumentError):
        bitslab.CompressedTensor(ct.codec, ct.packed, shape)


def test_decompress_refuses_what_is_not_compressed() -> None:
    with pytest.raises(bitslab.ArgumentTypeError, match="expected a CompressedTensor, got Tensor"):
        bitslab.decompress(torch.ones(3))  # type: ignore[arg-type]


def test_threads_may_share_one() -> None:
    t = packable(torch.float32, (5000, 64))
    ct = bitslab.compress(t)

    def work(seed: int) -> bool:
        ids = torch.randint(5000, (2000,), generator=torch.Generator().manual_seed(seed))
        return same_bits(ct[ids], t[ids])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(16)))
