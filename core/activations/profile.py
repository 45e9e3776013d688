"""Profiles: what one pass over a model shows of its sites, to decide from.

Of each tensor that is moved: when it was saved and read, how many of its elements are zero, and the
size that each codec makes of it. What a profile launches on a GPU is read when the pass is over, so
that nothing waits for it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..engine.advisor import SiteRecord
from ..engine.codecs import count_zeros
from ..engine.codecs.blob import HEADER_BYTES
from ..engine.kernels.cuda.stream import current_stream
from .copies import StoredCopy
from .moments import Moment, has_passed, now, seconds_between
from .policies import Codecs
from .samples import sample_of
from .sites import Site

#: Share of zeros from which a tensor counts as sparse.
SPARSE_SHARE = 0.2


def encoded_bytes(
    codecs: Codecs, site: Site, flat: torch.Tensor, sample: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the used bytes of an encoded sample by codec, int64 ``[]`` each, without waiting."""
    used = {}
    for name in codecs.candidates(site):
        if name == codecs.lossy and codecs.rate is not None:
            continue  # whose share is that of its rate
        codec = codecs.for_site(name, site, flat)
        if codec is not None:
            used[name] = codec.encode(sample).used_bytes.clone()
    return used


def packed_share(used_bytes: int, nbytes: int, sample_bytes: int) -> float:
    """Return packed bytes over raw bytes of a tensor, from those of a sample of it."""
    # The header of a sample is that of the whole.
    return (HEADER_BYTES + (used_bytes - HEADER_BYTES) * nbytes / sample_bytes) / nbytes


@dataclass
class _Saved:
    """What a profile keeps of a tensor until the pass is over."""

    site: Site
    copy: weakref.ref[StoredCopy]
    begin: Moment
    end: Moment
    #: int64 ``[]`` on the device, and the number of elements that were counted.
    zeros: torch.Tensor
    elements: int
    #: By codec: int64 ``[]`` on the device, used bytes of the encoded sample.
    used: dict[str, torch.Tensor]
    sample_bytes: int
    read: tuple[Moment, Moment] | None = None


class PassProfile:
    """What one pass shows.

    Parameters
    ----------
    codecs : Codecs
        Whose ratios are wanted.

    Attributes
    ----------
    host_s : float
        Seconds that it took of the host so far.
    """

    def __init__(self, codecs: Codecs) -> None:
        self.host_s = 0.0
        self._codecs = codecs
        self._saved: dict[str, _Saved] = {}
        self._reads: list[_Saved] = []
        #: By device, when the forward pass ended.
        self._ends: dict[torch.device, Moment] | None = None
        #: By device, what was counted there, on its way to the host and when it is there.
        self._counted: dict[torch.device, tuple[torch.Tensor, Moment]] | None = None

    def saved(self, copy: StoredCopy, site: Site, flat: torch.Tensor, begin: Moment) -> None:
        """Record a tensor that was moved, ``[n]``; its hook began at a moment, and ends now."""
        with self._counted_time(), torch.no_grad():
            sample = sample_of(flat)
            used = encoded_bytes(self._codecs, site, flat, sample)
            zeros = count_zeros(flat)
        self._saved[copy.name] = _Saved(
            site,
            weakref.ref(copy),
            begin,
            now(flat.device),
            zeros,
            flat.shape[0],
            used,
            sample.nbytes,
        )

    @contextmanager
    def _counted_time(self) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self.host_s += time.perf_counter() - began_s

    def read(self, copy: StoredCopy, begin: Moment) -> None:
        """Record that a copy was read; its hook began at a moment, and ends now."""
        saved = self._saved.get(copy.name)
        if saved is None or saved.read is not None or saved.copy() is not copy:
            return
        saved.read = begin, now(saved.site.device)
        self._reads.append(saved)
        if self._ends is not None and len(self._reads) == len(self._saved):
            self._read_back()

    def end_forward(self) -> None:
        """Record that the forward pass is over."""
        devices = {saved.site.device for saved in self._saved.values()}
        self._ends = {device: now(device) for device in devices}

    @property
    def is_over(self) -> bool:
        """Whether all has been read that will be, and the device is done with it."""
        if self._ends is None:
            return False
        if any(s.read is None and s.copy() is not None for s in self._saved.values()):
            return False
        moments = [*self._ends.values(), *(s.read[1] for s in self._reads if s.read is not None)]
        if not all(map(has_passed, moments)):
            return False
        if self._counted is None:  # some were dropped
            self._read_back()
        assert self._counted is not None
        return all(has_passed(moment) for _, moment in self._counted.values())

    def _read_back(self) -> None:
        """Begin to copy what was counted to the host."""
        assert self._ends is not None
        with self._counted_time():
            self._counted = {device: self._to_host(device) for device in self._ends}

    def _saved_on(self, device: torch.device) -> list[_Saved]:
        return [s for s in self._saved.values() if s.site.device == device]

    def _to_host(self, device: torch.device) -> tuple[torch.Tensor, Moment]:
        """Begin to copy what was counted to the host, all at once; return when it is there."""
        scalars = [t for s in self._saved_on(device) for t in (s.zeros, *s.used.values())]
        assert self._ends is not None
        end = self._ends[device]
        if isinstance(end, torch.cuda.Event):  # all was counted before it, maybe on other streams
            end.wait(current_stream(device))
        counted = torch.stack(scalars)
        if device.type == "cuda":
            here = torch.empty(counted.shape, dtype=counted.dtype, pin_memory=True)
            counted = here.copy_(counted, non_blocking=True)
        return counted, now(device)

    @property
    def is_used(self) -> bool:
        """Whether any tensor was saved and a backward pass has read one."""
        return bool(self._reads)

    def sites(self) -> dict[str, Site]:
        """Return the sites, in the order of the forward pass."""
        return {name: saved.site for name, saved in self._saved.items()}

    def records(self) -> dict[torch.device, list[SiteRecord]]:
        """Return the records of each device, in the order of the forward pass, once it is over."""
        assert self._ends is not None and self._counted is not None
        found: dict[torch.device, list[SiteRecord]] = {}
        for device, end in self._ends.items():
            saved = self._saved_on(device)
            forward = self._forward_seconds(saved, end)
            backward = self._backward_seconds(device)
            numbers = iter(self._counted[device][0].tolist())
            found[device] = [
                _record(
                    s,
                    forward[s.site.name],
                    backward.get(s.site.name, 0.0),
                    next(numbers),
                    {name: next(numbers) for name in s.used},
                )
                for s in saved
            ]
        return found

    @staticmethod
    def _forward_seconds(saved: list[_Saved], end: Moment) -> dict[str, float]:
        """Return the seconds from each tensor's being saved to the next one's, or the end."""
        following = [s.begin for s in saved[1:]] + [end]
        return {
            s.site.name: seconds_between(s.end, until)
            for s, until in zip(saved, following, strict=True)
        }

    def _backward_seconds(self, device: torch.device) -> dict[str, float]:
        """Return the seconds from the read before each tensor's to its own; none for the first."""
        reads = [(s.site.name, s.read) for s in self._reads if s.site.device == device]
        seconds = {}
        before: Moment | None = None
        for name, read in reads:
            assert read is not None
            seconds[name] = 0.0 if before is None else seconds_between(before, read[0])
            before = read[1]
        return seconds


def _record(
    saved: _Saved, forward_s: float, backward_s: float, zeros: int, used: dict[str, int]
) -> SiteRecord:
    site = saved.site
    sparsity = zeros / max(1, saved.elements)
    ratio = {name: packed_share(n, site.nbytes, saved.sample_bytes) for name, n in used.items()}
    return SiteRecord(
        site=site.name,
        shape=tuple(site.shape),
        dtype=site.dtype,
        nbytes=site.nbytes,
        operation=site.operation,
        hidden_forward_s=forward_s,
        hidden_backward_s=backward_s,
        sparse=sparsity >= SPARSE_SHARE,
        ratio=ratio,
        sparsity=min(1.0, sparsity),
    )
