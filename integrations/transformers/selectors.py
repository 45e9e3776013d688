"""Selectors: which packed tokens a `CompressedCache` fetches for each layer and K/V head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.integrations.transformers.selective import (
    Attachment,
    Attended,
    attention_modules,
    function_of,
)
from bitslab.kvcache import (
    HeavyScores,
    PartialKeys,
    TokenScores,
    check_share,
    probability_sums,
    skew_of,
)

#: Forward passes with more new tokens than this (prompts) attend to everything.
MAX_QUERIES = 16
#: How far a query that is computed again may be from the model's own, relative to it.
QUERY_TOLERANCE = 0.02


class KVSelector(ABC):
    """Chooses the packed tokens that each layer attends to, row by row, for each K/V head.

    The last tokens of a cache, at least its `window`, are always attended. Prompts, as any forward
    pass with more than MAX_QUERIES new tokens, attend to everything. Tokens that are not chosen
    stay in the cache and may be chosen later.

    A selector holds options only; what it knows of a cache's tokens lies in the cache.

    Attributes
    ----------
    recent : int
        Least window of a cache that it serves.
    """

    recent = 0

    def attached(self, model: torch.nn.Module) -> Attachment:
        """Lead a model's attention through selectors.

        Caches without a selector work as before on a model that is attached.

        Parameters
        ----------
        model : transformers.PreTrainedModel
            A decoder whose attention implementation is sdpa or eager.

        Returns
        -------
        Attachment
            A context manager, at whose end the model is as it was; or call its `detach`.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            For a model that cannot be served.
        """
        self.check_model(attention_modules(model))
        return Attachment(model)

    @abstractmethod
    def scores(self, layer: int) -> TokenScores:
        """Return what a new cache knows of a layer."""

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
        """See the attention of a layer.

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
        """See the input ``[B, q, hidden size]`` of an attention module, before it runs."""
        return

    def check_layers(self, layers: Iterable[int]) -> None:
        """Refuse the full-attention layers of a cache."""
        return

    def check_model(self, modules: Mapping[int, Any]) -> None:
        """Refuse the attention modules of a model."""
        return


class HeavyHitterSelector(KVSelector):
    """The tokens that have had the most attention so far, and the recent ones (H2O).

    Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
    Models", NeurIPS 2023; tokens are not thrown away here. Needs nothing computed beforehand.

    Parameters
    ----------
    heavy : float or int
        Packed tokens that are attended: their share as a float, or their number.
    recent : int
        Tokens at the end that are always attended; the cache's window is at least this.
    prompt_queries : int, optional
        Of a prompt, only so many queries at its end count, which saves computing the prompt's
        attention twice (as SnapKV does). All when left out.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from bitslab.integrations.transformers import CompressedCache, HeavyHitterSelector
    >>> config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64,
    ...                      num_hidden_layers=2, num_attention_heads=4)
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
        """Add up the attention that each token has had."""
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


class InfiniGenSelector(KVSelector):
    """The tokens that the next layer's query will find, speculated from this layer's input.

    Lee et al., "InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV
    Cache Management", OSDI 2024. Keys and queries are skewed by an orthogonal matrix of each K/V
    head, so that few columns hold most of their product; those columns of the keys stay on the
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
        for all heads, the mean over them. None fetches the whole budget always, and never waits for
        a GPU to know the number, as one layer after the other does otherwise.

    Notes
    -----
    Pickles, and so do the skews alone, for ``InfiniGenSelector(skews)``.
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
            Mixtral and the like. Whether its queries are computed alike is checked.
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
        modules = attention_modules(model)
        config = next(iter(modules.values())).config
        plain = DynamicCache(config=config).layers
        layers = [i for i, layer in enumerate(plain) if type(layer) is DynamicLayer]
        if not layers:
            raise ArgumentError("model: it has no full-attention layer")
        _check_projections(modules, layers)
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
        skews = {layer: skew_of(gram) for layer, gram in collector.grams.items()}
        return cls(skews, partial=partial, budget=budget, alpha=alpha)

    def scores(self, layer: int) -> TokenScores:
        """Return partial keys of no token yet."""
        return PartialKeys(
            self.skews[layer], partial=self.partial, budget=self.budget, alpha=self.alpha
        )

    def check_layers(self, layers: Iterable[int]) -> None:
        """Refuse a cache with other full-attention layers than the model that was fitted."""
        if set(layers) != set(self.skews):
            raise ArgumentError(
                f"select: fitted to a model whose full-attention layers are {sorted(self.skews)}, "
                f"those of the config are {sorted(layers)}"
            )

    def check_model(self, modules: Mapping[int, Any]) -> None:
        """Refuse a model without query projections."""
        missing = set(self.skews) - set(modules)
        if missing:
            raise ArgumentError(
                f"model: it has no attention in layers {sorted(missing)}; the selector was fitted "
                "to another model"
            )
        _check_projections(modules, self.skews)

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
            scores.speculate(query, _scaling_of(module), allowed)
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


class _Collector(KVSelector):
    """Sums up products of queries, and compares them with those that are computed again."""

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
                raise ArgumentError(f"{_unlike(module)}: {error}") from error

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
            again = again.float() * _scaling_of(module)
            if own.shape != again.shape or (own - again).norm() > QUERY_TOLERANCE * own.norm():
                raise ArgumentError(_unlike(module))
        by_head = torch.unflatten(query, 1, (key.shape[1], -1)).float()
        gram = torch.einsum("bhgqd,bhgqe->hde", by_head, by_head).double().cpu()
        self.grams[layer] = self.grams.get(layer, 0) + gram


class _SampleCache(DynamicCache):
    """A cache that tells a collector of its keys."""

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


def query_of(
    module: Any, hidden: torch.Tensor, position_embeddings: tuple[torch.Tensor, ...] | None
) -> torch.Tensor:
    """Return the query that an attention module makes of an input.

    Parameters
    ----------
    module : torch.nn.Module
        With q_proj, head_dim, perhaps q_norm.
    hidden : torch.Tensor
        ``[B, q, hidden size]``.
    position_embeddings : (torch.Tensor, torch.Tensor), optional
        Cosines and sines of the positions.

    Returns
    -------
    torch.Tensor
        ``[B, query heads, q, D]``, rotated, not scaled.
    """
    weight = module.q_proj.weight
    if not weight.is_meta:
        hidden = hidden.to(weight.device)
    query = torch.unflatten(module.q_proj(hidden), -1, (-1, module.head_dim))
    if getattr(module, "q_norm", None) is not None:
        query = module.q_norm(query)
    query = query.transpose(1, 2)
    rotate = function_of(module, "apply_rotary_pos_emb")
    if position_embeddings is None or rotate is None:
        return query
    cos, sin = (t.to(query.device) for t in position_embeddings)
    rotated: torch.Tensor = rotate(query, query[:, :1], cos, sin)[0]
    return rotated


def _scaling_of(module: Any) -> float:
    scaling = getattr(module, "scaling", None)
    return module.head_dim**-0.5 if scaling is None else float(scaling)


def _check_projections(modules: Mapping[int, Any], layers: Iterable[int]) -> None:
    for layer in layers:
        module = modules[layer]
        if not hasattr(module, "q_proj") or not hasattr(module, "head_dim"):
            raise ArgumentError(
                f"{_unlike(module)}: it has no q_proj; HeavyHitterSelector serves any model"
            )
        weight = module.q_proj.weight
        if weight.is_meta and not hasattr(module.q_proj, "_hf_hook"):
            raise ArgumentError(
                f"model: the query projection of layer {layer} is not in memory while another "
                "layer runs; keep the layers resident, or take HeavyHitterSelector"
            )


def _unlike(module: Any) -> str:
    return (
        f"model: queries of {type(module).__name__} cannot be computed from q_proj, q_norm and a "
        "rotary embedding; accepted are models that do so, as Llama, Mistral, Qwen2, Qwen3, Gemma, "
        "OPT and Mixtral"
    )


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


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}: expected an int, got {value!r:.60}")
    if value < 1:
        raise ArgumentError(f"{name}: {value}, accepted are numbers from 1")
