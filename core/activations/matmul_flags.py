"""The process's settings by which matrix products have other bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

Flags = tuple[Any, ...]


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _settings() -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Return what reads and what writes each setting, and nothing else."""
    cuda, mkldnn = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
    found: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
        _attribute(cuda, "allow_fp16_reduced_precision_reduction"),
        _attribute(cuda, "allow_bf16_reduced_precision_reduction"),
        _attribute(torch.backends.mkldnn, "enabled"),
    ]
    if hasattr(cuda, "allow_fp16_accumulation"):
        found.append(_attribute(cuda, "allow_fp16_accumulation"))
    if mkldnn is None:  # before torch 2.9
        found.append((torch.get_float32_matmul_precision, torch.set_float32_matmul_precision))
    else:  # each by itself: what sets both would change the other one
        found += [_attribute(cuda, "fp32_precision"), _attribute(mkldnn, "fp32_precision")]
    return found


_SETTINGS = _settings()


def matmul_flags() -> Flags:
    """Return the settings as they are."""
    return tuple(read() for read, _ in _SETTINGS)


@contextlib.contextmanager
def under_flags(flags: Flags) -> Iterator[None]:
    """Run with the settings of another moment, where they were others."""
    before = matmul_flags()
    changed = [
        (write, now, then)
        for (_, write), now, then in zip(_SETTINGS, before, flags, strict=True)
        if now != then
    ]
    try:
        for write, _, then in changed:
            write(then)
        yield
    finally:
        for write, now, _ in changed:
            write(now)
