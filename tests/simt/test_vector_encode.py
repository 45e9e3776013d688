"""Rows of which equal ones are kept once: the kernels write the bytes of the twins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bitslab
from bitslab.engine.codecs import BoundedVectorCodec, VectorLzCodec
from bitslab.engine.codecs.blob import HEADER_BYTES
from bitslab.engine.codecs.huffman import code_lengths
from bitslab.engine.codecs.vectors import decode_body, encode_body
from bitslab.engine.kernels import cuda
from bitslab.engine.kernels.cuda.source import vector_variant
from bitslab.engine.kernels.cuda.vector_decode import ROOM
from bitslab.engine.kernels.cuda.vector_encode import VectorEncodeKernels
from bitslab.engine.kernels.vector_chunks import (
    MOST_PLANS,
    VectorOptions,
    VectorPlan,
    VectorPlans,
    send_bytes,
)
from bitslab.engine.kernels.vector_format import (
    CODE_LIMIT_BITS,
    BodyHeader,
    RowCoding,
    raw_body_bytes,
)
from tests.simt.module import SimtModule, guarded
from tests.simt.runner import SimtRunner
from tests.simt.test_vector_decode import CASES, chained, rows_of, with_outliers

Codec = VectorLzCodec | BoundedVectorCodec
FILL = 0xA5


def expected(codec: Codec, t: torch.Tensor) -> torch.Tensor:
    data = np.zeros(raw_body_bytes(t.nbytes), np.uint8)
    used = encode_body(t, codec.bound_of(t), codec.window, data, references=codec.references)
    return torch.from_numpy(data[:used])


def assert_same_bytes(
    codecs: Sequence[Codec],
    tensors: Sequence[torch.Tensor],
    runner: SimtRunner,
    budget: int | None = None,
) -> None:
    given = [guarded(t) for t in tensors]
    out = guarded(torch.full((send_bytes(tensors),), FILL, dtype=torch.uint8))
    kernels, options = VectorEncodeKernels(runner), [codec.options() for codec in codecs]
    offsets, sizes = kernels.encode_vectors(given, options, out, budget)
    starts, at = offsets.tolist(), 0
    for codec, t, start, size in zip(codecs, tensors, starts, sizes.tolist(), strict=False):
        wanted = expected(codec, t)
        assert start == at and size == len(wanted)
        assert torch.equal(out[start : start + size], wanted)
        at = start + -(-size // 16) * 16
        assert bool((out[start + size : at] == FILL).all()), "nothing behind what is used"
    assert starts[-1] == at and bool((out[at:] == FILL).all())


@pytest.fixture(autouse=True)
def guarded_scratch(monkeypatch):
    """Give kernels scratch memory, of any content, that ends where they may not write."""
    real = torch.empty

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        found = real(*shape, **options)
        return guarded(found.fill_(FILL)) if found.dtype == torch.uint8 else found

    monkeypatch.setattr(torch, "empty", empty)


@pytest.mark.drawn(20)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_kernels_write_the_bytes_of_the_twins(name, seed):
    codec, t, _, _ = CASES[name]
    assert_same_bytes([codec], [t], SimtRunner(seed))


def test_tensors_of_all_kinds_are_written_at_once_by_eight_kernels():
    chosen = [c for c in CASES.values() if c[1].dtype == torch.float32]
    codecs, tensors = [c[0] for c in chosen], [c[1] for c in chosen]
    runner = SimtRunner(2)
    empty = [torch.zeros(0, 5), torch.zeros(3, 0), torch.tensor(2.5), torch.ones(1, 64)]
    assert_same_bytes([*codecs, *[VectorLzCodec()] * 4], [*tensors, *empty], runner)
    assert len(runner.launched) == 8


@pytest.mark.parametrize("budget", [1, 2])
def test_a_budget_bounds_the_blocks(budget):
    t, runner = rows_of(2100, 64, 50), SimtRunner(1)
    codecs: list[Codec] = [BoundedVectorCodec(0.1), VectorLzCodec()] * 5
    assert_same_bytes(codecs, [t] * 10, runner, budget)
    assert all(np.prod(grid) <= budget * ROOM for grid in runner.grids)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_first_of_equal_rows_is_kept_whatever_the_order(seed):
    t = rows_of(700, 3, 350, seed)
    codecs: list[Codec] = [VectorLzCodec(), BoundedVectorCodec(0.3), VectorLzCodec(64)]
    assert_same_bytes(codecs, [t] * 3, SimtRunner(seed))


@pytest.mark.parametrize("window", [32, 64, 128, 255])
def test_references_reach_back_as_far_as_a_window(window):
    apart = torch.randn(window + 1, 4)
    codecs: list[Codec] = [VectorLzCodec(window)] * 2
    tensors = [apart[torch.arange(3 * n) % n] for n in (window, window + 1)]
    assert_same_bytes(codecs, tensors, SimtRunner(window))
    assert_same_bytes([BoundedVectorCodec(0.1, window=window)], [chained(300)], SimtRunner(0))


def fibonacci_bytes(symbols: int) -> torch.Tensor:
    """Bytes whose best code is as long as there are symbols, less one."""
    counts = [1, 1]
    while len(counts) < symbols:
        counts.append(counts[-1] + counts[-2])
    return torch.repeat_interleave(torch.arange(symbols), torch.tensor(counts[:symbols])).byte()


@pytest.mark.parametrize("symbols", [1, 2, 3, 12, 13, 14, 20])
def test_codes_are_limited_as_those_of_the_twins(symbols):
    t = fibonacci_bytes(symbols)[torch.randperm(len(fibonacci_bytes(symbols)))]
    assert_same_bytes([VectorLzCodec(references=False)], [t], SimtRunner(0))


BOOK = """
extern "C" __global__ void make_one(const u32* counts, int symbols, u32* table, u64* bits) {
  __shared__ BookMaking making;
  make_book(making, counts, symbols, table);
  if (threadIdx.x == 0) *bits = making.bits;
}
"""


def made_book(counts: np.ndarray[Any, Any]) -> tuple[list[int], int]:
    """Return the lengths of the code that a block of threads makes, and the bits of all."""
    folder = Path(cuda.__file__).parent
    text = "".join((folder / f"{n}.cuh").read_text() for n in ("bits", "vectors", "vector_book"))
    defines = vector_variant("vector_encode", 4, 2).defines()
    module = SimtModule(text + BOOK, defines, ["make_one"])
    table, bits = np.zeros(len(counts), np.uint32), np.zeros(1, np.uint64)
    module.launch("make_one", 1, 256, [counts, np.int32(len(counts)), table, bits])
    return (table >> 16).tolist(), int(bits[0])


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 1024), st.integers(0, 2**31), st.sampled_from([0.5, 1.0, 2.0, 9.0]))
def test_lengths_of_codes_of_counts_as_large_as_they_can_be(symbols, seed, skew):
    shares = np.random.default_rng(seed).random(symbols) ** skew
    counts = (shares / shares.sum() * (2**32 - 2048)).astype(np.uint32)
    lengths, bits = made_book(counts)
    wanted = code_lengths(counts.astype(np.int64), CODE_LIMIT_BITS)
    assert lengths == wanted.tolist()
    assert bits == int(counts.astype(np.int64) @ wanted.astype(np.int64))


def test_many_rows_are_numbered_in_turn():
    # More than a block numbers, and more pieces of references than it writes, at once.
    few, many = rows_of(9000, 2, 300), rows_of(5000, 2, 3000)
    codecs: list[Codec] = [VectorLzCodec(), VectorLzCodec(), VectorLzCodec(255)]
    assert_same_bytes(codecs, [few, many, many], SimtRunner(0))


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 1024), st.integers(0, 2**31), st.sampled_from([0.3, 1.0, 3.0]))
def test_codes_of_any_counts_are_those_of_the_twins(symbols, seed, skew):
    # As many symbols as codes may have, of which some do not occur.
    generator = np.random.default_rng(seed)
    codes = (symbols * generator.random(3000) ** (1 + skew)).astype(np.float32)
    t = torch.from_numpy(codes).view(-1, 4)
    assert_same_bytes([BoundedVectorCodec(0.49, references=False)], [t], SimtRunner(0))


@pytest.mark.parametrize("references", [False, True], ids=["codes alone", "distinct rows"])
@pytest.mark.parametrize("bound", [0.0, 0.05], ids=["every bit", "bounded"])
def test_without_huffman_fields_of_one_width_are_those_of_the_twins(bound, references):
    # A Huffman code would be shorter: most values are near 0.
    values = torch.randn(3000, generator=torch.Generator().manual_seed(4)) ** 5 / 100
    t = guarded(values.view(-1, 4)[torch.arange(1500) % 750])
    coded = VectorOptions(bound, references=references)
    bodies = []
    for options in (coded, replace(coded, huffman=False)):
        out = guarded(torch.full((send_bytes([t]),), FILL, dtype=torch.uint8))
        _, sizes = VectorEncodeKernels(SimtRunner(0)).encode_vectors([t], [options], out)
        bodies.append(out[: int(sizes)].numpy().tobytes())
        data = np.zeros(raw_body_bytes(t.nbytes), np.uint8)
        used = encode_body(t, bound, None, data, references=references, huffman=options.huffman)
        assert data[:used].tobytes() == bodies[-1]
    huffman, fixed = (BodyHeader.from_bytes(body) for body in bodies)
    assert huffman is not None and fixed is not None
    assert huffman.coding == (RowCoding.HUFFMAN if bound else RowCoding.SPLIT)
    assert fixed.coding == (RowCoding.FIXED if bound else RowCoding.RAW)
    assert fixed.distinct_rows == huffman.distinct_rows <= (750 if references else 1500)
    assert len(bodies[0]) < len(bodies[1])
    back = torch.empty_like(t)
    decode_body(np.frombuffer(bodies[1], np.uint8), back, bounded=bound > 0)
    assert float((back.double() - t.double()).abs().max()) <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("relative", [False, True])
def test_steps_and_outliers_are_those_of_the_twins(dtype, relative):
    generator = torch.Generator().manual_seed(3)
    info = torch.finfo(dtype)
    t = torch.randn(40, 33, generator=generator)
    edges = torch.tensor([info.max, info.min, info.tiny, info.tiny / 8, 0.0, -0.0, float("inf")])
    mixed = t.clone()
    mixed[::9, ::5] = edges[torch.randint(len(edges), mixed[::9, ::5].shape, generator=generator)]
    mixed[5, 5] = float("nan")
    given = [t, mixed, t * info.tiny, torch.full((40, 7), 2.5), torch.full((9, 3), float("nan"))]
    given.append(torch.tensor([[0.0, -0.0]] * 9))
    for bound in (1e-7, 1e-5, 1e-3, 0.03, 1.0):
        codec = BoundedVectorCodec(bound, relative=relative)
        tensors = [x.to(dtype) for x in given]
        assert_same_bytes([codec] * len(tensors), tensors, SimtRunner(0))


@settings(max_examples=25, deadline=None)
@given(
    arrays.arrays(
        np.int32,
        st.tuples(st.integers(0, 20), st.integers(1, 9)),
        elements=st.integers(-(2**31), 2**31 - 1),
    ),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.floats(1e-40, 1e38),
    st.booleans(),
    st.sampled_from([None, 32, 255]),
    st.integers(0, 9),
)
def test_any_bits_are_written_as_the_twins_write_them(bits, dtype, bound, relative, window, seed):
    row = bits.shape[1] * 4 // dtype.itemsize
    t = torch.tensor(bits.flatten().tolist(), dtype=torch.int32).view(dtype).view(len(bits), row)
    t = torch.cat([t.repeat_interleave(3, 0), t])
    bounded = BoundedVectorCodec(bound, relative=relative, window=window)
    assert_same_bytes([bounded, VectorLzCodec(window)], [t, t], SimtRunner(seed))


@pytest.mark.parametrize("name", ["raw", "huffman", "outliers", "int64", "complex"])
def test_a_buffer_with_a_header_is_that_of_the_codec(name):
    codec, t, _, _ = CASES[name]
    wanted = codec.encode(t).trimmed().data
    data = guarded(
        torch.full((HEADER_BYTES + raw_body_bytes(t.nbytes) + 15,), FILL).byte()[
            : -(-(HEADER_BYTES + raw_body_bytes(t.nbytes)) // 16) * 16
        ]
    )
    runner = SimtRunner()
    form = codec.form | t.element_size() << 32
    VectorEncodeKernels(runner).encode_vector(guarded(t), codec.options(), form, data)
    assert torch.equal(data[: len(wanted)], wanted) and bool((data[len(wanted) :] == FILL).all())
    assert len(runner.launched) <= 7


def test_what_kernels_do_not_take_is_refused():
    kernels, out = VectorEncodeKernels(SimtRunner()), torch.zeros(64, dtype=torch.uint8)
    t, options = torch.zeros(4, 2), VectorOptions()
    with pytest.raises(bitslab.ArgumentError, match="tensors: 0, .* accepted are 1 to 65535"):
        kernels.encode_vectors([], [], out)
    with pytest.raises(
        bitslab.ArgumentTypeError, match="tensors: of .*float16.*float32.*, the plan"
    ):
        kernels.encode_vectors([t, t.half()], [options] * 2, out)
    with pytest.raises(bitslab.ArgumentError, match="fewer than 1073741824 numbers"):
        kernels.encode_vectors([t[:1, :1].expand(1 << 15, 1 << 15)], [options], out)


def test_a_plan_serves_any_number_of_calls():
    options = [VectorOptions(0.1), VectorOptions()]
    runner = SimtRunner()
    plan = VectorPlan.encoding([torch.Size((90, 8))] * 2, torch.float32, options)
    for seed in range(2):
        tensors = [rows_of(90, 8, 30, seed)] * 2
        out = torch.zeros(send_bytes(tensors), dtype=torch.uint8)
        offsets, sizes = VectorEncodeKernels(runner).encode_vectors(tensors, plan, out)
        codecs: list[Codec] = [BoundedVectorCodec(0.1), VectorLzCodec()]
        for codec, t, at, n in zip(
            codecs,
            tensors,
            offsets.tolist(),
            sizes.tolist(),
            strict=False,
        ):
            assert torch.equal(out[at : at + n], expected(codec, t))


def test_calls_of_the_same_shapes_share_a_plan_whatever_their_bounds(monkeypatch):
    """Bounds are those of each call, as numbers or where the rows are; shapes are checked anew."""
    made = []
    real = VectorPlan.encoding.__func__  # type: ignore[attr-defined]

    def counted(*args):
        made.append(args)
        return real(*args)

    monkeypatch.setattr(VectorPlan, "encoding", classmethod(counted))
    kernels = VectorEncodeKernels(SimtRunner())
    tensors = [rows_of(90, 8, 30), rows_of(90, 8, 30, 1)]
    out = torch.zeros(send_bytes(tensors), dtype=torch.uint8)
    for bound in (0.1, 0.01, 0.1, 0.03):
        there = torch.tensor(bound, dtype=torch.float64) if bound == 0.03 else bound
        options = [VectorOptions(there), VectorOptions(bound / 2)]
        offsets, sizes = kernels.encode_vectors(tensors, options, out)
        for t, limit, at, n in zip(
            tensors, (bound, bound / 2), offsets.tolist(), sizes.tolist(), strict=False
        ):
            assert torch.equal(out[at : at + n], expected(BoundedVectorCodec(limit), t))
    assert len(made) == 2, "one of numbers, one of a bound on the device"
    with pytest.raises(bitslab.ArgumentTypeError, match="the plan is of"):
        kernels.encode_vectors([tensors[0], tensors[1].int()], options, out)


def test_plans_that_kernels_keep_are_bounded():
    plans, t = VectorPlans(), torch.zeros(200, 2)
    kept = [plans.decoding([t[: n + 1]], [True], None) for n in range(3 * MOST_PLANS)]
    assert [plan.shapes[0][0] for plan in kept] == [n + 1 for n in range(3 * MOST_PLANS)]
    assert len(plans) <= MOST_PLANS
    assert plans.decoding([t[:7]], [True], None) is plans.decoding([t[:7]], [True], None)
    assert plans.decoding([t[:7]], [False], None) is not plans.decoding([t[:7]], [True], None)


def test_rows_with_outliers_are_no_references():
    t = torch.ones(50, 8)
    t[::2, 0], t[::4, 0] = 1e30, 2e30
    assert_same_bytes([BoundedVectorCodec(0.01)], [t], SimtRunner(1))
    codecs: list[Codec] = [BoundedVectorCodec(0.01), BoundedVectorCodec(0.01, window=32)]
    assert_same_bytes(codecs, [with_outliers().repeat(2, 1)] * 2, SimtRunner(0))


@pytest.mark.parametrize("relative", [False, True])
def test_a_bound_is_read_where_the_rows_are(relative):
    tensors = [rows_of(300, 8, 90), torch.randn(70, 5), torch.ones(4, 4)]
    bounds = [torch.tensor(b, dtype=torch.float64) for b in (0.03, 0.2, 0.0)]
    out = torch.zeros(send_bytes(tensors), dtype=torch.uint8)
    options = [VectorOptions(guarded(bound), relative) for bound in bounds]
    kernels = VectorEncodeKernels(SimtRunner(0))
    offsets, sizes = kernels.encode_vectors(list(map(guarded, tensors)), options, out)
    places = zip(tensors, bounds, offsets.tolist(), sizes.tolist(), strict=False)
    for t, bound, start, size in places:
        given = float(bound)
        codec = BoundedVectorCodec(given, relative=relative) if given else VectorLzCodec()
        assert torch.equal(out[start : start + size], expected(codec, t))
