"""The skews of a model's queries, computed from sample tokens (InfiniGen)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.integrations.transformers.selectors.attended import Attended
from bitslab.integrations.transformers.selectors.attention import attention_modules
from bitslab.integrations.transformers.selectors.base import KVSelector
from bitslab.integrations.transformers.selectors.queries import (
    check_projections,
    query_of,
    scaling_of,
    unlike,
)
from bitslab.kvcache import HeavyScores, TokenScores, skew_of

#: How far a query that is computed again may be from the model's own, relative to it.
QUERY_TOLERANCE = 0.02


def fit_skews(model: torch.nn.Module, sample_inputs: Any) -> dict[int, torch.Tensor]:
    """Return the skews of a model's full-attention layers, float ``[H, D, D]``.

    Parameters
    ----------
    model, sample_inputs
        As of `InfiniGenSelector.fit`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For a model that cannot be served, and samples without tokens.
    """
    modules = attention_modules(model)
    config = next(iter(modules.values())).config
    plain = DynamicCache(config=config).layers
    layers = [i for i, layer in enumerate(plain) if type(layer) is DynamicLayer]
    if not layers:
        raise ArgumentError("model: it has no full-attention layer")
    check_projections(modules, layers)
    collector = _Collector(modules, layers)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), collector.attached(model):
            for inputs in _samples(sample_inputs):
                cache = _SampleCache(config, collector)
                model(**inputs, past_key_values=cache, use_cache=True)
    finally:
        model.train(training)
    if not collector.grams:
        raise ArgumentError("sample_inputs: there are none")
    return {layer: skew_of(gram) for layer, gram in collector.grams.items()}


class _Collector(KVSelector):
    """Sums products of queries, and compares queries with recomputed ones."""

    def __init__(self, modules: Mapping[int, Any], layers: list[int]) -> None:
        self._modules = modules
        self.layers = layers
        self.grams: dict[int, torch.Tensor] = {}
        self._again: dict[int, torch.Tensor] = {}

    def scores(self, layer: int) -> TokenScores:
        return HeavyScores(1.0)

    def before_attention(
        self,
        cache: Any,
        modules: Mapping[int, Any],
        module: Any,
        hidden: torch.Tensor,
        options: Mapping[str, Any],
    ) -> None:
        layer = module.layer_idx
        if layer in self.layers and layer not in self.grams:
            try:
                self._again[layer] = query_of(module, hidden, options.get("position_embeddings"))
            except (RuntimeError, TypeError, ValueError) as error:
                raise ArgumentError(f"{unlike(module)}: {error}") from error

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
        layer = module.layer_idx
        again = self._again.pop(layer, None)
        if again is not None:
            # Some models scale their queries, others the logits.
            own = query.float() * options.get("scaling", query.shape[3] ** -0.5)
            again = again.float() * scaling_of(module)
            if own.shape != again.shape or (own - again).norm() > QUERY_TOLERANCE * own.norm():
                raise ArgumentError(unlike(module))
        by_head = torch.unflatten(query, 1, (key.shape[1], -1)).float()
        gram = torch.einsum("bhgqd,bhgqe->hde", by_head, by_head).double().cpu()
        self.grams[layer] = self.grams.get(layer, 0) + gram


class _SampleCache(DynamicCache):
    """A cache that marks its keys for a collector."""

    def __init__(self, config: Any, collector: _Collector) -> None:
        super().__init__(config=config)
        self.selector = collector

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx in self.selector.layers:
            Attended(self.selector, self.selector.scores(layer_idx), None).attach_to(keys)
        return keys, values


def _samples(sample_inputs: Any) -> Iterator[dict[str, Any]]:
    one = isinstance(sample_inputs, (torch.Tensor, Mapping))
    if not one and not isinstance(sample_inputs, Iterable):
        raise ArgumentTypeError(
            "sample_inputs: expected token ids [B, T], a mapping of the model's arguments, or an "
            f"iterable of these, got {sample_inputs!r:.60}"
        )
    for inputs in [sample_inputs] if one else sample_inputs:
        if isinstance(inputs, torch.Tensor):
            inputs = {"input_ids": inputs}
        if not isinstance(inputs, Mapping):
            raise ArgumentTypeError(
                f"sample_inputs: expected token ids [B, T] or a mapping, got {inputs!r:.60}"
            )
        ids = inputs.get("input_ids")
        if isinstance(ids, torch.Tensor) and (ids.dim() != 2 or not ids.numel()):
            raise ArgumentError(
                f"sample_inputs: shape {list(ids.shape)}, expected token ids [B, T], not empty"
            )
        yield dict(inputs)
