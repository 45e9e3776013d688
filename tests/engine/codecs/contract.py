"""What every row codec promises: a class of tests for each codec to inherit.

A codec's tests derive from `RowCodecContract`, name the codec and list the options that it is
fitted with; test_contract.py fails when a codec has no such class.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import multiprocessing
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import bitslab
from tests import spawned
from tests.helpers import DTYPES, bits_of, dtype_id, packable, random_bits, same_bits, take, traits

Options = Mapping[str, Any]
INDEX_DTYPES = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
ROW_SHAPES = {
    "scalars": (),
    "one-element": (1,),
    "odd": (67,),
    "matrix": (3, 16),
    "singleton-dimensions": (1, 33, 1),
}
COUNTS = [0, 1, 31, 32, 33, 100]
CHILD_SECONDS = 60
FORK_SECONDS = 15


def edge_rows(dtype: torch.dtype, n: int, columns: int) -> torch.Tensor:
    """Rows of what arithmetic would change: zeros with sign, subnormals, infinities, NaN payloads.

    The patterns are those of every floating-point format of the width, so that integers get them
    too; a bool has only its two values.
    """
    if dtype == torch.bool or n == 0:
        return (torch.arange(n * columns).view(n, columns) % 3 == 0).to(dtype)
    width = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    sign = 1 << (8 * width - 1)
    patterns = [0, 1, 2, 3, sign - 1, sign - 2]
    for mantissa_bits in {1: (2, 3), 2: (7, 10), 4: (23,), 8: (52,)}[width]:
        infinity = sign - (1 << mantissa_bits)
        quiet = 1 << (mantissa_bits - 1)
        patterns += [
            (1 << mantissa_bits) - 1,  # the largest subnormal
            1 << mantissa_bits,  # the smallest normal number
            infinity - 1,
            infinity,
            infinity + 1,  # signalling NaN
            infinity + quiet,
            infinity + quiet + 1,
        ]
    patterns += [p | sign for p in patterns]
    numbers = n * columns * (dtype.itemsize // width)
    data = b"".join(patterns[i * i % len(patterns)].to_bytes(width, "little") for i in range(50))
    data = (data * (numbers // 50 + 1))[: numbers * width]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(n, columns)


def parts_of(packed: bitslab.PackedRows) -> dict[str, bytes]:
    return {name: bits_of(part).numpy().tobytes() for name, part in packed.parts.items()}


def digest(t: torch.Tensor) -> str:
    """Digest without torch arithmetic, whose threads do not exist in a forked child."""
    return hashlib.sha256(t.numpy().tobytes()).hexdigest()


def decode_in_child(pickled: bytes, expected: list[str]) -> None:
    codec, packed, ids = pickle.loads(pickled)
    found = [digest(codec.decode(packed)), digest(codec.decode(packed, ids))]
    sys.exit(0 if found == expected else 3)


def overlapping_out(packed: bitslab.PackedRows, name: str, row: torch.Tensor) -> torch.Tensor:
    """One row in the memory of a part."""
    memory = packed.parts[name].reshape(-1).view(torch.uint8)[: row.nbytes]
    return memory.view(row.dtype).view(1, *row.shape)


# Bad arguments: how to make one from a good one, the error, and what its message must say: the
# argument, what came, what is accepted.

Bad = tuple[Callable[[Any], Any], type[Exception], list[str]]

BAD_ROWS: dict[str, Bad] = {
    "dtype": (
        lambda t: t.double(),
        bitslab.ArgumentTypeError,
        ["rows", "torch.float64", "torch.float32"],
    ),
    "same-size-dtype": (
        lambda t: t.view(torch.int32),
        bitslab.ArgumentTypeError,
        ["rows", "torch.int32", "torch.float32"],
    ),
    "short-row": (
        lambda t: t[:, :31],
        bitslab.ArgumentError,
        ["rows", "[100, 31]", "['N', 32]"],
    ),
    "one-row-without-its-dimension": (
        lambda t: t[0],
        bitslab.ArgumentError,
        ["rows", "[32]", "['N', 32]"],
    ),
    "extra-dimension": (
        lambda t: t[:, None],
        bitslab.ArgumentError,
        ["rows", "[100, 1, 32]", "['N', 32]"],
    ),
    "0-d": (lambda t: t[0, 0], bitslab.ArgumentError, ["rows", "[]", "['N', 32]"]),
    "list": (lambda t: t.tolist(), bitslab.ArgumentTypeError, ["rows", "list", "torch.Tensor"]),
    "numpy": (lambda t: t.numpy(), bitslab.ArgumentTypeError, ["rows", "ndarray", "torch.Tensor"]),
    "none": (lambda t: None, bitslab.ArgumentTypeError, ["rows", "NoneType", "torch.Tensor"]),
    "meta": (lambda t: t.to("meta"), bitslab.ArgumentTypeError, ["meta", "cpu"]),
}

# The good `out` holds 7 everywhere and is [100, 32] float32.
BAD_OUT: dict[str, Bad] = {
    "short-row": (lambda o: o[:, :31], bitslab.ArgumentError, ["out", "[100, 31]", "[100, 32]"]),
    "too-few-rows": (lambda o: o[:99], bitslab.ArgumentError, ["out", "[99, 32]", "[100, 32]"]),
    "flat": (lambda o: o.view(-1), bitslab.ArgumentError, ["out", "[3200]", "[100, 32]"]),
    "dtype": (
        lambda o: o.double(),
        bitslab.ArgumentTypeError,
        ["out", "torch.float64", "torch.float32"],
    ),
    "same-size-dtype": (
        lambda o: o.view(torch.int32),
        bitslab.ArgumentTypeError,
        ["out", "torch.int32", "torch.float32"],
    ),
    "list": (lambda o: o.tolist(), bitslab.ArgumentTypeError, ["out", "list", "torch.Tensor"]),
    "numpy": (lambda o: o.numpy(), bitslab.ArgumentTypeError, ["out", "ndarray", "torch.Tensor"]),
    "meta": (lambda o: o.to("meta"), bitslab.ArgumentTypeError, ["out", "meta", "cpu"]),
    "expanded-row": (
        lambda o: o[:1].expand(100, 32),
        bitslab.ArgumentError,
        ["out", "share memory", "contiguous"],
    ),
    "expanded-column": (
        lambda o: o[:, :1].expand(100, 32),
        bitslab.ArgumentError,
        ["out", "share memory", "contiguous"],
    ),
    "sliding-window": (
        lambda o: o.view(-1).as_strided((100, 32), (31, 1)),
        bitslab.ArgumentError,
        ["out", "share memory", "contiguous"],
    ),
    "requires-grad": (
        lambda o: o.requires_grad_(),
        bitslab.ArgumentError,
        ["out", "requires grad", "no_grad"],
    ),
}

RANGE = ["-100", "99"]
BAD_INDICES: dict[str, Bad] = {
    "one-too-high": (
        lambda _: torch.tensor([3, 100]),
        bitslab.IndexRangeError,
        ["indices", "index 100 ", "position 1 ", *RANGE],
    ),
    "one-too-low": (
        lambda _: torch.tensor([3, 4, -101]),
        bitslab.IndexRangeError,
        ["indices", "index -101 ", "position 2 ", *RANGE],
    ),
    "highest": (
        lambda _: torch.tensor([2**63 - 1]),
        bitslab.IndexRangeError,
        ["indices", f"index {2**63 - 1} ", *RANGE],
    ),
    "lowest": (
        lambda _: torch.tensor([-(2**63)]),
        bitslab.IndexRangeError,
        ["indices", f"index {-(2**63)} ", *RANGE],
    ),
    "too-high-uint8": (
        lambda _: torch.tensor([200], dtype=torch.uint8),
        bitslab.IndexRangeError,
        ["indices", "index 200 ", *RANGE],
    ),
    "first-of-many": (
        lambda _: torch.arange(5000),
        bitslab.IndexRangeError,
        ["indices", "index 100 ", "position 100 ", *RANGE],
    ),
    "float": (
        lambda _: torch.tensor([1.0]),
        bitslab.ArgumentTypeError,
        ["indices", "torch.float32", "int64"],
    ),
    "bool": (
        lambda _: torch.ones(100, dtype=torch.bool),
        bitslab.ArgumentTypeError,
        ["indices", "torch.bool", "int64"],
    ),
    "uint16": (
        lambda _: torch.ones(3, dtype=torch.uint16),
        bitslab.ArgumentTypeError,
        ["indices", "torch.uint16", "int64"],
    ),
    "2-d": (
        lambda _: torch.zeros(2, 3, dtype=torch.int64),
        bitslab.ArgumentError,
        ["indices", "[2, 3]", "one dimension"],
    ),
    "0-d": (
        lambda _: torch.tensor(3),
        bitslab.ArgumentError,
        ["indices", "[]", "one dimension"],
    ),
    "list": (lambda _: [1, 2], bitslab.ArgumentTypeError, ["indices", "list", "torch.Tensor"]),
    "int": (lambda _: 3, bitslab.ArgumentTypeError, ["indices", "int", "torch.Tensor"]),
    "numpy": (
        lambda _: np.arange(3),
        bitslab.ArgumentTypeError,
        ["indices", "ndarray", "torch.Tensor"],
    ),
    "meta": (
        lambda _: torch.zeros(3, dtype=torch.int64, device="meta"),
        bitslab.ArgumentTypeError,
        ["indices", "meta", "cpu"],
    ),
}


def bad(table: dict[str, Bad]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("make", "error", "says"), table.values(), ids=table)


def by_dtype(dtypes: list[torch.dtype] = DTYPES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dtype", dtypes, ids=dtype_id)


class RowCodecContract:
    """The tests of every row codec."""

    codec_class: ClassVar[type[bitslab.RowCodec]]
    #: Options of `fit`, by a name for the test's id.
    plans: ClassVar[dict[str, Options]]

    @staticmethod
    def metadata_bytes(codec: Any, n_rows: int) -> int:
        """Bytes beside the packed rows that the codec says it takes."""
        raise NotImplementedError

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "options" in metafunc.fixturenames:
            metafunc.parametrize("options", self.plans.values(), ids=self.plans)

    def fit(self, sample: torch.Tensor, options: Options | None = None) -> bitslab.RowCodec:
        return self.codec_class.fit(sample, **(options or {}))

    @pytest.fixture
    def table(self) -> tuple[torch.Tensor, bitslab.RowCodec, bitslab.PackedRows]:
        rows = packable(torch.float32, (100, 32))
        codec = self.fit(rows)
        return rows, codec, codec.encode(rows)

    # Round trips

    @pytest.mark.pairwise(dtype=traits)
    @by_dtype()
    def test_every_dtype_comes_back_bit_for_bit(self, dtype: torch.dtype, options: Options) -> None:
        seen = packable(dtype, (50, 24))
        unseen = [random_bits(dtype, (40, 24), seed=1), edge_rows(dtype, 37, 24)]
        for sample in (seen, *unseen):
            codec = self.fit(sample, options)
            assert (codec.dtype, codec.row_shape) == (dtype, (24,))
            for rows in (seen, *unseen):
                packed = codec.encode(rows)
                assert packed.n_rows == len(rows)
                assert same_bits(codec.decode(packed), rows)

    @pytest.mark.parametrize("shape", ROW_SHAPES.values(), ids=ROW_SHAPES)
    def test_every_row_shape_and_count_comes_back(
        self, shape: tuple[int, ...], options: Options
    ) -> None:
        codec = self.fit(packable(torch.int64, (100, *shape)), options)
        for n in COUNTS:
            rows = packable(torch.int64, (n, *shape), seed=n)
            packed = codec.encode(rows)
            assert same_bits(codec.decode(packed), rows)
            ids = torch.arange(n - 1, -1, -1)
            assert same_bits(codec.decode(packed, ids), take(rows, ids))

    def test_later_batches_need_no_new_fit(self, options: Options) -> None:
        codec = self.fit(packable(torch.bfloat16, (64, 40)), options)
        config = json.dumps(codec.to_config())
        batches = [packable(torch.bfloat16, (n, 40), seed=n) * n for n in (1, 7, 64, 200)]
        batches += [random_bits(torch.bfloat16, (70, 40)), torch.zeros_like(batches[-1])]
        packed = [codec.encode(rows) for rows in batches]
        for rows, one in reversed(list(zip(batches, packed, strict=True))):
            assert same_bits(codec.decode(one), rows)
        assert json.dumps(codec.to_config()) == config

    def test_packing_neither_changes_nor_keeps_its_input(self, options: Options) -> None:
        rows = packable(torch.float32, (50, 32))
        before = rows.clone()
        codec = self.fit(rows, options)
        packed = codec.encode(rows)
        codec.packed_bytes(rows)
        assert same_bits(rows, before)
        rows.zero_()
        assert same_bits(codec.decode(packed), before)

    def test_unpacking_changes_no_part_and_gives_new_memory(self, options: Options) -> None:
        rows = packable(torch.float32, (50, 32))
        codec = self.fit(rows, options)
        packed = codec.encode(rows)
        parts = parts_of(packed)
        codec.decode(packed).zero_()
        codec.decode(packed, torch.arange(50)).zero_()
        assert parts_of(packed) == parts
        assert same_bits(codec.decode(packed), rows)

    VIEWS: ClassVar[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
        "transposed": lambda t: t.T.contiguous().T,
        "every-other-row": lambda t: t.repeat_interleave(2, 0)[::2],
        "column-slice": lambda t: torch.cat([t, t], 1)[:, 1:33],
        "expanded": lambda t: t[:1].expand(9, 32),
        "unit-stride-lost": lambda t: t.as_strided((50, 1), (1, 0)),
        "not-aligned": lambda t: torch.cat([t.view(-1)[:1], t.view(-1)])[1:].view(t.shape),
        "requires-grad": lambda t: t.clone().requires_grad_(),
        "parameter": lambda t: torch.nn.Parameter(t),
    }

    @pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
    def test_any_view_is_fitted_and_packed_like_its_copy(
        self, view: Callable[[torch.Tensor], torch.Tensor], options: Options
    ) -> None:
        rows = view(packable(torch.float32, (50, 32)))
        copied = rows.detach().clone(memory_format=torch.contiguous_format)
        codec = self.fit(rows, options)
        assert codec == self.fit(copied, options)
        packed = codec.encode(rows)
        assert parts_of(packed) == parts_of(codec.encode(copied))
        assert torch.equal(codec.packed_bytes(rows), codec.packed_bytes(copied))
        assert same_bits(codec.decode(packed), copied)

    LAZY: ClassVar[dict[str, Callable[[], torch.Tensor]]] = {
        "conjugate": lambda: packable(torch.complex64, (50, 16)).conj(),
        "negative": lambda: packable(torch.complex64, (50, 16)).conj().imag,
    }

    @pytest.mark.parametrize("make", LAZY.values(), ids=LAZY)
    def test_lazy_conjugates_and_negatives_are_packed_as_what_they_mean(
        self, make: Callable[[], torch.Tensor]
    ) -> None:
        rows = make()
        assert rows.is_conj() or rows.is_neg()
        codec = self.fit(rows)
        packed = codec.encode(rows)
        assert same_bits(codec.decode(packed), rows)
        out = torch.zeros_like(rows.resolve_conj().resolve_neg())
        out = out.conj() if rows.is_conj() else torch._neg_view(out)
        codec.decode(packed, out=out)
        assert torch.equal(out, rows)

    # Indices

    @by_dtype(INDEX_DTYPES)
    def test_any_integer_indices_pick_rows(self, dtype: torch.dtype, options: Options) -> None:
        rows = packable(torch.float32, (100, 32))
        codec = self.fit(rows, options)
        packed = codec.encode(rows)
        cases = [[0], [99], [5, 5, 5, 31, 32, 33, 5], [], list(range(99, -1, -1))]
        if dtype.is_signed:
            cases += [[-1], [-100], [3, -97, 3], list(range(-100, 100))]
        for case in cases:
            ids = torch.tensor(case, dtype=dtype)
            before = ids.clone()
            assert same_bits(codec.decode(packed, ids), take(rows, ids.long()))
            assert torch.equal(ids, before)

    def test_indices_need_not_be_contiguous(self, options: Options) -> None:
        rows = packable(torch.float32, (100, 32))
        codec = self.fit(rows, options)
        packed = codec.encode(rows)
        for ids in (torch.arange(100)[::3], torch.tensor(7).expand(5), torch.arange(9).flip(0)):
            assert same_bits(codec.decode(packed, ids), take(rows, ids))

    def test_indices_reach_rows_on_every_thread(self) -> None:
        rows = packable(torch.float32, (40_000, 32))
        codec = self.fit(rows[:500])
        packed = codec.encode(rows)
        ids = torch.randint(-40_000, 40_000, (50_000,), generator=torch.Generator().manual_seed(0))
        assert same_bits(codec.decode(packed, ids), take(rows, ids))

    def test_no_rows_have_no_index(self) -> None:
        codec = self.fit(packable(torch.float32, (9, 32)))
        packed = codec.encode(torch.empty(0, 32))
        assert codec.decode(packed).shape == (0, 32)
        assert codec.decode(packed, torch.empty(0, dtype=torch.int64)).shape == (0, 32)
        for index in (0, -1):
            with pytest.raises(bitslab.IndexRangeError, match="indices"):
                codec.decode(packed, torch.tensor([index]))

    # out=

    def test_out_is_filled_and_returned(self, options: Options) -> None:
        rows = packable(torch.float32, (100, 32))
        codec = self.fit(rows, options)
        packed = codec.encode(rows)
        around = torch.full((104, 36), 7.0)
        ids = torch.tensor([3, -1, 3])
        outs = {
            "contiguous": around.view(-1)[4 : 4 + 3200].view(100, 32),
            "strided": around[2:102, 3:35],
            "transposed": torch.full((32, 100), 7.0).T,
        }
        for name, out in outs.items():
            around.fill_(7)
            assert codec.decode(packed, out=out) is out, name
            assert same_bits(out.contiguous(), rows), name
            if name != "transposed":
                assert int((around == 7).sum()) == around.numel() - 3200, name
            few = out[:3]
            assert codec.decode(packed, ids, few) is few
            assert same_bits(few.contiguous(), take(rows, ids)), name
            assert same_bits(out[3:].contiguous(), rows[3:]), name

    def test_out_may_require_grad_where_nobody_asks_for_it(self, table: Any) -> None:
        rows, codec, packed = table
        parameter = torch.nn.Parameter(torch.zeros(100, 32))
        with torch.no_grad():
            codec.decode(packed, out=parameter)
        assert same_bits(parameter, rows)

    def test_empty_out_is_accepted(self, table: Any) -> None:
        _, codec, packed = table
        out = torch.empty(0, 32)
        assert codec.decode(packed, torch.empty(0, dtype=torch.int64), out) is out

    def test_bounds_of_a_lossless_codec_are_zero(self, table: Any) -> None:
        rows, codec, _ = table
        assert codec.error_bound is None
        bounds = codec.bounds(rows)
        assert (bounds.shape, bounds.dtype) == (rows.shape, torch.float64)
        assert not bounds.any()

    # Sizes

    def test_packed_bytes_agree_with_what_is_stored(self, options: Options) -> None:
        rows = torch.cat([packable(torch.float32, (70, 32)), random_bits(torch.float32, (30, 32))])
        codec = self.fit(rows[:50], options)
        sizes = codec.packed_bytes(rows)
        assert (sizes.dtype, sizes.shape) == (torch.int64, (100,))
        assert 0 < int(sizes.min()) and int(sizes.max()) <= codec.row_bytes
        stored = codec.encode(rows).nbytes
        assert stored == int(sizes.sum()) + self.metadata_bytes(codec, 100)
        assert torch.equal(codec.packed_bytes(rows[60:80]), sizes[60:80])
        assert codec.packed_bytes(rows[:0]).shape == (0,)

    @pytest.mark.pairwise(dtype=traits)
    @by_dtype()
    def test_packed_rows_outgrow_raw_rows_by_no_more_than_the_metadata(
        self, dtype: torch.dtype, options: Options
    ) -> None:
        codec = self.fit(packable(dtype, (50, 24)), options)
        for n in COUNTS:
            for rows in (random_bits(dtype, (n, 24)), edge_rows(dtype, n, 24)):
                assert codec.encode(rows).nbytes <= rows.nbytes + self.metadata_bytes(codec, n)

    def test_size_of_the_profile_is_reported(self, options: Options) -> None:
        codec = self.fit(packable(torch.float32, (100, 32)), options)
        assert isinstance(codec.profile_bytes, int)
        assert 0 <= codec.profile_bytes <= len(json.dumps(codec.to_config()))

    # Configurations and files

    @pytest.mark.pairwise(dtype=traits)
    @by_dtype()
    def test_config_gives_an_equal_codec_and_the_same_bytes(
        self, dtype: torch.dtype, options: Options
    ) -> None:
        rows = packable(dtype, (50, 24))
        codec = self.fit(rows, options)
        again = self.codec_class.from_config(json.loads(json.dumps(codec.to_config())))
        assert again == codec and hash(again) == hash(codec)
        assert again.to_config() == codec.to_config()
        assert (repr(again), again.describe()) == (repr(codec), codec.describe())
        assert parts_of(again.encode(rows)) == parts_of(codec.encode(rows))
        assert same_bits(again.decode(codec.encode(rows)), rows)

    def test_codecs_of_other_rows_are_not_equal(self) -> None:
        rows = packable(torch.float32, (50, 32))
        codec = self.fit(rows)
        assert codec != self.fit(rows[:, :16])
        assert codec != self.fit(rows.view(torch.int32))
        assert codec != self.fit(rows.view(50, 2, 16))
        assert codec != "codec"

    def test_damaged_config_is_refused(self, options: Options) -> None:
        config = self.fit(packable(torch.float32, (50, 32)), options).to_config()
        wrong: list[Any] = [None, "x", -1, 1.5, [None], [-32], {}]
        for key in config:
            without = {k: v for k, v in config.items() if k != key}
            for damaged in (without, *({**config, key: value} for value in wrong)):
                with pytest.raises(bitslab.CorruptedDataError):
                    self.codec_class.from_config(damaged)

    @pytest.mark.parametrize("n", COUNTS)
    def test_adopt_accepts_what_encode_made(self, n: int, options: Options) -> None:
        codec = self.fit(packable(torch.float32, (50, 32)), options)
        rows = torch.cat(
            [packable(torch.float32, (n // 2, 32)), random_bits(torch.float32, (n - n // 2, 32))]
        )
        packed = codec.encode(rows)
        for adopt in (codec.adopt, codec.adopt_unread):
            adopted = adopt(n, {name: part.clone() for name, part in packed.parts.items()})
            assert (adopted.n_rows, adopted.facts) == (n, packed.facts)
            assert parts_of(adopted) == parts_of(packed)
            assert same_bits(codec.decode(adopted), rows)

    def test_adopt_refuses_parts_that_do_not_fit(self, options: Options) -> None:
        rows = packable(torch.float32, (50, 32))
        codec = self.fit(rows, options)
        parts = dict(codec.encode(rows).parts)
        for adopt, n in product((codec.adopt, codec.adopt_unread), (0, 49, 51, 10_000)):
            with pytest.raises(bitslab.CorruptedDataError):
                adopt(n, parts)
        for name, part in parts.items():
            other_dtype = torch.float64 if part.dtype != torch.float64 else torch.int64
            damaged = [part[:-1], part[:0], part[None], part[..., None], part.to(other_dtype)]
            without = {k: v for k, v in parts.items() if k != name}
            for bad_parts in (without, *({**parts, name: one} for one in damaged)):
                for adopt in (codec.adopt, codec.adopt_unread):
                    with pytest.raises(bitslab.CorruptedDataError):
                        adopt(50, bad_parts)

    # Bad arguments

    @bad(BAD_ROWS)
    @pytest.mark.parametrize("method", ["encode", "packed_bytes"])
    def test_bad_rows_are_refused(
        self,
        method: str,
        make: Callable[[Any], Any],
        error: type[Exception],
        says: list[str],
        table: Any,
    ) -> None:
        rows, codec, _ = table
        with pytest.raises(error) as caught:
            getattr(codec, method)(make(rows))
        assert [word for word in says if word not in str(caught.value)] == [], caught.value

    @bad(BAD_OUT)
    @pytest.mark.parametrize("ids", [None, torch.arange(100)], ids=["all-rows", "by-index"])
    def test_bad_out_is_refused_and_untouched(
        self,
        ids: torch.Tensor | None,
        make: Callable[[Any], Any],
        error: type[Exception],
        says: list[str],
        table: Any,
    ) -> None:
        _, codec, packed = table
        memory = torch.full((100, 32), 7.0)
        out = make(memory)
        before = None if getattr(out, "is_meta", True) else bits_of(out)
        with pytest.raises(error) as caught:
            codec.decode(packed, ids, out)
        assert [word for word in says if word not in str(caught.value)] == [], caught.value
        assert (memory == 7).all()
        assert before is None or torch.equal(bits_of(out), before)

    def test_out_in_the_memory_of_a_part_is_refused(self, table: Any) -> None:
        rows, codec, packed = table
        parts = parts_of(packed)
        large = [name for name, part in packed.parts.items() if part.nbytes >= codec.row_bytes]
        assert large
        for name in large:
            with pytest.raises(bitslab.ArgumentError, match="out: shares memory with the packed"):
                codec.decode(packed, torch.tensor([5]), overlapping_out(packed, name, rows[0]))
        assert parts_of(packed) == parts

    def test_out_in_the_memory_of_the_indices_is_refused(self) -> None:
        rows = torch.arange(100)
        codec = self.fit(rows)
        packed = codec.encode(rows)
        ids = torch.arange(50, 60)
        with pytest.raises(bitslab.ArgumentError, match="out: shares memory .* indices"):
            codec.decode(packed, ids, ids)
        assert torch.equal(ids, torch.arange(50, 60))

    @bad(BAD_INDICES)
    def test_bad_indices_are_refused_and_out_is_untouched(
        self, make: Callable[[Any], Any], error: type[Exception], says: list[str], table: Any
    ) -> None:
        _, codec, packed = table
        ids = make(None)
        with pytest.raises(error) as caught:
            codec.decode(packed, ids)
        assert [word for word in says if word not in str(caught.value)] == [], caught.value
        n = ids.numel() if isinstance(ids, torch.Tensor) else np.size(ids)
        out = torch.full((n, 32), 7.0)
        with pytest.raises(error):
            codec.decode(packed, ids, out)
        assert (out == 7).all()

    BAD_PACKED: ClassVar[dict[str, Callable[[bitslab.PackedRows], Any]]] = {
        "none": lambda p: None,
        "tensor": lambda p: next(iter(p.parts.values())),
        "parts-only": lambda p: dict(p.parts),
        "no-parts": lambda p: bitslab.PackedRows(p.n_rows, {}, p.facts),
        "other-parts": lambda p: bitslab.PackedRows(p.n_rows, {"other": torch.ones(100, 32)}),
        "more-rows": lambda p: bitslab.PackedRows(p.n_rows + 1, p.parts, p.facts),
        "fewer-rows": lambda p: bitslab.PackedRows(p.n_rows - 1, p.parts, p.facts),
        "negative-rows": lambda p: bitslab.PackedRows(-1, p.parts, p.facts),
    }

    @pytest.mark.parametrize("make", BAD_PACKED.values(), ids=BAD_PACKED)
    def test_what_the_codec_did_not_pack_is_refused(
        self, make: Callable[[bitslab.PackedRows], Any], table: Any
    ) -> None:
        _, codec, packed = table
        for ids in (None, torch.tensor([0])):
            with pytest.raises(bitslab.BitslabError, match="packed"):
                codec.decode(make(packed), ids)

    @pytest.mark.parametrize("sample", [None, [[1.0]], np.ones((3, 4), np.float32)], ids=type)
    def test_sample_that_is_no_tensor_is_refused(self, sample: Any) -> None:
        with pytest.raises(bitslab.ArgumentTypeError, match="sample: expected a torch.Tensor"):
            self.fit(sample)

    def test_unknown_option_is_refused(self) -> None:
        with pytest.raises(TypeError, match="no_such_option"):
            self.fit(packable(torch.float32, (9, 32)), {"no_such_option": 1})

    # Copies, threads, processes

    COPIES: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "pickle": lambda x: pickle.loads(pickle.dumps(x)),
        "deepcopy": copy.deepcopy,
        "copy": copy.copy,
    }

    @pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
    def test_copies_of_codec_and_packed_rows_work(
        self, copied: Callable[[Any], Any], options: Options
    ) -> None:
        rows = packable(torch.float32, (50, 32))
        codec = self.fit(rows, options)
        packed = codec.encode(rows)
        again, packed_again = copied(codec), copied(packed)
        assert again == codec and hash(again) == hash(codec)
        assert (packed_again.n_rows, packed_again.facts) == (packed.n_rows, packed.facts)
        assert parts_of(packed_again) == parts_of(packed)
        assert same_bits(again.decode(packed_again), rows)
        assert parts_of(again.encode(rows)) == parts_of(packed)

    def test_packed_rows_move_and_count_their_bytes(self, table: Any) -> None:
        rows, codec, packed = table
        moved = packed.to("cpu")
        assert moved.device == packed.device == torch.device("cpu")
        assert moved.nbytes == sum(part.nbytes for part in packed.parts.values())
        assert all(moved.parts[name] is part for name, part in packed.parts.items())
        assert same_bits(codec.decode(moved), rows)

    def test_threads_may_share_a_codec(self) -> None:
        tables = [packable(torch.float32, (20_000, 32), seed) for seed in range(2)]
        codec = self.fit(tables[0][:300])
        together = threading.Barrier(2)

        def work(rows: torch.Tensor) -> bool:
            sound = True
            for round_ in range(5):
                together.wait(CHILD_SECONDS)
                packed = codec.encode(rows)
                ids = torch.arange(round_, 20_000, 3)
                sound &= same_bits(codec.decode(packed), rows)
                sound &= same_bits(codec.decode(packed, ids), take(rows, ids))
            return sound

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(work, tables)) == [True, True]

    @pytest.fixture
    def two_threads(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        yield
        torch.set_num_threads(before)

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    @pytest.mark.parametrize(
        ("method", "seconds"), [("fork", FORK_SECONDS), (spawned.METHOD, CHILD_SECONDS)], ids=str
    )
    @pytest.mark.usefixtures("two_threads")
    def test_child_process_unpacks_what_its_parent_packed(
        self, method: str, seconds: float
    ) -> None:
        rows = packable(torch.float32, (20_000, 64))  # more than a megabyte for each thread
        codec = self.fit(rows[:300])
        packed = codec.encode(rows)
        ids = torch.arange(19_999, -1, -1)
        expected = [digest(codec.decode(packed)), digest(codec.decode(packed, ids))]
        context: Any = multiprocessing.get_context(method)
        job = pickle.dumps((codec, packed, ids))
        child = context.Process(target=decode_in_child, args=(job, expected))
        child.start()
        child.join(seconds)
        alive = child.is_alive()
        child.kill()
        child.join()
        assert not alive, f"the child process still hung after {seconds} s"
        assert child.exitcode == 0


class RangeContract:
    """The tests of a codec whose `decode` takes `start` and `stop`."""

    RANGES: ClassVar[list[tuple[int, int | None]]] = [
        (0, None), (0, 100), (0, 0), (100, 100), (100, None), (0, 1), (99, 100), (31, 33),
        (32, 64), (5, 97),
    ]  # fmt: skip

    def test_range_of_rows_is_unpacked(self, options: Options) -> None:
        rows = packable(torch.float32, (100, 32))
        codec: Any = self.fit(rows, options)  # type: ignore[attr-defined]
        packed = codec.encode(rows)
        for start, stop in self.RANGES:
            expected = rows[start:stop]
            assert same_bits(codec.decode(packed, start=start, stop=stop), expected)
            out = torch.full(expected.shape, 7.0)
            assert codec.decode(packed, out=out, start=start, stop=stop) is out
            assert same_bits(out, expected)

    def test_large_range_is_unpacked_by_threads_from_any_row(self) -> None:
        rows = packable(torch.float32, (40_000, 32))
        codec: Any = self.fit(rows[:300])  # type: ignore[attr-defined]
        packed = codec.encode(rows)
        for start, stop in ((1, 39_999), (31, 40_000), (32, 20_033)):
            assert same_bits(codec.decode(packed, start=start, stop=stop), rows[start:stop])

    @pytest.mark.parametrize(
        ("start", "stop"), [(-1, None), (0, 101), (5, 4), (101, None), (-5, -1)], ids=str
    )
    def test_bad_range_is_refused_and_out_is_untouched(
        self, start: int, stop: int | None, table: Any
    ) -> None:
        _, codec, packed = table
        out = torch.full((100, 32), 7.0)
        with pytest.raises(bitslab.ArgumentError, match=r"start, stop: .* <= 100"):
            codec.decode(packed, out=out, start=start, stop=stop)
        assert (out == 7).all()

    @pytest.mark.parametrize("value", [1.5, "1", None, torch.tensor(1.0)], ids=type)
    def test_range_of_no_integers_is_refused(self, value: Any, table: Any) -> None:
        _, codec, packed = table
        with pytest.raises(bitslab.BitslabError, match="start"):
            codec.decode(packed, start=value)


def takes_range(codec_class: type[bitslab.RowCodec]) -> bool:
    return {"start", "stop"} <= set(inspect.signature(codec_class.decode).parameters)
