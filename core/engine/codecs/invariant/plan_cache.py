"""PlanCache: plans made before, which rows of the same kind may keep."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from ....errors import ArgumentTypeError
from ...kernels.candidates import MaskRule
from ..base import check_integer
from .planner import THRESHOLDS, Measured, Options, Plan, Sample, Search, candidates

#: A plan is kept while it costs at most so much more than the best of those that it is checked
#: against. Where it costs more, but so little that parts of rows may be wrong, whole rows decide
#: between them.
CLOSE, DOUBTFUL = 1.003, 1.02
#: It saves at most so much less, or more, of the bytes of rows than it did at first: rows that
#: differ more may be of another kind, whose best masks are others.
LESS_SAVED, MORE_SAVED = 0.01, 0.02
#: Shares of agreeing rows by which masks follow the rows, whatever the plan's field is.
FOLLOWING = (THRESHOLDS[5], THRESHOLDS[8], THRESHOLDS[10])


@dataclass(frozen=True)
class _Known:
    """A plan as it was when it was made.

    Parameters
    ----------
    rules : tuple of MaskRule
        Its rule, and those that it is checked against.
    saved : float
        The share of the bytes that it saved.
    above : float
        Its cost over the least one: parts of rows may rank plans otherwise than whole rows do.
    """

    rules: tuple[MaskRule, ...]
    saved: float
    above: float


class PlanCache:
    """Plans of invariant bit packing by dtype, row size, kind and options.

    Give one to `InvariantCodec.fit`, or to `bitslab.compress`, for tensors of which many are alike:
    the weights of a model, the layers of a K/V cache. The plan of the first one is checked on each
    of the others, against the best masks of every other kind and those that follow its own rows,
    and kept where it costs at most 0.3 % more; else the tensor gets a plan of its own, which is
    then the one that is known. Masks and values are always learnt from the tensor itself.

    Parameters
    ----------
    capacity : int
        Plans at the most; the one that was used longest ago makes room.

    Notes
    -----
    Threads may share one. It holds no tensors. The codec of a tensor depends on what was planned
    before it; without a PlanCache it depends on the tensor and the seed alone.

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
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()
        self._lock = threading.Lock()
        self._planned = self._kept = 0

    def __len__(self) -> int:
        """Return the number of plans."""
        return len(self._known)

    def stats(self) -> dict[str, int]:
        """Return how many tensors were planned, and how many kept a plan."""
        with self._lock:
            return {"planned": self._planned, "kept": self._kept}

    def choose(
        self, kind: str, sample: Sample, dtype: torch.dtype, options: Options, n_rows: int
    ) -> Plan:
        """Return a plan for rows like those of a sample: a known one that suits, or a new one."""
        if not isinstance(kind, str):
            raise ArgumentTypeError(f"kind: expected a str, got {kind!r:.60}")
        key = (kind, dtype, sample.row_bytes, options)
        search = Search(sample, options, n_rows)
        raw_bytes = n_rows * sample.row_bytes
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        if known is not None:
            found = search.probe(known.rules)
            saved = 1 - found.costs[0] / max(1, raw_bytes)
            alike = known.saved - LESS_SAVED <= saved <= known.saved + MORE_SAVED
            above = found.costs[0] / (known.above * found.costs.min())
            if alike and above <= DOUBTFUL:
                with self._lock:
                    self._kept += 1
                return found[0] if above <= CLOSE else search.best(found)
        found = search.probe(list(candidates(sample.row_bytes, dtype, options)))
        plan = search.best(found)
        place = found.rules.index(plan.candidate)
        saved = 1 - found.costs[place] / max(1, raw_bytes)
        above = found.costs[place] / found.costs.min()
        with self._lock:
            self._planned += 1
            self._known[key] = _Known(_rules(plan.candidate, found), saved, above)
            self._known.move_to_end(key)
            while len(self._known) > self._capacity:
                self._known.popitem(last=False)
        return plan


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
