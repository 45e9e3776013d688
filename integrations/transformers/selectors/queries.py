"""Recomputing queries from a layer's input, for models that allow it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from bitslab.errors import ArgumentError
from bitslab.integrations.transformers.interfaces import function_of


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


def scaling_of(module: Any) -> float:
    """Return what an attention module multiplies its logits by."""
    scaling = getattr(module, "scaling", None)
    return module.head_dim**-0.5 if scaling is None else float(scaling)


def check_projections(modules: Mapping[int, Any], layers: Iterable[int]) -> None:
    """Refuse layers whose queries cannot be computed from a q_proj in memory."""
    for layer in layers:
        module = modules[layer]
        if not hasattr(module, "q_proj") or not hasattr(module, "head_dim"):
            raise ArgumentError(
                f"{unlike(module)}: it has no q_proj; HeavyHitterSelector serves any model"
            )
        weight = module.q_proj.weight
        if weight.is_meta and not hasattr(module.q_proj, "_hf_hook"):
            raise ArgumentError(
                f"model: the query projection of layer {layer} is not in memory while another "
                "layer runs; keep the layers resident, or take HeavyHitterSelector"
            )


def unlike(module: Any) -> str:
    """Return the message for a module whose queries are computed otherwise."""
    return (
        f"model: queries of {type(module).__name__} cannot be computed from q_proj, q_norm and a "
        "rotary embedding; accepted are models that do so, as Llama, Mistral, Qwen2, Qwen3, Gemma, "
        "OPT and Mixtral"
    )
