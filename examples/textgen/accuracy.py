"""What rounded K and V do to a model: predictions from a history that is packed as it grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

#: Tokens of a forward pass behind the prompt: those of a block, so that what is packed before each
#: is what generating token by token would have packed.
CHUNK_TOKENS = 64


@dataclass
class Score:
    """Sums over the tokens that were predicted.

    Attributes
    ----------
    tokens : int
        Predicted tokens.
    loss : float
        Sum of the negative logarithms of the probabilities of the tokens that came.
    divergence : float
        Sum of the Kullback-Leibler divergences of the plain model's predictions to these.
    same : int
        Tokens whose most probable prediction is the plain model's.
    right : int
        Tokens whose most probable prediction is the one that came.
    """

    tokens: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    same: int = 0
    right: int = 0
    stats: Mapping[str, Any] = field(default_factory=dict)

    @property
    def row(self) -> dict[str, Any]:
        """What a table shows."""
        n = max(1, self.tokens)
        return {
            "tokens": self.tokens,
            "perplexity": math.exp(self.loss / n),
            "KL to plain": self.divergence / n,
            "same top token %": 100 * self.same / n,
        }


@torch.no_grad()
def scores(
    model: Any,
    ids: torch.Tensor,
    caches: Mapping[str, Callable[[], Any]],
    *,
    prompt_tokens: int,
    padding_tokens: int = 0,
    progress: Callable[[int, int], None] | None = None,
    interim: Callable[[Mapping[str, Score]], None] | None = None,
) -> dict[str, Score]:
    """Predict each token behind a prompt from packed histories, and compare with the plain ones.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Causal.
    ids : torch.Tensor
        int64 ``[1, tokens]``.
    caches : mapping
        Makes a cache for each name; the first is the plain one.
    prompt_tokens : int
        Tokens of the first forward pass, a multiple of CHUNK_TOKENS; they are not scored.
    padding_tokens : int
        Tokens of padding before them, as a shorter sequence of a batch has.
    progress : callable, optional
        Given the tokens that are done, and all.
    interim : callable, optional
        Given the scores so far, by name, after each pass behind the prompt.

    Returns
    -------
    dict
        The scores by name.
    """
    made = {name: make() for name, make in caches.items()}
    found = {name: Score() for name in made}
    last: dict[str, torch.Tensor] = {}
    begin, end = 0, prompt_tokens
    mask = torch.ones(1, padding_tokens + ids.shape[1], dtype=torch.int64, device=ids.device)
    mask[:, :padding_tokens] = 0
    while begin < ids.shape[1]:
        chunk = given = ids[:, begin:end]
        if padding_tokens and not begin:
            given = torch.nn.functional.pad(chunk, (padding_tokens, 0))
        places: dict[str, torch.Tensor] = {}
        if padding_tokens:
            at = torch.arange(end - given.shape[1], end, device=ids.device)
            places["attention_mask"] = mask[:, : padding_tokens + end]
            places["position_ids"] = at.clamp(min=0)[None]
        plain: torch.Tensor | None = None
        for name, cache in made.items():
            keep = 1 if not begin else chunk.shape[1]
            made_of = model(given, past_key_values=cache, logits_to_keep=keep, **places)
            logits = made_of.logits[0].float()
            if begin:
                # The first of these tokens was predicted in the pass before.
                ahead = torch.cat([last[name], logits[:-1]]).log_softmax(-1)
                plain = ahead if plain is None else plain
                _add(found[name], ahead, plain, chunk[0])
            last[name] = logits[-1:]
        if progress is not None:
            progress(min(end, ids.shape[1]), ids.shape[1])
        if interim is not None and begin:
            interim(found)
        begin, end = end, min(end + CHUNK_TOKENS, ids.shape[1])
    for name, cache in made.items():
        if hasattr(cache, "stats"):
            found[name].stats = cache.stats()
    return found


def _add(score: Score, ahead: torch.Tensor, plain: torch.Tensor, came: torch.Tensor) -> None:
    score.tokens += came.shape[0]
    score.loss -= float(ahead.gather(1, came[:, None]).sum())
    score.divergence += float((plain.exp() * (plain - ahead)).sum())
    likely = ahead.argmax(-1)
    score.same += int((plain.argmax(-1) == likely).sum())
    score.right += int((came == likely).sum())
