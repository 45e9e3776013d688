"""What a profiled step showed: when its tensors are saved and read, and what moves them.

Moments are seconds of compute since the step began: what the device would show if nothing was moved
and nothing recomputed. The forward pass ends at `StepProfile.turn_s`, where the backward pass
begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ....errors import ArgumentError, ArgumentTypeError
from ..swapping import SwapLink

#: Of the JSON form of a profile.
PROFILE_VERSION = 1


@dataclass(frozen=True)
class Packing:
    """What a codec makes of a site's tensor.

    Parameters
    ----------
    share : float
        Packed bytes over raw bytes, all metadata counted.
    encode_s, decode_s : float
        Seconds of the device.
    staged_share : float, optional
        Device memory over raw bytes that the packed form takes until the host knows its size, as on
        a GPU: there it is what the codec needs at most. `share` when left out.
    """

    share: float
    encode_s: float
    decode_s: float
    staged_share: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers("packing", asdict(self))
        object.__setattr__(self, "staged_share", max(self.share, self.staged_share))

    @property
    def is_sized_late(self) -> bool:
        """Whether the device takes more memory for it until the host knows its size."""
        return self.staged_share > self.share


@dataclass(frozen=True, kw_only=True)
class SiteProfile:
    """A tensor that a step saves for its backward pass.

    Parameters
    ----------
    site : str
        Its name, the same in every step.
    nbytes : int
        Bytes of its storage that leave the device when it is moved.
    saved_s : float
        When it was saved. Before that its bytes count among `StepProfile.other_bytes`.
    released_s : float, optional
        Until when the forward pass itself holds it; `saved_s` when left out.
    read_s : float
        When the backward pass reads it first.
    freed_s : float, optional
        When the backward pass is done with it; `read_s` when left out.
    module : str
        The module of `StepProfile.modules` that it is saved in, so that it is recomputed with it;
        "" for none.
    movable : bool
        False for what is left as it is.
    packings : mapping of str to Packing
        By codec that may pack it.
    replay_s : float, optional
        Seconds of computing it again from other sites; None where that was not found equal bit for
        bit.
    replay_from : tuple of str
        Sites that it is computed from, which were saved before it.
    """

    site: str
    nbytes: int
    saved_s: float
    released_s: float = -1.0
    read_s: float
    freed_s: float = -1.0
    module: str = ""
    movable: bool = True
    packings: Mapping[str, Packing] = field(default_factory=dict)
    replay_s: float | None = None
    replay_from: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.site, str):
            raise ArgumentTypeError(f"site: expected a str, got {self.site!r:.60}")
        if self.released_s < 0:
            object.__setattr__(self, "released_s", self.saved_s)
        if self.freed_s < 0:
            object.__setattr__(self, "freed_s", self.read_s)
        where = f"site {self.site!r}"
        names = ("nbytes", "saved_s", "released_s", "read_s", "freed_s")
        _check_numbers(where, {name: getattr(self, name) for name in names})
        if self.replay_s is not None:
            _check_numbers(where, {"replay_s": self.replay_s})
        if not self.saved_s <= self.released_s <= self.freed_s or self.read_s > self.freed_s:
            raise ArgumentError(
                f"{where}: saved, released, read and freed at {self.saved_s}, {self.released_s}, "
                f"{self.read_s} and {self.freed_s}, which is no order"
            )


@dataclass(frozen=True, kw_only=True)
class ModuleProfile:
    """A module that may be checkpointed: what it saves is computed again in the backward pass.

    Parameters
    ----------
    module : str
        Its path. The modules of a profile do not lie in each other.
    begin_s : float
        When its forward pass begins.
    backward_begin_s, backward_end_s : float
        When its backward pass begins and ends.
    checkpoint_s : float
        Seconds of computing it again; those of its forward pass where nothing else is known.
    checkpoint_bytes : int
        Bytes of its inputs that would be kept for that, as far as no site outside of it keeps them.
    """

    module: str
    begin_s: float
    backward_begin_s: float
    backward_end_s: float
    checkpoint_s: float
    checkpoint_bytes: int

    def __post_init__(self) -> None:
        figures = {name: value for name, value in asdict(self).items() if name != "module"}
        _check_numbers(f"module {self.module!r}", figures)
        if not self.begin_s <= self.backward_begin_s <= self.backward_end_s:
            raise ArgumentError(f"module {self.module!r}: its moments are in no order")


@dataclass(frozen=True)
class DiskRates:
    """What tensors cross between host memory and an SSD.

    Parameters
    ----------
    write_bytes_per_s, read_bytes_per_s : float
        Measured rates.
    request_seconds : float
        What every tensor costs in addition to its bytes.
    """

    write_bytes_per_s: float
    read_bytes_per_s: float
    request_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("write_bytes_per_s", "read_bytes_per_s"):
            rate = getattr(self, name)
            if not (math.isfinite(rate) and rate > 0):
                raise ArgumentError(f"{name}: {rate}, accepted are finite numbers above 0")
        _check_numbers("disk", {"request_seconds": self.request_seconds})

    def write_seconds(self, n_bytes: float) -> float:
        """Return the seconds of writing a tensor."""
        return self.request_seconds + n_bytes / self.write_bytes_per_s

    def read_seconds(self, n_bytes: float) -> float:
        """Return the seconds of reading a tensor."""
        return self.request_seconds + n_bytes / self.read_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """A profiled step.

    Parameters
    ----------
    sites : sequence of SiteProfile
        In the order in which they are saved.
    turn_s : float
        When the backward pass begins.
    end_s : float
        When it ends.
    rest_s : float
        Seconds of the step besides both: the optimizer, the loader.
    modules : sequence of ModuleProfile
        Those that may be checkpointed.
    other_bytes : sequence of (float, int)
        Bytes of the device that are no site's, as a step function: from each moment on, ascending.
        Weights, gradients, states of the optimizer, workspaces.
    unprofiled_bytes : int
        Bytes of the device besides, at every moment, that steps took which followed a plan.
    link : SwapLink, optional
        What leads to host memory; None where nothing can leave the device.
    disk : DiskRates, optional
        An SSD behind it.
    has_host_tier : bool
        Whether tensors may remain in host memory; else they cross it on their way to the SSD alone.
    link_share_both_ways, disk_share_both_ways : float
        Share of their rates that each direction has while both are used.
    host_bytes, disk_bytes : int, optional
        Most bytes in host memory and on the SSD; None for no limit.
    write_bytes_per_s : float, optional
        Bytes that the SSD may take a second on the average, so that it lasts; None for no limit.
    read_ahead_bytes : int
        Host memory for what is read from the SSD before there is room for it on the device; 0 where
        tensors are read when they are fetched.
    """

    sites: Sequence[SiteProfile]
    turn_s: float
    end_s: float
    rest_s: float = 0.0
    modules: Sequence[ModuleProfile] = ()
    other_bytes: Sequence[tuple[float, int]] = ()
    unprofiled_bytes: int = 0
    link: SwapLink | None = None
    disk: DiskRates | None = None
    has_host_tier: bool = True
    link_share_both_ways: float = 1.0
    disk_share_both_ways: float = 1.0
    host_bytes: int | None = None
    disk_bytes: int | None = None
    write_bytes_per_s: float | None = None
    read_ahead_bytes: int = 0

    def __post_init__(self) -> None:
        names = ("turn_s", "end_s", "rest_s", "read_ahead_bytes", "unprofiled_bytes")
        _check_numbers("step", {n: getattr(self, n) for n in names})
        if self.write_bytes_per_s is not None:
            _check_numbers("step", {"write_bytes_per_s": self.write_bytes_per_s})
        for name in ("link_share_both_ways", "disk_share_both_ways"):
            if not 0 < getattr(self, name) <= 1:
                raise ArgumentError(f"{name}: {getattr(self, name)}, accepted are 0 to 1")
        if self.turn_s > self.end_s:
            raise ArgumentError(f"turn_s: {self.turn_s}, and the step ends at {self.end_s}")
        if self.disk is not None and self.link is None:
            raise ArgumentError("disk: given with no link, and what is written crosses that first")
        _check_modules(self.modules, self.end_s)
        _check_sites(self.sites, {m.module for m in self.modules}, self.turn_s, self.end_s)
        moments = [moment for moment, _ in self.other_bytes]
        if moments != sorted(moments):
            raise ArgumentError("other_bytes: expected moments in ascending order")

    @property
    def step_s(self) -> float:
        """Seconds of the step in which nothing is moved or recomputed."""
        return self.end_s + self.rest_s

    @property
    def budget_bytes(self) -> int | None:
        """Bytes that a step may write by `write_bytes_per_s`; None for no limit."""
        if self.write_bytes_per_s is None:
            return None
        return int(self.write_bytes_per_s * self.step_s)

    @property
    def most_disk_bytes(self) -> int | None:
        """Bytes that a step may have on the SSD, by its room and its budget; None for no limit."""
        limits = [n for n in (self.disk_bytes, self.budget_bytes) if n is not None]
        return min(limits, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {"version": PROFILE_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> StepProfile:
        """Build it again.

        Raises
        ------
        ArgumentError
            When it is not what `to_dict` returns.
        """
        try:
            given = dict(found)
            version = given.pop("version")
            if version != PROFILE_VERSION:
                raise ArgumentError(
                    f"profile: version {version!r:.20}, accepted is {PROFILE_VERSION}"
                )
            given["sites"] = tuple(_read_site(each) for each in given["sites"])
            given["modules"] = tuple(ModuleProfile(**each) for each in given["modules"])
            given["other_bytes"] = tuple((float(at), int(n)) for at, n in given["other_bytes"])
            given["link"] = None if given["link"] is None else SwapLink(**given["link"])
            given["disk"] = None if given["disk"] is None else DiskRates(**given["disk"])
            return cls(**given)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(f"profile: not one that was written here ({error!r})") from error

    def with_other_bytes(self, other_bytes: Iterable[tuple[float, int]]) -> StepProfile:
        """Return the profile with other bytes that are no site's."""
        return replace(self, other_bytes=tuple(other_bytes))

    def without_modules(self, names: Container[str]) -> StepProfile:
        """Return the profile with modules that are not computed again after all."""
        return replace(
            self,
            sites=tuple(
                replace(each, module="") if each.module in names else each for each in self.sites
            ),
            modules=tuple(each for each in self.modules if each.module not in names),
        )

    def scaled(
        self,
        *,
        compute: float = 1.0,
        codecs: float = 1.0,
        link: float = 1.0,
        disk: float = 1.0,
        encoding: float = 1.0,
        replays: float = 1.0,
        forward: float = 1.0,
    ) -> StepProfile:
        """Return the profile with times that many times as long.

        Parameters
        ----------
        compute, codecs, link, disk : float
            Factors of the model's times, of encoding and decoding, of crossing the link, and of
            writing and reading an SSD.
        encoding, replays : float
            A further factor of encoding alone, and of replays in addition to `compute`.
        forward : float
            A further factor of the forward pass, up to `turn_s`, in addition to `compute`. What
            replays and checkpointed modules compute again is in the backward pass.
        """
        for name, factor in (
            ("compute", compute), ("codecs", codecs), ("link", link), ("disk", disk),
            ("encoding", encoding), ("replays", replays), ("forward", forward),
        ):  # fmt: skip
            if not (math.isfinite(factor) and factor > 0):
                raise ArgumentError(f"{name}: {factor}, accepted are finite numbers above 0")

        def moved(at: float) -> float:
            """Return when it is what was at a moment; what was in order remains so."""
            if at <= self.turn_s or forward == 1.0:
                return at * compute * forward
            return self.turn_s * compute * forward + (at - self.turn_s) * compute

        return replace(
            self,
            sites=tuple(
                _scaled_site(each, moved, compute * replays, codecs * encoding, codecs)
                for each in self.sites
            ),
            modules=tuple(_scaled_module(each, moved, compute) for each in self.modules),
            turn_s=moved(self.turn_s),
            end_s=moved(self.end_s),
            rest_s=self.rest_s * compute,
            other_bytes=tuple((moved(at), n) for at, n in self.other_bytes),
            link=None if self.link is None else _scaled_link(self.link, link),
            disk=None if self.disk is None else _scaled_disk(self.disk, disk),
        )


def _check_numbers(where: str, figures: Mapping[str, Any]) -> None:
    for name, value in figures.items():
        if not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
            raise ArgumentError(f"{where}: {name}: {value!r:.60}, accepted are numbers from 0")


def _check_modules(modules: Iterable[ModuleProfile], end_s: float) -> None:
    names: set[str] = set()
    for each in modules:
        if each.module in names or not each.module:
            raise ArgumentError(f"modules: {each.module!r}, expected names, one each")
        if each.backward_end_s > end_s:
            raise ArgumentError(f"module {each.module!r}: it ends after the step does")
        names.add(each.module)


def _check_sites(
    sites: Iterable[SiteProfile], modules: set[str], turn_s: float, end_s: float
) -> None:
    names: set[str] = set()
    last_s = 0.0
    for each in sites:
        where = f"site {each.site!r}"
        if each.site in names:
            raise ArgumentError(f"sites: two of {each.site!r}, expected one each")
        if each.saved_s < last_s:
            raise ArgumentError(f"{where}: saved before the site in front of it")
        if each.saved_s > turn_s or each.read_s < turn_s or each.freed_s > end_s:
            raise ArgumentError(
                f"{where}: saved at {each.saved_s}, read at {each.read_s}, freed at "
                f"{each.freed_s}; the backward pass is from {turn_s} to {end_s}"
            )
        if each.module and each.module not in modules:
            raise ArgumentError(f"{where}: module {each.module!r} is none of the profile's")
        for source in each.replay_from:
            if source not in names:
                raise ArgumentError(f"{where}: replay_from: {source!r} was not saved before it")
        names.add(each.site)
        last_s = each.saved_s


def _read_site(found: Mapping[str, Any]) -> SiteProfile:
    given = dict(found)
    given["packings"] = {name: Packing(**each) for name, each in given["packings"].items()}
    given["replay_from"] = tuple(given["replay_from"])
    return SiteProfile(**given)


def _scaled_site(
    site: SiteProfile,
    moved: Callable[[float], float],
    replays: float,
    encoding: float,
    decoding: float,
) -> SiteProfile:
    packings = {
        name: replace(each, encode_s=each.encode_s * encoding, decode_s=each.decode_s * decoding)
        for name, each in site.packings.items()
    }
    return replace(
        site,
        saved_s=moved(site.saved_s),
        released_s=moved(site.released_s),
        read_s=moved(site.read_s),
        freed_s=moved(site.freed_s),
        replay_s=None if site.replay_s is None else site.replay_s * replays,
        packings=packings,
    )


def _scaled_module(
    module: ModuleProfile, moved: Callable[[float], float], compute: float
) -> ModuleProfile:
    return replace(
        module,
        begin_s=moved(module.begin_s),
        backward_begin_s=moved(module.backward_begin_s),
        backward_end_s=moved(module.backward_end_s),
        checkpoint_s=module.checkpoint_s * compute,
    )


def _scaled_link(link: SwapLink, factor: float) -> SwapLink:
    return SwapLink(
        link.d2h_bytes_per_s / factor,
        link.h2d_bytes_per_s / factor,
        link.copy_seconds * factor,
    )


def _scaled_disk(disk: DiskRates, factor: float) -> DiskRates:
    return DiskRates(
        disk.write_bytes_per_s / factor,
        disk.read_bytes_per_s / factor,
        disk.request_seconds * factor,
    )
