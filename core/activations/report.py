"""What was done with the tensors that training keeps: by site, in bytes and times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..engine.transfer.unit_report import UnitReport, packed_total, ratio_of, raw_total, units_table
from ..errors import load_optional
from .lossy import LossyError

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class SiteReport:
    """A site and what is done there.

    Parameters
    ----------
    unit : UnitReport
        Its bytes: those that came back, before packing and as they crossed.
    choice : str
        "keep", "raw", "host" or the name of a codec.
    operation : str
        The node of autograd that makes its tensors.
    tensors : int
        Number of tensors that were moved so far.
    reason : str
        Why that was chosen.
    error : LossyError or None
        How far a sample of a tensor was off that a lossy codec packed; None where all bits return.
    """

    unit: UnitReport
    choice: str
    operation: str
    tensors: int
    reason: str = ""
    error: LossyError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            **self.unit.to_dict(),
            "choice": self.choice,
            "operation": self.operation,
            "tensors": self.tensors,
            "reason": self.reason,
            "error": None if self.error is None else self.error.to_dict(),
        }


@dataclass(frozen=True)
class ActivationReport:
    """What was done with the tensors that training keeps.

    Parameters
    ----------
    policy : str
        The policy.
    sites : sequence of SiteReport
        In the order in which they were first seen.
    device : str
        Where they are computed.
    stats : mapping of str to int
        `ActivationOffload.stats`.
    notes : sequence of str
        What is to be known: what the hooks do not see, which sites are lossy.
    decisions : sequence of mapping
        With policy "auto", a row for each site and profile: what was decided and from what, as
        `bitslab.engine.advisor.DecisionHistory.rows` has it.
    """

    policy: str
    sites: Sequence[SiteReport]
    device: str
    stats: Mapping[str, int]
    notes: Sequence[str] = field(default_factory=list)
    decisions: Sequence[Mapping[str, Any]] = field(default_factory=list)

    @property
    def units(self) -> list[UnitReport]:
        """The bytes of all sites."""
        return [site.unit for site in self.sites]

    @property
    def ratio(self) -> float:
        """Bytes before packing over bytes that crossed, of what came back."""
        return ratio_of(raw_total(self.units), packed_total(self.units))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            "policy": self.policy,
            "device": self.device,
            "stats": dict(self.stats),
            "notes": list(self.notes),
            "decisions": [dict(row) for row in self.decisions],
            "sites": [site.to_dict() for site in self.sites],
        }

    def table(self) -> Table:
        """Return a rich table, one row a site.

        Raises
        ------
        MissingExtraError
            When rich is not installed.
        """
        table = units_table(self.units, self.device)
        table.title = f"policy {self.policy}"
        return table

    def __str__(self) -> str:
        load_optional("rich", extra=None, purpose="printing a table")
        from rich.console import Console

        console = Console(width=120, color_system=None)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get() + "".join(f"{note}\n" for note in self.notes)
