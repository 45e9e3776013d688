"""Whether rows cross faster in pieces: exchanges are tried both ways, and timed as wholes.

What overlaps is not predicted: the time of a piece, and of threads that share a processor, is in no
stage.
"""

from __future__ import annotations

from collections import deque

#: Calls before one that decides in which the other way is tried, and exchanges that count of each:
#: the fastest of many is faster than that of few.
TRIED_CALLS = 2
#: From then on the other way is tried before one decision of so many.
TRIED_EVERY = 16


class PieceTrial:
    """Exchanges one way, whole and in pieces.

    Ranks try in the same calls, by their number; what that took is each rank's own.

    Parameters
    ----------
    first, every : int
        The call that decides first, counted from 0, and calls from one decision to the next. Where
        fewer than two calls between decisions do not decide, nothing is tried.

    Attributes
    ----------
    ratio : float
        Seconds of an exchange in pieces for one of a whole, as last measured; 1 before that.
    """

    def __init__(self, first: int, every: int) -> None:
        self._first, self._every = first, every
        self._tried_calls = min(TRIED_CALLS, (first - 1) // 2)
        self.ratio = 1.0
        self._begin()

    def _begin(self) -> None:
        self._s_per_byte: dict[bool, deque[float]] = {
            in_pieces: deque(maxlen=TRIED_CALLS) for in_pieces in (False, True)
        }

    def tries(self, call: int) -> bool:
        """Return whether rows cross the other way in a call, counted from 0.

        Before the decisions 0, 1, 3, 7 and 15, and then each 16th one.
        """
        past, at = divmod(call - self._first, self._every)
        decision = past + 1  # the next one, counted from 0
        often = decision & (decision + 1) == 0 or decision % TRIED_EVERY == TRIED_EVERY - 1
        return often and self._every - at <= self._tried_calls

    def took(self, call: int, seconds: float, n_bytes: int, *, in_pieces: bool) -> None:
        """Note what an exchange took, of so many raw bytes sent and received.

        Not the first one, which makes buffers, nor one that decides, in which ranks wait for what
        others measure.
        """
        decides = call >= self._first and (call - self._first) % self._every == 0
        if call and n_bytes and not decides:
            self._s_per_byte[in_pieces].append(seconds / n_bytes)

    def compare(self) -> None:
        """Begin a call that decides: keep the ratio where both ways were tried since the last."""
        whole, in_pieces = self._s_per_byte[False], self._s_per_byte[True]
        if whole and in_pieces:
            self.ratio = min(in_pieces) / min(whole)
        self._begin()
