"""The link of a device as it is measured for plans: its rates, and what both directions share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..engine.advisor import SwapLink
from ..engine.advisor.link import share_both_ways


def measured_link(
    device: torch.device, warn: Callable[[str], None]
) -> tuple[SwapLink | None, float]:
    """Return the link of a device, and the share of its rate each way while both are used.

    Both are measured once in a process. Where that fails, training goes on.

    Parameters
    ----------
    device : torch.device
        The device.
    warn : callable
        Called with what could not be measured.
    """
    try:
        link = SwapLink.measured(device)
    except Exception as error:
        warn(f"the link of {device} could not be measured ({error})")
        return None, 1.0
    try:
        return link, share_both_ways(device)
    except Exception as error:
        warn(f"the link of {device} could not be measured in both directions at once ({error})")
        return link, 1.0
