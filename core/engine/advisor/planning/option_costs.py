"""What the candidates of all sites take, as arrays that prices are multiplied with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .timeline import Floats, Timeline

#: The queues of a step, with the field of `Costs` that has a candidate's seconds in each.
QUEUES = {"up": "up_s", "write": "write_s", "down": "down_s", "read": "read_s"}


@dataclass(frozen=True, eq=False)
class OptionCosts:
    """Costs of candidates, arrays ``[sites, most candidates of a site]``.

    Parameters
    ----------
    device_s : numpy.ndarray
        Seconds of the device; infinite where a site has fewer candidates.
    queue_s : dict of str to numpy.ndarray
        Seconds of each of `QUEUES`.
    host, disk, packed : numpy.ndarray
        Bytes that lie in host memory, on the SSD, and packed on the device.
    kept : numpy.ndarray
        bool: whether the tensor is kept as it is.
    """

    device_s: Floats
    queue_s: dict[str, Floats]
    host: Floats
    disk: Floats
    packed: Floats
    kept: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, timeline: Timeline) -> OptionCosts:
        """Return the costs of a timeline's candidates."""
        sites = len(timeline.candidates)
        shape = sites, max((len(own) for own in timeline.candidates), default=1)
        host, disk, packed = (np.zeros(shape) for _ in range(3))
        queue_s = {name: np.zeros(shape) for name in QUEUES}
        found = cls(
            np.full(shape, math.inf), queue_s, host, disk, packed, np.zeros(shape, np.bool_)
        )
        by_action = {"host": host, "disk": disk, "device": packed}
        for i, (own, costs) in enumerate(zip(timeline.actions, timeline.costs, strict=True)):
            for k, (action, each) in enumerate(zip(own, costs, strict=True)):
                found.device_s[i, k] = each.forward_s + each.backward_s
                found.kept[i, k] = action == "keep"
                for name, field in QUEUES.items():
                    queue_s[name][i, k] = getattr(each, field)
                if action in by_action:
                    by_action[action][i, k] = each.packed_bytes or each.moved_bytes
        return found
