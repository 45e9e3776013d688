"""Which layers' packed words lie in host memory: a share of them, fixed or chosen by measuring."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from ..engine.advisor import measure_link
from ..errors import ArgumentError, ArgumentTypeError

Offload = bool | float | Literal["auto"]

#: Crossing is hidden if computing takes this much longer: copies do not follow one another closely.
SLACK = 1.1
#: A pass that takes this many times what its words need to cross was bound by computing: less may
#: be a link slower than measured, and time between passes in which little crosses.
COMPUTING_SHARE = 2.0
#: A pass that takes less than this share of that was not waited for: links are hardly that much
#: faster than measured.
LEAST_SHARE = 0.5
#: Passes of which the fastest one counts.
PASSES = 4
#: Passes that are not measured behind a change: the first ones plan anew, or pack a prompt.
SETTLING_PASSES = 2
#: Passes after which what was settled is looked at again.
AGAIN_PASSES = 64
#: Tokens of a pass that is measured, at the most; one of more is a prompt, or a part of it.
MOST_TOKENS = 16
#: Share of a device's memory that is left free.
FREE_SHARE = 0.05


def check_offload(offload: object) -> Offload:
    """Return the share of the layers whose words lie in host memory: 0 to 1, or "auto".

    Raises
    ------
    ArgumentTypeError
        For another type.
    ArgumentError
        For a share out of range, or another word.
    """
    accepted = 'accepted are True, False, shares from 0 to 1 and "auto"'
    if isinstance(offload, str):
        if offload != "auto":
            raise ArgumentError(f"offload: {offload!r:.60}, {accepted}")
        return "auto"
    if not isinstance(offload, int | float):
        raise ArgumentTypeError(f"offload: expected a share, got {offload!r:.60}; {accepted}")
    if not 0 <= offload <= 1:  # nor NaN
        raise ArgumentError(f"offload: {offload}, {accepted}")
    return float(offload)


def spread(n: int, chosen: int) -> list[int]:
    """Return `chosen` of the numbers below `n`, evenly spread, the last one among them.

    Examples
    --------
    >>> from bitslab.kvcache.placement import spread
    >>> spread(8, 4), spread(5, 2), spread(3, 0)
    ([1, 3, 5, 7], [2, 4], [])
    """
    return [i for i in range(n) if (i + 1) * chosen // n > i * chosen // n]


class Placement:
    """Which layers' packed words lie in host memory.

    The unit is a layer: its K and V lie together, the layers in host memory as far from one another
    as they can. So the words of one cross while the layers up to it compute, in copies as large as
    if all lay there, with no launch more, and whatever changes a history finds it in one store. A
    share of each layer would overlap as well, and take two stores, copies and launches for each.

    Parameters
    ----------
    offload : bool, float or "auto"
        As `check_offload` accepts. A share is of whole layers, halves rounded up, and of one at the
        least unless it is 0. "auto" begins with all in host memory.
    layers : sequence of int
        The layers, in the order of the model.

    Attributes
    ----------
    hosted : set of int
        The layers whose words lie in host memory.
    balance : Balance or None
        What chooses them; None where they are fixed.

    Examples
    --------
    >>> from bitslab.kvcache import Placement
    >>> Placement(0.5, range(6)).hosted
    {1, 3, 5}
    """

    def __init__(self, offload: Offload, layers: Sequence[int]) -> None:
        self.layers = list(layers)
        share = check_offload(offload)
        self.balance = Balance() if share == "auto" else None
        exact = len(self.layers) * (1.0 if share == "auto" else float(share))
        n = max(int(exact + 0.5), min(1, len(self.layers)) if exact else 0)
        self.hosted = {self.layers[i] for i in spread(len(self.layers), n)}

    def put(self, layer: int, *, on_host: bool) -> None:
        """Record that a layer has moved."""
        if on_host:
            self.hosted.add(layer)
        else:
            self.hosted.discard(layer)

    def with_hosted(self, n: int) -> set[int]:
        """Return `n` layers to lie in host memory, of which as few as possible move."""
        here = [i for i in self.layers if i in self.hosted]
        there = [i for i in self.layers if i not in self.hosted]
        if n <= len(here):
            return {here[i] for i in spread(len(here), n)}
        return {*here, *(there[i] for i in spread(len(there), n - len(here)))}

    def next_hosted(self) -> dict[int, int | None]:
        """Return for each layer the next one in host memory, around the end; None without any."""
        found: dict[int, int | None] = {}
        following = min(self.hosted, default=None)
        for i in reversed(self.layers):
            found[i] = following
            following = i if i in self.hosted else following
        return found


class Balance:
    """Chooses how many layers lie in host memory, so that crossing ends when computing does.

    The most layers whose words cross while a pass of few tokens computes: more would be waited for,
    fewer would take device memory for nothing. More lie in host memory where the device lacks room.

    A pass that takes much longer than its words need to cross shows what computing takes. As long
    as none does, half of the layers that cross are moved to the device after some passes: so a link
    of half the rate that was measured is not taken for computing.

    Parameters
    ----------
    clock : callable
        Returns seconds.

    Attributes
    ----------
    compute_s : float or None
        Seconds that computing was found to take in a pass, at the most.

    Notes
    -----
    Times are the host's, from the begin of one pass to that of the next, which a loop that reads
    each token has in common with the device. Passes that are not waited for are shorter than their
    words need to cross, and change nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.compute_s: float | None = None
        self._settled = False  # nothing was to be changed when it was looked at last
        self._restart()

    def _restart(self) -> None:
        self._begin_s: float | None = None  # of the pass under way, where that is measured
        self._fastest_s = math.inf
        self._passes = -SETTLING_PASSES  # measured ones

    def begin(self, tokens: int) -> bool:
        """Record that a pass of so many tokens begins; return whether `hosted` is to be asked."""
        if tokens > MOST_TOKENS:
            self._settled = False
            self._restart()
            return False
        now = self._clock()
        if self._begin_s is not None:
            self._passes += 1
            if self._passes > 0:
                self._fastest_s = min(self._fastest_s, now - self._begin_s)
        self._begin_s = now
        return self._passes >= (AGAIN_PASSES if self._settled else PASSES)

    def hosted(
        self, n_layers: int, hosted: int, layer_bytes: float, layer_s: float, free_bytes: float
    ) -> int:
        """Return how many layers are to lie in host memory.

        Parameters
        ----------
        n_layers, hosted : int
            Layers, and those in host memory now.
        layer_bytes, layer_s : float
            Mean packed bytes of a layer, and the seconds that they take to cross.
        free_bytes : float
            Bytes that the device has free for more; below 0 where it lacks room.
        """
        crossing_s, pass_s = hosted * layer_s, self._fastest_s
        chosen = hosted
        if pass_s > COMPUTING_SHARE * crossing_s:
            self.compute_s = pass_s
        elif pass_s >= LEAST_SHARE * crossing_s:
            if self.compute_s is None:
                chosen = hosted // 2
            else:
                self.compute_s = min(self.compute_s, pass_s)
        else:
            pass_s = math.inf  # it was not waited for
        if self.compute_s is not None and pass_s < math.inf:
            hidden = min(n_layers, int(self.compute_s / (SLACK * layer_s))) if layer_s else n_layers
            if abs(hidden - hosted) > n_layers // 16:  # less is within what is measured
                chosen = hidden
        if layer_bytes:
            room = (n_layers - hosted) * layer_bytes + free_bytes
            chosen = max(chosen, n_layers - int(max(0.0, room) // layer_bytes))
        self._settled = chosen == hosted
        self._restart()
        return chosen

    def settle(self) -> None:
        """Record that what was chosen cannot be done: `hosted` is asked again much later."""
        self._settled = True

    def __getstate__(self) -> dict[str, Any]:
        """Leave out times, which hold in one process."""
        return {**self.__dict__, "_begin_s": None, "_fastest_s": math.inf}


def crossing_seconds(device: torch.device, nbytes: float) -> float:
    """Return the seconds that a copy of so many bytes to a GPU takes; measures the link once."""
    return measure_link(device).copy_time(nbytes)


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that are free for K and V, less a share that is left free.

    No more than the process may take: see `torch.cuda.set_per_process_memory_fraction`.
    """
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - allocated
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + cached, allowed - allocated) - int(FREE_SHARE * total)
