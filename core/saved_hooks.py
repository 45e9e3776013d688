"""The hooks of saved tensors that are active, whoever's they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def present_hooks(*, tracing: bool = False) -> Hooks | None:
    """Return the innermost hooks of this thread, which alone torch asks; None without any.

    Parameters
    ----------
    tracing : bool
        Whether hooks count that are on hold while torch traces.
    """
    found: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(tracing)
    return found
