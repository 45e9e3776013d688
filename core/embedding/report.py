"""TablesReport: what became of the embedding tables of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

#: Columns of the table: heading, and whether they are numbers.
_COLUMNS = (
    ("table", False),
    ("rows", True),
    ("packed as", False),
    ("raw MiB", True),
    ("host MiB", True),
    ("ratio", True),
    ("resident", True),
)


@dataclass
class TablesReport:
    """Which embedding tables of a model are packed now, which were left alone, and why.

    Parameters
    ----------
    compressed : dict of str to dict
        For each table, by its name in the model: its sizes and counts, as `CachedRows.stats` gives
        them. A table with ``same_rows_as`` has no rows of its own.
    left : dict of str to str
        For each table that was left alone, by name: why.
    """

    compressed: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    @property
    def raw_bytes(self) -> int:
        """Bytes of the rows of all packed tables, each counted once."""
        return self._sum("raw_bytes")

    @property
    def host_bytes(self) -> int:
        """Bytes that they take in host memory now."""
        return self._sum("host_bytes")

    def _sum(self, name: str) -> int:
        own = (stats for stats in self.compressed.values() if not stats.get("same_rows_as"))
        return sum(stats[name] for stats in own)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        return {
            "raw_bytes": self.raw_bytes,
            "host_bytes": self.host_bytes,
            "compressed": {name: dict(stats) for name, stats in self.compressed.items()},
            "left": dict(self.left),
        }

    def __str__(self) -> str:
        """Show a table for people."""
        if not self.compressed and not self.left:
            return "no embedding tables"
        lines = []
        if self.compressed:
            cells = [[heading for heading, _ in _COLUMNS]]
            cells += [_cells(name, stats) for name, stats in self.compressed.items()]
            if len(self.compressed) > 1:
                ratio = self.raw_bytes / self.host_bytes if self.host_bytes else 1.0
                sizes = [_mib(self.raw_bytes), _mib(self.host_bytes), f"{ratio:.2f}"]
                cells.append(["all", "", "", *sizes, ""])
            lines += _aligned(cells)
        notes = [
            f"  {name}: {note}"
            for name, stats in self.compressed.items()
            for note in stats.get("notes", [])
        ]
        if notes:
            lines += ["notes:", *notes]
        if self.left:
            lines += ["left alone:", *(f"  {name}: {why}" for name, why in self.left.items())]
        return "\n".join(lines)


def _cells(name: str, stats: dict[str, Any]) -> list[str]:
    shared = stats.get("same_rows_as")
    if shared:
        return [name, f"{stats['rows']:,}", f"same rows as {shared}", "", "", "", ""]
    return [
        name,
        f"{stats['rows']:,}",
        str(stats["codec"]),
        _mib(stats["raw_bytes"]),
        _mib(stats["host_bytes"]),
        f"{stats['ratio']:.2f}",
        f"{stats['cache_rows']:,}",
    ]


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f}"


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in cells) for i in range(len(_COLUMNS))]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, (_, number) in zip(row, widths, _COLUMNS, strict=True)
        ).rstrip()
        for row in cells
    ]
