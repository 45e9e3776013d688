"""Which way to write a table's rows, and whether to compress at all: equation 2 of the SC'24 paper.

``speed-up = 1 / (1 / ratio + rate * (1 / encode + 1 / decode))``, with what the paper leaves out:
seconds that an exchange takes however small it is, and those of the sizes stage.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..engine.advisor import NetworkModel
from ..errors import CorruptedDataError
from .messages import (
    RAW,
    REFERENCES,
    Candidate,
    Repeats,
    decode_part,
    encode_part,
    most_part_bytes,
)
from .pieces import PieceTrial
from .wire import DESCRIPTOR_BYTES, Turn

CODES = Candidate("codes", references=False)
#: Ways to write rows within a bound, and of every bit.
WITHIN_BOUND = (
    REFERENCES,
    Candidate("window", window=255),
    CODES,
    Candidate("fixed-width", references=False, huffman=False),
    Candidate("lossless", bounded=False),
    RAW,
)
EVERY_BIT = (REFERENCES, CODES, RAW)
#: What is chosen is given up for what takes at most this share of its seconds.
HYSTERESIS = 0.9
#: Bytes of rows that candidates are tried on.
TRIAL_BYTES = 1 << 20
#: Of each candidate; the shorter time counts.
TRIALS = 2
#: Due calls that do not decide, at the most, where decisions by measured exchanges change nothing.
MOST_PASSED_OVER = 15
#: The first call that decides, counted from 0, and from there on each so many.
FIRST_DECISION, DECISION_EVERY = 8, 64

COMPRESSED, PIECES, PLAIN = MODES = ("compressed", "pieces", "plain")


@dataclass(frozen=True)
class Measured:
    """What writing and reading rows took.

    Parameters
    ----------
    ratio : float
        Raw bytes over those of the part.
    encode_s_per_byte, decode_s_per_byte : float
        Seconds for each raw byte.
    """

    ratio: float
    encode_s_per_byte: float
    decode_s_per_byte: float

    def s_per_byte(self, link_s_per_byte: float) -> float:
        """Return the seconds of a raw byte through a link."""
        return self.encode_s_per_byte + self.decode_s_per_byte + link_s_per_byte / self.ratio


@dataclass
class TableChoice:
    """How a table's rows are written, and what was measured of each way.

    Parameters
    ----------
    candidate : Candidate
        How.
    measured : dict of str to Measured
        By the candidate's name.
    """

    candidate: Candidate = REFERENCES
    measured: dict[str, Measured] = field(default_factory=dict)

    def choose(
        self,
        rows: torch.Tensor,
        bound: float,
        model: NetworkModel,
        repeats: Repeats | None = None,
    ) -> None:
        """Measure all candidates on rows ``[n, row]`` on the CPU, and choose the fastest.

        Parameters
        ----------
        rows : torch.Tensor
            For one other rank, of which some are tried.
        bound : float
            As for `encode_part`.
        model : NetworkModel
            What the group's link takes.
        repeats : Repeats, optional
            Rows of one id among them.
        """
        row_bytes = rows.shape[1] * rows.element_size()
        if not len(rows) or not row_bytes:
            return
        sample = rows[: max(1, TRIAL_BYTES // row_bytes)]
        candidates = WITHIN_BOUND if bound else EVERY_BIT
        if repeats is not None and len(sample) < len(rows):
            repeats = Repeats.of(torch.from_numpy(repeats.places[: len(sample)]))
        self.take_fastest({c: measure(sample, bound, c, repeats) for c in candidates}, model)

    def take_fastest(self, measured: Mapping[Candidate, Measured], model: NetworkModel) -> None:
        """Choose the fastest of ways that were measured; what is hardly slower is not given up.

        Parameters
        ----------
        measured : mapping of Candidate to Measured
            One way or more.
        model : NetworkModel
            What the group's link takes.
        """
        self.measured = {c.name: of_way for c, of_way in measured.items()}
        link = 1 / model.bytes_per_s
        cost = {name: of_way.s_per_byte(link) for name, of_way in self.measured.items()}
        best = min(measured, key=lambda c: cost[c.name])
        now = cost.get(self.candidate.name, math.inf)
        if cost[best.name] < HYSTERESIS * now:
            self.candidate = best

    def state_dict(self) -> str:
        """Return the candidate's name."""
        return self.candidate.name

    def load_state_dict(self, name: str) -> None:
        """Take the candidate of a name.

        Raises
        ------
        CorruptedDataError
            When there is none.
        """
        by_name = {c.name: c for c in WITHIN_BOUND}
        if not isinstance(name, str) or name not in by_name:
            raise CorruptedDataError(f"state: {name!r:.60} is no way to write rows")
        self.candidate = by_name[name]


def measure(
    rows: torch.Tensor, bound: float, candidate: Candidate, repeats: Repeats | None
) -> Measured:
    """Return what writing rows ``[n, row]`` on the CPU one way takes, and reading them.

    Rows of one id are written once, as in a message.
    """
    out = np.empty(most_part_bytes(len(rows), rows.shape[1] * rows.element_size()), np.uint8)
    received = torch.empty_like(rows)
    raw, encode, decode, used = rows.nbytes, math.inf, math.inf, 1
    for _ in range(TRIALS):
        started = time.perf_counter()
        used, _ = encode_part(rows, bound, candidate, repeats, out)
        encoded = time.perf_counter()
        decode_part(out[:used], received)
        encode = min(encode, encoded - started)
        decode = min(decode, time.perf_counter() - encoded)
    return Measured(raw / used, encode / raw, decode / raw)


@dataclass
class WayRecord:
    """What the exchanges one way took since the last decision.

    Parameters
    ----------
    calls : int
        Exchanges.
    raw_bytes, moved_bytes : float
        For other ranks.
    encode_s, decode_s : float
        Seconds.
    saved_back_bytes : float
        Of gradients that need not come back, where rows of one id cross once; else they do.
    """

    calls: int = 0
    raw_bytes: float = 0.0
    moved_bytes: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    saved_back_bytes: float = 0.0

    def predicted(self, model: NetworkModel, others: int, short_bytes: int) -> tuple[float, float]:
        """Return the seconds of an exchange, compressed and plain; -1 where nothing is known.

        A message of up to `short_bytes` crosses with its descriptor.
        """
        if not self.calls:
            return -1.0, -1.0
        raw, moved = self.raw_bytes / self.calls, self.moved_bytes / self.calls
        encode, decode = self.encode_s / self.calls, self.decode_s / self.calls

        def crossing(n_bytes: float) -> float:
            descriptors = DESCRIPTOR_BYTES * others
            if n_bytes <= short_bytes * others:
                return model.seconds(descriptors + n_bytes)
            return model.seconds(descriptors) + model.seconds(n_bytes)

        return encode + crossing(moved) + decode, model.seconds(raw)


class Decision:
    """Whether exchanges are compressed, one way and the other; the same on all ranks.

    Parameters
    ----------
    ways : int
        1, or 2: forward and backward.
    pieces : int
        Pieces that may be used.
    every : int
        Calls from one decision to the next.
    """

    def __init__(self, *, ways: int, pieces: int = 1, every: int = DECISION_EVERY) -> None:
        self._first = PIECES if pieces > 1 else COMPRESSED
        self.modes = [self._first] * ways
        self._pieces, self._every = pieces, every
        self._first_decision = min(FIRST_DECISION, every)
        self._forget(ways)
        self._calls = [0] * ways
        self._decided, self._agreed = [False] * ways, [True] * ways
        self._passed_over, self._pass_over = [0] * ways, [0] * ways

    def _forget(self, ways: int) -> None:
        """Begin without anything that was measured."""
        self._begin_records(ways)
        #: By way, of the last exchanges that crossed whole before a decision.
        self._whole = [WayRecord() for _ in range(ways)]
        self.trials = [PieceTrial(self._first_decision, self._every) for _ in range(ways)]

    def _begin_records(self, ways: int) -> None:
        #: By way, of exchanges that cross whole, or while rows cross plain.
        self.records = [WayRecord() for _ in range(ways)]
        #: By way, of exchanges in pieces.
        self.in_pieces = [WayRecord() for _ in range(ways)]

    def turn(self, way: int = 0) -> Turn:
        """Return which call one way comes next."""
        return Turn(self._every, self._calls[way])

    def mode(self, way: int = 0) -> str:
        """Return how the next exchange one way crosses.

        The first one behind a state that was loaded is compressed: its sizes stage finds ranks that
        know other decisions, which would wait for each other in later ones.
        """
        return self.modes[way] if self._agreed[way] else self._first

    def takes_pieces(self, way: int = 0) -> bool:
        """Return whether rows cross in pieces in the call one way that was begun, as on all."""
        mode = self.mode(way)
        if self._pieces == 1 or mode == PLAIN:
            return False
        tried = self._agreed[way] and self.trials[way].tries(self._calls[way] - 1)
        return (mode == PIECES) != tried

    def took(self, way: int, seconds: float, n_bytes: int, *, in_pieces: bool) -> WayRecord:
        """Note what the exchange of a call took as a whole; return what its stages are added to."""
        self.trials[way].took(self._calls[way] - 1, seconds, n_bytes, in_pieces=in_pieces)
        return (self.in_pieces if in_pieces else self.records)[way]

    def agreed(self, way: int = 0) -> None:
        """Note that an exchange one way is compressed, in which ranks find whether they differ."""
        self._agreed[way] = True

    def decides_next(self, way: int = 0) -> bool:
        """Return whether all ranks may decide in the next call one way."""
        since = self._calls[way] - self._first_decision
        return self._agreed[way] and since >= 0 and since % self._every == 0

    def begin(self, way: int = 0) -> bool:
        """Count a call one way; return whether all ranks decide in it."""
        due = self.decides_next(way)
        if due:
            self.trials[way].compare()
        self._calls[way] += 1
        return due

    def is_due(self, way: int) -> bool:
        """Count a call as `begin` does; return whether exchanges are measured in it.

        Decisions by `decide_way` that change nothing are followed by calls that do not decide: one,
        three and so on up to `MOST_PASSED_OVER`.
        """
        if not self.begin(way):
            return False
        due = self._passed_over[way] >= self._pass_over[way]
        self._passed_over[way] = 0 if due else self._passed_over[way] + 1
        return due

    def decide_way(self, way: int, slowest: Sequence[float]) -> None:
        """Decide one way by the seconds of the slowest rank for each mode, below 0 if unknown.

        The first time what is fastest is taken; later it takes `HYSTERESIS` to change.
        """
        known = {mode: s for mode, s in zip(MODES, slowest, strict=True) if s >= 0}
        best = min(known, key=known.__getitem__)
        now, first = known.get(self.modes[way], math.inf), not self._decided[way]
        self._decided[way] = True
        if best != self.modes[way] and (first or known[best] < HYSTERESIS * now):
            self.modes[way], self._pass_over[way] = best, 0
        elif not first:
            self._pass_over[way] = min(MOST_PASSED_OVER, 2 * self._pass_over[way] + 1)

    def predictions(self, model: NetworkModel, others: int, short_bytes: int = 0) -> list[int]:
        """Return this rank's predicted seconds as int64 numbers, and begin records anew."""
        records = [self._known(way) for way in range(len(self.modes))]
        seconds = []
        for record, trial in zip(records, self.trials, strict=True):
            compressed, plain = record.predicted(model, others, short_bytes)
            in_pieces = compressed * trial.ratio if self._pieces > 1 else -1.0
            seconds.append([compressed, in_pieces, plain])
        forward = records[0]
        if forward.calls and forward.saved_back_bytes:
            at = MODES.index(PLAIN)
            seconds[0][at] += self._seconds_back(model, seconds[-1], forward, records[-1])
        self._begin_records(len(records))
        return as_integers([s for of_way in seconds for s in of_way])

    def _known(self, way: int) -> WayRecord:
        """Return what is known of stages, of whole exchanges where there was one.

        Those of pieces take longer, and say nothing where there was no exchange since the last
        decision.
        """
        if self.records[way].calls:
            self._whole[way] = self.records[way]
        elif not (self.in_pieces[way].calls and self._whole[way].calls):
            return self.in_pieces[way]
        return self._whole[way]

    def _seconds_back(
        self, model: NetworkModel, back: Sequence[float], forward: WayRecord, record: WayRecord
    ) -> float:
        """Return the seconds of gradients that come back where all rows cross forward.

        As they would cross now, of what exchanges back were predicted to take.
        """
        saved, mode = forward.saved_back_bytes / forward.calls, self.modes[-1]
        known = back[MODES.index(mode)]
        if mode != PLAIN and record.raw_bytes and known > 0:
            return saved * known * record.calls / record.raw_bytes
        return saved_seconds(model, forward.raw_bytes / forward.calls, saved)

    @property
    def count(self) -> int:
        """Numbers that `predictions` returns."""
        return len(MODES) * len(self.modes)

    def decide(self, numbers: Sequence[Sequence[int]]) -> None:
        """Decide by the predictions of all ranks: an exchange takes what its slowest rank does."""
        self.decide_by(np.array([as_floats(each) for each in numbers]).max(axis=0).tolist())

    def decide_by(self, slowest: Sequence[float]) -> None:
        """Decide by the seconds of the slowest rank for each way and mode."""
        for way, mode in enumerate(self.modes):
            at = len(MODES) * way
            seconds = dict(zip(MODES, slowest[at : at + len(MODES)], strict=True))
            known = {name: s for name, s in seconds.items() if s >= 0}
            if mode not in known:
                continue
            best = min(known, key=known.__getitem__)
            if known[best] < HYSTERESIS * known[mode]:
                self.modes[way] = best

    def state_dict(self) -> dict[str, Any]:
        """Return modes, calls and what says when a call decides."""
        return {
            "modes": list(self.modes),
            "calls": list(self._calls),
            "decided": list(map(int, self._decided)),
            "passed_over": list(self._passed_over),
            "pass_over": list(self._pass_over),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as where `state_dict` was taken.

        Raises
        ------
        CorruptedDataError
            When it is damaged.
        """
        if not isinstance(state, Mapping):
            raise CorruptedDataError(f"state: {state!r:.80}, expected what was decided")
        modes = state.get("modes")
        counted = [state.get(name) for name in ("calls", "decided", "passed_over", "pass_over")]
        sound = (
            isinstance(modes, list)
            and len(modes) == len(self.modes)
            and all(mode in MODES for mode in modes)
            and all(
                isinstance(each, list)
                and len(each) == len(self.modes)
                and all(isinstance(n, int) and n >= 0 for n in each)
                for each in counted
            )
        )
        if not sound:
            raise CorruptedDataError(
                f"state: {dict(state)!r:.80}, expected modes and, for each way, calls, decided, "
                "passed_over and pass_over"
            )
        calls, decided, passed_over, pass_over = (list(each or []) for each in counted)
        self.modes = [self._first if mode == PIECES else str(mode) for mode in modes or []]
        self._agreed = [False] * len(self.modes)
        self._calls, self._passed_over, self._pass_over = calls, passed_over, pass_over
        self._decided = list(map(bool, decided))
        self._forget(len(self.modes))


def saved_seconds(model: NetworkModel, raw_bytes: float, saved_bytes: float) -> float:
    """Return what a plain exchange of fewer bytes takes less time."""
    return model.seconds(raw_bytes) - model.seconds(max(0.0, raw_bytes - saved_bytes))


def as_integers(seconds: Sequence[float]) -> list[int]:
    """Return float64 as the int64 of their bits."""
    return list(struct.unpack(f"<{len(seconds)}q", struct.pack(f"<{len(seconds)}d", *seconds)))


def as_floats(numbers: Sequence[int]) -> list[float]:
    """Return what `as_integers` was given."""
    return list(struct.unpack(f"<{len(numbers)}d", struct.pack(f"<{len(numbers)}q", *numbers)))
