"""Attention to chosen tokens: wraps transformers' attention functions and their masks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from bitslab.errors import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.integrations.transformers.interfaces import (
    INDEXES,
    attention_of,
    register,
    source_of,
)
from bitslab.integrations.transformers.selectors.attended import Observer, attended_of
from bitslab.kvcache import Selection

#: Attention implementations that can be served.
INNER = ("sdpa", "eager")
PREFIX = "bitslab_"
#: Names of the cache argument of attention modules; the second is that of GPT-NeoX and others.
CACHE_NAMES = ("past_key_values", "layer_past")


class Attachment:
    """A model whose attention goes through selectors, until `detach`; also a context manager.

    The model computes what it computed before unless it is given a cache with a selector.

    Parameters
    ----------
    model : torch.nn.Module
        A module that holds a transformers model.

    Raises
    ------
    ArgumentTypeError
        When `model` is no module.
    ArgumentError
        When its attention does not go through transformers' AttentionInterface, uses another
        implementation than sdpa and eager, or is attached already.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._configs: list[tuple[Any, str]] = []
        self._hooks: list[Any] = []
        modules = attention_modules(model)
        configs = {id(module.config): module.config for module in modules.values()}
        for config in configs.values():
            inner = config._attn_implementation
            if isinstance(inner, str) and inner.startswith(PREFIX):
                raise ArgumentError("model: it is attached to a selector already; detach that one")
            if inner not in INNER:
                raise ArgumentError(
                    f"model: its attn_implementation is {inner!r}, accepted are "
                    f"{' and '.join(INNER)}: model.set_attn_implementation('sdpa')"
                )

        def before(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            cache = next((kwargs[name] for name in CACHE_NAMES if name in kwargs), None)
            selector: Observer | None = getattr(cache, "selector", None)
            if selector is not None:
                hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
                selector.before_attention(cache, modules, module, hidden, kwargs)

        for module in modules.values():
            self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        for config in configs.values():
            self._configs.append((config, config._attn_implementation))
            # The public setter would look for the name among those of known kernels.
            config._attn_implementation_internal = PREFIX + config._attn_implementation

    def detach(self) -> None:
        """Restore the model; a second call does nothing."""
        for config, inner in self._configs:
            if config._attn_implementation == PREFIX + inner:
                config._attn_implementation_internal = inner
        for hook in self._hooks:
            hook.remove()
        self._configs, self._hooks = [], []

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def attention_modules(model: torch.nn.Module) -> dict[int, Any]:
    """Return the modules of a model that attend through a cache, by layer.

    Raises
    ------
    ArgumentTypeError
        When `model` is no module.
    ArgumentError
        When there is none, one does not go through transformers' AttentionInterface, or a layer has
        several, as in encoder-decoder models.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"model: expected a transformers model, got {model!r:.60}")
    inside = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    found: dict[int, Any] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and hasattr(module, "config") and _caches(module):
            if layer in found:
                raise ArgumentError(
                    f"model: layer {layer} has several attention modules; accepted are "
                    "decoder-only models"
                )
            if source_of(module) is None:
                raise ArgumentError(
                    f"model: {type(module).__name__} does not go through transformers' "
                    "AttentionInterface"
                )
            found[layer] = module
    if inside is None or not found:
        raise ArgumentError(
            f"model: {type(model).__name__} has no attention module with a layer_idx that takes "
            "past_key_values; accepted are decoder-only transformers models"
        )
    return found


def _caches(module: torch.nn.Module) -> bool:
    names = inspect.signature(module.forward).parameters
    # Decoder layers take a cache as well, but hold the attention.
    inner = any(isinstance(getattr(m, "layer_idx", None), int) for m in module.children())
    return not inner and any(name in names for name in CACHE_NAMES)


def _attention(inner_name: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        for name in INDEXES:
            if options.get(name) is not None:
                raise BitslabError(
                    f"{name}: {type(module).__name__} chooses by this argument what is attended "
                    "to, which no selector serves; run the model without one"
                )
        inner = attention_of(module, inner_name)
        attended = attended_of(key)
        selection = None if attended is None else attended.selection
        if selection is not None:
            if options.get("position_bias") is not None:
                raise BitslabError(
                    f"select: {type(module).__name__} adds a position bias to its logits; chosen "
                    "tokens cannot be served"
                )
            attention_mask = mask_of_chosen(attention_mask, selection, query, key)
        out, weights = inner(module, query, key, value, attention_mask, **options)
        if attended is not None:
            with torch.no_grad():
                attended.selector.observe(
                    attended, module, query, key, attention_mask, weights, options
                )
        if selection is not None and weights is not None:
            weights = weights_of_all(weights, selection)
        return out, weights

    return attention


def mask_of_chosen(
    mask: torch.Tensor | None, selection: Selection, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """Return the columns of a mask for the tokens that were chosen and those behind the packed.

    Parameters
    ----------
    mask : torch.Tensor or None
        ``[B or 1, query heads or 1, q, all tokens]``.
    selection : Selection
        What was chosen.
    query, key : torch.Tensor
        ``[B, query heads, q, D]`` and ``[B, H, n, D]``.

    Returns
    -------
    torch.Tensor or None
        ``[B, query heads, q, n]``.
    """
    if mask is None:
        return None
    total = selection.packed + key.shape[2] - selection.tokens
    if mask.dim() != 4 or mask.shape[-1] != total:
        raise BitslabError(
            f"attention_mask: shape {list(mask.shape)}, expected [batch, heads, queries, {total}] "
            "for the tokens of the cache"
        )
    batch, heads, n_queries, _ = query.shape
    wide = mask.expand(batch, heads, n_queries, total)
    chosen = wide.gather(3, _columns(selection, heads, n_queries))
    return torch.cat([chosen, wide[..., selection.packed :]], dim=-1)


def weights_of_all(weights: torch.Tensor, selection: Selection) -> torch.Tensor:
    """Return attention weights ``[B, query heads, q, n]`` with a 0 for tokens not attended."""
    batch, heads, n_queries, _ = weights.shape
    chosen, rest = weights[..., : selection.tokens], weights[..., selection.tokens :]
    out = weights.new_zeros((batch, heads, n_queries, selection.packed))
    return torch.cat([out.scatter(3, _columns(selection, heads, n_queries), chosen), rest], dim=-1)


def _columns(selection: Selection, heads: int, n_queries: int) -> torch.Tensor:
    positions = selection.positions()
    positions = positions.repeat_interleave(heads // positions.shape[1], dim=1)
    return positions[:, :, None].expand(-1, -1, n_queries, -1)


for _name in INNER:
    register(PREFIX + _name, _attention(_name), _name)
