"""The search for scales where their errors are: on a device, for which no host has to wait."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...kernels.uploads import uploaded

#: Points between two measured scales that are compared.
BETWEEN = 16
#: What no error is below, so that it has a logarithm.
LEAST_ERROR = 1e-30


class Curve:
    """Errors and bits over scales, interpolated between the measured ones.

    Parameters
    ----------
    scales : sequence of float
        Those that were measured, ascending.
    errors, bits : torch.Tensor
        float64 ``[scales]``, on any device.

    Attributes
    ----------
    scales, errors, bits : torch.Tensor
        float64 ``[points]`` there, the finest first.
    """

    def __init__(self, scales: Sequence[float], errors: torch.Tensor, bits: torch.Tensor) -> None:
        logarithms = torch.tensor([math.log(s) for s in scales], dtype=torch.float64)
        known = torch.stack(
            [uploaded(logarithms, errors.device), errors.clamp(min=LEAST_ERROR).log(), bits]
        )
        if len(scales) > 1:
            points = BETWEEN * (len(scales) - 1) + 1
            at = torch.arange(points, dtype=torch.float64, device=errors.device) / BETWEEN
            low = at.long().clamp(max=len(scales) - 2)
            known = torch.lerp(known[:, low], known[:, low + 1], at - low)
        self.scales, self.errors, self.bits = known[0].exp(), known[1].exp(), known[2]


def cheapest(k: Curve, v: Curve, target: float) -> torch.Tensor:
    """Return the scales of the fewest bits whose errors together should keep a target.

    Both errors together are taken to be the root of the sum of their squares.

    Returns
    -------
    torch.Tensor
        float64 ``[2]``, of keys and values, on their device: the finest where none keeps it.
    """
    errors = torch.hypot(k.errors[:, None], v.errors)
    bits = (k.bits[:, None] + v.bits).masked_fill(errors > target, math.inf)
    # Of equal ones the first. An index of no dimension would be read by the host.
    at = bits.flatten().argmin().view(1)
    points = v.scales.shape[0]
    return torch.cat([k.scales[at // points], v.scales[at % points]])


def between(factors: torch.Tensor, errors: torch.Tensor, goal: float) -> torch.Tensor:
    """Return the factor that should have an error, by the measured ones around it.

    Parameters
    ----------
    factors, errors : torch.Tensor
        float64 ``[n]`` each, on any device: what was measured, in any order.
    goal : float
        The error.

    Returns
    -------
    torch.Tensor
        float64 ``[1]`` there; the smallest factor where no error is below the goal, the largest one
        where its error is.
    """
    factors, order = factors.sort()
    errors = errors[order]
    last = factors.shape[0] - 1
    # -1 where none is fine.
    numbers = torch.arange(last + 1, device=errors.device)
    below = torch.where(errors <= goal, numbers, -1).amax().view(1)
    first, then = below.clamp(min=0), (below + 1).clamp(max=last)
    low = errors[first].clamp(min=LEAST_ERROR)
    share = (goal / low).log() / (errors[then] / low).log()
    found = factors[first] * (share * (factors[then] / factors[first]).log()).exp()
    return torch.where((below < 0) | (below == last), factors[first], found)
