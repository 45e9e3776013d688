"""Device memory of encoded copies, from their encoding until they are on the host.

It is taken from torch's allocator, on the stream that computes, as large as the tensor at hand may
need, and goes back to that stream: as soon as the host knows that the copy has crossed, or behind a
mark that the stream waits for. So no device memory is set aside for staging, and at the end of a
forward pass what is staged is as large as the originals that it replaces. For as long as it is
there, the copy is read from it.

How it is ordered: the lane that encodes waits for an event that the stream recorded after the
memory was taken, and thus after all that used it before. It is given back in the order of that
stream only, behind all that other streams do with it; else `record_stream` names these to the
allocator.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable

import torch

from ..engine.kernels.cuda import kernels_on
from ..engine.kernels.cuda.stream import current_stream
from ..engine.memory.locks import current_process
from ..engine.transfer import Event, StreamLane, copy_on
from .copies import StoredCopy
from .host_room import HostMemory
from .limits import STAGED_COPIES
from .originals import Originals
from .stalls import Stalls
from .traffic import SentBlob, Traffic


class StagedBlob:
    """An encoded copy in device memory.

    Parameters
    ----------
    nbytes : int
        Bytes that it may need.
    encoding, out : StreamLane
        What encodes it, and what sends it to the host.
    home : torch.cuda.Stream
        The stream that computes, torch's current one.
    process : int
        This process: a forked child has no GPU.

    Attributes
    ----------
    data : torch.Tensor
        uint8 ``[nbytes]``, taken on `home`: it may be written behind what that has been given.
    encoded, sent : event or None
        When it is filled, and on the host.
    """

    __slots__ = (
        "__weakref__",
        "_all_lanes",
        "_lanes",
        "_process",
        "data",
        "encoded",
        "home",
        "sent",
    )

    def __init__(
        self,
        nbytes: int,
        encoding: StreamLane,
        out: StreamLane,
        home: torch.cuda.Stream,
        process: int,
    ) -> None:
        self._process = process
        self.home = home
        self.data = torch.empty(nbytes, dtype=torch.uint8, device=encoding.device)
        self.encoded: Event | None = None
        self.sent: Event | None = None
        #: Those that may be at work on it, until `sent` was waited for.
        self._lanes: tuple[StreamLane, ...]
        self._all_lanes = self._lanes = encoding, out

    def fill(self, work: Callable[..., None], *args: object, after: Event | None) -> Event:
        """Run ``work(*args)``, which fills it, on the lane that encodes; return when it is done.

        The lane waits for `after`, an event on `home` that was recorded since the memory was taken.
        """
        encoding, _ = self._all_lanes
        encoded = self.encoded = encoding.queue(work, *args, after=after)
        return encoded

    def send(self, host: HostMemory, expected_bytes: int) -> Event:
        """Send it to host memory, as many bytes as are used; return when they are there.

        Parameters
        ----------
        host : torch.Tensor or HostPiece
            Page-locked; what does not fit is left out.
        expected_bytes : int
            As for `copy_blob_on_gpu`.
        """
        self._lanes = self._all_lanes
        _, out = self._all_lanes
        work = copy_blob_on_gpu, self.data, host, expected_bytes
        sent = self.sent = out.queue_on(*work, after=self.encoded)
        return sent

    def blob(self) -> torch.Tensor:
        """Return it to be decoded on torch's current stream, which waits until it is filled."""
        assert self.encoded is not None
        current = current_stream(self.data.device)
        self.encoded.wait(current)
        if current != self.home:
            self.data.record_stream(current)
        return self.data

    def wait_until_sent(self, stalls: Stalls) -> None:
        """Make torch's current stream wait until it is on the host."""
        assert self.sent is not None
        current = current_stream(self.data.device)
        stalls.wait(self.sent, "host", current)
        if current == self.home:
            self._lanes = ()

    def retire(self) -> None:
        """Let its memory be used again at once when it is dropped: it is on the host."""
        self._lanes = ()

    def __del__(self) -> None:
        # Its memory is given to nobody while a lane may be at work on it.
        if self._lanes and not sys.is_finalizing() and self._process == current_process():
            for lane in self._lanes:
                lane.keep(self.data)


class Staging:
    """What is staged on one GPU; its owner calls it under a lock, when `Traffic` has been polled.

    What `Traffic` knows the size of is on the host: no event is asked for that once more.

    Parameters
    ----------
    give_up : callable
        Gives up the original of a copy that torch's current stream, which it is given too, knows to
        be encoded.
    settle : callable
        Called with what is known by now of a copy whose host memory may be too small, and with it
        staged.
    traffic : Traffic
        Numbers copies in the order in which they are sent, and counts waits for them.

    Attributes
    ----------
    unsure_bytes : int
        Bytes before packing of copies whose host memory may be too small.
    sending_bytes : int
        Device memory of copies that are encoded, or being encoded, and not on the host.
    """

    def __init__(
        self,
        give_up: Callable[[StoredCopy, torch.cuda.Stream], None],
        settle: Callable[[StoredCopy | None, SentBlob, StagedBlob], None],
        traffic: Traffic,
    ) -> None:
        self._give_up, self._settle = give_up, settle
        self._numbers, self._stalls = traffic.numbers, traffic.stalls
        #: Copies whose originals are being encoded.
        self._encoding: deque[tuple[weakref.ref[StoredCopy], StagedBlob, int]] = deque()
        self._encoding_bytes = 0
        self._sending: deque[tuple[weakref.ref[StoredCopy], SentBlob, StagedBlob, int]] = deque()
        self.sending_bytes = 0
        self._unsure: deque[tuple[weakref.ref[StoredCopy], SentBlob, StagedBlob]] = deque()
        self.unsure_bytes = 0

    def add(self, copy: StoredCopy, staged: StagedBlob, unsure: bool) -> None:
        """Add a copy that is on its way.

        Parameters
        ----------
        copy : StoredCopy
            The copy, which is read from here as long as it is here.
        staged : StagedBlob
            With both of its events.
        unsure : bool
            Whether its host memory may be too small; then it is here until that is known.
        """
        ref, blob = weakref.ref(copy), copy.blob
        assert blob is not None
        copy.staged = staged
        if copy.original is not None:
            self._encoding.append((ref, staged, copy.nbytes))
            self._encoding_bytes += copy.nbytes
        if unsure:
            self._unsure.append((ref, blob, staged))
            self.unsure_bytes += copy.nbytes
        else:
            self._sending.append((ref, blob, staged, next(self._numbers)))
            self.sending_bytes += staged.data.shape[0]

    def release(
        self,
        allowed_bytes: int,
        last_copies: int = STAGED_COPIES,
        current: torch.cuda.Stream | None = None,
    ) -> None:
        """Give back what is over; torch's current stream waits for what is too much.

        Of the last copies so many are encoded beside what computes, and sent whatever they take.
        `current` may be torch's current stream; it is looked up when left out.
        """
        while self._encoding:
            ref, staged, nbytes = self._encoding[0]
            assert staged.encoded is not None
            over = len(self._encoding) > last_copies or self._encoding_bytes > allowed_bytes
            if not over and not staged.encoded.query():
                break
            copy = ref()
            if copy is not None and copy.original is not None:
                if current is None:
                    current = current_stream(staged.data.device)
                if over:
                    self._stalls.wait(staged.encoded, "host", current)
                self._give_up(copy, current)
            self._encoding.popleft()
            self._encoding_bytes -= nbytes
        while self._unsure and self._unsure[0][1].is_known:
            ref, blob, staged = self._unsure.popleft()
            staged.retire()
            self.unsure_bytes -= blob.nbytes
            self._leave(ref, staged)
            self._settle(ref(), blob, staged)
        while self._sending:
            is_known = self._sending[0][1].is_known
            if not is_known and not self._sends_too_much(allowed_bytes, last_copies):
                break
            self.release_oldest()

    @property
    def oldest(self) -> float:
        """The number of the first copy that may not be on the host; infinite without any."""
        return self._sending[0][3] if self._sending else math.inf

    def release_oldest(self) -> None:
        """Give back the copy that is sent first; torch's current stream waits until it is."""
        ref, blob, staged, _ = self._sending.popleft()
        if blob.is_known:
            staged.retire()
        else:
            staged.wait_until_sent(self._stalls)
        self.sending_bytes -= staged.data.shape[0]
        self._leave(ref, staged)

    def _sends_too_much(self, allowed_bytes: int, last_copies: int) -> bool:
        """Return whether others than the last ones take too much."""
        if len(self._sending) <= last_copies:
            return False
        last = [self._sending[-1 - k][2].data.shape[0] for k in range(last_copies)]
        return self.sending_bytes - sum(last) + self.unsure_bytes > allowed_bytes

    @staticmethod
    def _leave(ref: weakref.ref[StoredCopy], staged: StagedBlob) -> None:
        """Have a copy read from the host from now on."""
        copy = ref()
        if copy is not None and copy.staged is staged:
            copy.staged = None


def release_in_order(
    staging: Staging, originals: Originals, allowed_bytes: int, current: torch.cuda.Stream | None
) -> int:
    """Give back what is sent first, staged or not, until no more is under way than is allowed.

    Copies cross in order: whoever waited for a later one would wait for all.

    Returns
    -------
    int
        Bytes of what is staged still, and counts.
    """
    staging.release(sys.maxsize, 0, current)
    allowed_bytes -= staging.unsure_bytes
    while staging.sending_bytes + originals.in_flight_bytes > allowed_bytes:
        if staging.oldest < originals.oldest:
            staging.release_oldest()
        elif originals.in_flight_bytes:
            held_bytes = originals.unsure_bytes + originals.in_flight_bytes
            originals.release(held_bytes - 1, current)
        else:
            break
    return staging.unsure_bytes + staging.sending_bytes


def copy_blob_on_gpu(
    stream: torch.cuda.Stream, source: HostMemory, target: HostMemory, expected_bytes: int
) -> None:
    """Copy the used bytes of a blob whose size the host does not know, on a stream of its GPU.

    As many as are expected by the copy engine: a kernel that copies as fast over the link slows
    what computes beside it by almost half (VGG16 on an H200). The kernel copies what is missing.

    Parameters
    ----------
    stream : torch.cuda.Stream
        The stream.
    source, target : torch.Tensor or HostPiece
        uint8; one on the GPU, the other one page-locked.
    expected_bytes : int
        What such blobs needed of late; 0 where nothing is known.
    """
    first_byte = min(expected_bytes, source.nbytes, target.nbytes) // 16 * 16
    copy_on(stream, target.data_ptr(), source.data_ptr(), first_byte)
    kernels_on(stream.device).copy_blob(source, target, first_byte, stream.cuda_stream)
