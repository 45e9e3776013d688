"""Counts of lookups."""

from __future__ import annotations

from .residents import Batch

#: Batches whose counts are kept one by one.
HISTORY = 100_000


class Statistics:
    """Counts of lookups, in all and batch by batch."""

    def __init__(self) -> None:
        self.lookups = 0
        self.hits = 0
        self.misses = 0
        #: Of each batch that brought rows: different rows that hit, missed, and were written back.
        self.hits_history: list[int] = []
        self.misses_history: list[int] = []
        self.written_back_history: list[int] = []

    def note(self, batch: Batch, written_back: int) -> None:
        """Count a batch by its different rows."""
        self.note_rows(len(batch.touched), len(batch.missing), len(batch.slots))
        self.hits_history.append(len(batch.touched))
        self.misses_history.append(len(batch.missing))
        self.written_back_history.append(written_back)
        if len(self.hits_history) > 2 * HISTORY:
            for history in (self.hits_history, self.misses_history, self.written_back_history):
                del history[:HISTORY]

    def note_rows(self, hits: int, misses: int, lookups: int | None = None) -> None:
        """Count rows that were resident, rows that were not, and ids looked up."""
        self.hits += hits
        self.misses += misses
        self.lookups += hits + misses if lookups is None else lookups
