"""TablesReport: what became of the embedding tables of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..tables.report import CompressionReport


@dataclass
class TablesReport(CompressionReport):
    """Which embedding tables of a model are packed now, which were left alone, and why.

    Parameters
    ----------
    compressed : dict of str to dict
        For each table, by its name in the model: its sizes and counts, as `CachedRows.stats` gives
        them. A table with ``same_rows_as`` has no rows of its own.
    left : dict of str to str
        For each table that was left alone, by name: why.
    """

    entry: ClassVar[str] = "table"
    empty: ClassVar[str] = "no embedding tables"
    cached: ClassVar[str] = "resident"

    @staticmethod
    def cached_rows(stats: dict[str, Any]) -> int:
        """Return how many rows of a table are resident."""
        return int(stats["cache_rows"])
