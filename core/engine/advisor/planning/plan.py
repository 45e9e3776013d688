"""Plans: what becomes of each tensor that a step saves, written, read and shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....errors import ArgumentError, load_optional
from ...files.new_file import PathLike, replacing
from .candidates import KEEP, Candidate
from .prediction import StepPrediction
from .profile import StepProfile

if TYPE_CHECKING:
    from rich.table import Table

#: Of the JSON form of a plan.
PLAN_VERSION = 1
#: A plan that is larger is not one.
MOST_PLAN_BYTES = 64 << 20


@dataclass(frozen=True)
class SitePlan:
    """What becomes of the tensors of a site.

    Parameters
    ----------
    site : str
        Its name.
    nbytes : int
        Bytes of its tensor when it was planned.
    candidate : Candidate
        What becomes of it.
    reason : str
        A plain sentence with the figures used.
    fetch_after : str, optional
        The site at whose read its fetch may begin, so that there is room for it; one of a
        checkpointed module stands for the moment at which that begins to be computed again; "" for
        the beginning of the backward pass; None where it is not fetched.
    read_after : str, optional
        The same of the moment from which on it may be read from the SSD to host memory, so that it
        is there when it is fetched; None where it is read when it is fetched.
    """

    site: str
    nbytes: int
    candidate: Candidate
    reason: str
    fetch_after: str | None = None
    read_after: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What becomes of each tensor that a step saves for its backward pass.

    Parameters
    ----------
    sites : tuple of SitePlan
        In the order of the forward pass.
    modules : tuple of str
        Modules that are checkpointed.
    prediction : StepPrediction
        What the plan makes of a step.
    plain : StepPrediction
        What a step is in which everything is kept.
    memory_bytes : int, optional
        The limit that it was made for.
    slowdown : float
        Where there was none, the share of a plain step that it might take longer.
    reason : str
        Why the plan is as it is; where it changes nothing, why it was declined.
    budget_bytes : int, optional
        Bytes that a step may write, so that the SSD lasts.
    serial : bool
        Whether what computes waits for each copy, so that none is on its way while it does.
    """

    sites: tuple[SitePlan, ...]
    modules: tuple[str, ...]
    prediction: StepPrediction
    plain: StepPrediction
    memory_bytes: int | None = None
    slowdown: float = 0.0
    reason: str = ""
    budget_bytes: int | None = None
    serial: bool = False
    _by_site: dict[str, SitePlan] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_site = {each.site: each for each in self.sites}
        if len(by_site) != len(self.sites):
            raise ArgumentError("plan: two sites of one name, expected one each")
        object.__setattr__(self, "_by_site", by_site)

    @property
    def declined(self) -> bool:
        """Whether it changes nothing."""
        return all(each.candidate == KEEP for each in self.sites)

    def of(self, site: str, nbytes: int) -> Candidate | None:
        """Return what becomes of a tensor; None for one that was not planned so large."""
        found = self._by_site.get(site)
        return found.candidate if found is not None and found.nbytes == nbytes else None

    def site(self, site: str) -> SitePlan | None:
        """Return what was planned of a site; None for one that was not."""
        return self._by_site.get(site)

    def reason_of(self, site: str) -> str:
        """Return why that becomes of a site's tensors; "" for one that was not planned."""
        found = self._by_site.get(site)
        return "" if found is None else found.reason

    def choices(self) -> dict[str, Candidate]:
        """Return what becomes of each site's tensor."""
        return {each.site: each.candidate for each in self.sites}

    # Written and read

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            "version": PLAN_VERSION,
            "sites": [{**asdict(each), "candidate": str(each.candidate)} for each in self.sites],
            "modules": list(self.modules),
            "prediction": asdict(self.prediction),
            "plain": asdict(self.plain),
            "memory_bytes": self.memory_bytes,
            "slowdown": self.slowdown,
            "reason": self.reason,
            "budget_bytes": self.budget_bytes,
            "serial": self.serial,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Plan:
        """Build it again.

        Raises
        ------
        ArgumentError
            When it is not what `to_dict` returns, or of another version.
        """
        try:
            given = dict(found)
            version = given.pop("version")
            if version != PLAN_VERSION:
                raise ArgumentError(f"plan: version {version!r:.20}, accepted is {PLAN_VERSION}")
            given["sites"] = tuple(_read_site(each) for each in given["sites"])
            given["modules"] = tuple(str(each) for each in given["modules"])
            given["prediction"] = _read_prediction(given["prediction"])
            given["plain"] = _read_prediction(given["plain"])
            return cls(**given)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(f"plan: not one that was written here ({error!r})") from error

    def save(self, path: PathLike) -> None:
        """Write the plan as JSON; the file appears whole or not at all."""
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: PathLike) -> Plan:
        """Read a plan that `save` wrote.

        Raises
        ------
        ArgumentError
            For a file that is none, or of another version.
        """
        with open(path, "rb") as file:
            data = file.read(MOST_PLAN_BYTES + 1)
        try:
            found = json.loads(data)
            if not isinstance(found, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{Path(path)}: not a plan ({error})") from error
        return cls.from_dict(found)

    # Shown

    def summary(self) -> str:
        """Return the plan in one line."""
        said = self.reason
        if not self.declined:
            share = self.prediction.step_s / self.plain.step_s - 1 if self.plain.step_s else 0.0
            said += (
                f" Step {self.plain.step_s * 1e3:.4g} -> {self.prediction.step_s * 1e3:.4g} ms "
                f"({share:+.1%}), peak {_size(self.plain.peak_bytes)} -> "
                f"{_size(self.prediction.peak_bytes)}."
            )
        if self.budget_bytes is not None:
            said += (
                f" {self.prediction.written_bytes / 1e6:,.1f} MB a step to the disk, of "
                f"{self.budget_bytes / 1e6:,.1f} that its write budget allows."
            )
        return said

    def table(self) -> Table:
        """Return a rich table, one row a site.

        Raises
        ------
        MissingExtraError
            When rich is not installed.
        """
        load_optional("rich", extra=None, purpose="printing a table")
        from rich.table import Table

        table = Table(title=self.summary())
        for name in ("site", "bytes", "what", "fetched after", "why"):
            table.add_column(name, justify="right" if name == "bytes" else "left")
        for each in self.sites:
            after = {None: "", "": "begin of backward"}.get(each.fetch_after, each.fetch_after)
            table.add_row(each.site, f"{each.nbytes:,}", str(each.candidate), after, each.reason)
        return table

    def __str__(self) -> str:
        load_optional("rich", extra=None, purpose="printing a table")
        from rich.console import Console

        console = Console(width=140, color_system=None)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get()

    def fits(self, profile: StepProfile) -> bool:
        """Return whether it was made for such a step: the same sites, as large."""
        return [(each.site, each.nbytes) for each in self.sites] == [
            (each.site, each.nbytes) for each in profile.sites
        ]


def _read_site(found: Mapping[str, Any]) -> SitePlan:
    given = dict(found)
    given["candidate"] = Candidate.named(given["candidate"])
    return SitePlan(**given)


def _read_prediction(found: Mapping[str, Any]) -> StepPrediction:
    return StepPrediction(**{name: float(value) for name, value in found.items()})


def _size(n_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.4g} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.4g} GiB"
