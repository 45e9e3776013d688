"""PackedTokens: the packed part of a history, from its first token to the tail."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..engine.kernels.format import ceil_div
from .arena import GROWTH
from .fitting import Fitting
from .in_flight import InFlightBlocks
from .packing import Plans, TokenRows
from .segment import Segment, Sequences
from .selection import Take
from .words import Words

#: Makes a prepared change; it cannot fail.
Commit = Callable[[], None]
#: Tokens are packed in pieces of about this many bytes, to bound the memory that it takes.
PIECE_BYTES = 64 << 20


class Revision:
    """Identity of the packed tokens of one history between two changes.

    Caches of what is derived from them use it as a weak key, so that a change drops their entries.
    """


class PackedTokens:
    """The packed tokens of a history: its segments and their words.

    A block is packed from the first tokens of the history's tail (`begin`) and is in flight until
    its size is known on the host; then its words are moved to the store and its tokens leave the
    tail (`retire`). Nothing else is kept of the tail here.

    Parameters
    ----------
    words : Words
        An empty store.
    plans : Plans
        Fits the codecs.
    kind : str
        ``"k"`` or ``"v"``, for `plans`.
    block_tokens : int
        Tokens of a block.
    reserve_tokens : int
        Tokens for which memory is taken at once when the first are packed.

    Attributes
    ----------
    length : int
        Tokens of a sequence, a multiple of `block_tokens`.
    segments : list of Segment
        What holds them, oldest first. The last one may be empty: its first block is in flight.
    revision : Revision
        Replaced whenever they change.
    ready : torch.cuda.Event or None
        Passed when the metadata is written, once `mark_ready` was called; None on the CPU.
    moved_to_host_bytes : int
        Bytes of words that have been moved to host memory.
    """

    def __init__(
        self, words: Words, plans: Plans, kind: str, *, block_tokens: int, reserve_tokens: int
    ) -> None:
        self.words = words
        self.block_tokens = block_tokens
        self._link = words.link
        self._fitting = Fitting(plans, kind)
        self._reserve_tokens = reserve_tokens
        self.moved_to_host_bytes = 0
        self._make_marks()
        self._clear()

    def _clear(self) -> None:
        self.segments: list[Segment] = []
        self.length = 0
        self.rows: TokenRows | None = None
        self._in_flight: InFlightBlocks | None = None
        self._fitting.reset()

    def _make_marks(self) -> None:
        self.revision = Revision()
        on_gpu = self._link.device.type == "cuda"
        self.ready = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._changed = True

    @property
    def refits(self) -> int:
        """How often a codec has been fitted again."""
        return self._fitting.refits

    @property
    def tokens_per_row(self) -> int:
        """Consecutive tokens of one head that make a row; 1 before there are any."""
        return 1 if self.rows is None else self.rows.tokens_per_row

    @property
    def mostly_dropped(self) -> bool:
        """Whether half or more of what was packed is of sequences that are not there any more."""
        there = sum(segment.raw_bytes for segment in self.segments)
        return self.length > 0 and 2 * sum(e.decoded_bytes for e in self.segments) <= there

    def decode(self) -> list[torch.Tensor]:
        """Return the tokens of each segment, decoded on the current stream."""
        if not self.length:
            return []
        words = self.words.fetch()
        found = []
        for segment in self.segments:
            out = torch.empty(segment.decoded_bytes, dtype=torch.uint8, device=self._link.device)
            segment.decoding(words, segment.ids(), out, self._link.sm_budget)()
            found.append(segment.tokens_in(out))
        return found

    def stats(self) -> dict[str, int | float]:
        """Return bytes and counts, as `PackedHistory.stats` without the tail."""
        raw = sum(segment.raw_bytes for segment in self.segments)
        packed = 4 * self.words.n_words + sum(segment.metadata_bytes for segment in self.segments)
        metadata = sum(segment.device_bytes for segment in self.segments)
        in_flight = 0 if self._in_flight is None else self._in_flight.nbytes
        on_host, words = self.words.on_host, self.words.nbytes
        return {
            "raw_bytes": sum(segment.decoded_bytes for segment in self.segments),
            "packed_raw_bytes": raw,
            "packed_bytes": packed,
            "packed_ratio": raw / packed if raw else 1.0,
            "kept_raw_bytes": sum(
                segment.raw_bytes for segment in self.segments if segment.kernels is None
            ),
            "host_bytes": words if on_host else 0,
            "device_bytes": metadata + in_flight + (0 if on_host else words),
            "moved_to_host_bytes": self.moved_to_host_bytes,
            "refits": self.refits,
        }

    def mark_ready(self) -> None:
        """Record `ready` on the current stream, behind the writes of the metadata."""
        if self._changed and self.ready is not None:
            self.ready.record(torch.cuda.current_stream(self._link.device))
        self._changed = False

    # Packing

    def start(self, rows: TokenRows | None) -> None:
        """Prepare for tokens of these rows; there are none yet, and none of the tail is kept.

        They may be of another kind than the tokens that a codec was fitted to.
        """
        self._in_flight = None
        self._fitting.forget_sample()
        self.segments = []
        self.rows = rows

    def least_blocks(self) -> int:
        """Return the blocks that are packed at a time at the least.

        Raw rows have no room ahead: memory grows by an eighth at a time.
        """
        if self._in_flight is None and self.segments and self.segments[-1].kernels is None:
            return max(1, ceil_div(self.segments[-1].n_blocks, GROWTH))
        return 1

    def begin(self, tail: torch.Tensor, due: int, *, wait: bool) -> bool:
        """Begin to pack the first of the blocks that are due, as many as take PIECE_BYTES.

        Parameters
        ----------
        tail : torch.Tensor
            ``[B, H, t, D]`` on the device, the tokens behind the packed ones.
        due : int
            Blocks of it that have left the window.
        wait : bool
            Whether to wait for a sample of tokens that is copied to the host.

        Returns
        -------
        bool
            False when a block is in flight already, nothing can be packed of these tokens, or the
            sample is not there yet.
        """
        rows = self.rows
        if self._in_flight is not None or rows is None or not rows.token_bytes:
            return False
        batch = tail.shape[0]
        if not batch * tail.shape[1]:
            return False
        if (not self.segments or self._fitting.wanted) and not self._begin_segment(
            rows, tail, wait
        ):
            return False
        block_bytes = batch * rows.heads * rows.head_rows * rows.row_bytes
        n_blocks = min(due, max(1, PIECE_BYTES // block_bytes))
        tokens = tail[:, :, : n_blocks * self.block_tokens]
        index = torch.arange(batch, dtype=torch.int32, device=self._link.device)
        self._in_flight = InFlightBlocks(
            rows, self.segments[-1], tokens, n_blocks, Sequences(batch, index)
        )
        return True

    def _begin_segment(self, rows: TokenRows, tail: torch.Tensor, wait: bool) -> bool:
        """Begin a segment if the next blocks need another codec.

        Returns False while the sample of tokens is copied to the host.
        """
        # With the window: a block of few heads is too small a sample.
        whole = tail.shape[2] // self.block_tokens * self.block_tokens
        last = self.segments[-1] if self.segments else None
        choice = self._fitting.choose(rows, tail[:, :, :whole], last, wait)
        if choice is None:
            return False
        if choice.begins_segment:
            first, batch = self.words.n_words, tail.shape[0]
            self.segments.append(Segment(rows, choice.codec, self._link.device, first, batch))
        return True

    def retire(self, tail: torch.Tensor, *, wait: bool) -> torch.Tensor:
        """Move the in-flight block to the word store, if its size is known.

        Parameters
        ----------
        tail : torch.Tensor
            ``[B, H, t, D]``, whose first tokens are those of the block.
        wait : bool
            Whether to wait for the size.

        Returns
        -------
        torch.Tensor
            The tail without the tokens of the block, in memory of its own; `tail` when there is
            nothing to move yet.

        Raises
        ------
        BitslabError
            When host memory runs out; then, as after any error, nothing has changed.
        """
        in_flight = self._in_flight
        if in_flight is None or not in_flight.known(wait):
            return tail
        segment, at = self.segments[-1], self.words.n_words
        n_words, max_words = in_flight.sizes()
        needed = n_words * self._reserve_tokens // in_flight.tokens
        if not at:
            self.words.reserve(needed)
        tokens = self.length + in_flight.tokens
        left = tail[:, :, in_flight.tokens :].clone(memory_format=torch.contiguous_format)
        most = self._most_words(segment, in_flight)
        packed = in_flight.packed.words[:n_words]
        self.words.append(packed, made=in_flight.made, tokens=tokens, most=most)
        sizes = (n_words, max_words)
        try:
            segment.commit(in_flight.packed, sizes, in_flight.n_blocks, in_flight.sequences, at)
        except Exception:
            self.words.truncate(at)
            raise
        self._link.keep(*segment.tensors())
        self._in_flight = None
        self.moved_to_host_bytes += 4 * n_words if self.words.on_host else 0
        self.length = tokens
        self._change()
        self._fitting.watch(segment, n_words / in_flight.packed.lengths.shape[0])
        return left

    def _most_words(self, segment: Segment, in_flight: InFlightBlocks) -> int:
        """Return the words for which memory may be taken: with metadata no more than raw tokens."""
        raw = sum(e.raw_bytes for e in self.segments)
        raw += (
            in_flight.sequences.packed
            * segment.rows.heads
            * segment.rows.token_bytes
            * in_flight.tokens
        )
        metadata = sum(e.device_bytes for e in self.segments)
        metadata += segment.metadata_bytes_of(in_flight.packed.lengths.shape[0])
        return max(0, raw - metadata) // 4

    def forget_in_flight(self, tokens: int) -> None:
        """Drop the in-flight block unless all of it is among the first `tokens` of the tail."""
        if self._in_flight is not None and self._in_flight.tokens > tokens:
            self._in_flight = None

    # Changes

    def prepare_crop(self, length: int) -> Commit:
        """Return a commit that keeps the first tokens, fewer than there are; whole blocks.

        On a GPU this waits once.
        """
        blocks, kept, n_segments = length // self.block_tokens, 0, 0
        for segment in self.segments:
            if kept + segment.n_blocks > blocks:
                break
            kept += segment.n_blocks
            n_segments += 1
        end = self.segments[n_segments].words_end(blocks - kept)
        return partial(self._cut, length, n_segments, blocks - kept, end)

    def _cut(self, length: int, n_segments: int, n_blocks: int, words_end: int) -> None:
        """Keep some tokens: segments, and blocks of the next."""
        self._in_flight = None
        self._link.quiesce()
        self.words.truncate(words_end)
        if n_blocks:
            segment = self.segments[n_segments]
            segment.truncate(n_blocks)
            self._link.keep(*segment.tensors())
        del self.segments[n_segments + (1 if n_blocks else 0) :]
        self.length = length
        self._fitting.forget_blocks()
        self._change()

    def prepare_take(self, take: Take) -> Commit:
        """Return a commit that replaces the sequences, of an in-flight block too."""
        origins = [segment.taken(take) for segment in self.segments]
        in_flight = self._in_flight
        index = None if in_flight is None else take(in_flight.sequences.index, 0)
        return partial(self._put, origins, index)

    def _put(self, origins: list[torch.Tensor], index: torch.Tensor | None) -> None:
        for segment, origin in zip(self.segments, origins, strict=True):
            segment.set_origin(origin)
            self._link.keep(*segment.tensors())
        if self._in_flight is not None and index is not None:
            self._in_flight.sequences.index, self._in_flight.sequences.plain = index, False
        if self.segments:
            self._change()

    def reset(self) -> None:
        """Remove all tokens and codecs."""
        self._link.quiesce()
        self._clear()
        self.words.truncate(0)
        self._change()

    def _change(self) -> None:
        self.revision = Revision()
        self._changed = True
        for segment in self.segments:
            segment.forget_tables()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out in-flight blocks: their tokens are in the tail."""
        state = {**self.__dict__, "_in_flight": None}
        for name in ("revision", "ready", "_changed"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_marks()
        for segment in self.segments:
            self._link.keep(*segment.tensors())
