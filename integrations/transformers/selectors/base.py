"""KVSelector: chooses the packed tokens that a `CompressedCache` fetches, by layer and head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from bitslab.integrations.transformers.selectors.attended import Attended
from bitslab.integrations.transformers.selectors.attention import Attachment, attention_modules
from bitslab.kvcache import TokenScores

#: Forward passes with more new tokens than this (prompts) attend to everything.
MAX_QUERIES = 16


class KVSelector(ABC):
    """Chooses the packed tokens that each layer attends to, row by row, for each K/V head.

    The last tokens of a cache, at least its `window`, are always attended. Prompts, as any forward
    pass with more than MAX_QUERIES new tokens, attend to everything. Tokens that are not chosen
    are kept in the cache and may be chosen later.

    A selector holds options only; the scores of a cache's tokens are in the cache.

    Attributes
    ----------
    recent : int
        Least window of a cache that it serves.
    """

    recent = 0

    def attached(self, model: torch.nn.Module) -> Attachment:
        """Route a model's attention through selectors.

        Caches without a selector work as before on a model that is attached.

        Parameters
        ----------
        model : transformers.PreTrainedModel
            A decoder whose attention implementation is sdpa or eager.

        Returns
        -------
        Attachment
            A context manager that restores the model at its end; or call its `detach`.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            For a model that cannot be served.
        """
        self.check_model(attention_modules(model))
        return Attachment(model)

    @abstractmethod
    def scores(self, layer: int) -> TokenScores:
        """Return empty scores of a layer for a new cache."""

    @abstractmethod
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
        """Update scores by the attention of a layer.

        Parameters
        ----------
        attended : Attended
            What was chosen, and the scores to update.
        module : torch.nn.Module
            The attention module.
        query : torch.Tensor
            ``[B, query heads, q, D]``.
        key : torch.Tensor
            ``[B, H, n, D]``, of which the last q are new.
        mask : torch.Tensor, optional
            Broadcast to ``[B, query heads, q, n]``.
        weights : torch.Tensor, optional
            ``[B, query heads, q, n]``, where attention has computed them.
        options : mapping
            The other arguments of the attention function: scaling, softcap, s_aux.
        """

    def before_attention(
        self,
        cache: Any,
        modules: Mapping[int, Any],
        module: Any,
        hidden: torch.Tensor,
        options: Mapping[str, Any],
    ) -> None:
        """Receive the input ``[B, q, hidden size]`` of an attention module, before it runs."""
        return

    def check_layers(self, layers: Iterable[int]) -> None:
        """Raise for full-attention layers that it cannot serve."""
        return

    def check_model(self, modules: Mapping[int, Any]) -> None:
        """Raise for attention modules that it cannot serve."""
        return
