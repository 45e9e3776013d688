"""Elements as integers: NaN equals itself, -0.0 is not 0.0, and a copy keeps every bit."""

from __future__ import annotations

import torch

#: Integers by the bytes of an element.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(t: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers of the size of its elements.

    Parameters
    ----------
    t : torch.Tensor
        Of any dtype and shape, on any device; a conjugated or negated view is resolved before.

    Returns
    -------
    torch.Tensor
        Over the same memory; ``[..., 2]`` of complex elements, their real and imaginary parts.
    """
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.view(INTEGERS[t.element_size()])


def copy_rows(into: list[torch.Tensor], given: list[torch.Tensor]) -> None:
    """Copy tensors to tensors of their shapes and dtype on their device, all at once.

    Parameters
    ----------
    into, given : list of torch.Tensor
        Of one dtype in each pair.
    """
    for t in into:
        # On a GPU `_foreach_copy_` goes through float32 for smaller ones, which makes all NaN one.
        if t.dtype.is_floating_point and t.dtype.itemsize < 4:
            into, given = [as_integers(t) for t in into], [as_integers(t) for t in given]
            break
    torch._foreach_copy_(into, given)
