"""What a step waits for its swaps: many plans at once, on one of two models of the step.

A plan is an option for each site: moved raw, packed by a codec, or not at all. `LinkQueue` charges
what compute cannot hide of two queues, one each way, as if each pass waited for all of its copies.
`StepTimeline` follows the copies of a step through what `bitslab.activations` does with them:
compute waits where too many bytes are on their way to the host, goes on into the backward pass
while others still cross, and finds there what was never given up; copies come back a few tensors
ahead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ArgumentError, ArgumentTypeError

Seconds = npt.NDArray[np.float64]
#: Options ``[N, B]``: of each site, in each of B plans.
Plans = npt.NDArray[np.intp]

#: Plans that are followed at once: more of them leave the processor's cache.
MOST_AT_ONCE = 1024


@dataclass(frozen=True)
class SwapLimits:
    """How far copies may be behind what computes, and before what reads them.

    Parameters
    ----------
    in_flight_bytes : int
        Device memory of originals whose raw copies are under way, at most: compute waits for the
        oldest. Encoded copies that wait for the link take as much at most besides.
    depth : int
        Copies that are fetched before they are read, of `in_flight_bytes` at most, one excepted.
    staged_copies : int
        So many of the last encoded copies are not counted, from 1 on.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When they are no numbers from 0.
    """

    in_flight_bytes: int
    depth: int
    staged_copies: int = 2

    def __post_init__(self) -> None:
        for name, least in (("in_flight_bytes", 0), ("depth", 0), ("staged_copies", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ArgumentTypeError(f"{name}: expected an int, got {value!r:.60}")
            if value < least:
                raise ArgumentError(f"{name}: {value}, accepted are numbers from {least}")


@dataclass(frozen=True)
class OptionTable:
    """What each option of each site takes, ``[N, K + 1]``; the last one does not move the tensor.

    Parameters
    ----------
    to_host_s, to_device_s : array
        Seconds on the link.
    encode_s, decode_s : array
        Seconds of the codec.
    moved_bytes : array
        Bytes before packing: 0 where nothing is moved.
    packed : array of bool
        Whether a codec packs them.
    """

    to_host_s: Seconds
    to_device_s: Seconds
    encode_s: Seconds
    decode_s: Seconds
    moved_bytes: Seconds
    packed: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, sites: Sequence[Sequence[Sequence[float]]], nbytes: Sequence[float]) -> OptionTable:
        """Return the table of sites with several options.

        Parameters
        ----------
        sites : sequence
            For each site its options, raw first: seconds to the host, to the device, of encoding
            and of decoding.
        nbytes : sequence of float
            Bytes of each site.
        """
        most = max((len(options) for options in sites), default=1)
        table = np.zeros((4, len(sites), most + 1))
        packed = np.zeros((len(sites), most + 1), np.bool_)
        for i, options in enumerate(sites):
            for k in range(most):  # options that a site has not are its last one
                table[:, i, k] = options[min(k, len(options) - 1)]
                packed[i, k] = 0 < min(k, len(options) - 1)
        moved = np.repeat(np.asarray(nbytes, np.float64)[:, None], most + 1, axis=1)
        moved[:, most:] = 0.0
        return cls(table[0], table[1], table[2], table[3], moved, packed)

    def taken(self, plans: Plans) -> OptionTable:
        """Return what plans take, each part ``[N, B]``."""
        rows = np.arange(plans.shape[0])[:, None]
        parts: list[Any] = [getattr(self, name)[rows, plans] for name in self.__dataclass_fields__]
        return OptionTable(*parts)


class StepModel(ABC):
    """Seconds that swapping adds to a step.

    Parameters
    ----------
    table : OptionTable
        The options.
    forward_s, backward_s : sequence of float
        Of each site, as `SiteRecord` has them.
    """

    def __init__(
        self, table: OptionTable, forward_s: Sequence[float], backward_s: Sequence[float]
    ) -> None:
        self.table = table
        self.forward_s = np.asarray(forward_s, np.float64)
        self.backward_s = np.asarray(backward_s, np.float64)

    def seconds(self, plans: Plans) -> Seconds:
        """Return the seconds ``[B]`` that a step takes longer with each of the plans ``[N, B]``."""
        parts = [
            self._seconds(self.table.taken(plans[:, at : at + MOST_AT_ONCE]))
            for at in range(0, plans.shape[1], MOST_AT_ONCE)
        ]
        return np.concatenate(parts) if parts else np.zeros(0)

    @abstractmethod
    def _seconds(self, taken: OptionTable) -> Seconds:
        """Return the seconds of plans, so few that they are followed at once."""


class LinkQueue(StepModel):
    """Charges what is left of the copies when the forward pass ends, and how late one comes back.

    As in CSWAP+ (equations 4 to 6), but the copies of all sites share the link.
    """

    def _seconds(self, taken: OptionTable) -> Seconds:
        total: Seconds = taken.encode_s.sum(axis=0) + taken.decode_s.sum(axis=0)
        # To the host: those from site j on follow each other once j is there, and end late by what
        # exceeds the compute left. To the device, where the last sites are read first and all may
        # come as soon as the pass begins: those from j on must be there when j is read.
        for link_s, hidden_s in (
            (taken.to_host_s, self.forward_s),
            (taken.to_device_s, self.backward_s),
        ):
            late = np.cumsum((link_s - hidden_s[:, None])[::-1], axis=0)
            total = total + late.max(axis=0, initial=0.0)
        return total


class StepTimeline(StepModel):
    """Follows the copies of a step, in the order in which streams work.

    Encoding and decoding are charged to what computes: they take the device's memory and
    multiprocessors while they run, wherever they are queued. In the forward pass a site's tensor
    crosses behind those before it. Compute waits where more than `SwapLimits.in_flight_bytes` of
    originals would be read by raw copies, or of encoded copies wait for the link. An original that
    was not given up until the backward pass is read there for nothing, and an encoded copy that is
    still on the device is decoded there. No step is shorter than what
    its copies take on the link to the host.

    Parameters
    ----------
    table, forward_s, backward_s
        As for `StepModel`; the backward pass reads the sites in reverse.
    limits : SwapLimits
        What is under way at most.
    """

    def __init__(
        self,
        table: OptionTable,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        limits: SwapLimits,
    ) -> None:
        super().__init__(table, forward_s, backward_s)
        self._limits = limits
        nbytes = table.moved_bytes.max(axis=1) if len(self.forward_s) else np.zeros(0)
        self._fetches = self._fetch_order(nbytes.tolist())
        self._may_wait = float(nbytes.sum()) > limits.in_flight_bytes

    def _fetch_order(self, nbytes: list[float]) -> list[list[int]]:
        """Return the sites whose fetch begins when each site was read, in order."""
        begun: set[int] = set()
        fetches: list[list[int]] = [[] for _ in nbytes]
        for i in range(len(nbytes) - 1, -1, -1):
            begun.add(i)
            ahead_bytes = 0.0
            for j in range(i - 1, max(-1, i - 1 - self._limits.depth), -1):
                if ahead_bytes and ahead_bytes + nbytes[j] > self._limits.in_flight_bytes:
                    break
                ahead_bytes += nbytes[j]
                if j not in begun:
                    begun.add(j)
                    fetches[i].append(j)
        return fetches

    def _seconds(self, taken: OptionTable) -> Seconds:
        n, plans = taken.moved_bytes.shape
        clock, sent, is_there, is_staged = self._forward(taken)
        decode_s = np.where(is_there, 0.0, taken.decode_s)
        moved = (taken.moved_bytes > 0) & ~is_there & ~is_staged
        link = np.zeros(plans)
        arrived = np.zeros((n, plans))
        begun = np.zeros(n, np.bool_)

        def fetch(i: int) -> None:
            begun[i] = True
            there = np.maximum(np.maximum(clock, link), sent[i]) + taken.to_device_s[i]
            np.copyto(link, there, where=moved[i])
            np.copyto(arrived[i], there, where=moved[i])

        for i in range(n - 1, -1, -1):
            clock += self.backward_s[i]
            if not begun[i]:
                fetch(i)
            np.maximum(clock, arrived[i], out=clock)
            clock += decode_s[i]
            for j in self._fetches[i]:
                fetch(j)
        # What is behind when a step ends is still to be sent in the next one.
        clock = np.maximum(clock, taken.to_host_s.sum(axis=0, where=taken.moved_bytes > 0))
        return np.asarray(clock - self.forward_s.sum() - self.backward_s.sum())

    def _forward(
        self, taken: OptionTable
    ) -> tuple[Seconds, Seconds, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Follow the forward pass.

        Returns
        -------
        clock : array
            ``[B]``, when it ends.
        sent : array
            ``[N, B]``, when each site's copy has crossed.
        is_there : array of bool
            ``[N, B]``, whether the original is still there then: of the last ones that were packed,
            as of raw copies under way.
        is_staged : array of bool
            ``[N, B]``, whether the encoded copy is still on the device.
        """
        n, plans = taken.moved_bytes.shape
        raw_bytes = np.where(taken.packed, 0.0, taken.moved_bytes)
        clock, link = np.zeros(plans), np.zeros(plans)
        # Row i: of the sites before i, when the link is through with them.
        sent = np.zeros((n + 1, plans))
        raw = _InFlight(n, plans, self._limits.in_flight_bytes)
        staged = _InFlight(n, plans, self._limits.in_flight_bytes)
        # Bytes of staged copies but for the last one, the last two, ...
        older = [np.zeros(plans) for _ in range(self._limits.staged_copies)]
        for i in range(n):
            clock += taken.encode_s[i]
            link = np.where(
                taken.moved_bytes[i] > 0, np.maximum(link, clock) + taken.to_host_s[i], link
            )
            sent[i + 1] = link
            is_packed = taken.packed[i]
            for k in range(len(older) - 1, 0, -1):
                np.copyto(older[k], older[k - 1], where=is_packed)
            np.copyto(older[0], staged.total(i), where=is_packed)
            staged.add(i, taken.moved_bytes[i] * is_packed)
            raw.add(i, raw_bytes[i])
            if self._may_wait:
                np.maximum(clock, sent[raw.oldest(raw.total(i + 1)), raw.columns], out=clock)
                np.maximum(clock, sent[staged.oldest(older[-1]), staged.columns], out=clock)
            clock += self.forward_s[i]
        numbers = np.arange(n)[:, None]
        is_there = (raw_bytes > 0) & (numbers >= raw.first)
        is_there |= taken.packed & (staged.totals[:-1] >= older[-1])
        is_staged = taken.packed & (numbers >= staged.first)
        return clock, sent[1:], is_there, is_staged


class _InFlight:
    """Bytes that are on their way to the host, of sites in order, by plan.

    Parameters
    ----------
    sites, plans : int
        How many.
    most_bytes : float
        As many remain under way at most.

    Attributes
    ----------
    totals : array
        ``[N + 1, B]``, row i: bytes of the sites before i.
    first : array of int
        ``[B]``, the first site that may still be under way.
    """

    def __init__(self, sites: int, plans: int, most_bytes: float) -> None:
        self.totals = np.zeros((sites + 1, plans))
        self.first = np.zeros(plans, np.intp)
        self.columns = np.arange(plans)
        self._most_bytes = most_bytes

    def add(self, i: int, nbytes: Seconds) -> None:
        """Add those of site `i`."""
        np.add(self.totals[i], nbytes, out=self.totals[i + 1])

    def total(self, i: int) -> Seconds:
        """Return the bytes of the sites before `i`."""
        found: Seconds = self.totals[i]
        return found

    def oldest(self, total: Seconds) -> npt.NDArray[np.intp]:
        """Return `first` when as many of `total` bytes are under way as may be."""
        while True:
            over = total - self.totals[self.first, self.columns] > self._most_bytes
            if not over.any():
                return self.first
            self.first += over
