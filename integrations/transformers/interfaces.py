"""Attention functions of transformers: registering ours, and finding those of a module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

#: What an attention function returns: ``[B, q, query heads, D]``, and weights or None.
Attended = tuple[torch.Tensor, torch.Tensor | None]

#: By which models with a sparse indexer tell attention functions what is attended to: they put it
#: into the mask for those named "eager" and "sdpa" alone.
INDEXES = ("indices", "block_indices")


def register(name: str, attention: Callable[..., Attended], mask: str | Callable[..., Any]) -> None:
    """Register an attention function, with the masks that it takes.

    Parameters
    ----------
    name : str
        What ``set_attn_implementation`` takes.
    attention : callable
        As transformers calls it.
    mask : str or callable
        What makes its masks: a function, or the name of a known one.
    """
    AttentionInterface.register(name, attention)
    makes = ALL_MASK_ATTENTION_FUNCTIONS[mask] if isinstance(mask, str) else mask
    AttentionMaskInterface.register(name, makes)


def attention_of(module: torch.nn.Module, name: str) -> Callable[..., Attended]:
    """Return the attention function of a name that a module would call."""
    source: Any = source_of(module)
    found: Callable[..., Attended] = source.ALL_ATTENTION_FUNCTIONS.get_interface(
        name, getattr(source, "eager_attention_forward", None)
    )
    return found


def function_of(module: torch.nn.Module, name: str) -> Callable[..., Any] | None:
    """Return a function of the file that defines a module's class, or its base's."""
    source = source_of(module)
    found: Callable[..., Any] | None = getattr(source, name, None)
    return found


def source_of(module: torch.nn.Module) -> ModuleType | None:
    """Return the file that defines a module's class, or its base's, if it looks functions up."""
    for kind in type(module).__mro__:
        source = sys.modules.get(kind.__module__)
        if hasattr(source, "ALL_ATTENTION_FUNCTIONS"):
            return source
    return None
