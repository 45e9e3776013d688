"""What every lossy row codec promises: a class of tests for each one to inherit.

A codec's tests derive from `LossyRowCodecContract`, name the codec and list the options that it is
fitted with, its dtypes and a shape of its rows.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch

import bitslab
from tests.engine.codecs.contract import Options, edge_rows, parts_of
from tests.helpers import bits_of, dtype_id, random_bits, same_bits

N = 12
COUNTS = [0, 1, 12, 31, 32, 33, 70]


def usual(dtype: torch.dtype, shape: tuple[int, ...], n: int = N, seed: int = 0) -> torch.Tensor:
    """Rows as of K and V: columns of several spreads and means."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.arange(shape[-1])
    x = torch.randn(n, *shape, generator=generator) * (0.2 + columns % 7) + (columns % 5 == 3) * 4
    return x.to(dtype)


def hostile(dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return rows, by a name, of what quantisers get wrong."""
    x = usual(dtype, shape)
    size = x[0].numel()
    constant = x.clone()
    constant[..., ::3] = 1.0 / 3
    holes = x.clone()
    for k, value in enumerate((float("nan"), float("inf"), float("-inf"), -0.0, 0.0)):
        holes.view(-1)[k :: 97 + k] = value
    limits = torch.finfo(dtype)
    huge = x.clone()
    huge.view(-1)[::50] = limits.max
    huge.view(-1)[1::50] = limits.min
    least = torch.finfo(dtype).smallest_normal
    return {
        "usual": x,
        "constant-columns": constant,
        "all-equal": torch.full_like(x, -2.7),
        "zeros": torch.zeros_like(x),
        "negative-zeros": -torch.zeros_like(x),
        "infinities-and-nan": holes,
        "nothing-finite": torch.full_like(x, float("nan")),
        "subnormals": (x.double() * least / 64).to(dtype),
        "tiny": (x.double() * least * 3).to(dtype),
        "huge": huge,
        "all-huge": torch.where(x > 0, limits.max, limits.min).to(dtype),
        "far-from-zero": (x.double() * 1e-3 + 700).to(dtype),
        "edges": edge_rows(dtype, N, size).view(x.shape),
        "random-bits": random_bits(dtype, (N, size)).view(x.shape),
    }


class LossyRowCodecContract:
    """The tests of every lossy row codec."""

    codec_class: ClassVar[type[bitslab.RowCodec]]
    #: Options of `fit`, by a name for the test's id; they take N rows.
    plans: ClassVar[dict[str, Options]]
    dtypes: ClassVar[list[torch.dtype]]
    row_shape: ClassVar[tuple[int, ...]]

    @staticmethod
    def metadata_bytes(codec: Any, n_rows: int) -> int:
        """Bytes beside the packed rows that the codec says it takes."""
        raise NotImplementedError

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "options" in metafunc.fixturenames:
            metafunc.parametrize("options", self.plans.values(), ids=self.plans)
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.dtypes, ids=map(dtype_id, self.dtypes))

    def fit(self, sample: torch.Tensor, options: Options | None = None) -> bitslab.RowCodec:
        chosen = next(iter(self.plans.values())) if options is None else options
        return self.codec_class.fit(sample, **chosen)

    def rows(self, dtype: torch.dtype | None = None, n: int = N, seed: int = 0) -> torch.Tensor:
        return usual(dtype or self.dtypes[0], self.row_shape, n, seed)

    def test_says_that_it_is_lossy(self) -> None:
        assert isinstance(self.codec_class.error_bound, str) and self.codec_class.error_bound

    # Bounds

    @pytest.mark.parametrize("fitted", ["usual", "infinities-and-nan", "huge", "all-equal"])
    def test_every_element_is_within_its_bound(
        self, dtype: torch.dtype, options: Options, fitted: str
    ) -> None:
        every = hostile(dtype, self.row_shape)
        codec = self.fit(every[fitted], options)
        for name, rows in every.items():
            packed = codec.encode(rows)
            decoded, bounds = codec.decode(packed), codec.bounds(rows)
            assert (decoded.shape, decoded.dtype) == (rows.shape, dtype)
            assert (bounds.shape, bounds.dtype) == (rows.shape, torch.float64)
            finite = rows.isfinite()
            assert bool(decoded[finite].isfinite().all()), name
            far = (decoded[finite].double() - rows[finite].double()).abs()
            assert bool((far <= bounds[finite]).all()), (name, float((far - bounds[finite]).max()))
            assert same_bits(decoded[~finite], rows[~finite]), name
            assert packed.nbytes <= rows.nbytes + self.metadata_bytes(codec, len(rows)), name

    def test_usual_rows_are_not_kept_as_they_are(
        self, dtype: torch.dtype, options: Options
    ) -> None:
        rows = self.rows(dtype)
        codec = self.fit(rows, options)
        assert int(codec.packed_bytes(rows).max()) < codec.row_bytes
        assert not same_bits(codec.decode(codec.encode(rows)), rows)

    # Rows, indices, ranges

    @pytest.mark.parametrize("n", COUNTS)
    def test_every_count_comes_back(self, n: int, options: Options) -> None:
        codec: Any = self.fit(self.rows(), options)
        rows = self.rows(n=n, seed=n)
        packed = codec.encode(rows)
        decoded = codec.decode(packed)
        assert decoded.shape == rows.shape
        ids = torch.arange(n - 1, -1, -1)
        assert same_bits(codec.decode(packed, ids), decoded[ids])
        assert same_bits(codec.decode(packed, ids - n), decoded[ids])
        for start, stop in ((0, n // 2), (n // 3, n), (n, n)):
            part = codec.decode(packed, start=start, stop=stop)
            assert same_bits(part, decoded[start:stop])
        out = torch.full_like(decoded, 7)
        assert codec.decode(packed, out=out) is out
        assert same_bits(out, decoded)

    def test_bad_indices_and_ranges_are_refused(self) -> None:
        rows = self.rows()
        codec: Any = self.fit(rows)
        packed, out = codec.encode(rows), torch.full_like(rows, 7)
        for ids in (torch.tensor([0, N]), torch.tensor([-N - 1])):
            with pytest.raises(bitslab.IndexRangeError):
                codec.decode(packed, ids, out[: len(ids)])
        with pytest.raises(bitslab.ArgumentError, match="start, stop"):
            codec.decode(packed, out=out, start=3, stop=N + 1)
        assert bool((out == 7).all())

    def test_bad_rows_are_refused(self) -> None:
        rows = self.rows()
        codec = self.fit(rows)
        for bad in (rows[:, :-1], rows[0], rows[None]):
            for method in (codec.encode, codec.packed_bytes, codec.bounds):
                with pytest.raises(bitslab.ArgumentError, match="rows: shape"):
                    method(bad)
        with pytest.raises(bitslab.ArgumentTypeError, match="rows: dtype"):
            codec.encode(rows.double())
        with pytest.raises(bitslab.ArgumentTypeError, match=r"rows: expected a torch\.Tensor"):
            codec.encode(None)  # type: ignore[arg-type]

    def test_packing_neither_changes_nor_keeps_its_input(self, options: Options) -> None:
        rows = self.rows()
        before = rows.clone()
        codec = self.fit(rows, options)
        packed = codec.encode(rows)
        codec.bounds(rows)
        assert same_bits(rows, before)
        parts = parts_of(packed)
        decoded = codec.decode(packed)
        rows.zero_()
        assert same_bits(codec.decode(packed), decoded) and parts_of(packed) == parts

    def test_any_view_is_packed_like_its_copy(self, options: Options) -> None:
        rows = self.rows()
        codec = self.fit(rows, options)
        expected = parts_of(codec.encode(rows))
        views: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda t: t.repeat_interleave(2, 0)[::2],
            lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
            lambda t: torch.cat([t.view(-1)[:1], t.view(-1)])[1:].view(t.shape),
            lambda t: torch.nn.Parameter(t.clone()),
        ]
        for view in views:
            assert parts_of(codec.encode(view(rows))) == expected

    # Sizes

    def test_packed_bytes_agree_with_what_is_stored(
        self, dtype: torch.dtype, options: Options
    ) -> None:
        rows = torch.cat([self.rows(dtype), hostile(dtype, self.row_shape)["random-bits"]])
        codec = self.fit(rows[:N], options)
        sizes = codec.packed_bytes(rows)
        assert (sizes.dtype, sizes.shape) == (torch.int64, (2 * N,))
        assert 0 < int(sizes.min()) and int(sizes.max()) <= codec.row_bytes
        stored = codec.encode(rows).nbytes
        assert stored == int(sizes.sum()) + self.metadata_bytes(codec, 2 * N)
        assert isinstance(codec.profile_bytes, int)
        assert 0 < codec.profile_bytes <= len(json.dumps(codec.to_config()))

    # Configurations and files

    def test_config_gives_an_equal_codec_and_the_same_bytes(
        self, dtype: torch.dtype, options: Options
    ) -> None:
        rows = self.rows(dtype)
        codec = self.fit(rows, options)
        again = self.codec_class.from_config(json.loads(json.dumps(codec.to_config())))
        assert again == codec and hash(again) == hash(codec)
        assert (repr(again), again.describe()) == (repr(codec), codec.describe())
        packed = codec.encode(rows)
        assert parts_of(again.encode(rows)) == parts_of(packed)
        assert same_bits(again.decode(packed), codec.decode(packed))
        other = self.fit(rows * 3, options)
        assert other != codec or parts_of(other.encode(rows)) == parts_of(packed)

    def test_damaged_config_is_refused(self, options: Options) -> None:
        config = self.fit(self.rows(), options).to_config()
        wrong: list[Any] = [None, "x", -1, 1.5e308 * 10, [None], [-32], {}]
        for key in config:
            without = {k: v for k, v in config.items() if k != key}
            for damaged in (without, *({**config, key: value} for value in wrong)):
                with pytest.raises(bitslab.CorruptedDataError):
                    self.codec_class.from_config(damaged)

    def test_files_keep_every_bit_of_what_was_packed(self, tmp_path: Any, options: Options) -> None:
        rows = self.rows()
        codec = self.fit(rows, options)
        packed = bitslab.compress(rows.flatten(1), self._flat(codec))
        packed.save(tmp_path / "x.bitslab")
        back = bitslab.load(tmp_path / "x.bitslab")
        assert back.codec == packed.codec
        assert same_bits(back.decompress(), packed.decompress())
        assert isinstance(back, bitslab.CompressedTensor)
        assert parts_of(back.packed) == parts_of(packed.packed)
        assert same_bits(back.decompress(), codec.decode(codec.encode(rows)).flatten(1))

    def _flat(self, codec: bitslab.RowCodec) -> bitslab.RowCodec:
        """Return the same codec for rows of one dimension."""
        config = codec.to_config()
        return self.codec_class.from_config(
            {**config, "row_shape": [codec.row_bytes // codec.dtype.itemsize]}
        )

    def test_adopt_accepts_what_encode_made_and_nothing_else(self, options: Options) -> None:
        rows = torch.cat([self.rows(), hostile(self.dtypes[0], self.row_shape)["random-bits"]])
        codec = self.fit(rows[:N], options)
        packed = codec.encode(rows)
        parts = {name: part.clone() for name, part in packed.parts.items()}
        adopted = codec.adopt(len(rows), parts)
        assert (adopted.n_rows, adopted.facts) == (len(rows), packed.facts)
        assert same_bits(codec.decode(adopted), codec.decode(packed))
        for n in (0, len(rows) - 1, len(rows) + 1):
            with pytest.raises(bitslab.CorruptedDataError):
                codec.adopt(n, parts)
        for name, part in parts.items():
            without = {k: v for k, v in parts.items() if k != name}
            for bad in (without, {**parts, name: part[:-1]}, {**parts, name: part.double()}):
                with pytest.raises(bitslab.CorruptedDataError):
                    codec.adopt(len(rows), bad)

    # Copies and threads

    COPIES: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "pickle": lambda x: pickle.loads(pickle.dumps(x)),
        "deepcopy": copy.deepcopy,
        "copy": copy.copy,
    }

    @pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
    def test_copies_work(self, copied: Callable[[Any], Any], options: Options) -> None:
        rows = self.rows()
        codec = self.fit(rows, options)
        packed = codec.encode(rows)
        again = copied(codec)
        assert again == codec
        assert same_bits(again.decode(copied(packed)), codec.decode(packed))
        assert parts_of(again.encode(rows)) == parts_of(packed)

    @pytest.fixture
    def two_threads(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        yield
        torch.set_num_threads(before)

    @pytest.mark.usefixtures("two_threads")
    def test_threads_share_the_work_and_a_codec(self) -> None:
        n = -(-(4 << 20) // bits_of(self.rows()).numel()) * N  # more than a megabyte a thread
        rows = self.rows(n=n)
        codec: Any = self.fit(rows[:N])
        packed = codec.encode(rows)
        decoded = codec.decode(packed)
        period = codec.kernels(torch.device("cpu")).row_period
        alone = torch.cat(
            [codec.decode(codec.encode(rows[k : k + 4 * period])) for k in range(0, n, 4 * period)]
        )
        assert same_bits(alone, decoded)
        with ThreadPoolExecutor(2) as pool:
            every = list(pool.map(lambda _: codec.decode(codec.encode(rows)), range(4)))
        assert all(same_bits(one, decoded) for one in every)

    # Systems that keep every bit

    def test_systems_that_promise_every_bit_refuse_it(self) -> None:
        from bitslab.offload import WeightPacker

        rows = self.rows()
        with pytest.raises(bitslab.ArgumentError, match="is lossy"):
            bitslab.CompressedTable.from_tensor(rows, codec=self.fit(rows), progress=False)
        with pytest.raises(bitslab.ArgumentError, match="is lossy"):
            bitslab.CompressedTable.from_tensor(rows, codec=self.codec_class.name, progress=False)
        with pytest.raises(bitslab.ArgumentError, match="is lossy"):
            WeightPacker({"unit": ["weight"]}, plan_with=self.codec_class)
