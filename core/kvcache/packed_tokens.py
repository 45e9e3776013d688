"""PackedTokens: the packed part of a history, from its first token to the tail."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch

from ..engine.kernels.format import ceil_div
from .arena import GROWTH
from .fitting import Choice, Fitting
from .in_flight import InFlightBlocks
from .model_codecs import FirstCodec
from .packing import Plans, TokenRows
from .segment import Segment, Sequences
from .selection import Take
from .words import Words

#: Makes a prepared change; it cannot fail.
Commit = Callable[[], None]
#: Tokens are packed in pieces of about this many bytes, to bound the memory that it takes.
PIECE_BYTES = 64 << 20


def _without_first(tail: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return a tail without its first tokens, in memory of its own unless much is left.

    Of a long prompt one piece follows the other: were all that is left copied for each, that would
    be work by the square of its length. As a view it keeps no more than twice its own memory.
    """
    left = tail[:, :, tokens:]
    if left.nbytes > max(PIECE_BYTES, tail.untyped_storage().nbytes() // 2):
        return left
    return left.clone(memory_format=torch.contiguous_format)


class Revision:
    """Identity of the packed tokens of one history between two changes.

    Caches of what is derived from them use it as a weak key, so that a change drops their entries.
    """


class PackedTokens:
    """The packed tokens of a history: its segments and their words.

    Blocks are packed from the first tokens of the history's tail (`begin`) and are in flight until
    their size is known on the host; then their words are moved to the store and their tokens leave
    the tail (`retire`). Nothing else is kept of the tail here.

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
    tile_tokens : int, optional
        Tokens of a row, where rows are tiles; see `TokenRows`.
    reserve_tokens : int
        Tokens for which memory is taken at once when the first are packed.
    kept : FirstCodec, optional
        What knows a first codec without a sample; see `Fitting`.

    Attributes
    ----------
    length : int
        Tokens of a sequence; a multiple of `block_tokens` unless a lossy segment was cut.
    segments : list of Segment
        What holds them, oldest first. The last one may be empty: its first block is in flight.
    revision : Revision
        Replaced whenever they change.
    in_flight : list of InFlightBlocks
        Blocks whose size is not known on the host yet, oldest first.
    ready : torch.cuda.Event or None
        Passed when the metadata is written, once `mark_ready` was called; None on the CPU.
    moved_to_host_bytes : int
        Bytes of words that have been moved to host memory.
    """

    def __init__(
        self,
        words: Words,
        plans: Plans,
        kind: str,
        *,
        block_tokens: int,
        reserve_tokens: int,
        tile_tokens: int | None = None,
        kept: FirstCodec | None = None,
    ) -> None:
        self.words = words
        self.block_tokens = block_tokens
        self._tile_tokens = tile_tokens
        self._link = words.link
        self._fitting = Fitting(plans, kind, kept)
        self._reserve_tokens = reserve_tokens
        self.moved_to_host_bytes = 0
        self._make_marks()
        self._clear()

    def _clear(self) -> None:
        self.segments: list[Segment] = []
        self.length = 0
        self.rows: TokenRows | None = None
        self.in_flight: list[InFlightBlocks] = []
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
    def samples(self) -> bool:
        """Whether a sample of tokens is on its way to the host."""
        return self._fitting.samples

    @property
    def tokens_per_row(self) -> int:
        """Consecutive tokens of one head that make a row; 1 before there are any."""
        return 1 if self.rows is None else self.rows.tokens_per_row

    @property
    def mostly_dropped(self) -> bool:
        """Whether half or more of what was packed is of sequences that are not there any more."""
        there = sum(segment.raw_bytes for segment in self.segments)
        return self.length > 0 and 2 * sum(e.decoded_bytes for e in self.segments) <= there

    @cached_property  # until the next change; it is asked for with each token
    def affordable_tokens(self) -> int:
        """Tokens for which an eighth of what packing saves has room; a block at the most."""
        if not self.segments or self.rows is None:
            return 0
        raw = sum(segment.token_bytes - segment.device_bytes for segment in self.segments)
        token_bytes = self.segments[-1].batch * self.rows.heads * self.rows.token_bytes
        saved = (raw - self.words.nbytes) // (GROWTH * max(1, token_bytes))
        return max(0, min(saved, self.block_tokens))

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
        in_flight = sum(blocks.nbytes for blocks in self.in_flight)
        on_host, words = self.words.on_host, self.words.nbytes
        return {
            "raw_bytes": sum(segment.token_bytes for segment in self.segments),
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

    def start(self, tokens: torch.Tensor) -> None:
        """Prepare for tokens like ``[B, H, any, D]``; there are none yet, and no tail is kept.

        They may be of another kind than the tokens that a codec was fitted to.
        """
        self.in_flight = []
        self._fitting.forget_sample()
        self.segments = []
        self.rows = TokenRows(
            tokens.shape[1], tokens.shape[3], tokens.dtype, self.block_tokens, self._tile_tokens
        )

    def least_blocks(self) -> int:
        """Return the blocks that are packed at a time at the least.

        Raw rows have no room ahead: memory grows by an eighth at a time.
        """
        if not self.in_flight and self.segments and self.segments[-1].kernels is None:
            return max(1, ceil_div(self.segments[-1].n_blocks, GROWTH))
        return 1

    def begin(self, tail: torch.Tensor, due: int, *, wait: bool) -> bool:
        """Begin to pack the first blocks that are not in flight, as many as take PIECE_BYTES.

        Parameters
        ----------
        tail : torch.Tensor
            ``[B, H, t, D]`` on the device, the tokens behind the packed ones.
        due : int
            Blocks of it that have left the window, those in flight among them.
        wait : bool
            Whether to wait for a sample of tokens that is copied to the host.

        Returns
        -------
        bool
            False when all of them are in flight already, nothing can be packed of these tokens, the
            sample is not there yet, or blocks in flight are the last ones of a codec.
        """
        rows, first = self.rows, sum(blocks.n_blocks for blocks in self.in_flight)
        if first >= due or rows is None or not rows.token_bytes:
            return False
        batch = tail.shape[0]
        if not batch * tail.shape[1]:
            return False
        if not self.segments or self._fitting.wanted or self.segments[-1].cut_tokens:
            if self.in_flight or not self._begin_segment(rows, tail, due, wait):
                return False
        block_bytes = batch * rows.heads * rows.head_rows * rows.row_bytes
        n_blocks = min(due - first, max(1, PIECE_BYTES // block_bytes))
        begin, end = (n * self.block_tokens for n in (first, first + n_blocks))
        index = torch.arange(batch, dtype=torch.int32, device=self._link.device)
        self.in_flight.append(
            InFlightBlocks(
                rows, self.segments[-1], tail[:, :, begin:end], n_blocks, Sequences(batch, index)
            )
        )
        return True

    def _begin_segment(self, rows: TokenRows, tail: torch.Tensor, due: int, wait: bool) -> bool:
        """Begin a segment if the next blocks need another codec.

        Returns False while the sample of tokens is copied to the host.
        """
        last = self.segments[-1] if self.segments else None
        first, batch = self.words.n_words, tail.shape[0]
        choice = Choice(begins_segment=False)
        if last is None or self._fitting.wanted:
            # With the window: a block of few heads is too small a sample.
            whole = tail.shape[2] // self.block_tokens * self.block_tokens
            found = self._fitting.choose(rows, tail[:, :, :whole], last, wait)
            if found is None:
                return False
            choice = found
        if choice.begins_segment:
            segment = Segment(rows, choice.codec, self._link.device, first, batch)
            if segment.kernels is not None and choice.kept:
                segment.expected_words = choice.share * segment.kernels.row_words
            self.segments.append(segment)
            if last is None and due > 1:
                raw = batch * rows.heads * rows.token_bytes * self.block_tokens * due // 4
                self.words.expect(int(choice.share * raw), raw, tokens=due * self.block_tokens)
        elif last is not None and last.cut_tokens:
            segment = Segment(rows, last.codec, self._link.device, first, batch)
            segment.expected_words = last.expected_words
            self.segments.append(segment)
        return True

    def retire(self, tail: torch.Tensor, *, wait: bool) -> torch.Tensor:
        """Move the in-flight blocks whose size is known to the word store.

        Blocks whose kept codec does not suit them are dropped, and begin anew with a sample.

        Parameters
        ----------
        tail : torch.Tensor
            ``[B, H, t, D]``, whose first tokens are those of the blocks.
        wait : bool
            Whether to wait for the sizes.

        Returns
        -------
        torch.Tensor
            The tail without the tokens of these blocks, in memory of its own, or behind them where
            much is left; `tail` when there is nothing to move yet.

        Raises
        ------
        BitslabError
            When host memory runs out; then, as after any error, nothing has changed.
        """
        known = 0
        while known < len(self.in_flight) and self.in_flight[known].known(wait):
            known += 1
        if not known or not self._accept_first():
            return tail
        tokens = sum(blocks.tokens for blocks in self.in_flight[:known])
        left = _without_first(tail, tokens)
        moved = 0
        for _ in range(known):
            blocks = self.in_flight[0]
            try:
                self._move(blocks)
            except Exception:
                if not moved:
                    raise
                return tail[:, :, moved:]  # the next call raises it again
            moved += blocks.tokens
        return left

    def _accept_first(self) -> bool:
        """Return whether blocks in flight may be moved; drop them where their codec is wrong."""
        segment, blocks = self.segments[-1], self.in_flight[0]
        if len(self.segments) > 1 or segment.n_blocks:
            return True
        n_rows, n_words = blocks.packed.lengths.shape[0], blocks.sizes()[0]
        if self._fitting.accepts_first(segment.rows, segment.codec, n_rows, n_words):
            return True
        self.in_flight, self.segments = [], []
        return False

    def _move(self, in_flight: InFlightBlocks) -> None:
        """Move blocks, the oldest, to the word store; an error or interrupt moves all or none."""
        segment, at = self.segments[-1], self.words.n_words
        packed = in_flight.packed
        self._keep_for_turn(packed.words, packed.lengths, packed.bases)
        n_words, max_words = in_flight.sizes()
        needed = n_words * self._reserve_tokens // in_flight.tokens
        if not at:
            self.words.reserve(needed)
        tokens = self.length + in_flight.tokens
        most = self._most_words(segment, in_flight)
        sizes = (n_words, max_words)
        try:
            self.words.append(packed.words[:n_words], made=in_flight.made, tokens=tokens, most=most)
            self._change()  # before it changes: nothing old may be taken for what is there then
            segment.commit(packed, sizes, in_flight.n_blocks, in_flight.sequences, at)
            self.length = tokens
            del self.in_flight[0]
        except BaseException:
            if self.length != tokens:
                self.words.truncate(at)
            raise
        self._link.keep(*segment.tensors())
        self.moved_to_host_bytes += 4 * n_words if self.words.on_host else 0
        self._fitting.watch(segment, n_words / in_flight.packed.lengths.shape[0], tokens)

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
        """Drop in-flight blocks that are not wholly among the first `tokens` of the tail."""
        while self.in_flight and sum(blocks.tokens for blocks in self.in_flight) > tokens:
            self.in_flight.pop()

    # Changes

    def croppable(self, length: int) -> int:
        """Return how many of the first `length` tokens, fewer than there are, can remain packed.

        Whole blocks, but any number of tokens that a lossy codec has packed.
        """
        n_segments, kept = self._whole_segments(length)
        rest = length - kept
        return length if self.segments[n_segments].lossy else length - rest % self.block_tokens

    def prepare_crop(self, length: int) -> Commit:
        """Return a commit that keeps the first tokens, fewer than there are and `croppable`.

        On a GPU this waits once.
        """
        self._keep_for_turn()
        n_segments, kept = self._whole_segments(length)
        end = self._words_end(n_segments, ceil_div(length - kept, self.block_tokens))
        return partial(self._cut, length, n_segments, length - kept, end)

    def _whole_segments(self, length: int) -> tuple[int, int]:
        """Return how many segments lie within the first `length` tokens, and their tokens."""
        kept = 0
        for n_segments, segment in enumerate(self.segments):
            if kept + segment.tokens > length:
                return n_segments, kept
            kept += segment.tokens
        return len(self.segments), kept

    def _words_end(self, n_segments: int, n_blocks: int) -> int:
        """Return the word at which the first blocks of the segment behind some others end."""
        segment = self.segments[n_segments]
        if n_blocks < segment.n_blocks:
            return segment.words_end(n_blocks)
        behind = self.segments[n_segments + 1 :]
        return behind[0].first_word if behind else self.words.n_words

    def _cut(self, length: int, n_segments: int, tokens: int, words_end: int) -> None:
        """Keep some tokens: segments, and tokens of the next."""
        self.in_flight = []
        self._link.quiesce()
        self.words.truncate(words_end)
        if tokens:
            segment = self.segments[n_segments]
            segment.truncate(tokens)
            self._link.keep(*segment.tensors())
        del self.segments[n_segments + (1 if tokens else 0) :]
        self.length = length
        self._fitting.forget_blocks(length)
        self._change()

    def prepare_take(self, take: Take) -> Commit:
        """Return a commit that replaces the sequences, of in-flight blocks too."""
        self._keep_for_turn(*(blocks.sequences.index for blocks in self.in_flight))
        origins = [segment.taken(take) for segment in self.segments]
        indices = [take(blocks.sequences.index, 0) for blocks in self.in_flight]
        return partial(self._put, origins, indices)

    def _put(self, origins: list[torch.Tensor], indices: list[torch.Tensor]) -> None:
        for segment, origin in zip(self.segments, origins, strict=True):
            segment.set_origin(origin)
            self._link.keep(*segment.tensors())
        for blocks, index in zip(self.in_flight, indices, strict=True):
            blocks.sequences.index, blocks.sequences.plain = index, False
        if self.segments:
            self._change()

    @property
    def lossy(self) -> bool:
        """Whether tokens are there that cannot be packed again: decoded ones are others."""
        return any(segment.lossy for segment in self.segments)

    def drop_others(self) -> None:
        """Copy the rows of the sequences that are there, as they are packed, and drop the others.

        On a GPU this waits for the device.
        """
        self._keep_for_turn()
        words = self.words.fetch()
        found = [segment.rows_there(words) for segment in self.segments]
        del words
        self._link.quiesce()  # what is fetched now reads the places that are written to
        self.words.truncate(0)
        for segment, (part, rows) in zip(self.segments, found, strict=True):
            at = self.words.n_words
            self.words.append(part, made=self._made(), tokens=self.length)
            segment.replace_rows(rows, at)
            self._link.keep(*segment.tensors())
            self.moved_to_host_bytes += 4 * part.shape[0] if self.words.on_host else 0
        self.words.trim()
        self._change()

    def prepare_move(self, words: Words) -> Commit:
        """Return a commit that keeps the words in another store, which they are copied to now.

        Nothing waits for a GPU. Nothing but the store has changed before the commit is called.

        Parameters
        ----------
        words : Words
            An empty store.

        Raises
        ------
        BitslabError, torch.cuda.OutOfMemoryError
            When there is no memory for them.
        """
        n_words = self.words.n_words
        if n_words:
            there = self.words.fetch()[:n_words]
            # No room ahead: packed words take no more than raw tokens do.
            words.append(there, made=self._made(), tokens=self.length, most=n_words)
        return partial(self._replace_words, words)

    def _replace_words(self, words: Words) -> None:
        before, self.words = self.words, words
        if words.on_host and not before.on_host:
            self.moved_to_host_bytes += 4 * words.n_words
        self._change()
        before.clear()

    def _made(self) -> torch.cuda.Event | None:
        """Return an event behind what was written on the current stream."""
        if self._link.device.type != "cuda":
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self._link.device).record_event()
        return event

    def reset(self) -> None:
        """Remove all tokens and codecs."""
        self._link.quiesce()
        self._clear()
        self.words.truncate(0)
        self._change()

    def _keep_for_turn(self, *others: torch.Tensor) -> None:
        """Keep metadata, and others, from reuse until torch's current stream has read them."""
        if self._link.several_streams:
            metadata = [t for segment in self.segments for t in segment.tensors()]
            self._link.keep_for_turn(*metadata, *others)

    def _change(self) -> None:
        self.revision = Revision()
        self.__dict__.pop("affordable_tokens", None)
        self._changed = True
        for segment in self.segments:
            segment.forget_tables()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out in-flight blocks: their tokens are in the tail."""
        left_out = "in_flight", "revision", "ready", "_changed", "affordable_tokens"
        return {name: x for name, x in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.in_flight = []
        self._make_marks()
        for segment in self.segments:
            self._link.keep(*segment.tensors())
