"""Forward passes that a planner follows: what each is to do, and what is seen of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from .copies import KeptView, Pass, StoredCopy
from .moments import Moment
from .operands import Operands
from .sites import Site


@dataclass(frozen=True)
class PassPlan:
    """What a pass does besides what is decided for each of its sites.

    Parameters
    ----------
    fetches : mapping of str to tuple of str
        By site, whose read lets the fetches of others begin, or by checkpointed module, where that
        is computed again; "" is the begin of the backward pass.
    reads : mapping of str to tuple of str
        As `fetches`: what is then read from a disk to host memory, ahead of its fetch.
    in_flight_bytes : mapping of str to int
        By site, bytes that may be on their way out from its save to the next one.
    backward_in_flight_bytes : mapping of str to int
        The same by site whose read leaves room for less than what was read before it.
    replays : mapping of str to tuple
        By site, the signature of the replay that was found exact.
    modules : frozenset of str
        Modules that are checkpointed.
    named : mapping of str to str
        By site that is kept, or saves a view of what is, and whose reads are to be seen, the one
        that was planned.
    falls_back_to_keeping : bool
        Whether a tensor is kept that cannot be replayed after all; else it is moved.
    """

    fetches: Mapping[str, tuple[str, ...]]
    reads: Mapping[str, tuple[str, ...]]
    in_flight_bytes: Mapping[str, int]
    backward_in_flight_bytes: Mapping[str, int]
    replays: Mapping[str, tuple[Any, ...]]
    modules: frozenset[str]
    named: Mapping[str, str]
    falls_back_to_keeping: bool


class Begun(NamedTuple):
    """What begins with the read of a site.

    Parameters
    ----------
    reads : tuple of StoredCopy
        Copies that are read from a disk to host memory.
    fetches : tuple of StoredCopy
        Copies that are brought back to the device.
    in_flight_bytes : int, optional
        Bytes that may be on their way out from now on, before anything begins.
    """

    reads: tuple[StoredCopy, ...]
    fetches: tuple[StoredCopy, ...]
    in_flight_bytes: int | None = None


NOTHING_BEGINS = Begun((), ())


class Watcher(Protocol):
    """Sees the saved tensors of a pass, kept or moved."""

    def kept(
        self, kept: NamedView, site: Site, t: torch.Tensor, flat: torch.Tensor, begin: Moment
    ) -> None:
        """Record a tensor that is kept; its hook began at a moment, and ends now."""

    def again(self, copy: StoredCopy, name: str, begin: Moment) -> None:
        """Record that a site saved a view of a copy that there is."""

    def read_kept(self, kept: KeptView) -> None:
        """Record that a tensor that was kept is read."""

    def held(self, storage: torch.UntypedStorage) -> None:
        """Record bytes on the device that the backward pass needs."""

    def replay_reads(self, name: str) -> bool:
        """Record a read that is part of a replay being tried; return whether it was."""


class PassRecord(Pass):
    """A forward pass, and the micro-batch that it belongs to.

    Attributes
    ----------
    plan : PassPlan or None
        What it follows.
    watcher : Watcher or None
        What sees all of its saved tensors.
    serial : bool
        Whether copies are waited for where they begin, so that compute is seen alone.
    micro_batch : int or None
        As the training loop said.
    operands : Operands or None
        What its operations have saved, where any replay is followed or tried.
    module_begins : callable or None
        ``module_begins(record, name, device)`` begins what may when a checkpointed module is
        computed again.
    """

    def __init__(self, number: int, parameters: set[int], micro_batch: int | None = None) -> None:
        super().__init__(number, parameters)
        self.plan: PassPlan | None = None
        self.watcher: Watcher | None = None
        self.serial = False
        self.micro_batch = micro_batch
        self.operands: Operands | None = None
        self.module_begins: Callable[[PassRecord, str, torch.device], None] | None = None
        self._backward_began = False
        #: Copies whose fetches may begin, and wait for their disk.
        self._late: list[StoredCopy] = []

    @property
    def has_replays(self) -> bool:
        """Whether any replay is followed, or may be tried."""
        return self.watcher is not None or (self.plan is not None and bool(self.plan.replays))

    def names_kept(self, name: str) -> bool:
        """Return whether the read of a tensor is to be seen that is kept."""
        if self.watcher is not None:
            return True
        return self.plan is not None and name in self.plan.named

    @property
    def falls_back_to_keeping(self) -> bool:
        """Whether a tensor is kept that cannot be replayed or packed; else it is moved."""
        return self.plan is None or self.plan.falls_back_to_keeping

    def in_flight_bytes(self, name: str) -> int | None:
        """Return the bytes that may be on their way out behind a site; None where nobody says."""
        if self.serial:
            return 0
        return None if self.plan is None else self.plan.in_flight_bytes.get(name)

    def begins_after(self, name: str) -> Begun:
        """Return what may begin with the read of a site, or when a module is computed again."""
        if self.plan is None:
            return NOTHING_BEGINS
        name = self.plan.named.get(name, name)
        names = (name,) if self._backward_began else ("", name)
        self._backward_began = True
        # What is read now is fetched in any case, and not again when that is over.
        late = tuple(copy for copy in self._late if copy.name != name)
        self._late.clear()
        return self._begun(names, late)

    def begin_module(self, name: str, device: torch.device) -> None:
        """Begin what may begin when a checkpointed module is computed again."""
        if self.module_begins is not None:
            self.module_begins(self, name, device)

    def begin_backward(self) -> Begun:
        """Return the copies that begin the backward pass; none the second time."""
        if self.plan is None or self._backward_began:
            return NOTHING_BEGINS
        self._backward_began = True
        return self._begun(("",), ())

    def is_late(self, copy: StoredCopy) -> None:
        """Begin a fetch once more with the next read: it was not read from its disk yet."""
        self._late.append(copy)

    def _begun(self, names: tuple[str, ...], late: tuple[StoredCopy, ...]) -> Begun:
        assert self.plan is not None
        reads, fetches = self.plan.reads, self.plan.fetches
        return Begun(
            tuple(copy for name in names for copy in self._copies_of(reads.get(name, ()))),
            late + tuple(copy for name in names for copy in self._copies_of(fetches.get(name, ()))),
            self.plan.backward_in_flight_bytes.get(names[-1]),
        )

    def _copies_of(self, names: tuple[str, ...]) -> tuple[StoredCopy, ...]:
        found = (self.copy_of(name) for name in names)
        return tuple(copy for copy in found if copy is not None)


def record_of(held: StoredCopy | NamedView) -> PassRecord:
    """Return the pass that made a copy, or that a tensor was kept in."""
    record = held.made_in
    assert isinstance(record, PassRecord)
    return record


class NamedView(KeptView):
    """A tensor that is kept, and whose read is seen."""

    __slots__ = ("made_in",)

    def __init__(self, t: torch.Tensor, version: int, name: str, made_in: PassRecord) -> None:
        super().__init__(t, version, name)
        self.made_in = made_in


class SavedBytes:
    """Counts the bytes of storages while these live, and the most of them at a time.

    Attributes
    ----------
    alive_bytes, peak_bytes : int
        Now, and at most since `begin_segment`.
    """

    def __init__(self) -> None:
        self.alive_bytes = self.peak_bytes = 0
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, once, until it is gone."""
        key = id(storage)
        found = self._refs.get(key)
        if found is not None and found() is storage:
            return
        nbytes = storage.nbytes()

        def gone(ref: weakref.ref[torch.UntypedStorage]) -> None:
            self.alive_bytes -= nbytes
            if self._refs.get(key) is ref:
                del self._refs[key]

        self._refs[key] = weakref.ref(storage, gone)
        self.alive_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)

    def begin_segment(self) -> int:
        """Return the peak since the last call."""
        peak, self.peak_bytes = self.peak_bytes, self.alive_bytes
        return peak
