"""One full-attention layer of a `KVCompCache`: tiles of K and V, and attention to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch

from bitslab.errors import BitslabError
from bitslab.integrations.transformers.cache_layer import CompressedLayer, Kept
from bitslab.integrations.transformers.handles import KVHandle
from bitslab.integrations.transformers.selectors import KVSelector
from bitslab.kvcache import (
    QUERIES,
    Commit,
    HistoryReader,
    PackedAttention,
    PackedHistory,
    RawTokens,
    Take,
    TilePlans,
    TokenScores,
)

#: Opens a reader and the histories of K and V on a device.
Open = Callable[[torch.device], tuple[HistoryReader, list[PackedHistory]]]


@dataclass(frozen=True, eq=False)
class Padding:
    """What a mask says that is causal.

    Attributes
    ----------
    first_valid : torch.Tensor or None
        int32 ``[B]``: the first token of each sequence that is no padding; None where all begin
        with the first.
    last : int
        The largest of them.
    """

    first_valid: torch.Tensor | None
    last: int = 0


_NO_PADDING = Padding(None)


class TakesHandles(Protocol):
    """Whether the attention function of a model takes handles, as of this forward pass."""

    now: bool


class KVCompLayer(CompressedLayer):  # type: ignore[no-untyped-call]
    """K and V of a layer as quantised tiles.

    Parameters
    ----------
    open_tiles, open_lossless : callable
        Take a device and return its reader and two empty histories, of tiles and of lossless rows,
        for K and V that cannot be tiles.
    plans : TilePlans
        Fits the codecs of the tiles.
    hands : TakesHandles
        Whether the model's attention takes handles.
    selector, scores : optional
        As of `CompressedLayer`. Chosen tiles are decoded first.
    turn : float
        From 0 to 1: how much of a block's tokens later than at once a block is packed behind the
        prompt, so that the layers of a model do not all do that at the same token.

    Attributes
    ----------
    unfit : str
        Why K and V are no tiles, or empty.
    measured_without : frozenset of str
        What attention to the kept queries had that `TilePlans.learn` does not take.
    packed_passes, dense_passes : int
        How often packed tokens were attended to as they are, and decoded first.
    attended : callable or None
        Called once an update has been attended to: in the last layer of a model.
    """

    measured_without: frozenset[str] = frozenset()  # of layers that were pickled without them
    _padding: Padding | None = None  # that attention to the last update had

    def __init__(
        self,
        open_tiles: Open,
        open_lossless: Open,
        plans: TilePlans,
        hands: TakesHandles,
        selector: KVSelector | None = None,
        scores: TokenScores | None = None,
        *,
        turn: float = 0.0,
    ) -> None:
        super().__init__(open_tiles, selector, scores)
        self._turn = turn
        self._open_tiles, self._open_lossless = open_tiles, open_lossless
        self.plans = plans
        self._hands = hands
        self.attended: Callable[[], None] | None = None
        self.unfit = ""
        self.packed_passes = self.dense_passes = 0
        self._stages: bool | None = None  # whether attention read packed words last
        self._dense_tokens = 0  # new ones of the last pass that did not
        self._attention: PackedAttention | None = None
        self._forget()

    def _forget(self) -> None:
        self._latest: ref[LayerUpdate] | None = None
        self._waits = False  # tokens of the last update are to be packed
        self._new_tokens = 0  # in that update
        self._queries: _LastQueries | None = None
        self._padding = None
        self.measured_without = frozenset()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Set device, dtype and codecs from the first K and V."""
        options = self.plans.options
        self.unfit = "" if options.lossless else options.unfit(key_states, value_states)
        lossless = options.lossless or bool(self.unfit)
        opened = self._open_lossless if lossless else self._open_tiles
        if opened is not self._open:
            self._open, self._reader = opened, None
        self.plans.heads, self.plans.dim = key_states.shape[1], key_states.shape[-1]
        super().lazy_initialization(key_states, value_states)
        assert self._reader is not None
        self._attention = PackedAttention(self._reader, self.histories)

    @property
    def left_out(self) -> str:
        """What the error of the layer was measured without, or why it was not; may be empty."""
        if self.plans.measured is not None:
            return ", ".join(sorted(self.measured_without))
        return self.plans.why_unmeasured

    @property
    def lossless(self) -> bool:
        """Whether no token is quantised."""
        return self._open is self._open_lossless

    def append(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append K and V; handles come back where the attention function reads tiles."""
        kept = self.as_it_is()
        of_pass = self.kept = kept if self.kept is None else self.kept
        try:
            return self._append(key_states, value_states, kept.length)
        except BaseException:
            self.put_back(kept)
            self.kept = of_pass
            raise

    def _append(
        self, key_states: torch.Tensor, value_states: torch.Tensor, before: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._waits:
            self.settle()
        lossless = self._open is self._open_lossless  # the property, without a call for each token
        if lossless or self.scores is not None or not self._hands.now:
            if self.packed_tokens and not lossless:
                self.dense_passes += 1
            self._stages, self._dense_tokens = False, 0
            return super().append(key_states, value_states)
        if self._stages is None:
            self._stages = True
        of_keys, of_values = self.histories
        of_keys.check(key_states)
        of_values.check(value_states)
        of_keys.append(key_states, checked=True, pack=False)
        of_values.append(value_states, checked=True, pack=False)
        length = before + key_states.shape[2]
        update = LayerUpdate(self, (key_states, value_states), length)
        self._latest, self._waits, self._padding = ref(update), True, None
        self._new_tokens = key_states.shape[2]
        return KVHandle(update, 0, key_states, length), KVHandle(update, 1, value_states, length)

    @property
    def reads_words(self) -> bool:
        """Whether attention read packed words last, as they are."""
        return bool(self._stages)

    def prefetch(self, new_tokens: int | None = None) -> None:
        """Start to fetch what attention reads next: words alone if it read those last.

        Or if fewer tokens are new: those behind a chunk of a prompt have few enough queries.
        """
        if self._stages is False and new_tokens is not None and new_tokens < self._dense_tokens:
            self._go_on_with_words()
        if self._stages and self.scores is None:
            self.prefetch_words()
        else:
            super().prefetch(new_tokens)

    def _go_on_with_words(self) -> None:
        assert self._reader is not None
        self._stages = True
        self._reader.stop_decoding(self.histories)

    def prefetch_words(self, *, early: bool = False) -> None:
        """Start to copy packed words, as of `CompressedLayer`."""
        if not self._stages:
            super().prefetch_words(early=early)
        elif self._reader is not None and self.scores is None:
            self._reader.prefetch_words(self.histories, decoded=False, early=early)

    def settle(self, *, later: bool = False) -> None:
        """Pack what has left the windows since the last update, once it was attended to.

        Where codecs are to be learnt first, and a GPU has more to compute, that may come `later`.
        """
        if not self._waits:
            return
        if self.waits:
            assert self._reader is not None
            if later and self._reader.learning.puts_off:
                self._reader.learning.add(self)
                return
            self._waits = False
            self.learn()
        self._waits = False
        if self._has_turn():
            padding = self._padding or _NO_PADDING
            for history in self.histories:
                history.begin_at(padding.first_valid, padding.last)
                history.pack()

    def _has_turn(self) -> bool:
        """Whether a block that has left the window is packed now, or a few tokens later."""
        keys = self.histories[0]
        if not self._turn or not keys.packed_tokens or self._new_tokens > 1:
            return True
        return keys.waiting_tokens >= (1 + self._turn) * self.plans.options.block_tokens

    def end_pass(self) -> None:
        """Call `attended` in the last layer, whose own codecs are then to be learnt too."""
        if self.attended is None:
            return
        assert self._reader is not None
        if self.waits:
            self._reader.learning.add(self)
        self.attended()

    @property
    def waits(self) -> bool:
        """Whether codecs are to be learnt from the tokens that are there."""
        if not self._waits or not self.plans.learns or self.packed_tokens:
            return False
        seen = self._queries is not None or not self.plans.takes_queries
        return seen and all(history.due for history in self.histories)

    @property
    def learns_from(self) -> list[torch.Tensor]:
        """All tensors that codecs are learnt from."""
        found = [t for history in self.histories for t in (history.head, history.tail)]
        if self._queries is not None:
            of_queries = self._queries.tokens, *self._queries.options.values()
            found += [t for t in of_queries if isinstance(t, torch.Tensor)]
        return found

    def learn(self) -> None:
        """Learn the codecs of all tokens, on the current stream."""
        if self._queries is None:
            self.plans.learn_lossless(*(history.tail for history in self.histories))
            return
        keys, values = (history.decode() for history in self.histories)
        self.plans.learn(keys, values, self._queries.tokens, **self._queries.options)
        self._queries = None

    # Attention

    def latest(self, update: LayerUpdate) -> bool:
        """Return whether an update is the last one."""
        latest = self._latest
        return latest is not None and latest() is update and update.since == self.changes

    def read(self, update: LayerUpdate) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all K and V as they were after an update, decoded."""
        assert self._reader is not None
        if self.packed_tokens:
            self.dense_passes += 1
            self._stages, self._dense_tokens = False, self._new_tokens
            self._count(None)
        decoded = self._reader.read(self.histories)
        keys, values = (
            history.joined(packed)[:, :, : update.length]
            for packed, history in zip(decoded, self.histories, strict=True)
        )
        self._reader.done(self.histories)
        return keys, values

    def attend_packed(
        self, query: torch.Tensor, padding: Padding | None, options: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """Return attention to the tokens as they are packed; None where that is not served."""
        assert self._attention is not None
        if not self._attention.serves(query):
            return None
        out = self._attention.attend(
            query,
            scaling=options.get("scaling"),
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
            first_valid=None if padding is None else padding.first_valid,
        )
        self.packed_passes += 1
        if not self._stages:
            self._go_on_with_words()
        self._count(None)
        return out

    def see(
        self,
        query: torch.Tensor,
        padding: Padding | None,
        options: Mapping[str, Any],
        *,
        other_mask: bool = False,
    ) -> None:
        """Keep the last queries until codecs are learnt, and where sequences begin."""
        self._padding = padding
        if self.lossless or not self.plans.learns or self.packed_tokens:
            return
        _, heads, _, dim = self.histories[0].tail.shape
        takes = self.plans.takes_queries and bool(query.numel())
        if not takes or query.shape[1] % heads or query.shape[3] != dim:
            return  # of an attention that the fit does not know
        query = query.detach()[:, :, -QUERIES:]
        if self._queries is not None:
            query = torch.cat([self._queries.tokens, query], dim=2)[:, :, -QUERIES:]
        sinks = options.get("s_aux")
        other_sinks = sinks is not None and sinks.numel() != query.shape[1]
        if sinks is not None:  # as they are now: parameters may be changed
            sinks = None if other_sinks else sinks.detach().flatten().clone()
        self._queries = _LastQueries(
            query.clone(),
            {
                "scaling": options.get("scaling"),
                "softcap": options.get("softcap"),
                "first_valid": None if padding is None else padding.first_valid,
                "sink_logits": sinks,
            },
        )
        window = options.get("sliding_window")
        beside = {
            "a mask not known to be causal with padding on the left": other_mask,
            "a position bias": options.get("position_bias") is not None,
            "sinks other than one a head": other_sinks,
            "a sliding window": window is not None and window < self.get_seq_length(),
        }
        self.measured_without |= {name for name, there in beside.items() if there}

    # Steps at places in device memory: see captured_steps.py

    def pack_due(self) -> None:
        """Pack what has left the windows, without waiting for a turn; forget the last update."""
        self.settle()
        for history in self.histories:
            history.pack()
        self._latest = self.kept = None

    @property
    def attention(self) -> PackedAttention | None:
        """Attention to the tokens as they are packed; None before the first."""
        return self._attention

    @property
    def padded(self) -> bool:
        """Whether tokens of some sequences are known to be padding."""
        found = self.histories[0].unpacked.own_first, self._padding
        return any(each is not None and each.last for each in found)

    # Changes

    def as_it_is(self, most_bytes: int = 0) -> Kept:
        """Return what the layer is like; tokens that are not packed by reference.

        Of a prompt that is yet to be packed, and has more bytes of K or V than given, no more than
        a window and two blocks, copied: all of it would take much memory for a forward pass.
        """
        length, raw, plans = 0, [], self.plans
        most = plans.options.window + 2 * plans.options.block_tokens
        lossless = self._open is self._open_lossless or plans.why_lossless
        for history in self.histories:
            head, tail, packed = history.unpacked.head, history.unpacked.tail, history.packed.length
            memory, tokens = tail.memory, tail.length
            length = head.shape[2] + packed + tokens
            if lossless:
                continue
            if tokens > most and memory.nbytes > most_bytes:
                memory = memory[:, :, tokens - most : tokens].clone()
                packed, tokens = packed + tokens - most, most
            raw.append(RawTokens(head, memory, tokens, packed))
        learns = plans.learns if length and not self.histories[0].packed.length else False
        more = learns, self._waits, self._new_tokens, self._queries, self.measured_without
        return Kept(length, raw, more)

    def put_back(self, kept: Kept) -> None:
        """Put the layer back to what it was like, and forget what was learnt since."""
        super().put_back(kept)
        if kept.length and kept.more:
            learns, self._waits, self._new_tokens, self._queries, self.measured_without = kept.more
            if learns:
                self.plans.reset()

    def reset(self) -> None:
        """Forget all tokens, and what was learnt of them."""
        super().reset()
        self.plans.reset()
        self._forget()

    def prepare_take(self, take: Take) -> Commit:
        """Return a commit that replaces the sequences, of the queries too."""
        change, queries = super().prepare_take(take), self._queries
        taken = None if queries is None else queries.taken(take)

        def commit() -> None:
            change()
            self._queries = taken

        return commit

    def prepare_keep(self, length: int) -> Commit:
        """Return a commit that keeps the first tokens, and the queries of those."""
        change = super().prepare_keep(length)
        removed = self.get_seq_length() - length

        def commit() -> None:
            change()
            if self._queries is not None and removed > 0:
                self._queries = self._queries.without(removed)

        return commit

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the last update, whose handles belong to a forward pass."""
        return {**super().__getstate__(), "_latest": None}


class Updated(Protocol):
    """A layer, as far as its updates know it; see `KVCompLayer`."""

    changes: int

    def latest(self, update: LayerUpdate) -> bool:
        """Return whether an update is the last one."""
        ...

    def read(self, update: LayerUpdate) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all K and V as they were after an update, decoded."""
        ...

    def attend_packed(
        self, query: torch.Tensor, padding: Padding | None, options: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """Return attention to the tokens as they are packed; None where that is not served."""
        ...

    def see(
        self,
        query: torch.Tensor,
        padding: Padding | None,
        options: Mapping[str, Any],
        *,
        other_mask: bool = False,
    ) -> None:
        """Keep the last queries until codecs are learnt."""
        ...

    def end_pass(self) -> None:
        """Do what is to be done once an update has been attended to."""
        ...


class LayerUpdate:
    """One update of a layer, until the attention function has read it.

    Parameters
    ----------
    layer : Updated
        The layer.
    new : (torch.Tensor, torch.Tensor)
        The new K and V ``[B, H, n, D]``.
    length : int
        Tokens of a sequence with them.
    """

    def __init__(self, layer: Updated, new: tuple[torch.Tensor, torch.Tensor], length: int) -> None:
        self._layer = layer
        self.since = layer.changes
        #: Puts all layers back to what they were like before the forward pass.
        self.undo: Callable[[], None] | None = None
        self._new = new
        self.length = length
        #: The layer whose words take the place of those that were read.
        self.behind_next: KVCompLayer | None = None
        self._dense: tuple[torch.Tensor, torch.Tensor] | None = None
        self._seen = False
        if new[0].shape[2] == length:  # a prompt attends to itself
            self._dense = new

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all K and V; gradients reach the new ones."""
        if self._dense is None:
            if self.since != self._layer.changes:
                raise BitslabError(
                    "K/V handle: the cache was reset, or tokens of it removed or reordered, since "
                    "the update that returned this handle; read K and V before that"
                )
            try:
                dense = self._layer.read(self)
            except BaseException:
                self.failed()
                raise
            if torch.is_grad_enabled() and any(t.requires_grad for t in self._new):
                first = self.length - self._new[0].shape[2]
                keys, values = (
                    torch.cat([tokens[:, :, :first], new], dim=2)
                    for tokens, new in zip(dense, self._new, strict=True)
                )
                dense = keys, values
            self._dense = dense
        return self._dense

    def failed(self) -> None:
        """Undo the forward pass, once, after an error of who reads K and V, if it is the last."""
        undo, self.undo = self.undo, None
        if undo is not None and self.since == self._layer.changes:
            undo()

    def attend_packed(
        self, query: torch.Tensor, padding: Padding | None, options: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """Return attention to the packed tokens ``[B, q, query heads, D]``, where it is served."""
        keys, values = self._new
        window = options.get("sliding_window")
        if (
            self._dense is not None
            or not self._layer.latest(self)
            or (
                torch.is_grad_enabled()
                and (query.requires_grad or keys.requires_grad or values.requires_grad)
            )
            or options.get("dropout")
            or options.get("position_bias") is not None
            or (window is not None and window < self.length)
        ):
            return None
        out = self._layer.attend_packed(query, padding, options)
        if out is not None and self.behind_next is not None:
            self.behind_next.prefetch_words(early=True)
        return out

    def see(
        self,
        query: torch.Tensor,
        padding: Padding | None,
        options: Mapping[str, Any],
        *,
        other_mask: bool = False,
    ) -> None:
        """Keep the queries, of the last update; not those of layers that share its K and V.

        Parameters
        ----------
        query, padding, options
            As attention takes them.
        other_mask : bool
            Whether there was a mask that `padding` does not describe.
        """
        if self._layer.latest(self) and not self._seen:
            self._layer.see(query, padding, options, other_mask=other_mask)
            self._layer.end_pass()
        self._seen = True


@dataclass(frozen=True, eq=False)
class _LastQueries:
    """The last queries of a layer, ``[B, query heads, n, D]``, and how attention takes them."""

    tokens: torch.Tensor
    options: dict[str, Any]

    def taken(self, take: Take) -> _LastQueries:
        """Return those of other sequences."""
        first = self.options["first_valid"]
        options = {**self.options, "first_valid": None if first is None else take(first, 0)}
        return _LastQueries(take(self.tokens, 0), options)

    def without(self, tokens: int) -> _LastQueries | None:
        """Return those before the last ones; None where there are none."""
        left = self.tokens.shape[2] - tokens
        return _LastQueries(self.tokens[:, :, :left], self.options) if left > 0 else None
