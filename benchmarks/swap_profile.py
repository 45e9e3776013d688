"""What a GPU does in one step, by stream and kernel, from torch's profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

#: Kernels shown of the stream that computes, and of each of the others.
COMPUTE_KERNELS, OTHER_KERNELS = 4, 6
NAME_LENGTH = 48
_types: Any = torch.autograd
GPU = _types.DeviceType.CUDA


def profile_rows(step: Callable[[], object]) -> list[dict[str, Any]]:
    """Return rows of one step: for each stream its span, how long it was busy, and its kernels.

    Parameters
    ----------
    step : callable
        Runs the step, and waits for the device.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    seen: list[Any] = list(profiler.events() or ())
    # Annotations, such as that of the optimizer, span what is counted already.
    events = [e for e in seen if e.device_type == GPU and not getattr(e, "is_user_annotation", 0)]
    if not events:
        return [{"stream": "torch's profiler saw no kernels"}]
    streams: dict[int, list[Any]] = defaultdict(list)
    for event in events:
        streams[event.device_resource_id].append(event)
    first = min(e.time_range.start for e in events)
    # By work: the one that computes comes first.
    order = sorted(streams, key=lambda s: len(streams[s]), reverse=True)
    rows: list[dict[str, Any]] = []
    for i, stream in enumerate(order):
        own = streams[stream]
        rows.append(
            {
                "stream": "computes" if not i else f"other {i}",
                "what": "all",
                "calls": len(own),
                "ms": busy_us(own) / 1e3,
                "from": (min(e.time_range.start for e in own) - first) / 1e3,
                "to": (max(e.time_range.end for e in own) - first) / 1e3,
            }
        )
        by_name: dict[str, list[Any]] = defaultdict(list)
        for event in own:
            by_name[event.name].append(event)
        longest = sorted(by_name.items(), key=lambda item: -busy_us(item[1]))
        for name, found in longest[: OTHER_KERNELS if i else COMPUTE_KERNELS]:
            rows.append(
                {
                    "stream": "",
                    "what": name.replace("|", "/")[:NAME_LENGTH],
                    "calls": len(found),
                    "ms": busy_us(found) / 1e3,
                }
            )
    return rows


def busy_us(events: list[Any]) -> float:
    """Return the microseconds in which at least one of several events ran."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e.time_range.start):
        start, stop = event.time_range.start, event.time_range.end
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
