"""Which symbols a class of blocks has, single codes or pairs, and the lengths of their codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from ...kernels.tile_format import MAX_CODE, MAX_SYMBOLS, SHORT_BITS, ZERO_SYMBOL
from ..huffman import code_lengths, fixed_lengths, group_histograms

#: Radius of the pairs that are counted. Wider classes have too many rare pairs for short codes.
PAIR_RADIUS = 7
PAIR_WIDTH = 2 * PAIR_RADIUS + 1
#: Symbols of single codes: code + ZERO_SYMBOL.
SINGLES = 2 * ZERO_SYMBOL
_CODES = np.arange(SINGLES) - ZERO_SYMBOL
#: Which codes are beyond each radius of pairs, ``[SINGLES, PAIR_RADIUS + 1]``.
_BEYOND = (np.abs(_CODES)[:, None] > np.arange(PAIR_RADIUS + 1)).astype(np.float64)
#: Of later values that much are taken to be spread wider than the sample's, so many times.
_WIDER_SHARE = 0.01
_WIDER = 1.5
#: What an exception costs beside its bits: kernels repair it alone, one after the other.
_REPAIR_BITS = 32
#: What look-ups cost beside the bits that they read, in bits a value: a value of singles takes
#: twice the look-ups of one of pairs, and lanes ask twice as often for codes that are not short.
#: Attention takes some 11 instructions for two values as a pair of a short code, 17 of a long one,
#: 21 as singles of short codes and 32 of long ones; but more bits mean fewer tokens in memory.
_SINGLE_BITS = 0.05
_LONG_BITS = 0.03
#: Share of values that may be exceptions in a class of pairs.
_PAIR_EXCEPTIONS = 1e-4
#: Rounds in which blocks move to the class that codes them in fewer bits; of more blocks than a few
#: as long as that saves such a share of them, since it takes milliseconds.
_ROUNDS = 3
_FEW_BLOCKS = 64
_LEAST_GAIN = 0.003


@dataclass(frozen=True, eq=False)
class SymbolClass:
    """Symbols of a class and the lengths of their codes.

    Parameters
    ----------
    radius : int
        0 for single codes, else that of pairs.
    lengths : numpy.ndarray
        uint8 ``[MAX_SYMBOLS]``.
    """

    radius: int
    lengths: npt.NDArray[np.uint8]

    @cached_property
    def bits(self) -> int:
        """Bits of the longest code."""
        return int(self.lengths.max())

    @property
    def short(self) -> bool:
        """Whether lanes ask for two codes at once."""
        return self.bits <= SHORT_BITS

    def worth(self, counts: Counts, exception_bits: int) -> npt.NDArray[np.float64]:
        """Return what each block takes, in bits, with what its look-ups cost."""
        return np.asarray(self.cost(counts, exception_bits) + self.look_up_bits * counts.values)

    @property
    def look_up_bits(self) -> float:
        """What look-ups cost, in bits a value."""
        return _SINGLE_BITS * (self.radius == 0) + _LONG_BITS * (not self.short)

    def cost(self, counts: Counts, exception_bits: int) -> npt.NDArray[np.float64]:
        """Return what each block takes, in bits, float64 ``[blocks]``."""
        if self.radius:
            price = self.lengths[_folded(self.radius)].astype(np.float64)
            zeros = float(self.lengths[2 * self.radius * (self.radius + 1)])
            price[price == 0] = zeros + 2 * exception_bits
            outside = counts.beyond[:, self.radius]
            return np.asarray(counts.pairs @ price + exception_bits * outside)
        price = self.lengths[:SINGLES].astype(np.float64)
        price[price == 0] = float(self.lengths[counts.escape]) + exception_bits
        return np.asarray(counts.singles @ price)


@dataclass(frozen=True, eq=False)
class Counts:
    """How often codes and pairs of codes occur in each block.

    Parameters
    ----------
    singles : numpy.ndarray
        float64 ``[blocks, SINGLES]`` by code + ZERO_SYMBOL; values that have no code stand at 0.
    pairs : numpy.ndarray
        float64 ``[blocks, PAIR_WIDTH ** 2]``, codes beyond PAIR_RADIUS taken as 0.
    escape : int
        The symbol of single codes that exceptions have.
    """

    singles: npt.NDArray[np.float64]
    pairs: npt.NDArray[np.float64]
    escape: int = ZERO_SYMBOL

    @cached_property
    def values(self) -> npt.NDArray[np.float64]:
        """How many values each block has, ``[blocks]``."""
        return np.asarray(self.singles.sum(axis=1))

    @cached_property
    def beyond(self) -> npt.NDArray[np.float64]:
        """How many values of each block are beyond a radius, ``[blocks, PAIR_RADIUS + 1]``."""
        return self.singles @ _BEYOND

    def __add__(self, other: Counts) -> Counts:
        return replace(self, singles=self.singles + other.singles, pairs=self.pairs + other.pairs)

    def of(self, which: npt.NDArray[np.bool_]) -> Counts:
        """Return the sum over some blocks."""
        return replace(
            self,
            singles=self.singles[which].sum(axis=0, keepdims=True),
            pairs=self.pairs[which].sum(axis=0, keepdims=True),
        )


def choose_classes(
    counts: Counts,
    *,
    classes: int,
    code_bits: int,
    fixed: bool,
    exception_bits: int,
    paired: bool = True,
) -> tuple[list[SymbolClass], npt.NDArray[np.int64]]:
    """Return classes of symbols, and the class of each block: few bits, read with few look-ups.

    Blocks are grouped by their single codes; each class then takes the symbols that are best for
    it, and blocks move to the class that is best for them, a few rounds.

    Parameters
    ----------
    counts : Counts
        Of a sample.
    classes : int
        Classes, at the most.
    code_bits : int
        Bits of the longest code.
    fixed : bool
        Whether all codes of a class have one length, and stand for single codes.
    exception_bits : int
        Bits of an exception.
    paired : bool
        Whether there may be pairs.
    """
    price = exception_bits + _REPAIR_BITS
    labels = group_histograms(counts.singles, classes, table_bits=8 * SINGLES)
    least = np.inf
    known: dict[bytes, tuple[SymbolClass, npt.NDArray[np.float64]]] = {}  # by their blocks
    for _ in range(_ROUNDS):
        found, priced = [], []
        for c in range(int(labels.max(initial=-1)) + 1):
            mine = labels == c
            key = mine.tobytes()
            if key not in known:
                symbols = _best_symbols(counts.of(mine), code_bits, fixed, price, paired)
                known[key] = symbols, symbols.worth(counts, price)
            found.append(known[key][0])
            priced.append(known[key][1])
        costs = np.stack(priced, axis=1)
        moved = costs.argmin(axis=1)
        total = float(costs.min(axis=1).sum())
        if total < least:  # a class that blocks have moved to may do without pairs
            least, best = total, (found, moved)
        stayed = float(costs[np.arange(len(labels)), labels].sum())
        if total >= stayed * (1 if len(labels) <= _FEW_BLOCKS else 1 - _LEAST_GAIN):
            break
        labels = np.unique(moved, return_inverse=True)[1]
    found, moved = best
    used, labels = np.unique(moved, return_inverse=True)
    return [found[c] for c in used], np.asarray(labels, np.int64)


def shorten_codes(
    classes: list[SymbolClass],
    labels: npt.NDArray[np.int64],
    counts: Counts,
    *,
    tile_blocks: int,
    tile_tokens: int,
    exception_bits: int,
) -> list[SymbolClass]:
    """Return the classes, their codes as short as saves bits where the streams of a tile end.

    A lane takes a unit as soon as it has fewer bits left than it may need for the codes before it
    asks again. So it ends with about as many bits that no code takes as it asked for last: two of
    the longest codes of the class of its last block, one where these are not short. Codes with
    a lower limit take a little more, and a lane leaves less.

    Parameters
    ----------
    classes, labels, counts, exception_bits
        As of `choose_classes`.
    tile_blocks : int
        Blocks of a tile, of which those of each head in `counts` lie in order.
    tile_tokens : int
        Tokens of a tile.
    """
    price = exception_bits + _REPAIR_BITS
    last = np.arange(len(labels)) % tile_blocks == tile_blocks - 1
    # 32 lanes of a tile, whose last block has 16 values of each token.
    ends = 2 * counts.values * last / tile_tokens
    found = []
    for c, best in enumerate(classes):
        mine = labels == c
        n_ends, of_class = float(ends[mine].sum()), counts.of(mine)
        likely, asked = _Likely(of_class), 2 if best.short else 1
        least = float(best.cost(of_class, price)[0]) + asked * best.bits * n_ends
        for limit in range(best.bits - 1, 0 if best.short else SHORT_BITS, -1):
            if not n_ends or (2 * best.radius + 1) ** 2 > 1 << limit:
                break
            if best.radius:
                lengths = _pair_lengths(likely.pairs(best.radius), best.radius, limit, price)
            else:
                lengths = _single_lengths(likely.singles(), limit, price, counts.escape)
            one = SymbolClass(best.radius, _padded(lengths))
            bits = float(one.cost(of_class, price)[0]) + asked * one.bits * n_ends
            if bits >= least:
                break
            best, least = one, bits
        found.append(best)
    return found


def _best_symbols(
    counts: Counts, code_bits: int, fixed: bool, price: int, paired: bool
) -> SymbolClass:
    """Return the symbols that code one histogram best."""
    likely = _Likely(counts)
    if fixed:
        return SymbolClass(0, _padded(_fixed_singles(likely.singles(), code_bits, price)))
    values = float(counts.values[0])
    found: list[tuple[SymbolClass, float]] = []
    for limit in sorted({min(code_bits, SHORT_BITS), code_bits}):
        if paired:
            found += _pairs(likely, limit, price)
        found.append(_singles(likely, limit, price))
    return min(found, key=lambda one: one[1] + one[0].look_up_bits * values)[0]


def _singles(likely: _Likely, limit: int, price: int) -> tuple[SymbolClass, float]:
    lengths = _single_lengths(likely.singles(), limit, price, likely.counts.escape)
    found = SymbolClass(0, _padded(lengths))
    return found, float(found.cost(likely.counts, price)[0])


def _pairs(likely: _Likely, limit: int, price: int) -> Iterator[tuple[SymbolClass, float]]:
    """Yield classes of pairs and their bits, from the least radius on until they get worse."""
    counts = likely.counts
    most = _PAIR_EXCEPTIONS * max(counts.values[0], 1)
    least = np.inf
    for radius in range(1, PAIR_RADIUS + 1):
        if (2 * radius + 1) ** 2 > 1 << limit:
            break
        if counts.beyond[0, radius] > most:
            continue
        lengths = _pair_lengths(likely.pairs(radius), radius, limit, price)
        found = SymbolClass(radius, _padded(lengths))
        bits = float(found.cost(counts, price)[0])
        if bits >= least:
            break
        yield found, bits
        least = bits


class _Likely:
    """What is likely of later values by one histogram of a sample; codes are made for that."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self._singles: npt.NDArray[np.float64] | None = None
        self._square: npt.NDArray[np.float64] | None = None
        self._pairs: dict[int, npt.NDArray[np.float64]] = {}

    def singles(self) -> npt.NDArray[np.float64]:
        """Return how likely each symbol of single codes is, ``[SINGLES]``."""
        if self._singles is None:
            singles = self.counts.singles[0]
            likely = singles + _WIDER_SHARE * (_wider() @ singles)
            likely[0] = 0
            likely[self.counts.escape] += 1
            self._singles = likely
        return self._singles

    def pairs(self, radius: int) -> npt.NDArray[np.float64]:
        """Return how likely each symbol of pairs of a radius is."""
        if self._square is None:
            inner = slice(ZERO_SYMBOL - PAIR_RADIUS, ZERO_SYMBOL + PAIR_RADIUS + 1)
            wider = _wider()[inner, inner]
            square = self.counts.pairs[0].reshape(PAIR_WIDTH, PAIR_WIDTH)
            self._square = (square + _WIDER_SHARE * (wider @ square @ wider.T)).ravel()
        if radius not in self._pairs:
            size = (2 * radius + 1) ** 2
            folded = np.bincount(_folded(radius), self._square, size).astype(np.float64)
            folded[2 * radius * (radius + 1)] += 1  # exceptions are coded as 0
            self._pairs[radius] = folded
        return self._pairs[radius]


def _single_lengths(
    likely: npt.NDArray[np.float64], code_bits: int, price: int, escape: int
) -> npt.NDArray[np.uint8]:
    """Return lengths of single codes; those that are rarer than exceptions are worth have none.

    The symbol that exceptions have is coded, however rare it is.
    """
    coded = _worth(likely, price, code_bits)
    coded[escape] = True
    if coded.sum() > 1 << code_bits:
        ranked = -likely
        ranked[escape] = -np.inf
        coded[np.argsort(ranked, kind="stable")[1 << code_bits :]] = False
    return code_lengths(_whole(likely, coded), code_bits)


def _fixed_singles(
    likely: npt.NDArray[np.float64], code_bits: int, price: int
) -> npt.NDArray[np.uint8]:
    """Return the best width of plain fields that hold codes around 0."""
    best, least = np.zeros(SINGLES, np.uint8), np.inf
    for width in range(1, min(code_bits, 8) + 1):
        half = 1 << (width - 1)
        inside = (_CODES >= 1 - half) & (_CODES <= min(half, MAX_CODE))
        bits = width * likely.sum() + price * likely[~inside].sum()
        if bits < least:
            best, least = fixed_lengths(inside.astype(np.int64), code_bits), bits
    return best


def _pair_lengths(
    likely: npt.NDArray[np.float64], radius: int, code_bits: int, price: int
) -> npt.NDArray[np.uint8]:
    """Return lengths of pairs; those that are rarer than two exceptions are worth have none."""
    coded = _worth(likely, 2 * price, code_bits)
    coded[2 * radius * (radius + 1)] = True
    return code_lengths(_whole(likely, coded), code_bits)


def _worth(likely: npt.NDArray[np.float64], price: float, code_bits: int) -> npt.NDArray[np.bool_]:
    """Return which symbols are likely enough for a code, of those that cost a price without.

    The longest code takes ``2 ** -code_bits`` of the room of all others.
    """
    return np.asarray(likely * (price - code_bits) > likely.sum() * 2.0**-code_bits * np.log2(np.e))


def _whole(likely: npt.NDArray[np.float64], coded: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return counts as integers, those that are coded at least 1."""
    return np.where(coded, np.maximum(np.rint(likely * 64), 1), 0).astype(np.int64)


def _padded(lengths: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    padded = np.zeros(MAX_SYMBOLS, np.uint8)
    padded[: len(lengths)] = lengths
    return padded


@cache
def _folded(radius: int) -> npt.NDArray[np.int64]:
    """Return the symbol of each counted pair in a class of a radius, codes beyond it taken as 0."""
    codes = np.arange(PAIR_WIDTH) - PAIR_RADIUS
    codes = np.where(np.abs(codes) <= radius, codes, 0) + radius
    return np.asarray((codes[:, None] * (2 * radius + 1) + codes).ravel(), np.int64)


@cache
def _wider() -> npt.NDArray[np.float64]:
    """Return ``[SINGLES, SINGLES]``: where a code's share goes when values are spread wider."""
    spread = np.zeros((SINGLES, SINGLES))
    codes = np.arange(-MAX_CODE, MAX_CODE + 1)
    for code in codes:
        low, high = _WIDER * (code - 0.5), _WIDER * (code + 0.5)
        overlap = np.minimum(high, codes + 0.5) - np.maximum(low, codes - 0.5)
        spread[codes + ZERO_SYMBOL, code + ZERO_SYMBOL] = np.maximum(overlap, 0) / _WIDER
    return spread
