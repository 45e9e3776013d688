"""Bytes that crossed between a device and the host, and how long codecs took for them."""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..engine.codecs.blob import HEADER_BYTES, FlatCodec
from ..engine.tasks import ThreadTask
from ..engine.transfer import Mark
from .host_room import FETCHED_MARGIN, HostMemory, LearntSizes
from .moments import TIMED_EVERY, Moment, has_passed, now, seconds_between
from .stalls import Stalls


class SentBlob:
    """An encoded copy on its way to the host, whose size is not known there yet.

    Parameters
    ----------
    site : str
        Which saved it.
    codec_name : str
        What encoded it.
    nbytes, element_bytes : int
        Bytes before packing, and of an element.
    device : torch.device
        Where it was encoded.
    bound_bytes : int
        Most bytes that it may have.
    host : torch.Tensor or HostPiece
        On the host, the blob at its beginning; held until its header was read.
    stored : Event or ThreadTask
        When `host` is filled.

    Attributes
    ----------
    used_bytes : int or None
        Bytes that are used, once they are known; None where it failed or was cut off.
    is_known : bool
        Whether it is on the host and its header was read, or it failed.
    cut_off : bool
        Whether it turned out to be larger than `host`.
    reads : int
        How often it was brought back before that.
    """

    __slots__ = (
        "bound_bytes",
        "codec_name",
        "cut_off",
        "device",
        "element_bytes",
        "host",
        "is_known",
        "nbytes",
        "reads",
        "site",
        "stored",
        "used_bytes",
    )

    def __init__(
        self,
        site: str,
        codec_name: str,
        nbytes: int,
        element_bytes: int,
        device: torch.device,
        bound_bytes: int,
        host: HostMemory,
        stored: Mark,
    ) -> None:
        self.site, self.codec_name = site, codec_name
        self.nbytes, self.element_bytes, self.device = nbytes, element_bytes, device
        self.bound_bytes = bound_bytes
        self.host: HostMemory | None = host
        self.stored = stored
        self.used_bytes: int | None = None
        self.is_known = self.cut_off = False
        self.reads = 0


@dataclass
class TimedSwap:
    """An encoding or a decoding that is timed."""

    blob: SentBlob
    decodes: bool
    #: When it began and ended; as many as are known.
    moments: list[Moment]


#: Called with a blob of known size, whether it was decoded, and the seconds that took.
Observed = Callable[[SentBlob, bool, float], None]


class Traffic:
    """What crossed between one device and the host; its owner calls it under a lock.

    Parameters
    ----------
    device : torch.device
        The device.
    came_back : callable
        Called with a site, and the bytes before packing and as they crossed, for each copy that
        came back.
    observed : callable or None
        Called with what was timed; nothing is timed when None.

    Attributes
    ----------
    moved_out_bytes, moved_in_bytes : int
        Bytes before packing of the copies that went to the host and came back.
    crossed_out_bytes : int
        What crossed to the host for those whose size is known by now.
    peak_away_bytes : int
        Most bytes of saved tensors that were on the host alone, or on a disk, at one time.
    stalls : Stalls
        How long what computes has waited for copies.
    sizes : LearntSizes
        What blobs needed.
    """

    def __init__(
        self,
        device: torch.device,
        came_back: Callable[[str, int, int], None],
        observed: Observed | None,
    ) -> None:
        self._came_back, self._observed = came_back, observed
        self.moved_out_bytes = self.moved_in_bytes = 0
        self.crossed_out_bytes = self.peak_away_bytes = 0
        self.stalls = Stalls(device)
        self.sizes = LearntSizes()
        self._away_bytes = 0
        #: Blobs whose size is not known yet, and what is timed and not over; see `poll`.
        self.unknown: deque[SentBlob] = deque()
        self.timed: deque[TimedSwap] = deque()
        #: Of copies that are gone: filled by the garbage collector, which must take no lock.
        self.dropped: deque[int] = deque()
        self._turns = [0, 0]
        #: Of copies, in the order in which they are sent.
        self.numbers = itertools.count()

    def sent_raw(self, nbytes: int) -> None:
        """Count a copy that crosses to the host as it is."""
        self.moved_out_bytes += nbytes
        self.crossed_out_bytes += nbytes

    def sent(self, blob: SentBlob) -> None:
        """Count an encoded copy, and its size as soon as that is known."""
        self.moved_out_bytes += blob.nbytes
        self.unknown.append(blob)

    def fetched(self, site: str, nbytes: int, blob: SentBlob | None) -> None:
        """Count a copy that comes back, raw where it has no blob."""
        self.moved_in_bytes += nbytes
        if blob is None:
            self._came_back(site, nbytes, nbytes)
        elif blob.used_bytes is not None:
            self._came_back(site, nbytes, blob.used_bytes)
        else:
            blob.reads += 1

    def bytes_to_fetch(
        self, blob: SentBlob, stored: Mark, host: HostMemory, *, planned: bool
    ) -> tuple[int, bool]:
        """Return what an encoded copy comes back into, and whether its size is known.

        Where it is not, all that it may be, but where memory is `planned` what such copies need.
        """
        if blob.used_bytes is not None:
            return blob.used_bytes, True
        if is_done(stored):
            return used_bytes(host), True
        if not planned:
            return host.nbytes, False
        of = blob.site, blob.codec_name, blob.nbytes
        return self.sizes.room(*of, host.nbytes, FETCHED_MARGIN), False

    def left(self, nbytes: int) -> None:
        """Count bytes that are on the host alone from now on."""
        while self.dropped:
            self._away_bytes -= self.dropped.popleft()
        self._away_bytes += nbytes
        if self._away_bytes > self.peak_away_bytes:
            self.peak_away_bytes = self._away_bytes

    def returned(self, nbytes: int) -> None:
        """Count bytes that are on the device again."""
        self._away_bytes -= nbytes

    def is_due(self, decodes: bool) -> bool:
        """Return whether the next encoding or decoding is to be timed."""
        if self._observed is None:
            return False
        self._turns[decodes] += 1
        return self._turns[decodes] % TIMED_EVERY == 1

    def encoded(self, blob: SentBlob, moments: list[Moment]) -> None:
        """Time an encoding: what does it adds to `moments` when it begins and ends."""
        self.timed.append(TimedSwap(blob, False, moments))

    def decoded(self, blob: SentBlob, moments: list[Moment]) -> None:
        """Time a decoding, as `encoded`."""
        self.timed.append(TimedSwap(blob, True, moments))

    def poll(self) -> None:
        """Take note of sizes and times that are known by now; waits for nothing."""
        if self.stalls.timed:
            self.stalls.poll()
        while self.unknown and is_done(self.unknown[0].stored):
            self.learn(self.unknown.popleft())
        while self.timed:
            swap = self.timed[0]
            blob = swap.blob
            if not blob.is_known or not all(map(has_passed, swap.moments)):
                break  # its size is not known, or it is not over
            self.timed.popleft()
            if blob.used_bytes is not None and self._observed is not None:
                begin, end = swap.moments
                self._observed(blob, swap.decodes, seconds_between(begin, end))

    def learn(self, blob: SentBlob) -> None:
        """Take note of the size of a blob that is there, once."""
        host, blob.host = blob.host, None
        blob.is_known = True
        if host is None or failed(blob.stored):
            return
        needed = _header_bytes(host)
        if blob.bound_bytes >= needed > host.nbytes:
            blob.cut_off = True
            self.crossed_out_bytes += host.nbytes
        else:
            needed = blob.used_bytes = min(max(needed, HEADER_BYTES), host.nbytes)
            self.crossed_out_bytes += needed
        self.sizes.add(blob.site, blob.codec_name, blob.nbytes, needed)
        for _ in range(blob.reads):
            self._came_back(blob.site, blob.nbytes, needed)
        blob.reads = 0


def encode(
    swap: FlatCodec,
    flat: torch.Tensor,
    data: torch.Tensor,
    sm_budget: int | None,
    timing: list[Moment] | None,
) -> None:
    """Encode a tensor to a buffer, adding to `timing` when that begins and ends."""
    if timing is None:
        swap.encode(flat, data, sm_budget)
        return
    timing.append(now(flat.device))
    swap.encode(flat, data, sm_budget)
    timing.append(now(flat.device))


def used_bytes(data: HostMemory) -> int:
    """Return the used bytes of a blob on the host, as far as there are as many."""
    return min(max(_header_bytes(data), HEADER_BYTES), data.nbytes)


def _header_bytes(data: HostMemory) -> int:
    """Return what the header of a blob on the host says of its size; views would take 5 us."""
    return ctypes.c_int64.from_address(data.data_ptr()).value


def is_done(mark: Mark) -> bool:
    """Return whether a mark has passed; waits for nothing."""
    if isinstance(mark, ThreadTask):
        return mark.done()
    passed: bool = mark.query()
    return passed


def failed(mark: Mark) -> bool:
    """Return whether the work of a thread, which is done, has failed."""
    return isinstance(mark, ThreadTask) and mark.exception() is not None
