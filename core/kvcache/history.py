"""PackedHistory: the K or V of one layer, packed by the block, the last tokens unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ..engine.kernels import kernels_for
from ..errors import ArgumentError, ArgumentTypeError, BitslabError
from .index import beam_index, indexed, repeat_count, sequence_index
from .model_codecs import FirstCodec
from .options import check_options
from .packed_tokens import Commit, PackedTokens
from .packing import Plans
from .segment import Segment
from .selection import Take
from .unpacked import UnpackedTokens
from .words import DeviceWords, HostWords, Words


class PackedHistory:
    """The K or V of one layer, as lossless as the codecs of its plans are.

    The first `sinks` tokens, and the last ones, at least `window` and fewer than ``window + 2 *
    block_tokens``, are kept unpacked on the device; all others are packed by the block, each once.
    What a lossy codec has packed remains as it is, whatever follows: where tokens are removed, the
    rest of their block remains packed. Where no codec makes tokens
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
    sinks : int
        First tokens that are never packed.
    tile_tokens : int, optional
        Tokens of a row of codecs whose rows are tiles; see `TokenRows`.
    reserve_tokens : int
        Tokens for which memory is taken at once when the first are packed.
    tail_room_tokens : int
        Tokens of a sequence for which the tail takes memory ahead, at the most. With none, each
        `append` copies the tail, unless the tokens were written to memory of `memory_for`, which
        takes an eighth of what packing has saved.
    at_once : bool
        Whether `append` waits for a GPU that packs, so that how many tokens are packed never
        depends on its speed: where only some of the packed tokens are attended to, that would
        change results.
    kept : FirstCodec, optional
        Where the history takes its first codec from, as that of the model's last cache, and leaves
        it to the next one. It needs no sample then.

    Attributes
    ----------
    packed : PackedTokens
        The packed tokens.
    unpacked : UnpackedTokens
        The first tokens, before them, and the last, behind them.
    name : str
        The kind, and the layer where that is known, for messages.

    Notes
    -----
    On a GPU nothing waits for the device but: packing `at_once`, which waits for the packed size;
    removing packed tokens; and copies and pickles. Else blocks are packed on the device (in
    flight): their tokens are kept in the tail until their size is known on the host, and a later
    `append` moves them there; for more than one block (a prompt) that is an `append` to any history
    of the reader, which also waits for the oldest of them where many raw tokens take memory: see
    `PackingQueue`.

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
        sinks: int = 0,
        tile_tokens: int | None = None,
        reserve_tokens: int = 0,
        tail_room_tokens: int = 0,
        at_once: bool = False,
        kept: FirstCodec | None = None,
    ) -> None:
        check_options(window, block_tokens, reserve_tokens, sinks)
        given: object = words
        if not isinstance(given, HostWords | DeviceWords) or given.n_words:
            raise ArgumentTypeError(
                "words: expected an empty store, as HistoryReader.new_words() returns, got "
                f"{given!r:.60}"
            )
        self.packed = PackedTokens(
            words,
            plans,
            kind,
            block_tokens=block_tokens,
            reserve_tokens=reserve_tokens,
            tile_tokens=tile_tokens,
            kept=kept,
        )
        self.name = kind if kept is None else kept.name
        self.unpacked = UnpackedTokens(words.link, kind, sinks=sinks, room_tokens=tail_room_tokens)
        self._device = words.link.device
        self._window = window
        self._block_tokens = block_tokens
        self._at_once = at_once or self._device.type == "cpu"

    # State

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        unpacked = self.unpacked
        return unpacked.head.shape[2] + self.packed.length + unpacked.tail.length

    @property
    def head(self) -> torch.Tensor:
        """The first tokens, ``[B, H, up to sinks, D]`` on the device."""
        return self.unpacked.head

    @property
    def tail(self) -> torch.Tensor:
        """The tokens behind the packed ones, ``[B, H, t, D]`` on the device.

        A view that holds until the next change.
        """
        return self.unpacked.tail.tokens

    @property
    def device(self) -> torch.device:
        """Where tokens are decoded."""
        return self._device

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.tail.shape[0]

    @property
    def packed_tokens(self) -> int:
        """Tokens of a sequence that are packed."""
        return self.packed.length

    @property
    def samples(self) -> bool:
        """Whether a sample for the next codec is on its way to the host."""
        return self.packed.samples and self._blocks_due() >= 1

    @property
    def due(self) -> bool:
        """Whether a block has left the window that is not packed."""
        return self._blocks_due() >= 1

    @property
    def waiting_tokens(self) -> int:
        """Tokens of a sequence that have left the window unpacked; below 0 before there are any."""
        return self.unpacked.tail.length - self._window

    @property
    def packs(self) -> bool:
        """Whether blocks are in flight."""
        return bool(self.packed.in_flight)

    @property
    def words(self) -> Words:
        """The words of the packed tokens."""
        return self.packed.words

    @property
    def segments(self) -> list[Segment]:
        """The segments of the packed tokens, oldest first."""
        return self.packed.segments

    def decode(self) -> torch.Tensor:
        """Return all tokens, ``[B, H, length, D]`` on the device, contiguous."""
        return self.joined(self.decode_packed())

    def joined(self, packed: Sequence[torch.Tensor], *new: torch.Tensor) -> torch.Tensor:
        """Return all tokens, and new ones behind them, ``[B, H, any, D]``, contiguous.

        Parameters
        ----------
        packed : sequence of torch.Tensor
            What `decode_packed` returns.
        new : torch.Tensor
            ``[B, H, n, D]``.
        """
        return self.unpacked.around(packed, *new)

    def decode_packed(self) -> list[torch.Tensor]:
        """Return the packed tokens, decoded on the current stream.

        Returns
        -------
        list of torch.Tensor
            Its segments, oldest first: ``[B, H, tokens, D]`` on the device, contiguous.
        """
        return self.packed.decode()

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
        stats = self.packed.stats()
        stats["raw_bytes"] += self.unpacked.nbytes
        stats["device_bytes"] += self.unpacked.device_bytes
        return stats

    # Changes

    def take_turn(self) -> int:
        """Let torch's current stream read and write the tokens, behind the one that did last.

        All changes but those of `append` with memory do it themselves.

        Returns
        -------
        int
            Which stream that is, as `Link.take_turn` says.
        """
        link = self.packed.words.link
        stream = link.take_turn()
        if link.several_streams:
            self.unpacked.keep_for(stream)
        return stream

    def check(self, tokens: torch.Tensor) -> None:
        """Raise for tokens that do not continue those of the history.

        Raises
        ------
        ArgumentError
            For another shape ``[B, H, any, D]``.
        ArgumentTypeError
            For another dtype or device.
        """
        self.unpacked.check(tokens, self.packed.length)

    def append(
        self,
        tokens: torch.Tensor,
        *,
        checked: bool = False,
        pack: bool = True,
        memory: torch.Tensor | None = None,
    ) -> None:
        """Put tokens behind the last ones, and pack what has left the window.

        Parameters
        ----------
        tokens : torch.Tensor
            ``[B, H, n, D]`` on the history's device, of any strides; they are not kept.
        checked : bool
            Whether they have been given to `check`.
        pack : bool
            Whether to pack; else `pack` does it, once they have been attended to unpacked.
        memory : torch.Tensor, optional
            What `memory_for` returned, to which they have been written.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            For tokens that do not continue those of the history.
        BitslabError
            When host memory runs out; after this, as after any error, the history is as it was
            before, and usable. It may be that of another history in the queue, which it names.
        """
        if not checked:
            self.check(tokens)
        packed, unpacked = self.packed, self.unpacked
        link = packed.words.link
        before = unpacked.head.shape[2] + packed.length + unpacked.tail.length
        try:
            if memory is not None and not unpacked.tail.take(memory, tokens.shape[2]):
                memory = None  # another history of the link has gone on with this one's packing
            borrowed = False
            if memory is None:
                stream = link.take_turn()
                if link.several_streams:
                    unpacked.keep_for(stream)
            if link.packing.histories or packed.in_flight:
                self._go_on()
            if memory is None:
                if not before:
                    packed.start(tokens)
                borrowed = unpacked.put(tokens)
            if pack and unpacked.tail.length - self._window >= self._block_tokens:
                self.pack()
            if borrowed:
                unpacked.own()
        except BaseException:  # of a KeyboardInterrupt too: who keeps the cache may go on
            if self.length != before:
                self.crop(before)
            raise

    def memory_for(self, n: int) -> tuple[torch.Tensor, int, torch.Tensor]:
        """Return where the tail lies, and memory for it and `n` tokens behind it.

        Returns
        -------
        tail : torch.Tensor
            ``[B, H, t or more, D]``, of which the first t are the tail.
        tail_tokens : int
            t.
        memory : torch.Tensor
            ``[B, H, t + n or more, D]``, which `append` takes; `tail`, or contiguous memory to
            which the tail is to be written too. Nothing is seen of what is written before that.

        Notes
        -----
        On a GPU it is for the current stream, on which `take_turn` has been called.
        """
        tail = self.unpacked.tail
        room_tokens = self.unpacked.room_tokens or self.packed.affordable_tokens
        return tail.memory, tail.length, tail.memory_for(n, room_tokens)

    def _go_on(self) -> None:
        """Go on with packing that is under way, here and in the queue."""
        queue = self.packed.words.link.packing
        if queue.histories:
            kernels_for(self._device)  # the error of an earlier decode there is not the queue's
            queue.advance()
        if self.packed.in_flight:
            self._retire(wait=False)

    def pack(self) -> None:
        """Pack what has left the window, as `append` does.

        Raises
        ------
        BitslabError
            When host memory runs out; the tokens are there, some of them unpacked.
        """
        if not self.due:
            return
        self.take_turn()
        self._pack(wait=self._at_once)
        if not self._at_once and self._blocks_due() > 1:
            self.words.link.packing.add(self)

    def begin_at(self, positions: torch.Tensor | None, last: int) -> None:
        """Keep sequences' own first tokens as they came; see `UnpackedTokens.begin_at`."""
        if self.packed.length or not self.packed.in_flight:
            self.unpacked.begin_at(positions, last, self.packed.length)

    def pack_on(self, *, wait: bool) -> None:
        """Go on with packing.

        Parameters
        ----------
        wait : bool
            Whether to wait for what is on its way to the host now, a sample or packed sizes; not
            for what this begins.

        Raises
        ------
        BitslabError
            When host memory runs out; nothing has changed then.
        """
        self.take_turn()
        if self.samples:
            self._pack(wait=False, wait_for_sample=wait)
        else:
            self._retire(wait=wait)
            self._pack(wait=False)

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
        self.take_turn()
        head = self.head[:, :, :length]
        behind = length - head.shape[2]
        if behind >= self.packed_tokens:
            tail = self.tail[:, :, : behind - self.packed_tokens]
            forget = partial(self.packed.forget_in_flight, tail.shape[2])
            return partial(self._commit, forget, head, tail)
        begin = self.packed.croppable(behind)
        rest = self.tail[:, :, :0]
        if begin < behind:
            rest = torch.cat(self.decode_packed(), dim=-2)[:, :, begin:behind].clone()
        return partial(self._commit, self.packed.prepare_crop(begin), head, rest)

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
        self.prepare_take(lambda t, dim: indexed(t, dim, found))()

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
        When at most half of the packed sequences are left, they are packed again, or, of a lossy
        codec, copied as they are packed, so that the others are not fetched; this reads the history
        once and waits for the device.
        """
        found = sequence_index(index, self.batch, "index").to(self.device)
        self.prepare_take(lambda t, dim: indexed(t, dim, found))()
        self.pack_anew()

    def prepare_take(self, take: Take) -> Commit:
        """Return a commit that replaces the sequences.

        Parameters
        ----------
        take : callable
            Takes a tensor and its dimension of sequences, and returns it with the others.
        """
        self.take_turn()
        head, tail, own = self.unpacked.taken(take)
        change = partial(self._commit, self.packed.prepare_take(take), head, tail)

        def commit() -> None:
            change()
            self.unpacked.own_first = own

        return commit

    def prepare_move(self, words: Words) -> Commit:
        """Return a commit that keeps the packed words in another, empty store of the same reader.

        See `PackedTokens.prepare_move`.
        """
        self.take_turn()
        return self.packed.prepare_move(words)

    def pack_anew(self) -> None:
        """Pack the remaining sequences again if they are less than half of the packed ones.

        This only saves memory: where memory for it is lacking, nothing changes, or tokens are left
        unpacked until the next `append`. What a lossy codec has packed would be quantised twice: it
        is copied as it is.
        """
        if not self.packed.mostly_dropped:
            return
        if self.packed.lossy:
            with suppress(MemoryError, RuntimeError, BitslabError):
                self.packed.drop_others()
            return
        with suppress(MemoryError, RuntimeError, BitslabError):
            head, tokens = self.head, torch.cat([*self.decode_packed(), self.tail], dim=-2)
            own = self.unpacked.own_first
            self.reset()
            self.packed.start(tokens)
            self.unpacked.replace(head, tokens)
            self.unpacked.own_first = own
            self._pack(wait=True)
            self.words.trim()

    def reset(self) -> None:
        """Remove all tokens and codecs; host memory that was taken is reused."""
        self.take_turn()
        self.packed.reset()
        self.unpacked.clear()

    def _commit(self, change: Commit, head: torch.Tensor, tail: torch.Tensor) -> None:
        """Change the packed tokens, and replace the others."""
        change()
        self.unpacked.replace(head, tail)
        if not self.packed.length and not self.packed.in_flight:
            self.unpacked.own_first = None  # other sequences may be next

    def _blocks_due(self) -> int:
        return self.waiting_tokens // self._block_tokens

    def _retire(self, *, wait: bool) -> None:
        """Remove from the tail what is packed; see `PackedTokens.retire`."""
        packed, unpacked = self.packed, self.unpacked
        tail, length = unpacked.tail, packed.length
        if unpacked.own_first is not None:
            tokens = sum(blocks.tokens for blocks in packed.in_flight)
            unpacked.look_for_own(tail.tokens[:, :, :tokens], length)
        try:
            left = packed.retire(tail.tokens, wait=wait)
            if left is not tail.tokens:
                unpacked.replace(unpacked.head, left)
        except BaseException:
            if unpacked.tail is tail and packed.length > length:  # of an interrupt: some are moved
                unpacked.replace(unpacked.head, tail.tokens[:, :, packed.length - length :])
            raise

    def _pack(self, *, wait: bool, wait_for_sample: bool = False) -> None:
        """Pack the blocks that have left the window, as far as that needs no waiting.

        With `wait` one piece after the other, so that one at a time takes memory; else all pieces
        are begun.
        """
        packed, due = self.packed, self._blocks_due()
        if due < packed.least_blocks():
            return
        while packed.begin(self.tail, due, wait=wait or wait_for_sample):
            self._retire(wait=wait)
            due = self._blocks_due()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state, of a version in which it owned the unpacked tokens itself too."""
        if "unpacked" not in state:
            link, sinks, room = state["packed"].words.link, state["_sinks"], "_tail_room_tokens"
            unpacked = UnpackedTokens(
                link, state["_kind"], sinks=sinks, room_tokens=state.get(room, 0)
            )
            tail, dtype = state.pop("tail")
            unpacked.replace(state.pop("head").view(dtype), tail.view(dtype))
            state["unpacked"] = unpacked
        self.__dict__.update(state)
