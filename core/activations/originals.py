"""Originals whose copies are under way, until these are known to be complete."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable

import torch

from ..engine.kernels.cuda.stream import current_stream
from ..engine.tasks import ThreadTask
from ..engine.transfer import Mark
from .copies import StoredCopy
from .traffic import SentBlob, Traffic, is_done


class Originals:
    """Holds originals on one device while their copies are under way. Its owner holds a lock.

    Parameters
    ----------
    device : torch.device
        The device.
    traffic : Traffic
        Counts what is away.
    failed : callable
        Called with the name of a site and an error, where a copy failed; the original is kept.
    send_again : callable
        Sends a copy that was larger than its host memory once more.

    Attributes
    ----------
    unsure_bytes : int
        Bytes of those whose copies may be larger than their host memory.
    in_flight_bytes : int
        Bytes of the others.
    """

    def __init__(
        self,
        device: torch.device,
        traffic: Traffic,
        failed: Callable[[str, BaseException], None],
        send_again: Callable[[StoredCopy], None],
    ) -> None:
        self._device, self._traffic = device, traffic
        self._failed, self._send_again = failed, send_again
        self.unsure_bytes = self.in_flight_bytes = 0
        self._in_flight: deque[tuple[weakref.ref[StoredCopy], Mark, int, int]] = deque()
        self._unsure: deque[tuple[weakref.ref[StoredCopy], SentBlob]] = deque()

    def hold(self, copy: StoredCopy, read: Mark) -> None:
        """Hold the original of a copy until it has been read."""
        self._in_flight.append((weakref.ref(copy), read, copy.nbytes, next(self._traffic.numbers)))
        self.in_flight_bytes += copy.nbytes

    @property
    def oldest(self) -> float:
        """The number of the first copy that its original is held for; infinite without any."""
        return self._in_flight[0][3] if self._in_flight else math.inf

    def hold_until_sized(self, copy: StoredCopy, blob: SentBlob) -> None:
        """Hold the original of a copy until it is known to fit in its host memory."""
        self._unsure.append((weakref.ref(copy), blob))
        self.unsure_bytes += copy.nbytes

    def release(self, allowed_bytes: int, current: torch.cuda.Stream | None = None) -> None:
        """Give up originals whose copies are done, or that are too many.

        On a GPU `current` may be torch's current stream; it is looked up when left out.
        """
        while self._unsure:
            blob = self._unsure[0][1]
            if not is_done(blob.stored):
                over = self.unsure_bytes + self.in_flight_bytes > allowed_bytes
                if not over or not isinstance(blob.stored, ThreadTask):
                    break
                self._traffic.stalls.wait(blob.stored, "host")
            self._settle(*self._unsure.popleft())
        in_flight = self._in_flight
        while in_flight:
            ref, done, nbytes, _ = in_flight[0]
            over = self.unsure_bytes + self.in_flight_bytes > allowed_bytes
            if not over and not (done.done() if isinstance(done, ThreadTask) else done.query()):
                return
            if over:  # for one that nobody wants any more, too: its memory is in use until then
                self._traffic.stalls.wait(done, "host", current)
            copy = ref()
            if copy is not None and copy.original is not None:
                error = done.exception() if isinstance(done, ThreadTask) else None
                if error is None:
                    self.give_up(copy, current)
                else:
                    self._failed(copy.name, error)
            del copy
            in_flight.popleft()
            self.in_flight_bytes -= nbytes

    def _settle(self, ref: weakref.ref[StoredCopy], blob: SentBlob) -> None:
        """Give up the original of a copy that fits in its host memory, or send it again."""
        self.unsure_bytes -= blob.nbytes
        self._traffic.learn(blob)
        copy = ref()
        if copy is None or copy.original is None:
            return
        if blob.used_bytes is not None:
            self.give_up(copy)
            return
        try:
            if not blob.cut_off:
                assert isinstance(blob.stored, ThreadTask)
                blob.stored.result()  # raises what happened
            self._send_again(copy)
        except Exception as error:
            self._failed(copy.name, error)

    def give_up(self, copy: StoredCopy, current: torch.cuda.Stream | None = None) -> None:
        """Give the device memory of an original back: what reads it comes before what follows."""
        home, original = copy.home, copy.original
        if home is not None and original is not None:
            # Without hooks the graph would hold it. Nothing, where it was allocated on that stream.
            original.record_stream(home)
            if current is None:
                current = current_stream(self._device)
            if home is not current and home != current:  # which alone waits for the copy
                copy.keep_original_until_copied()
        copy.drop_original()
        copy.lanes = ()
        copy.away = self._traffic.dropped
        self._traffic.left(copy.nbytes)
