"""How long a codec takes for a tensor of a size and a ratio: the time model of CSWAP+, section 5.4.

Seconds are linear in the bytes that are read and in those that are written: a constant, the raw
bytes and the packed ones, with factors of their own in each range of shares and of sizes. Swaps
that were measured while training runs correct it: by the ratio of measured to predicted seconds,
kept for each power of two of the size.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import ArgumentError

Table = npt.NDArray[np.float64]

#: Of a measured swap's deviation, how much the correction takes over.
LEARNING_RATE = 0.25
#: A single measurement counts as at most this many times longer or shorter than predicted.
MOST_DEVIATION = 4.0


class TimeSample(NamedTuple):
    """Measured seconds of one tensor.

    Parameters
    ----------
    nbytes : int
        Its bytes.
    share : float
        Packed bytes over raw bytes, metadata counted.
    encode_s, decode_s : float
        What encoding and decoding took.
    """

    nbytes: int
    share: float
    encode_s: float
    decode_s: float


@dataclass(frozen=True)
class Line:
    """Seconds as a linear function of raw and of packed bytes, none of them negative."""

    constant_s: float
    s_per_raw_byte: float
    s_per_packed_byte: float

    def seconds(self, nbytes: float, share: float) -> float:
        """Return the seconds of a tensor."""
        per_byte = self.s_per_raw_byte + self.s_per_packed_byte * share
        return max(0.0, self.constant_s + nbytes * per_byte)


@dataclass(frozen=True)
class CodecTimes:
    """The fitted sub-models of one codec and one size of elements.

    Parameters
    ----------
    share_edges : tuple of float
        Ascending; n + 1 edges of n ranges of the packed share. The first and last are those of the
        range that was measured.
    size_edges : tuple of float
        Likewise of raw bytes.
    encode, decode : tuple of tuple of Line
        ``encode[share range][size range]``.
    sm_budget : int or None
        Launch setting that was measured: multiprocessors; None for all, and on a CPU.
    n_samples : int
        Tensors that it was fitted to.
    error : tuple of float
        Mean relative error of encoding and decoding seconds on samples that were held out.
    """

    share_edges: tuple[float, ...]
    size_edges: tuple[float, ...]
    encode: tuple[tuple[Line, ...], ...]
    decode: tuple[tuple[Line, ...], ...]
    sm_budget: int | None = None
    n_samples: int = 0
    error: tuple[float, float] = (math.nan, math.nan)

    def predict(self, nbytes: float, share: float) -> tuple[float, float]:
        """Return the seconds of encoding and decoding."""
        at = bisect_right(self.share_edges, share, 1, len(self.share_edges) - 1) - 1
        size = bisect_right(self.size_edges, nbytes, 1, len(self.size_edges) - 1) - 1
        return (
            self.encode[at][size].seconds(nbytes, share),
            self.decode[at][size].seconds(nbytes, share),
        )

    def outside(self, nbytes: float, share: float) -> str:
        """Return what lies outside the range that was measured, in words, or ""."""
        said = []
        low, high = self.size_edges[0], self.size_edges[-1]
        if not low <= nbytes <= high:
            said.append(f"{nbytes / 1e6:.3g} MB ({low / 1e6:.3g} to {high / 1e6:.3g})")
        low, high = self.share_edges[0], self.share_edges[-1]
        if not low <= share <= high:
            said.append(f"a share of {share:.2f} ({low:.2f} to {high:.2f})")
        return f"outside the fitted range: {', '.join(said)}" if said else ""

    def to_config(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        return asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CodecTimes:
        """Build it again.

        Raises
        ------
        ValueError, KeyError, TypeError
            When `config` is not what `to_config` returns.
        """
        shares, sizes = (_read_edges(config[name]) for name in ("share_edges", "size_edges"))
        shape = (len(shares) - 1, len(sizes) - 1)
        encode, decode = (_read_lines(config[name], shape) for name in ("encode", "decode"))
        budget = config["sm_budget"]
        if budget is not None and (not isinstance(budget, int) or budget < 1):
            raise ValueError(f"sm_budget: {budget}")
        encode_error, decode_error = (float(error) for error in config["error"])
        return cls(
            shares,
            sizes,
            encode,
            decode,
            sm_budget=budget,
            n_samples=int(config["n_samples"]),
            error=(encode_error, decode_error),
        )


def _read_edges(found: Iterable[Any]) -> tuple[float, ...]:
    edges = tuple(float(edge) for edge in found)
    if len(edges) < 2 or list(edges) != sorted(edges) or not np.isfinite(edges).all():
        raise ValueError(f"edges: {edges}")
    return edges


def _read_lines(found: Iterable[Any], shape: tuple[int, int]) -> tuple[tuple[Line, ...], ...]:
    lines = tuple(tuple(Line(**line) for line in row) for row in found)
    if len(lines) != shape[0] or any(len(row) != shape[1] for row in lines):
        raise ValueError(f"lines: not {shape}")
    figures = np.array([list(vars(line).values()) for row in lines for line in row], np.float64)
    if not (np.isfinite(figures).all() and (figures >= 0).all()):
        raise ValueError(f"lines: {figures}")
    return lines


def fit_codec_times(
    samples: Sequence[TimeSample],
    *,
    n_shares: int = 4,
    n_sizes: int = 3,
    sm_budget: int | None = None,
) -> CodecTimes:
    """Fit the sub-models of one codec and one size of elements.

    Parameters
    ----------
    samples : sequence of TimeSample
        Measured; 4 or more.
    n_shares, n_sizes : int
        Ranges of the packed share and of the size, at most: as many as predict samples best that
        were left out of the fit, a fifth at a time.
    sm_budget : int, optional
        Launch setting with which they were measured.

    Returns
    -------
    CodecTimes

    Raises
    ------
    ArgumentError
        With fewer samples, or seconds and sizes that are not positive.
    """
    if len(samples) < 4:
        raise ArgumentError(f"samples: {len(samples)}, expected 4 or more")
    table = np.array(samples, np.float64)
    if not (np.isfinite(table).all() and (table > 0).all()):
        raise ArgumentError("samples: expected sizes, shares and seconds above 0")
    shares = sorted({max(1, n_shares // part) for part in (4, 2, 1)})
    choices = [(n, m) for n in shares for m in range(1, n_sizes + 1)]
    errors = [_left_out_error(table, *choice) for choice in choices]
    best = min(range(len(choices)), key=lambda k: errors[k].sum())
    return replace(
        _fitted(table, *choices[best]),
        sm_budget=sm_budget,
        n_samples=len(table),
        error=(float(errors[best][0]), float(errors[best][1])),
    )


FOLDS = 5


def _left_out_error(table: Table, n_shares: int, n_sizes: int) -> Table:
    """Return the mean relative errors of encoding and decoding of samples left out of the fit."""
    off = []
    fold = np.arange(len(table)) % min(FOLDS, len(table))
    for k in range(fold.max() + 1):
        left_out = fold == k
        trial = _fitted(table[~left_out], n_shares, n_sizes)
        predicted = np.array([trial.predict(row[0], row[1]) for row in table[left_out]])
        off.append(np.abs(predicted / table[left_out, 2:] - 1))
    return np.asarray(np.concatenate(off).mean(0))


LEAST_SAMPLES = 6  # of a range


def _fitted(table: Table, n_shares: int, n_sizes: int) -> CodecTimes:
    share_edges = _edges(table[:, 1], n_shares, logarithmic=False)
    rows = []
    for low, high in zip(share_edges, share_edges[1:], strict=False):
        rows.append(table[(table[:, 1] >= low) & (table[:, 1] <= high)])
    # One set of edges for the sizes of all rows, so that a row without enough samples takes two.
    size_edges = _edges(table[:, 0], n_sizes, logarithmic=True)
    cells = [
        [
            _enough(row[(row[:, 0] >= low) & (row[:, 0] <= high)], row, table)
            for low, high in zip(size_edges, size_edges[1:], strict=False)
        ]
        for row in rows
    ]
    encode, decode = (
        tuple(
            tuple(_line(cell[:, 0], cell[:, 1], cell[:, column]) for cell in row) for row in cells
        )
        for column in (2, 3)
    )
    return CodecTimes(share_edges, size_edges, encode, decode)


def _enough(*choices: Table) -> Table:
    """Return the first of ever wider choices of samples that suffices, else the widest."""
    return next((rows for rows in choices if len(rows) >= LEAST_SAMPLES), choices[-1])


def _edges(values: Table, n: int, *, logarithmic: bool) -> tuple[float, ...]:
    """Return edges of at most `n` ranges of equal width, each with samples enough."""
    low, high = float(values.min()), float(values.max())
    for ranges in range(n, 1, -1):
        edges = (
            np.geomspace(low, high, ranges + 1)
            if logarithmic
            else np.linspace(low, high, ranges + 1)
        )
        edges[0], edges[-1] = low, high
        counts, _ = np.histogram(values, edges) if high > low else (np.zeros(1), None)
        if counts.min() >= LEAST_SAMPLES:
            return tuple(float(edge) for edge in edges)
    return (low, high)


ROUNDS = 8  # of weighting anew
LEAST_DEVIATION = 0.01


def _line(raw: Table, share: Table, seconds: Table) -> Line:
    """Return the line of least relative deviations, with no factor below 0.

    Not of least squares: a machine that does something else now and then makes a sample take much
    longer, which says nothing of the codec. Squares are weighted by what their deviations were.
    """
    columns = np.stack([np.ones_like(raw), raw, raw * share], 1) / seconds[:, None]
    scale = np.linalg.norm(columns, axis=0)
    columns /= scale
    weights = np.ones_like(seconds)
    factors = _least_squares(columns, weights)
    for _ in range(ROUNDS):
        off = np.abs(columns @ factors - 1)
        weights = 1 / np.sqrt(np.maximum(off, LEAST_DEVIATION))
        factors = _least_squares(columns, weights)
    return Line(*(float(factor) for factor in factors / scale))


def _least_squares(columns: Table, weights: Table) -> Table:
    """Return factors of three columns, none negative, whose sum comes nearest to 1."""
    weighted = columns * weights[:, None]
    best: tuple[float, Table] | None = None
    # With three factors every choice of those that are not 0 can be tried.
    for used in ([0, 1, 2], [1, 2], [0, 1], [0, 2], [1], [2], [0]):
        factors = np.zeros(3)
        factors[used] = np.linalg.lstsq(weighted[:, used], weights, rcond=None)[0]
        if (factors < 0).any():
            continue
        residual = float(((weighted @ factors - weights) ** 2).sum())
        if best is None or residual < best[0]:
            best = (residual, factors)
        if len(used) == 3:
            break  # nothing is nearer
    if best is None:  # not of positive columns
        raise ArgumentError("samples: expected sizes, shares and seconds above 0")
    return best[1]


class TimeModel:
    """Predicts the seconds of encoding and decoding of the codecs of one device.

    Parameters
    ----------
    codecs : mapping of (str, int) to CodecTimes
        By codec name and bytes of an element.
    source : str
        Where the figures come from, in words.

    Notes
    -----
    What was fitted does not change. `observe` changes corrections, which one thread may do while
    others predict.

    Examples
    --------
    >>> from bitslab.engine.advisor import CodecTimes, Line, TimeModel
    >>> line = Line(10e-6, 1e-12, 1e-12)
    >>> times = CodecTimes((0.2, 0.8), (20e6, 2e9), ((line,),), ((line,),))
    >>> model = TimeModel({("zvc", 4): times})
    >>> encode_s, decode_s = model.predict("zvc", 100e6, 0.5)
    >>> round(encode_s * 1e6)
    160
    >>> model.outside("zvc", 1e6, 0.5)
    'outside the fitted range: 1 MB (20 to 2e+03)'
    """

    def __init__(
        self, codecs: Mapping[tuple[str, int], CodecTimes], *, source: str = "given figures"
    ) -> None:
        self._codecs = dict(codecs)
        self.source = source
        self._nearest: dict[tuple[str, int], tuple[CodecTimes, int]] = {}
        # By codec, bytes of an element and power of two of the size; 0 stands for all sizes.
        self._factors: dict[tuple[str, int, int], tuple[float, float]] = {}

    @property
    def codecs(self) -> Mapping[tuple[str, int], CodecTimes]:
        """What was fitted, by codec name and bytes of an element."""
        return self._codecs

    def predict(
        self, codec_name: str, nbytes: float, share: float, element_bytes: int = 4
    ) -> tuple[float, float]:
        """Return the predicted seconds of encoding and decoding one tensor.

        Parameters
        ----------
        codec_name : str
            Name of the codec.
        nbytes : float
            Raw bytes of the tensor.
        share : float
            Packed bytes over raw bytes.
        element_bytes : int
            Bytes of an element; the nearest size that was measured stands for others.

        Returns
        -------
        tuple of float
            ``(encode_s, decode_s)``.

        Raises
        ------
        KeyError
            When nothing is known of the codec.
        """
        times, _ = self._nearest.get((codec_name, element_bytes)) or self._find(
            codec_name, element_bytes
        )
        encode_s, decode_s = times.predict(nbytes, share)
        if self._factors:
            factors = self._factors.get(
                (codec_name, element_bytes, int(nbytes).bit_length())
            ) or self._factors.get((codec_name, element_bytes, 0))
            if factors is not None:
                return encode_s * factors[0], decode_s * factors[1]
        return encode_s, decode_s

    def outside(self, codec_name: str, nbytes: float, share: float, element_bytes: int = 4) -> str:
        """Return what of a prediction lies outside the range that was measured, in words, or "".

        A size of which swaps were observed is inside.
        """
        if (codec_name, element_bytes, int(nbytes).bit_length()) in self._factors:
            return ""
        times, measured_bytes = self._find(codec_name, element_bytes)
        said = times.outside(nbytes, share)
        if measured_bytes != element_bytes:
            other = f"elements of {element_bytes} B ({measured_bytes})"
            said = f"{said}, {other}" if said else f"outside the fitted range: {other}"
        return said

    def sm_budget(self, codec_name: str, element_bytes: int = 4) -> int | None:
        """Return the launch setting found for a codec: multiprocessors, None for all of them."""
        return self._find(codec_name, element_bytes)[0].sm_budget

    def observe(
        self,
        codec_name: str,
        nbytes: float,
        share: float,
        *,
        encode_s: float | None = None,
        decode_s: float | None = None,
        element_bytes: int = 4,
    ) -> None:
        """Correct the model by what a real swap took.

        Parameters
        ----------
        codec_name, nbytes, share, element_bytes
            As for `predict`.
        encode_s, decode_s : float, optional
            Measured seconds of either. What is not positive is passed over.

        Raises
        ------
        KeyError
            When nothing is known of the codec.
        """
        times, _ = self._find(codec_name, element_bytes)
        fitted = times.predict(nbytes, share)
        for power in (int(nbytes).bit_length(), 0):
            key = (codec_name, element_bytes, power)
            # A size that is new begins with what is known of all.
            factors = list(
                self._factors.get(key)
                or self._factors.get((codec_name, element_bytes, 0))
                or (1.0, 1.0)
            )
            for which, seconds in enumerate((encode_s, decode_s)):
                if seconds is None or not (0 < seconds < math.inf) or fitted[which] <= 0:
                    continue
                off = math.log(seconds / (fitted[which] * factors[which]))
                limit = math.log(MOST_DEVIATION)
                factors[which] *= math.exp(LEARNING_RATE * min(limit, max(-limit, off)))
            self._factors[key] = (factors[0], factors[1])

    def corrections(self) -> dict[tuple[str, int, int], tuple[float, float]]:
        """Return the factors that measured swaps led to, for encoding and decoding.

        By codec, bytes of an element and bit length of the size in bytes, 0 for all sizes.
        """
        return dict(self._factors)

    def _find(self, codec_name: str, element_bytes: int) -> tuple[CodecTimes, int]:
        found = self._nearest.get((codec_name, element_bytes))
        if found is None:
            known = [size for name, size in self._codecs if name == codec_name]
            if not known:
                raise KeyError(codec_name)
            # Of two equally near the larger.
            nearest = min(known, key=lambda size: (abs(math.log2(size / element_bytes)), -size))
            found = self._codecs[codec_name, nearest], nearest
            self._nearest[codec_name, element_bytes] = found
        return found

    def __repr__(self) -> str:
        names = sorted({name for name, _ in self._codecs})
        return f"<TimeModel {', '.join(names)}: {self.source}>"


def relative_absolute_error(predicted: Iterable[float], measured: Iterable[float]) -> float:
    """Return the sum of errors over the sum of deviations from the mean, as in section 6.3."""
    guess, truth = np.array([*predicted]), np.array([*measured])
    spread = np.abs(truth - truth.mean()).sum()
    return float(np.abs(guess - truth).sum() / spread) if spread else math.nan
