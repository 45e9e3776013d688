"""Which ranges of a buffer or file are free: taken in pieces, given back, joined again."""

from __future__ import annotations

import bisect
from collections.abc import Iterator


class FreeRanges:
    """Free ranges, ascending and apart. One thread at a time.

    Parameters
    ----------
    nbytes : int
        Size of what is cut; all of it is free.

    Attributes
    ----------
    nbytes : int
        Its size.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._free)

    @property
    def free_bytes(self) -> int:
        """Bytes of all free ranges."""
        return sum(end - begin for begin, end in self._free)

    @property
    def wholly_free(self) -> bool:
        """Whether nothing is taken."""
        return self._free == [(0, self.nbytes)]

    def find(self, nbytes: int) -> int | None:
        """Return where the first free range begins that is large enough, or None."""
        for begin, end in self._free:
            if end - begin >= nbytes:
                return begin
        return None

    def take(self, begin: int, end: int) -> None:
        """Take a range at the start of a free one."""
        at = bisect.bisect_left(self._free, (begin, 0))
        rest = (end, self._free[at][1])
        self._free[at : at + 1] = [rest] if rest[0] < rest[1] else []

    def give_back(self, begin: int, end: int) -> None:
        """Take a range back, and join it with free neighbours."""
        at = bisect.bisect_left(self._free, (begin, 0))
        first, last = at, at
        if at and self._free[at - 1][1] == begin:
            first, begin = at - 1, self._free[at - 1][0]
        if at < len(self._free) and self._free[at][0] == end:
            last, end = at + 1, self._free[at][1]
        self._free[first:last] = [(begin, end)]

    def grow(self, nbytes: int) -> None:
        """Add free bytes behind the last."""
        self.give_back(self.nbytes, self.nbytes + nbytes)
        self.nbytes += nbytes
