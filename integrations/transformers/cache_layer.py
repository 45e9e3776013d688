"""One full-attention layer of a `CompressedCache`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from bitslab.errors import ArgumentError, BitslabError
from bitslab.integrations.transformers.selective import Attended
from bitslab.integrations.transformers.selectors import MAX_QUERIES, KVSelector
from bitslab.kvcache import HistoryReader, PackedHistory
from bitslab.kvcache.gathering import Gathered
from bitslab.kvcache.selection import Selection, Take, TokenScores


class CompressedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """K and V of a layer, packed; stands for transformers' `DynamicLayer`.

    Parameters
    ----------
    open_histories : callable
        Takes a device and returns its reader and two empty histories, K's and V's.
    selector : KVSelector, optional
        Chooses which packed tokens are read.
    scores : TokenScores, optional
        What the selector knows of this layer's tokens.

    Attributes
    ----------
    keys, values : torch.Tensor or None
        All K and V, ``[B, H, T, D]``, decoded at each access; None before the first.
    read_tokens, there_tokens : int
        Packed tokens of a sequence and head that `update` has read, and that were there, in all.
    """

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
        self.histories: list[PackedHistory] = []
        self.is_initialized = False
        self._selector = selector
        self.scores = scores
        self._ahead: _Chosen | None = None
        self.read_tokens = 0
        self.there_tokens = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Learn device and dtype from the first K and V."""
        device = key_states.device
        if self._reader is None or self._reader.device != device:
            self._reader, self.histories = self._open(device)
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
            What models pass for other kinds of layers; not used.

        Returns
        -------
        keys, values : torch.Tensor
            ``[B, H, T, D]``, contiguous, the bits that `DynamicCache` returns. Gradients reach the
            new tokens, not the past ones. With a selector, T are the chosen tokens and all behind
            the packed ones, and `keys` says so to the attention function.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            For K and V of another shape, dtype or device than those that are there.
        BitslabError
            When host memory runs out, or the selector has not seen the tokens before. After any
            error the layer is as it was before.
        """
        if key_states.shape[:-1] != value_states.shape[:-1]:
            raise ArgumentError(
                f"value_states: shape {list(value_states.shape)}, key_states has "
                f"{list(key_states.shape)}; batch, heads and tokens must agree"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self._reader is not None
        new = [key_states, value_states]
        for history, tokens in zip(self.histories, new, strict=True):
            history.check(tokens)
        before = self.get_seq_length()
        chosen = self._choose(key_states.shape[2], before)
        if chosen is None:
            parts = self._reader.read(self.histories)
        else:
            parts = [[part] for part in chosen.gathered.get()]
        self._count(chosen)
        keys, values = (
            torch.cat([*packed, history.tail, tokens] if before else [tokens], dim=-2)
            for packed, history, tokens in zip(parts, self.histories, new, strict=True)
        )
        if chosen is None:
            self._reader.done(self.histories)
        try:
            for history, tokens in zip(self.histories, new, strict=True):
                history.append(tokens, checked=True)
        except Exception:
            self.keep_first(before)
            raise
        if self._selector is not None and self.scores is not None:
            selection = None if chosen is None else chosen.selection
            Attended(self._selector, self.scores, selection).attach_to(keys)
        return keys, values

    def prefetch(self) -> None:
        """Start to fetch and decode what the next `update` returns; waits for nothing."""
        if self._reader is None:
            return
        if self.scores is None:
            self._reader.prefetch(self.histories)
        elif self._reader.device.type == "cuda" and self.scores.ready:
            if self._ahead is None or not self._ahead.gathered.holds(self.histories):
                self._ahead = self._gather()
            if self._ahead is None:
                self._reader.prefetch(self.histories)

    @property
    def packed_tokens(self) -> int:
        """Tokens of a sequence whose K and V are packed."""
        return min((history.packed_tokens for history in self.histories), default=0)

    def offload(self) -> None:
        """Do nothing: packed tokens are where they belong."""

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
        self._ahead = None
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
        self.check_crop(tokens_to_remove)
        if tokens_to_remove and self.is_initialized:
            self.keep_first(self.get_seq_length() + int(tokens_to_remove))

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse what `crop` cannot remove."""
        remove = int(tokens_to_remove)
        if remove > 0:
            raise ArgumentError(
                f"tokens_to_remove: {remove}; give the number of tokens to remove as a negative "
                "integer"
            )
        length = self.get_seq_length()
        if self.is_initialized and -remove > length:
            raise ArgumentError(f"tokens_to_remove: {remove}, the cache holds {length} tokens")

    def keep_first(self, length: int) -> None:
        """Keep the first tokens, where there are more."""
        for history in self.histories:
            history.crop(min(length, history.length))
        if self.scores is not None:
            self.scores.crop(length)
        self._ahead = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Take sequence ``beam_idx[b]`` for each b: beam search."""
        if self.get_seq_length() > 0:
            for history in self.histories:
                history.reorder(beam_idx)
            self._take(lambda t, dim: t.index_select(dim, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put each sequence `repeats` times in a row."""
        if self.get_seq_length() > 0:
            for history in self.histories:
                history.repeat(repeats)
            self._take(lambda t, dim: t.repeat_interleave(repeats, dim=dim))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences of an index: integers or a mask."""
        if self.get_seq_length() > 0:
            for history in self.histories:
                history.select(indices)
            self._take(lambda t, dim: t[indices])

    # Inside

    def _choose(self, new: int, there: int) -> _Chosen | None:
        """Return the chosen packed tokens of those that are there, or None for all of them."""
        ahead, self._ahead = self._ahead, None
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
        group = max(history.tokens_per_row for history in self.histories)
        selection = self.scores.choose(self.packed_tokens, group)
        if selection is None:
            return None
        return _Chosen(selection, self._reader.chosen.gather(self.histories, selection))

    def _count(self, chosen: _Chosen | None) -> None:
        there = self.packed_tokens
        self.there_tokens += there
        self.read_tokens += there if chosen is None else chosen.selection.tokens

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is on its way."""
        return {**self.__dict__, "_ahead": None}

    def _take(self, take: Take) -> None:
        self._ahead = None
        if self.scores is not None:
            self.scores.take(take)


@dataclass(frozen=True, eq=False)
class _Chosen:
    """Chosen tokens, and their K and V on their way."""

    selection: Selection
    gathered: Gathered
