"""Which optimizers are right for cached rows.

An optimizer sees the resident rows alone. That gives what it would do to the whole table exactly
where a row without gradient stays as it is, and its state with it. Rows are compared by their bits,
so that -0.0 counts as another value than 0.0.

What stays here and torch's dense steps change in rows without gradient is nothing but a signalling
NaN, which arithmetic makes a quiet one, any NaN of bfloat16, whose bits it sets, and a subnormal
number under `torch.set_flush_denormal(True)`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

ADVICE = (
    "use torch.optim.SGD without momentum and weight_decay, torch.optim.Adagrad without "
    "weight_decay, or with sparse=True torch.optim.SparseAdam, and where maximize is refused "
    "sparse=True or the negated loss; for an optimizer of your own that leaves rows without "
    "gradient and their state alone, attach_optimizer(optimizer, row_wise=True)"
)


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
    if kind is torch.optim.SparseAdam:
        return ""
    if kind is torch.optim.SGD:
        unwanted = ["momentum", "weight_decay"]
    elif kind is torch.optim.Adagrad:
        unwanted = ["weight_decay"]
    else:
        return "moves rows that were not looked up, or is not known"
    for name in unwanted:
        value = group.get(name, 0)
        if value != 0:
            return f"has {name}={value!r}, which moves rows that were not looked up"
    grad = parameter.grad
    # Without a gradient a step does nothing; one that a closure brings is looked at then.
    return "" if grad is None or grad.is_sparse else _why_not_dense(group, parameter)


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
