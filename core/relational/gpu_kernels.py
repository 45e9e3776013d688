"""The kernels of a GPU for graphs and programs on it, where it has them."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..engine.kernels.cuda import CudaKernels


@functools.cache
def gpu_kernels(device: torch.device) -> CudaKernels | None:
    """Return the kernels of a GPU, compiled; None on a CPU, and with a warning where they fail."""
    if device.type != "cuda":
        return None
    from ..engine.kernels.cuda import kernels_on

    try:
        kernels = kernels_on(device, raise_errors=False)
        x = torch.zeros(1, 1, 4, dtype=torch.float32, device=device)
        none = torch.zeros(0, dtype=torch.int64, device=device)
        entries = (none.new_zeros(2), none, none)
        kernels.segments.prepare_sum(*entries, 1, 4, torch.float32)(x)
        kernels.survey_edges(none.new_zeros(2, 1), none.new_zeros(1), (1, 1, 1))
    except Exception as error:
        warnings.warn(
            f"relational programs on {device} run torch's operators, since their kernels cannot be "
            f"compiled or started: {error}",
            stacklevel=2,
        )
        return None
    return kernels
