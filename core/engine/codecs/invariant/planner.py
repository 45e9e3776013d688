"""Choosing masks and options by counting in a sample.

A candidate is a chunk width, positional or uniform, and a rule that gives the masks. Values follow
from the masks: the most frequent masked chunks. The search is over a few dozen masks, and each is
counted with all code widths, grouped or not, at once: on small parts of some rows first, then the
best few on whole rows of the sample, by their exact packed size. All counting is done where the
rows are, by the kernels of plan.cu or their twins; what comes back are counts, and in the end the
masks and values that were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch

from ....dtypes import EXPONENT_FIELDS, element_bytes
from ...kernels import kernels_for
from ...kernels.candidates import (
    POSITIONAL_ROWS,
    UNIFORM,
    VALUES,
    WIDTH,
    CandidateTable,
    MaskRule,
)
from ...kernels.cuda.constants import constant_on
from ...kernels.format import CHUNK_BYTES, CODE_BITS, RowFormat
from .profile import UNSIGNED, Profile

THRESHOLDS = tuple(0.5 + 0.05 * step for step in range(11))  # IBP section 4.1: a sweep up to 1
#: Bytes that are drawn of longer tables, at least some rows. Bits are counted in all of them: where
#: a share is near its threshold, the masks of fewer rows pack worse.
SAMPLE_BYTES, LEAST_ROWS = 4 << 20, 48
#: Bytes of neighbouring rows that are drawn together.
RUN_BYTES = 512
#: Bytes from which uniform and positional values are learnt, and those of whole rows that are
#: measured.
LEARNT_BYTES, POSITIONAL_BYTES, TESTED_BYTES = 256 << 10, 2 << 20, 512 << 10
#: Bytes that all candidates are counted on first, of as many rows as that makes, but at least some;
#: of long rows in blocks, each whole groups of chunks of every width.
PROBE_BYTES, PROBE_ROWS, BLOCK_BYTES = 48 << 10, 96, 256
LEAST_BLOCKS, MOST_BLOCKS = 2, 8
#: Candidates that are counted on all rows, of those that cost at most so much more than the best.
FINALISTS, CLOSE = 5, 1.02
#: What exceptions of positional masks must save at least, as a share of the packed bytes, where all
#: rows have some: a GPU decodes rows of 1 KB with one code bit at 750 GB/s in place of 1,280. Parts
#: of rows may show 0.3 % more than is saved in the end. Uniform exponents decode as fast with some.
EXCEPTIONS_SAVE = 0.005
#: Sizes of rows and samples whose places are kept.
KEPT = 64


@dataclass(frozen=True)
class Options:
    """What the caller fixed; None where the planner chooses."""

    chunk_bytes: int | None = None
    code_bits: int | None = None
    grouped: bool | None = None
    uniform: bool | None = None
    threshold: float | None = None


class Sample:
    """Rows to plan on.

    Parameters
    ----------
    rows : torch.Tensor
        uint8 ``[n, row_bytes]``, contiguous, on a CPU or GPU.
    half : int, optional
        0 or 1: the sample are the even or the odd rows alone, which are copied only where all of
        them are asked for.
    counted : _CountedHalves, optional
        The set bits of both halves.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        half: int | None = None,
        counted: _CountedHalves | None = None,
    ) -> None:
        self.among = rows
        self._first, self._step = (0, 1) if half is None else (half, 2)
        self._rows: torch.Tensor | None = rows if half is None else None
        self._counts: torch.Tensor | None = None
        self._counted_halves = counted
        self._halves: tuple[Sample, Sample] | None = None
        self._fitted: dict[MaskRule, np.ndarray] = {}  # on the host

    def __len__(self) -> int:
        return len(range(self._first, self.among.shape[0], self._step))

    @property
    def rows(self) -> torch.Tensor:
        """uint8 ``[n, row_bytes]``, contiguous."""
        if self._rows is None:
            self._rows = self.among[self._first :: self._step].contiguous()
        return self._rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.among.shape[1]

    @property
    def few(self) -> bool:
        """Whether all rows are counted for all candidates."""
        return len(self) * self.row_bytes <= PROBE_BYTES and len(self) <= POSITIONAL_ROWS

    def chunks(self, chunk_bytes: int) -> np.ndarray:
        """View the rows, on the CPU, as ``[n, C]`` chunks."""
        return self.rows.numpy().view(UNSIGNED[chunk_bytes])

    def halves(self) -> tuple[Sample, Sample]:
        """Return the even and the odd rows; a single row twice."""
        if len(self) < 2:
            return self, self
        if self._halves is None:
            counted = _CountedHalves(self.rows)
            self._halves = Sample(self.rows, 0, counted), Sample(self.rows, 1, counted)
        return self._halves

    def part(self, n: int) -> Sample:
        """Return a sample of `n` rows spread over this one."""
        return Sample(self._spread(n)) if n < len(self) else self

    def _spread(self, n: int) -> torch.Tensor:
        """Return `n` rows, at least one, or all."""
        if n >= len(self):
            return self.rows
        return _picked(self.among, self._places(max(1, n)), None)

    def _places(self, n: int) -> np.ndarray:
        """Return the places of `n` rows, fewer than there are, among those that hold them."""
        return _spread_places(len(self), n, self._first, self._step)

    def valued(self, uniform: bool, share: int = 1) -> Sample:
        """Return the rows from which values are learnt, or one of so many shares of them."""
        if uniform:
            return self.part(LEARNT_BYTES // self.row_bytes)
        rows = max(PROBE_ROWS, POSITIONAL_BYTES // (share * self.row_bytes))
        return self.part(min(rows, POSITIONAL_ROWS))

    def blocks(self) -> np.ndarray | None:
        """Return the numbers of the blocks of a row that are enough to compare all candidates.

        None: whole rows are needed.
        """
        blocks = self.row_bytes // BLOCK_BYTES
        wanted = PROBE_BYTES // (BLOCK_BYTES * min(len(self), PROBE_ROWS))
        wanted = max(LEAST_BLOCKS, min(wanted, MOST_BLOCKS))
        if self.few or blocks <= wanted:
            return None
        return _random_blocks(blocks, wanted)

    def probe(self, blocks: np.ndarray | None) -> Sample:
        """Return a part of the rows, or of blocks of them, with the counts of all rows."""
        if self.few:
            return self
        n = self._probed_rows(blocks)
        if n >= len(self):
            return self if blocks is None else Sample(_blocks_of(self.rows, blocks))
        return Sample(_picked(self.among, self._places(n), blocks))

    def _probed_rows(self, blocks: np.ndarray | None) -> int:
        width = self.row_bytes if blocks is None else len(blocks) * BLOCK_BYTES
        return min(max(PROBE_ROWS, PROBE_BYTES // width), POSITIONAL_ROWS)

    def probe_with(self, other: Sample, blocks: np.ndarray | None) -> tuple[Sample, Sample]:
        """Return what `probe` does of this sample and another: of halves in one go."""
        n = self._probed_rows(blocks)
        if other is self:
            part = self.probe(blocks)
            return part, part
        apart = self.among is not other.among or self.few or other.few
        if apart or n >= min(len(self), len(other)):
            return self.probe(blocks), other.probe(blocks)
        places = _places_of_both(len(self), len(other), n)
        both = _picked(self.among, places, blocks)
        return Sample(both[:n]), Sample(both[n:])

    def bit_counts(self) -> torch.Tensor:
        """Return int64 ``[row_bytes, 8]``: the rows that have each bit set."""
        if self._counts is None:
            if self._counted_halves is not None:
                self._counts = self._counted_halves.counts()[self._first]
            elif self._halves is None:
                self._counts = _bit_counts(self.rows)
            else:
                even, odd = self._halves
                self._counts = even.bit_counts() + odd.bit_counts()
        return self._counts

    def learnt(self, rule: MaskRule) -> torch.Tensor:
        """Return what all rows give a rule: int64 ``[1 + VALUES, entries]``, masks and values."""
        rows = self.valued(rule.uniform).rows
        return learn([rule], self.bit_counts(), len(self), rows).found

    def keep_learnt(self, rule: MaskRule, found: np.ndarray) -> None:
        """Keep what `learnt` returned, on the host, for `fitted`."""
        self._fitted[rule] = found

    def fitted(self, rule: MaskRule) -> np.ndarray:
        """Return masks and values of a rule on the host, as `learnt` does; waits for a GPU."""
        if rule not in self._fitted:
            self.keep_learnt(rule, self.learnt(rule).cpu().numpy())
        return self._fitted[rule]

    def block_counts(self, blocks: np.ndarray | None) -> torch.Tensor:
        """Return the counts of the bytes of some blocks of the rows, or of all."""
        counts = self.bit_counts()
        if blocks is None:
            return counts
        whole = counts[: self.row_bytes // BLOCK_BYTES * BLOCK_BYTES].view(-1, BLOCK_BYTES * 8)
        return whole.index_select(0, constant_on(counts.device, blocks)).view(-1, 8)


class _CountedHalves:
    """The set bits of the even and the odd rows, which are counted in one go when asked for.

    Parameters
    ----------
    rows : torch.Tensor
        uint8 ``[n, row_bytes]``, contiguous, n at least 2.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows
        self._counts: tuple[torch.Tensor, torch.Tensor] | None = None

    def counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int64 ``[row_bytes, 8]`` of the even and of the odd rows."""
        if self._counts is None:
            n, row_bytes = self._rows.shape
            # Two rows, one behind the other, are counted as one.
            pairs = self._rows[: n // 2 * 2].view(n // 2, 2 * row_bytes)
            even, odd = _bit_counts(pairs).view(2, row_bytes, 8)
            if n % 2:
                even = even + _bit_counts(self._rows[n - 1 :])
            self._counts = even, odd
        return self._counts


def _bit_counts(rows: torch.Tensor) -> torch.Tensor:
    """Return int64 ``[row_bytes, 8]``: how many rows have each bit set."""
    # The widest chunk is counted quickest, and the order of bits is the same for all.
    width = next(w for w in reversed(CHUNK_BYTES) if rows.shape[1] % w == 0)
    return kernels_for(rows.device).count_bits(rows, width).view(-1, 8)


# What depends on sizes alone takes longer to make than a GPU takes for a sample: it is kept.


@lru_cache(KEPT)
def _spread_places(n: int, wanted: int, first: int = 0, step: int = 1) -> np.ndarray:
    """Return places spread over `n`, which begin at `first` and are `step` apart."""
    # Not every so many: what repeats in rows, as heads do, would be met in part.
    return np.linspace(0, n - 1, wanted).astype(np.int64) * step + first


@lru_cache(KEPT)
def _places_of_both(n_even: int, n_odd: int, wanted: int) -> np.ndarray:
    """Return places spread over the even rows, and then as many over the odd ones."""
    return np.concatenate(
        [_spread_places(n_even, wanted, 0, 2), _spread_places(n_odd, wanted, 1, 2)]
    )


@lru_cache(KEPT)
def _random_blocks(n: int, wanted: int) -> np.ndarray:
    """Return some of `n` blocks, in order."""
    # At random: blocks at equal distances may all be the same part of a head or a field.
    return np.sort(np.random.default_rng(n).choice(n, wanted, replace=False))


@lru_cache(KEPT)
def _drawn_places(n: int, wanted: int, seed: int) -> np.ndarray:
    """Return one place of each of as many stretches of `n`."""
    places = np.arange(wanted) + np.random.default_rng(seed).random(wanted)
    return np.minimum((places * (n / wanted)).astype(np.int64), n - 1)


def _picked(rows: torch.Tensor, places: np.ndarray, blocks: np.ndarray | None) -> torch.Tensor:
    """Return some rows, or some blocks of these, contiguous."""
    if blocks is not None and rows.shape[1] % BLOCK_BYTES == 0:
        # Blocks are rows of a longer table: one copy.
        each = rows.view(-1, BLOCK_BYTES)
        places = (places[:, None] * (rows.shape[1] // BLOCK_BYTES) + blocks).reshape(-1)
        picked = each.index_select(0, constant_on(rows.device, places))
        return picked.view(-1, len(blocks) * BLOCK_BYTES)
    picked = rows.index_select(0, constant_on(rows.device, places))
    return picked if blocks is None else _blocks_of(picked, blocks)


def _blocks_of(rows: torch.Tensor, blocks: np.ndarray) -> torch.Tensor:
    """Return some blocks of rows."""
    # Slices, which a GPU copies without their numbers.
    begins = [b * BLOCK_BYTES for b in blocks.tolist()]
    return torch.cat([rows.narrow(1, begin, BLOCK_BYTES) for begin in begins], 1)


def draw_sample(rows: torch.Tensor, seed: int) -> Sample:
    """Draw rows from uint8 ``[N, row_bytes]`` ones, on their device."""
    n, row_bytes = rows.shape
    wanted = max(LEAST_ROWS, SAMPLE_BYTES // row_bytes)
    if n > wanted:
        # Short rows come a few neighbours at a time: finding a place takes longer than a row.
        run = max(1, min(RUN_BYTES // row_bytes, n // wanted))
        rows = rows[: n // run * run].contiguous().view(-1, run * row_bytes)
        n, wanted = n // run, -(-wanted // run)
        rows = rows.index_select(0, constant_on(rows.device, _drawn_places(n, wanted, seed)))
        rows = rows.view(-1, row_bytes)
    return Sample(rows.contiguous())


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
class Learnt:
    """Rules with what rows gave them, on the device of the rows.

    Parameters
    ----------
    rules : sequence of MaskRule
        The rules.
    table : CandidateTable
        The same.
    found : torch.Tensor
        int64 ``[1 + VALUES, entries]``: masks, and values.
    """

    rules: Sequence[MaskRule]
    table: CandidateTable
    found: torch.Tensor


def learn(
    rules: Sequence[MaskRule], counts: torch.Tensor, n_rows: int, rows: torch.Tensor
) -> Learnt:
    """Learn masks from the counts of the bits of `n_rows` rows, and values from some rows."""
    kernels = kernels_for(rows.device)
    table = CandidateTable.of(rules, rows.shape[1], n_rows)
    shape = (1 + VALUES, table.entries)
    found = torch.empty(shape, dtype=torch.int64, device=rows.device)
    kernels.agreed_masks(counts, n_rows, table, out=found[0])
    kernels.frequent_values(rows, found[0], table, out=found[1:])
    return Learnt(rules, table, found)


@dataclass(frozen=True, eq=False)
class Measured:
    """What rules cost, each with the options that suit it best.

    Parameters
    ----------
    rules : sequence of MaskRule
        The rules.
    costs : numpy.ndarray
        float64 ``[n]``: bytes of the rows packed, and of the profile; of positional masks with
        exceptions up to EXCEPTIONS_SAVE more, in the proportion of the rows that have some.
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
    read: Callable[[torch.Tensor], np.ndarray] | None = None,
) -> Measured:
    """Measure what was learnt on other rows, or on the same ones where these are all there are.

    The cost is the bytes of `n_rows` such rows packed, and of the profile. The profile counts
    against overfitting too: a value that few rows take costs more to keep than it saves. Rows with
    exceptions of positional masks cost a little more than their bytes. Where the samples are parts
    of rows of `row_bytes`, the size of a row is in the proportion of its parts. `read` copies
    counts to the host.
    """
    whole = test.row_bytes == row_bytes
    counted = kernels_for(test.rows.device).sizes_by_option(
        test.rows, learnt.found[0], learnt.found[1:], learnt.table, 32 if whole else 1
    )
    bytes_a_unit = 4 if whole else row_bytes / test.row_bytes / 8
    on_host = counted.cpu().numpy() if read is None else read(counted)
    units, with_exceptions = on_host[:, :, :2], on_host[:, :, 2:]
    costs = units * (bytes_a_unit * n_rows / len(test))
    profiles, positional = _fixed_costs(learnt.table, row_bytes, options)
    costs += profiles
    costs *= 1 + positional * with_exceptions * (EXCEPTIONS_SAVE / len(test))
    costs = costs.reshape(len(costs), -1)
    return Measured(learnt.rules, costs.min(1), costs.argmin(1))


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

        What the sample gives the rule that is expected to be chosen comes back from a GPU in the
        same copy, so that `fit_profile` does not wait again.
        """
        counts = self._even.block_counts(self._blocks)
        learnt = learn(rules, counts, len(self._even), self._learnt_part.rows)
        if expected is None or not _waits_for(self._sample.rows.device):
            return self._measured(learnt, self._tested_part)
        return self._measured(learnt, self._tested_part, partial(self._read_with, expected))

    def _read_with(self, rule: MaskRule, units: torch.Tensor) -> np.ndarray:
        """Return counts on the host; with them comes what the sample gives a rule."""
        found = self._sample.learnt(rule)
        both = torch.cat([units.reshape(-1), found.reshape(-1)]).cpu().numpy()
        self._sample.keep_learnt(rule, both[units.numel() :].reshape(found.shape))
        return both[: units.numel()].reshape(units.shape)

    def best(self, found: Measured) -> Plan:
        """Return the best plan of those that a probe has found, by whole rows."""
        ranked = found.ranked()
        if self.exact:
            return found[ranked[0]]
        test = self._test.part(max(LEAST_ROWS, TESTED_BYTES // self._row_bytes))
        limit = CLOSE * found.costs[ranked[0]]
        near = [found.rules[i] for i in ranked[:FINALISTS] if found.costs[i] <= limit]
        finalists = []
        for uniform in (False, True):
            rules = [rule for rule in near if rule.uniform == uniform]
            if rules:
                known = self._known
                some = known.valued(uniform, share=4)
                learnt = learn(rules, known.bit_counts(), len(known), some.rows)
                measured = self._measured(learnt, test)
                finalists.append(measured[measured.ranked()[0]])
        return min(finalists, key=lambda plan: plan.cost)

    def _measured(
        self,
        learnt: Learnt,
        test: Sample,
        read: Callable[[torch.Tensor], np.ndarray] | None = None,
    ) -> Measured:
        return measure(learnt, test, self._options, self._n_rows, self._row_bytes, read)


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
    table = CandidateTable.of([MaskRule(f.chunk_bytes, f.uniform, None, 0)], f.row_bytes, 1)
    masks = torch.from_numpy(profile.masks[0].astype(np.uint64).view(np.int64)).to(rows.device)
    values = kernels_for(rows.device).frequent_values(sample.rows, masks, table)
    return _profile(f, torch.cat([masks[None], values]).cpu().numpy())


def _profile(fmt: RowFormat, found: np.ndarray) -> Profile:
    """Return a profile of masks and values as they were learnt."""
    narrow = found[: 1 + fmt.values].view(np.uint64).astype(UNSIGNED[fmt.chunk_bytes])
    return Profile(fmt, narrow[:1], np.ascontiguousarray(narrow[1:].T)[None])
