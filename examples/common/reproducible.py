"""The same numbers in each run: seeds, and a GPU that adds in a fixed order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def drawn_seed(*numbers: int) -> int:
    """Mix numbers to a seed from 0 to 2**31 - 1, the same ones always to the same."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0]) >> 1


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """Let a GPU add in a fixed order; a CPU does anyway.

    torch raises RuntimeError at an operator that has no such form. A mere warning there
    (`warn_only`) is no milder choice: attention's backward pass then adds in no fixed order.
    """
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings: Any = torch.utils.deterministic
    mode = torch.get_deterministic_debug_mode()
    filled = settings.fill_uninitialized_memory
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    # It would write to every new tensor, which is none of what is measured here.
    settings.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = filled
        torch.backends.cudnn.benchmark = benchmark
