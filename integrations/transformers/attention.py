"""The attention function "bitslab": SDPA, and attention to packed K and V where a cache has them.

Importing this module registers it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bitslab.errors import BitslabError
from bitslab.integrations.transformers.forward_pass import undo_pass_of
from bitslab.integrations.transformers.handles import KVHandle, update_of
from bitslab.integrations.transformers.interfaces import INDEXES, Attended, function_of, register
from bitslab.integrations.transformers.kvcomp_layer import LayerUpdate, Padding
from bitslab.tracing import not_traced

#: What ``set_attn_implementation`` takes.
NAME = "bitslab"
#: Arguments that are not taken, with an implementation that serves the models which give them.
#: Not the others: any argument of a forward pass ends up here, also those that say nothing of what
#: is attended to or repeat the mask (position_ids, cu_seq_lens_q, deterministic).
REFUSED = {
    **dict.fromkeys(INDEXES, "sdpa"),
    "sinks": "eager",  # logits that the model's own function alone knows
}
_PADDING = "bitslab_padding"
#: Masks with a padding, by their id. A layer of another GPU gets a copy, which does not have it.
_padded: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()


@not_traced
def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> Attended:
    """Return the outputs of attention ``[B, q, query heads, D]``, and no weights.

    Plain tensors are attended to as by transformers' SDPA; with a softcap or sinks, which that does
    not have, as by the model's own eager function. Handles of a `KVCompCache` are read packed where
    the kernels serve the mask and the options, else decoded first.

    Parameters
    ----------
    module : torch.nn.Module
        The attention module.
    query : torch.Tensor
        ``[B, query heads, q, D]``.
    key, value : torch.Tensor
        ``[B, H, T, D]``, or handles of them.
    attention_mask : torch.Tensor, optional
        bool ``[B, 1, q, T]``.
    options
        As transformers passes them: scaling, softcap, s_aux, dropout, ...

    Raises
    ------
    BitslabError
        For options of `REFUSED`. After this, as after any error while K and V of a `KVCompCache` or
        `CompressedCache` are attended to, all its packed layers are as before the forward pass.
    """
    update, given = update_of(key, value), key
    try:
        for name in REFUSED:
            if options.get(name) is not None:
                raise BitslabError(_refusal(module, name))
        if not isinstance(update, LayerUpdate):
            key, value = (t.dense() if isinstance(t, KVHandle) else t for t in (key, value))
            return plain_attention(module, query, key, value, attention_mask, **options)
        padding: Padding | None = getattr(attention_mask, _PADDING, None)
        if padding is None and attention_mask is not None:
            padding = _padding_of(attention_mask)
        causal = padding is not None or (attention_mask is None and query.shape[2] == 1)
        if causal:
            out = update.attend_packed(query, padding, options)
            if out is not None:
                update.see(query, padding, options)
                return out, None
        key, value = update.dense()
        found = plain_attention(module, query, key, value, attention_mask, **options)
        another = padding is None and attention_mask is not None
        update.see(query, padding, options, other_mask=another)
        return found
    except BaseException:
        if isinstance(update, LayerUpdate):
            update.failed()
        else:
            undo_pass_of(given)
        raise


def _refusal(module: torch.nn.Module, name: str) -> str:
    return (
        f"{name}: {type(module).__name__} chooses by this argument what is attended to, which the "
        f'attention function "{NAME}" does not take; call '
        f'model.set_attn_implementation("{REFUSED[name]}")'
    )


def plain_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> Attended:
    """Attend to tensors, as `attention` says."""
    if options.get("softcap") is None and options.get("s_aux") is None:
        sdpa: Callable[..., Attended] = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, **options)
    eager = function_of(module, "eager_attention_forward")
    if eager is None:
        raise BitslabError(
            f"attention: {type(module).__name__} has a softcap or sinks, and no "
            "eager_attention_forward in its file, by which they are served"
        )
    mask = _added(attention_mask, query, key, getattr(module, "is_causal", True))
    found: Attended = eager(module, query, key, value, mask, **options)
    return found


def _added(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, is_causal: bool
) -> torch.Tensor | None:
    """Return a mask of SDPA as eager functions take it: added to the logits."""
    n_queries, n_keys = query.shape[2], key.shape[2]
    if mask is None:
        if n_queries == 1 or not is_causal:
            return None
        places = torch.arange(n_keys, device=query.device)
        mask = (places <= places[n_keys - n_queries :, None])[None, None]
    if mask.dtype != torch.bool:
        return mask
    least = torch.finfo(query.dtype).min
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, least)


def masks(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """Return the mask of SDPA, which knows if it is causal with padding on the left alone."""
    mask = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        **options,
    )
    if (
        mask is None
        or mask_function is not causal_mask_function
        or kv_offset
        or not isinstance(q_offset, int)
        or q_offset + q_length != kv_length
    ):
        return mask
    padding = left_padding(attention_mask, kv_length)
    if padding is not None:
        setattr(mask, _PADDING, padding)
        _padded[id(mask)] = mask
    return mask


def _padding_of(mask: torch.Tensor) -> Padding | None:
    """Return the padding of a copy of a mask that `masks` has made, on its device.

    Copies are known by what they hold, for which a GPU is waited for.
    """
    for made in list(_padded.values()):
        alike = made.shape == mask.shape and made.dtype == mask.dtype
        if alike and torch.equal(made.to(mask.device), mask):
            found = getattr(made, _PADDING)
            first = found.first_valid
            padding = Padding(None if first is None else first.to(mask.device), found.last)
            setattr(mask, _PADDING, padding)
            return padding
    return None


@not_traced
def left_padding(mask: torch.Tensor | None, length: int) -> Padding | None:
    """Return where the sequences of a mask ``[B, T]`` begin; None where they have holes.

    A GPU is waited for, as transformers does where it makes masks.
    """
    if mask is None:
        return Padding(None)
    if mask.dim() != 2 or mask.shape[1] != length:
        return None
    if not mask.shape[0]:
        return Padding(None)
    valid = mask.bool()
    first = valid.to(torch.int32).argmax(dim=1)
    first = torch.where(valid.any(dim=1), first, length)  # of a sequence that is yet to begin
    whole = (valid.sum(dim=1) == length - first).all()
    all_whole, last = torch.stack([whole.long(), first.max()]).tolist()
    return Padding(first.to(torch.int32), last) if all_whole else None


register(NAME, attention, masks)
