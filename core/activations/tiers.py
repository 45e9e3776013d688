"""Tiers: where copies may go, and which of these one goes to."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..errors import ArgumentError, ArgumentTypeError
from .disk import DRIVES, DiskTier, Drive

Tier = Literal["host", "disk"]
TIERS: Final[tuple[Tier, ...]] = ("host", "disk")
#: With a disk, of the host memory that may be taken: what is left for bytes on their way to it, and
#: for bytes that were read from it.
STAGING_SHARE = 0.5
#: Of these bytes, what may wait to be written.
QUEUE_SHARE = 0.5


class HostLimit:
    """How much host memory copies may take, of all devices together. Threads may share it.

    Parameters
    ----------
    most_bytes : int
        The limit.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._taken_bytes = 0
        #: Filled by the garbage collector, which must take no lock.
        self._returned: deque[int] = deque()
        self._lock = threading.Lock()

    @property
    def taken_bytes(self) -> int:
        """Bytes that are taken now."""
        with self._lock:
            while self._returned:
                self._taken_bytes -= self._returned.popleft()
            return self._taken_bytes

    def take(self, nbytes: int) -> Callable[[], None]:
        """Count bytes that are taken; return what counts them back, and takes no lock."""
        with self._lock:
            self._taken_bytes += nbytes
        return lambda: self._returned.append(nbytes)


@dataclass(frozen=True)
class Tiers:
    """Where copies may go.

    Parameters
    ----------
    host : bool
        Whether they may remain in host memory.
    disk : DiskTier, optional
        Where they go on to.
    limit : HostLimit, optional
        What they may take of the host, on their way to the disk, too.
    """

    host: bool = True
    disk: DiskTier | None = None
    limit: HostLimit | None = None

    def place(
        self, nbytes: int, wanted: Tier | None, *, on_gpu: bool, encoded: bool
    ) -> Tier | None:
        """Return where a copy goes; None where its original is to be kept.

        Without a wish it goes to the disk where there is one; on a GPU with a limit for the host
        that one is filled first.

        Parameters
        ----------
        nbytes : int
            Before packing.
        wanted : "host", "disk" or None
            What a policy has decided.
        on_gpu, encoded : bool
            Whether the original is on a GPU, and the copy is packed: of a raw copy on the CPU that
            the disk does not take, one in host memory would gain nothing.
        """
        disk = self.disk
        if disk is None:
            return "host" if self._host_has(nbytes, 1.0) else None
        if wanted is None:
            wanted = "host" if on_gpu and self.limit is not None else "disk"
        if wanted == "host" and self._host_has(nbytes, 1.0 - STAGING_SHARE):
            return "host"
        if self._host_has(nbytes if on_gpu or encoded else 0, 1.0) and disk.takes(nbytes):
            return "disk"
        gains = wanted == "disk" and (on_gpu or encoded)
        return "host" if gains and self._host_has(nbytes, 1.0 - STAGING_SHARE) else None

    def has_room_to_read(self, nbytes: int) -> bool:
        """Return whether so many bytes may be read ahead of their use, to host memory."""
        limit = self.limit
        return limit is None or limit.taken_bytes + nbytes <= limit.most_bytes

    def _host_has(self, nbytes: int, share: float) -> bool:
        """Return whether a share of the host's limit has so many bytes left."""
        if share < 1.0 and not self.host:
            return False
        if self.limit is None:
            return True
        return self.limit.taken_bytes + nbytes <= share * self.limit.most_bytes


def make_tiers(
    tiers: Sequence[str] | str | None,
    *,
    host_bytes: int | None,
    disk: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
    verify: bool,
    drive: Drive | str | None,
    **options: Any,
) -> Tiers:
    """Return the tiers that `ActivationOffload`'s arguments name; a folder is opened last.

    Parameters
    ----------
    tiers : sequence of str or str, optional
        Names; "host", and "disk" where one is given, when left out.
    host_bytes : int, optional
        The host's limit.
    disk : path or sequence of paths, optional
        Folders.
    verify : bool
        Whether checksums are kept of what is on the disk.
    drive : Drive or str, optional
        The SSDs, or their name in `DRIVES`.
    **options
        ``disk_bytes`` and ``write_budget``, as for `DiskTier`.

    Raises
    ------
    ArgumentError, ArgumentTypeError, DiskError
        As `ActivationOffload` says.
    """
    names = TIERS[: 1 if disk is None else 2] if tiers is None else tiers
    if not isinstance(names, Iterable):
        raise ArgumentTypeError(
            f"tiers: expected names of tiers ({', '.join(TIERS)}), got {names!r:.60}"
        )
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if name not in TIERS:
            raise ArgumentError(f"tiers: {name!r:.60}, accepted are {', '.join(TIERS)}")
    if not names:
        raise ArgumentError(f"tiers: none is named, accepted are {', '.join(TIERS)}")
    if host_bytes is not None and (isinstance(host_bytes, bool) or not isinstance(host_bytes, int)):
        raise ArgumentTypeError(f"host_bytes: expected an int, got {host_bytes!r:.60}")
    if host_bytes is not None and host_bytes < 0:
        raise ArgumentError(f"host_bytes: {host_bytes}, accepted are numbers from 0")
    limit = None if host_bytes is None else HostLimit(host_bytes)
    if disk is None:
        given = [name for name, value in {**options, "drive": drive}.items() if value is not None]
        if given:
            raise ArgumentError(f"{given[0]}: it is for a disk, and no folder is given as disk=")
        if "disk" in names:
            raise ArgumentError("tiers: 'disk' is named, and no folder is given as disk=")
        return Tiers(True, None, limit)
    if "disk" not in names:
        raise ArgumentError("disk: a folder is given, and tiers= does not name 'disk'")
    if isinstance(drive, str):
        if drive not in DRIVES:
            raise ArgumentError(
                f"drive: {drive!r:.60}, known are {', '.join(DRIVES)}; or give a Drive"
            )
        drive = DRIVES[drive]
    elif drive is not None and not isinstance(drive, Drive):
        raise ArgumentTypeError(f"drive: expected a Drive or its name, got {drive!r:.60}")
    if limit is not None:
        options["queue_bytes"] = max(1, int(limit.most_bytes * STAGING_SHARE * QUEUE_SHARE))
    made = DiskTier(disk, verify=verify, drive=drive, **options)
    return Tiers("host" in names, made, limit)
