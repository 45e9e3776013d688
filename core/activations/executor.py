"""The executor: it encodes copies, moves them to the host and brings them back, on one device.

On a GPU all is queued on streams, in the order in which each waits for the other, and the host
waits for nothing: a copy is encoded on one stream into a staging buffer, and written from there to
host memory on another one, by a kernel that reads the number of used bytes on the device. On the
CPU threads stand for the streams.

The original is given up when the bytes in flight are more than `in_flight_bytes`: the stream that
computes then waits until the oldest copy has been read, and its memory is used again in the order
of that stream, however far the host is ahead.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch

from ..engine.codecs.blob import HEADER_BYTES, Blob, BlobCodec
from ..engine.kernels.cpu.blob_copy import copy_blob
from ..engine.kernels.cuda import kernels_on
from ..engine.kernels.cuda.runner import do_nothing
from ..engine.kernels.cuda.stream import current_stream
from ..engine.memory import Reservation, host_arena
from ..engine.memory.locks import call_after_fork
from ..engine.transfer import (
    Mark,
    StagingBuffer,
    StagingRing,
    StreamLane,
    ThreadLane,
    record_on,
    wait_on_host,
)
from ..errors import BitslabError
from .copies import StoredCopy

#: Host memory is reserved in pieces of this many bytes or more: page-locking costs by the call.
RESERVED_BYTES = 64 << 20
#: Encoded copies on a device: one is encoded while another one is written to the host.
STAGING_BUFFERS = 2


class HostMemoryError(BitslabError):
    """There is no host memory for a copy."""


class Executor:
    """Moves copies of one device.

    Parameters
    ----------
    device : torch.device
        The device.
    in_flight_bytes : int
        Bytes of originals that are kept at most while their copies are under way.
    came_back : callable
        Called with each copy that comes back, and the bytes that cross for it.
    failed : callable
        Called with the name of a site and an error, when a thread could not encode or copy a tensor
        of it; the original is kept.

    Attributes
    ----------
    moved_out_bytes, moved_in_bytes : int
        Raw bytes of the copies that went to the host and came back.
    """

    def __init__(
        self,
        device: torch.device,
        in_flight_bytes: int,
        came_back: Callable[[StoredCopy, int], None],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self.device = device
        self.in_flight_bytes = in_flight_bytes
        self._came_back, self._failed = came_back, failed
        self.on_gpu = device.type == "cuda"
        self._open_lanes()
        self._begin()
        call_after_fork(self)

    def _open_lanes(self) -> None:
        self._encoding: StreamLane | ThreadLane
        self._out: StreamLane | ThreadLane
        self._in: StreamLane | ThreadLane
        if self.on_gpu:
            self._encoding, self._out, self._in = (StreamLane(self.device) for _ in range(3))
        else:
            names = "encode", "out", "in"
            self._encoding, self._out, self._in = (ThreadLane(f"bitslab-{n}") for n in names)

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._ring = _empty_ring()
        self._reservation: Reservation | None = None
        self._in_flight: deque[tuple[weakref.ref[StoredCopy], Mark, int]] = deque()
        self._in_flight_bytes = 0
        self.moved_out_bytes = self.moved_in_bytes = 0

    def after_fork(self) -> None:
        """Begin anew in a forked child: locks, host memory and work under way are the parent's."""
        self._begin()

    # To the host

    def store(
        self, copy: StoredCopy, codec: BlobCodec | None, sm_budget: int | None = None
    ) -> None:
        """Send a copy to the host, encoded or raw.

        Parameters
        ----------
        copy : StoredCopy
            With its original.
        codec : BlobCodec or None
            Encodes it; None for raw bytes.
        sm_budget : int, optional
            Multiprocessors that encoding takes at most, for it runs beside what computes.

        Raises
        ------
        HostMemoryError
            When there is no host memory; nothing has changed then.
        """
        flat = copy.original
        assert flat is not None
        with self._lock:
            most = flat.nbytes
            if codec is not None:
                most = codec.max_encoded_bytes(flat.shape, flat.dtype)
            copy.host = host = self._cut(most, copy.events)
            copy.codec = codec
            begin = record_on(current_stream(self.device)) if self.on_gpu else None
            done: Mark
            if codec is None:
                done = copy.stored = self._out.run(_copy, flat, host, self.on_gpu, after=begin)
                lane = self._out
            else:
                buffer = self._ring.take((), must=True)
                _renew(buffer)
                buffer.fill(self._encoding, self._encode, codec, flat, buffer, begin, sm_budget)
                buffer.drain(self._out, _send, buffer, host, self.on_gpu)
                encoded, sent = buffer.ready, buffer.released
                assert encoded is not None and sent is not None
                lane = self._encoding
                if isinstance(self._out, StreamLane):  # the ring records its mark again
                    done, copy.stored = encoded, self._out.record()
                else:
                    done = copy.stored = sent
            if isinstance(lane, StreamLane):
                copy.lanes = (lane,)
            if isinstance(copy.stored, torch.cuda.Event):
                copy.events.append(copy.stored)
            self.moved_out_bytes += copy.nbytes
            self._in_flight.append((weakref.ref(copy), done, copy.nbytes))
            self._in_flight_bytes += copy.nbytes
            self._release(self.in_flight_bytes)

    def _encode(
        self,
        codec: BlobCodec,
        flat: torch.Tensor,
        buffer: StagingBuffer[int],
        begin: torch.cuda.Event | None,
        sm_budget: int | None,
    ) -> None:
        """Fill a staging buffer, on the lane that encodes."""
        if begin is not None:
            self._encoding.wait(begin)  # type: ignore[union-attr]
        most = codec.max_encoded_bytes(flat.shape, flat.dtype)
        if buffer.memory is None or buffer.memory.shape[0] < most:
            # This lane waits for what reads the old memory, so that its successor may take it.
            buffer.memory = None
            buffer.memory = torch.empty(most, dtype=torch.uint8, device=self.device)
        codec.encode(flat, out=buffer.memory, sm_budget=sm_budget)

    def _cut(self, nbytes: int, events: list[torch.cuda.Event]) -> torch.Tensor:
        """Return host memory, which goes back when the last tensor and the GPU are done with it."""
        nbytes = max(nbytes, 1)
        if self._reservation is None or self._reservation.nbytes < nbytes:
            self._reservation = None
            try:
                made = host_arena().reserve(nbytes, max(nbytes, RESERVED_BYTES))
            except BitslabError:
                try:
                    made = host_arena().reserve(nbytes)
                except BitslabError as error:
                    raise HostMemoryError(str(error)) from error
            if self.on_gpu and not made.pinned:
                raise HostMemoryError("the system refused to page-lock host memory")
            self._reservation = made
        return self._reservation.cut(nbytes, lambda: events)

    def _release(self, allowed_bytes: int) -> None:
        """Give up originals whose copies are done, or that are too many."""
        while self._in_flight:
            ref, done, nbytes = self._in_flight[0]
            over = self._in_flight_bytes > allowed_bytes
            if not over and not _is_done(done):
                return
            copy = ref()
            if copy is not None and copy.original is not None:
                if over:
                    self._wait(done)
                error = done.exception() if isinstance(done, Future) else None
                if error is None:
                    copy.original = None
                    copy.lanes = ()
                else:
                    self._failed(copy.name, error)
            del copy
            self._in_flight.popleft()
            self._in_flight_bytes -= nbytes

    def _wait(self, mark: Mark) -> None:
        """Make what computes wait: torch's current stream, or the host for a thread."""
        if isinstance(mark, Future):
            wait_on_host(mark)
        else:
            mark.wait(current_stream(self.device))

    # And back

    def fetch(self, copy: StoredCopy) -> None:
        """Begin to bring a copy back, if it is not here or coming already."""
        with self._lock:
            if copy.original is not None or copy.restored is not None or copy.fetched is not None:
                return
            host, stored = copy.host, copy.stored
            assert host is not None and stored is not None
            used = host.shape[0]
            known = True
            if copy.codec is not None:
                known = _is_done(stored)
                used = _used_bytes(host) if known else used
            # Of the stream that computes, behind whose work it is filled and given back.
            copy.fetched = fetched = torch.empty(used, dtype=torch.uint8, device=self.device)
            begin = record_on(current_stream(self.device)) if self.on_gpu else None
            copy.arrived = self._in.run(self._fill, fetched, host, stored, known, after=begin)
            if self.on_gpu:
                copy.events.append(copy.arrived)  # type: ignore[arg-type]
                del copy.events[:-1]  # which is behind those before
            self.moved_in_bytes += copy.nbytes
            if known:
                self._came_back(copy, used)

    def _fill(self, out: torch.Tensor, host: torch.Tensor, stored: Mark, known: bool) -> None:
        """Copy from the host, on the lane that brings copies back."""
        if isinstance(stored, Future):
            stored.result()
            out.copy_(host[: out.shape[0]])
            return
        self._in.wait(stored)  # type: ignore[union-attr]
        if known:
            out.copy_(host[: out.shape[0]], non_blocking=True)
        else:
            kernels_on(self.device).copy_blob(host, out)

    def bytes_of(self, copy: StoredCopy, more: bool) -> torch.Tensor:
        """Return the bytes of a copy, ``[n]`` of its dtype, on the device.

        Parameters
        ----------
        copy : StoredCopy
            The copy.
        more : bool
            Whether other views of it will be read soon.
        """
        with self._lock:
            self._release(self.in_flight_bytes)
            if copy.original is not None:
                return copy.original
            restored = copy.restored
            if restored is None:
                restored = self._still_there(copy)
            if restored is None:
                restored = self._restore(copy)
                copy.shared = weakref.ref(restored.untyped_storage())
            copy.restored = restored if more else None
            return restored

    def _still_there(self, copy: StoredCopy) -> torch.Tensor | None:
        """Return what was restored before, while somebody has a view of it."""
        storage = None if copy.shared is None else copy.shared()
        if storage is None:
            return None
        return torch.empty(0, dtype=copy.dtype, device=self.device).set_(
            storage, 0, (copy.elements,), (1,)
        )

    def _restore(self, copy: StoredCopy) -> torch.Tensor:
        self.fetch(copy)
        fetched, arrived = copy.fetched, copy.arrived
        assert fetched is not None and arrived is not None
        self._wait(arrived)
        copy.fetched = copy.arrived = None
        if isinstance(arrived, Future):
            arrived.result()
        if copy.codec is None:
            return fetched.view(copy.dtype)
        return copy.codec.decode(Blob(fetched, torch.Size([copy.elements]), copy.dtype))

    def close(self) -> None:
        """Wait for the work under way, and end threads; they start again when a copy is read."""
        for lane in (self._encoding, self._out, self._in):
            if isinstance(lane, ThreadLane):
                wait_on_host(lane.run(do_nothing))  # behind all, which closing would cancel
            lane.close()
        with self._lock:
            self._release(0)
            self._reservation = None
            self._ring = _empty_ring()
            if not self.on_gpu:
                self._open_lanes()


def _empty_ring() -> StagingRing[int]:
    return StagingRing([StagingBuffer() for _ in range(STAGING_BUFFERS)])


def _renew(buffer: StagingBuffer[int]) -> None:
    """Make the next fill record a mark of its own, which is waited for later."""
    buffer.ready = None


def _copy(flat: torch.Tensor, host: torch.Tensor, on_gpu: bool) -> None:
    host.copy_(flat.view(torch.uint8), non_blocking=on_gpu)


def _send(buffer: StagingBuffer[int], host: torch.Tensor, on_gpu: bool) -> None:
    """Copy the used bytes of a blob."""
    if on_gpu:
        kernels_on(buffer.data.device).copy_blob(buffer.data, host)
        return
    copy_blob(buffer.data, host)


def _used_bytes(data: torch.Tensor) -> int:
    """Return the used bytes of a blob on the host, as far as there are as many."""
    used = int(data[:8].view(torch.int64)[0])
    return min(max(used, HEADER_BYTES), data.shape[0])


def _is_done(mark: Mark) -> bool:
    if isinstance(mark, Future):
        return mark.done()
    passed: bool = mark.query()  # type: ignore[no-untyped-call]
    return passed
