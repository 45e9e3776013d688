"""GraphBolt features, and the error where there is no GraphBolt.

DGL 1.1.3 has none, so the class itself is not made here. All of its methods are `FeatureReads`,
which is tested as it is.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("dgl", reason="dgl is not installed")

import dgl

import bitslab
from bitslab.integrations.dgl.feature_reads import FeatureReads, load_graphbolt
from tests.helpers import dtype_id, packable, same_bits, take


def test_import_says_which_dgl_has_graphbolt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dgl.graphbolt", None)  # as in the DGL that is pinned
    monkeypatch.delitem(sys.modules, "bitslab.integrations.dgl.graphbolt", raising=False)
    with pytest.raises(bitslab.MissingExtraError) as raised:
        importlib.import_module("bitslab.integrations.dgl.graphbolt")
    message = str(raised.value)
    assert isinstance(raised.value, ImportError)
    assert f"dgl {dgl.__version__}, installed with torch {torch.__version__}" in message
    assert "has no GraphBolt" in message
    for hint in ("dgl 2.4.0", "https://data.dgl.ai/wheels", "dgl 2.1.0", "compress_features"):
        assert hint in message


@pytest.mark.parametrize("kind", [FileNotFoundError, ImportError])  # what DGL 2 raises
def test_a_graphbolt_that_does_not_load_is_distinguished_from_none(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail(name: str) -> None:
        raise kind("Cannot find DGL C++ graphbolt library")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(bitslab.MissingExtraError, match="does not load.*Cannot find.*2.4.0"):
        load_graphbolt()


def test_a_package_that_graphbolt_misses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torchdata'", name="torchdata")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="torchdata"):
        load_graphbolt()


def read_in_stages(feature: FeatureReads, ids: torch.Tensor) -> Any:
    """Read as GraphBolt's fetcher does: the last stage yields a future of the rows."""
    handle = feature.read_async(ids)
    for _ in range(feature.read_async_num_stages(ids.device)):
        future = next(handle)
    assert next(handle, None) is None
    return future


@pytest.mark.parametrize(
    ("dtype", "row_shape"),
    [(torch.float32, (64,)), (torch.bfloat16, (4, 8)), (torch.int64, ())],
    ids=str,
)
def test_reads(dtype: torch.dtype, row_shape: tuple[int, ...]) -> None:
    t = packable(dtype, (300, *row_shape))
    feature = FeatureReads(t, {"from": "a test"}, device="cpu")
    ids = torch.tensor([7, 299, 7, 0])
    for wanted in (ids, ids.int(), ids[:0]):
        expected = take(t, wanted.long())
        assert same_bits(feature.read(wanted), expected), dtype_id(dtype)
        assert same_bits(read_in_stages(feature, wanted).wait(), expected)
    assert torch.equal(feature.read(), t)
    assert feature.size() == torch.Size(row_shape) and isinstance(feature.size(), torch.Size)
    assert feature.count() == 300
    assert feature.metadata() == {"from": "a test"}
    assert FeatureReads(feature.feature).metadata() == {}
    assert "300" in repr(feature) and "a test" in repr(feature)


def test_several_reads_are_under_way_at_once() -> None:
    t = packable(torch.float32, (5000, 64))  # so many bytes that a thread gathers
    features = [FeatureReads(t, device="cpu"), FeatureReads(t.half(), device="cpu")]
    ids = torch.randperm(5000)
    futures = [read_in_stages(feature, ids) for feature in features]
    for future, expected in zip(futures, (t, t.half()), strict=True):
        assert same_bits(future.wait(), expected[ids])


def test_bad_ids() -> None:
    feature = FeatureReads(torch.ones(10, 4), device="cpu")
    bad = torch.tensor([3, 10])
    with pytest.raises(bitslab.IndexRangeError, match="index 10 at position 1"):
        feature.read(bad)
    with pytest.raises(bitslab.IndexRangeError, match="index 10 at position 1"):
        read_in_stages(feature, bad).wait()
    with pytest.raises(bitslab.ArgumentTypeError, match="ids_device: meta"):
        feature.read_async_num_stages(torch.device("meta"))


def test_stages_are_known_for_gpus_where_there_are_none() -> None:
    # GraphBolt asks for both when it builds its pipeline.
    feature = FeatureReads(torch.ones(10, 4), device="cpu")
    assert feature.read_async_num_stages(torch.device("cuda")) == 1


def test_rows_are_updated() -> None:
    t = packable(torch.float32, (200, 32))
    feature = FeatureReads(t, device="cpu", cache_ratio=0.5)
    assert same_bits(feature.read(torch.arange(200)), t)
    whole = feature.read()
    t = t.clone()
    t[[5, 6]] = torch.tensor([[float("nan")], [-0.0]])
    feature.update(t[[5, 6]], torch.tensor([5, 6]))
    assert same_bits(feature.read(torch.arange(200)), t)
    assert same_bits(feature.read().clone(), t)
    assert not torch.equal(whole, t)  # rows read before are unchanged
    with pytest.raises(bitslab.IndexRangeError):
        feature.update(t[:1], torch.tensor([200]))
    with pytest.raises(bitslab.ArgumentError, match="2 ids for 1 rows"):
        feature.update(t[:1], torch.tensor([1, 2]))
    with pytest.raises(bitslab.ArgumentTypeError, match="float64"):
        feature.update(t[:1].double(), torch.tensor([1]))
    assert same_bits(feature.read().clone(), t)


def test_the_whole_feature_is_updated() -> None:
    t = packable(torch.float32, (200, 32))
    feature = FeatureReads(t, device="cpu", cache_ratio=0.25, layout="inplace")
    feature.update(t[:150] + 1)
    assert feature.count() == 150
    assert same_bits(feature.read(torch.arange(150)), t[:150] + 1)
    assert feature.stats()["cache"] is not None  # packed with the options given at first
    assert feature.feature.table.layout == "inplace"
    with pytest.raises(bitslab.ArgumentTypeError, match="dtype torch.float16"):
        feature.update(t.half())
    with pytest.raises(bitslab.ArgumentError, match=r"shape \[200, 31\], expected \['N', 32\]"):
        feature.update(t[:, 1:])
    assert feature.count() == 150


def test_a_feature_made_elsewhere_is_wrapped() -> None:
    t = packable(torch.float32, (100, 16))
    plain = bitslab.CompressedFeature.from_tensor(t, device="cpu", layout="inplace")
    feature = FeatureReads(plain)
    assert feature.feature is plain
    feature.update(t + 1)
    assert feature.feature is not plain and feature.feature.table.layout == "inplace"
    assert same_bits(feature.read(torch.arange(100)), t + 1)
    assert same_bits(plain.gather(torch.arange(100)), t)
    cached = bitslab.CompressedFeature.from_tensor(t, device="cpu", cache_ratio=0.5)
    with pytest.raises(bitslab.BitslabError, match=r"FeatureReads\(tensor, cache_bytes"):
        FeatureReads(cached).update(t + 1)
    with pytest.raises(bitslab.ArgumentTypeError, match="options: .'layout'. are for packing"):
        FeatureReads(plain, layout="inplace")
    with pytest.raises(bitslab.ArgumentTypeError, match="got list"):
        FeatureReads([1.0])  # type: ignore[arg-type]


def test_pickles() -> None:
    t = packable(torch.float32, (100, 16))
    feature = FeatureReads(t, {"a": 1}, device="cpu")
    there = pickle.loads(pickle.dumps(feature))
    ids = torch.tensor([99, 0])
    assert same_bits(there.read(ids), t[ids])
    assert there.metadata() == {"a": 1}


@pytest.mark.gpu
def test_reads_on_a_stream_of_their_own() -> None:
    t = packable(torch.float32, (4000, 64))
    feature = FeatureReads(t, device="cuda", cache_ratio=0.1)
    host_ids = torch.randperm(4000)
    ids = host_ids.cuda()
    futures = []
    for _ in range(3):
        ids = ids.flip(0)  # on the current stream, which the reading stream must wait for
        futures.append(read_in_stages(feature, ids))
        host_ids = host_ids.flip(0)
    rows = futures[-1].wait()
    assert rows.device == ids.device
    assert same_bits((rows + 0).cpu(), t[host_ids] + 0)
    assert same_bits(feature.read(ids).cpu(), t[host_ids])
    # Not the stream of the caller, which does not wait.
    assert list(feature._lanes) == [ids.device]
    assert feature._lanes[ids.device].stream != torch.cuda.current_stream()
    assert pickle.loads(pickle.dumps(feature))._lanes == {}
