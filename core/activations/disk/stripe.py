"""One folder of the tier: its file, and which extents of it are taken."""

from __future__ import annotations

import threading
import weakref
from collections import deque

from ...engine.kernels.format import ceil_div
from ...engine.memory.free_ranges import FreeRanges
from .tensor_file import ALIGN_BYTES, DiskError, TensorFile

#: The file grows by so much at first, then to twice its size, and by MAX_GROWTH_BYTES at most.
GROWTH_BYTES = 256 << 20
MAX_GROWTH_BYTES = 2 << 30


class Extent:
    """A range of a file, which is free again when this object is gone.

    Parameters
    ----------
    stripe : Stripe
        Whose file.
    begin, end : int
        The range, multiples of ALIGN_BYTES.
    """

    __slots__ = ("__weakref__", "begin", "end", "stripe")

    def __init__(self, stripe: Stripe, begin: int, end: int) -> None:
        self.stripe = stripe
        self.begin = begin
        self.end = end
        # The garbage collector may run this while this thread holds any lock; it takes none.
        weakref.finalize(self, stripe.returned.append, (begin, end)).atexit = False


class Stripe:
    """A file and its free extents. Threads may use it at once.

    Parameters
    ----------
    file : TensorFile
        The file, empty.
    limit_bytes : int or None
        How large it may become.

    Attributes
    ----------
    error : BaseException or None
        Why nothing is written to it any more.
    """

    def __init__(self, file: TensorFile, limit_bytes: int | None) -> None:
        self.file = file
        self.limit_bytes = limit_bytes
        self.error: BaseException | None = None
        self.returned: deque[tuple[int, int]] = deque()
        self._free = FreeRanges(0)
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that are taken."""
        with self._lock:
            self._collect()
            return self._free.nbytes - self._free.free_bytes

    def take(self, nbytes: int) -> Extent | None:
        """Return an extent for so many bytes; None where there is no room, or an error before."""
        if self.error is not None:
            return None
        size = ceil_div(nbytes, ALIGN_BYTES) * ALIGN_BYTES
        with self._lock:
            self._collect()
            begin = self._free.find(size)
            if begin is None and self._grow(size):
                begin = self._free.find(size)
            if begin is None:
                return None
            self._free.take(begin, begin + size)
        return Extent(self, begin, begin + size)

    def _grow(self, size: int) -> bool:
        """Grow the file so that it has a free range of a size; return whether it has."""
        now = self._free.nbytes
        most = now + MAX_GROWTH_BYTES + size if self.limit_bytes is None else self.limit_bytes
        wanted = max(size, min(max(now, GROWTH_BYTES), MAX_GROWTH_BYTES))
        for more in (min(wanted, most - now), size):
            more -= more % ALIGN_BYTES
            if more < size or now + more > most:
                continue
            try:
                self.file.grow(now + more)
            except DiskError:
                continue
            self._free.grow(more)
            return True
        return False

    def _collect(self) -> None:
        for _ in range(len(self.returned)):
            self._free.give_back(*self.returned.popleft())
