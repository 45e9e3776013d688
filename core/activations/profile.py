"""Profiles: what one pass over a model shows of its sites, to decide from.

Of each tensor that is moved: when it was saved and read, how many of its elements are zero, and the
size that each codec makes of it. What a profile launches on a GPU is read when the pass is over, so
that nothing waits for it.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass

import torch

from ..engine.advisor import SiteRecord
from ..engine.codecs import count_zeros
from ..engine.codecs.blob import HEADER_BYTES
from ..engine.kernels.cuda.stream import current_stream
from .copies import Moment, StoredCopy
from .policies import Codecs, may_be_lossy
from .sites import Site

#: Codecs encode so many bytes of a tensor, for their ratio.
SAMPLE_BYTES = 1 << 20
#: Taken from so many places of it.
SAMPLE_PIECES = 16
#: Share of zeros from which a tensor counts as sparse.
SPARSE_SHARE = 0.2


def now(device: torch.device) -> Moment:
    """Return the moment at which the work queued on a device so far is done."""
    if device.type != "cuda":
        return time.perf_counter()
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(current_stream(device))
    return event


def seconds_between(begin: Moment, end: Moment) -> float:
    """Return the seconds between two moments of one device, 0 where they are in another order."""
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float) and isinstance(end, float)
        return max(0.0, end - begin)
    return max(0.0, float(begin.elapsed_time(end)) / 1e3)


def sample_of(flat: torch.Tensor) -> torch.Tensor:
    """Return ``[m]`` of ``[n]`` elements, from places that lie evenly, `SAMPLE_BYTES` at most."""
    wanted = SAMPLE_BYTES // SAMPLE_PIECES // flat.element_size()
    rows = flat.shape[0] // SAMPLE_PIECES
    if rows <= wanted:
        return flat
    return flat[: rows * SAMPLE_PIECES].view(SAMPLE_PIECES, rows)[:, :wanted].reshape(-1)


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
    """

    def __init__(self, codecs: Codecs) -> None:
        self._codecs = codecs
        self._saved: dict[str, _Saved] = {}
        self._reads: list[_Saved] = []
        #: By device, when the forward pass ended.
        self._ends: dict[torch.device, Moment] | None = None

    def saved(self, copy: StoredCopy, site: Site, flat: torch.Tensor, begin: Moment) -> None:
        """Record a tensor that was moved, ``[n]``; its hook began at a moment, and ends now."""
        sample = sample_of(flat)
        used = {}
        with torch.no_grad():
            for name in self._codecs.candidates(may_be_lossy(site)):
                codec = self._codecs.for_site(name, site, flat)
                if codec is not None:
                    used[name] = codec.encode(sample).used_bytes.clone()
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

    def read(self, copy: StoredCopy, begin: Moment) -> None:
        """Record that a copy was read; its hook began at a moment, and ends now."""
        saved = self._saved.get(copy.name)
        if saved is None or saved.read is not None or saved.copy() is not copy:
            return
        saved.read = begin, now(saved.site.device)
        self._reads.append(saved)

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
        return all(isinstance(moment, float) or _passed(moment) for moment in moments)

    @property
    def is_used(self) -> bool:
        """Whether any tensor was saved and a backward pass has read one."""
        return bool(self._reads)

    def sites(self) -> dict[str, Site]:
        """Return the sites, in the order of the forward pass."""
        return {name: saved.site for name, saved in self._saved.items()}

    def records(self) -> dict[torch.device, list[SiteRecord]]:
        """Return the records of each device, in the order of the forward pass; waits for it."""
        assert self._ends is not None
        found: dict[torch.device, list[SiteRecord]] = {}
        for device, end in self._ends.items():
            saved = [s for s in self._saved.values() if s.site.device == device]
            forward = self._forward_seconds(saved, end)
            backward = self._backward_seconds(device)
            scalars = [t for s in saved for t in (s.zeros, *s.used.values())]
            numbers = iter(torch.stack(scalars).tolist())  # one copy for them all
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
    ratio = {
        # The header of a sample is that of the whole.
        name: (HEADER_BYTES + (n - HEADER_BYTES) * site.nbytes / saved.sample_bytes) / site.nbytes
        for name, n in used.items()
    }
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


def _passed(event: torch.cuda.Event) -> bool:
    passed: bool = event.query()  # type: ignore[no-untyped-call]
    return passed
