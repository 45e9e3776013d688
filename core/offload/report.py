"""The report of a model whose weights stream: its units, counts and file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine.transfer.unit_report import UnitReport, packed_total, ratio_of, raw_total, units_table
from ..errors import load_optional

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class OffloadReport:
    """Bytes and times of the weights of a model.

    Parameters
    ----------
    units : sequence of UnitReport
        In the order of the model.
    device : str
        Where it runs.
    stats : mapping of str to int
        `WeightStream.stats`.
    path : str, optional
        The file of the packed weights.
    """

    units: Sequence[UnitReport]
    device: str
    stats: Mapping[str, int]
    path: str | None = None

    @property
    def raw_bytes(self) -> int:
        """Bytes of all weights before packing, tied ones counted once."""
        return raw_total(self.units)

    @property
    def packed_bytes(self) -> int:
        """Bytes of all weights as they are kept."""
        return packed_total(self.units)

    @property
    def ratio(self) -> float:
        """`raw_bytes` over `packed_bytes`; 1.0 with no bytes."""
        return ratio_of(self.raw_bytes, self.packed_bytes)

    @property
    def fused_note(self) -> str:
        """What is to be known of results, where packed weights were multiplied; else ""."""
        n = self.stats.get("fused", 0)
        return (
            f"{n} uses of units multiplied packed weights: sums in another order than torch's."
            if n
            else ""
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            "device": self.device,
            "path": self.path,
            "raw_bytes": self.raw_bytes,
            "packed_bytes": self.packed_bytes,
            "stats": dict(self.stats),
            "units": [unit.to_dict() for unit in self.units],
        }

    def table(self) -> Table:
        """Return a rich table, one row a unit.

        Raises
        ------
        MissingExtraError
            When rich is not installed.
        """
        return units_table(self.units, self.device)

    def __str__(self) -> str:
        load_optional("rich", extra=None, purpose="printing a table")
        from rich.console import Console

        console = Console(width=120, color_system=None)
        with console.capture() as captured:
            console.print(self.table())
            if self.fused_note:
                console.print(self.fused_note)
        return captured.get()
