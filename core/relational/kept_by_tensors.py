"""What was made of tensors, found again while they are not changed in place."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..engine.versions import version_of

T = TypeVar("T")

#: What is kept beyond the last `ALWAYS` results: so many, of tensors of so many bytes together. A
#: graph's plan takes about ten times the bytes of its edges, so that plans take some 400 MB at the
#: most where each call brings new edges that do not come again.
LIMIT, MAX_BYTES, ALWAYS = 64, 32 << 20, 8


class KeptByTensors:
    """What was made of tensors in earlier calls, found again while these are not changed in place.

    The tensors are held, so that no other tensor takes their memory. Those of inference mode have
    no version: what is made of them is not kept. Threads may share it.

    Parameters
    ----------
    limit : int
        How many results are kept at most: those used last.
    max_bytes : int
        Bytes of their tensors together, from which on only the last `ALWAYS` results are kept.
    """

    def __init__(self, limit: int = LIMIT, max_bytes: int = MAX_BYTES) -> None:
        self._limit, self._max_bytes, self._lock = limit, max_bytes, threading.Lock()
        #: By places and versions of tensors: these, what was made of them, and their bytes.
        self._kept: OrderedDict[Any, tuple[Sequence[torch.Tensor], Any, int]] = OrderedDict()
        self._bytes = 0
        #: By the tensors' objects, which are cheaper to compare than what they stand for: the
        #: tensors, their state, and their key in `_kept`.
        self._seen: OrderedDict[Any, tuple[Sequence[torch.Tensor], Any, Any]] = OrderedDict()

    def find(self, tensors: Sequence[torch.Tensor], more: Any, make: Callable[[], T]) -> T:
        """Return what `make` returned for these tensors, and for an equal `more`."""
        objects = (tuple(map(id, tensors)), more)
        seen = self._seen.get(objects)
        if seen is not None and seen[1] == _state_of(tensors):
            key = seen[2]
        elif any([t.is_inference() for t in tensors]):
            return make()
        else:
            places = tuple(
                [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in tensors]
            )
            key = (places, versions_of(*tensors), more)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                self._see(objects, tensors, key)
                found: T = self._kept[key][1]
                return found
        made = make()
        with self._lock:
            if key in self._kept:  # another thread was faster
                self._drop([key])
            # Once: a tensor may be given other memory while it is held.
            n_bytes = sum(t.numel() * t.element_size() for t in tensors)
            self._kept[key] = (tensors, made, n_bytes)
            self._bytes += n_bytes
            self._see(objects, tensors, key)
            while self._is_full():
                self._drop([next(iter(self._kept))])
        return made

    def _is_full(self) -> bool:
        n = len(self._kept)
        return n > self._limit or (n > ALWAYS and self._bytes > self._max_bytes)

    def _drop(self, keys: Sequence[Any]) -> None:
        """Hold results and their tensors no longer."""
        for key in keys:
            self._bytes -= self._kept.pop(key)[2]
        for objects in [o for o, (_, _, key) in self._seen.items() if key in keys]:
            del self._seen[objects]

    def _see(self, objects: Any, tensors: Sequence[torch.Tensor], key: Any) -> None:
        if objects in self._seen and self._seen[objects][2] is key:
            return
        self._seen[objects] = (tensors, _state_of(tensors), key)
        while len(self._seen) > self._limit:
            self._seen.popitem(last=False)

    def forget(self, made: Any) -> None:
        """Drop a result, and hold its tensors no longer."""
        with self._lock:
            self._drop([key for key, (_, kept, _) in self._kept.items() if kept is made])


def _state_of(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return what changes of a tensor when it is changed in place."""
    shapes = [t.shape for t in tensors]
    return [*map(version_of, tensors)], [*map(torch.Tensor.data_ptr, tensors)], shapes


def versions_of(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Return the version counters of tensors, -1 for those of inference mode, which have none."""
    return tuple([-1 if t.is_inference() else version_of(t) for t in tensors])
