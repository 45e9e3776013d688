"""Caches whose update was interrupted, by Ctrl-C as a rule, go on with the tokens of before."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch

from bitslab.integrations.transformers import CompressedCache, KVCompCache
from bitslab.integrations.transformers.cache_layer import CompressedLayer
from tests.integrations.transformers.models import SMALL, config_of, dynamic

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 2
#: Every so many calls of an update one is interrupted.
STRIDE = 9
OURS = ("bitslab.kvcache", "bitslab.integrations")
#: Functions that the interpreter calls amid others: what they raise goes nowhere.
CALLBACKS = ("changed", "forget", "<genexpr>", "<lambda>")
CACHES: dict[str, Any] = {
    "lossless": lambda config: CompressedCache(config, **SMALL),
    "on-device": lambda config: CompressedCache(config, offload=False, **SMALL),
    "kvcomp": lambda config: KVCompCache(config, error=0, window=4, block_tokens=16, sinks=3),
    "kvcomp-lossy": lambda config: KVCompCache(config, error=0.3, window=4, block_tokens=16),
}


class Interrupt:
    """Raises KeyboardInterrupt at the beginning of the n-th call of a function of ours.

    That is where signals come: the interpreter looks for them when it begins a function.
    """

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        module = str(frame.f_globals.get("__name__"))
        if event == "call" and module.startswith(OURS) and frame.f_code.co_name not in CALLBACKS:
            self.left -= 1
            if not self.left:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def within(self, cache: Any, *arguments: Any) -> bool:
        """Return whether an update of the cache was interrupted."""
        before = sys.getprofile()
        sys.setprofile(self)
        try:
            cache.update(*arguments)
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(before)
        return False


def tokens(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, 2, n, 16, generator=generator) for _ in "kv")
    return keys, values


def held(cache: Any, layer: int = 0) -> list[torch.Tensor]:
    return [cache.layers[layer].keys, cache.layers[layer].values]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("kind", "new"),
    [("lossless", 1), ("on-device", 40), ("kvcomp", 40)],
    ids=["a-token-that-fills-a-block", "a-prompt-on-the-device", "a-prompt-of-kvcomp"],
)
def test_an_update_that_is_interrupted_is_made_wholly_or_not_at_all(kind: str, new: int) -> None:
    config = config_of("llama")
    first, plain = CACHES[kind](config), dynamic(config)
    for n in (70, *[1] * (13 if new == 1 else 0)):
        for cache in (first, plain):
            for layer in range(LAYERS):
                cache.update(*tokens(n, layer + n), layer)
    k, v = tokens(new, 99)
    before, packed = held(plain), first.layers[0].packed_tokens
    after = [torch.cat([old, t], dim=2) for old, t in zip(before, (k, v), strict=True)]
    whole, at = copy.deepcopy(first), 1
    whole.update(k, v, 0)
    assert whole.layers[0].packed_tokens > packed  # what is interrupted packs
    while True:
        cache = copy.deepcopy(first)
        if not Interrupt(at).within(cache, k, v, 0):
            break
        assert same(held(cache), before) or same(held(cache), after), at
        assert same(held(cache, 1), held(plain, 1))
        cache.layers[0].keep_first(before[0].shape[2])
        assert same(list(cache.update(k, v, 0)), after), at
        assert same(held(cache), after), at
        at += STRIDE
    assert at > 10 * STRIDE


@pytest.mark.parametrize("implementation", ["sdpa", "bitslab"])
def test_an_update_with_losses_that_is_interrupted_quantises_nothing(implementation: str) -> None:
    """What was not packed before is not behind it, in layers that were updated before too."""
    config = config_of("llama")
    config._attn_implementation = implementation
    first: Any = KVCompCache(config, error=0.3, window=4, block_tokens=16, sinks=3)
    for n in (70, *[1] * 5):
        for layer in range(LAYERS):
            first.update(*tokens(n, layer + n), layer)
    copied = copy.deepcopy(first)
    before = [t for layer in range(LAYERS) for t in held(copied, layer)]
    whole, at, undone = copy.deepcopy(first), 1, 0
    for layer in range(LAYERS):
        whole.update(*tokens(40, layer), layer)
    after = [t for layer in range(LAYERS) for t in held(whole, layer)]
    assert whole.layers[0].packed_tokens > first.layers[0].packed_tokens
    while True:
        cache = copy.deepcopy(first)
        cache.update(*tokens(40, 0), 0)
        if not Interrupt(at).within(cache, *tokens(40, 1), 1):
            break
        found = [t for layer in range(LAYERS) for t in held(cache, layer)]
        if cache.layers[1].get_seq_length() == cache.layers[0].get_seq_length() == 75:
            assert same(found, before), at
            undone += 1
            for layer in range(LAYERS):
                cache.update(*tokens(40, layer), layer)
        elif cache.layers[1].get_seq_length() == 75:  # before the cache began with it
            assert same(found[2:], before[2:]), at
            cache.update(*tokens(40, 1), 1)
        assert same([t for layer in range(LAYERS) for t in held(cache, layer)], after), at
        at += STRIDE
    assert undone > 3


@pytest.mark.parametrize("kind", CACHES)
def test_memory_that_fails_while_the_next_layer_is_fetched_leaves_all_layers_as_they_were(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CACHES[kind](config_of("llama"))
    for layer in range(LAYERS):
        cache.update(*tokens(70, layer), layer)
    plain = copy.deepcopy(cache)
    if kind != "kvcomp-lossy":
        plain = dynamic(config_of("llama"))
        for layer in range(LAYERS):
            plain.update(*tokens(70, layer), layer)

    def refuse(layer: CompressedLayer, new_tokens: int) -> None:
        raise torch.OutOfMemoryError("no memory")

    for failing in range(LAYERS):
        for layer in range(failing):
            cache.update(*tokens(40, 7), layer)
        with monkeypatch.context() as patch:
            patch.setattr(type(cache.layers[0]), "prefetch", refuse)
            with pytest.raises(torch.OutOfMemoryError):
                cache.update(*tokens(40, 7), failing)
        for layer in range(LAYERS):
            assert same(held(cache, layer), held(plain, layer))
    for each in (cache, plain):
        for layer in range(LAYERS):
            each.update(*tokens(40, 7), layer)
    assert all(same(held(cache, layer), held(plain, layer)) for layer in range(LAYERS))
