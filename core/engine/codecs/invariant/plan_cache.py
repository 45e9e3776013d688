"""PlanCache: plans made before, which rows of the same kind may keep."""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ....errors import ArgumentTypeError
from ...kernels.candidates import MaskRule
from ..base import check_integer
from .planner import THRESHOLDS, Measured, Options, Plan, Search, candidates
from .sample import Sample

#: A plan is kept while it costs at most so much more than the best of those that it is checked
#: against. Where it costs more, but so little that parts of rows may be wrong, whole rows decide
#: between them.
CLOSE, DOUBTFUL = 1.003, 1.02
#: It saves at most so much less, or more, of the bytes of rows than it did at first: rows that
#: differ more may be of another kind, whose best masks are others.
LESS_SAVED, MORE_SAVED = 0.01, 0.02
#: Plans of a dtype, row size, kind and options at the most: all of them are checked at once.
MOST_ALIKE = 4
#: Shares of agreeing rows by which masks follow the rows, whatever the plan's field is.
FOLLOWING = (THRESHOLDS[5], THRESHOLDS[8], THRESHOLDS[10])


@dataclass(frozen=True)
class _Known:
    """A plan as it was when it was made.

    Parameters
    ----------
    key : hashable
        Kind, dtype, row size and options.
    rules : tuple of MaskRule
        Its rule, and those that it is checked against.
    saved : float
        The share of the bytes that it saved.
    above : float
        Its cost over the least one: parts of rows may rank plans otherwise than whole rows do.
    """

    key: Hashable
    rules: tuple[MaskRule, ...]
    saved: float
    above: float

    def replaces(self, other: _Known) -> bool:
        """Return whether the other is this one, or was made for rows of the same kind."""
        alike = abs(self.saved - other.saved) <= LESS_SAVED
        return self.key == other.key and self.rules[0] == other.rules[0] and alike

    def excess(self, found: Measured, raw_bytes: int) -> float:
        """Return what the plan costs over the best one that was found, 1 where it is as good.

        Infinite where rows are of another kind.
        """
        cost = float(found.costs[found.rules.index(self.rules[0])])
        saved = 1 - cost / max(1, raw_bytes)
        if not self.saved - LESS_SAVED <= saved <= self.saved + MORE_SAVED:
            return math.inf
        return cost / (self.above * float(found.costs.min()))


class PlanCache:
    """Plans of invariant bit packing by dtype, row size, kind and options.

    Give one to `InvariantCodec.fit`, or to `bitslab.compress`, for tensors of which many are alike:
    the weights of a model, the layers of a K/V cache. The plan of the first one is checked on each
    of the others, against the best masks of every other kind and those that follow its own rows,
    and kept where it costs at most 0.3 % more; else the tensor gets a plan of its own, which is
    then known too: up to 4 of a kind, so that tensors of several sorts may come in turns. Masks and
    values are always learnt from the tensor itself.

    Parameters
    ----------
    capacity : int
        Plans at the most; the one that was used longest ago makes room.

    Notes
    -----
    Threads may share one. It holds no tensors. The codec of a tensor depends on what was planned
    before it, and so, where threads share one, on which is first (see `copy`); without a PlanCache
    it depends on the tensor and the seed alone.

    Examples
    --------
    >>> import torch, bitslab
    >>> from bitslab.engine.codecs import PlanCache
    >>> plans = PlanCache()
    >>> weights = [torch.randn(256, 512).bfloat16() for _ in range(3)]
    >>> [bitslab.compress(w, plans=plans).codec.describe() for w in weights]
    ['ibp 2B k3 uniform', 'ibp 2B k3 uniform', 'ibp 2B k3 uniform']
    >>> plans.stats()
    {'planned': 1, 'kept': 2}
    """

    def __init__(self, capacity: int = 64) -> None:
        check_integer("capacity", capacity, range(1, 1 << 31))
        self._capacity = capacity
        #: The one that was used last comes last. It is replaced, never changed: a thread may read
        #: what it was.
        self._known: tuple[_Known, ...] = ()
        self._lock = threading.Lock()
        self._planned = self._kept = 0

    def __len__(self) -> int:
        """Return the number of plans."""
        return len(self._known)

    def __iter__(self) -> Iterator[_Known]:
        """Yield the plans, the one that was used last as the last."""
        return iter(self._known)

    def stats(self) -> dict[str, int]:
        """Return how many tensors were planned, and how many kept a plan."""
        with self._lock:
            return {"planned": self._planned, "kept": self._kept}

    def copy(self) -> PlanCache:
        """Return a cache with the plans of this one, whose `stats` begin at 0.

        For threads whose results must not depend on which of them comes first: each tensor gets a
        copy, and `update` collects their plans in the order of the tensors.
        """
        copied = PlanCache(self._capacity)
        copied.add(self)
        return copied

    def add(self, other: PlanCache) -> None:
        """Take over plans of another cache, the one that it used last as used last.

        Parameters
        ----------
        other : PlanCache
            Any.
        """
        if not isinstance(other, PlanCache):
            raise ArgumentTypeError(f"other: expected a PlanCache, got {type(other).__name__}")
        known = tuple(other)
        for plan in known:
            if plan is known[-1] or plan not in self._known:
                self._use(plan)

    def update(self, other: PlanCache) -> None:
        """Take over plans of another cache as `add` does, and its stats.

        Parameters
        ----------
        other : PlanCache
            Such as a `copy` of this one, with what was planned since.
        """
        self.add(other)
        stats = other.stats()
        with self._lock:
            self._planned += stats["planned"]
            self._kept += stats["kept"]

    def choose(
        self, kind: str, sample: Sample, dtype: torch.dtype, options: Options, n_rows: int
    ) -> Plan:
        """Return a plan for rows like those of a sample: a known one that suits, or a new one."""
        if not isinstance(kind, str):
            raise ArgumentTypeError(f"kind: expected a str, got {kind!r:.60}")
        key = (kind, dtype, sample.row_bytes, options)
        search = Search(sample, options, n_rows)
        raw_bytes = n_rows * sample.row_bytes
        known = [plan for plan in reversed(self._known) if plan.key == key]
        if known:
            rules = dict.fromkeys(rule for plan in known for rule in plan.rules)
            found = search.probe(tuple(rules), expected=known[0].rules[0])
            excesses = [plan.excess(found, raw_bytes) for plan in known]
            excess = min(excesses)
            if excess <= DOUBTFUL:
                kept = known[excesses.index(excess)]
                self._use(kept)
                with self._lock:
                    self._kept += 1
                if excess <= CLOSE:
                    return found[found.rules.index(kept.rules[0])]
                return search.best(found)
        found = search.probe(list(candidates(sample.row_bytes, dtype, options)))
        plan = search.best(found)
        place = found.rules.index(plan.candidate)
        saved = 1 - found.costs[place] / max(1, raw_bytes)
        above = found.costs[place] / found.costs.min()
        self._use(_Known(key, _rules(plan.candidate, found), saved, above))
        with self._lock:
            self._planned += 1
        return plan

    def _use(self, plan: _Known) -> None:
        """Put a plan last, known or new; what there are too many of makes room."""
        with self._lock:
            others = [known for known in self._known if not plan.replaces(known)]
            alike = [known for known in others if known.key == plan.key]
            if len(alike) >= MOST_ALIKE:
                others.remove(alike[0])
            self._known = (*others, plan)[-self._capacity :]


def _rules(chosen: MaskRule, found: Measured) -> tuple[MaskRule, ...]:
    """Return a plan's rule, the best ones of other widths and kinds, and those that follow rows."""
    rules: dict[MaskRule, None] = {chosen: None}
    classes: set[tuple[int, bool]] = set()
    for i in found.ranked():
        rule = found.rules[i]
        if (rule.chunk_bytes, rule.uniform) not in classes:
            classes.add((rule.chunk_bytes, rule.uniform))
            rules[rule] = None
    following: Sequence[MaskRule] = [
        MaskRule(chosen.chunk_bytes, chosen.uniform, threshold, 0) for threshold in FOLLOWING
    ]
    allowed = set(found.rules)
    rules |= {rule: None for rule in following if rule in allowed}
    return tuple(rules)
