"""CompressedFeature: rows through a table and a cache, futures, and all rows at once."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch

import bitslab
from bitslab import CompressedFeature
from bitslab.engine.memory.readonly import plain
from bitslab.tables import feature as feature_module

N = 200


@pytest.fixture(scope="module")
def x():
    return torch.randn(N, 24, generator=torch.Generator().manual_seed(1)).round()


def bits(t):
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8], ids=str
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"codec": "raw"},
        {"cache_ratio": 0.2},
        {"codec": "raw", "cache_codec": "auto", "cache_bytes": 2000},
        {"layout": "inplace"},
    ],
    ids=["host", "raw", "both", "cache", "inplace"],
)
def test_every_mode_gives_the_rows_bit_for_bit(x, dtype, options):
    t = x.clone().to(dtype)
    if dtype.is_floating_point:
        t[3, 5], t[4, 6] = float("nan"), -0.0
    feature = CompressedFeature.from_tensor(t, device="cpu", **options)
    ids = torch.tensor([5, 3, 4, 3, -1, 100], dtype=torch.int32)
    expected = t[ids.long()]
    assert torch.equal(bits(feature.gather(ids)), bits(expected))
    assert torch.equal(bits(feature.fetch(ids).wait()), bits(expected))
    assert torch.equal(bits(feature.whole()), bits(t))
    assert feature.shape == t.shape and feature.dtype == dtype and len(feature) == N
    stats = feature.stats()
    assert stats["gathered_rows"] == 12 and stats["gathered_bytes"] == 12 * t[0].nbytes


def test_a_cache_lowers_what_moves_from_host_memory(x):
    feature = CompressedFeature.from_tensor(
        x, codec="raw", cache_codec="auto", cache_ratio=0.1, device="cpu", hot_ids=torch.arange(N)
    )
    feature.gather(torch.arange(N))
    stats = feature.stats()
    cached = stats["cache"]["cached_rows"]
    assert cached > N // 10  # as many as fit uncompressed
    assert stats["hit_rate"] == pytest.approx(cached / N)
    assert stats["moved_bytes"] == (N - cached) * x[0].nbytes


def test_features_like_those_of_citeseer_take_a_fiftieth():
    drawn = torch.rand(3312, 3703, generator=torch.Generator().manual_seed(3)) < 0.0086
    rows = drawn / drawn.sum(1, keepdim=True).clamp(min=1)
    feature = CompressedFeature.from_tensor(rows)
    assert feature.nbytes < 1_000_000 and feature.ratio > 50
    feature.gather(torch.arange(0, 3312, 2))
    stats = feature.stats()
    assert stats["gathered_bytes"] / stats["moved_bytes"] == pytest.approx(feature.ratio, rel=0.05)


def test_hot_ids_are_asked_for_only_by_a_cache(x):
    def never():
        raise AssertionError("asked")

    CompressedFeature.from_tensor(x, hot_ids=never)
    hot = CompressedFeature.from_tensor(
        x, cache_bytes=500, device="cpu", hot_ids=lambda: torch.arange(N - 1, -1, -1)
    )
    hot.gather(torch.tensor([N - 1]))
    assert hot.stats()["hit_rate"] == 1


def test_a_share_that_holds_no_row_is_noted(x):
    feature = CompressedFeature.from_tensor(x, cache_ratio=0.001, device="cpu")
    assert feature.cache is None
    assert any("no cache" in note for note in feature.stats()["notes"])


def test_large_fetches_overlap_and_raise_in_wait(x, monkeypatch):
    monkeypatch.setattr(feature_module, "OVERLAP_BYTES", 0)
    features = [CompressedFeature.from_tensor(x), CompressedFeature.from_tensor(x + 1)]
    ids = torch.arange(0, N, 3)
    futures = [feature.fetch(ids) for feature in features]
    assert torch.equal(futures[0].wait(), x[ids])
    assert torch.equal(futures[1].wait(), x[ids] + 1)
    assert futures[1].wait() is futures[1].wait()
    with pytest.raises(bitslab.IndexRangeError, match="ids"):
        features[0].fetch(torch.tensor([0, N]))
    features[0].table._parts.tensors["lengths"][:] = 255  # as damage would
    damaged = features[0].fetch(ids)
    with pytest.raises(bitslab.CorruptedDataError, match="damaged"):
        damaged.wait()


def test_whole_is_decoded_once_and_protected(x):
    feature = CompressedFeature.from_tensor(x)
    assert feature.stats()["materialised_bytes"] == 0
    whole = feature.whole()
    assert whole is feature.whole() is feature.kept_whole
    assert feature.stats()["materialised_bytes"] == x.nbytes
    assert feature.stats()["gathers"] == 0
    (note,) = (note for note in feature.stats()["notes"] if "materialised" in note)
    assert note.endswith(f" {x.nbytes:,} bytes")
    with pytest.raises(bitslab.BitslabError, match="read-only"):
        whole[0] = 0
    plain(whole).add_(1)  # round the guard
    assert torch.equal(feature.whole(), x)
    feature.forget_whole()
    assert feature.stats()["materialised_bytes"] == 0


@pytest.mark.parametrize("n_rows", [1023, 1024], ids=["small", "1 MiB"])
def test_a_large_copy_is_warned_of_once_with_its_bytes(n_rows):
    feature = CompressedFeature.from_tensor(torch.ones(n_rows, 256))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        feature.whole()
        feature.forget_whole()
        feature.whole()
    if n_rows < 1024:
        assert not caught
    else:
        (warning,) = caught
        assert warning.category is bitslab.DecodedCopyWarning and warning.filename == __file__
        assert "takes 1,048,576 bytes" in str(warning.message)


def test_copies(x):
    feature = CompressedFeature.from_tensor(x, cache_bytes=1000, device="cpu")
    assert copy.copy(feature) is feature
    for copied in (copy.deepcopy(feature), pickle.loads(pickle.dumps(feature))):
        assert copied.cache is None and copied.table is not feature.table
        assert torch.equal(copied.gather(torch.arange(N)), x)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (4,), (3, 2, 5)], ids=str)
def test_odd_shapes(shape):
    t = torch.randn(shape)
    feature = CompressedFeature.from_tensor(t, cache_ratio=0.5, device="cpu")
    assert torch.equal(feature.gather(torch.arange(shape[0])), t)
    assert torch.equal(feature.whole(), t)


def test_rows_that_are_not_contiguous(x):
    t = torch.randn(24, N).round().t()[::2]
    assert torch.equal(CompressedFeature.from_tensor(t).whole(), t)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"cache_ratio": 1.5}, "cache_ratio"),
        ({"cache_ratio": "1%"}, "cache_ratio"),
        ({"cache_bytes": -1}, "cache_bytes"),
        ({"cache_bytes": 100, "cache_ratio": 0.1}, "cache_bytes, cache_ratio"),
        ({"device": "nowhere"}, "device"),
        ({"layout": "tight"}, "layout"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_named(x, options, name):
    with pytest.raises(bitslab.ArgumentError, match=f"^{name}:"):
        CompressedFeature.from_tensor(x, **options)


def test_what_requires_a_gradient_is_refused(x):
    with pytest.raises(bitslab.ArgumentError, match="gradient"):
        CompressedFeature.from_tensor(x.clone().requires_grad_())


def test_a_cache_of_another_table_is_refused(x):
    one, other = (bitslab.CompressedTable.from_tensor(x) for _ in range(2))
    with pytest.raises(bitslab.ArgumentError, match="another table"):
        CompressedFeature(one, bitslab.SlabCache(other, 1000, ["cpu"]))
    with pytest.raises(bitslab.ArgumentTypeError, match="table"):
        CompressedFeature(x)
