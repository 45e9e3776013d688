"""Moves that a plan does not need.

Where the link has time to spare a plan that moves half of what a step saves costs, by the timeline,
no more than one that moves a tensor, and a search ends with the first of those that it meets. What
moves still takes page-locked memory and bytes of the link, which others may want, and power.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .candidates import Choices
from .solution import MARGIN_BYTES, Solution
from .timeline import Timeline

#: Share of the limit that is left to what steps take beyond what is predicted.
SPARE = 0.03
#: Plans that are followed through, at most.
MOST_RUNS = 24
#: What sums of floats may differ by, of a step's seconds.
SAME_STEP = 1e-9


def without_needless_moves(found: Solution, timeline: Timeline) -> Solution:
    """Return a plan that moves less, costs a step no more, and fits the same limit of memory.

    Parameters
    ----------
    found : Solution
        A plan that fits `Solution.limit_bytes`.
    timeline : Timeline
        The step.

    Returns
    -------
    Solution
        `found` where each of its moves gains something. Those of most bytes are kept first. Its
        peak is at most that of `found`, or what leaves `SPARE` of the limit.
    """
    limit = max(found.prediction.peak_bytes, found.limit_bytes * (1 - SPARE))
    keep = timeline.keep_all().options
    most_s = found.prediction.step_s * (1 + SAME_STEP)
    runs, before = MOST_RUNS, None
    while found is not before:  # what one move gained another one may gain as well
        before = found
        moved = _moved_bytes(found.choices, timeline)
        order = sorted(moved, key=lambda i: (-moved[i], i))
        at, count = 0, len(order)
        while at < len(order) and runs:
            these = order[at : at + count]
            options = found.choices.options.copy()
            options[these] = keep[these]
            changed = Choices(options, found.choices.checkpointed)
            kept = False
            if np.all(timeline.floor(changed) <= limit + MARGIN_BYTES):
                runs -= 1
                prediction, trace = timeline.follow(changed, limit_bytes=limit)
                fits = prediction.peak_bytes <= limit + MARGIN_BYTES
                kept = fits and prediction.step_s <= most_s
            if kept:
                found = replace(found, choices=changed, prediction=prediction, trace=trace)
                at, count = at + len(these), 2 * count
            elif len(these) > 1:
                count = len(these) // 2
            else:
                at += 1
    return found


def _moved_bytes(choices: Choices, timeline: Timeline) -> dict[int, float]:
    """Return by site that leaves the device how much."""
    outside = np.flatnonzero(~timeline.inside(choices)).tolist()
    found = {i: timeline.costs[i][int(choices.options[i])].moved_bytes for i in outside}
    return {i: nbytes for i, nbytes in found.items() if nbytes}
