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


def rates_while_training(disk: DiskTier) -> DiskRates:
    """Return what a disk carries: the probe's rates, or those of the steps so far if they are less.

    As fast as its threads were while they moved anything: beside a training they wait for
    processors and for Python's lock, and in profiled steps under a limit of memory they move all.
    """
    stats = disk.stats()

    def rate(moved: str, moving: str, probed_bytes_per_s: float, threads: int) -> float:
        nbytes, seconds = int(stats[moved]), float(stats[moving])
        if nbytes < COUNTED_BYTES or seconds <= 0:
            return probed_bytes_per_s
        return min(probed_bytes_per_s, nbytes * threads / seconds)

    return DiskRates(
        rate(
            "written_bytes",
            "write_seconds",
            disk.write_bytes_per_s,
            sum(each.write_threads for each in disk.rates),
        ),
        rate(
            "read_bytes",
            "read_seconds",
            disk.read_bytes_per_s,
            sum(each.read_threads for each in disk.rates),
        ),
    )


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
        if disk is None or self._failed_by_now():
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
            "disk": rates_while_training(disk),
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
