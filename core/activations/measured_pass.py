"""A pass that follows a plan, measured as a whole: its seconds and its peak."""

from __future__ import annotations

import numpy as np
import torch

from ..engine.advisor.planning import MeasuredStep
from .copies import KeptView, Profile, StoredCopy
from .local_copies import ReplayedCopy
from .moments import Moment, now, seconds_between
from .pass_record import NamedView, SavedBytes
from .sites import Site
from .step_recorder import watch_end

#: A hook that packs and takes so many times what most of its size do has waited for room as well.
WAITED = 1.5
#: Seconds that a hook of a tensor takes at most which is kept, or handed over as it is; what takes
#: longer has waited for room as well. No multiple of what most of them take, for these take a
#: microsecond where work is queued on a GPU, and where none is it waits for all that the host does.
MOST_HOOK_S = 300e-6


class MeasuredPass:
    """Measures a forward pass and its backward pass.

    The peak is that of the device's allocator; of a CPU, whose allocator does not count, that of
    saved tensors.

    Parameters
    ----------
    device : torch.device
        The device that is planned.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = SavedBytes()
        self._watched: set[int] = set()
        self._end: Moment | None = None
        self._peak_bytes = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        #: What hooks of tensors that are moved took.
        self._hooks: list[tuple[Moment, Moment]] = []
        #: What replays took, and of that the reads of what had to come back for them.
        self._replays: list[tuple[Moment, Moment]] = []
        self._within: list[tuple[Moment, Moment]] = []
        #: By number of such a hook, the codec and the bytes; what computes waits for it.
        self._packed: dict[int, tuple[str, int]] = {}
        #: Numbers of the hooks of tensors that are kept, or leave as they are.
        self._unpacked: list[int] = []
        #: When the forward pass was over, and how many hooks were.
        self._turn: tuple[Moment, int] | None = None
        self._begin = now(device)

    def saved(self, copy: StoredCopy, site: Site, flat: torch.Tensor, begin: Moment) -> None:
        """Count the bytes of a tensor that is moved, while they are here."""
        if copy.codec is None:
            self._unpacked.append(len(self._hooks))
        elif self._device.type == "cuda":
            self._packed[len(self._hooks)] = copy.codec.name, copy.nbytes
        self._hooks.append((begin, now(self._device)))
        root = copy.root()
        if root is not None:
            self._bytes.hold(root.untyped_storage())

    def kept(
        self, kept: NamedView, site: Site, t: torch.Tensor, flat: torch.Tensor, begin: Moment
    ) -> None:
        """Count the bytes of a tensor that is kept, and how long its hook waited for others."""
        self._unpacked.append(len(self._hooks))
        self._hooks.append((begin, now(self._device)))
        self._bytes.hold(t.untyped_storage())

    def again(self, copy: StoredCopy, name: str, begin: Moment) -> None:
        """Do nothing: the bytes are counted."""

    def end_forward(self) -> None:
        """Take note that the forward pass is over."""
        self._turn = now(self._device), len(self._hooks)

    def read(self, copy: StoredCopy, begin: Moment) -> None:
        """Time a read; unpacking is no compute, a replay is."""
        watch_end(self._watched, self._finish)
        took = begin, now(self._device)
        (self._replays if isinstance(copy, ReplayedCopy) else self._hooks).append(took)

    def read_within(self, copy: StoredCopy, begin: Moment) -> None:
        """Time what a replay reads: that is no replay, nor compute."""
        if not isinstance(copy, ReplayedCopy):
            self._within.append((begin, now(self._device)))

    def read_kept(self, kept: KeptView) -> None:
        """Take note of the backward pass."""
        watch_end(self._watched, self._finish)

    def held(self, storage: torch.UntypedStorage) -> None:
        """Count bytes that came back."""
        self._bytes.hold(storage)

    def replay_reads(self, name: str) -> bool:
        """Return False: no replays are tried."""
        return False

    def _finish(self) -> None:
        self._end = now(self._device)
        if self._device.type == "cuda":
            self._peak_bytes = torch.cuda.max_memory_allocated(self._device)
        else:
            self._peak_bytes = self._bytes.peak_bytes

    @property
    def is_over(self) -> bool:
        """Whether a backward pass has ended."""
        return self._end is not None

    def step(self) -> MeasuredStep:
        """Return what was measured, once it is over; waits for the device."""
        assert self._end is not None
        if self._device.type == "cuda":  # all of its streams
            torch.cuda.synchronize(self._device)
        compute_s = self._compute_s(self._end, len(self._hooks))
        forward_s = None if self._turn is None else self._compute_s(*self._turn)
        step_s = seconds_between(self._begin, self._end)
        within_s = sum(seconds_between(*each) for each in self._within)
        compute_s = max(0.0, compute_s - within_s)
        replay_s = max(0.0, sum(seconds_between(*each) for each in self._replays) - within_s)
        return MeasuredStep(
            step_s,
            self._peak_bytes,
            compute_s=compute_s,
            forward_compute_s=forward_s,
            replay_s=replay_s,
            hooks_s=None if self._turn is None else self._unpacked_s(self._turn[1]),
        )

    def _compute_s(self, end: Moment, hooks: int) -> float:
        """Return the seconds up to a moment but for those of as many hooks that do not pack."""
        hooks_s = [seconds_between(*each) for each in self._hooks[:hooks]]
        waited_s = sum(hooks_s) - self._packing_s(hooks_s)
        return max(0.0, seconds_between(self._begin, end) - waited_s)

    def _unpacked_s(self, hooks: int) -> float:
        """Return what those of as many hooks took that do not pack, but for waits for room."""
        return sum(
            min(seconds_between(*self._hooks[i]), MOST_HOOK_S) for i in self._unpacked if i < hooks
        )

    def _packing_s(self, hooks_s: list[float]) -> float:
        """Return what hooks packed in, without those seconds in which they waited for room."""
        by_size: dict[tuple[str, int], list[float]] = {}
        for i, packed in self._packed.items():
            if i < len(hooks_s):
                by_size.setdefault(packed, []).append(hooks_s[i])
        return sum(
            min(seconds, WAITED * float(np.median(took)))
            for took in by_size.values()
            for seconds in took
        )


def read_by(profile: Profile | None, copy: StoredCopy, begin: Moment | None, within: bool) -> None:
    """Record that a copy was read, by itself or `within` a replay, since a moment."""
    if profile is None or begin is None:
        return
    if not within:
        profile.read(copy, begin)
    elif isinstance(profile, MeasuredPass):
        profile.read_within(copy, begin)
