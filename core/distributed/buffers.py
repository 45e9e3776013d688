"""Memory of messages, kept from one exchange to the next."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.kernels.cuda.stream import current_stream
from ..engine.memory.locks import call_after_fork
from .modes import kept_tensors

#: Bytes that are kept at most between exchanges.
MOST_BYTES = 256 << 20
#: Buffers that nobody asked for in so many exchanges of a message are given back.
MOST_AGE = 64
#: No buffer is lent that is larger than what was asked for by more than this factor.
MOST_SPARE = 8
_LEAST_BYTES = 4096


@dataclass
class _Free:
    """A buffer that is kept.

    Parameters
    ----------
    data : torch.Tensor
        uint8.
    mark : torch.cuda.Event or None
        What whoever uses it next waits for, on its stream.
    since : int
        The number of buffers that had been lent when it came back.
    """

    data: torch.Tensor
    mark: torch.cuda.Event | None
    since: int


class Buffers:
    """uint8 buffers for messages to be sent and received: lent, and kept when they come back.

    Parameters
    ----------
    most_bytes : int
        Of buffers that are kept while no exchange uses them; those that came back first go first.

    Notes
    -----
    Threads may share it: a buffer is lent to one of them at a time, and to nobody while an
    asynchronous exchange has it. On a GPU the stream that uses a buffer next waits for what was
    queued on the last one, the host does not. A forked child begins with none.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._inherited: list[Any] = []
        self._begin()
        call_after_fork(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._free: list[_Free] = []
        #: By identity those that are lent, as long as somebody has them: an exchange that nobody
        #: waits for never gives its own back.
        self._in_use: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._lent = 0

    def after_fork(self) -> None:
        """Begin anew: what is lent and the lock are the parent's; a child frees no event."""
        self._inherited.append(self._free)
        self._begin()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, those included that are lent and were not dropped."""
        with self._lock:
            in_use = list(self._in_use.values())
            return sum(data.nbytes for data in in_use) + self._kept_bytes()

    @property
    def kept_bytes(self) -> int:
        """Bytes of buffers that no exchange uses."""
        with self._lock:
            return self._kept_bytes()

    def _kept_bytes(self) -> int:
        return sum(each.data.nbytes for each in self._free)

    def take(self, n_bytes: int, device: torch.device) -> torch.Tensor:
        """Return a buffer uint8 ``[n]`` of as many bytes or more, at a multiple of 16.

        It is used on torch's current stream, and on others that the caller has wait for it.
        """
        wanted = max(n_bytes, _LEAST_BYTES)
        with self._lock:
            self._lent += 1
            fits = [
                each
                for each in self._free
                if each.data.device == device
                and wanted <= each.data.nbytes <= MOST_SPARE * wanted + _LEAST_BYTES
            ]
            found = min(fits, key=lambda each: each.data.nbytes, default=None)
            if found is not None:
                self._free = [each for each in self._free if each is not found]
                self._in_use[id(found.data)] = found.data
            self._free = [each for each in self._free if self._lent - each.since <= MOST_AGE]
        if found is None:
            data = self._made(_rounded(wanted), device)
            with self._lock:
                self._in_use[id(data)] = data
            return data
        if device.type == "cuda":
            stream = current_stream(device)
            if found.mark is not None:
                found.mark.wait(stream)
            found.data.record_stream(stream)
        return found.data

    def _made(self, n_bytes: int, device: torch.device) -> torch.Tensor:
        """Return a new buffer; where memory is short, in place of those that are kept."""
        try:
            return _empty(n_bytes, device)
        except (MemoryError, RuntimeError):
            with self._lock:
                kept, self._free = self._free, []
            if not kept:
                raise
            del kept
        return _empty(n_bytes, device)

    def give(self, *buffers: torch.Tensor, mark: torch.cuda.Event | None = None) -> None:
        """Keep buffers that were taken, for whoever waits for a mark on its stream."""
        with self._lock:
            for data in buffers:
                self._in_use.pop(id(data), None)
                self._free.append(_Free(data, mark, self._lent))
            while self._kept_bytes() > self._most_bytes:
                del self._free[0]

    def forget(self, *buffers: torch.Tensor) -> None:
        """Keep none of these that were taken: a collective that failed may still write to them."""
        with self._lock:
            for data in buffers:
                self._in_use.pop(id(data), None)


def _empty(n_bytes: int, device: torch.device) -> torch.Tensor:
    with kept_tensors():
        return torch.empty(n_bytes, dtype=torch.uint8, device=device)


def _rounded(n_bytes: int) -> int:
    """Return bytes with some to spare: messages differ a little from step to step."""
    unit = max(_LEAST_BYTES, 1 << max(0, n_bytes.bit_length() - 4))
    return -(-n_bytes // unit) * unit
