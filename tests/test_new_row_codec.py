"""A row codec that only this file knows serves every system, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bitslab
from bitslab.dtypes import dtype_from_name, dtype_name
from bitslab.engine.codecs import (
    HostRowKernels,
    WordRowCodec,
    elements,
    registry,
    rows_as_bytes,
)
from bitslab.engine.kernels.format import TableStorage
from bitslab.kvcache import HistoryReader, PackedHistory
from bitslab.offload import PackedWeights, WeightPacker, WeightStream
from tests.helpers import same_bits

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.uint8]


class SparseKernels(HostRowKernels):
    """A packed row: one bit a word that differs from a row that was learnt, then their XOR."""

    def __init__(self, row_bytes: int, device: torch.device, like: np.ndarray) -> None:
        super().__init__(row_bytes, device)
        self._like = like
        self._head_words = -(-self.row_words // 32)

    def _differences(self, rows: torch.Tensor) -> np.ndarray:
        padded = np.zeros((len(rows), 4 * self.row_words), np.uint8)
        padded[:, : self.row_bytes] = rows.numpy()
        differences: np.ndarray = padded.view(np.uint32) ^ self._like
        return differences

    def measure(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        words = self._head_words + np.count_nonzero(self._differences(rows), axis=1)
        lengths = torch.from_numpy(np.where(words < self.row_words, words, 0))
        return lengths.to(self.length_dtype), torch.empty(0, dtype=torch.uint8)

    def pack(
        self, rows: torch.Tensor, lengths: torch.Tensor, row_clusters: torch.Tensor
    ) -> torch.Tensor:
        values = self._differences(rows)
        bits = np.packbits(values != 0, axis=1, bitorder="little")
        heads = np.zeros((len(rows), 4 * self._head_words), np.uint8)
        heads[:, : bits.shape[1]] = bits
        kept = np.concatenate([np.ones((len(rows), self._head_words), bool), values != 0], axis=1)
        words = np.concatenate([heads.view(np.uint32), values], axis=1)[kept]
        assert len(words) == int(lengths.sum())
        return torch.from_numpy(words.view(np.int32))

    def unpack(
        self,
        words: torch.Tensor,
        at: torch.Tensor,
        lengths: torch.Tensor,
        row_clusters: torch.Tensor,
        out: torch.Tensor,
    ) -> int:
        source, begin = words.numpy().view(np.uint32), at.numpy()[:, None]
        heads = source[begin + np.arange(self._head_words)]
        bits = np.unpackbits(heads.view(np.uint8), axis=1, bitorder="little").astype(bool)
        needed = self._head_words + bits.sum(1)
        damaged = (needed > lengths.numpy()) | bits[:, self.row_words :].any(1)
        if damaged.any():
            return int(damaged.argmax())
        differs = bits[:, : self.row_words]
        places = begin + self._head_words + np.cumsum(differs, axis=1) - 1
        values = np.zeros(differs.shape, np.uint32)
        values[differs] = source[places[differs]]
        out.numpy()[:] = (values ^ self._like).view(np.uint8)[:, : self.row_bytes]
        return -1


class SparseCodec(WordRowCodec):
    """Rows that mostly repeat the first row of the sample."""

    name: ClassVar[str] = "sparse-test"

    def __init__(self, row_shape: tuple[int, ...], dtype: torch.dtype, like: bytes) -> None:
        self.row_shape, self.dtype, self._like = tuple(row_shape), dtype, like

    @classmethod
    def fit(cls, sample: torch.Tensor) -> SparseCodec:
        shape = tuple(sample.shape[1:])
        row_bytes = elements(shape) * sample.dtype.itemsize
        return cls(shape, sample.dtype, bytes(rows_as_bytes(sample[:1].cpu(), row_bytes).numpy()))

    @property
    def profile_bytes(self) -> int:
        return len(self._like)

    def kernels(self, device: torch.device) -> SparseKernels:
        like = np.frombuffer(self._like + bytes(-len(self._like) % 4), np.uint32)
        return SparseKernels(self.row_bytes, device, like)

    def to_config(self) -> dict[str, Any]:
        return {
            "row_shape": list(self.row_shape),
            "dtype": dtype_name(self.dtype),
            "like": self._like.hex(),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SparseCodec:
        dtype = dtype_from_name(config["dtype"])
        return cls(tuple(config["row_shape"]), dtype, bytes.fromhex(config["like"]))


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    """Register the codec while these tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_classes", dict(registry._classes))
        bitslab.register_codec(SparseCodec)
        yield


def rows_of(seed: int, n: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of random bits that repeat the first one in most places; some in none."""
    rng = np.random.default_rng(seed)
    row_bytes = width * dtype.itemsize
    data = np.tile(rng.integers(0, 256, row_bytes, dtype=np.uint8), (n, 1))
    changed = rng.random((n, row_bytes)) < rng.choice([0, 0.02, 0.1, 1], n)[:, None]
    changed[0] = False
    data[changed] = rng.integers(0, 256, int(changed.sum()), dtype=np.uint8)
    return torch.from_numpy(data).flatten().view(dtype).view(n, width)


def any_rows(**sizes: Any) -> st.SearchStrategy[torch.Tensor]:
    """Draw rows, narrow and wide, of whole words or not."""
    return st.builds(
        rows_of,
        st.integers(0, 1 << 30),
        sizes.get("n", st.integers(1, 150)),
        sizes.get("width", st.integers(1, 90)),
        st.sampled_from(DTYPES),
    )


def some_ids(data: st.DataObject, n: int) -> torch.Tensor:
    """Draw ids, some negative, some alike."""
    return torch.tensor(data.draw(st.lists(st.integers(-n, n - 1), max_size=60)), dtype=torch.int64)


quick = settings(max_examples=15)


@quick
@given(any_rows(), st.data())
def test_compresses_and_lies_in_files(
    tmp_path_factory: pytest.TempPathFactory, x: torch.Tensor, data: st.DataObject
) -> None:
    ct = bitslab.compress(x, "sparse-test")
    assert type(ct.codec) is SparseCodec and same_bits(ct.decompress(), x)
    path = tmp_path_factory.mktemp("files") / "x.bitslab"
    ct.save(path)
    back = bitslab.load(path)
    assert back.codec == ct.codec and same_bits(back.decompress(), x)
    codec = SparseCodec.fit(x)
    packed = codec.encode(x)
    ids = some_ids(data, len(x))
    assert same_bits(codec.decode(packed, ids), x[ids])
    sizes = packed.facts["n_words"] * 4
    assert sizes == int(((codec.packed_bytes(x) + 3) // 4 * 4).sum())


def test_damaged_rows_are_found() -> None:
    x = rows_of(3, 40, 64, torch.float32)
    codec = SparseCodec.fit(x)
    packed = codec.encode(x)
    row = int((packed.parts["lengths"] > 2).nonzero()[0])
    at = int(codec.kernels(CPU).locate(_table_of(packed), torch.tensor([row]))[0])
    packed.parts["words"][at] = -1
    with pytest.raises(bitslab.CorruptedDataError, match=f"row {row} is damaged"):
        codec.decode(packed)
    with pytest.raises(bitslab.CorruptedDataError, match=f"row {row} is damaged"):
        codec.adopt(len(x), packed.parts)


def _table_of(packed: bitslab.PackedRows) -> TableStorage:
    parts = packed.parts
    return TableStorage(packed.n_rows, parts["words"], parts["bases"], parts["lengths"])


@pytest.mark.parametrize("layout", ["compact", "inplace"])
@quick
@given(any_rows(), st.data())
def test_tables(
    tmp_path_factory: pytest.TempPathFactory, layout: Any, x: torch.Tensor, data: st.DataObject
) -> None:
    table = bitslab.CompressedTable.from_tensor(x, layout, "sparse-test", progress=False)
    assert type(table.codec) is SparseCodec
    ids = some_ids(data, len(x))
    assert same_bits(table.gather(ids), x[ids])
    assert same_bits(table.gather(ids.to(torch.int32)), x[ids])
    changed = torch.unique(ids % len(x))
    fresh = rows_of(len(x), len(x), x.shape[1], x.dtype)[: len(changed)]
    now = x.clone()
    now[changed] = fresh
    table.update(changed, fresh)
    everything = torch.arange(len(x))
    assert same_bits(table.gather(everything), now)
    path = tmp_path_factory.mktemp("tables") / "x.bitslab"
    table.save(path)
    back = bitslab.CompressedTable.from_file(path, layout)
    assert type(back.codec) is SparseCodec and same_bits(back.gather(everything), now)
    with pickle.loads(pickle.dumps(back)) as other:
        assert same_bits(other.gather(ids), now[ids])
    table.compact(refit=data.draw(st.booleans()))
    with bitslab.CompressedTable.attach(table.handle()) as shared:
        assert type(shared.codec) in (SparseCodec, bitslab.RawCodec)
        assert shared.codec == table.codec and same_bits(shared.gather(ids), now[ids])


@pytest.mark.parametrize("layout", ["compact", "inplace"])
@pytest.mark.parametrize("packs", [False, True], ids=["table-packs", "cache-packs"])
@quick
@given(any_rows(), st.data())
def test_slab_caches(layout: Any, packs: bool, x: torch.Tensor, data: st.DataObject) -> None:
    codec = "raw" if packs else "sparse-test"
    with bitslab.CompressedTable.from_tensor(x, layout, codec, progress=False) as table:
        row_bytes = 4 * -(-x[0].nbytes // 4)
        capacity = data.draw(st.integers(row_bytes, row_bytes * len(x)))
        options: dict[str, Any] = {"codec": SparseCodec.fit(x)} if packs else {}
        cache = bitslab.SlabCache(table, capacity, ["cpu", "cpu"], **options)
        assert type(cache.codec) is SparseCodec
        cached = cache.fill(torch.randperm(len(x)))
        assert cached >= min(2, len(x))
        ids = some_ids(data, len(x))
        assert same_bits(cache.gather(ids), x[ids])
        stats = cache.stats()
        assert stats["hits"] + stats["misses"] == len(ids)
        other = bitslab.SlabCache.attach(table, cache.handle(), "cpu")
        assert other.codec == cache.codec and same_bits(other.gather(ids), x[ids])


def test_cached_rows_that_change_are_read_from_the_table() -> None:
    x = rows_of(5, 100, 64, torch.float32)
    table = bitslab.CompressedTable.from_tensor(x, codec="sparse-test", progress=False)
    cache = bitslab.SlabCache(table, x.nbytes, "cpu")
    assert cache.fill(torch.arange(100)) == 100
    fresh = rows_of(6, 10, 64, torch.float32)
    table.update(torch.arange(10), fresh)
    assert same_bits(cache.gather(torch.arange(100)), torch.cat([fresh, x[10:]]))
    assert cache.stats()["misses"] == 10 and cache.stats()["hits"] == 90


class SparsePlans:
    """Fits the codec for histories."""

    def fit(self, kind: str, sample: torch.Tensor, *, search_all: bool = False) -> SparseCodec:
        return SparseCodec.fit(sample)


@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
@quick
@given(
    st.integers(0, 1 << 30),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
)
def test_histories(offload: bool, seed: int, steps: list[int], dtype: torch.dtype) -> None:
    rng = np.random.default_rng(seed)
    reader = HistoryReader(CPU, offload=offload, sm_budget=None)
    history = PackedHistory(reader.new_words(), SparsePlans(), "k", window=8, block_tokens=16)
    every = [40, *steps]
    parts = [rows_of(seed, 2 * 3 * n, 32, dtype).view(2, 3, n, 32) for n in every]
    for part in parts:
        history.append(part)
    tokens = torch.cat(parts, dim=2)
    assert history.packed_tokens >= 32
    assert [type(s.codec) for s in history.segments][0] in (SparseCodec, type(None))
    assert same_bits(history.decode(), tokens)
    beams = torch.from_numpy(rng.integers(0, 2, 2))
    history.reorder(beams)
    tokens = tokens[beams]
    assert same_bits(history.decode(), tokens)
    kept = int(rng.integers(1, tokens.shape[2] + 1))
    history.crop(kept)
    tokens = torch.cat([tokens[:, :, :kept], parts[0][:2]], dim=2)
    history.append(parts[0])
    assert same_bits(history.decode(), tokens)
    assert same_bits(copy.deepcopy(history).decode(), tokens)
    assert same_bits(pickle.loads(pickle.dumps(history)).decode(), tokens)


def test_histories_pack_with_it() -> None:
    reader = HistoryReader(CPU, offload=True, sm_budget=None)
    history = PackedHistory(reader.new_words(), SparsePlans(), "k", window=8, block_tokens=16)
    tokens = rows_of(1, 1, 64, torch.float32).expand(2 * 3 * 100, 64).reshape(2, 3, 100, 64)
    history.append(tokens)
    assert [type(segment.codec) for segment in history.segments] == [SparseCodec]
    assert history.words.n_words * 4 < tokens.nbytes // 8
    assert same_bits(history.decode(), tokens)


def packed_weights(tensors: dict[str, torch.Tensor], **options: Any) -> PackedWeights:
    units = {"first": list(tensors)[::2], "second": list(tensors)[1::2]}
    with WeightPacker(units, plan_with=SparseCodec, **options) as packer:
        for name, tensor in tensors.items():
            packer.add(name, tensor)
        return packer.finish()


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_streamed_weights(tmp_path: Path, tier: str, dtype: torch.dtype) -> None:
    tensors = {
        "weight": rows_of(1, 96, 1024, dtype),
        "other": rows_of(2, 70, 512, dtype),
        "transposed": rows_of(3, 64, 1024, dtype).T,
        "bias": rows_of(4, 1, 128, dtype)[0],
        "noise": torch.from_numpy(np.random.default_rng(5).integers(0, 256, (64, 256), np.uint8)),
    }
    options = {} if tier == "host" else {"disk": tmp_path / "weights.safetensors"}
    weights = packed_weights(tensors, **options)
    assert type(weights.record("weight").codec) is SparseCodec
    assert weights.record("noise").raw
    for name, tensor in tensors.items():
        assert same_bits(weights.read(name), tensor), name
    ids = torch.tensor([5, 0, 5, 95])
    assert same_bits(weights.rows("weight", ids), tensors["weight"][ids])
    with contextlib.closing(WeightStream(weights)) as stream:
        for unit in ("first", "second") * 2:
            for name, tensor in stream.acquire(unit).items():
                assert same_bits(tensor, tensors[name]), name
            stream.release(unit)


def test_a_gpu_is_refused_by_the_kernels() -> None:
    codec = SparseCodec.fit(rows_of(1, 4, 64, torch.float32))
    with pytest.raises(bitslab.ArgumentTypeError, match="cuda.*SparseKernels.* CPU alone"):
        codec.kernels(torch.device("cuda", 0))


class Overriding(bitslab.InvariantCodec):
    """Packs otherwise than its parent, whose kernels it inherits."""

    name = "overriding-test"

    def encode(self, rows: torch.Tensor) -> bitslab.PackedRows:
        return super().encode(~rows)


class Flipping(bitslab.RawCodec):
    """Keeps no plain rows, though its parent does."""

    name = "flipping-test"

    def encode(self, rows: torch.Tensor) -> bitslab.PackedRows:
        return super().encode(~rows)

    def kernels(self, device: torch.device) -> Any:
        raise AssertionError("asked for kernels of rows that are not what they read")


class Unregistered(SparseCodec):
    name = "unregistered-test"

    def kernels(self, device: torch.device) -> SparseKernels:
        return super().kernels(device)


class SameName(SparseCodec):
    def kernels(self, device: torch.device) -> SparseKernels:
        return super().kernels(device)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Overriding, "with a method `kernels` of their own"),
        (Flipping, "with a method `kernels` of their own"),
        (Unregistered, "'unregistered-test'.* is not the codec of that name; use bitslab.reg"),
        (SameName, "'sparse-test' of .*SameName is not the codec of that name"),
    ],
)
def test_tables_refuse_what_they_would_read_otherwise(cls: Any, message: str) -> None:
    x = rows_of(1, 40, 64, torch.int16)
    with pytest.raises(bitslab.ArgumentError, match=message):
        bitslab.CompressedTable.from_tensor(x, codec=cls.fit(x), progress=False)


@pytest.mark.parametrize("cls", [Overriding, Flipping], ids=lambda cls: cls.name)
def test_weights_refuse_what_they_would_read_otherwise(cls: Any) -> None:
    with pytest.raises(bitslab.ArgumentError, match=f"plan_with: codec {cls.name!r} has no method"):
        WeightPacker({"unit": ["weight"]}, plan_with=cls)


def test_histories_refuse_a_codec_with_clusters() -> None:
    class Clustered:
        def fit(self, kind: str, sample: torch.Tensor, *, search_all: bool = False) -> Any:
            codec = bitslab.InvariantCodec.fit(sample, clusters=2)
            assert codec.clusters == 2
            return codec

    words = HistoryReader(CPU, offload=True, sm_budget=None).new_words()
    history = PackedHistory(words, Clustered(), "k", window=8, block_tokens=8)
    x = torch.arange(128 * 64, dtype=torch.int32).view(128, 64) % 1000
    x[::2] <<= 16
    with pytest.raises(bitslab.ArgumentError, match="plans: a codec with 2 clusters"):
        history.append(x.view(torch.float32).view(1, 1, 128, 64))


def test_a_history_is_copied_without_its_kernels() -> None:
    """Kernels may hold what cannot be copied."""

    class Uncopied(SparseKernels):
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("kernels are not to be copied")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.SparseKernels", Uncopied)
        words = HistoryReader(CPU, offload=True, sm_budget=None).new_words()
        history = PackedHistory(words, SparsePlans(), "k", window=8, block_tokens=8)
        tokens = rows_of(1, 64, 64, torch.bfloat16).view(1, 1, 64, 64)
        history.append(tokens)
        assert history.packed_tokens
        assert same_bits(copy.deepcopy(history).decode(), tokens)
        assert same_bits(pickle.loads(pickle.dumps(history)).decode(), tokens)


@pytest.mark.gpu
def test_tables_take_rows_of_a_gpu() -> None:
    x = rows_of(1, 200, 64, torch.float32)
    with bitslab.CompressedTable.from_tensor(x.cuda(), codec="sparse-test", progress=False) as t:
        x[7] = 5
        t.update(torch.tensor([7]).cuda(), x[7:8].cuda())
        assert same_bits(t.gather(torch.arange(200)), x)


@pytest.mark.gpu
def test_tables_gather_for_a_gpu_on_the_host() -> None:
    x = rows_of(1, 200, 64, torch.float32)
    ids = torch.tensor([3, -1, 3, 150])
    with bitslab.CompressedTable.from_tensor(x, codec="sparse-test", progress=False) as table:
        assert same_bits(table.gather(ids.cuda()).cpu(), x[ids])
        cache = bitslab.SlabCache(table, x.nbytes, "cuda")
        cache.fill(torch.arange(100))
        assert same_bits(cache.gather(ids.cuda()).cpu(), x[ids])
    with bitslab.CompressedTable.from_tensor(x, codec="raw", progress=False) as raw:
        with pytest.raises(bitslab.ArgumentError, match="devices: cuda.*'sparse-test'.* for cpu"):
            bitslab.SlabCache(raw, x.nbytes, "cuda", codec=SparseCodec.fit(x))
