"""SelfAttentionCache: one cache for models with cross-attention, which expect two."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache


class SelfAttentionCache(EncoderDecoderCache):
    """An `EncoderDecoderCache` that caches self-attention alone.

    Attention modules update self-attention and cross-attention through one method of a `Cache`,
    with the same arguments. Only an `EncoderDecoderCache` distinguishes them, by its two caches.
    Here the cache of self-attention is this one itself, and that of cross-attention returns what it
    is given: models compute K and V of the encoder in each forward pass.

    Inside another `EncoderDecoderCache` it is an ordinary cache. All else is as in `Cache`.

    Attributes
    ----------
    cross_attention_cache : DynamicCache
        Keeps nothing. T5Gemma replaces it by another of its class.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Not the base class's, which asks for two caches.
        Cache.__init__(self, *args, **kwargs)
        self.cross_attention_cache = _Passing()

    @property
    def self_attention_cache(self) -> SelfAttentionCache:  # type: ignore[override]
        """Itself."""
        return self

    @property
    def is_updated(self) -> dict[int, bool]:  # type: ignore[override]
        """Layers whose K and V of the encoder are kept: always empty, whatever a model sets."""
        return {}


def _restore(names: set[str]) -> None:
    """Give `SelfAttentionCache` the methods of `Cache` that `EncoderDecoderCache` overrides."""
    for name in names:
        setattr(SelfAttentionCache, name, vars(Cache)[name])


_restore((vars(EncoderDecoderCache).keys() & vars(Cache).keys()) - vars(SelfAttentionCache).keys())


class _Passing(DynamicCache):
    """A cache of cross-attention that keeps nothing."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is given, contiguous as from caches that keep it: kernels see strides."""
        return key_states.contiguous(), value_states.contiguous()
