"""Which policy the options of `ActivationOffload` name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..engine.advisor import SwapLimits
from ..engine.advisor.planning import SLOWDOWN
from ..errors import ArgumentError, ArgumentTypeError
from .auto import PROFILE_EVERY, AutoPolicy
from .memory_limit import checked_memory
from .planned import PlannedPolicy
from .policies import Codecs, FixedPolicy, Policy
from .sites import Select


def policy_of(
    policy: str,
    codecs: Codecs,
    *,
    profile_every: int | None,
    limits: Callable[[torch.device], SwapLimits],
    memory: Any,
    slowdown: Any,
    recompute: Any,
    select: Select | None,
) -> Policy:
    """Return the policy that options name.

    Parameters
    ----------
    policy : str
        One of `POLICIES`.
    codecs : Codecs
        What it may pack with.
    profile_every, memory, slowdown, recompute, select
        As for `ActivationOffload`.
    limits : callable
        Returns the limits of a device.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For options that do not go together, and values that are not accepted.
    """
    if not isinstance(recompute, bool):
        raise ArgumentTypeError(f"recompute: expected a bool, got {recompute!r:.60}")
    if memory is not None or slowdown is not None:
        return _planned(policy, codecs, memory, slowdown, recompute, select, profile_every)
    if policy == "auto":
        if not codecs.names and codecs.lossy is None:
            raise ArgumentError(
                "codecs: policy 'auto' decides which codec pays, and none is named; accepted with "
                "none are policies raw and keep, and memory or slowdown"
            )
        return AutoPolicy(codecs, profile_every, limits)
    return FixedPolicy(policy, codecs)


def _planned(
    policy: str,
    codecs: Codecs,
    memory: Any,
    slowdown: Any,
    recompute: Any,
    select: Select | None,
    every: int | None,
) -> PlannedPolicy:
    """Return the policy of `memory` and `slowdown`, or refuse what does not go with them."""
    if policy != "auto":
        raise ArgumentError(
            f"policy: {policy!r} with memory or slowdown, which plan what becomes of each tensor; "
            "leave policy out"
        )
    if codecs.lossy is not None:
        raise ArgumentError(
            f"lossy: {codecs.lossy!r} with memory or slowdown, whose plans return every bit"
        )
    if slowdown is None:
        slowdown = SLOWDOWN
    elif isinstance(slowdown, bool) or not isinstance(slowdown, int | float):
        raise ArgumentTypeError(f"slowdown: expected a number, got {slowdown!r:.60}")
    if not 0 <= slowdown < math.inf:
        raise ArgumentError(f"slowdown: {slowdown}, accepted are numbers from 0")
    return PlannedPolicy(
        codecs,
        memory=None if memory is None else checked_memory(memory),
        slowdown=float(slowdown),
        recompute=recompute,
        select=select,
        every=PROFILE_EVERY if every is None else every,
    )
