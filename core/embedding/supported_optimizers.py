"""Which optimizers are right for cached rows.

An optimizer sees the resident rows alone. That gives what it would do to the whole table exactly
where a row without gradient is left unchanged, as is its state. Rows are compared by their bits,
so that -0.0 counts as another value than 0.0.

torch's dense steps also change, in rows without gradient: a signalling NaN, which arithmetic makes
a quiet one; any NaN of bfloat16, whose bits it sets; and a subnormal number under
`torch.set_flush_denormal(True)`. Cached rows that are not resident keep those.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ArgumentError

ADVICE = (
    "use torch.optim.SGD without momentum and weight_decay, torch.optim.Adagrad without "
    "weight_decay, or with sparse=True torch.optim.SparseAdam, and where maximize is refused "
    "sparse=True or the negated loss; for an optimizer of your own that leaves rows without "
    "gradient and their state alone, attach_optimizer(optimizer, row_wise=True)"
)

#: Options with which rows without gradient move.
_UNWANTED: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: ("momentum", "weight_decay"),
    torch.optim.Adagrad: ("weight_decay",),
}


def why_refused(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> str:
    """Return why an optimizer would move rows that were not looked up, or an empty text.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer.
    group : mapping
        The parameter group of the rows.
    parameter : torch.Tensor
        That of the rows.
    """
    kind = type(optimizer)
    if kind not in _UNWANTED and not is_of_torch(optimizer):
        return "moves rows that were not looked up, or is not known"
    reason = _why_torchs_refused(kind, group)
    grad = parameter.grad
    # Without a gradient a step does nothing; one that a closure computes is checked then.
    if reason or grad is None or grad.is_sparse or kind is torch.optim.SparseAdam:
        return reason
    return _why_not_dense(group, parameter)


def why_refused_when_made(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """Return why an optimizer moves rows that were not looked up, whatever their gradient is.

    The text is empty for third-party optimizers, for which a caller may pass `row_wise` later.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer.
    group : mapping
        The parameter group of the rows.
    """
    return _why_torchs_refused(type(optimizer), group) if is_of_torch(optimizer) else ""


def _why_torchs_refused(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> str:
    """Return what `why_refused_when_made` does, of an optimizer of one of torch's own classes."""
    if kind is torch.optim.SparseAdam:
        return ""
    if kind not in _UNWANTED:
        return "moves rows that were not looked up"
    for name in _UNWANTED[kind]:
        value = group.get(name, 0)
        if value != 0:
            return f"has {name}={value!r}, which moves rows that were not looked up"
    return ""


def refused(optimizer: torch.optim.Optimizer, reason: str) -> ArgumentError:
    """Return the error for an optimizer, with the reason and what to use instead."""
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    return ArgumentError(f"optimizer: {kind} {reason}; {ADVICE}")


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is of one of torch's own classes, not of one derived from it."""
    kind = type(optimizer)
    return getattr(torch.optim, kind.__name__, None) is kind


def passes_over(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer passes over parameters without gradient, whatever it holds.

    torch's own classes do but for LBFGS, which joins all of its parameters to one.
    """
    return is_of_torch(optimizer) and type(optimizer) is not torch.optim.LBFGS


def _why_not_dense(group: Mapping[str, Any], parameter: torch.Tensor) -> str:
    """Return why a dense step of SGD or Adagrad would change rows whose gradient is 0.

    It adds ``-lr * 0 / root``, which is -0.0 and changes nothing, unless its sign is another or one
    of its factors is no number.
    """
    dtype = parameter.dtype
    if group.get("maximize"):
        return (
            "has maximize=True, which with dense gradients turns -0.0 into 0.0 in rows that were "
            "not looked up"
        )
    if group.get("fused") and dtype.itemsize == 2 and parameter.device.type == "cpu":
        return (
            f"has fused=True, with which torch computes {dtype} on a CPU by where in the table it "
            "lies; leave it out"
        )
    for name in ("lr", "lr_decay"):
        value = group.get(name, 0)
        # To read a number that lies on a GPU would wait for it.
        known = not isinstance(value, torch.Tensor) or value.device.type == "cpu"
        if known and not 0 <= _number(value) < math.inf:
            return f"has {name}={value!r}, which changes rows that were not looked up"
    if "eps" in group:
        eps, started = group["eps"], group.get("initial_accumulator_value", 0)
        if not 0 <= eps:
            return f"has eps={eps!r}, which changes rows that were not looked up"
        if _are_zero(eps, started, dtype):
            return (
                f"has eps={eps!r}, which is 0 in {dtype}, and initial_accumulator_value={started!r}"
                ", which makes rows that were not looked up NaN"
            )
    return ""


@functools.lru_cache(maxsize=64)
def _are_zero(eps: float, started: float, dtype: torch.dtype) -> bool:
    # On the CPU, whatever the default device is: this is asked in each step.
    return not torch.tensor([eps, started], dtype=dtype, device="cpu").any()


def _number(value: Any) -> float:
    # To convert a tensor that takes a gradient would warn.
    return float(value.detach() if isinstance(value, torch.Tensor) else value)
