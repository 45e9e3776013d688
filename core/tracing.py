"""Functions that torch.compile does not trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def not_traced(function: Function) -> Function:
    """Return a function that torch.compile does not trace: it breaks the graph and runs as it is.

    Caches and packed tensors cannot be traced. Outside of compiled models the wrapper of
    `torch.compiler.disable` is bypassed: it costs 40 microseconds a call (torch 2.11, Python 3.12),
    and making it loads the compiler, which takes longer than torch itself.
    """
    untraced: Function | None = None

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal untraced
        if torch.compiler.is_dynamo_compiling():
            if untraced is None:
                untraced = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return untraced(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(Function, called)


def exporting() -> bool:
    """Return whether `torch.export` traces the running code."""
    # Not `is_exporting()`, which dynamo takes for true in every compiled model before torch 2.13.
    found: bool | None = getattr(torch.compiler, "_is_exporting_flag", None)
    if found is not None:
        return found
    # Before torch 2.7: tracing without dynamo means export.
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
