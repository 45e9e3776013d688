"""PackedAttention: attention to the tokens of a layer as they are packed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import ref

import torch

from ..engine.kernels.cuda import kernels_on
from ..engine.kernels.format import TableStorage
from ..engine.kernels.spans import MAX_ROWS, RawRun, Span
from ..engine.kernels.tile_format import Granularity, TileTables
from ..engine.kernels.tile_rows import TileKernels
from .history import PackedHistory
from .packed_tokens import Revision
from .reader import HistoryReader
from .segment import Segment

#: Passes over the tokens for one forward pass, each of MAX_ROWS query rows of a head, up to which
#: packed tokens are attended to; with more of them decoding once is faster.
MOST_PASSES = 4


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
        keys, values = self._histories
        if query.dtype != keys.tail.dtype or query.device != keys.device:
            return False
        groups, rest = divmod(query.shape[1], max(1, keys.tail.shape[1]))
        if rest or not 1 <= groups <= MAX_ROWS or not query.numel():
            return False
        if query.shape[2] * groups > MOST_PASSES * MAX_ROWS:
            return False
        return any(map(_key_tiles, keys.segments)) and any(map(_value_tiles, values.segments))

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

        On a GPU the words are those that `HistoryReader.prefetch` has staged, or are staged now.

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
        words = self._reader.stage(self._histories)
        try:
            plan = self._planned(words)
            keys, values = plan.sides
            raw = [
                (begin, keys.tokens(begin, end), values.tokens(begin, end))
                for begin, end in plan.raw
            ]
            raw += plan.last(self._histories)
            return _attend(
                query,
                plan.spans,
                raw,
                length=self._histories[0].length,
                scaling=query.shape[3] ** -0.5 if scaling is None else scaling,
                softcap=softcap,
                sinks=sinks,
                first_valid=first_valid,
                sm_budget=self._reader.sm_budget,
            )
        finally:
            self._reader.done(self._histories)

    def _planned(self, words: Sequence[torch.Tensor]) -> _Plan:
        """Return the plan, made anew where histories have changed or words lie elsewhere."""
        plan = self._plan
        if plan is None or not plan.serves(self._histories, words):
            plan = self._plan = _Plan(self._histories, words)
        return plan

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": None}


class _Plan:
    """What attention reads between two changes of the packed tokens.

    Attributes
    ----------
    sides : list of _Side
        K and V.
    spans : list of Span
        Tokens that are tiles on both sides.
    raw : list of (int, int)
        Begin and end of other tokens up to the last packed one.
    """

    def __init__(self, histories: Sequence[PackedHistory], words: Sequence[torch.Tensor]) -> None:
        self._revisions: list[ref[Revision]] = [ref(history.revision) for history in histories]
        self._words = [(there.data_ptr(), there.shape[0]) for there in words]
        self.sides = [_Side(*both) for both in zip(histories, words, strict=True)]
        keys, values = self.sides
        self.spans: list[Span] = []
        self.raw: list[tuple[int, int]] = []
        for begin, end in pairwise(sorted({*keys.edges, *values.edges})):
            span = _span(keys, values, begin, end)
            if span is None:
                self.raw.append((begin, end))
            else:
                self.spans.append(span)
        self._end = max(keys.edges[-1], values.edges[-1])

    def serves(self, histories: Sequence[PackedHistory], words: Sequence[torch.Tensor]) -> bool:
        """Return whether it is of these histories, unchanged since, and of words there."""
        same = all(
            revision() is history.revision
            for revision, history in zip(self._revisions, histories, strict=True)
        )
        return same and self._words == [(t.data_ptr(), t.shape[0]) for t in words]

    def last(self, histories: Sequence[PackedHistory]) -> list[RawRun]:
        """Return the tokens behind all packed ones."""
        keys, values = (
            history.tail[:, :, self._end - side.edges[-1] :]
            for side, history in zip(self.sides, histories, strict=True)
        )
        return [(self._end, keys, values)] if keys.shape[2] else []


class _Side:
    """The pieces of K or V: first tokens, segments, and the tail.

    Attributes
    ----------
    edges : list of int
        Where the first tokens and each segment begin, and where the last one ends.
    """

    def __init__(self, history: PackedHistory, words: torch.Tensor) -> None:
        self._history = history
        self._words = words
        self._segments = [segment for segment in history.segments if segment.n_blocks]
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

    def tiles(self, token: int, end: int) -> _Tiles:
        """Return the tiles of tokens of one segment, of which the first begins one."""
        begin, segment = self.at(token)
        assert segment is not None and isinstance(segment.kernels, TileKernels)
        each = segment.rows.tokens_per_row
        first, last = (token - begin) // each, -(-(end - begin) // each)
        ids = segment.ids().view(segment.batch * segment.rows.heads, -1)[:, first:last]
        return _Tiles(segment.table(self._words), segment.kernels.tables, ids.flatten())

    def tokens(self, begin: int, end: int) -> torch.Tensor:
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
        segment.decode_rows(self._words, ids, out, None)
        found = out.view(rows.dtype).view(segment.batch, rows.heads, -1, rows.dim)
        skipped = begin - start - first * each
        return found[:, :, skipped : skipped + end - begin]


@dataclass(frozen=True, eq=False)
class _Tiles:
    """One side of a `Span`."""

    table: TableStorage
    tables: TileTables
    ids: torch.Tensor


def _span(keys: _Side, values: _Side, begin: int, end: int) -> Span | None:
    """Return the span of tokens of one piece on both sides; None where both are no tiles alike."""
    (k_begin, k), (v_begin, v) = keys.at(begin), values.at(begin)
    if k is None or v is None or not (_key_tiles(k) and _value_tiles(v)):
        return None
    each = k.rows.tokens_per_row
    if v.rows.tokens_per_row != each or (begin - k_begin) % each or (begin - v_begin) % each:
        return None
    of_keys, of_values = keys.tiles(begin, end), values.tiles(begin, end)
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
    return _granularity(segment) is Granularity.CHANNEL


def _value_tiles(segment: Segment) -> bool:
    return _granularity(segment) is Granularity.TOKEN_LEVEL


def _granularity(segment: Segment) -> Granularity | None:
    kernels = segment.kernels
    return kernels.tables.format.granularity if isinstance(kernels, TileKernels) else None


def _attend(
    query: torch.Tensor, spans: Sequence[Span], raw: Sequence[RawRun], **options: Any
) -> torch.Tensor:
    """Run the kernels of the query's device."""
    sm_budget = options.pop("sm_budget")
    if query.device.type == "cpu":
        from ..engine.kernels.cpu.attend import attend

        return attend(query, spans, raw, **options)
    kernels = kernels_on(query.device)  # raises the error of an earlier call there
    return kernels.attend(query, spans, raw, sm_budget=sm_budget, **options)
