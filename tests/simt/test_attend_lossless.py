"""Attention over lossless tiles: the kernels against the twin, which computes in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bitslab.engine.kernels.cpu.attend import attend as twin
from bitslab.engine.kernels.cuda import attend
from bitslab.engine.kernels.cuda.attend import AttendKernels
from bitslab.engine.kernels.cuda.runner import DAMAGED_ERROR
from bitslab.errors import ArgumentError, CorruptedDataError
from tests.helpers import dtype_id
from tests.simt.runner import SimtRunner
from tests.simt.test_attend import by_shape, drawn, guarded_span, relative_error
from tests.tile_spans import span_of, stored, tiles_of

#: Bits of the significand, with the first one.
DIGITS = {torch.bfloat16: 8, torch.float16: 11}
#: Where a row's weights stand in two parts, of up to four rows, they are as exact as in float32.
IN_TWO_PARTS = 1e-5
#: In one part they are rounded to the dtype: so much in the root of the mean square.
IN_ONE_PART = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}

by_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)


@pytest.fixture(params=["staged", "plain"])
def way(request, monkeypatch):
    """Serve short contexts by warps in pairs, of which one decodes V, or as longer ones."""
    if request.param == "plain":
        monkeypatch.setattr(attend, "STAGES", ())


def both(query, keys, values, spans, raw=(), seed=0, **options):
    """Return what the kernels return, and what the twin does of the tokens as they came."""
    runner = SimtRunner(seed)
    spans = [guarded_span(span) for span in spans]
    length = keys.shape[2]
    found = AttendKernels(runner).attend(query, spans, raw, length=length, **options)
    assert not runner.mailbox.any() and found.dtype == query.dtype
    came = [(0, keys.float(), values.float())]
    expected = twin(query.float(), [], came, length=length, computed_in=torch.float64, **options)
    return found, expected.double()


def lengths_of(table):
    """Return the words of each tile, 0 of those that are kept raw."""
    assert table.lengths is not None
    return table.lengths


def error_beyond_rounding(found, expected):
    """Return the relative error of what is more than the rounding of outputs to their dtype."""
    info = torch.finfo(found.dtype)
    half_units = torch.exp2(torch.frexp(expected).exponent - 1.0 - DIGITS[found.dtype])
    half_units.clamp_(min=info.tiny * info.eps / 2)
    far = (found.double() - expected).abs() - half_units
    return float(far.clamp(min=0).norm() / expected.norm())


@pytest.mark.drawn(4)
@pytest.mark.usefixtures("way")
@by_dtype
@by_shape
def test_attention_is_that_of_the_tokens_as_they_came(dtype, batch, heads, group, n, dim, tokens):
    first, last = 5, 37
    drawn_tensors = drawn(batch, heads, group, n, dim, first + tokens + last)
    query, keys, values = (x.to(dtype) for x in drawn_tensors)
    end = first + tokens
    span = span_of(keys[:, :, first:end], values[:, :, first:end], first_token=first, lossless=True)
    assert all(lengths_of(table).all() for table in (span.k, span.v))
    raw = [
        (0, keys[:, :, :first], values[:, :, :first]),
        (end, keys[:, :, end:], values[:, :, end:]),
    ]
    found, expected = both(query, keys, values, [span], raw, scaling=0.5 * dim**-0.5)
    rows = min(group * n, 16 // group * group)
    assert error_beyond_rounding(found, expected) < (
        IN_ONE_PART[dtype] if rows > 4 else IN_TWO_PARTS
    )
    assert relative_error(found, expected) < 2.5 * IN_ONE_PART[dtype]


@by_dtype
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("group", [1, 8])
def test_exceptions_count_with_all_their_bits(dtype, group):
    query, keys, values = (x.to(dtype) for x in drawn(1, 2, group, 1, 48, 128))
    span = span_of(keys, values, lossless=True)  # that knows of no outliers
    generator = torch.Generator().manual_seed(5)
    for x, tables in ((keys, span.k_tables), (values, span.v_tables)):
        at = torch.rand(x.shape, generator=generator) < 0.01
        x[at] = x[at] * 3000 + 77.7
        x[torch.rand(x.shape, generator=generator) < 0.003] = 1e-7
        table = stored(tiles_of(x, 64), tables)
        assert ((table.words[:1] >> 16) > 3).all() and lengths_of(table).all()
        changed: dict[str, Any] = {"k" if x is keys else "v": table}
        span = replace(span, **changed)
    found, expected = both(query, keys, values, [span], scaling=0.0002)
    limit = IN_ONE_PART[dtype] if group > 4 else IN_TWO_PARTS
    assert error_beyond_rounding(found, expected) < limit


@by_dtype
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [-10, -20, -40])
@pytest.mark.parametrize(("n", "of_exceptions"), [(1, -50), (4, -50), (1, 6)])
def test_small_values_are_not_lost_beside_exceptions(dtype, size, n, of_exceptions):
    query, keys, values = drawn(1, 2, 1, n, 64, 128)
    generator = torch.Generator().manual_seed(6)
    if dtype == torch.float16:  # below are a few subnormals alone
        size, of_exceptions = max(size, -13), 6
    keys, values = (x * 2.0**size for x in (keys, values))
    query, keys, values = query.to(dtype), keys.to(dtype), values.to(dtype)
    span = span_of(keys, values, lossless=True)
    for x, tables in ((keys, span.k_tables), (values, span.v_tables)):
        at = torch.rand(x.shape, generator=generator) < 0.01
        x[at] = (x[at].float() * 2.0**of_exceptions).to(dtype)
        table = stored(tiles_of(x, 64), tables)
        assert ((table.words[:1] >> 16) > 3).all() and lengths_of(table).all()
        changed: dict[str, Any] = {"k" if x is keys else "v": table}
        span = replace(span, **changed)
    # So that scores are of size 1.
    found, expected = both(query, keys, values, [span], scaling=2.0 ** (-size - 3))
    assert error_beyond_rounding(found, expected) < IN_TWO_PARTS


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [-10, -40])
def test_small_channels_among_others_are_not_lost(size):
    query, keys, values = drawn(1, 1, 2, 1, 64, 128)
    small = torch.randperm(64)[:16]
    for x in (keys, values):
        x[..., small] *= 2.0**size
    query[..., small] *= 2.0**-size
    query, keys, values = (x.bfloat16() for x in (query, keys, values))
    span = span_of(keys, values, lossless=True)
    for x, tables in ((keys, span.k_tables), (values, span.v_tables)):
        x[..., 3::17, :] = (x[..., 3::17, :].float() * 2.0**-30).bfloat16()
        changed: dict[str, Any] = {"k" if x is keys else "v": stored(tiles_of(x, 64), tables)}
        span = replace(span, **changed)
    found, expected = both(query, keys, values, [span], scaling=0.1)
    for channels in (small, torch.tensor([c for c in range(64) if c not in set(small.tolist())])):
        assert error_beyond_rounding(found[..., channels], expected[..., channels]) < IN_TWO_PARTS


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("group", [1, 8])
def test_values_of_almost_the_largest_size(group):
    query, keys, values = drawn(1, 1, group, 1, 32, 150)
    values *= 1e37
    query, keys, values = (x.bfloat16() for x in (query, keys, values))
    span = span_of(keys[:, :, :128], values[:, :, :128], lossless=True)
    raw = [(128, keys[:, :, 128:], values[:, :, 128:])]
    found, expected = both(query, keys, values, [span], raw, scaling=0.5)
    assert bool(found.isfinite().all())
    limit = IN_ONE_PART[torch.bfloat16] if group > 4 else IN_TWO_PARTS
    assert error_beyond_rounding(found / 2.0**100, expected / 2.0**100) < limit


@by_dtype
def test_what_is_no_number_remains_none_and_padding_is_not_seen(dtype):
    query, keys, values = (x.to(dtype) for x in drawn(2, 1, 2, 1, 32, 192))
    values[0, 0, 69, 3], values[0, 0, 70, 4], values[0, 0, 130, 4] = (
        torch.nan,
        torch.inf,
        -torch.inf,
    )
    values[1, 0, 5] = torch.nan
    keys[1, 0, 9, 20] = torch.inf
    span = span_of(keys, values, lossless=True)
    first_valid = torch.tensor([0, 20], dtype=torch.int32)
    found, expected = both(query, keys, values, [span], scaling=0.1, first_valid=first_valid)
    assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().sum() == 4
    good = ~expected.isnan()
    assert error_beyond_rounding(found[good], expected[good]) < IN_TWO_PARTS


@by_dtype
def test_sinks_softcap_large_and_small_scores(dtype):
    query, keys, values = (x.to(dtype) for x in drawn(1, 1, 4, 1, 64, 128))
    query[:, 0] *= 40
    query[:, 1] *= 2.0**-12
    query[:, 2] = 0
    values[:, :, 70:] *= 2.0**-8
    span = span_of(keys, values, lossless=True)
    sinks = torch.tensor([0.5, -3.0, 4.0, 10.0])
    for options in ({}, {"softcap": 7.0, "sinks": sinks}):
        found, expected = both(query, keys, values, [span], scaling=0.125, **options)
        for head in range(4):
            error = error_beyond_rounding(found[:, :, head], expected[:, :, head])
            assert error < IN_TWO_PARTS, head


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("which", ["k", "v", "both"])
@by_dtype
def test_tiles_that_are_kept_raw_are_read_as_they_are(which, dtype):
    query, keys, values = (x.to(dtype) for x in drawn(1, 1, 2, 1, 32, 192))
    span = span_of(keys[:, :, :64], values[:, :, :64], lossless=True)
    for x in (keys,) * (which != "v") + (values,) * (which != "k"):
        kinds = torch.randint(-14, 15, x[:, :, 64:128].shape).float()
        x[:, :, 64:128] = (x[:, :, 64:128].sign() * torch.exp2(kinds)).to(dtype)
    k, v = stored(tiles_of(keys, 64), span.k_tables), stored(tiles_of(values, 64), span.v_tables)
    assert (lengths_of(k)[1] == 0) == (which != "v")
    assert (lengths_of(v)[1] == 0) == (which != "k")
    ids = torch.arange(3, dtype=torch.int32)
    span = replace(span, k=k, v=v, k_ids=ids, v_ids=ids, tokens=180)
    found, expected = both(query, keys[:, :, :180], values[:, :, :180], [span], scaling=1e-4)
    assert error_beyond_rounding(found, expected) < IN_TWO_PARTS


@pytest.mark.drawn(3)
@pytest.mark.parametrize("tile_tokens", [16, 32, 128])
@pytest.mark.parametrize("code_bits", [8, 10])
def test_tiles_of_other_sizes_and_codes(tile_tokens, code_bits):
    query, keys, values = (x.bfloat16() for x in drawn(1, 2, 1, 1, 32, 140))
    span = span_of(keys, values, tile_tokens=tile_tokens, code_bits=code_bits, lossless=True)
    found, expected = both(query, keys, values, [span], scaling=0.1, seed=2)
    assert error_beyond_rounding(found, expected) < IN_TWO_PARTS


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("part", ["k", "v"])
def test_damaged_tiles_are_reported_and_nothing_outside_is_read(part):
    query, keys, values = (x.bfloat16() for x in drawn(1, 2, 1, 1, 32, 192))
    span = span_of(keys, values, lossless=True)
    table = getattr(span, part)
    generator = np.random.default_rng(0)
    reported = 0
    for trial in range(24):
        words = table.words.clone()
        row = int(generator.integers(0, 6))
        begin = int(table.lengths[:row].sum())
        at = (
            begin if trial % 3 == 0 else begin + int(generator.integers(0, int(table.lengths[row])))
        )
        words[at] = int(generator.integers(-(1 << 31), 1 << 31))
        damaged = replace(span, **{part: replace(table, words=words)})
        runner = SimtRunner(trial)
        AttendKernels(runner).attend(query, [guarded_span(damaged)], length=192, scaling=0.1)
        found = runner.mailbox[0] == DAMAGED_ERROR
        reported += bool(found)
        try:
            twin(query, [damaged], length=192, scaling=0.1)
        except CorruptedDataError as error:
            assert found and f"row {row} is damaged" in str(error)
        else:
            assert not found
    assert reported > 8


def test_both_sides_are_lossless_or_neither():
    query, keys, values = (x.bfloat16() for x in drawn(1, 2, 1, 1, 32, 64))
    lossless, lossy = span_of(keys, values, lossless=True), span_of(keys, values)
    for span, says in (
        (replace(lossless, v_tables=lossy.v_tables), "v: TOKEN_LEVEL, .* accepted is LOSSLESS"),
        (replace(lossy, v_tables=lossless.v_tables), "v: LOSSLESS, .* accepted is TOKEN_LEVEL"),
    ):
        with pytest.raises(ArgumentError, match=says):
            AttendKernels(SimtRunner()).attend(query, [span], length=64, scaling=1.0)


def test_spans_of_both_kinds_make_one_softmax():
    query, keys, values = (x.bfloat16() for x in drawn(2, 2, 1, 2, 32, 230))
    lossy = span_of(keys[:, :, :99], values[:, :, :99], k_scale=0.1, v_scale=0.05)
    lossless = span_of(keys[:, :, 99:163], values[:, :, 99:163], first_token=99, lossless=True)
    raw = [(163, keys[:, :, 163:], values[:, :, 163:])]
    options: dict[str, Any] = {"length": 230, "scaling": 0.15}
    found = AttendKernels(SimtRunner()).attend(query, [lossy, lossless], raw, **options)
    expected = twin(query, [lossy, lossless], raw, computed_in=torch.float64, **options)
    assert relative_error(found, expected) < 3e-3  # what the twin decodes is rounded
