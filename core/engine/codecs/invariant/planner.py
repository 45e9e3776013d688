"""Choosing masks and options by the exact packed size of a sample.

A candidate is a chunk width, positional or uniform, and a rule that gives the masks. Values follow
from the masks: the most frequent masked chunks. One pass over the sample then gives the exact
packed size for every code width, grouped or not, so that the search is over a few dozen masks:
each is measured on a small part of the sample, and the best few on all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ....dtypes import EXPONENT_FIELDS, element_bytes
from ....errors import load_optional
from ...kernels import cpu
from ...kernels.cpu.compiling import call
from ...kernels.format import CHUNK_BYTES, CODE_BITS, RowFormat
from .profile import UNSIGNED, Profile

THRESHOLDS = tuple(0.5 + 0.05 * step for step in range(11))  # IBP section 4.1: a sweep up to 1
SAMPLE_BYTES = 4 << 20  # what candidates are measured on at the most
PROBE_BYTES = 96 << 10  # what all candidates are measured on first
PROBE_ROWS = 48
FINALISTS = 5


@dataclass(frozen=True)
class Options:
    """What the caller fixed; None where the planner chooses."""

    chunk_bytes: int | None = None
    code_bits: int | None = None
    grouped: bool | None = None
    uniform: bool | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class Candidate:
    """A way to get masks from a sample.

    Either a `threshold` (a bit is invariant when at least this share of the rows agree on it), or
    a fixed `field` of bits together with the bits on which all rows agree.
    """

    chunk_bytes: int
    uniform: bool
    threshold: float | None
    field: int

    def masks(self, sample: Sample) -> np.ndarray:
        """Return ``[positions]`` masks."""
        share = sample.bit_shares(self.chunk_bytes, self.uniform)
        needed = 1.0 if self.threshold is None else self.threshold
        invariant = np.maximum(share, 1 - share) >= needed - 1e-12
        masks = np.packbits(invariant, axis=-1, bitorder="little")
        return masks.view(UNSIGNED[self.chunk_bytes])[:, 0] | self.field


class Sample:
    """Rows to plan on: uint8 ``[n, row_bytes]`` on the CPU, with what is counted in them once."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self._counts: dict[int, np.ndarray] = {}
        self._parts: dict[int, Sample] = {}

    def __len__(self) -> int:
        return self.rows.shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.rows.shape[1]

    def chunks(self, chunk_bytes: int) -> np.ndarray:
        """View the rows as ``[n, C]`` chunks."""
        return self.rows.numpy().view(UNSIGNED[chunk_bytes])

    def bit_shares(self, chunk_bytes: int, uniform: bool) -> np.ndarray:
        """Return ``[positions, bits]``: the share of rows that have each bit set."""
        if chunk_bytes not in self._counts:
            self._counts[chunk_bytes] = cpu.count_bits(self.rows, chunk_bytes).numpy() / len(self)
        share = self._counts[chunk_bytes]
        return share.mean(axis=0, keepdims=True) if uniform else share

    def halves(self) -> tuple[Sample, Sample]:
        """Return the even and the odd rows; a single row twice."""
        if len(self) < 2:
            return self, self
        return Sample(self.rows[::2].contiguous()), Sample(self.rows[1::2].contiguous())

    def part(self, n: int) -> Sample:
        """Return a sample of `n` rows spread over this one."""
        if n >= len(self):
            return self
        if n not in self._parts:
            spread = torch.linspace(0, len(self) - 1, n).long()
            self._parts[n] = Sample(self.rows[spread].contiguous())
        return self._parts[n]


def draw_sample(rows: torch.Tensor, seed: int) -> Sample:
    """Draw at most SAMPLE_BYTES of uint8 ``[N, row_bytes]`` rows, on any device."""
    n, row_bytes = rows.shape
    wanted = max(PROBE_ROWS, SAMPLE_BYTES // row_bytes)
    if n > wanted:
        picked = np.sort(np.random.default_rng(seed).choice(n, wanted, replace=False))
        rows = rows[torch.from_numpy(picked).to(rows.device)]
    return Sample(rows.cpu().contiguous())


def candidates(row_bytes: int, dtype: torch.dtype, options: Options) -> Iterator[Candidate]:
    """Yield every mask rule worth measuring for rows of this size and dtype."""
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
                yield Candidate(width, uniform, threshold, 0)
            # The published algorithm knows thresholds only; a caller who asks for exactly its
            # options, or for a threshold, gets no other masks.
            published = options.code_bits == 1 and not uniform and options.grouped is False
            if options.threshold is None and not published:
                for field in fields(width, number, dtype):
                    yield Candidate(width, uniform, None, field)


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


def top_values(
    sample: Sample, chunk_bytes: int, uniform: bool, masks: np.ndarray, count: int
) -> np.ndarray:
    """Return ``[positions, count]``: the most frequent masked chunks, most frequent first."""
    load_optional("numba", extra=None, purpose="planning a codec")
    from ...kernels.cpu import plan

    chunks = sample.chunks(chunk_bytes)
    top = np.zeros((len(masks), count), chunks.dtype)
    if uniform:
        masked = chunks.ravel() & masks[0]
        masked.sort()
        call(plan.top_values_of, masked, top[0])
    else:
        plan.top_values_by_position(chunks, masks, top)
    return top


@dataclass(frozen=True)
class Plan:
    """A measured candidate: its best options and what they cost."""

    cost: float
    candidate: Candidate
    code_bits: int
    grouped: bool


def measure(
    sample: Sample, learn: Sample, candidate: Candidate, options: Options, n_rows: int
) -> Plan:
    """Measure a candidate, with masks and values of `learn`, exactly on `sample`.

    The cost is the bytes of `n_rows` such rows packed, and of the profile. The profile counts
    against overfitting too: a value that few rows take costs more to keep than it saves.
    """
    from ...kernels.cpu import plan

    masks = candidate.masks(learn)
    most_values = (1 << max(CODE_BITS)) - 1
    values = top_values(learn, candidate.chunk_bytes, candidate.uniform, masks, most_values)
    totals = np.zeros((len(CODE_BITS), 2), np.int64)
    row_words = -(-sample.row_bytes // 4)
    chunks = sample.chunks(candidate.chunk_bytes)
    call(plan.words_by_option, chunks, masks, values, row_words, totals)
    scale = 4 * n_rows / len(sample)
    best: Plan | None = None
    for code_bits in CODE_BITS if options.code_bits is None else (options.code_bits,):
        for grouped in (False, True) if options.grouped is None else (options.grouped,):
            profile_bytes = masks.nbytes * (1 << code_bits)
            cost = totals[code_bits - 1, int(grouped)] * scale + profile_bytes
            if best is None or cost < best.cost:
                best = Plan(cost, candidate, code_bits, grouped)
    assert best is not None
    return best


def choose_plan(sample: Sample, dtype: torch.dtype, options: Options, n_rows: int) -> Plan:
    """Return the plan of least cost for `n_rows` rows like those of the sample."""
    load_optional("numba", extra=None, purpose="planning a codec")
    # Where the sample is not all there is, masks and values are learnt on one half and measured on
    # the other: what only fits the rows it was learnt on must not look like a gain.
    learn, test = (sample, sample) if len(sample) >= n_rows else sample.halves()
    probe_rows = max(PROBE_ROWS, PROBE_BYTES // sample.row_bytes)
    found = [
        measure(test.part(probe_rows), learn.part(probe_rows), candidate, options, n_rows)
        for candidate in candidates(sample.row_bytes, dtype, options)
    ]
    found.sort(key=lambda plan: plan.cost)
    if len(test) <= probe_rows and len(learn) <= probe_rows:
        return found[0]
    finalists = [measure(test, learn, p.candidate, options, n_rows) for p in found[:FINALISTS]]
    return min(finalists, key=lambda plan: plan.cost)


def fit_profile(sample: Sample, plan: Plan) -> Profile:
    """Fit masks and values of a plan to a sample."""
    c = plan.candidate
    fmt = RowFormat(sample.row_bytes, c.chunk_bytes, plan.code_bits, plan.grouped, c.uniform)
    masks = c.masks(sample)
    values = top_values(sample, c.chunk_bytes, c.uniform, masks, fmt.values)
    return Profile(fmt, masks[None], values[None])


def refit_profile(rows: torch.Tensor, profile: Profile) -> Profile:
    """Learn the values of a profile's masks anew, from uint8 ``[n, row_bytes]`` rows on the CPU."""
    f, masks = profile.format, profile.masks[0]
    values = top_values(Sample(rows), f.chunk_bytes, f.uniform, masks, f.values)
    return Profile(f, profile.masks, values[None])
