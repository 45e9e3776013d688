"""Products with packed weights, run on the CPU: the kernel and its twin, against float64.

The order of sums is neither that of the twin nor that of a matrix unit, so results are compared
with the product in float64: within one rounding to bfloat16 and the bound of float32 sums.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitslab.engine.codecs.invariant.codec import InvariantCodec
from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cpu.packed_linear import multiply_packed
from bitslab.engine.kernels.cuda.packed_linear import PackedLinearKernels
from bitslab.engine.kernels.cuda.runner import DAMAGED_ERROR, NO_ERROR
from bitslab.engine.kernels.format import RowStorage
from bitslab.engine.kernels.packed_products import (
    LINEAR_SHAPES,
    MAX_INPUT_ROWS,
    is_multiplied_packed,
)
from bitslab.engine.kernels.row_kernels import LayoutKernels
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner

BACKENDS = ["twin", "kernel"]
NONE = torch.empty(0, dtype=torch.uint8)


def weight_of(n_rows, depth, seed=0, exceptions=0.02, raw=0.0):
    """Return a weight with a share of rare exponents, and one of rows that do not pack."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n_rows, depth, generator=generator) * 0.02
    rare = torch.rand(n_rows, depth, generator=generator)
    weight = torch.where(rare < exceptions, weight * 2.0**-20, weight)
    wild = torch.rand(n_rows, generator=generator) < raw
    spread = torch.exp2(torch.randint(-60, 20, (n_rows, depth), generator=generator).float())
    return torch.where(wild[:, None], weight * spread, weight).bfloat16()


def at_page_end(words):
    """Return packed words in memory that ends where theirs does, from a multiple of 16 bytes on."""
    return guarded(torch.nn.functional.pad(words, (0, -len(words) % 4)))


def packed(weight, sample=None):
    """Return the packed rows of a weight, in memory that ends where theirs does, and its codec."""
    codec = InvariantCodec.fit(weight if sample is None else sample)
    rows = codec.encode(weight)
    kernels = codec.kernels(torch.device("cpu"))
    parts = rows.parts
    storage = RowStorage(
        at_page_end(parts["words"]), guarded(parts["bases"]), guarded(parts["lengths"]), NONE
    )
    assert isinstance(kernels, LayoutKernels)
    assert is_multiplied_packed(kernels.layout, weight.dtype)
    return storage, kernels.layout, rows.facts


def linear(backend, storage, layout, facts, *, seed=0, shared_bytes=None):
    if backend == "twin":
        return cpu.prepare_linear(storage, layout, facts), None
    runner = SimtRunner(seed)
    if shared_bytes is not None:
        runner.shared_bytes_per_multiprocessor = shared_bytes
    return PackedLinearKernels(runner).prepare_linear(storage, layout, facts), runner


def inputs(n_rows, depth, seed=1):
    return torch.randn(n_rows, depth, generator=torch.Generator().manual_seed(seed)).bfloat16()


def check(out, x, weight, bias=None):
    """Compare with float64: rounding to bfloat16, and float32 sums of so many products."""
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    most = x.double().abs() @ weight.double().abs().t() + exact.abs()
    error = (out.double() - exact).abs()
    assert torch.all(error <= exact.abs() * 2.0**-8 + most * x.shape[1] * 2.0**-23 + 1e-37)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("n_rows", "depth", "x_rows"),
    [(16, 256, 1), (40, 1056, 3), (33, 2048, 8), (33, 2048, 9), (50, 544, 16), (1, 32, 2)],
    ids=["one-tile", "odd-columns", "eight", "nine", "sixteen", "one-row"],
)
def test_products_are_those_of_the_decoded_weight(backend, n_rows, depth, x_rows):
    weight, x = weight_of(n_rows, depth, seed=depth), inputs(x_rows, depth)
    bias = guarded(inputs(1, n_rows, seed=2)[0])
    stored = packed(weight, weight_of(64, depth, 1))
    multiply, runner = linear(backend, *stored, seed=x_rows)
    for added in (None, bias):
        out = guarded(torch.full((x_rows, n_rows), float("nan"), dtype=torch.bfloat16))
        multiply(guarded(x), added, out)
        check(out, x, weight, added)
    if runner is not None:
        assert runner.mailbox[0] == NO_ERROR


@settings(max_examples=12, deadline=None)
@given(
    n_rows=st.integers(1, 70),
    groups=st.integers(1, 40),
    x_rows=st.integers(1, MAX_INPUT_ROWS),
    exceptions=st.sampled_from([0.0, 0.01, 0.2]),
    raw=st.sampled_from([0.0, 0.1, 1.0]),
    shared_kib=st.sampled_from([60, 100, 228]),
    seed=st.integers(0, 99),
)
def test_any_shape_any_exceptions_and_raw_rows(
    n_rows, groups, x_rows, exceptions, raw, shared_kib, seed
):
    depth = 32 * groups
    weight = weight_of(n_rows, depth, seed, exceptions, raw)
    x = inputs(x_rows, depth, seed)
    stored = packed(weight, weight_of(64, depth, 1, 0.0))
    multiply, runner = linear("kernel", *stored, seed=seed, shared_bytes=shared_kib << 10)
    out = guarded(torch.empty(x_rows, n_rows, dtype=torch.bfloat16))
    multiply(guarded(x), None, out)
    check(out, x, weight)
    assert runner.mailbox[0] == NO_ERROR
    twin = torch.empty(x_rows, n_rows, dtype=torch.bfloat16)
    multiply_packed(stored[0], stored[1], x, None, twin)
    check(twin, x, weight)


@pytest.mark.parametrize("raw", [0.0, 1.0], ids=["fewer-rows-than-a-block", "raw-rows"])
def test_nothing_in_front_of_the_words_is_read(raw):
    weight = weight_of(20, 256, raw=raw)
    storage, layout, facts = packed(weight, weight_of(64, 256, 1, 0.0))
    storage = replace(storage, words=guarded(storage.words, side="start"))
    x = inputs(2, 256)
    out = torch.empty(2, 20, dtype=torch.bfloat16)
    linear("kernel", storage, layout, facts)[0](x, None, out)
    check(out, x, weight)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("shared_kib", [60, 228], ids=["x-where-it-is", "x-staged"])
@pytest.mark.parametrize("x_rows", [1, 4, 8, 16])
def test_blocks_take_sets_of_rows_in_turn_and_warps_share_columns(x_rows, shared_kib):
    n_rows, depth = 420, 2080
    weight, x = weight_of(n_rows, depth, x_rows, raw=0.01), inputs(x_rows, depth)
    stored = packed(weight, weight_of(64, depth, 1))
    multiply, runner = linear("kernel", *stored, seed=x_rows, shared_bytes=shared_kib << 10)
    out = guarded(torch.full((x_rows, n_rows), float("nan"), dtype=torch.bfloat16))
    multiply(guarded(x), None, out)
    check(out, x, weight)
    again = torch.empty_like(out)
    multiply(guarded(x), None, again)
    assert torch.equal(out, again) and runner.mailbox[0] == NO_ERROR
    assert runner.launched[0][1] == "index_exceptions"  # once, not at each product
    assert [name for _, name in runner.launched[1:]] == ["multiply_packed"] * 2
    shape = next(s for s in LINEAR_SHAPES if x_rows <= s.x_rows)
    assert runner.grids[1] == (shape.blocks * runner.multiprocessors,)


@pytest.mark.parametrize("x_rows", [1, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_more_exceptions_than_a_warp_holds(backend, x_rows):
    weight = weight_of(20, 2080, exceptions=0.2)
    storage, layout, facts = packed(weight, weight_of(64, 2080, 1, 0.0))
    assert (storage.lengths != 0).all()
    # Of 1024 columns 31 words are held of which every byte is read.
    assert facts["max_row_words"] * 4 > 2080 * 11 // 8 + 3 * 124
    x = inputs(x_rows, 2080)
    out = torch.empty(x_rows, 20, dtype=torch.bfloat16)
    linear(backend, storage, layout, facts)[0](x, None, out)
    check(out, x, weight)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_value_alone_is_multiplied_bit_for_bit(backend):
    # One 1 in a row of x takes one column of the weight: no sum rounds, so every bit is compared.
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = bits[torch.isfinite(bits)]
    depth, columns = 256, torch.tensor([0, 37, 130, 255])
    # The first two rows hold what is rare, two values in a group; the others what is usual.
    weight = weight_of(36, depth, exceptions=0.0)
    generator = torch.Generator().manual_seed(3)
    for j, column in enumerate(columns):
        drawn = torch.randint(len(finite), (36,), generator=generator)
        weight[:, column] = finite[drawn]
        weight[:4, column] = torch.tensor([-0.0, 1e-40, -3e38, 2.0**-126])[
            (torch.arange(4) + j) % 4
        ].bfloat16()
    x = torch.zeros(len(columns), depth, dtype=torch.bfloat16)
    x[torch.arange(len(columns)), columns] = 1
    out = torch.empty(len(columns), 36, dtype=torch.bfloat16)
    storage, layout, facts = packed(weight, weight_of(64, depth, 1, 0.0))
    assert (storage.lengths != 0).all()
    linear(backend, storage, layout, facts)[0](x, None, out)
    # A sum of products that are 0 has lost the sign of -0.0, as in torch.
    assert torch.equal(out, weight[:, columns].t() + 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", ["packed", "raw"])
def test_nan_and_infinities_of_the_weight_and_of_x(backend, row):
    weight = weight_of(24, 512, exceptions=0.0)
    weight[3, 70], weight[5, 71], weight[6, 300] = float("nan"), float("inf"), float("-inf")
    if row == "raw":
        weight[5] *= torch.exp2((torch.arange(512) % 41).float() - 20).bfloat16()
        weight[5, 71] = float("inf")
    stored = packed(weight, weight_of(64, 512, 1, 0.0))
    assert (stored[0].lengths[5] == 0) == (row == "raw")
    x = inputs(3, 512).abs() + 1
    x[2, 9] = float("inf")
    out = torch.empty(3, 24, dtype=torch.bfloat16)
    linear(backend, *stored)[0](x, None, out)
    expected = x.double() @ weight.double().t()
    assert torch.equal(out.isnan(), expected.isnan()) and out.isnan()[:, 3].all()
    infinite = expected.isinf()
    assert infinite[0].tolist() == [j in (5, 6) for j in range(24)]
    assert torch.equal(out[infinite].double(), expected[infinite])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_x_and_of_the_result_may_lie_apart(backend):
    weight, wide = weight_of(20, 288), inputs(5, 600)
    stored = packed(weight)
    for x in (wide[:, 8:296], wide[:, 3:291], wide[::2, 16:304], inputs(288, 4).t()):
        results = torch.zeros(x.shape[0], 64, dtype=torch.bfloat16)
        linear(backend, *stored)[0](x, None, results[:, 10:30])
        check(results[:, 10:30], x, weight)
        assert not results[:, :10].any() and not results[:, 30:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_of_input_and_none_of_the_weight(backend):
    stored = packed(weight_of(20, 64))
    linear(backend, *stored)[0](inputs(0, 64), None, torch.empty(0, 20, dtype=torch.bfloat16))
    none = packed(weight_of(20, 64)[:0], weight_of(64, 64))
    linear(backend, *none)[0](inputs(2, 64), None, torch.empty(2, 0, dtype=torch.bfloat16))


@pytest.mark.parametrize("damage", ["length", "short", "base", "codes"])
def test_damaged_rows_are_reported_and_nothing_else_is_read(damage):
    weight = weight_of(40, 512)
    storage, layout, facts = packed(weight)
    if damage == "length":
        storage.lengths[33] = layout.format.row_words - 1
    elif damage == "short":
        storage.lengths[3] = 11 * 16 - 1
    elif damage == "base":
        storage.bases[1] = storage.words.numel()
    else:  # codes that are all 0 ask for more exceptions than there are
        at = int(storage.bases[1]) + 8 * 16
        storage.words[at : at + 3 * 16] = 0
    multiply, runner = linear("kernel", storage, layout, facts)
    multiply(inputs(2, 512), None, torch.empty(2, 40, dtype=torch.bfloat16))
    assert runner.mailbox[0] == DAMAGED_ERROR


def test_other_formats_are_decoded_first():
    halves = torch.randn(64, 256).half()
    bfloats = torch.randn(64, 250).bfloat16()
    for weight in (halves, halves.float(), bfloats):
        codec = InvariantCodec.fit(weight)
        rows = codec.encode(weight)
        storage = RowStorage(rows.parts["words"], rows.parts["bases"], rows.parts["lengths"], NONE)
        kernels = codec.kernels(torch.device("cpu"))
        assert kernels.prepare_linear(storage, weight.dtype, rows.facts) is None
