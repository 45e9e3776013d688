"""PackedHistory: the K or V of one layer, packed by the block, the last tokens unpacked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ..dtypes import dense
from ..errors import ArgumentError, ArgumentTypeError, BitslabError
from .arena import GROWTH
from .fitting import Fitting
from .in_flight import InFlightBlocks
from .index import beam_index, repeat_count, sequence_index
from .packing import Plans, TokenRows
from .segment import Segment, Sequences
from .selection import Take
from .words import DeviceWords, HostWords, Words

#: Makes a prepared change; it cannot fail.
Commit = Callable[[], None]
#: Tokens are packed in pieces of about this many bytes, to bound the memory that it takes.
PIECE_BYTES = 64 << 20


class Revision:
    """Identity of the packed tokens of one history between two changes.

    Caches of what is derived from them use it as a weak key, so that a change drops their entries.
    """


class PackedHistory:
    """The K or V of one layer, lossless.

    The last tokens, at least `window` and fewer than ``window + 2 * block_tokens``, are kept
    unpacked on the device; all before them are packed by the block. Where no codec makes tokens
    smaller they are moved raw, an eighth of what is packed at a time, and the unpacked tail may be
    longer. Blocks are only ever appended: sequences are reordered, repeated and chosen through an
    index, and tokens are removed from the end.

    Words, metadata and the room ahead take no more memory than the raw tokens, but for a few
    hundred bytes, unless `reserve_tokens` asks for more. Memory of tokens that are removed is kept.

    Parameters
    ----------
    words : Words
        An empty store for its packed words, that `HistoryReader.new_words` returns.
    plans : Plans
        Fits its codecs; the histories of all layers share one.
    kind : str
        ``"k"`` or ``"v"``, for `plans` and messages.
    window : int
        Tokens that are kept unpacked, at least.
    block_tokens : int
        Tokens of a block; a power of two up to 4096.
    reserve_tokens : int
        Tokens for which memory is taken at once when the first are packed.
    at_once : bool
        Whether `append` waits for a GPU that packs, so that how many tokens are packed never
        depends on its speed: where only some of the packed tokens are attended to, that would
        change results.

    Attributes
    ----------
    packed_tokens : int
        Tokens of a sequence that are packed.
    tail : torch.Tensor
        ``[B, H, t, D]`` on the device: the tokens behind them.
    revision : Revision
        Replaced whenever the packed tokens change.

    Notes
    -----
    On a GPU nothing waits for the device but: packing more than one block (a prompt), or any
    `at_once`, which waits for the packed size, so that the raw tokens of one layer at a time take
    memory; removing packed tokens; and copies and pickles. Else a single block is packed on the
    device (in flight): its tokens are kept in the tail until its size is known on the host, and a
    later `append` moves it there.

    Gradients do not flow into the past: the tokens are kept detached. One thread at a time.

    Examples
    --------
    >>> import torch
    >>> from bitslab.kvcache import CodecPlans, HistoryReader, PackedHistory
    >>> reader = HistoryReader(torch.device("cpu"), offload=True, sm_budget=None)
    >>> words = reader.new_words()
    >>> history = PackedHistory(words, CodecPlans(), "k", window=32, block_tokens=64)
    >>> tokens = torch.randn(1, 2, 300, 64).bfloat16()
    >>> history.append(tokens)
    >>> history.packed_tokens, torch.equal(history.decode(), tokens)
    (256, True)
    """

    def __init__(
        self,
        words: Words,
        plans: Plans,
        kind: str,
        *,
        window: int,
        block_tokens: int,
        reserve_tokens: int = 0,
        at_once: bool = False,
    ) -> None:
        check_options(window, block_tokens, reserve_tokens)
        given: object = words
        if not isinstance(given, HostWords | DeviceWords) or given.n_words:
            raise ArgumentTypeError(
                "words: expected an empty store, as HistoryReader.new_words() returns, got "
                f"{given!r:.60}"
            )
        self.words = words
        self._link = words.link
        self._fitting = Fitting(plans, kind)
        self._kind = kind
        self._window = window
        self._block_tokens = block_tokens
        self._reserve_tokens = reserve_tokens
        self._at_once = at_once or self.device.type == "cpu"
        self.revision = Revision()
        self._make_event()
        self._clear()
        self.moved_to_host_bytes = 0

    def _clear(self) -> None:
        self.segments: list[Segment] = []
        self.packed_tokens = 0
        self._rows: TokenRows | None = None
        self.tail = torch.empty((0, 0, 0, 0), device=self.device)
        self._in_flight: InFlightBlocks | None = None
        self._fitting.reset()

    def _make_event(self) -> None:
        on_gpu = self.device.type == "cuda"
        self.ready = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._changed = True

    # State

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.packed_tokens + self.tail.shape[2]

    @property
    def device(self) -> torch.device:
        """Where tokens are decoded."""
        return self._link.device

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.tail.shape[0]

    @property
    def refits(self) -> int:
        """How often a codec has been fitted again."""
        return self._fitting.refits

    @property
    def tokens_per_row(self) -> int:
        """Consecutive tokens of one head that make a row; 1 before there are any."""
        return 1 if self._rows is None else self._rows.tokens_per_row

    def decode(self) -> torch.Tensor:
        """Return all tokens, ``[B, H, length, D]`` on the device, contiguous."""
        return torch.cat([*self.decode_packed(), self.tail], dim=-2)

    def decode_packed(self) -> list[torch.Tensor]:
        """Return the packed tokens, decoded on the current stream.

        Returns
        -------
        list of torch.Tensor
            Its segments, oldest first: ``[B, H, tokens, D]`` on the device, contiguous.
        """
        if not self.packed_tokens:
            return []
        words = self.words.fetch()
        found = []
        for segment in self.segments:
            out = torch.empty(segment.decoded_bytes, dtype=torch.uint8, device=self.device)
            segment.decoding(words, segment.ids(), out, self.words.link.sm_budget)()
            found.append(segment.tokens_in(out))
        return found

    def stats(self) -> dict[str, int | float]:
        """Return bytes and counts.

        Returns
        -------
        dict
            ``raw_bytes`` of all tokens unpacked, for each sequence; ``packed_bytes`` (words and all
            metadata in use) of the packed tokens, ``packed_raw_bytes`` that these took before, and
            the ``packed_ratio`` of both (1.0 when there are none); ``kept_raw_bytes`` of
            ``packed_raw_bytes`` kept raw since no codec makes them smaller;
            ``host_bytes`` and ``device_bytes`` of memory for words, metadata, tail and blocks
            in flight, with the room ahead; ``moved_to_host_bytes`` so far (on the CPU: of words
            that would have crossed), ``refits``.
        """
        raw = sum(segment.raw_bytes for segment in self.segments)
        packed = 4 * self.words.n_words + sum(segment.metadata_bytes for segment in self.segments)
        metadata = sum(segment.device_bytes for segment in self.segments)
        in_flight = 0 if self._in_flight is None else self._in_flight.nbytes
        tail = self.tail.untyped_storage().nbytes()
        on_host, words = self.words.on_host, self.words.nbytes
        return {
            "raw_bytes": sum(segment.decoded_bytes for segment in self.segments) + self.tail.nbytes,
            "packed_raw_bytes": raw,
            "packed_bytes": packed,
            "packed_ratio": raw / packed if raw else 1.0,
            "kept_raw_bytes": sum(
                segment.raw_bytes for segment in self.segments if segment.kernels is None
            ),
            "host_bytes": words if on_host else 0,
            "device_bytes": metadata + tail + in_flight + (0 if on_host else words),
            "moved_to_host_bytes": self.moved_to_host_bytes,
            "refits": self.refits,
        }

    # Changes

    def check(self, tokens: torch.Tensor) -> None:
        """Raise for tokens that do not continue those of the history.

        Raises
        ------
        ArgumentError
            For another shape ``[B, H, any, D]``.
        ArgumentTypeError
            For another dtype or device.
        """
        if tokens.dim() != 4:
            raise ArgumentError(
                f"{self._kind}: shape {list(tokens.shape)}, expected [B, H, tokens, D]"
            )
        if tokens.device != self.device:
            raise ArgumentTypeError(
                f"{self._kind}: on {tokens.device}, this cache is on {self.device}"
            )
        if self.length == 0:
            return
        if tokens.dtype != self.tail.dtype:
            raise ArgumentTypeError(
                f"{self._kind}: dtype {tokens.dtype}, the cache holds {self.tail.dtype}; a model "
                "cannot change its dtype while a cache is in use: reset it first"
            )
        batch, heads, _, dim = self.tail.shape
        if (tokens.shape[0], tokens.shape[1], tokens.shape[3]) != (batch, heads, dim):
            raise ArgumentError(
                f"{self._kind}: shape {list(tokens.shape)}, the cache holds "
                f"[{batch}, {heads}, {self.length}, {dim}]: of another batch or another model"
            )

    def append(self, tokens: torch.Tensor, *, checked: bool = False) -> None:
        """Put tokens behind the last ones, and pack what has left the window.

        Parameters
        ----------
        tokens : torch.Tensor
            ``[B, H, n, D]`` on the history's device, of any strides; they are not kept.
        checked : bool
            Whether they have been given to `check`.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            For tokens that do not continue those of the history.
        BitslabError
            When host memory runs out; after this, as after any error, the history is as it was
            before, and usable.
        """
        if not checked:
            self.check(tokens)
        self._retire(wait=False)
        before, new = self.length, tokens.detach()
        if before == 0:
            # These may be of another kind than the tokens that a codec was fitted to.
            self._in_flight = None
            self._fitting.forget_sample()
            self.segments = []
            self._rows = TokenRows(new.shape[1], new.shape[3], new.dtype, self._block_tokens)
        self.tail = torch.cat([self.tail, new], dim=-2) if self.tail.shape[2] else new
        try:
            self._pack()
        except Exception:
            self.crop(before)
            raise
        if self.tail is new:  # the caller's, or a view of something larger
            self.tail = new.clone(memory_format=torch.contiguous_format)

    def crop(self, length: int) -> None:
        """Keep the first tokens of each sequence.

        Removing packed tokens waits for the device, and reads this history once where it cuts a
        block.

        Parameters
        ----------
        length : int
            Tokens to keep.

        Raises
        ------
        ArgumentError
            When there are fewer tokens than that, or `length` is negative.
        """
        self.prepare_crop(length)()

    def prepare_crop(self, length: int) -> Commit:
        """Return a commit that keeps the first tokens, as `crop` does.

        Nothing changes before it is called, and the history must not change until then.
        """
        if not 0 <= length <= self.length:
            raise ArgumentError(f"length: {length}, accepted are 0 to {self.length} tokens")
        if length >= self.packed_tokens:
            tail = self.tail[:, :, : length - self.packed_tokens]
            return partial(self._set_tail, tail)
        begin = length - length % self._block_tokens
        rest = self.tail[:, :, :0]
        if begin < length:
            rest = torch.cat(self.decode_packed(), dim=-2)[:, :, begin:length].clone()
        blocks, kept, n_segments = begin // self._block_tokens, 0, 0
        for segment in self.segments:
            if kept + segment.n_blocks > blocks:
                break
            kept += segment.n_blocks
            n_segments += 1
        end = self.segments[n_segments].words_end(blocks - kept)
        return partial(self._cut, begin, n_segments, blocks - kept, end, rest)

    def reorder(self, index: Any) -> None:
        """Take sequence ``index[b]`` for each b; no packed byte is moved.

        Parameters
        ----------
        index : torch.Tensor or sequence
            Integers ``[any]``. On the GPU of the history they are not read by the host, so that
            bad ones end in a device-side assertion of torch.

        Raises
        ------
        ArgumentError, ArgumentTypeError, IndexRangeError
            For an index that names no sequences; nothing has changed then.
        """
        found = beam_index(index, self.batch, self.device, "index")
        self.prepare_take(lambda t, dim: _indexed(t, dim, found))()

    def repeat(self, repeats: int) -> None:
        """Put each sequence `repeats` times in a row; no packed byte is moved."""
        count = repeat_count(repeats)
        self.prepare_take(lambda t, dim: t.repeat_interleave(count, dim=dim))()

    def select(self, index: Any) -> None:
        """Keep the sequences of an index.

        Parameters
        ----------
        index : torch.Tensor, sequence or slice
            Integers ``[any]``, negative ones counted from the end, or a mask. One on a GPU is
            waited for.

        Raises
        ------
        ArgumentError, ArgumentTypeError, IndexRangeError
            For an index that names no sequences; nothing has changed then.

        Notes
        -----
        When less than half of the packed sequences are left, they are packed again, so that the
        others are not fetched; this reads the history once and waits for the device.
        """
        found = sequence_index(index, self.batch, "index").to(self.device)
        self.prepare_take(lambda t, dim: _indexed(t, dim, found))()
        self.pack_anew()

    def prepare_take(self, take: Take) -> Commit:
        """Return a commit that replaces the sequences.

        Parameters
        ----------
        take : callable
            Takes a tensor and its dimension of sequences, and returns it with the others.
        """
        tail = take(self.tail, 0)
        origins = [segment.taken(take) for segment in self.segments]
        in_flight = self._in_flight
        index = None if in_flight is None else take(in_flight.sequences.index, 0)
        return partial(self._put, tail, origins, index)

    def pack_anew(self) -> None:
        """Pack the remaining sequences again if they are less than half of the packed ones.

        This only saves memory: where memory for it is lacking, nothing changes, or tokens are left
        unpacked until the next `append`.
        """
        there = sum(segment.raw_bytes for segment in self.segments)
        if (
            not self.packed_tokens
            or 2 * sum(segment.decoded_bytes for segment in self.segments) > there
        ):
            return
        with suppress(MemoryError, RuntimeError, BitslabError):
            rows, tokens = self._rows, self.decode()
            self.reset()
            self._rows, self.tail = rows, tokens
            self._pack()

    def reset(self) -> None:
        """Remove all tokens and codecs; host memory that was taken is reused."""
        self._link.quiesce()
        self._clear()
        self.words.truncate(0)
        self._change()

    # For readers

    def mark_ready(self) -> None:
        """Record `ready` on the current stream, behind the writes of the packed metadata."""
        if self._changed and self.ready is not None:
            self.ready.record(torch.cuda.current_stream(self.device))
        self._changed = False

    # Private

    def _change(self) -> None:
        self.revision = Revision()
        self._changed = True
        for segment in self.segments:
            segment.forget_tables()

    def _set_tail(self, tail: torch.Tensor) -> None:
        self.tail = tail
        if self._in_flight is not None and self._in_flight.tokens > tail.shape[2]:
            self._in_flight = None

    def _cut(
        self, begin: int, n_segments: int, n_blocks: int, words_end: int, rest: torch.Tensor
    ) -> None:
        """Keep `begin` packed tokens: segments, and blocks of the next; `rest` is the tail."""
        self._in_flight = None
        self._link.quiesce()
        self.words.truncate(words_end)
        if n_blocks:
            segment = self.segments[n_segments]
            segment.truncate(n_blocks)
            self._link.keep(*segment.tensors())
        del self.segments[n_segments + (1 if n_blocks else 0) :]
        self.packed_tokens = begin
        self._set_tail(rest)
        self._fitting.forget_blocks()
        self._change()

    def _put(
        self, tail: torch.Tensor, origins: list[torch.Tensor], index: torch.Tensor | None
    ) -> None:
        self.tail = tail
        for segment, origin in zip(self.segments, origins, strict=True):
            segment.set_origin(origin)
            self._link.keep(*segment.tensors())
        if self._in_flight is not None and index is not None:
            self._in_flight.sequences.index, self._in_flight.sequences.plain = index, False
        if self.segments:
            self._change()

    def _pack(self) -> None:
        """Pack the blocks that have left the window, as far as that needs no waiting."""
        rows = self._rows
        if rows is None or not rows.token_bytes or not self.tail.shape[0] * self.tail.shape[1]:
            return
        if self._in_flight is None and self.segments and self.segments[-1].kernels is None:
            # Raw rows have no room ahead: memory grows by an eighth at a time.
            due = (self.tail.shape[2] - self._window) // self._block_tokens
            if due * GROWTH < self.segments[-1].n_blocks:
                return
        while self._in_flight is None:
            due = (self.tail.shape[2] - self._window) // self._block_tokens
            if due < 1:
                return
            wait = due > 1 or self._at_once
            if (not self.segments or self._fitting.wanted) and not self._begin_segment(rows, wait):
                return
            batch = self.tail.shape[0]
            block_bytes = batch * rows.heads * rows.head_rows * rows.row_bytes
            n_blocks = min(due, max(1, PIECE_BYTES // block_bytes))
            tokens = self.tail[:, :, : n_blocks * self._block_tokens]
            index = torch.arange(batch, dtype=torch.int32, device=self.device)
            self._in_flight = InFlightBlocks(
                rows, self.segments[-1], tokens, n_blocks, Sequences(batch, index)
            )
            self._retire(wait=wait)

    def _retire(self, *, wait: bool) -> None:
        """Move the in-flight block to the word store, if its size is known."""
        in_flight = self._in_flight
        if in_flight is None or not in_flight.known(wait):
            return
        segment, at = self.segments[-1], self.words.n_words
        n_words, max_words = in_flight.sizes()
        needed = n_words * self._reserve_tokens // in_flight.tokens
        if not at:
            self.words.reserve(needed)
        tokens = self.packed_tokens + in_flight.tokens
        tail = self.tail[:, :, in_flight.tokens :].clone(memory_format=torch.contiguous_format)
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
        self.packed_tokens += in_flight.tokens
        self.tail = tail
        self._change()
        self._fitting.watch(segment, n_words / in_flight.packed.lengths.shape[0])

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

    def _begin_segment(self, rows: TokenRows, wait: bool) -> bool:
        """Begin a segment if the next blocks need another codec.

        Returns False while the sample of tokens is copied to the host.
        """
        # With the window: a block of few heads is too small a sample.
        whole = self.tail.shape[2] // self._block_tokens * self._block_tokens
        last = self.segments[-1] if self.segments else None
        choice = self._fitting.choose(rows, self.tail[:, :, :whole], last, wait)
        if choice is None:
            return False
        if choice.begins_segment:
            first, batch = self.words.n_words, self.tail.shape[0]
            self.segments.append(Segment(rows, choice.codec, self.device, first, batch))
        return True

    def __getstate__(self) -> dict[str, Any]:
        """Leave out in-flight blocks: their tokens are in the tail."""
        state = dict(self.__dict__)
        for name in ("revision", "ready", "_changed"):
            del state[name]
        # As bytes: torch 2.13 cannot unpickle tensors of 8-bit floats.
        tail = (dense(self.tail).view(torch.uint8), self.tail.dtype)
        return {**state, "tail": tail, "_in_flight": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        tail, dtype = state["tail"]
        self.tail = tail.view(dtype)
        self.revision = Revision()
        self._make_event()
        for segment in self.segments:
            self._link.keep(*segment.tensors())


def check_options(window: int, block_tokens: int, reserve_tokens: int) -> None:
    """Raise for options that a history does not accept."""
    for name, value in (
        ("window", window),
        ("block_tokens", block_tokens),
        ("reserve_tokens", reserve_tokens),
    ):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ArgumentTypeError(f"{name}: expected an int, got {value!r:.60}")
        if value < 0:
            raise ArgumentError(f"{name}: {value}, accepted are numbers from 0")
    if not 1 <= block_tokens <= 4096 or block_tokens & (block_tokens - 1):
        raise ArgumentError(
            f"block_tokens: {block_tokens}, accepted are powers of two from 1 to 4096"
        )


def _indexed(t: torch.Tensor, dim: int, index: Any) -> torch.Tensor:
    """Index dimension 0 or 1 of a tensor."""
    if t.is_floating_point() and t.itemsize == 1:
        # As bytes: torch 2.8 cannot index 8-bit floats on the CPU.
        return _indexed(t.view(torch.uint8), dim, index).view(t.dtype)
    return t[index] if dim == 0 else t[:, index]
