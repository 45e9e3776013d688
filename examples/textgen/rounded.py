"""K/V caches of other works, as they round K and V: simulated in torch, nothing gets smaller.

Each rounds blocks of tokens once, when they have left the window; the first tokens are kept as they
are, in every one of them, so that the rounding alone is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

#: Rounds ``[B, H, block, D]`` float32 values.
Rounding = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Peer:
    """A way to round K and V.

    Parameters
    ----------
    keys, values : callable
        What becomes of a block.
    bits : float
        Bits of a value with all metadata.
    """

    keys: Rounding
    values: Rounding
    bits: float


def in_groups(x: torch.Tensor, bits: int, group: int, dim: int) -> torch.Tensor:
    """Round to 2 ** bits levels between the ends of each group along a dimension, in float16."""
    parts = x.transpose(dim, -1).unflatten(-1, (-1, group))
    low = parts.amin(-1, keepdim=True).half().float()
    step = ((parts.amax(-1, keepdim=True) - low) / (2**bits - 1)).half().float().clamp(min=1e-8)
    codes = ((parts - low) / step).round().clamp(0, 2**bits - 1)
    rounded: torch.Tensor = (codes * step + low).flatten(-2).transpose(dim, -1)
    return rounded


def kivi(bits: int, group: int = 32) -> Peer:
    """KIVI: K by groups of tokens of a channel, V by groups of channels of a token."""
    return Peer(
        lambda x: in_groups(x, bits, group, -2),
        lambda x: in_groups(x, bits, group, -1),
        bits + 32 / group,
    )


def by_token(bits: int, group: int = 64) -> Peer:
    """Both by groups of channels of a token: the layout of transformers' QuantizedCache."""
    return Peer(
        lambda x: in_groups(x, bits, group, -1),
        lambda x: in_groups(x, bits, group, -1),
        bits + 32 / group,
    )


def by_channel(bits: int, group: int = 64) -> Peer:
    """Both by groups of tokens of a channel."""
    return Peer(
        lambda x: in_groups(x, bits, group, -2),
        lambda x: in_groups(x, bits, group, -2),
        bits + 32 / group,
    )


class RoundedLayer(DynamicLayer):
    """A layer whose tokens are rounded by the block when they have left the window."""

    def __init__(self, peer: Peer, sinks: int, window: int, block_tokens: int) -> None:
        super().__init__()
        self._peer, self._sinks, self._window = peer, sinks, window
        self._block_tokens, self._done = block_tokens, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the past as it is, with the new tokens, and round what they push out."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None and self.values is not None
        out = keys.clone(), values.clone()
        while keys.shape[2] - self._done - self._window >= self._block_tokens:
            begin, end = self._done, self._done + self._block_tokens
            for states, rounding in (
                (self.keys, self._peer.keys),
                (self.values, self._peer.values),
            ):
                block = states[:, :, begin:end]
                rounded = rounding(block.float()).to(block.dtype)
                kept = max(0, self._sinks - begin)
                block[:, :, kept:] = rounded[:, :, kept:]
            self._done = end
        return out


def rounded_cache(
    config: Any, peer: Peer, *, sinks: int = 4, window: int = 64, block_tokens: int = 64
) -> DynamicCache:
    """Return a cache whose layers round as `peer` does."""
    cache = DynamicCache(config=config)
    cache.layers = [RoundedLayer(peer, sinks, window, block_tokens) for _ in cache.layers]
    return cache


#: Peers by name: KIVI's published settings, transformers' QuantizedCache, int8.
PEERS = {
    "KIVI, 4 bits": kivi(4),
    "KIVI, 2 bits": kivi(2),
    "QuantizedCache's layout, 2 bits": by_token(2),
    "8 bits by channel": by_channel(8),
}
