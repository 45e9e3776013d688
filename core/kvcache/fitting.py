"""Codecs of a history: fitted to its first tokens, and again when blocks become larger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..engine.codecs import RowCodec
from .in_flight import AsyncCopy
from .model_codecs import FirstCodec
from .packing import LEAST_GAIN, SAMPLE_BYTES, SHARE_DIFFERENCE, Plans, TokenRows, draw_rows
from .segment import Segment

#: A codec is fitted again when the last DRIFT_BLOCKS blocks took this share of the raw bytes more
#: than the first ones of its segment did, and the new one is kept when it saves REFIT_GAIN of them.
DRIFT_BLOCKS = 4
DRIFT = 0.05
REFIT_GAIN = 0.02
#: And it is fitted again once the tokens packed since the last time are this share of all: tokens
#: that change their kind again and again would cost a fit each time, and all later reading a
#: segment.
REFIT_SHARE = 1 / 16


@dataclass(frozen=True)
class Choice:
    """The codec of the next blocks.

    Parameters
    ----------
    begins_segment : bool
        Whether they begin a segment; else they continue the last one.
    codec : RowCodec or None
        The codec of the new segment; None keeps rows raw.
    share : float
        Share of the raw bytes that its rows are expected to take.
    kept : bool
        Whether codec and share are those of the cache before.
    """

    begins_segment: bool
    codec: RowCodec | None = None
    share: float = 1.0
    kept: bool = False


class Fitting:
    """Fits the codecs of one history: to its first tokens, and when blocks become larger.

    Parameters
    ----------
    plans : Plans
        Fits the codecs; the histories of all layers share one.
    kind : str
        ``"k"`` or ``"v"``, for `plans`.
    kept : FirstCodec, optional
        Where the codec of the first tokens is taken from. It is used without a sample; where
        `kept` `tells`, it is left there, and given up when the first rows show that they are of
        another kind.

    Attributes
    ----------
    wanted : bool
        Whether the last blocks were so large that another codec may be better.
    refits : int
        How often one has been fitted again.
    """

    def __init__(self, plans: Plans, kind: str, kept: FirstCodec | None = None) -> None:
        self._plans = plans
        self._kind = kind
        self._kept = kept
        self._expected_share = 0.0  # of the first rows, whose codec was kept
        self._sample: AsyncCopy | None = None
        self._recent: list[float] = []  # words of a row, of the last blocks of the segment
        self._length = 0  # packed tokens
        self._fitted_at = 0  # how many there were when a codec was fitted again
        self.wanted = False
        self.refits = 0

    @property
    def samples(self) -> bool:
        """Whether a sample is copied to the host."""
        return self._sample is not None

    def choose(
        self, rows: TokenRows, tokens: torch.Tensor, last: Segment | None, wait: bool
    ) -> Choice | None:
        """Return the codec of the next blocks, or None while a sample is copied to the host.

        Parameters
        ----------
        rows : TokenRows
            What a row is.
        tokens : torch.Tensor
            ``[B, H, n * block_tokens, D]``, at least those that are to be packed.
        last : Segment, optional
            The segment that packed the blocks before.
        wait : bool
            Whether to wait for the sample.
        """
        if self._sample is None:
            if last is None and self._kept is not None:
                kept = self._kept.get(rows.dtype, rows.row_bytes)
                if kept is not None:
                    tells = self._kept.tells
                    self._expected_share = kept.share if tells else 0.0
                    return Choice(True, kept.codec, kept.share, kept=tells)
            self._sample = AsyncCopy(draw_rows(rows, tokens))
        sample = self._sample.get(wait)
        if sample is None:
            return None
        self._sample = None
        self.wanted = False
        codec = self._plans.fit(self._kind, sample, search_all=last is not None)
        packed = float(codec.packed_bytes(sample).sum())
        if last is not None:
            self.refits += 1
            self._recent = []
            self._fitted_at = self._length
            if last.codec is not None:
                now = float(last.codec.packed_bytes(sample).sum())
                if now - packed < REFIT_GAIN * sample.nbytes:
                    # The tokens are harder to pack for any codec.
                    last.expected_words = now / 4 / sample.shape[0]
                    return Choice(begins_segment=False)
        metadata = codec.row_metadata_bytes(sample.shape[0])
        # Raw rows lie at multiples of their words.
        raw = packed + metadata > (1 - LEAST_GAIN) * sample.nbytes and not rows.row_bytes % 4
        return Choice(True, None, 1.0) if raw else Choice(True, codec, packed / sample.nbytes)

    def accepts_first(
        self, rows: TokenRows, codec: RowCodec | None, n_rows: int, n_words: int
    ) -> bool:
        """Return whether the first packed rows are of the kind that their codec is for.

        If so, or if they were too few to tell, it is left to the next cache; else the next one is
        fitted to a sample.

        Parameters
        ----------
        rows : TokenRows
            What a row is.
        codec : RowCodec or None
            What packed them.
        n_rows, n_words : int
            Rows, and their words.
        """
        expected, self._expected_share = self._expected_share, 0.0
        raw_bytes = n_rows * rows.row_bytes
        if self._kept is None or not self._kept.tells or raw_bytes < SAMPLE_BYTES:
            return True
        share = 4 * n_words / raw_bytes
        more = share - expected if expected else 0.0
        if codec is None or abs(more) > SHARE_DIFFERENCE:
            # Where rows take less, another codec may save more still: the next cache looks.
            self._kept.drop(rows.dtype, rows.row_bytes)
            return more <= SHARE_DIFFERENCE
        if not expected:  # a kept codec is measured by its own first rows, so that it cannot drift
            self._kept.put(rows.dtype, rows.row_bytes, codec, share)
        return True

    def watch(self, segment: Segment, words: float, length: int) -> None:
        """Record the words of a row in the block that was packed last.

        Another codec is wanted when the last blocks were larger than the first ones of the segment,
        and not nearly all tokens were packed before the last fit.

        Parameters
        ----------
        segment : Segment
            That of the block.
        words : float
            The words.
        length : int
            Packed tokens, with the block.
        """
        self._length = length
        if segment.kernels is None:
            return
        self._recent = [*self._recent[1 - DRIFT_BLOCKS :], words]
        mean = sum(self._recent) / len(self._recent)
        limit = segment.expected_words + DRIFT * segment.kernels.row_words
        new = length - self._fitted_at
        self.wanted = (
            len(self._recent) == DRIFT_BLOCKS and mean > limit and new >= REFIT_SHARE * length
        )

    def forget_sample(self) -> None:
        """Draw another sample for the next codec."""
        self._sample = None

    def forget_blocks(self, length: int) -> None:
        """Forget the blocks that were watched, and the sample: `length` packed tokens are left."""
        self._sample, self._recent = None, []
        self._length, self._fitted_at = length, min(self._fitted_at, length)

    def reset(self) -> None:
        """Return to the state with no tokens."""
        self.forget_blocks(0)
        self.wanted, self._expected_share = False, 0.0

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the sample, which may be in flight."""
        return {**self.__dict__, "_sample": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state, of a version in which a codec was fitted again at any length too."""
        self.__dict__.update({"_length": 0, "_fitted_at": 0, **state})
