"""What may become of a saved tensor, and what each possibility takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from ....errors import ArgumentError
from .profile import SiteProfile, StepProfile

Action = Literal["keep", "replay", "device", "host", "disk", "checkpoint"]
ACTIONS: tuple[Action, ...] = get_args(Action)


@dataclass(frozen=True)
class Candidate:
    """What may become of a saved tensor.

    Parameters
    ----------
    action : {"keep", "replay", "device", "host", "disk", "checkpoint"}
        Kept as it is; computed again from what its operation saved; packed in device memory; moved
        to host memory; moved to an SSD; computed again with its whole module.
    codec : str, optional
        What packs it; None for raw bytes.
    """

    action: Action
    codec: str | None = None

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ArgumentError(f"action: {self.action!r:.60}, accepted are {', '.join(ACTIONS)}")
        packs = self.codec is not None
        if packs != (self.action == "device") and self.action not in ("host", "disk"):
            expected = "the name of one" if not packs else "none"
            raise ArgumentError(f"codec: {self.codec!r:.60} with {self.action!r}, not {expected}")

    def __str__(self) -> str:
        return self.action if self.codec is None else f"{self.action}:{self.codec}"

    @classmethod
    def named(cls, name: str) -> Candidate:
        """Return the candidate that `str` writes so."""
        action, colon, codec = name.partition(":")
        return cls(action, codec if colon else None)  # type: ignore[arg-type]


KEEP = Candidate("keep")
REPLAY = Candidate("replay")
CHECKPOINT = Candidate("checkpoint")


class Costs(NamedTuple):
    """What a candidate takes.

    Parameters
    ----------
    forward_s, backward_s : float
        Seconds of the device in each pass.
    moved_bytes : float
        Bytes that leave the device, and come back.
    up_s, down_s : float
        Seconds of the link to the host and to the device.
    write_s, read_s : float
        Seconds of the SSD.
    packed_bytes : float
        Bytes of the packed form; 0 for raw bytes.
    staged_bytes : float
        Device memory of the packed form from its encoding until it is on the host, or, where it
        remains on the device, while it is encoded; 0 for raw bytes.
    sized_late : bool
        Whether it remains on the device, and its raw bytes with it until its size is known.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    moved_bytes: float = 0.0
    up_s: float = 0.0
    down_s: float = 0.0
    write_s: float = 0.0
    read_s: float = 0.0
    packed_bytes: float = 0.0
    staged_bytes: float = 0.0
    sized_late: bool = False


@dataclass(frozen=True)
class Choices:
    """What becomes of each site and module, by number.

    Parameters
    ----------
    options : numpy.ndarray
        intp ``[sites]``, of each site the number of its candidate. Of sites in a checkpointed
        module it does not count.
    checkpointed : numpy.ndarray
        bool ``[modules]``.
    """

    options: npt.NDArray[np.intp]
    checkpointed: npt.NDArray[np.bool_]

    def key(self) -> bytes:
        """Return what equal choices have in common."""
        return self.options.tobytes() + self.checkpointed.tobytes()


def candidates_of(site: SiteProfile, profile: StepProfile) -> dict[Candidate, Costs]:
    """Return the candidates of a site with what each takes: `KEEP` first, and no `CHECKPOINT`."""
    found = {KEEP: Costs()}
    if not site.movable or not site.nbytes:
        return found
    if site.replay_s is not None:
        found[REPLAY] = Costs(backward_s=site.replay_s)
    packings = {name: each for name, each in site.packings.items() if each.share < 1}
    for name, each in packings.items():
        found[Candidate("device", name)] = Costs(
            each.encode_s,
            each.decode_s,
            packed_bytes=site.nbytes * each.share,
            staged_bytes=site.nbytes * each.staged_share if each.is_sized_late else 0.0,
            sized_late=each.is_sized_late,
        )
    link, disk = profile.link, profile.disk
    if link is None:
        return found
    tiers = ("host",) if profile.has_host_tier else ()
    room_of = {"host": profile.host_bytes, "disk": profile.most_disk_bytes}
    for tier in tiers if disk is None else (*tiers, "disk"):
        for codec in (None, *packings):
            moved: float = site.nbytes
            encode_s = decode_s = packed_bytes = staged_bytes = write_s = read_s = 0.0
            if codec is not None:
                packing = packings[codec]
                moved *= packing.share
            room = room_of[tier]
            if room is not None and moved > room:
                continue
            if codec is not None:
                encode_s, decode_s, packed_bytes = packing.encode_s, packing.decode_s, moved
                staged_bytes = site.nbytes * packing.staged_share
            if tier == "disk" and disk is not None:
                write_s, read_s = disk.write_seconds(moved), disk.read_seconds(moved)
            costs = Costs(
                encode_s,
                decode_s,
                moved_bytes=moved,
                up_s=link.to_host_seconds(moved),
                down_s=link.to_device_seconds(moved),
                write_s=write_s,
                read_s=read_s,
                packed_bytes=packed_bytes,
                staged_bytes=staged_bytes,
            )
            found[Candidate(tier, codec)] = costs
    return found
