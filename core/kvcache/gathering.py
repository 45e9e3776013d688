"""Chosen tokens of histories, gathered and decoded row by row where the packed words lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..engine.kernels.cuda.stream import on_stream
from ..engine.kernels.format import MAX_SLABS
from .era import Era
from .history import PackedHistory, Revision
from .link import Link
from .selection import Selection, spread


class Gathered:
    """Chosen tokens on their way.

    Parameters
    ----------
    parts : list of torch.Tensor
        Of each history, ``[B, H, n, D]``, contiguous.
    revisions : list of Revision
        What they were gathered from, of each history.
    event : torch.cuda.Event, optional
        Passed when they are there; None when they are.
    """

    def __init__(
        self,
        parts: list[torch.Tensor],
        revisions: list[Revision],
        event: torch.cuda.Event | None,
    ) -> None:
        self._parts = parts
        self._revisions = revisions
        self._event = event

    def holds(self, histories: Sequence[PackedHistory]) -> bool:
        """Tell whether it was gathered from these histories as they are now."""
        return self._revisions == _revisions(histories)

    def get(self) -> list[torch.Tensor]:
        """Return the tokens, for the current stream, which waits for them."""
        if self._event is not None:
            current = torch.cuda.current_stream(self._parts[0].device)
            current.wait_event(self._event)
            for part in self._parts:
                part.record_stream(current)
        return self._parts


class RowGatherer:
    """Gathers chosen tokens of histories.

    On a GPU the rows are read over the link from page-locked memory and decoded by one kernel, on
    the link's stream for decoding; the host waits for nothing, unless codecs have been fitted
    again, and the rows of each are to be told apart.

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
        # What lasts is written to later, perhaps outside the inference mode of a first pass.
        with torch.inference_mode(False):
            self._counters = torch.zeros(2 * (MAX_SLABS + 1), dtype=torch.int64, device=link.device)

    @property
    def moved_bytes(self) -> int:
        """Bytes of the words of all rows that were gathered from host memory; waits for a GPU."""
        self._link.quiesce()
        return self._raw_bytes + 4 * int(self._counters[-1])

    def gather(self, histories: Sequence[PackedHistory], selection: Selection) -> Gathered:
        """Start to gather the chosen tokens, and those packed behind where they were chosen.

        Parameters
        ----------
        histories : sequence of PackedHistory
            Of the link, with at least ``selection.packed`` packed tokens each.
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
        decodes.wait_stream(torch.cuda.current_stream(self._link.device))
        # New words arrive on the stream of the copies.
        decodes.wait_stream(streams.copies)
        selection.groups.record_stream(decodes)
        with on_stream(decodes):
            parts = [self._gather(history, selection) for history in histories]
            event = decodes.record_event()
        return Gathered(parts, _revisions(histories), event)

    def _gather(self, history: PackedHistory, selection: Selection) -> torch.Tensor:
        each = history.tokens_per_row
        rows = spread(selection.groups, selection.group_tokens // each)
        batch, heads, _ = rows.shape
        behind = torch.arange(
            selection.packed // each, history.packed_tokens // each, device=rows.device
        )
        rows = torch.cat([rows, behind.expand(batch, heads, -1)], dim=2)
        words, from_host = history.words.merged(), history.words.on_host
        # An era whose first block is being packed holds nothing yet.
        eras = [era for era in history.eras if era.n_blocks]
        kept = eras[0].rows
        row_bytes = kept.row_bytes
        out = torch.empty((rows.numel(), row_bytes), dtype=torch.uint8, device=rows.device)
        begin = 0
        for era in eras:
            end = begin + era.tokens // each
            if len(eras) == 1:
                self._decode(era, words, era.row_ids(rows).flatten(), out, from_host)
            else:
                inside = (rows >= begin) & (rows < end)
                ids = era.row_ids((rows - begin).clamp(0, end - begin - 1))[inside]
                part = torch.empty((ids.shape[0], row_bytes), dtype=torch.uint8, device=ids.device)
                self._decode(era, words, ids, part, from_host)
                out[inside.flatten()] = part
            begin = end
        return out.view(kept.dtype).view(batch, heads, -1, kept.dim)

    def _decode(
        self,
        era: Era,
        words: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor,
        from_host: bool,
    ) -> None:
        counters = self._counters if from_host else None
        era.decode_rows(words, ids, out, self._sm_budget, counters)
        if era.layout is None and from_host:
            self._raw_bytes += out.nbytes


def _revisions(histories: Sequence[PackedHistory]) -> list[Revision]:
    return [history.revision for history in histories]
