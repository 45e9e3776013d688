"""K and V of SmolLM2: what its layers' attention is given, and heads of 128 made of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import transformers
from textgen.smollm import load_model, load_tokenizer, text_ids
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from bitslab.engine.codecs.quantized import fit_error

#: Tokens that all methods keep raw, first and last; tokens of a tile; queries that errors are of.
SINKS, WINDOW, TILE_TOKENS, QUERIES = 4, 128, 64, 64
#: Positions that the model was trained with.
POSITIONS = 8192
#: The error of attention that steps of `wide_heads` keep: what KVCompCache aims at by default.
ERROR = 0.055
#: Our name of the attention function that keeps what it is given.
_KEEPING = "bitslab_benchmark_keeping"


@dataclass(frozen=True)
class Attended:
    """What a layer's attention is given, keys after RoPE.

    Parameters
    ----------
    queries : torch.Tensor
        ``[B, Hq, n, dim]``, of the last n tokens.
    keys, values : torch.Tensor
        ``[B, H, T, dim]``.
    causal : bool
        Whether a query sees no later token.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    causal: bool = True

    def error(self, keys: torch.Tensor | None, values: torch.Tensor | None) -> float:
        """Return the relative error of attention to these, None for the keys or values given."""
        off = self._output(
            self.keys if keys is None else keys, self.values if values is None else values
        )
        return float((off - self._plain).norm() / self._plain.norm())

    @cached_property
    def _plain(self) -> torch.Tensor:
        return self._output(self.keys, self.values)

    def _output(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        n, tokens = self.queries.shape[2], keys.shape[2]
        mask = None
        if self.causal:
            at = torch.arange(tokens, device=keys.device)
            mask = at <= at[tokens - n :, None]
        return torch.nn.functional.scaled_dot_product_attention(
            self.queries.float(), keys.float(), values.float(), attn_mask=mask, enable_gqa=True
        )


@lru_cache(maxsize=1)
def smollm2(device: torch.device) -> Any:
    """Return the model in float32, loaded once."""
    return load_model(torch.float32, device)


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    return load_tokenizer()


def text(tokens: int, device: torch.device) -> torch.Tensor:
    """Return tokens of text, int64 ``[1, tokens]``."""
    return text_ids(_tokenizer(), tokens).to(device)


def attended(model: Any, ids: torch.Tensor, dtype: torch.dtype) -> list[Attended]:
    """Return what each layer's attention is given in a pass over tokens, as `dtype`.

    Of more tokens than the model was trained with, the base of its rotations grows with their
    number (NTK-aware scaling), as its users do.
    """
    kept: list[Attended] = []

    def keep(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: Any,
        scaling: float | None = None,
        **how: Any,
    ) -> Any:
        last = query[:, :, -QUERIES:].to(dtype)
        kept.append(Attended(last, key.to(dtype), value.to(dtype)))
        # In float32 the backends that need no matrix of logits take no shared heads.
        group = query.shape[1] // key.shape[1]
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(group, dim=1),
            value.repeat_interleave(group, dim=1),
            is_causal=True,
            scale=scaling,
        )
        return output.transpose(1, 2).contiguous(), None

    before = model.config._attn_implementation
    rotations = model.model.rotary_emb.inv_freq
    steps = torch.arange(len(rotations), device=rotations.device) * 2 / (2 * len(rotations) - 2)
    slower = max(ids.shape[1] / POSITIONS, 1.0) ** -steps
    transformers.AttentionInterface.register(_KEEPING, keep)
    AttentionMaskInterface.register(_KEEPING, sdpa_mask)
    model.set_attn_implementation(_KEEPING)
    model.model.rotary_emb.inv_freq = rotations * slower
    try:
        with torch.no_grad():
            model(ids, use_cache=False, logits_to_keep=1)
    finally:
        model.model.rotary_emb.inv_freq = rotations
        model.set_attn_implementation(before)
    return kept


@dataclass(frozen=True)
class WideHeads:
    """K and V of SmolLM2 as heads of 128: two heads of 64 of a layer side by side, on the CPU.

    Parameters
    ----------
    keys, values : torch.Tensor
        bfloat16 ``[1, heads, T, 128]``.
    weights : torch.Tensor
        ``[heads, 128]``: weights of K's channels, for a scale of 1.
    value_scale : float
        Of V.
    """

    keys: torch.Tensor
    values: torch.Tensor
    weights: torch.Tensor
    value_scale: float


@lru_cache(maxsize=1)
def wide_heads(heads: int, tokens: int, device: torch.device) -> WideHeads:
    """Return heads of layers that are spread evenly, with the steps that keep ERROR there."""
    ids = text(SINKS + tokens + WINDOW, device)
    layers = attended(smollm2(device), ids, torch.bfloat16)
    keys, values, weights, scales = [], [], [], []
    for i in range(heads):
        a = layers[(2 * i + 1) * len(layers) // (2 * heads)]
        fit = fit_error(a.keys, a.values, a.queries, error=ERROR, sinks=SINKS, window=WINDOW)
        if fit is None or fit.weights is None:
            raise SystemExit(f"SmolLM2: no steps keep the error of attention under {ERROR}")
        some = slice(SINKS, SINKS + tokens)
        keys.append(a.keys[0, :2, some].transpose(0, 1).flatten(1))
        values.append(a.values[0, :2, some].transpose(0, 1).flatten(1))
        weights.append(fit.weights[:2].flatten() / fit.measured.key_scale)
        scales.append(fit.measured.value_scale)
    return WideHeads(
        torch.stack(keys)[None].cpu(),
        torch.stack(values)[None].cpu(),
        torch.stack(weights),
        sum(scales) / len(scales),
    )
