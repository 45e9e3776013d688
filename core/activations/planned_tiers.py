"""What plans may use behind the device: its tiers, as far as the disk takes what is planned."""

from __future__ import annotations

from typing import Any

from ..engine.advisor.planning import DiskRates, StepProfile
from .disk import DiskTier
from .planned_passes import read_ahead_bytes
from .tiers import STAGING_SHARE, Tiers

#: Of what a plan wrote to a disk that had no room for all of it, the share that the next one may.
FULL_SHARE = 7 / 8


#: Bytes that a disk has written, or read, before these say how fast it is beside a training.
COUNTED_BYTES = 64 << 20


class RatesWhileTraining:
    """What a disk carries: the probe's rates, or those of the latest steps if they are less.

    As fast as its threads were while they moved anything: while a model trains they wait for
    processors and for Python's lock, and in profiled steps under a limit of memory they move all.

    Parameters
    ----------
    disk : DiskTier
        The disk.
    """

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk
        #: By direction what had been moved, and in how many seconds of threads, when that was last
        #: enough to say how fast it is; and how fast it was.
        self._counted: dict[str, tuple[int, float]] = {}
        self._bytes_per_s: dict[str, float] = {}

    def rates(self) -> DiskRates:
        """Return the rates by now."""
        disk, stats = self._disk, self._disk.stats()
        writes, reads = disk.write_bytes_per_s, disk.read_bytes_per_s
        return DiskRates(
            self._rate("write", stats["written_bytes"], stats["write_seconds"], writes),
            self._rate("read", stats["read_bytes"], stats["read_seconds"], reads),
        )

    def _rate(self, way: str, moved: int, seconds: float, probed_bytes_per_s: float) -> float:
        before, before_s = self._counted.get(way, (0, 0.0))
        nbytes, seconds_since = moved - before, seconds - before_s
        if nbytes >= COUNTED_BYTES and seconds_since > 0:
            threads = sum(getattr(each, f"{way}_threads") for each in self._disk.rates)
            self._bytes_per_s[way] = nbytes * threads / seconds_since
            self._counted[way] = moved, seconds
        return min(probed_bytes_per_s, self._bytes_per_s.get(way, probed_bytes_per_s))


class PlannedTiers:
    """The tiers of plans, of which a disk may fail or be full while training goes on.

    Parameters
    ----------
    tiers : Tiers
        Where copies may go.

    Attributes
    ----------
    note : str
        What became of the disk; "" as long as it takes what is planned.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self.note = ""
        self._has_failed = False
        self._room_bytes = None if tiers.disk is None else tiers.disk.disk_bytes
        self._refused_bytes = 0
        self._rates = None if tiers.disk is None else RatesWhileTraining(tiers.disk)

    def fields(self, profile: StepProfile, *, on_gpu: bool) -> dict[str, Any]:
        """Return the fields of a profile that say what there is behind the device.

        Of a CPU with a disk the host is none of the tiers: it is the memory that tensors are in.
        With no disk it stands for the one behind a GPU, so that plans are the same on both.
        """
        disk, limit = self._tiers.disk, self._tiers.limit
        host_bytes = None if limit is None else limit.most_bytes
        if host_bytes is not None and disk is not None:  # what `Tiers.place` leaves for those
            host_bytes = int(host_bytes * (1.0 - STAGING_SHARE))
        found: dict[str, Any] = {
            "host_bytes": host_bytes,
            "has_host_tier": self._tiers.host and (on_gpu or disk is None),
        }
        if disk is None or self._rates is None or self._failed_by_now():
            return found
        both = [
            share
            for each in disk.rates
            for share in (
                each.write_while_reading_bytes_per_s / each.write_bytes_per_s,
                each.read_while_writing_bytes_per_s / each.read_bytes_per_s,
            )
        ]
        if on_gpu:  # else what is read is in the device's memory already
            found["read_ahead_bytes"] = read_ahead_bytes(profile, host_bytes)
        return found | {
            "disk": self._rates.rates(),
            "disk_share_both_ways": min(1.0, sum(both) / len(both)),
            "disk_bytes": self._room_bytes,
            "write_bytes_per_s": disk.budget_bytes_per_s,
        }

    def lost(self, written_bytes: float) -> dict[str, Any]:
        """Return the fields of a profile that the disk has changed since; none mostly.

        Parameters
        ----------
        written_bytes : float
            What a step of the plan writes, which is followed.
        """
        disk = self._tiers.disk
        if disk is None or self._has_failed:
            return {}
        if self._failed_by_now():
            gone = dict.fromkeys(("disk", "disk_bytes", "write_bytes_per_s"))
            return {**gone, "read_ahead_bytes": 0}
        before, self._refused_bytes = self._refused_bytes, disk.refused_bytes("full")
        if self._refused_bytes == before or not written_bytes:
            return {}
        taken = disk.file_bytes
        self._room_bytes = taken if taken < written_bytes else int(written_bytes * FULL_SHARE)
        self.note = f"The disk is full: {self._room_bytes:,} bytes of a step are planned there."
        return {"disk_bytes": self._room_bytes}

    def _failed_by_now(self) -> bool:
        error = None if self._tiers.disk is None else self._tiers.disk.error
        if error is not None and not self._has_failed:
            self._has_failed = True
            self.note = f"Planned without the disk, which takes nothing more ({error})."
        return self._has_failed
