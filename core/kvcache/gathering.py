"""Chosen tokens of histories, gathered and decoded row by row where the packed words lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..engine.kernels.format import MAX_SLABS, ceil_div
from .history import PackedHistory
from .link import Link
from .packed_tokens import Revision
from .segment import Segment
from .selection import Selection, spread


class Gathered:
    """Chosen tokens of histories, in flight or gathered.

    Parameters
    ----------
    tokens : list of torch.Tensor
        Of each history, ``[B, H, n, D]``, contiguous.
    revisions : list of Revision
        The revision of each history that they were gathered from.
    event : torch.cuda.Event, optional
        Passed when they are gathered; None when they are.
    """

    def __init__(
        self,
        tokens: list[torch.Tensor],
        revisions: list[Revision],
        event: torch.cuda.Event | None,
    ) -> None:
        self._tokens = tokens
        self._revisions = revisions
        self._event = event

    def holds(self, histories: Sequence[PackedHistory]) -> bool:
        """Return whether it was gathered from these histories, unchanged since."""
        return self._revisions == _revisions(histories)

    def get(self) -> list[torch.Tensor]:
        """Return the tokens, for the current stream, which waits for them."""
        if self._event is not None:
            current = torch.cuda.current_stream(self._tokens[0].device)
            current.wait_event(self._event)
            for piece in self._tokens:
                piece.record_stream(current)
        return self._tokens


class RowGatherer:
    """Gathers chosen tokens of histories.

    On a GPU the rows are read over the link from page-locked memory and decoded by one kernel, on
    the link's stream for decoding; the host waits for nothing, unless there are several
    segments, whose rows have to be separated.

    Parameters
    ----------
    link : Link
        Whose device's histories are read.
    sm_budget : int or None
        Multiprocessors that decoding may use; all when None.
    """

    def __init__(self, link: Link, sm_budget: int | None) -> None:
        self._link = link
        self._sm_budget = sm_budget
        self._raw_bytes = 0
        # Written to later, perhaps outside the inference mode of a first pass.
        with torch.inference_mode(False):
            self._counters = torch.zeros(2 * (MAX_SLABS + 1), dtype=torch.int64, device=link.device)

    @property
    def moved_bytes(self) -> int:
        """Bytes of the words of all rows that were gathered from host memory; waits for a GPU."""
        self._link.quiesce()
        return self._raw_bytes + 4 * int(self._counters[-1])

    def gather(self, histories: Sequence[PackedHistory], selection: Selection) -> Gathered:
        """Start to gather the chosen tokens, and the packed ones behind their range.

        Parameters
        ----------
        histories : sequence of PackedHistory
            Of the link, each with at least the groups among which the selection was made; of what
            was cut within a row, the last one alone.
        selection : Selection
            Made on the current stream.

        Returns
        -------
        Gathered
            The chosen tokens in the order of time, of each history.
        """
        streams = self._link.streams
        if streams is None:
            return Gathered(
                [self._gather(h, selection) for h in histories], _revisions(histories), None
            )
        decodes = streams.decodes
        decodes.follow(torch.cuda.current_stream(self._link.device))
        # New words are written on the stream of the copies.
        decodes.follow(streams.copies.stream)
        decodes.keep(selection.groups)
        with decodes.on():
            tokens = [self._gather(history, selection) for history in histories]
            event = decodes.record()
        return Gathered(tokens, _revisions(histories), event)

    def _gather(self, history: PackedHistory, selection: Selection) -> torch.Tensor:
        each = history.packed.tokens_per_row
        rows = spread(selection.groups, selection.group_tokens // each)
        batch, heads, _ = rows.shape
        packed = history.packed_tokens
        known = selection.n_groups * (selection.group_tokens // each)
        behind = torch.arange(known, ceil_div(packed, each), device=rows.device)
        rows = torch.cat([rows, behind.expand(batch, heads, -1)], dim=2)
        words, from_host = history.words.merged(), history.words.on_host
        # A segment whose first block is in flight holds nothing yet.
        segments = [segment for segment in history.segments if segment.n_blocks]
        kept = segments[0].rows
        row_bytes = kept.row_bytes
        out = torch.empty((rows.numel(), row_bytes), dtype=torch.uint8, device=rows.device)
        begin = 0
        for segment in segments:
            end = begin + ceil_div(segment.tokens, each)
            if len(segments) == 1:
                self._decode(segment, words, segment.row_ids(rows).flatten(), out, from_host)
            else:
                inside = (rows >= begin) & (rows < end)
                ids = segment.row_ids((rows - begin).clamp(0, end - begin - 1))[inside]
                piece = torch.empty((ids.shape[0], row_bytes), dtype=torch.uint8, device=ids.device)
                self._decode(segment, words, ids, piece, from_host)
                out[inside.flatten()] = piece
            begin = end
        found = out.view(kept.dtype).view(batch, heads, -1, kept.dim)
        return found[:, :, : found.shape[2] + packed - ceil_div(packed, each) * each]

    def _decode(
        self,
        segment: Segment,
        words: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor,
        from_host: bool,
    ) -> None:
        counters = self._counters if from_host else None
        segment.decode_rows(words, ids, out, self._sm_budget, counters)
        if segment.kernels is None and from_host:
            self._raw_bytes += out.nbytes


def _revisions(histories: Sequence[PackedHistory]) -> list[Revision]:
    return [history.packed.revision for history in histories]
