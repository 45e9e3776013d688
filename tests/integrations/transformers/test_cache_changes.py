"""What changes a CompressedCache: every form of an index, and errors that leave all as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bitslab import BitslabError
from bitslab.integrations.transformers import HeavyHitterSelector
from bitslab.kvcache import PackedHistory, PartialKeys, in_flight
from bitslab.kvcache.segment import Segment
from tests.integrations.transformers.models import SMALL, compressed, config_of, dynamic

HEADS, DIM, BATCH, TOKENS = 2, 16, 3, 50


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def feed(cache: Any, n: int = TOKENS, batch: int = BATCH, seed: int = 0) -> None:
    for layer in range(len(cache.layers)):
        k, v = (normal(batch, HEADS, n, DIM, seed=seed + 2 * layer + i) for i in (0, 1))
        cache.update(k, v, layer)


def both(name: str = "llama", n: int = TOKENS, **options: Any) -> tuple[Any, Any]:
    """Return a compressed and a plain cache that hold the same."""
    caches = compressed(config_of(name), **SMALL, **options), dynamic(config_of(name))
    for cache in caches:
        feed(cache, n)
    return caches


def assert_same(ours: Any, plain: Any) -> None:
    for one, other in zip(ours.layers, plain.layers, strict=True):
        assert one.get_seq_length() == other.get_seq_length()
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def assert_usable(ours: Any, plain: Any) -> None:
    """Both go on alike."""
    assert_same(ours, plain)
    for cache in (ours, plain):
        feed(cache, 20, seed=100)
    assert_same(ours, plain)


INDICES: dict[str, Any] = {
    "tuple": (0, 2),
    "one of a tuple": (0,),
    "list": [2, 2, 0, 1],
    "negative": [-1, 0],
    "tensor": torch.tensor([1, 0]),
    "int32": torch.tensor([1, 0], dtype=torch.int32),
    "numpy": np.array([2, 0]),
    "range": range(2),
    "mask": torch.tensor([True, False, True]),
    "list of bools": [False, True, True],
    "slice": slice(1, None),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_sequences_are_selected_by_any_index(name: str, index: Any) -> None:
    ours, plain = both(name, n=20 if name == "gemma3" else TOKENS)
    ours.batch_select_indices(index)
    rows = list(range(BATCH))
    plain.batch_select_indices(
        torch.tensor(np.array(rows)[list(index) if isinstance(index, tuple) else index])
    )
    assert_same(ours, plain)
    batch = plain.layers[0].keys.shape[0]
    for cache in (ours, plain):
        feed(cache, 20, batch=batch, seed=100)
    assert_same(ours, plain)


@pytest.mark.parametrize("index", [(2, 0, 0), [1], torch.tensor([1, 0, 2])], ids=repr)
def test_beams_are_reordered_by_any_index(index: Any) -> None:
    ours, plain = both()
    ours.reorder_cache(index)
    plain.reorder_cache(torch.as_tensor(index))
    assert_same(ours, plain)


REFUSED: dict[str, tuple[str, Any, str]] = {
    "select-out-of-range": ("batch_select_indices", (0, 3), "indices: 3, accepted are -3 to 2"),
    "select-negative": ("batch_select_indices", torch.tensor([-4]), "indices: -4"),
    "select-floats": ("batch_select_indices", torch.tensor([0.0]), "indices: dtype torch.float32"),
    "select-scalar": ("batch_select_indices", 1, "indices: shape"),
    "select-matrix": ("batch_select_indices", torch.tensor([[0, 1]]), "indices: shape"),
    "select-short-mask": ("batch_select_indices", [True, False], "indices: a mask of shape"),
    "select-meta": ("batch_select_indices", torch.zeros(2, device="meta"), "indices: on meta"),
    "select-text": ("batch_select_indices", "first", "indices: 'first'"),
    "reorder-out-of-range": ("reorder_cache", torch.tensor([0, 1, 3]), "beam_idx: 3"),
    "reorder-floats": ("reorder_cache", torch.tensor([0.5]), "beam_idx: dtype torch.float32"),
    "repeat-negative": ("batch_repeat_interleave", -1, "repeats: -1"),
    "repeat-float": ("batch_repeat_interleave", 1.5, "repeats: expected an int"),
    "crop-too-much": ("crop", -TOKENS - 1, "holds 50 tokens"),
    "crop-positive": ("crop", 1, "negative"),
    "crop-float": ("crop", -1.5, "tokens_to_remove: expected an int"),
}


@pytest.mark.parametrize(("method", "argument", "text"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_changes_nothing(method: str, argument: Any, text: str) -> None:
    ours, plain = both()
    with pytest.raises(BitslabError, match=text):
        getattr(ours, method)(argument)
    assert_usable(ours, plain)


def test_one_layer_alone_refuses_likewise() -> None:
    ours, plain = both()
    for method, argument, text in REFUSED.values():
        with pytest.raises(BitslabError, match=text):
            getattr(ours.layers[1], method)(argument)
    assert_usable(ours, plain)


CHANGES: dict[str, tuple[str, Any]] = {
    "select": ("batch_select_indices", [0, 1]),
    "reorder": ("reorder_cache", torch.tensor([2, 1, 0])),
    "repeat": ("batch_repeat_interleave", 2),
    "crop": ("crop", -30),
}


@pytest.mark.parametrize(("method", "argument"), CHANGES.values(), ids=CHANGES)
def test_a_change_that_fails_in_the_last_layer_changes_no_layer(
    method: str, argument: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, plain = both()

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    history = ours.layers[1].histories[1]
    for name in ("prepare_take", "prepare_crop"):
        monkeypatch.setattr(history, name, fail)
    with pytest.raises(torch.OutOfMemoryError):
        getattr(ours, method)(argument)
    monkeypatch.undo()
    assert_usable(ours, plain)


@pytest.mark.parametrize(("method", "argument"), CHANGES.values(), ids=CHANGES)
def test_a_change_that_a_plain_layer_refuses_changes_no_layer(method: str, argument: Any) -> None:
    """A window that is full cannot be cropped; else the layer lacks memory."""
    ours, plain = both("gemma3")
    sliding = ours.layers[0]
    if method != "crop":
        change = getattr(sliding, method)

        def fail(given: Any) -> None:
            change(given)
            raise torch.OutOfMemoryError("CUDA out of memory")

        setattr(sliding, method, fail)
    with pytest.raises(RuntimeError):
        getattr(ours, method)(argument)
    vars(sliding).pop(method, None)
    assert_usable(ours, plain)


def test_sequences_are_kept_when_they_cannot_be_packed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where less than half are left; packing again only saves memory."""
    ours, plain = both()

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(in_flight, "pack_rows", fail)
    for cache in (ours, plain):
        cache.batch_select_indices(torch.tensor([1]))
    monkeypatch.undo()
    assert_same(ours, plain)
    for cache in (ours, plain):
        feed(cache, 20, batch=1, seed=100)
    assert_same(ours, plain)
    assert ours.stats()["packed_tokens"] > TOKENS


@pytest.mark.parametrize("failing", ["commit", "append"])
def test_metadata_that_cannot_be_had_changes_no_token(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, plain = both()

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    history = ours.layers[1].histories[1]
    before = history.words.n_words
    if failing == "commit":
        monkeypatch.setattr(Segment, "commit", fail)
    else:
        monkeypatch.setattr(PackedHistory, "append", fail)
    with pytest.raises(torch.OutOfMemoryError):
        feed(ours, 20, seed=100)
    monkeypatch.undo()
    assert history.words.n_words == before
    assert_usable(ours, plain)


def test_a_first_update_that_fails_leaves_an_empty_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = compressed(config_of("llama"), **SMALL)
    with pytest.raises(BitslabError, match=r"expected \[B, H, tokens, D\]"):
        ours.update(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), 0)
    with pytest.raises(BitslabError, match="key_states: expected a tensor"):
        ours.update([1.0], torch.zeros(2, 3, 4, 5), 0)
    with pytest.raises(BitslabError, match="layer_idx: -1"):
        ours.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), -1)
    assert ours.layers[0].keys is None and ours.get_seq_length() == 0
    plain = dynamic(config_of("llama"))
    for cache in (ours, plain):
        feed(cache)
    assert_usable(ours, plain)


@pytest.mark.parametrize("index", [(0, 2), (1,), [True, False, True]], ids=repr)
def test_scores_of_a_selector_follow(index: Any) -> None:
    selector = HeavyHitterSelector(heavy=0.5, recent=4)
    ours = compressed(config_of("llama"), select=selector, **SMALL)
    feed(ours)
    for layer in ours.layers:
        layer.scores.add(normal(BATCH, HEADS, TOKENS, seed=5).abs(), None, TOKENS)
    with pytest.raises(BitslabError, match="indices"):
        ours.batch_select_indices((0, 3))
    expected = ours.layers[1].scores.sums.clone()
    ours.batch_select_indices(index)
    rows = torch.as_tensor(index)
    assert torch.equal(ours.layers[1].scores.sums, expected[rows])
    feed(ours, 1, batch=expected[rows].shape[0])


def test_scores_change_as_a_whole() -> None:
    """What is prepared of two tensors is made with both or none."""
    skew = torch.eye(DIM).expand(HEADS, DIM, DIM)
    scores = PartialKeys(skew, partial=0.5, budget=0.5, alpha=None)
    scores.see(normal(BATCH, HEADS, 10, DIM, seed=0), normal(BATCH, HEADS, 10, DIM, seed=1))
    before = [t.clone() for t in scores.tensors()]
    asked: list[torch.Tensor] = []

    def take(t: torch.Tensor, dim: int) -> torch.Tensor:
        asked.append(t)
        if len(asked) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return t[:1]

    with pytest.raises(torch.OutOfMemoryError):
        scores.take(take)
    assert all(map(torch.equal, scores.tensors(), before))


@pytest.mark.parametrize("nothing", [[], torch.tensor([False] * BATCH)], ids=["list", "mask"])
def test_no_sequence_may_be_left(nothing: Any) -> None:
    ours, _ = both()
    ours.batch_select_indices(nothing)
    assert [layer.keys.shape for layer in ours.layers] == [(0, HEADS, TOKENS, DIM)] * 2
