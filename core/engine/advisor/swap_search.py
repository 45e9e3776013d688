"""The plan of least seconds: which option each site of a step takes, decided for all together.

Copies share the link and the bytes that may be under way, so that one site's choice changes what
another one's costs, and some pay only together: where compute waits for the first of three raw
copies, packing one of the others alone gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from .swap_timeline import Plans, Seconds

#: As many plans are all tried, where there are no last decisions.
MOST_PLANS = 1024
#: Of more sites, those of one kind change together.
MOST_SITES = 128
#: Plans that pack those sites that gain most, by several measures.
MOST_STEPS = 64
#: Changes that are tried in pairs.
MOST_PAIRED = 32
#: Rounds of changes, each followed by the best of them together.
ROUNDS = 12
#: A change that gains less is none: sums in another order differ by as much.
LEAST_GAIN = 1e-9


class PlanSearch:
    """Finds a plan for sites.

    Parameters
    ----------
    options : sequence of int
        Number of options of each site, the first to move it raw.
    seconds : callable
        Returns the seconds ``[B]`` of plans ``[N, B]``.
    kinds : sequence of hashable
        Equal for sites of equal size, shares and so on.
    gains : sequence of sequence of float
        For each site by several measures, what packing it may gain.
    """

    def __init__(
        self,
        options: Sequence[int],
        seconds: Callable[[Plans], Seconds],
        kinds: Sequence[Hashable],
        gains: Sequence[Sequence[float]],
    ) -> None:
        self._options = np.asarray(options, np.intp)
        self._seconds = seconds
        groups: dict[Hashable, list[int]] = {}
        for i, kind in enumerate(kinds):
            groups.setdefault(kind, []).append(i)
        #: What changes together: sites by themselves, or those of a kind.
        self.units = [np.array([i]) for i in range(len(options))]
        self._kinds = [np.array(group) for group in groups.values() if len(group) > 1]
        if len(options) > MOST_SITES:
            self.units = [np.array(group) for group in groups.values()]
            self._kinds = []
        self._gains = np.asarray(gains, np.float64).reshape(len(options), -1)

    def best(self, starts: Sequence[Sequence[int]], searches_all: bool) -> list[int]:
        """Return a plan that no change of one unit makes better.

        Parameters
        ----------
        starts : sequence
            Plans to begin with.
        searches_all : bool
            Begin with others, too, packed in the order of the forward pass, of size and of gain;
            and end with one that no change of two units makes better, as far as they are tried.
        """
        options = self._options
        if len(options) == 0:
            return []
        if searches_all and float(np.prod(options.astype(np.float64))) <= MOST_PLANS:
            plans = np.indices(options.tolist()).reshape(len(options), -1)
            seconds = self._seconds(plans)
            # Of equals one that was given, then that which packs the fewest.
            given = np.array(starts, np.intp).T
            given_s = self._seconds(given)
            if given_s.min() <= seconds.min() + LEAST_GAIN * abs(seconds.min()):
                return _column(given, int(np.argmin(given_s)))
            return _column(plans, int(np.argmin(seconds)))
        plans = np.array(starts, np.intp).T
        if searches_all:
            plans = np.concatenate([plans, self._steps()], axis=1)
        seconds = self._seconds(plans)
        plan, least = plans[:, int(np.argmin(seconds))].copy(), float(seconds.min())
        for _ in range(ROUNDS):
            plan, found = self._improved(plan, least, searches_all)
            if found >= least - LEAST_GAIN * abs(least):
                break
            least = found
        return [int(option) for option in plan]

    def _steps(self) -> Plans:
        """Return plans in which the first, the last, or those of most gain are packed."""
        n = len(self._options)
        counts = np.unique(np.linspace(1, n, min(n, MOST_STEPS)).astype(np.intp))
        orders = [np.arange(n), np.arange(n)[::-1]]
        orders += [np.argsort(-gain, kind="stable") for gain in self._gains.T]
        packed = np.minimum(1, self._options - 1)
        plans = np.zeros((n, len(orders) * len(counts)), np.intp)
        for at, order in enumerate(orders):
            for k, count in enumerate(counts):
                chosen = order[:count]
                plans[chosen, at * len(counts) + k] = packed[chosen]
        return plans

    def _improved(self, plan: Plans, least: float, searches_all: bool) -> tuple[Plans, float]:
        """Return the best plan that differs in some units, and its seconds."""
        changes = [
            (unit, option)
            for unit in [*self.units, *self._kinds]
            for option in range(int(self._options[unit].max()))
            if (plan[unit] != np.minimum(option, self._options[unit] - 1)).any()
        ]
        if not changes:
            return plan, least
        seconds = self._seconds(self._changed(plan, [[change] for change in changes]))
        order = [int(i) for i in np.argsort(seconds, kind="stable")]
        best, found = [changes[order[0]]], float(seconds[order[0]])
        # Those that gain, one more at a time, and pairs of those that lose least.
        gaining = [changes[i] for i in order if seconds[i] < least]
        if not gaining and not searches_all:
            return plan, least
        together = [gaining[: k + 1][::-1] for k in range(1, len(gaining))]
        few = [changes[i] for i in order[:MOST_PAIRED]]
        together += [[a, b] for i, a in enumerate(few) for b in few[:i]]
        if together:
            seconds = self._seconds(self._changed(plan, together))
            k = int(np.argmin(seconds))
            if seconds[k] < found:
                best, found = together[k], float(seconds[k])
        if found >= least:
            return plan, least
        return self._changed(plan, [best])[:, 0], found

    def _changed(self, plan: Plans, changes: Sequence[Sequence[tuple[Plans, int]]]) -> Plans:
        plans = np.repeat(plan[:, None], len(changes), axis=1)
        for column, each in enumerate(changes):
            for unit, option in each:
                plans[unit, column] = np.minimum(option, self._options[unit] - 1)
        return plans


def _column(plans: Plans, k: int) -> list[int]:
    return [int(option) for option in plans[:, k]]
