"""The K or V of one layer: packed blocks, and the last tokens as they came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..codecs.base import rows_as_bytes
from ..errors import ArgumentError, ArgumentTypeError
from .era import Era, Sequences
from .packing import LEAST_GAIN, CodecPlans, Packed, TokenRows, draw_rows, pack_rows
from .reader import HistoryReader

#: Tokens are packed in pieces of about this many bytes, to bound the memory that it takes.
PIECE_BYTES = 64 << 20
#: A codec is fitted again when the last DRIFT_BLOCKS blocks took this share of the raw bytes more
#: than the first ones of its era did, and the new one is kept when it saves REFIT_GAIN of them.
DRIFT_BLOCKS = 4
DRIFT = 0.05
REFIT_GAIN = 0.02


class PackedHistory:
    """The K or V of one layer, lossless.

    The last tokens, at least `window` and fewer than ``window + 2 * block_tokens``, lie as they
    came on the device; all before them are packed by the block. Blocks are only ever appended:
    sequences are reordered, repeated and chosen through an index, and tokens are removed from the
    end.

    Parameters
    ----------
    reader : HistoryReader
        What brings it to its device; the histories of all layers on that device share one.
    plans : CodecPlans
        What fits its codecs; the histories of all layers share one.
    kind : str
        ``"k"`` or ``"v"``, for `plans` and messages.
    window : int
        Tokens that stay unpacked.
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
    version : int
        Changes whenever what the packed tokens decode to does.
    refits : int
        How often a codec has been fitted again.

    Notes
    -----
    On a GPU nothing waits for the device but: packing more than one block (a prompt), or any
    `at_once`, which waits for the packed size, so that the raw tokens of one layer at a time take
    memory; removing packed tokens; and copies and pickles. Else a single block is packed on the
    device, stays unpacked until its size is known on the host, and is moved there by a later
    `append`.

    Gradients do not flow into the past: the tokens are kept detached. One thread at a time.

    Examples
    --------
    >>> import torch
    >>> from bitslab.kvcache import CodecPlans, HistoryReader, PackedHistory
    >>> reader = HistoryReader(torch.device("cpu"), offload=True, sm_budget=None)
    >>> history = PackedHistory(reader, CodecPlans(), "k", window=32, block_tokens=64)
    >>> tokens = torch.randn(1, 2, 300, 64).bfloat16()
    >>> history.append(tokens)
    >>> history.packed_tokens, torch.equal(history.decode(), tokens)
    (256, True)
    """

    def __init__(
        self,
        reader: HistoryReader,
        plans: CodecPlans,
        kind: str,
        *,
        window: int,
        block_tokens: int,
        reserve_tokens: int = 0,
        at_once: bool = False,
    ) -> None:
        check_options(window, block_tokens, reserve_tokens)
        self._reader = reader
        self._plans = plans
        self._kind = kind
        self._window = window
        self._block_tokens = block_tokens
        self._reserve_tokens = reserve_tokens
        self._at_once = at_once or reader.device.type == "cpu"
        self.identity = object()
        self._make_event()
        self._clear()
        self.refits = 0
        self.moved_to_host_bytes = 0
        self.version = 0

    def _clear(self) -> None:
        self.eras: list[Era] = []
        self.words = self._reader.new_words(0)
        self.packed_tokens = 0
        self._rows: TokenRows | None = None
        self.tail = torch.empty((0, 0, 0, 0), device=self._reader.device)
        self._pending: _Pending | None = None
        self._sample: _Arrival | None = None
        self._recent: list[float] = []  # words of a row, of the last blocks of the era
        self._refit_wanted = False

    def _make_event(self) -> None:
        on_gpu = self._reader.device.type == "cuda"
        self.ready = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._changed = True

    # What it holds

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.packed_tokens + self.tail.shape[2]

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.tail.shape[0]

    @property
    def tokens_per_row(self) -> int:
        """Consecutive tokens of one head that make a row; 1 before there are any."""
        return 1 if self._rows is None else self._rows.tokens_per_row

    def decode(self) -> torch.Tensor:
        """Return all tokens, ``[B, H, length, D]`` on the device, contiguous."""
        parts = self._reader.read([self])[0]
        tokens = torch.cat([*parts, self.tail], dim=-2)
        self._reader.done([self])
        return tokens

    def stats(self) -> dict[str, int | float]:
        """Return bytes and counts.

        Returns
        -------
        dict
            ``raw_bytes`` and ``packed_bytes`` (words and all metadata) of the packed tokens, their
            ``ratio`` (1.0 when there are none), ``kept_raw_bytes`` of ``raw_bytes`` that lie as
            they came since no codec makes them smaller, ``host_bytes`` and ``device_bytes`` in use
            for words, metadata and tail, ``moved_to_host_bytes`` so far (on the CPU: of words that
            would have crossed), ``refits``.
        """
        raw = sum(era.raw_bytes for era in self.eras)
        metadata = sum(era.metadata_bytes for era in self.eras)
        packed = 4 * self.words.n_words + metadata
        on_host = self._reader.offload
        return {
            "raw_bytes": raw,
            "packed_bytes": packed,
            "ratio": raw / packed if raw else 1.0,
            "kept_raw_bytes": sum(era.raw_bytes for era in self.eras if era.layout is None),
            "host_bytes": self.words.nbytes if on_host else 0,
            "device_bytes": metadata + self.tail.nbytes + (0 if on_host else self.words.nbytes),
            "moved_to_host_bytes": self.moved_to_host_bytes,
            "refits": self.refits,
        }

    # Changes

    def check(self, tokens: torch.Tensor) -> None:
        """Refuse tokens that do not continue what is there.

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
        if tokens.device != self._reader.device:
            raise ArgumentTypeError(
                f"{self._kind}: on {tokens.device}, this cache is on {self._reader.device}"
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
            ``[B, H, n, D]`` on the reader's device, of any strides; they are not kept.
        checked : bool
            Whether they have been given to `check`.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            For tokens that do not continue what is there.
        BitslabError
            When host memory runs out; after this, as after any error, the history is as it was
            before, and usable.
        """
        if not checked:
            self.check(tokens)
        self._settle(wait=False)
        before, new = self.length, tokens.detach()
        if before == 0:
            # These may be of another kind than what has been fitted to.
            self._pending = self._sample = None
            self.eras = []
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
        if not 0 <= length <= self.length:
            raise ArgumentError(f"length: {length}, accepted are 0 to {self.length} tokens")
        if length >= self.packed_tokens:
            self._set_tail(self.tail[:, :, : length - self.packed_tokens])
            return
        self._pending = self._sample = None
        begin = length - length % self._block_tokens
        rest = self.tail[:, :, :0]
        if begin < length:
            parts = self._reader.read([self])[0]
            rest = torch.cat(parts, dim=-2)[:, :, begin:length].clone()
            self._reader.done([self])
        self._reader.quiesce()
        blocks = begin // self._block_tokens
        kept = 0
        for position, era in enumerate(self.eras):
            if kept + era.n_blocks > blocks:
                self.words.truncate(era.truncate(blocks - kept))
                self._reader.keep(*era.tensors())
                del self.eras[position + (1 if blocks > kept else 0) :]
                break
            kept += era.n_blocks
        self.packed_tokens = begin
        self._set_tail(rest)
        self._recent = []
        self._change()

    def reorder(self, index: torch.Tensor) -> None:
        """Take sequence ``index[b]`` for each b; no packed byte is moved.

        Parameters
        ----------
        index : torch.Tensor
            Integers ``[any]``.
        """
        index = index.to(self._reader.device)
        self._reindex(lambda t, dim: t.index_select(dim, index))

    def repeat(self, repeats: int) -> None:
        """Put each sequence `repeats` times in a row; no packed byte is moved."""
        self._reindex(lambda t, dim: t.repeat_interleave(repeats, dim=dim))

    def select(self, index: Any) -> None:
        """Keep the sequences of an index.

        Parameters
        ----------
        index : torch.Tensor or sequence
            Anything that indexes the first dimension of a tensor: integers or a mask.

        Notes
        -----
        When less than half of the packed sequences are left, they are packed anew, so that fetches
        do not bring the others; this reads the history once and waits for the device.
        """
        self._reindex(lambda t, dim: _indexed(t, dim, index))
        there = sum(era.raw_bytes for era in self.eras)
        if self.packed_tokens and 2 * sum(era.decoded_bytes for era in self.eras) <= there:
            tokens = self.decode()
            self.reset()
            self.append(tokens)

    def reset(self) -> None:
        """Forget all tokens and codecs; host memory that was taken is used again."""
        words = self.words
        self._reader.quiesce()
        self._clear()
        words.truncate(0)
        self.words = words
        self._change()

    # For the reader

    def mark_ready(self) -> None:
        """Record, on the current stream, that the metadata of the packed tokens is there."""
        if self._changed and self.ready is not None:
            self.ready.record(torch.cuda.current_stream(self._reader.device))
        self._changed = False

    # Inside

    def _change(self) -> None:
        self.version += 1
        self._changed = True
        self._reader.forget(self)
        for era in self.eras:
            era.forget_tables()

    def _set_tail(self, tail: torch.Tensor) -> None:
        self.tail = tail
        if self._pending is not None and self._pending.tokens > tail.shape[2]:
            self._pending = None

    def _reindex(self, take: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        self.tail = take(self.tail, 0)
        for era in self.eras:
            era.reindex(take)
            self._reader.keep(*era.tensors())
        if self._pending is not None:
            sequences = self._pending.sequences
            sequences.index, sequences.plain = take(sequences.index, 0), False
        if self.eras:
            self._change()

    def _pack(self) -> None:
        """Pack the blocks that have left the window, as far as nothing is to be waited for."""
        rows = self._rows
        if rows is None or not rows.token_bytes or not self.tail.shape[0] * self.tail.shape[1]:
            return
        while self._pending is None:
            due = (self.tail.shape[2] - self._window) // self._block_tokens
            if due < 1:
                return
            wait = due > 1 or self._at_once
            if (not self.eras or self._refit_wanted) and not self._fit(rows, due, wait):
                return
            batch = self.tail.shape[0]
            block_bytes = batch * rows.heads * rows.head_rows * rows.row_bytes
            n_blocks = min(due, max(1, PIECE_BYTES // block_bytes))
            tokens = self.tail[:, :, : n_blocks * self._block_tokens]
            index = torch.arange(batch, dtype=torch.int32, device=self._reader.device)
            self._pending = _Pending(rows, self.eras[-1], tokens, n_blocks, Sequences(batch, index))
            self._settle(wait=wait)

    def _settle(self, *, wait: bool) -> None:
        """Move the block that is being packed to its place, if its size is known."""
        pending = self._pending
        if pending is None or not pending.known(wait):
            return
        era, at = self.eras[-1], self.words.n_words
        n_words, max_words = pending.sizes()
        needed = n_words * self._reserve_tokens // pending.tokens
        if not at and self.words.nbytes < 4 * needed:
            self.words = self._reader.new_words(needed)
        tokens = self.packed_tokens + pending.tokens
        self._reader.append(self.words, pending.packed.words[:n_words], pending.made, tokens)
        era.commit(pending.packed, (n_words, max_words), pending.n_blocks, pending.sequences, at)
        self._reader.keep(*era.tensors())
        self._pending = None
        self.moved_to_host_bytes += 4 * n_words if self._reader.offload else 0
        self.packed_tokens += pending.tokens
        self.tail = self.tail[:, :, pending.tokens :].clone(memory_format=torch.contiguous_format)
        self._change()
        self._look_for_drift(era, n_words / pending.packed.lengths.shape[0])

    def _look_for_drift(self, era: Era, words: float) -> None:
        """Ask for a new codec when the last blocks were larger than the first ones of the era."""
        if era.layout is None:
            return
        self._recent = [*self._recent[1 - DRIFT_BLOCKS :], words]
        mean = sum(self._recent) / len(self._recent)
        limit = era.expected_words + DRIFT * era.layout.format.row_words
        self._refit_wanted = len(self._recent) == DRIFT_BLOCKS and mean > limit

    def _fit(self, rows: TokenRows, due: int, wait: bool) -> bool:
        """Begin an era with a codec for the tokens that are to be packed.

        Returns False when the sample is still on its way to the host.
        """
        if self._sample is None:
            # With the window: a block of few heads is too little to tell kinds of tokens apart.
            whole = self.tail.shape[2] // self._block_tokens * self._block_tokens
            tokens = self.tail[:, :, :whole]
            self._sample = _Arrival(draw_rows(rows, tokens))
        sample = self._sample.get(wait)
        if sample is None:
            return False
        self._sample = None
        self._refit_wanted = False
        codec = self._plans.fit(self._kind, sample, anew=bool(self.eras))
        packed = float(codec.packed_bytes(sample).sum())
        if self.eras:
            self.refits += 1
            self._recent = []
            last = self.eras[-1]
            if last.codec is not None:
                now = float(last.codec.packed_bytes(sample).sum())
                if now - packed < REFIT_GAIN * sample.nbytes:
                    # The tokens are harder to pack, not of another kind.
                    last.expected_words = now / 4 / sample.shape[0]
                    return True
        metadata = codec.row_metadata_bytes(sample.shape[0])
        # Raw rows lie at multiples of their words.
        raw = packed + metadata > (1 - LEAST_GAIN) * sample.nbytes and not rows.row_bytes % 4
        device, batch = self._reader.device, self.tail.shape[0]
        self.eras.append(Era(rows, None if raw else codec, device, self.words.n_words, batch))
        return True

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is under way: its tokens are in the tail."""
        self._reader.wait_for_copies()
        state = dict(self.__dict__)
        for name in ("identity", "ready", "_changed"):
            del state[name]
        # As bytes: torch 2.13 cannot unpickle tensors of 8-bit floats.
        tail = (self.tail.contiguous().view(torch.uint8), self.tail.dtype)
        return {**state, "tail": tail, "_pending": None, "_sample": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        tail, dtype = state["tail"]
        self.tail = tail.view(dtype)
        self.identity = object()
        self._make_event()
        for era in self.eras:
            self._reader.keep(*era.tensors())


class _Pending:
    """Blocks that are being packed on the device, and are still in the tail."""

    def __init__(
        self, rows: TokenRows, era: Era, tokens: torch.Tensor, n_blocks: int, sequences: Sequences
    ) -> None:
        self.tokens = tokens.shape[2]
        self.n_blocks = n_blocks
        self.sequences = sequences
        self._sizes: list[int] | None = None
        self.made: torch.cuda.Event | None = None  # of words whose size needs no waiting for
        data = rows_as_bytes(rows.rows_of(tokens), rows.row_bytes)
        if era.layout is None:
            n = data.shape[0]
            empty = torch.empty(n, dtype=torch.uint8, device="meta")
            self.packed = Packed(data.flatten().view(torch.int32), empty, empty, empty)
            self._sizes = [self.packed.words.shape[0], 0]
            if data.device.type == "cuda":
                self.made = torch.cuda.current_stream(data.device).record_event()
            return
        self.packed = pack_rows(data, era.layout)
        self._arrival = _Arrival(self.packed.sizes)

    def known(self, wait: bool) -> bool:
        """Tell whether the packed size is known, after waiting for it where that is asked for."""
        if self._sizes is None:
            sizes = self._arrival.get(wait)
            self._sizes = None if sizes is None else sizes.tolist()
        return self._sizes is not None

    def sizes(self) -> tuple[int, int]:
        """Return the words of all rows, and of the longest packed one."""
        assert self._sizes is not None
        return self._sizes[0], self._sizes[1]


class _Arrival:
    """A tensor on its way to the host."""

    def __init__(self, t: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._there = t
        if t.device.type == "cuda":
            self._there = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
            self._there.copy_(t, non_blocking=True)
            self._event = torch.cuda.current_stream(t.device).record_event()

    def get(self, wait: bool) -> torch.Tensor | None:
        """Return it, or None when it has not come and is not waited for."""
        if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            if not wait:
                return None
            self._event.synchronize()
        return self._there


def check_options(window: int, block_tokens: int, reserve_tokens: int) -> None:
    """Refuse options of a history that it cannot have."""
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
    """Return what an index takes of dimension 0 or 1."""
    if t.is_floating_point() and t.itemsize == 1:
        # As bytes: torch 2.8 cannot index 8-bit floats on the CPU.
        return _indexed(t.view(torch.uint8), dim, index).view(t.dtype)
    return t[index] if dim == 0 else t[:, index]
