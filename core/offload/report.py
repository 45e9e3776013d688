"""Bytes and times of each unit of streamed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine.transfer.timing import UnitTimes
from ..errors import load_optional

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class UnitReport:
    """Bytes and times of a unit.

    Parameters
    ----------
    name : str
        Its name; "" is the model itself.
    tier : str
        "host", "disk", "packed" (packed in device memory) or "device" (unpacked there).
    raw_bytes, packed_bytes : int
        Bytes of its weights before packing and packed, all metadata counted.
    times : UnitTimes or None
        Times of its last pass; None where only rows are looked up, or nothing is fetched.
    shared : bool
        Whether it uses weights that another unit stores and counts.
    """

    name: str
    tier: str
    raw_bytes: int
    packed_bytes: int
    times: UnitTimes | None
    shared: bool = False

    @property
    def ratio(self) -> float:
        """Raw bytes over packed bytes."""
        return self.raw_bytes / self.packed_bytes if self.packed_bytes else 1.0

    @property
    def hidden(self) -> float | None:
        """Share of transfer and decoding that the module did not wait for; None with neither."""
        if self.times is None:
            return None
        cost = self.times.transfer_ms + self.times.decode_ms
        return None if cost == 0 else min(1.0, max(0.0, 1 - self.times.stall_ms / cost))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            "name": self.name,
            "tier": self.tier,
            "raw_bytes": self.raw_bytes,
            "packed_bytes": self.packed_bytes,
            "shared": self.shared,
            "hidden": self.hidden,
            **({} if self.times is None else vars(self.times)),
        }


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
        return sum(unit.raw_bytes for unit in self.units if not unit.shared)

    @property
    def packed_bytes(self) -> int:
        """Bytes of all weights as they are kept."""
        return sum(unit.packed_bytes for unit in self.units if not unit.shared)

    @property
    def ratio(self) -> float:
        """`raw_bytes` over `packed_bytes`."""
        return self.raw_bytes / self.packed_bytes if self.packed_bytes else 1.0

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
        load_optional("rich", extra=None, purpose="printing a table")
        from rich.table import Table
        from rich.text import Text

        table = Table(
            caption=f"MB = 10^6 bytes; times in ms, of each unit's last pass on {self.device}.",
            caption_justify="left",
            show_footer=True,
        )
        table.add_column("unit", f"total of {len(self.units)}", overflow="fold")
        table.add_column("kept", "")
        sums = [f"{self.raw_bytes / 1e6:,.2f}", f"{self.packed_bytes / 1e6:,.2f}"]
        for heading, footer in (
            ("raw MB", sums[0]),
            ("packed MB", sums[1]),
            ("ratio", f"{self.ratio:.2f}x"),
            ("transfer", self._sum("transfer_ms")),
            ("decode", self._sum("decode_ms")),
            ("stall", self._sum("stall_ms")),
            ("compute", self._sum("compute_ms")),
            ("hidden", ""),
        ):
            table.add_column(heading, footer, justify="right")
        for unit in self.units:
            times = unit.times
            figures = [""] * 4
            if times is not None:
                spans = (times.transfer_ms, times.decode_ms, times.stall_ms, times.compute_ms)
                figures = [f"{ms:.2f}" for ms in spans]
            table.add_row(
                Text(unit.name or "(model)"),
                unit.tier + (" shared" if unit.shared else ""),
                f"{unit.raw_bytes / 1e6:,.2f}",
                f"{unit.packed_bytes / 1e6:,.2f}",
                f"{unit.ratio:.2f}x",
                *figures,
                "" if unit.hidden is None else f"{unit.hidden:.0%}",
            )
        return table

    def _sum(self, span: str) -> str:
        return f"{sum(getattr(unit.times, span) for unit in self.units if unit.times):.2f}"

    def __str__(self) -> str:
        load_optional("rich", extra=None, purpose="printing a table")
        from rich.console import Console

        console = Console(width=120, color_system=None)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get()
