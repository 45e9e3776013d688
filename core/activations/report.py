"""What was done with the tensors that training keeps: by site, in bytes and times."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..engine.transfer.unit_report import UnitReport, packed_total, ratio_of, raw_total
from ..errors import load_optional
from .lossy import LossyError
from .policies import Codecs

if TYPE_CHECKING:
    from rich.table import Table

#: In the name of a site: the number of a layer in a list of layers.
NUMBER_OF_LAYER = re.compile(r"(^|\.)\d+(?=\.)")
#: Why a disk does not take bytes, as `DiskTier` counts them.
REFUSALS = {
    "behind": "was behind",
    "full": "was full",
    "failed": "had failed",
    "budget": "had had its bytes of the day",
}


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
    disk : mapping or None
        With a disk, what it has done, as `bitslab.activations.disk.DiskTier.stats` has it.
    passes : int
        Forward passes so far.
    """

    policy: str
    sites: Sequence[SiteReport]
    device: str
    stats: Mapping[str, int]
    notes: Sequence[str] = field(default_factory=list)
    decisions: Sequence[Mapping[str, Any]] = field(default_factory=list)
    disk: Mapping[str, Any] | None = None
    passes: int = 0

    @property
    def units(self) -> list[UnitReport]:
        """The bytes of all sites."""
        return [site.unit for site in self.sites]

    @property
    def ratio(self) -> float:
        """Bytes before packing over bytes that crossed, of what came back."""
        return ratio_of(raw_total(self.units), packed_total(self.units))

    def summary(self) -> str:
        """Return in one line the memory that was saved, what was moved, and how long passes waited.

        "" where nothing was moved.
        """
        stats = self.stats
        if not (self.passes and stats.get("moved_tensors")):
            return ""
        moved, crossed = (
            stats[f"{what}_out_bytes"] / self.passes / 1e6 for what in ("moved", "crossed")
        )
        waits = f"{stats['host_stall_us'] / 1e3 / self.passes:,.3g} ms for host memory"
        if self.disk is not None:
            waits += f" and {stats['disk_stall_us'] / 1e3 / self.passes:,.3g} ms for the disk"
        return (
            f"At most {stats['peak_saved_bytes'] / 1e6:,.1f} MB of saved tensors were away from "
            f"the device at one time. A pass moves {moved:,.1f} MB, which cross as {crossed:,.1f}, "
            f"and waits {waits}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            "policy": self.policy,
            "passes": self.passes,
            "device": self.device,
            "stats": dict(self.stats),
            "notes": list(self.notes),
            "decisions": [dict(row) for row in self.decisions],
            "disk": None if self.disk is None else dict(self.disk),
            "sites": [site.to_dict() for site in self.sites],
        }

    def table(self, *, every_site: bool = False) -> Table:
        """Return a rich table: what is done at each site, its bytes, and why.

        Parameters
        ----------
        every_site : bool
            A row for each site. Else sites of layers that differ in a number alone, as
            ``model.layers.0.mlp:1`` and ``model.layers.1.mlp:1``, share a row where the same is
            done with them; it has the reason of the first.

        Raises
        ------
        MissingExtraError
            When rich is not installed.
        """
        load_optional("rich", extra=None, purpose="printing a table")
        from rich.table import Table
        from rich.text import Text

        raw, packed = raw_total(self.units), packed_total(self.units)
        table = Table(
            title=f"policy {self.policy}, {self.device}",
            caption="MB = 10^6 bytes of the tensors that came back, before packing and as crossed.",
            caption_justify="left",
            show_footer=True,
        )
        table.add_column("site", f"total of {len(self.sites)}", overflow="fold")
        table.add_column("moved")
        footers = [f"{sum(site.tensors for site in self.sites)}"]
        footers += [f"{raw / 1e6:,.2f}", f"{packed / 1e6:,.2f}", f"{self.ratio:.2f}x"]
        for heading, footer in zip(
            ("tensors", "raw MB", "crossed MB", "ratio"), footers, strict=True
        ):
            table.add_column(heading, footer, justify="right")
        table.add_column("why", overflow="fold")
        for name, sites in self._rows(every_site):
            units = [site.unit for site in sites]
            own, crossed = raw_total(units), packed_total(units)
            table.add_row(
                Text(name),  # not markup
                Text(_moved(sites[0])),
                str(sum(site.tensors for site in sites)),
                f"{own / 1e6:,.2f}",
                f"{crossed / 1e6:,.2f}",
                f"{ratio_of(own, crossed):.2f}x",
                Text(sites[0].reason),
            )
        return table

    def _rows(self, every_site: bool) -> list[tuple[str, list[SiteReport]]]:
        """Return the sites of each row of the table, with its name."""
        rows: dict[tuple[str, str], list[SiteReport]] = {}
        for site in self.sites:
            name = site.unit.name
            key = name if every_site else NUMBER_OF_LAYER.sub(r"\1*", name)
            rows.setdefault((key, _moved(site)), []).append(site)
        return [
            (sites[0].unit.name if len(sites) == 1 else f"{key} ({len(sites)} sites)", sites)
            for (key, _), sites in rows.items()
        ]

    def decision_table(self) -> Table:
        """Return a rich table of what was decided at each profile, one row a site: figure 9.

        A profile stands under its number, and its epoch where `ActivationOffload.begin_epoch` was
        called with one. The last row counts the sites that are packed: figure 8. Without profiles
        the table is empty.

        Raises
        ------
        MissingExtraError
            When rich is not installed.
        """
        load_optional("rich", extra=None, purpose="printing a table")
        from rich.table import Table
        from rich.text import Text

        profiles = {row["profile"]: row["epoch"] for row in self.decisions}
        table = Table(title="what was decided at each profile", show_footer=True)
        table.add_column("site", "packed", overflow="fold")
        cells: dict[str, dict[int, str]] = {}
        for row in self.decisions:
            what = row["codec"] or row["action"]
            if row["sparsity"] is not None:
                what += f" {row['sparsity']:.0%}"  # zeros
            cells.setdefault(row["site"], {})[row["profile"]] = what
        for profile, epoch in profiles.items():
            packed = sum(r["action"] == "pack" for r in self.decisions if r["profile"] == profile)
            heading = str(profile) if epoch is None else f"{profile}, epoch {epoch}"
            table.add_column(heading, str(packed))
        for site, own in cells.items():
            table.add_row(Text(site), *(Text(own.get(profile, "")) for profile in profiles))
        return table

    def __str__(self) -> str:
        load_optional("rich", extra=None, purpose="printing a table")
        from rich.console import Console

        console = Console(width=140, color_system=None)
        with console.capture() as captured:
            console.print(self.table())
        said = [self.summary(), *self.notes]
        return captured.get() + "".join(f"{each}\n" for each in said if each)


def _moved(site: SiteReport) -> str:
    """Return what the table says is done at a site."""
    return f"{site.choice}, disk" if site.unit.tier == "disk" else site.choice


def lossy_notes(codecs: Codecs, rows: Sequence[SiteReport]) -> list[str]:
    """Return which sites are lossy, and how far they are off."""
    if codecs.lossy is None:
        return []
    found = [f"{row.unit.name} ({row.error})" for row in rows if row.error is not None]
    what = codecs.lossy if codecs.rate is None else codecs.rate.describe()
    return [f"Lossy ({what}): {', '.join(found) or 'none'}."]


def disk_notes(disk: Mapping[str, Any], passes: int, *, on_gpu: bool) -> list[str]:
    """Return what is to be known of a disk, from `DiskTier.stats`, after so many passes.

    `on_gpu` says whether what it was given came from a GPU.
    """
    written, seconds = disk["written_bytes"], disk["write_seconds"]
    where = ", ".join(folder["path"] for folder in disk["folders"])
    said = f"Disk ({where}): {written / 1e9:.3g} GB written"
    if passes and written:
        said += f", {written / passes / 1e9:.3g} GB a pass"
    if seconds:
        said += f", {written / seconds / 1e9:.3g} GB/s a thread"
    said += f"; {disk['read_bytes'] / 1e9:.3g} GB read"
    if disk["forwarded_bytes"]:
        said += f", {disk['forwarded_bytes'] / 1e9:.3g} GB given back before they were written"
    days = disk["lifespan_days"]
    said += "." if days is None else f". At this rate the drives last {days:,.0f} days."
    notes = [said]
    notes += _file_notes(disk["folders"])
    if on_gpu:
        notes.append("GPU Direct Storage is not used: bytes cross page-locked host memory.")
    if disk["local_ranks"] > 1:
        notes.append(
            f"{disk['local_ranks']} ranks of this machine share the disk: each is planned with its "
            "share of the measured rates and of the write budget."
        )
    refused = {why: nbytes for why, nbytes in disk["refused_bytes"].items() if nbytes}
    if refused:
        causes = ", ".join(f"{REFUSALS[why]} ({n / 1e9:.3g} GB)" for why, n in refused.items())
        notes.append(f"The disk did not take what came while it {causes}.")
    for folder in disk["folders"]:
        if folder["error"] is not None:
            notes.append(f"Nothing more is written to {folder['path']}: {folder['error']}")
        elif folder["in_memory"] or folder["network"]:
            where = "in memory, so that nothing is saved"
            if folder["network"]:
                where = "on another machine"
            notes.append(f"{folder['path']} is {where} ({folder['file_system']}).")
        elif not folder["direct"]:
            notes.append(
                f"{folder['path']} ({folder['file_system']}) takes no O_DIRECT: what is written "
                "passes through the page cache."
            )
    return notes


def _file_notes(folders: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which file folders have, why, and what each kind of file gave in the probe."""
    notes: dict[str, list[str]] = {}
    for folder in folders:
        if not folder["file_reason"]:
            continue
        calls = {"posix": "POSIX calls", "kvikio": "kvikio's POSIX calls"}[folder["file"]]
        said = f"written and read by {calls}: {folder['file_reason']}"
        if len(folder["measured"]) > 1:
            said += "; " + " and ".join(
                f"{each['file']} {each['write_bytes_per_s'] / 1e9:.3g} GB/s out, "
                f"{each['read_bytes_per_s'] / 1e9:.3g} back"
                for each in folder["measured"]
            )
        notes.setdefault(said, []).append(folder["path"])
    return [f"{', '.join(paths)}: {said}." for said, paths in notes.items()]
