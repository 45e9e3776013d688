"""Where operators on unified tensors compute and their results lie: the rules, without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Affinity = Literal["host", "device"]


@dataclass(frozen=True)
class Operand:
    """What decides about placement in one tensor among the operands.

    Parameters
    ----------
    kind : {"cpu", "cuda", "unified"}
        Where it lies.
    scalar : bool
        It has no dimensions.
    affinity : {"host", "device"}
        Of a unified tensor.
    device : torch.device, optional
        GPU of a CUDA tensor or of a unified tensor in device affinity.
    """

    kind: Literal["cpu", "cuda", "unified"]
    scalar: bool = False
    affinity: Affinity = "host"
    device: torch.device | None = None


@dataclass(frozen=True)
class Placement:
    """Where an operator computes, and what its result is.

    Parameters
    ----------
    device : torch.device
        Where it computes.
    result : {"cpu", "cuda", "unified"}
        Kind of the result.
    """

    device: torch.device
    result: Literal["cpu", "cuda", "unified"]


def placement(operands: Sequence[Operand]) -> Placement:
    """Apply the rules in the docstring of `UnifiedTensor` (PyTorch-Direct, section 4.4.3)."""
    for operand in operands:
        if operand.kind == "cuda" and not operand.scalar and operand.device is not None:
            return Placement(operand.device, "cuda")
    for operand in operands:
        if operand.kind == "unified" and operand.affinity == "device" and operand.device:
            return Placement(operand.device, "cuda")
    unified_operands = any(operand.kind == "unified" for operand in operands)
    return Placement(torch.device("cpu"), "unified" if unified_operands else "cpu")


# Names of functions that run on the host memory in either affinity: those that return metadata of a
# tensor, name the device of their result, or write to a tensor that they are given.
DIRECT = frozenset(
    """
    __get__ __set__ __delete__ __array__ __array_wrap__ __bool__ __complex__ __dir__ __dlpack__
    __dlpack_device__ __float__ __format__ __index__ __int__ __len__ __repr__ _is_view
    _typed_storage apply_ backward copy_ cpu cuda data_ptr const_data_ptr dim dim_order
    element_size get_device has_names is_complex is_conj is_contiguous is_distributed
    is_floating_point is_inference is_neg is_nonzero is_pinned is_same_size is_set_to is_signed
    is_tensor item map_ map2_ ndimension nelement new numel numpy pin_memory record_stream
    register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad resize_
    resize_as_ set_ share_memory_ size storage storage_offset storage_type stride tolist
    untyped_storage
    """.split()
)

# Names of functions that compute nothing: their results are views of the same memory, where the
# shape allows it.
VIEWS = frozenset(
    """
    adjoint alias as_strided broadcast_tensors broadcast_to chunk conj contiguous detach detach_
    diagonal dsplit expand expand_as flatten hsplit imag movedim moveaxis narrow permute ravel real
    reshape reshape_as resolve_conj resolve_neg select split split_with_sizes squeeze squeeze_
    swapaxes swapdims t t_ tensor_split transpose transpose_ type unbind unflatten unfold unsqueeze
    unsqueeze_ view view_as view_as_complex view_as_real vsplit
    """.split()
)


def names_device(*args: Any, **kwargs: Any) -> bool:
    """Return whether the arguments of `Tensor.to` say where the result is to lie."""
    return "device" in kwargs or any(
        isinstance(x, (torch.device, str, int, torch.Tensor)) and not isinstance(x, bool)
        for x in (*args[:1], kwargs.get("other"))
    )
