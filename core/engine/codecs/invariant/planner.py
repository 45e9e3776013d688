"""Choosing masks and options by counting in a sample.

A candidate is a chunk width, positional or uniform, and a rule that gives the masks. Values follow
from the masks: the most frequent masked chunks. The search is over a few dozen masks, and each is
counted with all code widths, grouped or not, at once: on small parts of some rows first, then the
best few on whole rows of the sample, by their exact packed size. All counting is done where the
rows are, by the kernels of plan.cu or their twins; what comes back are counts, and in the end the
masks and values that were chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ....dtypes import EXPONENT_FIELDS, element_bytes
from ...kernels import kernels_for
from ...kernels.candidates import (
    DIFFERING,
    UNIFORM,
    WIDTH,
    CandidateTable,
    CandidateTables,
    MaskRule,
)
from ...kernels.format import CHUNK_BYTES, CODE_BITS, RowFormat
from .learning import Counted, Learnt, learn
from .profile import UNSIGNED, Profile
from .sample import LEAST_ROWS, TESTED_BYTES, Sample

THRESHOLDS = tuple(0.5 + 0.05 * step for step in range(11))  # IBP section 4.1: a sweep up to 1
#: Candidates that are counted on all rows, of those that cost at most so much more than the best,
#: by whether that one is uniform. A part of the rows ranks thresholds of positional masks less
#: well: of rows of different norms it may put one first that costs up to 6 % more on all of them.
FINALISTS, CLOSE = {True: 5, False: 11}, {True: 1.02, False: 1.1}
#: What exceptions of positional masks must save at least, as a share of the packed bytes, where all
#: rows have some: a GPU decodes rows of 1 KB with one code bit at 750 GB/s in place of 1,280. Parts
#: of rows may show 0.3 % more than is saved in the end. Uniform exponents decode as fast with some.
EXCEPTIONS_SAVE = 0.005
#: What masks that differ between positions must save at least, as a share of the packed bytes: a
#: CPU decodes rows of bfloat16 with one code bit at 1.1 GB/s in place of 4. A GPU's kernels read a
#: mask for each position either way.
DIFFERENCES_SAVE = 0.02
#: Tables of candidates whose fixed costs are kept.
KEPT = 64


@dataclass(frozen=True)
class Options:
    """What the caller fixed; None where the planner chooses."""

    chunk_bytes: int | None = None
    code_bits: int | None = None
    grouped: bool | None = None
    uniform: bool | None = None
    threshold: float | None = None


def candidates(row_bytes: int, dtype: torch.dtype, options: Options) -> Iterator[MaskRule]:
    """Yield every mask rule worth counting for rows of this size and dtype."""
    number = element_bytes(dtype)
    if options.chunk_bytes is not None:
        widths: Sequence[int] = (options.chunk_bytes,)
    else:
        fitting = [w for w in CHUNK_BYTES if row_bytes % w == 0]
        widths = [w for w in fitting if w >= min(number, 4)] or fitting[-1:]
    thresholds = THRESHOLDS if options.threshold is None else (options.threshold,)
    for width in widths:
        for uniform in (False, True) if options.uniform is None else (options.uniform,):
            for threshold in thresholds:
                yield MaskRule(width, uniform, threshold, 0)
            # The published algorithm knows thresholds only; a caller who asks for exactly its
            # options, or for a threshold, gets no other masks.
            published = options.code_bits == 1 and not uniform and options.grouped is False
            if options.threshold is None and not published:
                for field in fields(width, number, dtype):
                    yield MaskRule(width, uniform, None, field)


def fields(chunk_bytes: int, number_bytes: int, dtype: torch.dtype) -> list[int]:
    """Return masks that suit a dtype, repeated over the numbers of a chunk."""
    bits = 8 * number_bytes
    everything = (1 << 8 * chunk_bytes) - 1
    if chunk_bytes < number_bytes:
        return [everything]
    if dtype in EXPONENT_FIELDS:
        low, width = EXPONENT_FIELDS[dtype]
        exponent = ((1 << width) - 1) << low
        found = [exponent, exponent | 1 << (low + width)]
        # Numbers with few mantissa bits in use, or of a narrower dtype: fields that reach lower.
        found += [((1 << bits) - 1) >> down << down for down in (low - 2, low - 4) if down > 0]
    else:
        found = [((1 << bits) - 1) >> down << down for down in range(1, bits)]
    copies = sum(1 << (bits * i) for i in range(chunk_bytes // number_bytes))
    return [field * copies for field in found] + [everything]


@dataclass(frozen=True)
class Plan:
    """A measured candidate: its best options and what they cost."""

    cost: float
    candidate: MaskRule
    code_bits: int
    grouped: bool


@dataclass(frozen=True, eq=False)
class Measured:
    """What rules cost, each with the options that suit it best.

    Parameters
    ----------
    rules : sequence of MaskRule
        The rules.
    costs : numpy.ndarray
        float64 ``[n]``: bytes of the rows packed, and of the profile; of positional masks with
        exceptions up to EXCEPTIONS_SAVE more, in the proportion of the rows that have some, and
        DIFFERENCES_SAVE more where the masks differ.
    options : numpy.ndarray
        int64 ``[n]``: 2 * (code_bits - 1) + grouped.
    """

    rules: Sequence[MaskRule]
    costs: np.ndarray
    options: np.ndarray

    def __getitem__(self, i: int) -> Plan:
        code_bits, grouped = divmod(int(self.options[i]), 2)
        return Plan(float(self.costs[i]), self.rules[i], code_bits + 1, bool(grouped))

    def ranked(self) -> list[int]:
        """Return the numbers of the rules, cheapest first; equal ones in their order."""
        return [int(i) for i in np.argsort(self.costs, kind="stable")]


def measure(
    learnt: Learnt,
    test: Sample,
    options: Options,
    n_rows: int,
    row_bytes: int,
) -> tuple[Measured, list[np.ndarray]]:
    """Measure what was learnt on other rows, or on the same ones where these are all there are.

    The cost is the bytes of `n_rows` such rows packed, and of the profile. The profile counts
    against overfitting too: a value that few rows take costs more to keep than it saves. Rows with
    exceptions of positional masks cost a little more than their bytes, and so do masks that differ.
    Where the samples are parts of rows of `row_bytes`, the size of a row is in the proportion of
    its parts. Masks and values of rules that are not measured come with it, int64
    ``[1 + VALUES, entries]``.
    """
    whole = test.row_bytes == row_bytes
    candidates, memory = learnt.candidates, learnt.memory
    unit_bits = 32 if whole else 1
    kernels_for(test.rows.device).sizes_by_option(test.rows, candidates, memory, unit_bits)
    bytes_a_unit = 4 if whole else row_bytes / test.row_bytes / 8
    totals, found = memory.on_host()
    by_code_bits = totals[:, :DIFFERING].reshape(-1, len(CODE_BITS), 3)
    units, with_exceptions = by_code_bits[:, :, :2], by_code_bits[:, :, 2:]
    costs = units * (bytes_a_unit * n_rows / len(test))
    profiles, positional = _fixed_costs(candidates.measured, row_bytes, options)
    costs += profiles
    costs *= 1 + positional * with_exceptions * (EXCEPTIONS_SAVE / len(test))
    costs[totals[:, DIFFERING] > 0] *= 1 + DIFFERENCES_SAVE
    costs = costs.reshape(len(costs), -1)
    return Measured(learnt.rules, costs.min(1), costs.argmin(1)), found


@lru_cache(KEPT)
def _fixed_costs(
    table: CandidateTable, row_bytes: int, options: Options
) -> tuple[np.ndarray, np.ndarray]:
    """Return what candidates cost whatever the rows are.

    Bytes of the profiles, ``[n, 3, 2]`` by code_bits - 1 and grouped, infinite where `options` say
    otherwise; and 1 where masks are positional, 0 where uniform, ``[n, 1, 1]``.
    """
    uniform = table.numbers[:, UNIFORM] == 1
    mask_bytes = np.where(uniform, table.numbers[:, WIDTH], row_bytes)
    costs = np.empty((len(table), len(CODE_BITS), 2))
    costs[:] = mask_bytes[:, None, None] * (1 << np.array(CODE_BITS))[:, None]
    for axis, values, wanted in (
        (1, CODE_BITS, options.code_bits),
        (2, (False, True), options.grouped),
    ):
        if wanted is not None:
            others = [i for i, value in enumerate(values) if value != wanted]
            costs[(slice(None),) * axis + (others,)] = np.inf
    return costs, 1.0 - uniform[:, None, None]


class Search:
    """The search for a plan of a sample: see `choose_plan`.

    Parameters
    ----------
    sample : Sample
        The rows.
    options : Options
        What is fixed.
    n_rows : int
        Rows that will be packed.
    """

    def __init__(self, sample: Sample, options: Options, n_rows: int) -> None:
        self._options, self._n_rows, self._row_bytes = options, n_rows, sample.row_bytes
        self._sample = sample
        # Where the sample is not all there is, masks and values are learnt on one half and measured
        # on the other: what only fits the rows it was learnt on must not look like a gain.
        whole = len(sample) >= n_rows
        self._known, self._test = (sample, sample) if whole else sample.halves()
        # Nor must it on a part of the rows: of few rows, more are like no other than of all.
        self._even, odd = (sample, sample) if whole and sample.few else sample.halves()
        self._blocks = self._even.blocks()
        self._learnt_part, self._tested_part = self._even.probe_with(odd, self._blocks)

    @property
    def exact(self) -> bool:
        """Whether `probe` counts all rows of the sample."""
        return self._learnt_part is self._known and self._tested_part is self._test

    def probe(self, rules: Sequence[MaskRule], expected: MaskRule | None = None) -> Measured:
        """Measure rules on a part of the rows, with the bits of all of them counted.

        What the sample gives the rule that is expected to be chosen is learnt in the same launches
        of a GPU and comes back in the same copy, so that `fit_profile` does not wait again.
        """
        counts = self._even.block_counts(self._blocks)
        counted = [Counted(rules, counts, len(self._even), self._learnt_part.rows)]
        if expected is not None and _waits_for(self._sample.rows.device):
            counted.insert(0, self._sample.counted(expected))
        measured, found = self._measured(learn(*counted), self._tested_part)
        if expected is not None and found:
            self._sample.keep_fitted(expected, found[0])
        return measured

    def best(self, found: Measured) -> Plan:
        """Return the best plan of those that a probe has found, by whole rows."""
        ranked = found.ranked()
        if self.exact:
            return found[ranked[0]]
        test = self._test.part(max(LEAST_ROWS, TESTED_BYTES // self._row_bytes))
        first = found.rules[ranked[0]].uniform
        limit = CLOSE[first] * found.costs[ranked[0]]
        near = [found.rules[i] for i in ranked[: FINALISTS[first]] if found.costs[i] <= limit]
        finalists = []
        for uniform in (False, True):
            rules = [rule for rule in near if rule.uniform == uniform]
            if rules:
                known = self._known
                some = known.valued(uniform, share=4)
                learnt = learn(Counted(rules, known.bit_counts(), len(known), some.rows))
                measured, _ = self._measured(learnt, test)
                finalists.append(measured[measured.ranked()[0]])
        return min(finalists, key=lambda plan: plan.cost)

    def _measured(self, learnt: Learnt, test: Sample) -> tuple[Measured, list[np.ndarray]]:
        return measure(learnt, test, self._options, self._n_rows, self._row_bytes)


def _waits_for(device: torch.device) -> bool:
    """Return whether a copy to the host waits for work on a device."""
    return device.type != "cpu"


def choose_plan(sample: Sample, dtype: torch.dtype, options: Options, n_rows: int) -> Plan:
    """Return the plan of least cost for `n_rows` rows like those of the sample."""
    search = Search(sample, options, n_rows)
    return search.best(search.probe(list(candidates(sample.row_bytes, dtype, options))))


def fit_profile(sample: Sample, plan: Plan) -> Profile:
    """Fit masks and values of a plan to a sample."""
    c = plan.candidate
    fmt = RowFormat(sample.row_bytes, c.chunk_bytes, plan.code_bits, plan.grouped, c.uniform)
    return _profile(fmt, sample.fitted(c))


def refit_profile(rows: torch.Tensor, profile: Profile) -> Profile:
    """Learn the values of a profile's masks anew, from uint8 ``[n, row_bytes]`` rows."""
    f = profile.format
    sample = Sample(rows).valued(f.uniform)
    rule = MaskRule(f.chunk_bytes, f.uniform, None, 0)
    candidates = CandidateTables.of(CandidateTable.of((rule,), f.row_bytes, 1))
    kernels = kernels_for(rows.device)
    memory = kernels.plan_memory([sample.rows], candidates)
    memory.found(0)[0].copy_(torch.from_numpy(profile.masks[0].astype(np.uint64).view(np.int64)))
    kernels.frequent_values([sample.rows], candidates, memory)
    return _profile(f, memory.found(0).cpu().numpy())


def _profile(fmt: RowFormat, found: np.ndarray) -> Profile:
    """Return a profile of masks and values as they were learnt."""
    narrow = found[: 1 + fmt.values].view(np.uint64).astype(UNSIGNED[fmt.chunk_bytes])
    return Profile(fmt, narrow[:1], np.ascontiguousarray(narrow[1:].T)[None])
