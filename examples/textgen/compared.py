"""Caches that long_context.py and benchmarks/kvcomp.py compare, and what each takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .accuracy import CHUNK_TOKENS, Score

#: Tokens before the last ones that no cache of these rounds: what CHUNK_TOKENS at a time allows.
WINDOW = CHUNK_TOKENS
#: The KVComp paper's settings (section 4.2.1), with this library's bytes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "KVComp as published, block": {
        "granularity": "block",
        "key_scale": 0.05,
        "value_scale": 0.15,
    },
    "KVComp as published, channel": {
        "granularity": "channel",
        "key_scale": 0.25,
        "value_scale": 0.15,
    },
}


@dataclass(frozen=True)
class Compared:
    """A cache, and how the model predicts with it.

    Parameters
    ----------
    cache : str
        Its name.
    bits : float
        Bits of a packed value with all metadata, where a plain one has 16.
    score : Score
        Of the predictions.
    """

    cache: str
    bits: float
    score: Score

    def as_dict(self) -> dict[str, Any]:
        return {
            "cache": self.cache,
            "bits": self.bits,
            "ratio": 16 / self.bits,
            **self.score.row,
        }


def named_caches(
    config: Any,
    *,
    errors: Sequence[float],
    scales: Sequence[tuple[float, float]] = (),
    peers: bool = True,
) -> dict[str, Callable[[], Any]]:
    """Return what makes each cache; the plain one first.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The model's.
    errors : sequence of float
        Of KVCompCache.
    scales : sequence of (float, float)
        Scales of K and of V, of further ones.
    peers : bool
        Whether the roundings of other works are among them.
    """
    from transformers import DynamicCache

    from bitslab.integrations.transformers import KVCompCache

    from .rounded import PEERS, rounded_cache

    ours = partial(KVCompCache, config, window=WINDOW, block_tokens=CHUNK_TOKENS)
    made: dict[str, Callable[[], Any]] = {"plain": partial(DynamicCache, config=config)}
    for error in errors:
        made[f"KVCompCache, error {error:g}"] = partial(ours, error=error)
    for key_scale, value_scale in scales:
        name = f"KVCompCache, scales {key_scale:g} and {value_scale:g}"
        made[name] = partial(ours, key_scale=key_scale, value_scale=value_scale)
    if peers:
        for name, options in PUBLISHED.items():
            made[name] = partial(ours, **options)
        for name, peer in PEERS.items():
            made[name] = partial(
                rounded_cache, config, peer, window=WINDOW, block_tokens=CHUNK_TOKENS
            )
    return made


def compared(found: Mapping[str, Score], dtype: torch.dtype) -> list[Compared]:
    """Return a row for each cache; `dtype` is that of K and V."""
    from .rounded import PEERS

    rows = []
    for name, score in found.items():
        bits = 16.0
        if name in PEERS:
            bits = PEERS[name].bits
        elif score.stats:
            bits = 8 * dtype.itemsize / score.stats["packed_ratio"]
        rows.append(Compared(name, bits, score))
    return rows
