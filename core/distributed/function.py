"""The autograd function of an all-to-all: rows forward, their gradients back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .checks import rows_of
from .parts import Call


class Owner(Protocol):
    """Whose exchanges the function makes."""

    def send_forward(
        self, group: dist.ProcessGroup, call: Call, tensors: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Exchange rows forward; return what came, ``[M, row]``."""

    def send_back(
        self, group: dist.ProcessGroup, call: Call, gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Exchange gradients ``[M, row]`` of what came; return those of what was sent."""


class AllToAllFunction(torch.autograd.Function):
    """Rows of tables to the ranks; their gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        owner: Owner,
        group: dist.ProcessGroup,
        call: Call,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Exchange, and keep which rows repeat."""
        plan = call.plan
        results = owner.send_forward(group, call, tensors)
        if not plan.flat:
            pairs = zip(results, plan.parts, strict=True)
            results = [_shaped(t, part.shape) for t, part in pairs]
        ctx.call = owner, group, call
        if len(plan.with_gradients) < len(plan.parts):
            pairs = zip(results, plan.parts, strict=True)
            ctx.mark_non_differentiable(*(t for t, part in pairs if not part.has_gradient))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Send gradients back, those of copies of a row as their sum.

        What was sent back is no function of the gradients for autograd: who differentiates once
        more is refused, and gets no zeros.
        """
        owner, group, call = ctx.call
        plan = call.plan
        given = [rows_of(gradients[i], plan.parts[i].row) for i in plan.with_gradients]
        found = owner.send_back(group, call, given)
        results: list[torch.Tensor | None] = [None] * len(plan.parts)
        for i, t in zip(plan.with_gradients, found, strict=True):
            part = plan.parts[i]
            results[i] = t if plan.flat else t.view(sum(part.send_rows), *part.shape)
        return None, None, None, *results


def _shaped(rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return rows ``[M, row]`` in their shape, as no view.

    Of views that a function made autograd refuses changes in place.
    """
    (found,) = torch.unsafe_split_with_sizes(rows.view(len(rows), *shape), [len(rows)])
    return found
