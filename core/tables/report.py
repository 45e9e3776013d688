"""CompressionReport: which tables or features were compressed, which were left alone, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass
class CompressionReport:
    """Compressed entries and entries left alone, with reasons; ``print`` shows them as a table.

    Parameters
    ----------
    compressed : dict of str to dict
        For each table or feature that is compressed, by name: its statistics. One with
        ``same_rows_as`` has no rows of its own.
    left : dict of str to str
        For each that was left alone, by name: why.
    """

    compressed: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    #: Heading of the entries, text of an empty report, and heading of the cached rows.
    entry: ClassVar[str] = "table"
    empty: ClassVar[str] = "no tables"
    cached: ClassVar[str] = "cached"

    @staticmethod
    def cached_rows(stats: dict[str, Any]) -> int:
        """Return how many rows of an entry a cache holds."""
        cache = stats.get("cache")
        return int(cache["cached_rows"]) if cache else 0

    @property
    def raw_bytes(self) -> int:
        """Bytes of all entries before packing, each counted once."""
        return self._sum("raw_bytes")

    @property
    def host_bytes(self) -> int:
        """Bytes of all entries in host memory now."""
        return self._sum("host_bytes")

    def _sum(self, name: str) -> int:
        own = (stats for stats in self.compressed.values() if not stats.get("same_rows_as"))
        return sum(stats[name] for stats in own)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        return {
            "raw_bytes": self.raw_bytes,
            "host_bytes": self.host_bytes,
            "compressed": {name: dict(stats) for name, stats in self.compressed.items()},
            "left": dict(self.left),
        }

    def __str__(self) -> str:
        """Return the report as a text table."""
        if not self.compressed and not self.left:
            return self.empty
        lines = []
        if self.compressed:
            cells = [[self.entry, "rows", "packed as", "raw MiB", "host MiB", "ratio", self.cached]]
            cells += [self._cells(name, stats) for name, stats in self.compressed.items()]
            if len(self.compressed) > 1:
                ratio = self.raw_bytes / self.host_bytes if self.host_bytes else 1.0
                sizes = [_mib(self.raw_bytes), _mib(self.host_bytes), f"{ratio:.2f}"]
                cells.append(["all", "", "", *sizes, ""])
            lines += _aligned(cells, left=(0, 2))
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

    def _cells(self, name: str, stats: dict[str, Any]) -> list[str]:
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
            f"{self.cached_rows(stats):,}",
        ]


@dataclass
class FeaturesReport(CompressionReport):
    """Compressed features of a graph, and features left alone, with reasons.

    Parameters
    ----------
    compressed : dict of str to dict
        For each feature that the call compressed: its sizes and counts, as
        `bitslab.CompressedFeature.stats` gives them. Names are those of `feature_name`.
    left : dict of str to str
        For each feature that was left alone, by name: why.
    """

    entry: ClassVar[str] = "feature"
    empty: ClassVar[str] = "no features"


def feature_name(graph_type: Any, name: str) -> str:
    """Return the name of a feature in reports.

    Parameters
    ----------
    graph_type : str, tuple of str or None
        The node type, or the edge type; None in a graph that has no types.
    name : str
        Its name among the features of that type.

    Returns
    -------
    str
        Such as ``"paper.x"``, ``"author:writes:paper.weight"`` and, without types, ``"x"``.
    """
    if graph_type is None:
        return name
    return f"{graph_type if isinstance(graph_type, str) else ':'.join(graph_type)}.{name}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f}"


def _aligned(cells: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Return lines of columns, those of `left` aligned to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
