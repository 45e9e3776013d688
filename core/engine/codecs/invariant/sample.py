"""Rows to plan on: parts of a table, and parts of these, drawn where the rows are."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from ...kernels import kernels_for
from ...kernels.candidates import POSITIONAL_ROWS, MaskRule
from ...kernels.cuda.constants import Constant
from ...kernels.format import CHUNK_BYTES
from .learning import Counted, learn
from .profile import UNSIGNED

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
#: Sizes of rows and samples whose places are kept.
KEPT = 64


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

    def _places(self, n: int) -> Constant:
        """Return the places of `n` rows, fewer than there are, among those that hold them."""
        return _spread_places(len(self), n, self._first, self._step)

    def valued(self, uniform: bool, share: int = 1) -> Sample:
        """Return the rows from which values are learnt, or one of so many shares of them."""
        if uniform:
            return self.part(LEARNT_BYTES // self.row_bytes)
        rows = max(PROBE_ROWS, POSITIONAL_BYTES // (share * self.row_bytes))
        return self.part(min(rows, POSITIONAL_ROWS))

    def blocks(self) -> Constant | None:
        """Return the numbers of the blocks of a row that are enough to compare all candidates.

        None: whole rows are needed.
        """
        blocks = self.row_bytes // BLOCK_BYTES
        wanted = PROBE_BYTES // (BLOCK_BYTES * min(len(self), PROBE_ROWS))
        wanted = max(LEAST_BLOCKS, min(wanted, MOST_BLOCKS))
        if self.few or blocks <= wanted:
            return None
        return _random_blocks(blocks, wanted)

    def probe(self, blocks: Constant | None) -> Sample:
        """Return a part of the rows, or of blocks of them, with the counts of all rows."""
        if self.few:
            return self
        n = self._probed_rows(blocks)
        if n >= len(self):
            return self if blocks is None else Sample(_blocks_of(self.rows, blocks))
        return Sample(_picked(self.among, self._places(n), blocks))

    def _probed_rows(self, blocks: Constant | None) -> int:
        width = self.row_bytes if blocks is None else len(blocks) * BLOCK_BYTES
        return min(max(PROBE_ROWS, PROBE_BYTES // width), POSITIONAL_ROWS)

    def probe_with(self, other: Sample, blocks: Constant | None) -> tuple[Sample, Sample]:
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

    def counted(self, rule: MaskRule) -> Counted:
        """Return what all rows give a rule."""
        rows = self.valued(rule.uniform).rows
        return Counted((rule,), self.bit_counts(), len(self), rows)

    def keep_fitted(self, rule: MaskRule, found: np.ndarray) -> None:
        """Keep what `fitted` is to return, which came to the host with something else."""
        self._fitted[rule] = found

    def fitted(self, rule: MaskRule) -> np.ndarray:
        """Return masks and values that all rows give a rule, on the host; waits for a GPU.

        int64 ``[1 + VALUES, entries]``.
        """
        if rule not in self._fitted:
            self._fitted[rule] = learn(self.counted(rule)).memory.found(0).cpu().numpy()
        return self._fitted[rule]

    def block_counts(self, blocks: Constant | None) -> torch.Tensor:
        """Return the counts of the bytes of some blocks of the rows, or of all."""
        counts = self.bit_counts()
        if blocks is None:
            return counts
        whole = counts[: self.row_bytes // BLOCK_BYTES * BLOCK_BYTES].view(-1, BLOCK_BYTES * 8)
        return whole.index_select(0, blocks.on(counts.device)).view(-1, 8)


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
def _spread_places(n: int, wanted: int, first: int = 0, step: int = 1) -> Constant:
    """Return places spread over `n`, which begin at `first` and are `step` apart."""
    # Not every so many: what repeats in rows, as heads do, would be met in part.
    return Constant(np.linspace(0, n - 1, wanted).astype(np.int64) * step + first)


@lru_cache(KEPT)
def _places_of_both(n_even: int, n_odd: int, wanted: int) -> Constant:
    """Return places spread over the even rows, and then as many over the odd ones."""
    both = _spread_places(n_even, wanted, 0, 2), _spread_places(n_odd, wanted, 1, 2)
    return Constant(np.concatenate([places.array for places in both]))


@lru_cache(KEPT)
def _random_blocks(n: int, wanted: int) -> Constant:
    """Return some of `n` blocks, in order."""
    # At random: blocks at equal distances may all be the same part of a head or a field.
    return Constant(np.sort(np.random.default_rng(n).choice(n, wanted, replace=False)))


@lru_cache(KEPT)
def _drawn_places(n: int, wanted: int, seed: int) -> Constant:
    """Return one place of each of as many stretches of `n`."""
    places = np.arange(wanted) + np.random.default_rng(seed).random(wanted)
    return Constant(np.minimum((places * (n / wanted)).astype(np.int64), n - 1))


@lru_cache(KEPT)
def _block_places(places: Constant, blocks: Constant, row_blocks: int) -> Constant:
    """Return the places of blocks of rows, of which each has `row_blocks`."""
    return Constant((places.array[:, None] * row_blocks + blocks.array).reshape(-1))


def _picked(rows: torch.Tensor, places: Constant, blocks: Constant | None) -> torch.Tensor:
    """Return some rows, or some blocks of these, contiguous."""
    if blocks is not None and rows.shape[1] % BLOCK_BYTES == 0:
        # Blocks are rows of a longer table: one copy.
        each = rows.view(-1, BLOCK_BYTES)
        at = _block_places(places, blocks, rows.shape[1] // BLOCK_BYTES)
        return each.index_select(0, at.on(rows.device)).view(-1, len(blocks) * BLOCK_BYTES)
    picked = rows.index_select(0, places.on(rows.device))
    return picked if blocks is None else _blocks_of(picked, blocks)


def _blocks_of(rows: torch.Tensor, blocks: Constant) -> torch.Tensor:
    """Return some blocks of rows."""
    # Slices, which a GPU copies without their numbers.
    begins = [b * BLOCK_BYTES for b in blocks.array.tolist()]
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
        rows = rows.index_select(0, _drawn_places(n, wanted, seed).on(rows.device))
        rows = rows.view(-1, row_bytes)
    return Sample(rows.contiguous())
