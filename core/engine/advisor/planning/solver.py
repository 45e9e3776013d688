"""The search for the choices that cost a step least under a limit of memory.

Bytes that are alive where memory is short have a price, and so have seconds of the link and the SSD
where the timeline shows the device waiting for them. Given prices each site and module is decided
by itself; the price of memory is the least at which everything fits, and the other prices follow
from what the timeline then shows. Modules that cost the same differ by where they lie. The
best plan seen is improved by changes of one or two sites.

The effort is counted in positions of the timeline, not in time, so that equal measurements give
equal plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from .candidates import Choices
from .module_layouts import ModuleLayouts
from .option_costs import OptionCosts
from .solution import MARGIN_BYTES, Priced, Prices, Solution, repriced_tier
from .tier_room import with_room
from .timeline import Floats, Timeline

#: Moments times plans that are followed through, at most, for one limit of memory.
EFFORT, MOST_RUNS = 110_000, 800
#: Rounds of prices, at most; for a coarse search.
ROUNDS, COARSE_ROUNDS = 14, 4
#: Prices of all queues' seconds, of which the best is adapted by site; where a site's begins.
UNIFORM, FIRST_PRICE = (0.0, 0.01, 0.03, 0.08, 0.15, 0.3, 0.5, 1.0), 0.02
#: Share of the effort left behind the prices that layouts of modules take at most.
LAYOUT_SHARE = 0.2
#: Plans that are crossed with the best one, and steps of halving for each.
CROSSED, CROSSED_STEPS = 2, 5
#: Most moments at which memory is short that prices are made for.
MOST_MOMENTS = 6
#: Sites that are given more memory, and for each those that give it up, of changes of two sites.
GIVERS, TAKERS = 16, 12
#: Plans at other prices that are tried, and how much slower one may be that is improved.
WANDERINGS, NEAR = 100, 1.05
#: What a byte in a tier that is limited counts of one on the device, in search of the least memory.
LIMITED_SHARES = (0.0, 0.1, 0.3, 1.0)
#: Changes that make a plan fit at moments that had no price, at most.
MOST_RELIEFS = 60
#: Changes of a plan in search of the least memory of which one has to lower it.
RELIEFS_TRIED = 24

_Change = tuple[float, tuple[tuple[int, int], ...], int]


class Solver:
    """Searches choices for a timeline.

    Parameters
    ----------
    timeline : Timeline
        The step.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._n = len(timeline.candidates)
        self._modules = timeline.profile.modules
        self._rows = np.arange(self._n)
        self._plain = timeline.needed(timeline.keep_all())[0]
        self._costs = OptionCosts.of(timeline)
        self._checkpoint_s = np.array([each.checkpoint_s for each in self._modules])
        self._inside = [np.flatnonzero(timeline.module_of == m) for m in range(len(self._modules))]
        self._may_replay = np.array(["replay" in own for own in timeline.actions], bool)
        self._dear = self._free()
        for price in self._dear.queues.values():
            price += 1.0
        self._layouts = ModuleLayouts(timeline, self._costs)
        self._budget = 0
        #: By choices, the tiers that had too little room for what was last wanted in their place.
        self._overfull: dict[bytes, frozenset[str]] = {}

    # Prices

    def _free(self) -> Prices:
        """Return prices of nothing."""
        queues = {name: np.zeros(self._n) for name in self._costs.queue_s}
        return Prices(queues, np.zeros(len(self._modules)), np.ones(self._n), np.ones(MOST_MOMENTS))

    def _alive(self, at: int) -> tuple[Floats, Floats]:
        """Return bytes at a moment: of each candidate, and of each module checkpointed.

        Returns
        -------
        numpy.ndarray
            ``[sites, candidates]`` and ``[modules]``.
        """
        t = self._timeline
        used = (t.saved <= at) & (at < np.maximum(t.released, t.saved + 1))
        used |= (t.read <= at) & (at < t.freed)
        kept = (t.saved <= at) & (at < t.freed)
        of_kept = t.nbytes * kept
        alive = np.where(self._costs.kept, of_kept[:, None], (t.nbytes * used)[:, None])
        alive += self._costs.packed * ((t.saved <= at) & (at <= t.read))[:, None]
        alive += t.staged_out * (t.saved == at)[:, None] + t.staged_in * (t.read == at)[:, None]
        again = np.zeros(len(self._modules))
        for m, inside in enumerate(self._inside):
            each = self._modules[m]
            begin, end = t.moments[at], t.moments[at]
            if each.begin_s <= begin and end < each.backward_end_s:
                again[m] += each.checkpoint_bytes
            late = kept[inside] & (at >= t.recomputed[m])
            again[m] += float((t.nbytes[inside] * (used[inside] | late)).sum())
        return alive, again

    def _totals(self, prices: Prices) -> Floats:
        """Return the seconds of each candidate at prices, ``[sites, candidates]``."""
        total = self._costs.device_s.copy()
        for name, price in prices.queues.items():
            total += price[:, None] * self._costs.queue_s[name]
        if prices.host or prices.disk:
            total += prices.host * self._costs.host + prices.disk * self._costs.disk
        return total

    def _choose(self, priced: Priced, byte_s: float) -> Choices:
        """Decide each site and module by itself, at a price in seconds of a byte."""
        costs = priced.seconds + byte_s * priced.alive
        options = np.argmin(costs, axis=1)
        checkpointed = np.zeros(len(self._modules), bool)
        if len(self._modules):
            best = costs[self._rows, options]
            sums = np.bincount(self._timeline.module_of + 1, best, len(self._modules) + 1)[1:]
            checkpointed = priced.checkpoint_s + byte_s * priced.again < sums
        return Choices(options.astype(np.intp), checkpointed)

    def _fits(self, choices: Choices, limit: float) -> bool:
        return bool((self._timeline.floor(choices) <= limit + MARGIN_BYTES).all())

    def _priced(self, prices: Prices, moments: list[int]) -> Priced:
        """Return seconds at prices, and bytes alive at moments together."""
        parts = [self._alive(at) for at in moments]
        alive, again = np.zeros_like(parts[0][0]), np.zeros_like(parts[0][1])
        for weight, part in zip(prices.moments, parts, strict=False):
            alive += weight * part[0]
            again += weight * part[1]
        alive *= prices.bytes[:, None]
        return Priced(self._totals(prices), self._checkpoint_s + prices.checkpoints, alive, again)

    def priced(self, prices: Prices, limit: float) -> Choices:
        """Return the choices at the least price of memory at which everything fits."""
        moments = [int(np.argmax(self._plain))]
        while True:
            priced = self._priced(prices, moments)
            choices = self._with_sources(self._cheapest(priced, limit), priced.seconds)
            need = self._timeline.floor(choices)
            worst = int(np.argmax(need))
            if need[worst] <= limit + MARGIN_BYTES:
                return choices
            if worst in moments or len(moments) == MOST_MOMENTS:
                return self._relieved(choices, priced, limit)
            moments.append(worst)

    def _relieved(self, choices: Choices, priced: Priced, limit: float) -> Choices:
        """Return choices that fit wherever they do not, by what costs least for the bytes there.

        Of each site and module once, so that it ends; they may not fit then.
        """
        options, flags = choices.options.copy(), choices.checkpointed.copy()
        sites, modules = np.ones(self._n, bool), np.ones(len(self._modules), bool)
        for _ in range(MOST_RELIEFS):
            choices = self._with_sources(Choices(options, flags), priced.seconds)
            options = choices.options.copy()
            need = self._timeline.floor(choices)
            worst = int(np.argmax(need))
            if need[worst] <= limit + MARGIN_BYTES:
                break
            alive, again = self._alive(worst)
            now = self._rows, options
            free = sites & ~self._timeline.inside(choices)
            freed = np.where(free[:, None], alive[now][:, None] - alive, 0.0)
            cost = np.maximum(priced.seconds - priced.seconds[now][:, None], 0.0)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(freed > 0, cost / freed, math.inf)
            best = np.argmin(ratio, axis=1)
            found = [(float(ratio[i, best[i]]), 0, int(i)) for i in np.flatnonzero(free)]
            for m in np.flatnonzero(modules).tolist():
                own = self._inside[m]
                more = priced.checkpoint_s[m] - float(priced.seconds[now][own].sum())
                less = float(alive[now][own].sum()) - again[m]
                sign = -1.0 if flags[m] else 1.0
                if sign * less > 0:
                    found.append((max(sign * more, 0.0) / (sign * less), 1, m))
            price, of_module, number = min(found, default=(math.inf, 0, 0))
            if not math.isfinite(price):
                break
            if of_module:
                flags[number] = ~flags[number]
                modules[number] = False
            else:
                options[number] = best[number]
                sites[number] = False
        return Choices(options, flags)

    def _cheapest(self, priced: Priced, limit: float) -> Choices:
        """Return the choices at the least price of a byte that fit, found by halving."""
        low = self._choose(priced, 0.0)
        if self._fits(low, limit):
            return low
        exponent = -14.0  # seconds a byte, as a power of ten
        high = self._choose(priced, 10.0**exponent)
        while not self._fits(high, limit):
            if exponent >= -2:
                return high
            low, exponent = high, exponent + 1.0
            high = self._choose(priced, 10.0**exponent)
        below = exponent - 1.0
        for _ in range(12):
            middle = (below + exponent) / 2
            found = self._choose(priced, 10.0**middle)
            if self._fits(found, limit):
                exponent, high = middle, found
            else:
                below, low = middle, found
        return self._between(low, high, limit)

    def _between(self, low: Choices, high: Choices, limit: float) -> Choices:
        """Return the choices that fit with as many of those that do not as there is room for."""
        if (low.checkpointed != high.checkpointed).any():
            for m in np.flatnonzero(high.checkpointed & ~low.checkpointed):
                flags = high.checkpointed.copy()
                flags[m] = False
                found = replace(high, checkpointed=flags)
                if self._fits(found, limit):
                    high = found
        for i in np.flatnonzero(low.options != high.options)[:32]:
            options = high.options.copy()
            options[i] = low.options[i]
            found = replace(high, options=options)
            if self._fits(found, limit):
                high = found
        return high

    # Search

    def solve(self, limit: float, *, coarse: bool = False) -> Solution:
        """Return the best plan found whose memory is at most `limit` bytes.

        Parameters
        ----------
        limit : float
            Bytes.
        coarse : bool
            Rounds of prices alone, and fewer.

        Returns
        -------
        Solution
            Which does not fit where none was found that does.
        """
        self._budget = min(EFFORT // len(self._timeline.moments), MOST_RUNS)
        seen: dict[bytes, Solution] = {}
        best, used = self._evenly_priced(limit, seen, UNIFORM[::2] if coarse else UNIFORM)
        best, used = self._adapted(best, used, limit, seen, COARSE_ROUNDS if coarse else ROUNDS)
        if coarse or self._is_free(best):
            return best
        fits = partial(self._fits, limit=limit)
        followed = partial(self._followed, limit=limit, seen=seen)
        best = min((best, *map(followed, self._starts(limit))), key=Solution.rank)
        priced = self._crossed(best, limit, seen)
        best = self._layouts.best(priced, fits, followed, int(LAYOUT_SHARE * self._budget))
        # From a layout few changes lead to what those of the other plan lead to: half for each.
        left, self._budget = self._budget, self._budget // 2
        improved, prices = self._improve(priced, used, limit, seen)
        self._budget += left - left // 2
        if improved.better_than(best):
            best, used = improved, prices
        return self._wander(*self._improve(best, used, limit, seen), limit, seen)

    def _evenly_priced(
        self, limit: float, seen: dict[bytes, Solution], tried: tuple[float, ...]
    ) -> tuple[Solution, Prices]:
        """Return the best plan at one price of all queues' seconds."""
        best, used = None, self._free()
        for price in tried:
            prices = self._free()
            for name in prices.queues:
                prices.queues[name] += price
            found = self._followed(self.priced(prices, limit), limit, seen)
            if found.better_than(best):
                best, used = found, prices
            if best is not None and self._is_free(best):
                break
        assert best is not None
        return best, used

    def _adapted(
        self,
        best: Solution,
        prices: Prices,
        limit: float,
        seen: dict[bytes, Solution],
        rounds: int,
    ) -> tuple[Solution, Prices]:
        """Follow prices that rise by site where the device waits, and fall elsewhere."""
        found, used = best, prices
        for k in range(rounds):
            if self._is_free(best):
                break
            prices = self._repriced(prices, found, 2.0 / (1 + 0.3 * k))
            found = self._followed(self.priced(prices, limit), limit, seen)
            if found.better_than(best):
                best, used = found, prices
        return best, used

    def _crossed(self, best: Solution, limit: float, seen: dict[bytes, Solution]) -> Solution:
        """Take the first sites from one plan and the rest from another, halving where to cut."""
        others = sorted((each for each in seen.values() if each.fits), key=Solution.rank)
        for other in others[1 : 1 + CROSSED]:
            if self._budget <= CROSSED_STEPS or self._is_free(best):
                break
            for first, second in ((best, other), (other, best)):
                low, high = 0, self._n
                for _ in range(CROSSED_STEPS):
                    cut = (low + high) // 2
                    if cut in (low, high):
                        break
                    found = self._followed(self._cut(first, second, cut), limit, seen)
                    if found.better_than(best):
                        best = found
                    # On which side more is to gain is seen from where the device waits.
                    if found.fits and found.prediction.stall_s <= first.prediction.stall_s:
                        low = cut
                    else:
                        high = cut
        return best

    def _cut(self, first: Solution, second: Solution, cut: int) -> Choices:
        options = np.where(self._rows < cut, first.choices.options, second.choices.options)
        flags = second.choices.checkpointed.copy()
        for m, sites in enumerate(self._inside):
            if len(sites) and sites[0] < cut:
                flags[m] = first.choices.checkpointed[m]
        return Choices(options, flags)

    def least(self) -> Solution:
        """Return a plan that takes as little memory as was found, whatever it costs."""
        best: Solution | None = None
        free = self._free()
        limited = {tier: math.isfinite(room) for tier, room in self._timeline.room.items()}
        shares = LIMITED_SHARES if self._timeline.has_limited_room else LIMITED_SHARES[:1]
        moments = [int(np.argmax(self._plain))]
        tried = set()
        while len(moments) <= MOST_MOMENTS and moments[-1] not in tried:
            tried.add(moments[-1])
            for which, share in itertools.product((moments, moments[-1:]), shares):
                priced = self._priced(free, which)
                # As if what is moved took so much of the device: other ways take less then.
                moved = share * (
                    limited["host"] * self._costs.host + limited["disk"] * self._costs.disk
                )
                choices = self._choose(replace(priced, alive=priced.alive + moved), 1.0)
                for each in (choices, replace(choices, checkpointed=choices.checkpointed & False)):
                    each = self._repaired(each, priced.alive)
                    prediction, trace = self._timeline.follow(each, limit_bytes=0.0)
                    found = Solution(each, prediction, trace, True, prediction.peak_bytes)
                    if best is None or prediction.peak_bytes < best.prediction.peak_bytes:
                        best = found
            assert best is not None
            moments.append(int(np.argmax(self._timeline.floor(best.choices))))
        assert best is not None
        if not self._timeline.has_limited_room:
            return best
        choices = self._lowered(best.choices)
        prediction, trace = self._timeline.follow(choices, limit_bytes=0.0)
        return Solution(choices, prediction, trace, True, prediction.peak_bytes)

    def _lowered(self, choices: Choices) -> Choices:
        """Return choices that take less memory, by changes of a site or module at a time.

        Where tiers are limited, what is best at one moment may leave no room for another one.
        """
        peak = float(self._timeline.floor(choices).max())
        for _ in range(MOST_RELIEFS):
            for changed in itertools.islice(self._reliefs(choices), RELIEFS_TRIED):
                found = float(self._timeline.floor(changed).max())
                if found < peak - MARGIN_BYTES:
                    choices, peak = changed, found
                    break
            else:
                break
        return choices

    def _reliefs(self, choices: Choices) -> Iterator[Choices]:
        """Yield valid choices that take less where most is needed, those first that free most."""
        alive, again = self._alive(int(np.argmax(self._timeline.floor(choices))))
        now = alive[self._rows, choices.options]
        inside = self._timeline.inside(choices)
        freed = np.where(np.isfinite(self._costs.device_s), now[:, None] - alive, -math.inf)
        freed[inside] = -math.inf
        found = [(-float(freed[i, k]), int(i), int(k)) for i, k in np.argwhere(freed > 0)]
        for m, own in enumerate(self._inside):
            less = float(now[own].sum()) - float(again[m])
            found.append((less if choices.checkpointed[m] else -less, -1, m))
        for _, i, k in sorted(found):
            options, flags = choices.options.copy(), choices.checkpointed.copy()
            if i < 0:
                flags[k] = ~flags[k]
            else:
                options[i] = k
            yield self._repaired(Choices(options, flags), alive)

    def _with_sources(self, choices: Choices, seconds: Floats) -> Choices:
        """Return choices in which what cannot be replayed is moved or packed, or kept at last.

        A source in a checkpointed module is there in that module's backward pass only.
        """
        t, inside = self._timeline, self._timeline.inside(choices)
        options = choices.options
        for i in np.flatnonzero(self._may_replay & ~inside).tolist():
            own = t.actions[i]
            if own[options[i]] == "replay" and any(inside[s] for s in t.sources[i]):
                others = [k for k, a in enumerate(own) if a not in ("keep", "replay")]
                if options is choices.options:
                    options = options.copy()
                options[i] = min(others, key=lambda k: float(seconds[i, k]), default=0)
        return replace(choices, options=options)

    def _repaired(self, choices: Choices, held: Floats | None = None) -> Choices:
        """Return choices that are valid; `held` as for `with_room`."""
        if self._timeline.valid(choices):
            return choices
        repaired = self._with_sources(choices, self._totals(self._dear))
        if self._timeline.valid(repaired):
            return repaired
        return with_room(self._timeline, repaired, held)

    def _followed(self, choices: Choices, limit: float, seen: dict[bytes, Solution]) -> Solution:
        wanted, choices = choices, self._repaired(choices)
        key = choices.key()
        repaired = choices is not wanted
        self._overfull[key] = self._timeline.overfull(wanted) if repaired else frozenset()
        if key not in seen:
            self._budget -= 1
            prediction, trace = self._timeline.follow(choices, limit_bytes=limit)
            fits = prediction.peak_bytes <= limit + MARGIN_BYTES
            seen[key] = Solution(choices, prediction, trace, fits, limit)
        return seen[key]

    def _repriced(self, prices: Prices, found: Solution, rate: float) -> Prices:
        """Return prices moved towards what the device waited for."""
        t, trace = self._timeline, found.trace
        queues = {}
        for name, price in prices.queues.items():
            waited = np.zeros(self._n)
            order = trace.queues[name]
            moments = t.saved if name in ("up", "write") else t.read
            for first, last in trace.waited_for[name]:
                begin, end = moments[order[first]], moments[order[last]]
                waited[(begin <= moments) & (moments <= end)] = 1.0
            # From a start of its own, and never so low that it could not rise again soon.
            risen = np.minimum(np.maximum(price, FIRST_PRICE) * math.exp(rate), 1.0)
            fallen = price * math.exp(-0.5 * rate)
            queues[name] = np.where(waited > 0, risen, np.where(fallen < 1e-4, 0.0, fallen))
        host, disk = prices.host, prices.disk
        profile = t.profile
        chosen = self._rows, found.choices.options
        outside = ~t.inside(found.choices)
        overfull = self._overfull.get(found.choices.key(), frozenset())
        if profile.host_bytes is not None:
            over = float((self._costs.host[chosen] * outside).sum()) > 0.999 * profile.host_bytes
            host = repriced_tier(host, over or "host" in overfull)
        most = profile.most_disk_bytes
        if most is not None:
            over = float((self._costs.disk[chosen] * outside).sum()) > 0.999 * most
            disk = repriced_tier(disk, over or "disk" in overfull)
        return replace(prices, queues=queues, host=host, disk=disk)

    def _starts(self, limit: float) -> Iterator[Choices]:
        """Yield plans of one kind: nothing moved, and waits that cost all they take."""
        for names in (tuple(self._costs.queue_s), ("down", "read"), ("up", "write")):
            queues = {n: np.full(self._n, 1.0 * (n in names)) for n in self._costs.queue_s}
            yield self.priced(replace(self._free(), queues=queues), limit)
        # The last to be saved are read first: these are dear, the others free.
        for share in (0.5, 0.75, 0.9):
            late = (self._rows >= share * self._n).astype(np.float64)
            queues = dict.fromkeys(self._costs.queue_s, late)
            yield self.priced(replace(self._free(), queues=queues), limit)

    # Changes of single plans

    def _improve(
        self, best: Solution, prices: Prices, limit: float, seen: dict[bytes, Solution]
    ) -> tuple[Solution, Prices]:
        """Change one or two sites, or a module, as long as that gains and effort is left."""
        while self._budget > 0 and not self._is_free(best):
            before = best
            for changed in self._changes(best, prices, limit):
                if changed.key() in seen or not self._layouts.may_gain(changed, best):
                    continue
                if not self._fits(changed, limit):
                    continue
                found = self._followed(changed, limit, seen)
                if found.better_than(best):
                    best = found
                    break
                if self._budget <= 0:
                    break
            if best is before:
                break
            prices = self._repriced(prices, best, 0.5)
        return best, prices

    def _wander(
        self, best: Solution, prices: Prices, limit: float, seen: dict[bytes, Solution]
    ) -> Solution:
        """Spend what effort is left on plans at prices near those of the best one."""
        draw = np.random.default_rng(0)
        tries = 0
        while self._budget > 0 and not self._is_free(best) and tries < WANDERINGS:
            tries += 1
            spread = draw.choice([0.1, 0.3, 1.0])
            queues = {}
            for name, price in prices.queues.items():
                factor = np.exp(spread * draw.standard_normal(self._n))
                queues[name] = np.clip(price * factor + draw.choice([0.0, 0.1]) * spread, 0.0, 2.0)
            # Some modules are made dear to checkpoint, some to leave.
            shift = self._checkpoint_s * draw.choice([-1.0, 0.0, 0.0, 1.0], len(self._modules))
            near = replace(
                prices,
                queues=queues,
                checkpoints=shift * draw.random(),
                bytes=np.exp(0.5 * spread * draw.standard_normal(self._n)),
                moments=np.exp(draw.standard_normal(MOST_MOMENTS)),
            )
            found = self._followed(self.priced(near, limit), limit, seen)
            if found.fits and found.prediction.step_s <= best.prediction.step_s * NEAR:
                found, used = self._improve(found, near, limit, seen)
                if found.better_than(best):
                    best, prices = found, used
        return best

    def _is_free(self, found: Solution) -> bool:
        """Return whether a plan fits and costs nothing: no other is better."""
        plain_s = self._timeline.profile.step_s
        return found.fits and found.prediction.step_s <= plain_s * (1 + 1e-9)

    def _changes(self, at: Solution, prices: Prices, limit: float) -> Iterator[Choices]:
        """Yield changed choices, those first that promise most."""
        totals = self._totals(prices)
        choices, inside = at.choices, self._timeline.inside(at.choices)
        need = self._timeline.floor(choices)
        peak = int(np.argmax(need))
        alive = self._alive(peak)[0]
        cost = totals - totals[self._rows, choices.options][:, None]
        more = alive - alive[self._rows, choices.options][:, None]
        cost[inside] = math.inf
        cost[self._rows, choices.options] = math.inf
        #: Promised seconds, sites with their new candidates, and a module to change or -1.
        found: list[_Change] = []
        for i, k in zip(*np.nonzero(np.isfinite(cost)), strict=True):
            found.append((float(cost[i, k]), ((int(i), int(k)),), -1))
        found += self._pairs(cost, more, limit - need[peak])
        for m, sites in enumerate(self._inside):
            own = float(totals[sites, choices.options[sites]].sum())
            gain = float(self._checkpoint_s[m]) - own
            found.append((-gain if choices.checkpointed[m] else gain, (), m))
        # Those that promise no gain too: prices mislead where waits come and go.
        found.sort()
        for _, changes, m in found:
            options, flags = choices.options, choices.checkpointed
            if changes:
                options = options.copy()
                for i, k in changes:
                    options[i] = k
            if m >= 0:
                flags = flags.copy()
                flags[m] = ~flags[m]
            yield Choices(options, flags)

    def _pairs(self, cost: Floats, more: Floats, slack: float) -> list[_Change]:
        """Return changes by which one site takes memory that another one gives."""
        found: list[_Change] = []
        takers = [(cost[i, k], int(i), int(k)) for i, k in zip(*np.nonzero(cost < 0), strict=True)]
        givers = [
            (cost[i, k] / -more[i, k], int(i), int(k))
            for i, k in zip(*np.nonzero(np.isfinite(cost) & (more < 0)), strict=True)
        ]
        givers.sort()
        for gain, i, k in sorted(takers)[:GIVERS]:
            added = 0
            for _, j, other in givers:
                if j == i or more[i, k] + more[j, other] > slack:
                    continue
                found.append((float(gain + cost[j, other]), ((i, k), (j, other)), -1))
                added += 1
                if added == TAKERS:
                    break
        return found
