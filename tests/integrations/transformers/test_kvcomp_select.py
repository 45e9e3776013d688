"""KVCompCache with a selector: whole tiles are chosen, gathered and decoded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from bitslab import ArgumentError, ArgumentTypeError
from bitslab.integrations.transformers import (
    HeavyHitterSelector,
    InfiniGenSelector,
    KVCompCache,
    KVSelector,
)
from bitslab.kvcache import HeavyScores, Selection
from tests.integrations.transformers.models import model_of, prompt_of
from tests.integrations.transformers.test_selectors import generate

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {
    "window": 8,
    "block_tokens": 16,
    "sinks": 3,
    "key_scale": 0.3,
    "value_scale": 0.2,
    "granularity": "channel",
}


class Everything(HeavyScores):
    """Chooses all tiles, and has them gathered one by one."""

    def choose(self, packed: int, group_tokens: int) -> Selection | None:
        first = self.first
        batch, heads = self.sums.shape[:2]
        groups = torch.arange((packed - first) // group_tokens, device=self.sums.device)
        groups = groups.expand(batch, heads, -1)
        return Selection(groups, group_tokens, packed, first) if groups.numel() else None


class EverythingSelector(HeavyHitterSelector):
    def scores(self, layer: int) -> HeavyScores:
        return Everything(1.0)


def cache_of(selector: KVSelector | None, **options: Any) -> KVCompCache:
    return KVCompCache(model_of("llama").config, select=selector, **{**OPTIONS, **options})


@pytest.mark.drawn(2)
@pytest.mark.parametrize("mode", ["greedy", "beam", "prompt-lookup", "chunked-prefill"])
def test_everything_gathered_gives_the_tokens_of_no_selector(mode: str) -> None:
    model, prompt = model_of("llama"), prompt_of()
    expected = generate(model, cache_of(None), prompt, mode)
    selector = EverythingSelector(1.0, 4)
    cache = cache_of(selector)
    with selector.attached(model):
        found = generate(model, cache, prompt, mode)
    assert torch.equal(found, expected)
    stats = cache.stats()
    assert stats["selected"] == 1.0 and stats["packed_ratio"] > 1.5 and stats["packed_tokens"]


@pytest.mark.parametrize("kind", ["heavy", "infinigen"])
def test_whole_tiles_of_each_head_are_chosen(kind: str) -> None:
    model, prompt = model_of("llama"), prompt_of(batch=2, length=90)
    selector: KVSelector = HeavyHitterSelector(0.4, 4)
    if kind == "infinigen":
        selector = InfiniGenSelector.fit(model, prompt, budget=0.4)
    cache = cache_of(selector)
    with selector.attached(model):
        generate(model, cache, prompt)
    assert 0.3 < cache.stats()["selected"] < 0.7
    if kind == "infinigen":
        return
    layer: Any = cache.layers[0]
    chosen = layer._gather()
    selection = chosen.selection
    assert (selection.group_tokens, selection.first) == (16, 3)
    assert selection.groups.shape[2] < selection.n_groups
    positions = selection.positions()
    assert positions[0, 0, :3].tolist() == [0, 1, 2]
    for tokens, all_tokens in zip(chosen.gathered.get(), (layer.keys, layer.values), strict=True):
        index = positions[:, :, 3:, None].expand(-1, -1, -1, tokens.shape[3])
        assert torch.equal(tokens[:, :, : index.shape[2]], all_tokens.gather(2, index))


def test_a_cut_tile_is_attended_and_what_is_packed_behind_it_is_read_whole() -> None:
    model, prompt = model_of("llama"), prompt_of(batch=2, length=90)
    selector = HeavyHitterSelector(0.4, 4)
    cache = cache_of(selector)
    layer: Any = cache.layers[0]
    with selector.attached(model):
        model(prompt, past_key_values=cache)
        cache.crop(-25)
        assert layer.packed_tokens % 16  # inside a tile
        chosen = layer._gather()
        cut = layer.packed_tokens - layer.packed_tokens // 16 * 16
        assert chosen.gathered.get()[0].shape[2] == chosen.selection.tokens - 3 + cut
        assert torch.equal(
            chosen.gathered.get()[1][:, :, -cut:],
            layer.values[:, :, layer.packed_tokens + 3 - cut :],
        )
        model(prompt[:, :1], past_key_values=cache)
        model(prompt[:, :60], past_key_values=cache)
        assert [segment.cut_tokens > 0 for segment in layer.histories[0].segments] == [True, False]
        assert layer._gather() is None  # groups are no tiles there
        model(prompt[:, :1], past_key_values=cache)


def test_what_does_not_select_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="select: expected a KVSelector"):
        cache_of(0.5)  # type: ignore[arg-type]
    model = copy.deepcopy(model_of("llama"))
    model.set_attn_implementation("bitslab")
    with pytest.raises(ArgumentError, match="attn_implementation is 'bitslab'"):
        HeavyHitterSelector(0.5, 4).attached(model)


def test_lossless_layers_select_too() -> None:
    model, prompt = model_of("llama"), prompt_of()
    expected = generate(model, None, prompt)
    selector = EverythingSelector(1.0, 4)
    cache = KVCompCache(model.config, error=0, window=8, block_tokens=16, select=selector)
    with selector.attached(model):
        assert torch.equal(generate(model, cache, prompt), expected)
    assert cache.stats()["selected"] == 1.0
