"""What one step shows of its saved tensors, to plan from: bytes, moments, replays, modules.

The clock is compute alone: what the hooks themselves take, copies in them included, is not in it.
On a GPU moments are events; what is counted there is read once, when the step is over.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..engine.advisor import SwapLink
from ..engine.advisor.planning import ModuleProfile, Packing, SiteProfile, StepProfile
from ..engine.versions import version_of
from .copies import KeptView, StoredCopy
from .identity import Span, copied_span, root_of, span_of
from .moments import Moment, now, seconds_between
from .pass_record import NamedView, SavedBytes, record_of
from .policies import Codecs
from .profile import encoded_bytes, packed_share
from .replay_trials import TriedReplay, exact_replays, tried_replay
from .samples import sample_of
from .sites import Site, are_inside, module_of_sites

#: Returns the seconds of encoding and decoding: of a codec, bytes, packed share, element bytes.
PackingTimes = Callable[[str, int, float, int], tuple[float, float] | None]
#: Saves that follow each other sooner are taken to be of one operation.
SAME_OPERATION_S = 3e-5
#: What a step must have moved of its bytes for its copies to tell the link's rates: a full host, or
#: a disk that has had its bytes of the day, takes a few small tensors alone.
LEAST_MOVED_SHARE = 0.1
#: Modules that save fewer tensors are not worth computing again.
LEAST_MODULE_SITES = 2


@dataclass(frozen=True)
class _Event:
    """A hook, or a moment without one."""

    begin: Moment
    end: Moment
    #: Most bytes of the device since the event before, and those of saved tensors at its end.
    peak_bytes: int
    alive_bytes: int
    #: Number of the node of autograd that reads; -1 for other events.
    node: int = -1


@dataclass(eq=False)
class _Saved:
    """A tensor that was saved first of those over its bytes."""

    site: Site
    nbytes: int
    span: Span
    root: weakref.ref[torch.Tensor]
    version: int
    #: Number of its storage.
    storage: int
    saved: int
    movable: bool
    used: dict[str, torch.Tensor] = field(default_factory=dict)
    sample_bytes: int = 1
    #: By codec the device memory that packing takes, where the host learns the size later.
    staged_bytes: dict[str, int] = field(default_factory=dict)
    replay: TriedReplay | None = None
    #: Of a tensor that was moved: the first event after the forward pass itself gave it up.
    released: int | None = None
    first_read: int | None = None
    last_read: int | None = None


@dataclass(eq=False)
class ModuleRun:
    """A forward pass of a module that may be checkpointed.

    Parameters
    ----------
    begin, end : int
        Numbers of the events at which it began and ended.
    inputs : list of (int, int)
        Numbers of the storages of its inputs, and their bytes.
    why_not : str
        Why it cannot be computed again; "" where it can.
    """

    begin: int
    end: int = -1
    inputs: list[tuple[int, int]] = field(default_factory=list)
    why_not: str = ""


@dataclass(frozen=True)
class RecordedStep:
    """A step to plan.

    Parameters
    ----------
    profile : StepProfile
        What it showed.
    views : mapping of str to str
        By site that saves a view of what another one has saved, that one.
    unread : frozenset of str
        Sites that save what no pass has read.
    replays : mapping of str to tuple
        By site, the signature of the replay that was found exact.
    not_checkpointed : mapping of str to str
        By module, why it is not computed again.
    """

    profile: StepProfile
    views: Mapping[str, str]
    unread: frozenset[str]
    replays: Mapping[str, tuple[Any, ...]]
    not_checkpointed: Mapping[str, str]


class StepRecorder:
    """Records one forward pass and its backward pass.

    Parameters
    ----------
    codecs : Codecs
        Whose ratios are wanted.
    device : torch.device
        Whose tensors are planned.
    select : callable or None
        Which sites may be moved; all when None.
    replays : bool
        Whether replays are tried.
    """

    def __init__(
        self,
        codecs: Codecs,
        device: torch.device,
        select: Callable[[Site], bool] | None,
        replays: bool,
    ) -> None:
        self._codecs, self.device, self._select = codecs, device, select
        self._replays = replays
        self.bytes = SavedBytes()
        self._events: list[_Event] = []
        self._saved: dict[str, _Saved] = {}
        self._first_of: dict[str, str] = {}
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._over: dict[int, list[_Saved]] = {}
        self._numbers = 0
        self._alive: list[weakref.ref[Any]] = []
        self._probing: list[str] | None = None
        self._releases: list[weakref.ref[torch.UntypedStorage]] = []
        self._moved: list[tuple[int, Moment, Moment]] = []
        self._brought: list[tuple[int, Moment, Moment]] = []
        #: Names of copies that are on the device again.
        self._returned: set[str] = set()
        self.modules: dict[str, list[ModuleRun]] = {}
        self._forward_end: int | None = None
        self._end: int | None = None
        self._watched: set[int] = set()
        self._event(self._now())

    def _now(self) -> Moment:
        return now(self.device)

    def _peak_bytes(self) -> int:
        """Return the most bytes of a GPU since the last event."""
        if self.device.type != "cuda":
            return 0
        return torch.cuda.max_memory_allocated(self.device)

    def _event(self, begin: Moment, node: int = -1, peak_bytes: int | None = None) -> int:
        """Record an event that began then and ends now; return its number.

        `peak_bytes` was read before the hook itself took memory, where it did.
        """
        peak = self._peak_bytes() if peak_bytes is None else peak_bytes
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._events.append(_Event(begin, self._now(), peak, self.bytes.alive_bytes, node))
        return len(self._events) - 1

    # Saving

    def saved(self, copy: StoredCopy, site: Site, flat: torch.Tensor, begin: Moment) -> None:
        """Record a tensor that was moved, ``[n]``; its hook began at a moment, and ends now."""
        if site.device != self.device:
            return
        self._moved.append((copy.nbytes, begin, self._now()))
        root = copy.root()
        if root is not None:
            storage = root.untyped_storage()
            found = self._add(copy, site, root, storage, copy.span, flat, begin)

            def release(_: object) -> None:
                found.released = len(self._events)

            self._releases.append(weakref.ref(storage, release))

    def kept(
        self, kept: NamedView, site: Site, t: torch.Tensor, flat: torch.Tensor, begin: Moment
    ) -> None:
        """Record a tensor that is kept; its hook began at a moment, and ends now."""
        if site.device != self.device:
            return
        root, storage = root_of(t), t.untyped_storage()
        own = span_of(t)
        for each in self._over.get(self._number_of(storage), ()):
            same = each.root() is root and each.version == version_of(t)
            if same and each.span.holds(own):
                self._first_of[kept.name] = each.site.name
                self._event(begin)
                return
        span = copied_span(own, span_of(root), t.element_size())
        self._add(kept, site, root, storage, span, flat, begin)

    def again(self, copy: StoredCopy, name: str, begin: Moment) -> None:
        """Record that a site saved a view of a copy that there is."""
        self._first_of[name] = copy.name
        self._event(begin)

    def _number_of(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage, which no other one gets."""
        found = self._storages.get(id(storage))
        if found is None or found[0]() is not storage:
            self._numbers += 1
            found = self._storages[id(storage)] = weakref.ref(storage), self._numbers
        return found[1]

    def _add(
        self,
        held: StoredCopy | NamedView,
        site: Site,
        root: torch.Tensor,
        storage: torch.UntypedStorage,
        span: Span,
        flat: torch.Tensor,
        begin: Moment,
    ) -> _Saved:
        peak_bytes = self._peak_bytes()  # samples and replays that are tried are no step's
        self.bytes.hold(storage)
        self._alive.append(weakref.ref(held))
        number = self._number_of(storage)
        others = self._over.setdefault(number, [])
        movable = self._select is None or self._select(site)
        found = _Saved(
            site, site.nbytes, span, weakref.ref(root), version_of(root), number, -1, movable
        )
        for other in others:  # what moves one of them gives no memory back
            other.movable = found.movable = False
            found.nbytes = 0
        if found.movable:
            sample = sample_of(flat)
            found.sample_bytes = sample.nbytes
            with torch.no_grad():
                found.used = encoded_bytes(self._codecs, site, flat, sample)
            if self.device.type == "cuda":
                found.staged_bytes = self._codecs.most_bytes(found.used, site, flat)
            whole = span == Span(0, root.nbytes)
            if self._replays and whole and not root.storage_offset():
                found.replay = self._try_replay(root, held)
        others.append(found)
        self._saved[site.name] = found
        found.saved = self._event(begin, peak_bytes=peak_bytes)
        return found

    def _try_replay(self, root: torch.Tensor, held: StoredCopy | NamedView) -> TriedReplay | None:
        operands = record_of(held).operands
        if operands is None:
            return None
        self._probing = []
        try:
            found = tried_replay(root, operands, self._now)
            if found is not None:
                read = dict.fromkeys(self._first_of.get(n, n) for n in self._probing)
                found.sources = tuple(read)
            return found
        finally:
            self._probing = None

    def held(self, storage: torch.UntypedStorage) -> None:
        """Record bytes on the device that the backward pass needs."""
        self.bytes.hold(storage)

    def end_forward(self) -> None:
        """Record that the forward pass is over."""
        self._forward_end = self._event(self._now())

    # Modules

    def enter_module(self, name: str, inputs: Iterable[torch.Tensor], why_not: str) -> None:
        """Record that a module begins."""
        run = ModuleRun(self._event(self._now()), why_not=why_not)
        for t in inputs:
            storage = t.untyped_storage()
            run.inputs.append((self._number_of(storage), storage.nbytes()))
        self.modules.setdefault(name, []).append(run)

    def leave_module(self, name: str, why_not: str) -> None:
        """Record that a module ends, and maybe why it cannot be computed again."""
        run = self.modules[name][-1]
        run.end = self._event(self._now())
        run.why_not = run.why_not or why_not

    # Reading

    def replay_reads(self, name: str) -> bool:
        """Record a read that is part of a replay being tried; return whether it was."""
        if self._probing is None:
            return False
        self._probing.append(name)
        self._returned.add(self._first_of.get(name, name))
        return True

    def read(self, copy: StoredCopy, begin: Moment) -> None:
        """Record that a copy was read; its hook began at a moment, and ends now."""
        # What several saved tensors are views of comes back once.
        if copy.original is None and copy.device == self.device and copy.name not in self._returned:
            self._returned.add(copy.name)
            self._brought.append((copy.nbytes, begin, self._now()))
        self._read(copy.name, begin)

    def read_kept(self, kept: KeptView) -> None:
        """Record that a tensor that was kept is read."""
        self._read(self._first_of.get(kept.name, kept.name), self._now())

    def _read(self, name: str, begin: Moment) -> None:
        found = self._saved.get(name)
        if found is None or self._forward_end is None or self._end is not None:
            return
        watch_end(self._watched, self._end_backward)
        node = torch._C._current_autograd_node()
        found.last_read = self._event(begin, -1 if node is None else node._sequence_nr())
        if found.first_read is None:
            found.first_read = found.last_read

    def _end_backward(self) -> None:
        if self._end is None:
            self._end = self._event(self._now())

    @property
    def is_over(self) -> bool:
        """Whether the backward pass ended, or all was dropped."""
        if self._forward_end is None:
            return False
        return self._end is not None or all(ref() is None for ref in self._alive)

    @property
    def is_used(self) -> bool:
        """Whether a backward pass has read anything, and ended."""
        return self._end is not None

    # What it showed

    @property
    def saved_bytes(self) -> dict[str, int]:
        """Bytes by site, without those that save a view of what another one has saved."""
        return {name: each.nbytes for name, each in self._saved.items()}

    def recorded(
        self,
        times: PackingTimes,
        link: SwapLink | None,
        candidates: Sequence[str],
        earlier: StepRecorder | None = None,
    ) -> RecordedStep:
        """Return the step, once it is over; waits for the device.

        Parameters
        ----------
        times : callable
            Predicts codecs; None of one that is not known.
        link : SwapLink or None
            What tensors cross; as this step's copies have shown where it moved any.
        candidates : sequence of str
            Modules that may be checkpointed.
        earlier : StepRecorder, optional
            Of a step before; where it saved as much in the same events, the times of the shorter
            one count, since what else runs on a machine only makes them longer.
        """
        assert self._end is not None and self._forward_end is not None
        gaps = self.gaps_s()
        if earlier is not None and earlier.is_used and earlier.saved_bytes == self.saved_bytes:
            before = earlier.gaps_s()
            if len(before) == len(gaps):
                gaps = min(gaps, before, key=sum)
        clock = [0.0, *itertools.accumulate(gaps)]
        read = {name: each for name, each in self._saved.items() if each.first_read is not None}
        savers = self._savers()
        modules, why_not = self._modules(clock, read, candidates, savers)
        module_of = {name: module_of_sites(savers.get(name, (name,)), modules) for name in read}
        exact = exact_replays({name: each.replay for name, each in read.items()})
        turn_s, end_s = clock[self._forward_end], clock[self._end]
        sites = []
        for name, each in read.items():
            replay = exact.get(name)
            if replay is not None and not set(replay.sources) <= set(read):
                replay = None
                del exact[name]
            sites.append(self._site(each, clock, module_of[name], times, replay))
        profile = StepProfile(
            sites=tuple(sites),
            turn_s=turn_s,
            end_s=end_s,
            modules=tuple(modules.values()),
            other_bytes=self._other_bytes(clock),
            link=self._link(link),
        )
        unread = frozenset(set(self._saved) - set(read))
        signatures = {name: replay.signature for name, replay in exact.items()}
        return RecordedStep(profile, dict(self._first_of), unread, signatures, why_not)

    def gaps_s(self) -> list[float]:
        """Return the seconds of compute before each event but the first; waits for the device."""
        assert self._end is not None
        if self.device.type == "cuda":  # all of its streams
            torch.cuda.synchronize(self.device)
        return [
            seconds_between(before.end, after.begin)
            for before, after in zip(self._events, self._events[1:], strict=False)
        ]

    def _site(
        self,
        saved: _Saved,
        clock: list[float],
        module: str,
        times: PackingTimes,
        replay: TriedReplay | None,
    ) -> SiteProfile:
        assert self._forward_end is not None and self._end is not None
        assert saved.first_read is not None and saved.last_read is not None
        site, turn_s = saved.site, clock[self._forward_end]
        packings = {}
        for name, used in saved.used.items():
            share = packed_share(int(used), site.nbytes, saved.sample_bytes)
            took = times(name, site.nbytes, share, site.dtype.itemsize)
            if took is not None:
                staged_share = saved.staged_bytes.get(name, 0) / max(site.nbytes, 1)
                packings[name] = Packing(share, *took, staged_share)
        read_s = max(clock[saved.first_read], turn_s)
        return SiteProfile(
            site=site.name,
            nbytes=saved.nbytes,
            saved_s=min(clock[saved.saved], turn_s),
            released_s=min(self._released_s(clock, saved), turn_s),
            read_s=read_s,
            freed_s=max(self._freed_s(clock, saved.last_read), read_s),
            module=module,
            movable=saved.movable,
            packings=packings,
            replay_s=None if replay is None else seconds_between(replay.begin, replay.end),
            replay_from=() if replay is None else replay.sources,
        )

    def _released_s(self, clock: list[float], saved: _Saved) -> float:
        """Return until when the forward pass uses a tensor.

        Of one that was kept the end of the operation that saves it.
        """
        if saved.released is not None:
            return clock[min(max(saved.released, saved.saved + 1), len(clock) - 1)]
        at = saved.saved + 1
        while clock[at] - clock[at - 1] < SAME_OPERATION_S and at < len(clock) - 1:
            at += 1
        return clock[at]

    def _freed_s(self, clock: list[float], read: int) -> float:
        """Return when the operation is done that reads a tensor."""
        assert self._end is not None
        node, at = self._events[read].node, read + 1
        while at < self._end and node >= 0 and self._events[at].node == node:
            at += 1
        return clock[min(at, self._end)]

    def _savers(self) -> dict[str, list[str]]:
        """Return all sites that save a tensor, by the first one, where there are several."""
        found: dict[str, list[str]] = {}
        for name, first in self._first_of.items():
            found.setdefault(first, [first]).append(name)
        return found

    def _modules(
        self,
        clock: list[float],
        read: Mapping[str, _Saved],
        candidates: Sequence[str],
        savers: Mapping[str, list[str]],
    ) -> tuple[dict[str, ModuleProfile], dict[str, str]]:
        """Return the modules that may be checkpointed, and why others may not."""
        assert self._forward_end is not None and self._end is not None
        found: dict[str, ModuleProfile] = {}
        why_not: dict[str, str] = {}
        counted: set[int] = set()
        for name in candidates:
            runs = self.modules.get(name, [])
            own = {n: each for n, each in read.items() if are_inside(savers.get(n, (n,)), name)}
            if len(runs) != 1 or runs[0].end < 0:
                why_not[name] = f"It ran {len(runs)} times."
            elif runs[0].why_not:
                why_not[name] = runs[0].why_not
            elif len(own) < LEAST_MODULE_SITES:
                why_not[name] = f"It saves {len(own)} tensors."
            if name in why_not:
                continue
            run = runs[0]
            kept = 0
            for number, nbytes in run.inputs:
                sites = (each.site.name for each in self._over.get(number, ()))
                if not all(are_inside(savers.get(site, (site,)), name) for site in sites):
                    continue
                if number not in counted:
                    counted.add(number)
                    kept += nbytes
            turn_s = clock[self._forward_end]
            reads = [each.first_read for each in own.values() if each.first_read is not None]
            lasts = [each.last_read for each in own.values() if each.last_read is not None]
            begin_s = max(clock[min(reads)], turn_s)
            found[name] = ModuleProfile(
                module=name,
                begin_s=min(clock[run.begin], turn_s),
                backward_begin_s=begin_s,
                backward_end_s=max(self._freed_s(clock, max(lasts)), begin_s),
                checkpoint_s=clock[run.end] - clock[run.begin],
                checkpoint_bytes=kept,
            )
        return found, why_not

    def _other_bytes(self, clock: list[float]) -> tuple[tuple[float, int], ...]:
        """Return the bytes that are no saved tensor's: those that the device's allocator counted.

        Of a CPU, whose allocator does not count, there are none.
        """
        if self.device.type != "cuda":
            return ()
        assert self._end is not None
        other = []
        for i in range(self._end):
            alive = self._events[i].alive_bytes
            other.append((clock[i], max(0, self._events[i + 1].peak_bytes - alive)))
        return tuple(other)

    def _link(self, link: SwapLink | None) -> SwapLink | None:
        """Return the link as this step's copies have shown it."""
        if link is None:
            return None
        least = max(1.0, LEAST_MOVED_SHARE * sum(self.saved_bytes.values()))
        if any(sum(n for n, _, _ in copies) < least for copies in (self._moved, self._brought)):
            return link
        rates = []
        for copies in (self._moved, self._brought):
            seconds = sum(seconds_between(begin, end) for _, begin, end in copies)
            seconds -= link.copy_seconds * len(copies)
            nbytes = sum(n for n, _, _ in copies)
            rates.append(nbytes / seconds if seconds > 0 and nbytes else 0.0)
        out, back = rates
        return SwapLink(
            out or link.d2h_bytes_per_s, back or link.h2d_bytes_per_s, link.copy_seconds
        )


def watch_end(watched: set[int], call: Callable[[], None]) -> None:
    """Have a function called when the backward pass ends that runs in this thread, once for it."""
    task = torch._C._current_graph_task_id()
    if task >= 0 and task not in watched:
        watched.add(task)
        torch.autograd.Variable._execution_engine.queue_callback(call)
