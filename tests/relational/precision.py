"""Errors of narrow dtypes against float64: those of a compiled layer beside the framework's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: How much larger our error may be, and what is added to both in units of the dtype's rounding:
#: they are sums of roundings that fall differently.
FACTOR, ROUNDINGS, DRAWS = 1.25, 0.25, 8
#: Tensors of fewer values are left out: that of one value is right or wrong by luck.
LARGE = 8

Call = Callable[[nn.Module, dict[str, torch.Tensor]], list[torch.Tensor]]


def results(
    layer: nn.Module, x: dict[str, torch.Tensor], call: Call, dtype: torch.dtype
) -> list[torch.Tensor | None]:
    """Return outputs and gradients in a dtype, from the same parameters and features."""
    layer = copy.deepcopy(layer).to(dtype)
    leaves = {k: v.to(dtype).requires_grad_() for k, v in x.items()}
    outs = call(layer, leaves)
    draw = torch.Generator().manual_seed(6)
    weights = [torch.randn(o.shape, generator=draw).bfloat16().to(o.dtype) for o in outs]
    torch.autograd.backward(outs, weights)
    grads = [v.grad for v in leaves.values()] + [p.grad for p in layer.parameters()]
    return [None if t is None else t.detach().double() for t in (*outs, *grads)]


def compare_errors(
    plain: nn.Module, ours: nn.Module, like: dict[str, torch.Tensor], call: Call, dtype: torch.dtype
) -> None:
    """Compare geometric means over draws of parameters and features: in one draw luck decides."""
    least, logs = torch.finfo(dtype).eps * ROUNDINGS, []
    for seed in range(DRAWS):
        torch.manual_seed(seed)
        # What the narrow dtype holds, in all of them.
        x = {k: torch.randn_like(v).to(dtype).float() for k, v in like.items()}
        with torch.no_grad():
            for p in plain.parameters():
                p.copy_((0.3 * torch.randn_like(p)).to(dtype))
        ours.load_state_dict(plain.state_dict())
        exact: Any = results(plain, x, call, torch.float64)
        theirs, found = (results(layer, x, call, dtype) for layer in (plain, ours))
        assert [t is None for t in found] == [t is None for t in theirs]
        rows = [
            torch.stack([(a - e).norm(), (b - e).norm()]) / e.norm() + least
            for a, b, e in zip(found, theirs, exact, strict=True)
            if e is not None and e.numel() >= LARGE and e.norm() > 0
        ]
        logs.append(torch.stack(rows).log())
    mine, yours = torch.stack(logs).mean(0).exp().unbind(1)
    assert (mine <= FACTOR * yours).all(), (mine, yours)  # so also where one is not finite
    assert mine.mean() <= 1.05 * yours.mean(), (mine, yours)
