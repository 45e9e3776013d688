"""How long an all-to-all between the ranks of a group takes, by the bytes that a rank sends.

Measured at first use by all ranks together, and kept in the cache folder. All ranks get the same
figures: decisions that follow from them alone are the same everywhere.
"""

from __future__ import annotations

import math
import os
import platform
import zlib
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...errors import ArgumentError
from ...version import __version__
from .cache import machine_name, read_cached, write_cached
from .link import own_stream, work_seconds

KIND = "network"  # of files in the cache folder

#: Bytes to each other rank of the exchanges that are measured.
PROBE_BYTES = (8, 4 << 10, 64 << 10, 1 << 20, 8 << 20)
REPEATS = 5
#: No exchange is tried that would take longer.
MOST_SECONDS = 0.1
#: Variables that change the way between ranks of one machine.
VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NET", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True)
class NetworkModel:
    """Seconds of an all-to-all, linear between points that were measured.

    Parameters
    ----------
    points : tuple of (float, float)
        Bytes that a rank sends to all others together, and seconds; both rising, two points or
        more.

    Raises
    ------
    ArgumentError
        When points are not as above.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        """Refuse what is no rising sequence of positive numbers."""
        flat = [number for point in self.points for number in point]
        rise = all(
            a[0] < b[0] and a[1] <= b[1] for a, b in zip(self.points, self.points[1:], strict=False)
        )
        if len(self.points) < 2 or not rise or not all(0 < n < math.inf for n in flat):
            raise ArgumentError(f"points: {self.points!r:.80}, expected two that rise, or more")

    def seconds(self, n_bytes: float) -> float:
        """Return the seconds of an exchange in which a rank sends so many bytes to others."""
        sizes = [size for size, _ in self.points]
        at = min(max(bisect_right(sizes, n_bytes), 1), len(sizes) - 1)
        (low, low_s), (high, high_s) = self.points[at - 1], self.points[at]
        return max(self.points[0][1], low_s + (n_bytes - low) * (high_s - low_s) / (high - low))

    @property
    def fixed_s(self) -> float:
        """Seconds of an exchange of almost nothing."""
        return self.points[0][1]

    @property
    def bytes_per_s(self) -> float:
        """Rate of what is sent in addition, in large exchanges."""
        (low, low_s), (high, high_s) = self.points[-2:]
        return (high - low) / max(high_s - low_s, 1e-9)


def network_model(group: dist.ProcessGroup, device: torch.device) -> NetworkModel | None:
    """Return the model of a group, measured where it is not known; all its ranks call it at once.

    Parameters
    ----------
    group : ProcessGroup
        Of torch, with a backend for the device.
    device : torch.device
        Where the tensors are that cross.

    Returns
    -------
    NetworkModel or None
        None of a group of one rank.

    Raises
    ------
    RuntimeError
        When a collective fails.
    """
    others = group.size() - 1
    if not others:
        return None
    key = _key(group, device)
    known = _read(key)
    # A rank whose folder has no figures makes all measure.
    seconds = torch.tensor(known or [-1.0] * len(PROBE_BYTES), dtype=torch.float64, device=device)
    have = torch.tensor([float(known is not None)], dtype=torch.float64, device=device)
    dist.all_reduce(have, dist.ReduceOp.MIN, group=group)
    if float(have):
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
        found = seconds.tolist()
    else:
        found = _measure(group, device)
        write_cached(KIND, key, {"seconds": found})
    return _model(found, others)


def _model(seconds: list[float], others: int) -> NetworkModel:
    points: list[tuple[float, float]] = []
    for n_bytes, took in zip(PROBE_BYTES, seconds, strict=True):
        if took > 0:
            points.append((float(n_bytes * others), max([took, *(s for _, s in points)])))
    return NetworkModel(tuple(points))


def _key(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return what figures are kept by: hosts in the order of ranks, backend, variables."""
    host = torch.tensor([zlib.crc32(platform.node().encode())], device=device)
    hosts = [torch.empty_like(host) for _ in range(group.size())]
    dist.all_gather(hosts, host, group=group)
    variables = [f"{name}={os.environ.get(name, '')}" for name in VARIABLES]
    backend = dist.get_backend_config(group)
    names = " ".join(str(int(each)) for each in hosts)
    return " | ".join([machine_name(device), __version__, str(backend), names, *variables])


def _read(key: str) -> list[float] | None:
    found = (read_cached(KIND, key) or {}).get("seconds")
    sound = (
        isinstance(found, list)
        and len(found) == len(PROBE_BYTES)
        and all(isinstance(s, float) and math.isfinite(s) for s in found)
        and min(found[:2]) > 0
    )
    return found if sound else None


def _measure(group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Return the seconds of each of PROBE_BYTES, -1 of those that were left out."""
    found = [-1.0] * len(PROBE_BYTES)
    with own_stream(device):
        for i, n_bytes in enumerate(PROBE_BYTES):
            sent = torch.zeros(group.size() * n_bytes, dtype=torch.uint8, device=device)
            received = torch.empty_like(sent)
            exchange = partial(distributed_c10d.all_to_all_single, received, sent, group=group)
            took = []
            for _ in range(1 + REPEATS):
                dist.all_reduce(torch.zeros(1, device=device), group=group)  # all begin at once
                took.append(work_seconds(device, exchange))
            # The first one may make connections. What the slowest rank takes counts.
            best = torch.tensor([min(took[1:])], dtype=torch.float64, device=device)
            dist.all_reduce(best, dist.ReduceOp.MAX, group=group)
            found[i] = float(best)
            larger = PROBE_BYTES[i + 1 : i + 2]
            if i and larger and found[i] * larger[0] / n_bytes > MOST_SECONDS:
                break
    return found
