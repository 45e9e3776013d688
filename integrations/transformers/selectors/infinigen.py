"""InfiniGenSelector: the tokens that the next layer's query will find."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.integrations.transformers.selectors.attended import Attended
from bitslab.integrations.transformers.selectors.base import MAX_QUERIES, KVSelector
from bitslab.integrations.transformers.selectors.queries import (
    check_projections,
    query_of,
    scaling_of,
)
from bitslab.integrations.transformers.selectors.skews import fit_skews
from bitslab.kvcache import PartialKeys, TokenScores, check_share


class InfiniGenSelector(KVSelector):
    """The tokens that the next layer's query will find, speculated from this layer's input.

    Lee et al., "InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV
    Cache Management", OSDI 2024. Keys and queries are skewed by an orthogonal matrix of each K/V
    head, so that few columns hold most of their product; those columns of the keys are kept on the
    device. When a layer runs, its attention input goes through the query projection of the next
    layer, and the columns of the query give a score to every token. With rotary embeddings the
    skew comes after the rotation. The first full-attention layer is scored by its own query.

    Parameters
    ----------
    skews : mapping of int to torch.Tensor
        Of each full-attention layer, float ``[H, D, D]``: what `fit` computes.
    partial : float
        Share of the columns that are kept.
    budget : float
        Share of the packed tokens that are fetched at most.
    alpha : float, optional
        Tokens are fetched whose logit of attention is above the highest less this; the same number
        for all heads, the mean over them. With None the whole budget is fetched, and no layer waits
        for a GPU to know the number.

    Notes
    -----
    A selector can be pickled; so can `skews` alone, for ``InfiniGenSelector(skews)``.
    """

    def __init__(
        self,
        skews: Mapping[int, torch.Tensor],
        *,
        partial: float = 0.3,
        budget: float = 0.2,
        alpha: float | None = 4.0,
    ) -> None:
        if not isinstance(skews, Mapping) or not skews:
            raise ArgumentTypeError(
                "skews: expected a mapping of layers to tensors, as InfiniGenSelector.fit(model, "
                f"sample_inputs) makes; got {skews!r:.60}"
            )
        for layer, skew in skews.items():
            if not isinstance(skew, torch.Tensor) or skew.dim() != 3:
                raise ArgumentTypeError(f"skews: of layer {layer}, expected [heads, D, D] tensors")
            if skew.shape[1] != skew.shape[2]:
                raise ArgumentError(
                    f"skews: of layer {layer}, shape {list(skew.shape)}, expected [heads, D, D]"
                )
        self.partial, self.budget = check_share("partial", partial), check_share("budget", budget)
        if alpha is not None:
            if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
                raise ArgumentTypeError(f"alpha: expected a number or None, got {alpha!r:.60}")
            if not alpha > 0:
                raise ArgumentError(f"alpha: {alpha}, accepted are numbers above 0 and None")
        self.alpha = alpha
        self.skews = {layer: skew.detach().float().cpu() for layer, skew in skews.items()}

    @classmethod
    def fit(
        cls,
        model: torch.nn.Module,
        sample_inputs: Any,
        *,
        partial: float = 0.3,
        budget: float = 0.2,
        alpha: float | None = 4.0,
    ) -> InfiniGenSelector:
        """Compute the skews of a model from sample tokens, once and offline.

        Parameters
        ----------
        model : transformers.PreTrainedModel
            A decoder whose attention has a q_proj: Llama, Mistral, Qwen2, Qwen3, Gemma, OPT,
            Mixtral and the like. `fit` checks that its queries are computed as expected.
        sample_inputs : torch.Tensor, mapping, or iterable of these
            Token ids ``[B, T]``, or keyword arguments of the model, without padding; a few thousand
            tokens in all are enough.
        partial, budget, alpha
            As of the class.

        Returns
        -------
        InfiniGenSelector
            For caches of this model.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            For a model that cannot be served, and samples without tokens.
        """
        skews = fit_skews(model, sample_inputs)
        return cls(skews, partial=partial, budget=budget, alpha=alpha)

    def scores(self, layer: int) -> TokenScores:
        """Return partial keys of no token yet."""
        return PartialKeys(
            self.skews[layer], partial=self.partial, budget=self.budget, alpha=self.alpha
        )

    def check_layers(self, layers: Iterable[int]) -> None:
        """Raise for a cache with other full-attention layers than the model that was fitted."""
        if set(layers) != set(self.skews):
            raise ArgumentError(
                f"select: fitted to a model whose full-attention layers are {sorted(self.skews)}, "
                f"those of the config are {sorted(layers)}"
            )

    def check_model(self, modules: Mapping[int, Any]) -> None:
        """Raise for a model without query projections."""
        missing = set(self.skews) - set(modules)
        if missing:
            raise ArgumentError(
                f"model: it has no attention in layers {sorted(missing)}; the selector was fitted "
                "to another model"
            )
        check_projections(modules, self.skews)

    def before_attention(
        self,
        cache: Any,
        modules: Mapping[int, Any],
        module: Any,
        hidden: torch.Tensor,
        options: Mapping[str, Any],
    ) -> None:
        """Speculate the query of the next layer, and of the first one its own."""
        layer = module.layer_idx
        first = min(self.skews)
        if hidden.shape[1] > MAX_QUERIES or layer < first:
            return
        if layer == first:
            # Layers of other kinds have other masks and may have other rotary embeddings.
            cache.present = (options.get("position_embeddings"), options.get("attention_mask"))
            self._speculate(cache, module, hidden)
        if layer + 1 in self.skews and layer + 1 in modules:
            self._speculate(cache, modules[layer + 1], hidden)

    def _speculate(self, cache: Any, module: Any, hidden: torch.Tensor) -> None:
        layer = cache.layers[module.layer_idx]
        scores = layer.scores
        if not isinstance(scores, PartialKeys) or not layer.packed_tokens:
            return
        with torch.no_grad():
            position_embeddings, mask = cache.present
            query = query_of(module, hidden, position_embeddings)
            allowed = None
            if mask is not None:
                if mask.dtype != torch.bool:
                    mask = mask > torch.finfo(mask.dtype).min / 2
                allowed = mask[..., : scores.length]
            scores.speculate(query, scaling_of(module), allowed)
        layer.prefetch()

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
        """Keep the columns of the new keys."""
        assert isinstance(attended.scores, PartialKeys)
        attended.scores.see(query, key[:, :, key.shape[2] - query.shape[2] :])
