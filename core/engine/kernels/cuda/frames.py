"""Bound kernels: what the driver takes for a launch, written with one call into kept memory."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .parameters import Parameters, Value, kinds_of, split

Sizes = tuple[int, int, int]  # of a grid or a block


class _Frame:
    """Memory for the parameters of one launch: eight bytes each, and where each lies.

    A kernel reads as many of the eight bytes as its parameter has, the lowest first.

    Parameters
    ----------
    values : sequence of int
        What the eight bytes hold, in any order.
    places : sequence of int
        For each parameter of the kernel, in order: where its value stands in `values`.
    """

    __slots__ = ("_places", "address", "values")

    def __init__(self, values: Sequence[int], places: Sequence[int]) -> None:
        self.values = (ctypes.c_int64 * len(values))(*values)
        begin = ctypes.addressof(self.values)
        self._places = (ctypes.c_void_p * len(places))(*(begin + 8 * place for place in places))
        self.address = ctypes.addressof(self._places)


class BoundKernel:
    """A kernel that is ready to be started any number of times; see `Runner.bind`.

    Parameters
    ----------
    start : callable
        `CupyRunner.start`.
    address : int
        Of the kernel.
    parameters : type of Parameters
        What it takes.
    threads, shared_bytes, fixed
        As for `Runner.bind`.
    """

    def __init__(
        self,
        start: Callable[..., None],
        address: int,
        parameters: type[Parameters],
        threads: int | Sizes,
        shared_bytes: int,
        fixed: Mapping[str, Value],
    ) -> None:
        self._start = start
        self._address = address
        self._block = threads if isinstance(threads, tuple) else (threads, 1, 1)
        self._shared_bytes = shared_bytes
        self._owners = fixed  # of the memory that the parameters point to
        changing, numbers = split(parameters, fixed)
        # Those that change come first, so that one call writes them all.
        stored = {name: place for place, name in enumerate([*changing, *numbers])}
        self._places = [stored[name] for name in kinds_of(parameters)]
        self._values = [0] * len(changing) + [*numbers.values()]
        self._put = struct.Struct(f"={len(changing)}q").pack_into
        # One for each launch that is being put together: by threads, or a finaliser amid another.
        self._frames: list[_Frame] = []

    def __call__(self, blocks: Any, *changing: int, stream: int | None = None) -> None:
        """Start it; see `Launch`."""
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = _Frame(self._values, self._places)
        self._put(frame.values, 0, *changing)
        # Cheaper than isinstance, and no other kind of integer is taken for a tuple.
        grid = blocks if type(blocks) is tuple else (blocks, 1, 1)
        more = () if stream is None else (stream,)
        self._start(self._address, grid, self._block, self._shared_bytes, frame.address, *more)
        self._frames.append(frame)
