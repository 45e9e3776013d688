"""Resizing a parameter and its gradient to another number of rows."""

from __future__ import annotations

import torch

from .gradients import sparse_rows


def resized(grad: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a gradient with the number of rows of `shape`; rows that are added are 0."""
    n_rows = shape[0]
    if grad.is_sparse:
        indices, values = grad._indices(), grad._values()
        if n_rows < grad.shape[0]:
            kept = indices[0] < n_rows
            indices, values = indices[:, kept], values[kept]
        return sparse_rows(indices[0], values, shape)
    if grad.shape[0] >= n_rows:
        return grad[:n_rows].clone()
    more = grad.new_zeros(n_rows - grad.shape[0], *grad.shape[1:])
    return torch.cat([grad, more])


def set_data(parameter: torch.nn.Parameter, data: torch.Tensor) -> None:
    """Give a parameter another number of rows."""
    # Autograd's node that takes its gradient checks the shape of when it was made; it lives as long
    # as any graph does, such as that of the last output, and a new one is made only for another
    # dtype.
    other = torch.float32 if data.dtype is torch.float64 else torch.float64
    # One statement, so that Ctrl-C cannot leave the dummy tensor.
    parameter.data, parameter.data = torch.empty(0, dtype=other, device=data.device), data
