"""PackedAttention: attention to the tokens of a layer as they are packed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import ref

import torch

from ..engine.kernels.cuda import CudaKernels, kernels_on
from ..engine.kernels.cuda.prepared_attention import PreparedAttention, PreparedOwn, Run
from ..engine.kernels.format import TableStorage
from ..engine.kernels.spans import MAX_ROWS, OwnTokens, RawRun, Span
from ..engine.kernels.tile_format import Granularity, TileTables
from ..engine.kernels.tile_rows import TileKernels
from .history import PackedHistory
from .packed_tokens import Revision
from .reader import HistoryReader
from .segment import Segment
from .token_steps import Reads

#: Passes over the tokens for one forward pass, each of MAX_ROWS query rows of a head, up to which
#: packed tokens are attended to; with more of them decoding once is faster.
MOST_PASSES = 4
#: Places of words for which a layer's attention is kept ready: those of the reader's buffers.
MOST_PLACES = 2


class PackedAttention:
    """Attention to the K and V of one layer, where they are tiles that the kernels read.

    Parameters
    ----------
    reader : HistoryReader
        That of the histories.
    histories : sequence of PackedHistory
        Of K and V, ``[B, H, T, D]`` each, alike.
    """

    def __init__(self, reader: HistoryReader, histories: Sequence[PackedHistory]) -> None:
        self._reader = reader
        self._histories = histories
        self._plan: _Plan | None = None

    def serves(self, query: torch.Tensor) -> bool:
        """Return whether `attend` takes queries ``[B, query heads, q, D]``."""
        keys = self._histories[0]
        like = keys.unpacked.tail.memory
        if query.dtype != like.dtype or query.device != like.device:
            return False
        batch, query_heads, n, dim = query.shape
        groups, rest = divmod(query_heads, like.shape[1] or 1)
        if rest or not 1 <= groups <= MAX_ROWS or not batch * n * dim:
            return False
        return n * groups <= MOST_PASSES * MAX_ROWS and self._planned().served

    def here(self) -> Reads | None:
        """Return what attention reads, whose words lie on the device; None if no tiles are there.

        It holds until packed or first tokens change.
        """
        plan = self._planned()
        return plan.here() if plan.served else None

    def attend(
        self,
        query: torch.Tensor,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        first_valid: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention to all tokens, on the current stream.

        On a GPU words of the host are those that `HistoryReader.prefetch_words` has fetched, or
        they are fetched now.

        Parameters
        ----------
        query : torch.Tensor
            ``[B, query heads, q, D]``, of the last q tokens.
        scaling : float, optional
            ``D ** -0.5`` when left out.
        softcap, sinks
            As attention has them; sinks ``[query heads]`` are logits that take part in the sum.
        first_valid : torch.Tensor, optional
            int32 ``[B]``: the first token of each sequence that is no padding.

        Returns
        -------
        torch.Tensor
            ``[B, q, query heads, D]`` of the query's dtype.
        """
        reader, histories = self._reader, self._histories
        if not histories[0].packed.words.crosses:
            return self._attend(self._planned().here(), query, scaling, softcap, sinks, first_valid)
        words = reader.stage_crossing(histories).words
        try:
            there = self._planned().there(words)
            return self._attend(there, query, scaling, softcap, sinks, first_valid)
        finally:
            reader.done_words(histories)

    def _attend(
        self,
        there: _Staged,
        query: torch.Tensor,
        scaling: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        first_valid: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the kernels of the query's device."""
        scaling = query.shape[3] ** -0.5 if scaling is None else scaling
        kernels = _gpu_kernels(query.device)  # raises the error of an earlier call there
        length = self._histories[0].length
        if kernels is None:
            from ..engine.kernels.cpu.attend import attend

            return attend(
                query,
                there.spans,
                there.raw(),
                length=length,
                scaling=scaling,
                softcap=softcap,
                sinks=sinks,
                first_valid=first_valid,
                own=there.own(),
            )
        key = query.shape, scaling, softcap, sinks is None, first_valid is None
        # On all multiprocessors: the computation waits for it, unlike for what is decoded ahead.
        prepared = there.prepared.get(key)
        if prepared is None:
            prepared = there.prepared[key] = kernels.prepare_attention(
                query,
                there.spans,
                there.raw(),
                length=length,
                scaling=scaling,
                softcap=softcap,
                sinks=sinks,
                first_valid=first_valid,
                own=there.own(),
            )
        runs, kept = there.runs()
        own = None if self._histories[0].unpacked.own_first is None else there.prepared_own()
        return prepared(query, runs, length, sinks, first_valid, own)

    def _planned(self) -> _Plan:
        """Return the plan, made anew where histories have changed."""
        plan = self._plan
        if plan is None or not plan.serves(self._histories):
            plan = self._plan = _Plan(self._histories)
        return plan

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": None}


class _Plan:
    """What attention reads between two changes of the packed tokens, wherever their words lie.

    Attributes
    ----------
    sides : list of _Side
        K and V.
    pieces : list of (int, int, bool)
        Begin and end of all tokens up to the last packed one, and whether they are tiles on both
        sides.
    end : int
        Where they end.
    served : bool
        Whether there are tiles of K and of V.
    """

    def __init__(self, histories: Sequence[PackedHistory]) -> None:
        self._histories = histories
        self._revisions: list[ref[Revision]] = [
            ref(history.packed.revision) for history in histories
        ]
        self._heads = [history.unpacked.head for history in histories]
        keys, values = self.sides = [_Side(history) for history in histories]
        self.pieces = [
            (begin, end, _spanned(keys, values, begin))
            for begin, end in pairwise(sorted({*keys.edges, *values.edges}))
        ]
        self.end = max(keys.edges[-1], values.edges[-1])
        self.served = any(map(_key_tiles, histories[0].segments)) and any(
            map(_value_tiles, histories[1].segments)
        )
        #: By the addresses of the words.
        self._staged: dict[tuple[int, ...], _Staged] = {}
        self._here: _Staged | None = None

    def serves(self, histories: Sequence[PackedHistory]) -> bool:
        """Return whether it is of these histories, unchanged since."""
        for i, history in enumerate(histories):
            if self._revisions[i]() is not history.packed.revision:
                return False
            if self._heads[i] is not history.unpacked.head:
                return False
        return True

    def here(self) -> _Staged:
        """Return what attention reads, with words where they are kept."""
        if self._here is None or self._here.on_host:
            self._here = self.there([history.words.fetch() for history in self._histories])
        return self._here

    def there(self, words: Sequence[torch.Tensor]) -> _Staged:
        """Return what attention reads, with words in these tensors."""
        of_keys, of_values = words
        key = of_keys.data_ptr(), of_values.data_ptr()
        found = self._staged.get(key)
        if found is None:
            if len(self._staged) == MOST_PLACES:
                self._staged.clear()
            found = self._staged[key] = _Staged(self, self._histories, words)
        return found


class _Staged:
    """What attention reads, with the words in one place.

    Attributes
    ----------
    spans : list of Span
        Tokens that are tiles on both sides.
    prepared : dict
        The kernels, by what they depend on.
    on_host : bool
        Whether the words are counted as fetched at each pass.
    """

    def __init__(
        self, plan: _Plan, histories: Sequence[PackedHistory], words: Sequence[torch.Tensor]
    ) -> None:
        # Not the plan, which holds this: what a change drops is to be freed at once.
        self._sides, self._end = plan.sides, plan.end
        self._histories = histories
        self._words = words
        keys, values = plan.sides
        self.spans = [
            _span(keys, values, words, begin, end) for begin, end, tiles in plan.pieces if tiles
        ]
        self.prepared: dict[object, PreparedAttention] = {}
        self.on_host = any(history.words.on_host for history in histories)
        self._fixed: list[tuple[Run, object]] = []
        self._begins: list[tuple[int, int]] = []  # of tokens that are no tiles
        for begin, end, tiles in plan.pieces:
            if tiles or begin == end:
                continue
            if end <= min(keys.edges[1], values.edges[1]):
                self._fixed.append(Run.of(begin, *self._tokens(begin, end)))
            self._begins.append((begin, end))
        self._changing = self._begins[len(self._fixed) :]
        for side, history in zip(plan.sides, histories, strict=True):
            more = plan.end - side.edges[-1]  # packed of the other side alone
            history.unpacked.look_for_own(history.tail[:, :, :more], history.packed.length)
        self._own: tuple[OwnTokens, PreparedOwn] | None = None
        self._tail: tuple[torch.Tensor, torch.Tensor] | None = None
        self._tail_run: Run | None = None

    def _tokens(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of tokens of one piece each."""
        (keys, values), (k_words, v_words) = self._sides, self._words
        return keys.tokens(k_words, begin, end), values.tokens(v_words, begin, end)

    def raw(self, ends: tuple[int, int] | None = None) -> list[RawRun]:
        """Return all tokens that are no tiles; of the tails' memory so many where `ends` is given.

        Parameters
        ----------
        ends : (int, int), optional
            Tokens of K's and of V's tail, with some that are not there yet.
        """
        found = [(begin, *self._tokens(begin, end)) for begin, end in self._begins]
        tails = [history.unpacked.tail for history in self._histories]
        lengths = [tail.length for tail in tails] if ends is None else ends
        keys, values = (
            tail.memory[:, :, self._end - side.edges[-1] : length]
            for side, tail, length in zip(self._sides, tails, lengths, strict=True)
        )
        return [*found, (self._end, keys, values)] if keys.shape[2] else found

    def own(self) -> OwnTokens | None:
        """Return the own first tokens of sequences behind padding, if any are kept."""
        of_keys, of_values = (history.unpacked.own_first for history in self._histories)
        if of_keys is None or of_values is None:
            return None
        keys, values = of_keys.tokens, of_values.tokens
        if keys is None or values is None:
            return None
        return OwnTokens(of_keys.positions, keys, values, self._end)

    def prepared_own(self) -> PreparedOwn | None:
        """Return `own` as the kernels of a GPU take it."""
        own, here = self.own(), self._own
        if own is None:
            return None
        if here is None or not own.same_as(here[0]):
            here = self._own = own, PreparedOwn(own)
        return here[1]

    def runs(self, ends: tuple[int, int] | None = None) -> tuple[list[Run], list[object]]:
        """Return `raw` as the kernels of a GPU take it, and what that points to."""
        runs = [run for run, _ in self._fixed]
        kept: list[object] = []
        for begin, end in self._changing:
            run, tensors = Run.of(begin, *self._tokens(begin, end))
            runs.append(run)
            kept.append(tensors)
        of_keys, of_values = self._histories
        keys, values = of_keys.unpacked.tail, of_values.unpacked.tail
        memory = keys.memory, values.memory
        if self._tail is None or memory[0] is not self._tail[0] or memory[1] is not self._tail[1]:
            self._take_tail(memory)
        length = keys.length if ends is None else ends[0]
        tokens = length + self._sides[0].edges[-1] - self._end
        if self._tail_run is not None:
            runs.append(self._tail_run.of_tokens(tokens))
        elif tokens:
            run, tensors = Run.of(*self.raw(ends)[-1])
            runs.append(run)
            kept.append(tensors)
        return runs, kept

    def _take_tail(self, memory: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Set the run of a tail that lies in other memory, of no tokens yet."""
        self._tail = memory
        keys, values = (
            tail[:, :, self._end - side.edges[-1] :]
            for side, tail in zip(self._sides, memory, strict=True)
        )
        self._tail_run = None
        if Run.serves(keys, values):
            self._tail_run = Run.of(self._end, keys, values)[0]


class _Side:
    """The pieces of K or V: first tokens, segments, and the tail.

    Attributes
    ----------
    edges : list of int
        Where the first tokens and each segment begin, and where the last one ends.
    """

    def __init__(self, history: PackedHistory) -> None:
        self._history = history
        self._segments = [segment for segment in history.segments if segment.n_blocks]
        self._ids: dict[tuple[int, int], torch.Tensor] = {}
        self.edges = [0]
        at = history.head.shape[2]
        for segment in self._segments:
            self.edges.append(at)
            at += segment.tokens
        self.edges.append(at)

    def at(self, token: int) -> tuple[int, Segment | None]:
        """Return the segment of a token and where that begins; None for tokens not packed."""
        i = bisect_right(self.edges, token) - 2
        if 0 <= i < len(self._segments):
            return self.edges[i + 1], self._segments[i]
        return 0, None

    def tiles(self, words: torch.Tensor, token: int, end: int) -> _Tiles:
        """Return the tiles of tokens of one segment, of which the first begins one."""
        begin, segment = self.at(token)
        assert segment is not None and isinstance(segment.kernels, TileKernels)
        each = segment.rows.tokens_per_row
        first, last = (token - begin) // each, -(-(end - begin) // each)
        ids = self._ids.get((token, end))
        if ids is None:
            ids = segment.ids().view(segment.batch * segment.rows.heads, -1)[:, first:last]
            ids = self._ids[token, end] = ids.flatten()
        return _Tiles(segment.table(words), segment.kernels.tables, ids)

    def tokens(self, words: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Return tokens of one piece, ``[B, H, end - begin, D]``, decoded."""
        history = self._history
        if begin >= self.edges[-1]:
            return history.tail[:, :, begin - self.edges[-1] : end - self.edges[-1]]
        start, segment = self.at(begin)
        if segment is None:
            return history.head[:, :, begin:end]
        rows, each = segment.rows, segment.rows.tokens_per_row
        first, last = (begin - start) // each, -(-(end - start) // each)
        numbers = torch.arange(first, last, device=history.device)
        ids = segment.row_ids(numbers.expand(segment.batch, rows.heads, -1)).flatten()
        out = torch.empty((ids.shape[0], rows.row_bytes), dtype=torch.uint8, device=ids.device)
        segment.decode_rows(words, ids, out, None)
        found = out.view(rows.dtype).view(segment.batch, rows.heads, -1, rows.dim)
        skipped = begin - start - first * each
        return found[:, :, skipped : skipped + end - begin]


@dataclass(frozen=True, eq=False)
class _Tiles:
    """One side of a `Span`."""

    table: TableStorage
    tables: TileTables
    ids: torch.Tensor


def _spanned(keys: _Side, values: _Side, begin: int) -> bool:
    """Return whether tokens of one piece on both sides are tiles that the kernels take."""
    (k_begin, k), (v_begin, v) = keys.at(begin), values.at(begin)
    if k is None or v is None or not (_key_tiles(k) and _value_tiles(v)):
        return False
    if (_granularity(k) is Granularity.LOSSLESS) != (_granularity(v) is Granularity.LOSSLESS):
        return False
    each = k.rows.tokens_per_row
    return v.rows.tokens_per_row == each and not (
        (begin - k_begin) % each or (begin - v_begin) % each
    )


def _span(keys: _Side, values: _Side, words: Sequence[torch.Tensor], begin: int, end: int) -> Span:
    """Return the span of tokens that are `_spanned`."""
    of_keys, of_values = keys.tiles(words[0], begin, end), values.tiles(words[1], begin, end)
    return Span(
        k=of_keys.table,
        k_tables=of_keys.tables,
        k_ids=of_keys.ids,
        v=of_values.table,
        v_tables=of_values.tables,
        v_ids=of_values.ids,
        first_token=begin,
        tokens=end - begin,
    )


def _key_tiles(segment: Segment) -> bool:
    return _granularity(segment) in (Granularity.CHANNEL, Granularity.LOSSLESS)


def _value_tiles(segment: Segment) -> bool:
    return _granularity(segment) in (Granularity.TOKEN_LEVEL, Granularity.LOSSLESS)


def _granularity(segment: Segment) -> Granularity | None:
    kernels = segment.kernels
    return kernels.tables.format.granularity if isinstance(kernels, TileKernels) else None


def _gpu_kernels(device: torch.device) -> CudaKernels | None:
    """Return the kernels of a GPU; None for the CPU."""
    return None if device.type == "cpu" else kernels_on(device)
