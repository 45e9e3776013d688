"""Counts of lookups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .residents import Batch

if TYPE_CHECKING:
    from .rows import CachedRows

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


def stats_of(rows: CachedRows) -> dict[str, Any]:
    """Do what `CachedRows.stats` says."""
    table = rows.table.stats()
    hits, misses = rows.statistics.hits, rows.statistics.misses
    lookups, moved = rows.statistics.lookups, table["moved_bytes"]
    device_bytes = rows.parameter.nbytes
    if rows.resident_cache is not None:
        on_gpu = rows.resident_cache.counted()
        hits, misses, moved = hits + on_gpu[0], misses + on_gpu[1], moved + on_gpu[2]
        lookups += on_gpu[0] + on_gpu[1]
    if rows.source.slabs is not None:
        # What lies in them is not resident to the statistics; they count by themselves.
        slabs = rows.source.slabs.stats()
        hits, misses = slabs["hits"], slabs["misses"]
        lookups, moved = hits + misses, moved + slabs["host_bytes"]
        device_bytes += sum(slabs["slab_bytes"]) + slabs["map_bytes"]
    return {
        "rows": len(rows),
        "row_bytes": table["row_bytes"],
        "codec": table["codec"],
        "raw_bytes": table["raw_bytes"],
        "host_bytes": table["host_bytes"],
        "map_bytes": rows.residents.slot_of.nbytes,
        "ratio": table["ratio"],
        "cache_rows": rows.source.packed_rows or rows.cache_rows,
        "device_bytes": device_bytes,
        "lookups": lookups,
        "hits": hits,
        "misses": misses,
        "hit_rate": hits / (hits + misses) if hits + misses else 0.0,
        "written_back": rows.source.written_back,
        "moved_bytes": moved,
        "overflow_bytes": table["overflow_bytes"],
        "notes": list(rows.source.notes),
    }
