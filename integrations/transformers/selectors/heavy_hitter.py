"""HeavyHitterSelector: the tokens that have had the most attention so far (H2O)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.integrations.transformers.selectors.attended import Attended
from bitslab.integrations.transformers.selectors.base import MAX_QUERIES, KVSelector
from bitslab.kvcache import HeavyScores, TokenScores, check_share, probability_sums


class HeavyHitterSelector(KVSelector):
    """The tokens that have had the most attention so far, and the recent ones (H2O).

    Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
    Models", NeurIPS 2023; here no token is dropped. Needs nothing computed beforehand.

    Parameters
    ----------
    heavy : float or int
        Packed tokens that are attended: their share as a float, or their number.
    recent : int
        Tokens at the end that are always attended; the cache's window is at least this.
    prompt_queries : int, optional
        Number of queries at the end of a prompt that count, which saves computing the prompt's
        attention twice (as SnapKV does). All when left out.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from bitslab.integrations.transformers import CompressedCache, HeavyHitterSelector
    >>> config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64,
    ...                      num_hidden_layers=2, num_attention_heads=4, eos_token_id=None)
    >>> model = LlamaForCausalLM(config).eval()
    >>> selector = HeavyHitterSelector(heavy=0.25, recent=16)
    >>> cache = CompressedCache(config, select=selector, window=16, block_tokens=16)
    >>> with selector.attached(model):
    ...     tokens = model.generate(torch.arange(48)[None], past_key_values=cache,
    ...                             max_new_tokens=4, do_sample=False)
    >>> cache.stats()["selected"]
    0.25
    """

    def __init__(
        self, heavy: float | int = 0.1, recent: int = 128, *, prompt_queries: int | None = None
    ) -> None:
        if isinstance(heavy, int) and not isinstance(heavy, bool):
            _check_count("heavy", heavy)
        else:
            heavy = check_share("heavy", heavy)
        _check_count("recent", recent)
        if prompt_queries is not None:
            _check_count("prompt_queries", prompt_queries)
        self.heavy = heavy
        self.recent = recent
        self.prompt_queries = prompt_queries

    def scores(self, layer: int) -> TokenScores:
        """Return sums of attention probabilities, of no token yet."""
        return HeavyScores(self.heavy)

    def observe(
        self,
        attended: Attended,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        weights: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> None:
        """Add the attention probabilities of each token."""
        assert isinstance(attended.scores, HeavyScores)
        new = query.shape[2]
        last = self.prompt_queries if new > MAX_QUERIES else None
        if weights is not None:
            counted = weights if last is None else weights[:, :, -last:]
            by_head = torch.unflatten(counted, 1, (key.shape[1], -1))
            sums = by_head.sum((2, 3), dtype=torch.float32)
        else:
            scaling = options.get("scaling")
            sums = probability_sums(
                query,
                key,
                mask,
                query.shape[3] ** -0.5 if scaling is None else scaling,
                softcap=options.get("softcap"),
                sinks=options.get("s_aux"),
                last_queries=last,
            )
        attended.scores.add(sums, attended.selection, new)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}: expected an int, got {value!r:.60}")
    if value < 1:
        raise ArgumentError(f"{name}: {value}, accepted are numbers from 1")
