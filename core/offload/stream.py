"""WeightStream: the decoded tensors of one unit after the other, fetched ahead of their use."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..devices import checked_device
from ..engine.transfer.timing import UnitTimes
from ..errors import ArgumentError, ArgumentTypeError, BitslabError
from .device_engine import DeviceEngine
from .host_engine import HostEngine
from .plans import UnitPlan, plan_unit
from .store import PackedWeights


class WeightStream:
    """Brings the units of packed weights to a device, in the order in which they are used.

    On a GPU the packed bytes of the next `depth` units cross on a stream of their own into a ring
    of staging buffers, and are decoded on another into one of two buffers of decoded tensors while
    the present unit is used. What comes next is learnt: the unit that followed last time, at first
    the order of `units`. An order that was not foreseen is only slower. On the CPU a unit is
    decoded when it is acquired.

    Parameters
    ----------
    weights : PackedWeights
        The weights; open as long as the stream is.
    units : mapping of str to sequence of str, optional
        For each unit the names of its tensors, of any images; those of `weights` when left out.
    device : torch.device or str
        Where decoded tensors are wanted.
    depth : int
        Units whose packed bytes are fetched ahead; 0 fetches each when it is acquired.
    sm_budget : int or None
        Multiprocessors of the GPU that decoding may take; all for None.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For arguments of another kind.

    Notes
    -----
    Threads may share a stream. `acquire` makes torch's current stream wait for the tensors, and
    `release` lets them be overwritten when the current stream has passed that point; the host
    waits for neither, and nothing is allocated once every unit was used. A unit that is acquired by
    several at once, or again before it was overwritten, is fetched once. An error of a fetch is
    raised by the `acquire` of its unit and leaves the stream usable.

    Examples
    --------
    >>> import torch
    >>> from bitslab.offload import WeightPacker, WeightStream
    >>> packer = WeightPacker({"a": ["a.weight"], "b": ["b.weight"]})
    >>> for name in ("a.weight", "b.weight"):
    ...     _ = packer.add(name, torch.randn(256, 256))
    >>> stream = WeightStream(packer.finish())
    >>> for unit in stream.units:
    ...     tensors = stream.acquire(unit)
    ...     stream.release(unit)
    >>> stream.stats()["loads"]
    2
    """

    def __init__(
        self,
        weights: PackedWeights,
        units: Mapping[str, Sequence[str]] | None = None,
        *,
        device: torch.device | str = "cpu",
        depth: int = 2,
        sm_budget: int | None = 64,
    ) -> None:
        self.weights = weights
        self.device = checked_device(device)
        check_counts(depth, sm_budget)
        if units is None:
            units = {unit: list(weights.unit(unit).records) for unit in weights.units}
        self._plans = {unit: plan_unit(weights, unit, names) for unit, names in units.items()}
        plans = list(self._plans.values())
        self._engine: Any
        with torch.inference_mode(False):  # else its buffers could not be used outside of that
            if self.device.type == "cuda":
                self._engine = DeviceEngine(weights, plans, self.device, depth, sm_budget)
            else:
                self._engine = HostEngine(weights, plans)
        order = list(self._plans)
        self._next = dict(zip(order, [*order[1:], *order[:1]], strict=True))
        self._last: str | None = None
        self._slots: list[Any] = []
        self._lock = threading.RLock()
        self._acquisitions = self._loads = self._moved = 0
        self._closed = False

    # What there is

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units."""
        return tuple(self._plans)

    def plan(self, unit: str) -> UnitPlan:
        """Return what a unit takes of which images."""
        if unit not in self._plans:
            raise ArgumentError(f"unit: {unit!r}, there are {', '.join(self._plans) or 'none'}")
        return self._plans[unit]

    def stats(self) -> dict[str, int]:
        """Return counts since the beginning.

        ``acquisitions``; ``loads``, those for which the unit had to be decoded; ``moved_bytes``
        that crossed to a GPU; ``buffers`` of decoded tensors.
        """
        return {
            "acquisitions": self._acquisitions,
            "loads": self._loads,
            "moved_bytes": self._moved if self.device.type == "cuda" else 0,
            "buffers": len(self._slots),
        }

    def times(self) -> dict[str, UnitTimes]:
        """Return each unit's times in its last pass; on a GPU this waits for it."""
        return {unit: clock.read() for unit, clock in self._engine.clocks.items()}

    # Use

    def acquire(self, unit: str) -> dict[str, torch.Tensor]:
        """Return the decoded tensors of a unit, valid until `release`.

        Parameters
        ----------
        unit : str
            Its name.

        Returns
        -------
        dict of str to torch.Tensor
            By name, on `device`; always the same tensors for one unit and buffer. Not to be
            written to.

        Raises
        ------
        CorruptedDataError
            When packed rows are damaged.
        BitslabError
            When the stream is closed, the file of the weights was removed, or a CUDA graph is
            captured.
        """
        plan = self.plan(unit)
        with self._lock:
            if self._closed:
                raise BitslabError("these streamed weights are closed")
            self._engine.check()
            slot = self._slot_of(unit)
            loaded = slot is None
            if slot is None:
                slot = self._free_slot()
                self._load(slot, plan)
            views: dict[str, torch.Tensor]
            with torch.inference_mode(False):  # views are kept, for passes with gradients too
                views = self._engine.enter(slot, plan, loaded)
            slot.users += 1
            self._acquisitions += 1
            if self._last is not None and self._last != unit:
                self._next[self._last] = unit
            self._last = unit
            try:
                self._fetch_ahead()
            except BaseException:
                slot.users -= 1
                raise
        return views

    def release(self, unit: str) -> None:
        """Give the tensors of a unit back; once for each `acquire`."""
        plan = self.plan(unit)
        with self._lock:
            slot = self._slot_of(unit)
            if slot is None or slot.users == 0:
                raise BitslabError(f"unit: {unit!r} is released more often than acquired")
            self._engine.leave(slot, plan)
            slot.users -= 1
            if not self._closed:
                self._fetch_ahead()

    def whole(self, name: str) -> torch.Tensor:
        """Decode one tensor to memory of its own on `device`."""
        with self._lock:
            self._engine.check()
            result: torch.Tensor = self._engine.whole(name)
        return result

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Decode rows of a tensor, and only them.

        Parameters
        ----------
        name : str
            A tensor of two dimensions or more.
        ids : torch.Tensor
            Integers of any shape.

        Returns
        -------
        torch.Tensor
            ``[*ids.shape, *shape[1:]]`` on `device`.

        Raises
        ------
        IndexRangeError
            When an id is negative, as for torch's embedding, or too large; where a GPU reads the
            rows, by a later call.
        """
        with self._lock:
            result: torch.Tensor = self._engine.rows(name, ids)
        return result

    def close(self) -> None:
        """Give the buffers up, after the GPU has finished with them; again does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._engine.close()
                self._slots.clear()

    # Inside

    def _slot_of(self, unit: str) -> Any:
        return next((slot for slot in self._slots if slot.unit == unit), None)

    def _free_slot(self) -> Any:
        """Return a slot that nobody uses, at best one whose unit is not expected soon."""
        expected = self._window()
        idle = [slot for slot in self._slots if slot.users == 0]
        for slot in idle:
            if slot.unit not in expected:
                return slot
        if idle:
            return idle[0]
        return self._new_slot()

    def _new_slot(self) -> Any:
        with torch.inference_mode(False):
            slot = self._engine.new_slot()
        self._slots.append(slot)
        return slot

    def _load(self, slot: Any, plan: UnitPlan) -> None:
        slot.unit = None  # an error leaves nothing that looks decoded
        self._engine.load(slot, plan)
        slot.unit = plan.name
        self._loads += 1
        self._moved += plan.crossing_nbytes

    def _window(self) -> list[str]:
        """Return the units that are expected next."""
        window: list[str] = []
        unit = self._last
        while unit is not None and len(window) < self._engine.depth:
            unit = self._next[unit]
            if unit == self._last or unit in window:
                break
            window.append(unit)
        return window

    def _fetch_ahead(self) -> None:
        """Decode the unit expected next, if a buffer is free, and stage those behind it."""
        window = self._window()
        if window and self._slot_of(window[0]) is None:
            while len(self._slots) < self._engine.slots:
                self._new_slot()
            free = [s for s in self._slots if s.users == 0 and s.unit not in window]
            if free and self._engine.ready(self._plans[window[0]]):
                self._load(free[0], self._plans[window[0]])
        for unit in window:
            if self._slot_of(unit) is None:
                self._engine.stage(self._plans[unit], window)


def check_counts(depth: Any, sm_budget: Any) -> None:
    """Refuse what is no number of units, or of multiprocessors."""
    _check_count("depth", depth, 0)
    if sm_budget is not None:
        _check_count("sm_budget", sm_budget, 1)


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentTypeError(f"{name}: expected an int, got {value!r:.60}")
    if value < least:
        raise ArgumentError(f"{name}: {value}, accepted are numbers from {least}")
