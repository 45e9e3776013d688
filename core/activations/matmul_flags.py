"""The process's settings by which matrix products have other bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

Flags = tuple[Any, ...]


def matmul_flags() -> Flags:
    """Return the settings as they are."""
    matmul = torch.backends.cuda.matmul
    try:
        precision: Any = torch.get_float32_matmul_precision()
    except RuntimeError:  # set by fp32_precision, and torch reads it by that alone then
        precision = matmul.fp32_precision, _mkldnn().fp32_precision
    return (
        precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.mkldnn.enabled,
    )


@contextlib.contextmanager
def under_flags(flags: Flags) -> Iterator[None]:
    """Run with the settings of another moment, where they were others."""
    now = matmul_flags()
    if now == flags:
        yield
        return
    _set(flags)
    try:
        yield
    finally:
        _set(now)


def _set(flags: Flags) -> None:
    matmul = torch.backends.cuda.matmul
    precision, fp16, bf16, mkldnn = flags
    if isinstance(precision, str):
        torch.set_float32_matmul_precision(precision)
    else:
        matmul.fp32_precision, _mkldnn().fp32_precision = precision
    matmul.allow_fp16_reduced_precision_reduction = fp16
    matmul.allow_bf16_reduced_precision_reduction = bf16
    torch.backends.mkldnn.set_flags(mkldnn)  # type: ignore[no-untyped-call]


def _mkldnn() -> Any:
    """Return a CPU's settings, which torch has since 2.9."""
    return getattr(torch.backends.mkldnn, "matmul")  # noqa: B009 - not in torch's types
