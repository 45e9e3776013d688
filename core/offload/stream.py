"""WeightStream: decoded tensors, unit by unit, fetched ahead of their use."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..devices import checked_device
from ..engine.transfer.timing import UnitTimes
from ..engine.transfer.window import Window
from ..errors import ArgumentError, ArgumentTypeError, BitslabError
from .device_engine import DeviceEngine
from .host_engine import HostEngine
from .plans import UnitPlan, plan_unit
from .products import PackedProduct
from .store import PackedWeights


class WeightStream:
    """Fetches and decodes the units of packed weights in the order in which they are used.

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
        The device of decoded tensors.
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
        self._window = Window(list(self._plans))
        self._buffers: list[Any] = []
        self._lock = threading.RLock()
        self._acquisitions = self._loads = self._moved = self._fused = 0
        self._closed = False

    # Contents

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units."""
        return tuple(self._plans)

    def plan(self, unit: str) -> UnitPlan:
        """Return which ranges of which images a unit needs."""
        if unit not in self._plans:
            raise ArgumentError(f"unit: {unit!r}, there are {', '.join(self._plans) or 'none'}")
        return self._plans[unit]

    def stats(self) -> dict[str, int]:
        """Return counts since the beginning.

        ``acquisitions``; ``loads``, those for which the unit had to be decoded; ``moved_bytes``
        that crossed to a GPU; ``buffers`` of decoded tensors; ``fused``, uses of a unit whose
        packed tensors were multiplied without being decoded first.
        """
        return {
            "acquisitions": self._acquisitions,
            "loads": self._loads,
            "moved_bytes": self._moved if self.device.type == "cuda" else 0,
            "buffers": len(self._buffers),
            "fused": self._fused,
        }

    def times(self) -> dict[str, UnitTimes]:
        """Return each unit's times in its last pass; on a GPU this waits for it."""
        return {unit: clock.read() for unit, clock in self._engine.clocks.items()}

    # Acquiring and releasing

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
            buffer = self._buffer_of(unit)
            loaded = buffer is None
            if buffer is None:
                buffer = self._free_buffer()
                self._load(buffer, plan)
            views: dict[str, torch.Tensor]
            with torch.inference_mode(False):  # views are kept, for passes with gradients too
                views = self._engine.enter(buffer, plan, loaded)
            buffer.users += 1
            self._acquisitions += 1
            self._window.use(unit)
            try:
                self._fetch_ahead()
            except BaseException:
                buffer.users -= 1
                raise
        return views

    def release(self, unit: str) -> None:
        """Give the tensors of a unit back; once for each `acquire`."""
        plan = self.plan(unit)
        with self._lock:
            buffer = self._buffer_of(unit)
            if buffer is None or buffer.users == 0:
                raise BitslabError(f"unit: {unit!r} is released more often than acquired")
            self._engine.leave(buffer, plan)
            buffer.users -= 1
            if not self._closed:
                self._fetch_ahead()

    def products(self, unit: str) -> dict[str, PackedProduct] | None:
        """Return products of few rows of input with a unit's packed tensors, without decoding them.

        By name. None where one of them has to be decoded first, or the unit's image does not lie on
        `device`.
        """
        plan = self.plan(unit)
        with self._lock, torch.inference_mode(False):
            found: dict[str, PackedProduct] | None = self._engine.products(plan)
        return found

    def acquire_packed(self, unit: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a unit that are kept raw, in its image; nothing is decoded.

        For a unit that has `products`, to be used until `release_packed`. Errors are those of
        `acquire`.
        """
        plan = self.plan(unit)
        with self._lock:
            if self._closed:
                raise BitslabError("these streamed weights are closed")
            self._engine.check()
            with torch.inference_mode(False):
                views: dict[str, torch.Tensor] = self._engine.enter_packed(plan)
            self._fused += any(not planned.record.raw for planned in plan.tensors)
        return views

    def release_packed(self, unit: str) -> None:
        """Give the tensors back; once for each `acquire_packed`."""
        with self._lock:
            if not self._closed:
                self._engine.leave_packed(self.plan(unit))

    def whole(self, name: str) -> torch.Tensor:
        """Decode one tensor to new memory on `device`."""
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
        """Release the buffers, after the GPU has finished with them; again does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._engine.close()
                self._buffers.clear()

    # Buffers, and what is fetched ahead

    def _buffer_of(self, unit: str) -> Any:
        for buffer in self._buffers:
            if buffer.unit == unit:
                return buffer
        return None

    def _free_buffer(self) -> Any:
        """Return a buffer that is not in use, at best one whose unit is not expected soon."""
        expected = self._window.expected(self._engine.depth)
        idle = [buffer for buffer in self._buffers if buffer.users == 0]
        for buffer in idle:
            if buffer.unit not in expected:
                return buffer
        if idle:
            return idle[0]
        return self._new_buffer()

    def _new_buffer(self) -> Any:
        with torch.inference_mode(False):
            buffer = self._engine.new_buffer()
        self._buffers.append(buffer)
        return buffer

    def _load(self, buffer: Any, plan: UnitPlan) -> None:
        buffer.unit = None  # an error leaves nothing that looks decoded
        self._engine.load(buffer, plan)
        buffer.unit = plan.name
        self._loads += 1
        self._moved += plan.crossing_nbytes

    def _fetch_ahead(self) -> None:
        """Decode the unit expected next, if a buffer is free, and stage those behind it."""
        window = self._window.expected(self._engine.depth)
        if window and self._buffer_of(window[0]) is None:
            while len(self._buffers) < self._engine.n_buffers:
                self._new_buffer()
            free = [b for b in self._buffers if b.users == 0 and b.unit not in window]
            if free and self._engine.ready(self._plans[window[0]]):
                self._load(free[0], self._plans[window[0]])
        for unit in window:
            if self._buffer_of(unit) is None:
                self._engine.stage(self._plans[unit], window)


def check_counts(depth: Any, sm_budget: Any) -> None:
    """Refuse a `depth` or an `sm_budget` that is no count."""
    _check_count("depth", depth, 0)
    if sm_budget is not None:
        _check_count("sm_budget", sm_budget, 1)


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentTypeError(f"{name}: expected an int, got {value!r:.60}")
    if value < least:
        raise ArgumentError(f"{name}: {value}, accepted are numbers from {least}")
