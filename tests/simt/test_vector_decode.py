"""Bodies of rows of which equal ones are kept once: the kernels read what the twins write."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bitslab
from bitslab.engine.codecs import Blob, BoundedVectorCodec, VectorLzCodec
from bitslab.engine.codecs.blob import HEADER_BYTES
from bitslab.engine.codecs.vectors import decode_body
from bitslab.engine.kernels.cuda.runner import BLOB_ERROR, NO_ERROR
from bitslab.engine.kernels.cuda.vector_decode import ROOM, VectorDecodeKernels
from bitslab.engine.kernels.vector_chunks import VectorPlan
from bitslab.engine.kernels.vector_format import BodyHeader, References, RowCoding
from tests.helpers import same_bits
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner

Codec = VectorLzCodec | BoundedVectorCodec
FILL = 0xA5


def rows_of(n: int, row: int, distinct: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(distinct, row, generator=generator)
    return table[torch.randint(distinct, (n,), generator=generator)]


def with_outliers(n: int = 300) -> torch.Tensor:
    t = rows_of(n, 16, n // 3)
    t[7, 3], t[8, 0], t[n - 1, 15] = float("nan"), 1e30, -float("inf")
    return t


def chained(n: int) -> torch.Tensor:
    """Rows that each refer to the one before, past many tiles of rows."""
    return torch.ones(n, 4)


def body_of(codec: Codec, t: torch.Tensor) -> torch.Tensor:
    """Return a body in memory that ends where no kernel may read."""
    body = codec.encode(t).trimmed().data[HEADER_BYTES:]
    whole = torch.zeros(-(-len(body) // 4) * 4, dtype=torch.uint8)
    whole[: len(body)] = body
    return guarded(whole)[: len(body)]


def header_of(body: torch.Tensor) -> BodyHeader:
    found = BodyHeader.from_bytes(body[:24].numpy().tobytes())
    assert found is not None
    return found


def decoded(
    runner: SimtRunner, bodies: Sequence[torch.Tensor], like: Sequence[torch.Tensor], bounded: bool
) -> list[torch.Tensor]:
    """Decode bodies to memory that ends where no kernel may write."""
    outs = [guarded(torch.full((t.nbytes,), FILL, dtype=torch.uint8)) for t in like]
    shaped = [o.view(t.dtype).view(t.shape) for o, t in zip(outs, like, strict=True)]
    VectorDecodeKernels(runner).decode_vectors(bodies, shaped, [bounded] * len(like))
    return shaped


CASES: dict[str, tuple[Codec, torch.Tensor, RowCoding, References]] = {
    "coded": (VectorLzCodec(), rows_of(1500, 16, 3), RowCoding.RAW, References.CODED),
    "split-coded": (VectorLzCodec(), rows_of(2100, 64, 50), RowCoding.SPLIT, References.CODED),
    "split-index": (VectorLzCodec(), rows_of(60, 16, 45), RowCoding.SPLIT, References.INDEX),
    "window": (VectorLzCodec(32), rows_of(60, 16, 9), RowCoding.RAW, References.WINDOW),
    "long-window": (VectorLzCodec(255), rows_of(900, 16, 30), RowCoding.SPLIT, References.WINDOW),
    "chained": (VectorLzCodec(32), chained(1000), RowCoding.RAW, References.WINDOW),
    "split": (VectorLzCodec(), torch.randn(300, 64), RowCoding.SPLIT, References.NONE),
    "raw": (VectorLzCodec(), torch.randint(256, (7, 9)).byte(), RowCoding.RAW, References.NONE),
    "bytes": (
        VectorLzCodec(),
        torch.randint(9, (500, 9)).byte(),
        RowCoding.SPLIT,
        References.NONE,
    ),
    "int64": (VectorLzCodec(), torch.randint(9, (500, 9)), RowCoding.SPLIT, References.NONE),
    "int16": (
        VectorLzCodec(),
        rows_of(90, 8, 9).mul(99).short(),
        RowCoding.RAW,
        References.CODED,
    ),
    "complex": (
        VectorLzCodec(),
        torch.view_as_complex(rows_of(90, 8, 70).view(90, 4, 2)),
        RowCoding.SPLIT,
        References.INDEX,
    ),
    "huffman": (
        BoundedVectorCodec(0.2),
        rows_of(170, 64, 150),
        RowCoding.HUFFMAN,
        References.INDEX,
    ),
    "huffman-all": (
        BoundedVectorCodec(0.3),
        torch.randn(150, 64).bfloat16(),
        RowCoding.HUFFMAN,
        References.NONE,
    ),
    "fixed": (BoundedVectorCodec(1e-3), rows_of(40, 16, 30), RowCoding.FIXED, References.INDEX),
    "fixed-half": (
        BoundedVectorCodec(1e-3),
        torch.rand(40, 16).half(),
        RowCoding.FIXED,
        References.NONE,
    ),
    "outliers": (
        BoundedVectorCodec(0.01),
        with_outliers(),
        RowCoding.HUFFMAN,
        References.INDEX,
    ),
    "outliers-coded": (
        BoundedVectorCodec(1e-4),
        torch.cat([with_outliers(12)[7:9], rows_of(400, 16, 4)]),
        RowCoding.FIXED,
        References.CODED,
    ),
    "outliers-alone": (
        BoundedVectorCodec(0.2, references=False),
        with_outliers(),
        RowCoding.HUFFMAN,
        References.NONE,
    ),
    "one-symbol": (
        BoundedVectorCodec(0.2, references=False),
        torch.ones(40, 64),
        RowCoding.FIXED,
        References.NONE,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_kernels_read_what_the_twins_write(name, seed):
    codec, t, coding, references = CASES[name]
    body, runner = body_of(codec, t), SimtRunner(seed)
    if name != "raw":
        assert (header_of(body).coding, header_of(body).references) == (coding, references)
    bounded = codec.error_bound is not None
    wanted = torch.empty_like(t)
    decode_body(body.numpy(), wanted, bounded=bounded)
    for found in decoded(runner, [body, body], [t, t], bounded):
        assert same_bits(found, wanted) and runner.mailbox[0] == NO_ERROR
    assert len(runner.launched) == 4


def test_bodies_of_all_kinds_are_read_at_once():
    chosen = [c for c in CASES.values() if c[1].dtype == torch.float32]
    bodies, like = [body_of(codec, t) for codec, t, _, _ in chosen], [c[1] for c in chosen]
    empty = torch.zeros(0, 5)
    bodies.append(body_of(VectorLzCodec(), empty))
    runner = SimtRunner(2)
    found = decoded(runner, bodies, [*like, empty], bounded=True)
    for (codec, t, _, _), one in zip(chosen, found, strict=False):
        assert same_bits(one, codec.decode(codec.encode(t)))
    assert len(runner.launched) == 4 and runner.mailbox[0] == NO_ERROR


@pytest.mark.parametrize("budget", [1, 2])
def test_a_budget_bounds_the_blocks(budget):
    codec, t = VectorLzCodec(), rows_of(2100, 64, 50)
    bodies = [body_of(codec, t)] * 11
    outs, runner = [torch.zeros_like(t) for _ in bodies], SimtRunner(1)
    VectorDecodeKernels(runner).decode_vectors(bodies, outs, [False] * 11, sm_budget=budget)
    assert all(same_bits(out, t) for out in outs)
    most = budget * ROOM
    assert all(np.prod(grid) <= most for grid in runner.grids)


def test_headers_are_read_on_the_device():
    codec, t = BoundedVectorCodec(0.2), rows_of(170, 64, 150)
    blob = codec.encode(t).trimmed()
    form = codec.form | t.element_size() << 32
    wanted = codec.decode(blob)
    spare = torch.cat([blob.data, torch.full((-len(blob.data) % 16 + 16,), FILL).byte()])
    runner, out = SimtRunner(), torch.zeros_like(t)
    kernels = VectorDecodeKernels(runner)
    kernels.decode_vectors([spare], [out], [True], form)
    assert same_bits(out, wanted) and runner.mailbox[0] == NO_ERROR
    for place, value in ((0, 31), (0, len(spare) + 1), (1, 7), (2, 20), (3, 63)):
        damaged = spare.clone()
        damaged[8 * place :][:8].view(torch.int64)[0] = value
        out.fill_(7)
        kernels.decode_vectors([damaged], [out], [True], form)
        assert runner.mailbox[0] == BLOB_ERROR and bool((out == 7).all())
        runner.mailbox.zero_()


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
)
def test_any_bits_come_back_as_the_twins_bring_them(bits, dtype, bound, relative, window):
    row = bits.shape[1] * 4 // dtype.itemsize
    t = torch.tensor(bits.flatten().tolist(), dtype=torch.int32).view(dtype).view(len(bits), row)
    t = t.repeat_interleave(3, 0)
    for codec in (
        BoundedVectorCodec(bound, relative=relative, window=window),
        VectorLzCodec(window),
    ):
        runner = SimtRunner()
        bounded = codec.error_bound is not None
        found = decoded(runner, [body_of(codec, t)], [t], bounded)
        assert same_bits(found[0], codec.decode(codec.encode(t)))
        assert runner.mailbox[0] == NO_ERROR


@pytest.fixture
def guarded_scratch(monkeypatch):
    """Give kernels scratch memory, of any content, that ends where they may not write."""
    real = torch.empty

    def empty(*shape, **options):
        found = real(*shape, **options)
        return guarded(found.fill_(FILL)) if found.dtype == torch.uint8 else found

    monkeypatch.setattr(torch, "empty", empty)


FUZZED = ("coded", "split-index", "window", "huffman", "fixed", "outliers-alone")


@pytest.mark.parametrize("name", FUZZED)
def test_flipped_bytes_are_refused_as_by_the_twins(name, guarded_scratch):
    codec, t, _, _ = CASES[name]
    # Few rows, that are coded as the many are.
    t = t[:70]
    bounded, body = codec.error_bound is not None, body_of(codec, t)
    generator, runner, refused = np.random.default_rng(1), SimtRunner(), 0
    head = header_of(body).nbytes
    for round_ in range(60):
        # Every other time in the header, where each byte counts.
        end = len(body) if round_ % 2 else head
        places = generator.integers(0, end, generator.integers(1, 4))
        kept = body[places].clone()
        body[places] = torch.from_numpy(generator.integers(0, 256, len(places), dtype=np.uint8))
        wanted = torch.full_like(t, 7)
        try:
            decode_body(body.numpy(), wanted, bounded=bounded)
            sound = True
        except bitslab.CorruptedDataError:
            sound = False
        out = guarded(torch.full_like(t, 7))
        VectorDecodeKernels(runner).decode_vectors([body], [out], [bounded])
        assert bool(runner.mailbox[0] == NO_ERROR) == sound
        assert same_bits(out, wanted)
        refused += not sound
        runner.mailbox.zero_()
        body[places] = kept
    assert 10 < refused < 60


@pytest.mark.parametrize("name", FUZZED)
def test_cut_bodies_are_refused(name, guarded_scratch):
    codec, t, _, _ = CASES[name]
    t = t[:70]
    body, runner = body_of(codec, t), SimtRunner()
    for end in (0, 4, 8, 20, len(body) // 8 * 4, len(body) - 4):
        cut, out = guarded(body[:end].clone()), guarded(torch.full_like(t, 7))
        VectorDecodeKernels(runner).decode_vectors([cut], [out], [codec.error_bound is not None])
        assert runner.mailbox[0] == BLOB_ERROR and bool((out == 7).all())
        with pytest.raises(bitslab.CorruptedDataError):
            decode_body(cut.numpy(), out, bounded=codec.error_bound is not None)
        runner.mailbox.zero_()


def test_one_damaged_body_leaves_the_others_alone():
    codec, t = VectorLzCodec(), rows_of(60, 16, 45)
    bodies = [body_of(codec, t) for _ in range(3)]
    bodies[1][4] ^= 1
    runner = SimtRunner()
    found = decoded(runner, bodies, [t] * 3, bounded=False)
    assert same_bits(found[0], t) and same_bits(found[2], t)
    assert runner.mailbox.tolist()[:2] == [BLOB_ERROR, 1]
    assert bool((found[1].view(torch.uint8) == FILL).all())


def test_more_tensors_than_rows_of_a_grid_are_refused():
    t = torch.zeros(1)
    with pytest.raises(bitslab.ArgumentError, match="tensors: 0, .* accepted are 1 to 65535"):
        VectorDecodeKernels(SimtRunner()).decode_vectors([], [], [])
    with pytest.raises(bitslab.ArgumentError, match="a GPU takes fewer than 4294967296 numbers"):
        wide = t.expand(1 << 16, 1 << 16)
        VectorDecodeKernels(SimtRunner()).decode_vectors([t.byte()], [wide], [False])


def test_tensors_of_another_plan_are_refused():
    t = torch.zeros(4, 2)
    plan = VectorPlan.decoding([t.shape], t.dtype, [False])
    kernels, body = VectorDecodeKernels(SimtRunner()), torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(
        bitslab.ArgumentError, match="tensors: 1 and 1 bodies, the plan is of 1, or"
    ):
        kernels.decode_vectors([body], [t.view(2, 4)], plan)
    with pytest.raises(bitslab.ArgumentError, match="tensors: 2 and 1 bodies, the plan is of 1"):
        kernels.decode_vectors([body], [t, t], plan)
    with pytest.raises(bitslab.ArgumentTypeError, match="int32.*, the plan is of torch.float32"):
        kernels.decode_vectors([body], [t.int()], plan)


def test_a_plan_serves_any_number_of_calls():
    codec, t = VectorLzCodec(), rows_of(60, 16, 45)
    plan, runner = VectorPlan.decoding([t.shape] * 2, t.dtype, [False] * 2), SimtRunner()
    for seed in range(2):
        given = [rows_of(60, 16, 45, seed), rows_of(60, 16, 5, seed)]
        outs = [torch.zeros_like(t) for _ in given]
        bodies = [body_of(codec, x) for x in given]
        VectorDecodeKernels(runner).decode_vectors(bodies, outs, plan)
        assert all(same_bits(a, b) for a, b in zip(outs, given, strict=True))


def test_an_infinite_step_is_refused():
    codec, t, _, _ = CASES["huffman"]
    blob = codec.encode(t)
    step = blob.data[HEADER_BYTES + 12 :][:4]
    step.view(torch.float32)[0] = float("inf")
    with pytest.raises(bitslab.CorruptedDataError, match="do not fit"):
        codec.decode(Blob(blob.data, t.shape, t.dtype))
