"""One full-attention layer of a `CompressedCache`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin

from bitslab.errors import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.integrations.transformers.selectors import MAX_QUERIES, Attended, KVSelector
from bitslab.kvcache import (
    Commit,
    Gathered,
    HistoryReader,
    PackedHistory,
    RawTokens,
    Selection,
    Take,
    TokenJoin,
    TokenScores,
    beam_index,
    put_back,
    repeat_count,
    sequence_index,
)


class Kept(NamedTuple):
    """What a layer was like before a forward pass.

    Attributes
    ----------
    length : int
        Tokens of a sequence.
    raw : sequence of RawTokens
        K and V that were not packed; empty where codecs lose nothing.
    more : tuple
        What a subclass keeps.
    """

    length: int
    raw: Sequence[RawTokens] = ()
    more: tuple[Any, ...] = ()


class CompressedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """K and V of a layer, packed; takes the place of transformers' `DynamicLayer`.

    Parameters
    ----------
    open_histories : callable
        Takes a device and returns its reader and two empty histories, K's and V's.
    selector : KVSelector, optional
        Chooses which packed tokens are read.
    scores : TokenScores, optional
        The selector's scores of this layer's tokens.

    Attributes
    ----------
    keys, values : torch.Tensor or None
        All K and V, ``[B, H, T, D]``, decoded at each access; None before the first.
    read_tokens, there_tokens : int
        Packed tokens of a sequence and head that `update` has read, and could have read, in all.
    kept : Kept or None
        What the first update since it was None found; the cache forgets it with each forward pass.
    changes : int
        How often tokens were removed or sequences replaced.
    """

    kept: Kept | None = None
    changes = 0

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(
        self,
        open_histories: Callable[[torch.device], tuple[HistoryReader, list[PackedHistory]]],
        selector: KVSelector | None = None,
        scores: TokenScores | None = None,
    ) -> None:
        # Not the base class's: it would set `keys` and `values`.
        self._open = open_histories
        self._reader: HistoryReader | None = None
        self._join: TokenJoin | None = None
        self.histories: list[PackedHistory] = []
        self.is_initialized = False
        self._selector = selector
        self.scores = scores
        self._ahead: _Chosen | None = None
        self.read_tokens = 0
        self.there_tokens = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Set device and dtype from the first K and V."""
        device = key_states.device
        if self._reader is None or self._reader.device != device:
            self._reader, self.histories = self._open(device)
            self._join = TokenJoin(self._reader, self.histories)
        self.dtype, self.device = key_states.dtype, device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append K and V, and return all of them.

        Parameters
        ----------
        key_states, value_states : torch.Tensor
            ``[B, H, n, D]`` on one device.
        args, kwargs
            Arguments for other kinds of layers; ignored.

        Returns
        -------
        keys, values : torch.Tensor
            ``[B, H, T, D]``, contiguous, the bits that `DynamicCache` returns. Gradients reach the
            new tokens, not the past ones. With a selector, T are the chosen tokens and all behind
            the packed ones, and `keys` carries the selection to the attention function.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            For K and V of another shape, dtype or device than those of the layer.
        BitslabError
            When host memory runs out, or the selector has not seen the tokens before. After any
            error the layer is as it was before.
        """
        for name, given in (("key_states", key_states), ("value_states", value_states)):
            if not isinstance(given, torch.Tensor):
                raise ArgumentTypeError(f"{name}: expected a tensor, got {type(given).__name__}")
        if key_states.shape[:-1] != value_states.shape[:-1]:
            raise ArgumentError(
                f"value_states: shape {list(value_states.shape)}, key_states has "
                f"{list(key_states.shape)}; batch, heads and tokens must agree"
            )
        if self.is_initialized:
            return self.append(key_states, value_states)
        self.lazy_initialization(key_states, value_states)
        try:
            return self.append(key_states, value_states)
        except BaseException:
            self.is_initialized = False
            raise

    def append(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append K and V of a layer that has a reader; see `update`."""
        assert self._reader is not None and self._join is not None
        of_keys, of_values = self.histories
        of_keys.check(key_states)
        of_values.check(value_states)
        kept = self.kept
        if kept is None:
            first, last = of_keys.unpacked.head, of_keys.unpacked.tail
            kept = self.kept = Kept(first.shape[2] + of_keys.packed.length + last.length)
        chosen = None if self.scores is None else self._choose(key_states.shape[2])
        joined = None if chosen is not None else self._join.join(key_states, value_states)
        memory: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
        if joined is not None:
            (keys, values), memory = joined
        elif chosen is None:
            of_k, of_v = self._reader.read(self.histories)
            keys = of_keys.joined(of_k, key_states)
            values = of_values.joined(of_v, value_states)
            self._reader.done(self.histories)
        else:
            self._reader.take_turn(self.histories)
            k, v = chosen.gathered.get()
            keys = of_keys.joined([k], key_states)
            values = of_values.joined([v], value_states)
        self._count(chosen)
        new = 0  # of V
        try:
            of_keys.append(key_states, checked=True, memory=memory[0])
            of_values.append(value_states, checked=True, memory=memory[1])
            new = key_states.shape[2]
            if self._selector is not None and self.scores is not None:
                selection = None if chosen is None else chosen.selection
                Attended(self._selector, self.scores, selection).attach_to(keys)
        except BaseException:
            self.keep_first(of_values.length - new)
            self.kept = kept
            raise
        return keys, values

    @property
    def reads_words(self) -> bool:
        """Whether packed words are read as they are, and not decoded first."""
        return False

    def prefetch(self, new_tokens: int | None = None) -> None:
        """Start to fetch and decode what the next `update` returns; waits for nothing.

        Parameters
        ----------
        new_tokens : int, optional
            Of a sequence, which that update is to have, where they are known.
        """
        if self._reader is None:
            return
        if self.scores is not None:
            if self._reader.device.type != "cuda" or not self.scores.ready:
                return
            if self._ahead is None or not self._ahead.gathered.holds(self.histories):
                self._ahead = self._gather()
            if self._ahead is not None:
                return
        if self._join is not None and self._join.serves:
            self._reader.prefetch_words(self.histories, decoded=False)
        else:
            self._reader.prefetch(self.histories)

    def prefetch_words(self, *, early: bool = False) -> None:
        """Start to copy the packed words that `update` reads soon; waits for nothing.

        Parameters
        ----------
        early : bool
            Whether other layers are read before; see `HistoryReader.prefetch_words`.
        """
        if self._reader is not None and self.scores is None:
            decoded = self._join is None or not self._join.serves
            self._reader.prefetch_words(self.histories, decoded=decoded, early=early)

    @property
    def batch(self) -> int:
        """Sequences; 0 before there are any."""
        return self.histories[0].batch if self.is_initialized else 0

    @property
    def packed_tokens(self) -> int:
        """Tokens of a sequence whose K and V are packed."""
        if not self.histories:
            return 0
        of_keys, of_values = self.histories
        return min(of_keys.packed.length, of_values.packed.length)

    def offload(self) -> None:
        """Do nothing: packed tokens are offloaded already."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length that `update` will return for so many new tokens, and offset 0."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the tokens of a sequence; never waits for the device."""
        return self.histories[0].length if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """All K, decoded."""
        return self.histories[0].decode() if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """All V, decoded."""
        return self.histories[1].decode() if self.is_initialized else None

    def reset(self) -> None:
        """Forget all tokens; the next ones may have another shape, dtype and device."""
        for history in self.histories:
            history.reset()
        if self.scores is not None:
            self.scores.reset()
        self._ahead = self.kept = None
        self.changes += 1
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end.

        Parameters
        ----------
        tokens_to_remove : int
            Their number, negative or 0, as in transformers 5.

        Raises
        ------
        ArgumentError
            When it is positive or there are not so many.
        """
        self.prepare_crop(tokens_to_remove)()

    def prepare_crop(self, tokens_to_remove: int) -> Commit:
        """Return a commit that does what `crop` does; nothing changes before it is called."""
        remove = _count_of("tokens_to_remove", tokens_to_remove)
        if remove > 0:
            raise ArgumentError(
                f"tokens_to_remove: {remove}; give the number of tokens to remove as a negative "
                "integer"
            )
        length = self.get_seq_length()
        if not self.is_initialized or not remove:
            return _nothing
        if -remove > length:
            raise ArgumentError(f"tokens_to_remove: {remove}, the cache holds {length} tokens")
        return self.prepare_keep(length + remove)

    def keep_first(self, length: int) -> None:
        """Keep the first tokens, where there are more."""
        self.prepare_keep(length)()

    def undo(self) -> None:
        """Put the layer back to what it was like before the forward pass, as of `kept`."""
        if self.kept is not None:
            self.put_back(self.kept)

    def put_back(self, kept: Kept) -> None:
        """Put the layer back to what it was like, of which there were only updates since."""
        if not kept.length:
            self.reset()  # the next tokens may be of another kind
        elif not kept.raw:
            self.keep_first(kept.length)
        else:
            for history, raw in zip(self.histories, kept.raw, strict=True):
                put_back(history, raw, kept.length)
            self._all_of(
                [], None if self.scores is None else partial(self.scores.crop, kept.length)
            )()

    @property
    def kept_bytes(self) -> int:
        """Bytes on the device that are kept for `undo` alone."""
        if self.kept is None:
            return 0
        there = {history.unpacked.tail.memory.data_ptr() for history in self.histories}
        return sum(
            raw.memory.untyped_storage().nbytes()
            for raw in self.kept.raw
            if raw.memory.data_ptr() not in there
        )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Take sequence ``beam_idx[b]`` for each b: beam search."""
        self.prepare_reorder(beam_idx)()

    def prepare_reorder(self, beam_idx: Any) -> Commit:
        """Return a commit that does what `reorder_cache` does; see `prepare_crop`."""
        if not self.get_seq_length():
            return _nothing
        found = beam_index(beam_idx, self.batch, self.histories[0].device)
        return self.prepare_take(lambda t, dim: t.index_select(dim, found.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put each sequence `repeats` times in a row."""
        self.prepare_repeat(repeats)()

    def prepare_repeat(self, repeats: int) -> Commit:
        """Return a commit that does what `batch_repeat_interleave` does; see `prepare_crop`."""
        count = repeat_count(repeats)
        return self.prepare_take(lambda t, dim: t.repeat_interleave(count, dim=dim))

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the sequences of an index: integers or a mask, as a tensor, list or tuple."""
        self.prepare_select(indices)()

    def prepare_select(self, indices: Any) -> Commit:
        """Return a commit that does what `batch_select_indices` does; see `prepare_crop`."""
        if not self.get_seq_length():
            return _nothing
        found = sequence_index(indices, self.batch)
        take = self.prepare_take(lambda t, dim: t.index_select(dim, found.to(t.device)))

        def commit() -> None:
            take()
            for history in self.histories:
                history.pack_anew()

        return commit

    # Private

    def _choose(self, new: int) -> _Chosen | None:
        """Return the chosen packed tokens, or None for all of them."""
        ahead, self._ahead = self._ahead, None
        there = self.histories[0].length
        if self.scores is None or not there:
            return None
        if self.scores.length != there:
            raise BitslabError(
                f"select: the selector has seen {self.scores.length} of {there} tokens: run the "
                "model within `with selector.attached(model):`; after an error amid a forward "
                "pass, crop or reset the cache"
            )
        if new > MAX_QUERIES or not self.scores.ready:
            return None
        if ahead is not None and ahead.gathered.holds(self.histories):
            return ahead
        return self._gather()

    def _gather(self) -> _Chosen | None:
        assert self.scores is not None and self._reader is not None
        group = max(history.packed.tokens_per_row for history in self.histories)
        if any(segment.cut_tokens for h in self.histories for segment in h.segments[:-1]):
            return None  # groups would not be rows behind what was cut
        first = self.histories[0].head.shape[2]
        packed = first + self.packed_tokens // group * group
        self.scores.first = first
        selection = self.scores.choose(packed, group)
        if selection is None:
            return None
        return _Chosen(selection, self._reader.chosen.gather(self.histories, selection))

    def _count(self, chosen: _Chosen | None) -> None:
        of_keys, of_values = self.histories
        there = min(of_keys.packed.length, of_values.packed.length)
        self.there_tokens += there
        if chosen is None:
            self.read_tokens += there
        else:
            self.read_tokens += chosen.selection.tokens - chosen.selection.first

    def __getstate__(self) -> dict[str, Any]:
        """Leave out tokens that are gathered ahead or kept, and the join, made again."""
        return {**self.__dict__, "_ahead": None, "_join": None, "kept": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state, of a version before tokens were joined too."""
        self.__dict__.update(state)
        self._join = None if self._reader is None else TokenJoin(self._reader, self.histories)

    def prepare_take(self, take: Take) -> Commit:
        """Return a commit that replaces the sequences; see `prepare_crop`."""
        if not self.get_seq_length():
            return _nothing
        return self._all_of(
            [history.prepare_take(take) for history in self.histories],
            None if self.scores is None else self.scores.prepare_take(take),
        )

    def prepare_keep(self, length: int) -> Commit:
        """Return a commit that keeps the first tokens, where there are more; see `prepare_crop`."""
        scores = self.scores
        return self._all_of(
            [history.prepare_crop(min(length, history.length)) for history in self.histories],
            None if scores is None else partial(scores.crop, length),
        )

    def _all_of(self, of_histories: list[Commit], of_scores: Commit | None) -> Commit:
        def commit() -> None:
            for change in of_histories:
                change()
            if of_scores is not None:
                of_scores()
            self._ahead = self.kept = None
            self.changes += 1

        return commit


def _nothing() -> None:
    """Change nothing."""


def _count_of(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{name}: expected an int, got {value!r:.60}") from None


@dataclass(frozen=True, eq=False)
class _Chosen:
    """Chosen tokens, and their K and V in flight."""

    selection: Selection
    gathered: Gathered
