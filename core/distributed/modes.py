"""The mode of autograd in which an exchange began, for what is written to its tensors later."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

#: Makes a context in which tensors of a thread may be written to.
Mode = Callable[[], AbstractContextManager[object]]


def mode_of_thread() -> Mode:
    """Return the mode in which other threads, and later calls, may write to tensors made now.

    Tensors that are made in inference mode may be written to in inference mode alone, which each
    thread enters for itself. Others may be written to in both.
    """
    return torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad


def kept_tensors() -> AbstractContextManager[object]:
    """Return a context that makes tensors which calls in any mode may write to."""
    return torch.inference_mode(False)
