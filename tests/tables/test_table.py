"""CompressedTable: rows by id of every dtype and size, indexing, bad arguments, sizes, counts."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import bitslab
from bitslab import (
    ArgumentError,
    ArgumentTypeError,
    BitslabError,
    CompressedTable,
    IndexRangeError,
    InvariantCodec,
    RawCodec,
)
from bitslab.tables import build
from tests.helpers import DTYPES, dtype_id, packable, random_bits, same_bits, take, traits
from tests.tables.kinds import KINDS, make, weights
from tests.tables.support import inode_at, open_files

SHAPES = [(300,), (100, 7), (64, 64), (70, 3, 5), (1, 333), (33, 0), (0, 7), (0,), (5, 0, 2)]


def shape_id(shape) -> str:
    return "x".join(map(str, shape))


# Rows


@pytest.mark.drawn(12)
@pytest.mark.pairwise(dtype=traits)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_every_dtype_and_shape_comes_back_bit_for_bit(kind, dtype):
    for shape in SHAPES:
        for values in (packable, random_bits):
            x = values(dtype, shape)
            with make(x, kind) as table:
                n = shape[0]
                assert table.shape == x.shape and table.dtype == dtype and len(table) == n
                assert same_bits(table[:], x)
                if n:
                    ids = torch.randint(-n, n, (41,))
                    assert same_bits(table.gather(ids), take(x, ids % n))
                    assert same_bits(table.gather(ids.int()), take(x, ids % n))
                assert same_bits(table.gather(torch.tensor([], dtype=torch.int64)), x[:0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row_bytes", [1020, 1024, 1028, 5000, 256 << 10, (256 << 10) + 4])
def test_rows_around_each_width_of_length_are_gathered(kind, row_bytes):
    x = packable(torch.float32, (40, row_bytes // 4))
    x[7] = random_bits(torch.float32, (1, row_bytes // 4))  # kept raw
    options = {} if kind == "raw" else {"uniform": True, "grouped": False, "chunk_bytes": 4}
    with make(x, kind, **options) as table:
        ids = torch.tensor([39, 7, 0, 7, -1])
        assert same_bits(table.gather(ids), take(x, ids % 40))
        assert table.stats()["packed_rows"] == (0 if kind == "raw" else 39)


def test_clusters_are_kept_for_each_row():
    x = torch.cat([weights(200, 32), weights(200, 32, seed=1) * 1e9])[torch.randperm(400)]
    for layout in ("compact", "inplace"):
        table = CompressedTable.from_tensor(
            x, layout, "ibp", clusters=2, code_bits=1, chunk_bytes=4, uniform=False
        )
        assert isinstance(table.codec, InvariantCodec) and table.codec.clusters == 2
        ids = torch.randint(400, (1000,))
        assert same_bits(table.gather(ids), x[ids])


# Indexing


@pytest.mark.parametrize(
    "index",
    [
        3,
        -1,
        np.int64(4),
        slice(None),
        slice(90, None, -7),
        slice(5, 5),
        [3, 1, 3],
        [],
        np.array([[1, -2], [3, 4]], np.int32),
        torch.tensor([[9, 8], [7, 6]]),
        torch.tensor(5),
        torch.tensor([1, 2], dtype=torch.uint8),
        torch.arange(100) % 3 == 0,
        np.arange(100) % 7 == 0,
    ],
    ids=lambda i: f"{type(i).__name__}-{str(i)[:14]!r}",
)
def test_an_index_means_what_it_means_to_the_tensor(index):
    x = weights(100, 16)
    table = make(x, "compact")
    if isinstance(index, slice):
        expected = torch.from_numpy(x.numpy()[index].copy())
    else:
        plain = torch.as_tensor(index)
        expected = x[plain if plain.dtype == torch.bool else plain.long()]
    assert same_bits(table[index], expected)


def test_a_table_can_be_iterated_and_be_a_dataset():
    x = weights(10, 4)
    table: Any = make(x, "compact")
    assert same_bits(torch.stack(list(table)), x)


@pytest.mark.parametrize(
    ("index", "error", "says"),
    [
        (100, IndexRangeError, r"index 100 at position 0 .* 100 rows \(accepted are -100 to 99\)$"),
        (-101, IndexRangeError, r"index -101 .* \(accepted are -100 to 99\)$"),
        (1 << 70, IndexRangeError, "out of range"),
        ([1, 100], IndexRangeError, "index 100 at position 1"),
        ((1, 2), ArgumentTypeError, "only rows can be indexed"),
        (None, ArgumentTypeError, "only rows can be indexed"),
        (True, ArgumentTypeError, "only rows can be indexed"),
        ("a", ArgumentTypeError, "only rows can be indexed"),
        (1.5, ArgumentTypeError, "dtype torch.float32"),
        ({1}, ArgumentTypeError, "got set"),
        (torch.ones(99, dtype=torch.bool), ArgumentError, "mask of shape"),
    ],
    ids=lambda v: str(v)[:12] if not isinstance(v, type) else v.__name__,
)
def test_an_index_that_is_none_is_refused(index, error, says):
    with pytest.raises(error, match=says):
        make(weights(100, 16), "compact")[index]


def test_a_table_without_rows_accepts_no_index():
    with pytest.raises(IndexRangeError, match=r"for 0 rows \(none is accepted\)$"):
        make(weights(0, 16), "compact")[0]


# Arguments of gather


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_the_first_bad_id_is_reported_and_out_is_left_as_it_was(kind, dtype):
    table = make(weights(1000, 16), kind)
    out = torch.full((4, 16), 7.0)
    for bad in (1000, -1001, 30_000):
        ids = torch.tensor([0, 999, bad, 20_000], dtype=dtype)
        with pytest.raises(IndexRangeError, match=rf"index {bad} at position 2 .*1000 rows"):
            table.gather(ids, out=out)
        assert (out == 7).all()


@pytest.mark.parametrize(
    ("ids", "error", "says"),
    [
        ([1, 2], ArgumentTypeError, "ids: expected a torch.Tensor, got list"),
        (torch.tensor([1.0]), ArgumentTypeError, "ids: dtype torch.float32"),
        (torch.tensor([True]), ArgumentTypeError, "ids: dtype torch.bool"),
        (torch.tensor([[1]]), ArgumentError, r"ids: shape \[1, 1\]"),
        (torch.tensor([[1]], dtype=torch.int32), ArgumentError, r"ids: shape \[1, 1\]"),
        (torch.tensor(1), ArgumentError, r"ids: shape \[\]"),
        (torch.tensor([1]).to_sparse(), ArgumentTypeError, "ids: expected a dense tensor"),
        (torch.tensor([1], device="meta"), ArgumentTypeError, "ids: on meta"),
    ],
    ids=["list", "float", "bool", "2-d", "2-d-int32", "0-d", "sparse", "meta"],
)
def test_ids_that_are_none_are_refused(ids, error, says):
    with pytest.raises(error, match=says):
        make(weights(), "compact").gather(ids)


@pytest.mark.parametrize(
    ("out", "error", "says"),
    [
        (torch.zeros(3, 64), ArgumentError, r"out: shape \[3, 64\], expected \[2, 64\]"),
        (torch.zeros(2, 64).double(), ArgumentTypeError, "out: dtype torch.float64"),
        (torch.zeros(1, 64).expand(2, 64), ArgumentError, "out: several of its elements"),
        (torch.zeros(2, 64, requires_grad=True), ArgumentError, "out: requires grad"),
        (np.zeros((2, 64)), ArgumentTypeError, "out: expected a torch.Tensor"),
        (torch.zeros(2, 64, device="meta"), ArgumentTypeError, "out: on meta"),
    ],
    ids=["shape", "dtype", "overlap", "grad", "array", "meta"],
)
def test_an_out_that_does_not_fit_is_refused(out, error, says):
    with pytest.raises(error, match=says):
        make(weights(), "compact").gather(torch.tensor([1, 2]), out=out)


def test_out_is_written_and_returned_for_any_strides():
    x = weights()
    ids = torch.tensor([5, 5, 999])
    for kind in KINDS:
        table = make(x, kind)
        for out in (torch.zeros(3, 64), torch.zeros(64, 3).T, torch.zeros(3, 200)[:, 5:69]):
            assert table.gather(ids, out=out, device="cpu") is out
            assert same_bits(out, x[ids])
    room = torch.zeros(2 * 64, dtype=torch.int64)
    with pytest.raises(ArgumentTypeError):
        table.gather(room[:2], out=room.view(2, 64))
    numbers = make(torch.arange(100)[:, None].expand(100, 1), "raw")
    with pytest.raises(ArgumentError, match="shares memory"):
        numbers.gather(room[:2], out=room[1:3].view(2, 1))


@pytest.mark.parametrize(
    ("device", "error", "says"),
    [
        ("cuda:77", ArgumentError, r"device: cuda:77, but torch sees (no|\d+) CUDA GPU"),
        ("nonsense", ArgumentError, "device: 'nonsense' names no device"),
        ("mps", ArgumentTypeError, "device: mps, accepted are cpu and cuda"),
    ],
)
def test_a_device_that_is_not_there_is_refused(device, error, says):
    x = weights()
    with pytest.raises(error, match=says):
        make(x, "compact").gather(torch.tensor([1]), device=device)
    with pytest.raises(error, match=says):
        CompressedTable.from_tensor(x, device=device)


def test_the_cpu_has_one_name():
    assert make(weights(), "raw").gather(torch.tensor([1]), device="cpu:0").device.type == "cpu"


# End


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_table_says_so(kind, tmp_path):
    table = make(weights(), kind)
    address = table._parts.tensors["words"].data_ptr()
    table.close()
    table.close()
    for use in (
        lambda: table.gather(torch.tensor([1])),
        lambda: table[1],
        lambda: table.stats(),
        lambda: table.update(torch.tensor([1]), weights(1)),
        lambda: table.compact(),
        lambda: table.handle(),
        lambda: table.save(tmp_path / "t"),
        lambda: pickle.dumps(table),
        lambda: table.advice("cpu"),
        lambda: bitslab.SlabCache(table, 1000, ["cpu"]).fill(torch.tensor([1])),
    ):
        with pytest.raises(BitslabError, match="closed"):
            use()
    assert repr(table) == "CompressedTable(closed)" and len(table) == 1000
    with pytest.raises(AssertionError, match="nothing is mapped"):
        inode_at(address)


def test_a_deleted_table_leaves_nothing_open():
    make(weights(), "compact")
    gc.collect()
    before = open_files()
    table = make(weights(), "compact")
    assert open_files() - before
    del table
    gc.collect()
    assert not open_files() - before


# Sizes and counts


@pytest.mark.parametrize("columns", [16, 256, 257, 3703])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 5000])
def test_a_compact_table_takes_its_packed_rows_and_the_metadata_only(columns, n):
    x = weights(min(n, 500), columns)[torch.arange(n) % 500]
    with make(x, "compact") as table:
        packed = int(table.codec.packed_bytes(x).sum())
        per_row = 1 if 4 * columns <= 1024 else 2
        metadata = per_row * n + 8 * (math.ceil(n / 32) + 1)
        padding = 16
        parts = table._parts
        assert sum(b.nbytes for b in parts.buffers.values()) == packed + metadata + padding
        assert metadata <= (1.5 if 4 * columns <= 1024 else 2.5) * n + 16
        stats = table.stats()
        assert stats["packed_bytes"] == packed + padding
        assert stats["metadata_bytes"] == metadata + table.codec.profile_bytes
        assert stats["host_bytes"] == table.nbytes == packed + padding + stats["metadata_bytes"]
        assert stats["ratio"] == pytest.approx(x.nbytes / table.nbytes)
        assert set(parts.tensors) == {"words", "bases", "lengths"}
        for name, t in parts.tensors.items():
            assert t.untyped_storage().nbytes() == parts.buffers[name].nbytes


def test_a_table_in_place_takes_its_rows_and_one_bit_each():
    x = weights(1000, 33)
    table = make(x, "in-place")
    assert table.nbytes - table.codec.profile_bytes == x.nbytes + 16 + 4 * math.ceil(1000 / 32)


def test_rows_that_gain_nothing_are_kept_raw_and_cost_nothing():
    x = random_bits(torch.uint8, (2000, 100))
    for layout in ("compact", "inplace"):
        table = CompressedTable.from_tensor(x, layout)
        assert isinstance(table.codec, RawCodec)
        stats = table.stats()
        assert stats["metadata_bytes"] == 0 and stats["packed_bytes"] == x.nbytes + 16
    few = weights(4, 300)
    table = CompressedTable.from_tensor(few, codec="auto")
    assert table.nbytes <= few.nbytes + 16  # the profile counts too


def test_a_sample_that_promises_too_much_ends_in_a_raw_table(monkeypatch):
    # The sample comes from the first batch, which is all zeros.
    monkeypatch.setattr(build, "SAMPLE_BYTES", 64)
    batches = [torch.zeros(100, 64), random_bits(torch.float32, (40_000, 64))]
    seen: list[int] = []
    table = CompressedTable.from_tensor(
        iter(batches), progress=lambda done, total: seen.append(done)
    )
    assert isinstance(table.codec, RawCodec) and table.stats()["metadata_bytes"] == 0
    assert same_bits(table[90:200], torch.cat([batches[0][-10:], batches[1][:100]]))
    assert max(seen) == 40_100 and seen.count(40_100) == 2


def test_counts_are_exact():
    x = weights(1000, 64)
    for kind in KINDS:
        table = make(x, kind)
        ids = torch.tensor([1, 1, 5, 999])
        table.gather(ids)
        with pytest.raises(IndexRangeError):
            table.gather(torch.tensor([1000]))
        table.gather(ids[:0])
        table[7]
        list(table.batches())
        stats = table.stats()
        assert (stats["gathers"], stats["gathered_rows"]) == (3, 5)
        assert stats["gathered_bytes"] == 5 * 256
        each = table.codec.packed_bytes(x[[1, 1, 5, 999, 7]])
        assert stats["moved_bytes"] == int(each.sum())
        assert stats["rows"] == 1000 and stats["raw_bytes"] == x.nbytes
        assert stats["moved_rows"] == stats["overflow_bytes"] == 0
        assert stats["layout"] == KINDS[kind][0] and stats["row_bytes"] == 256
        assert stats["advice"] == {} and stats["pinned"] is False or torch.cuda.is_available()


def test_the_repr_names_shape_dtype_layout_plan_and_ratio():
    table = make(weights(), "compact")
    text = repr(table)
    assert text.startswith("CompressedTable([1000, 64], float32, compact, ibp ")
    assert text.endswith(f"{table.stats()['ratio']:.2f}x)")
    assert "1.00x" in repr(make(torch.zeros(0, 4), "raw"))


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_copies_have_memory_of_their_own(kind, copied):
    x = weights()
    table = make(x, kind)
    other = copied(table)
    other.update(torch.tensor([3]), x[:1] * 1e30)
    table.update(torch.tensor([4]), x[:1])
    assert same_bits(table[[3, 4]], x[[3, 0]])
    table.close()
    assert same_bits(other[[3, 4, 5]], torch.stack([x[0] * 1e30, x[4], x[5]]))
    assert other.codec == table.codec and isinstance(table.codec, (InvariantCodec, RawCodec))


def test_advice_says_what_the_models_think_and_is_not_counted(monkeypatch, tmp_path):
    monkeypatch.setenv("BITSLAB_CACHE", str(tmp_path))
    table = make(weights(5000, 256), "compact")
    advice = table.advice("cpu")
    assert advice.packed and advice.packed_reasons
    assert table.stats()["gathers"] == 0 and table.stats()["moved_bytes"] == 0
