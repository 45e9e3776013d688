"""Bytes and times of the units that a system moves: one row a unit, and a table of them.

A unit is whatever crosses a link at once: the weights of a layer, its keys and values, what it
keeps for its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import load_optional
from .timing import UnitTimes

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
        Where it is kept: "host", "disk", "packed" (packed in device memory) or "device"
        (unpacked there).
    raw_bytes, packed_bytes : int
        Its bytes before packing and packed, all metadata counted.
    times : UnitTimes or None
        Times of its last pass; None where only rows are looked up, or nothing is fetched.
    shared : bool
        Whether it uses tensors that another unit stores and counts.
    """

    name: str
    tier: str
    raw_bytes: int
    packed_bytes: int
    times: UnitTimes | None
    shared: bool = False

    @property
    def ratio(self) -> float:
        """Raw bytes over packed bytes; 1.0 with no bytes."""
        return ratio_of(self.raw_bytes, self.packed_bytes)

    @property
    def hidden(self) -> float | None:
        """Share of transfer and decoding that compute did not wait for; None with neither."""
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


def ratio_of(raw_bytes: int, packed_bytes: int) -> float:
    """Return raw over packed bytes; 1.0 with no packed bytes."""
    return raw_bytes / packed_bytes if packed_bytes else 1.0


def raw_total(units: Iterable[UnitReport]) -> int:
    """Return the bytes of units before packing, shared ones counted once."""
    return sum(unit.raw_bytes for unit in units if not unit.shared)


def packed_total(units: Iterable[UnitReport]) -> int:
    """Return the bytes of units as they are kept, shared ones counted once."""
    return sum(unit.packed_bytes for unit in units if not unit.shared)


def units_table(units: Sequence[UnitReport], device: str) -> Table:
    """Return a rich table, one row a unit, with totals.

    Parameters
    ----------
    units : sequence of UnitReport
        In the order of the table.
    device : str
        Where their times were taken.

    Raises
    ------
    MissingExtraError
        When rich is not installed.
    """
    load_optional("rich", extra=None, purpose="printing a table")
    from rich.table import Table
    from rich.text import Text

    raw, packed = raw_total(units), packed_total(units)
    table = Table(
        caption=f"MB = 10^6 bytes; times in ms, of each unit's last pass on {device}.",
        caption_justify="left",
        show_footer=True,
    )
    table.add_column("unit", f"total of {len(units)}", overflow="fold")
    table.add_column("kept", "")
    sums = [f"{raw / 1e6:,.2f}", f"{packed / 1e6:,.2f}"]
    for heading, footer in (
        ("raw MB", sums[0]),
        ("packed MB", sums[1]),
        ("ratio", f"{ratio_of(raw, packed):.2f}x"),
        ("transfer", _sum_ms(units, "transfer_ms")),
        ("decode", _sum_ms(units, "decode_ms")),
        ("stall", _sum_ms(units, "stall_ms")),
        ("compute", _sum_ms(units, "compute_ms")),
        ("hidden", ""),
    ):
        table.add_column(heading, footer, justify="right")
    for unit in units:
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


def _sum_ms(units: Iterable[UnitReport], span: str) -> str:
    return f"{sum(getattr(unit.times, span) for unit in units if unit.times):.2f}"
