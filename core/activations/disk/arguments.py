"""What arguments of the disk tier are to be."""

from __future__ import annotations

import torch

from ...errors import ArgumentError, ArgumentTypeError


def check_number(name: str, value: object, kind: type) -> None:
    """Raise unless an argument is None, or a number above 0 of a kind."""
    accepted = (int,) if kind is int else (int, float)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise ArgumentTypeError(f"{name}: expected {kind.__name__} or None, got {value!r}")
    if not 0 < value < float("inf"):
        raise ArgumentError(f"{name}: {value}, accepted are numbers above 0")


def check_bytes(name: str, t: object) -> None:
    """Raise unless an argument is uint8 ``[n]`` on the CPU, contiguous, with n > 0."""
    if not isinstance(t, torch.Tensor) or t.dtype != torch.uint8 or t.device.type != "cpu":
        what = f"{t.dtype} on {t.device}" if isinstance(t, torch.Tensor) else repr(t)[:60]
        raise ArgumentTypeError(f"{name}: expected uint8 on the CPU, got {what}")
    if t.dim() != 1 or not t.is_contiguous() or not t.shape[0]:
        raise ArgumentError(f"{name}: shape {list(t.shape)}, expected [n] with n > 0, contiguous")
