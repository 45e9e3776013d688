"""Copies that go on to a disk tier and come back: what the executor of a device asks of one.

On a GPU they cross to page-locked memory first, and are written from there. What is raw on the CPU
is written from where it is, with no copy: the tier holds it until it is there, and gives the very
tensor back to whoever wants it earlier.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
import weakref
from collections import deque

import torch

from ..engine.tasks import ThreadTask
from ..engine.transfer import Event, Mark
from .copies import StoredCopy
from .disk import DiskTier
from .disk.tensor_file import ALIGN_BYTES
from .host_room import HostMemoryError, HostRoom
from .traffic import Traffic, failed, is_done


class DiskMoves:
    """Writes copies of one device to a disk tier, and reads them. Its owner calls it under a lock.

    Parameters
    ----------
    tier : DiskTier
        The tier.
    room : HostRoom
        Memory that copies pass through.
    traffic : Traffic
        Counts what is away.
    on_gpu : bool
        Whether the device is a GPU.

    Attributes
    ----------
    waiting_bytes : int
        Bytes of tensors on the CPU that are held until they are written.
    sites : set of str
        Those whose last copy was given to the tier.
    """

    def __init__(self, tier: DiskTier, room: HostRoom, traffic: Traffic, on_gpu: bool) -> None:
        self.tier, self._on_gpu = tier, on_gpu
        self._room, self._traffic = room, traffic
        self.waiting_bytes = 0
        self.sites: set[str] = set()
        #: Copies that are being written, and bytes of originals that are held for it.
        self._writing: deque[tuple[weakref.ref[StoredCopy], int]] = deque()
        #: Encoded copies, whose size is not known on the host yet.
        self._encoded: deque[weakref.ref[StoredCopy]] = deque()
        self._failure_reported = False

    def staging(self, nbytes: int, events: list[Event]) -> torch.Tensor:
        """Return uint8 ``[n]`` of the host that is written and read with no further copy.

        Raises
        ------
        HostMemoryError
            When it cannot be had.
        """
        return _aligned(self._room.cut(nbytes + ALIGN_BYTES, events), nbytes)

    # Out

    def write_original(self, copy: StoredCopy) -> bool:
        """Write a copy from its original on the CPU, or return False: it remains there.

        The tier holds the original, and drops it when it is written.
        """
        flat = copy.original
        assert flat is not None
        ticket = self.tier.store(flat.view(torch.uint8))
        if ticket is None:
            return False
        copy.ticket = ticket
        copy.original = None
        self.sites.add(copy.name)
        self._writing.append((weakref.ref(copy), copy.nbytes))
        self.waiting_bytes += copy.nbytes
        return True

    def write(self, copy: StoredCopy, after: Mark | None, used_bytes: int) -> None:
        """Write what a copy has on the host; it remains there where the tier does not take it."""
        host = copy.host
        assert isinstance(host, torch.Tensor)
        ticket = self.tier.store(host[:used_bytes], after)
        if ticket is not None:
            copy.ticket = ticket
            copy.host = None
            self.sites.add(copy.name)
            self._writing.append((weakref.ref(copy), 0))

    def write_when_sized(self, copy: StoredCopy) -> None:
        """Write an encoded copy as soon as its size is known on the host."""
        self._encoded.append(weakref.ref(copy))

    def poll(self, held_bytes: int | None = None) -> None:
        """Write what is encoded by now, and count what is written.

        Waits until `held_bytes` of originals are held for writing, at most; for nothing when left
        out.
        """
        self._go_on()
        if held_bytes is not None:
            self._hold_at_most(held_bytes)

    def _go_on(self) -> None:
        while self._encoded:
            copy = self._encoded[0]()
            if copy is not None and copy.stored is not None and not is_done(copy.stored):
                break
            self._encoded.popleft()
            if copy is not None:
                self._write_encoded(copy)
            del copy
        while self._writing:
            ref, held_bytes = self._writing[0]
            copy = ref()
            ticket = None if copy is None else copy.ticket
            if ticket is not None and ticket.pending:
                break
            self._writing.popleft()
            self.waiting_bytes -= held_bytes
            if copy is None or ticket is None:
                continue
            if ticket.error is not None:
                self._tell(copy.name, ticket.error)
            elif held_bytes and not ticket.in_memory and copy.arrived is None:
                copy.away = self._traffic.dropped
                self._traffic.left(copy.nbytes)
            del copy, ticket

    def _write_encoded(self, copy: StoredCopy) -> None:
        blob, stored = copy.blob, copy.stored
        assert blob is not None and stored is not None
        self._traffic.learn(blob)
        wanted = copy.host is not None and copy.fetched is None and copy.restored is None
        # One that failed, or was cut off and could not be sent again, has its original.
        if wanted and not failed(stored) and blob.used_bytes is not None:
            self.write(copy, None, blob.used_bytes)

    def _hold_at_most(self, nbytes: int) -> None:
        while self.waiting_bytes > nbytes:
            ref, _ = self._writing[0]
            copy = ref()
            if copy is not None and copy.ticket is not None:
                begin = time.perf_counter()
                self.tier.wait(copy.ticket)
                self._traffic.stalls.waited("disk", time.perf_counter() - begin)
            del copy
            before = len(self._writing)
            self._go_on()
            if len(self._writing) == before:  # a tier that is closed writes no more
                return

    def _tell(self, name: str, error: BaseException) -> None:
        if not self._failure_reported:
            self._failure_reported = True
            warnings.warn(
                f"bitslab: {name!r} could not be written ({error}); it is kept in memory, and "
                "nothing more is written there",
                UserWarning,
                stacklevel=6,
            )

    # And back

    def read(self, copy: StoredCopy) -> ThreadTask[torch.Tensor]:
        """Begin to read a copy, if it is not read already; return the task, whose result it has.

        What is not written yet comes from memory, and what of it waits is written no more.
        """
        if copy.reading is None:
            assert copy.ticket is not None
            room = functools.partial(self._room_to_read, copy.events)
            copy.reading = self.tier.fetch(copy.ticket, room=room)
        return copy.reading

    def _room_to_read(self, events: list[Event], nbytes: int) -> torch.Tensor:
        """Return memory for bytes that are read: those of a tensor itself on the CPU."""
        if self._on_gpu:
            # Without page-locked memory copying is slower.
            with contextlib.suppress(HostMemoryError):
                return self.staging(nbytes, events)
        return _aligned(torch.empty(nbytes + ALIGN_BYTES, dtype=torch.uint8), nbytes)


def _aligned(memory: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return the bytes of some memory that begin at a block of the disk."""
    begin = -memory.data_ptr() % ALIGN_BYTES
    return memory[begin : begin + nbytes]
