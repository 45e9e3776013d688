"""Layouts of modules: which are moved, which remain on the device, which are checkpointed.

Prices cannot tell modules apart that cost the same, as the layers of a transformer do: at any price
all of them are checkpointed or none, and which ones are not after all is an accident. Yet where
they lie matters. Those that are moved are best spread evenly, so that the link serves one of them
while others are computed, or are the first ones, which have the most time to leave, or both. The
last ones are read first, so that little memory is gained by computing them again.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from .candidates import Choices
from .option_costs import OptionCosts
from .solution import Solution
from .timeline import Indices, Timeline

#: Seconds of the device that a second of the queues counts as where all of a module leaves it.
AWAY_PRICES = (0.1, 0.0, 1.0)
#: Shares of the modules over which those that leave are spread; 0: they follow each other.
SPREADS = (1.0, 0.65, 0.0)
#: Share of a step's seconds that a plan has to gain to be followed through.
LEAST_GAIN = 1e-6


class ModuleLayouts:
    """The layouts of a step's modules.

    Parameters
    ----------
    timeline : Timeline
        The step.
    costs : OptionCosts
        Of its candidates.
    """

    def __init__(self, timeline: Timeline, costs: OptionCosts) -> None:
        modules = timeline.profile.modules
        self._timeline, self._costs = timeline, costs
        self._checkpoint_s = np.array([each.checkpoint_s for each in modules])
        self._rows = np.arange(len(timeline.candidates))
        saving = np.unique(timeline.module_of[timeline.module_of >= 0]).tolist()
        #: Modules that save anything, in the order in which they run.
        self._order = sorted(saving, key=lambda m: modules[m].begin_s)
        found = [own.index("replay") if "replay" in own else 0 for own in timeline.actions]
        replay, kept = np.array(found, np.intp), timeline.keep_all().options
        cheap = np.where(self._is_cheap(replay), replay, kept)
        #: By site the numbers of candidates: of modules that move nothing, and that leave.
        self._here = _distinct([replay, cheap, kept])
        self._away = _distinct([self._leaving(price) for price in AWAY_PRICES])

    def _is_cheap(self, options: Indices) -> npt.NDArray[np.bool_]:
        """Return which candidates take less for a byte than computing all of the module again."""
        of, nbytes = self._timeline.module_of, self._timeline.nbytes
        modules = len(self._checkpoint_s)
        total = np.bincount(of + 1, nbytes, modules + 1)[1:]
        byte_s = np.append(self._checkpoint_s / np.maximum(total, 1.0), np.inf)  # of -1: no module
        cheap: npt.NDArray[np.bool_] = (
            self._costs.device_s[self._rows, options] < byte_s[of] * nbytes
        )
        return cheap

    def _leaving(self, price: float) -> Indices:
        """Return the candidates that cost least of those that take none of the device's memory."""
        seconds = self._costs.device_s + price * sum(self._costs.queue_s.values())
        seconds[self._costs.kept | (self._costs.packed > 0)] = np.inf
        found = np.argmin(seconds, axis=1)
        return np.where(np.isfinite(seconds[self._rows, found]), found, 0).astype(np.intp)

    def least_s(self, choices: Choices) -> float:
        """Return the seconds of a step under a plan as if nothing was waited for."""
        seconds = self._costs.device_s[self._rows, choices.options]
        outside = float(seconds[~self._timeline.inside(choices)].sum())
        again = float(self._checkpoint_s[choices.checkpointed].sum())
        return self._timeline.profile.step_s + outside + again

    def may_gain(self, choices: Choices, best: Solution) -> bool:
        """Return whether a plan that fits may be better than another one."""
        least_s = best.prediction.step_s * (1 - LEAST_GAIN)
        return not best.fits or self.least_s(choices) < least_s

    def best(
        self,
        best: Solution,
        fits: Callable[[Choices], bool],
        followed: Callable[[Choices], Solution],
        most_runs: int,
    ) -> Solution:
        """Return the best of a plan and of layouts.

        Parameters
        ----------
        best : Solution
            A plan.
        fits : callable
            Returns whether a plan may fit.
        followed : callable
            Follows a plan through.
        most_runs : int
            How many layouts are followed through, at most.
        """
        n, left = len(self._order), most_runs
        # Sites of no module are kept where that fits: one that is moved late may be waited for.
        bases = [
            np.where(self._timeline.module_of < 0, options, 0)
            for options in (self._timeline.keep_all().options, best.choices.options)
        ]
        for here, away in itertools.product(self._here, self._away):
            made = partial(self._layouts, _distinct(bases), here, away)
            most = bisect_left(
                range(n), True, key=lambda k: not any(map(fits, made(k + 1, n - k - 1)))
            )
            for n_here in sorted({most, (most + 1) // 2, min(most, 1)}, reverse=True):
                for share in SPREADS:
                    if left:
                        family = partial(made, n_here, share=share)
                        best, left = self._climbed(best, family, n - n_here, fits, followed, left)
        return best

    def _climbed(
        self,
        best: Solution,
        family: Callable[[int], Iterator[Choices]],
        most: int,
        fits: Callable[[Choices], bool],
        followed: Callable[[Choices], Solution],
        runs: int,
    ) -> tuple[Solution, int]:
        """Return the best of a plan and a family of layouts, and how many runs are left.

        The family is by the number of modules that leave, which is `most` at most. One more gains
        the seconds of computing it again, until it is waited for.
        """

        def promising(n_away: int) -> Choices | None:
            made = family(n_away) if n_away <= most else ()
            return next((each for each in made if self.may_gain(each, best) and fits(each)), None)

        first = bisect_left(range(most + 1), True, key=lambda n: promising(n) is not None)
        at, step, missed = first - 1, 1, False
        while step and runs:
            made, better = promising(at + step), False
            if made is not None:
                runs -= 1
                found = followed(made)
                better = found.better_than(best)
            if better:
                best, at, step, missed = found, at + step, 2 * step, False
            elif step == 1 and made is not None and not missed:
                at, missed = at + 1, True  # where others lie, one more may gain
            else:
                step //= 2
        return best, runs

    def _layouts(
        self,
        bases: list[Indices],
        here: Indices,
        away: Indices,
        n_here: int,
        n_away: int,
        share: float = 1.0,
    ) -> Iterator[Choices]:
        """Yield the layout whose last modules remain while others leave, with each base.

        Those that leave are spread evenly over this share of all but the last ones, from the first
        one on. The rest is checkpointed; what is in no module is as in the base.
        """
        of, order = self._timeline.module_of, self._order
        n_first = len(order) - n_here
        among = max(n_away, round(share * n_first))
        flags, leaves = np.zeros((2, len(self._checkpoint_s)), bool)
        leaves[[order[j * among // n_away] for j in range(n_away)]] = True
        flags[order[:n_first]] = True
        flags &= ~leaves
        own = np.where(leaves[of], away, here) if len(order) else here
        for base in bases:
            yield Choices(np.where(of < 0, base, own), flags)


def _distinct(modes: list[Indices]) -> list[Indices]:
    return list({mode.tobytes(): mode for mode in modes}.values())
