"""Events of streams that are used again and again, and recorded and waited for by their address."""

from __future__ import annotations

import torch

from ..kernels.cuda.driver import NOT_READY, current_device, driver, ready, this_thread

#: By device, torch's events that nobody has: they own the driver's.
_free: dict[int, list[torch.cuda.Event]] = {}


class StreamEvent:
    """An event on a GPU, in the place of a `torch.cuda.Event`: at a fraction of its price.

    When it is dropped, the event behind it goes to the next one. What has waited for it by then is
    not changed by that: a stream waits for what was recorded by the time of the call.

    Parameters
    ----------
    index : int
        Of the GPU.
    stream : torch.cuda.Stream, optional
        One of it, on which it is recorded.

    Attributes
    ----------
    address : int
        Of the driver's event; 0 before it was recorded the first time.
    has_passed : bool
        What is known: it was not recorded yet, or was found to have passed since.
    """

    __slots__ = ("_driver", "_event", "_free", "_index", "address", "has_passed")

    def __init__(self, index: int, stream: torch.cuda.Stream | None = None) -> None:
        self._index = index
        free = _free.get(index)
        if free is None:
            free = _free.setdefault(index, [])
        self._free, self._driver = free, driver()
        self.has_passed = True
        try:
            self._event: torch.cuda.Event = free.pop()
        except IndexError:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.address: int = self._event.cuda_event
        if stream is None:
            return
        if not self.address or current_device() != index or not this_thread.ready:
            self.record(stream)
            return
        self.has_passed = False
        if status := self._driver.record(self.address, stream.cuda_stream):
            self._driver.check(status)

    def record(self, stream: torch.cuda.Stream) -> None:
        """Record it behind all that a stream of its device has been given."""
        self.has_passed = False
        if not self.address:
            self._event.record(stream)  # which makes it, whatever device is the current one
            self.address = self._event.cuda_event
        elif current_device() != self._index or not this_thread.ready:
            with ready(self._index):
                self._driver.check(self._driver.record(self.address, stream.cuda_stream))
        elif status := self._driver.record(self.address, stream.cuda_stream):
            self._driver.check(status)

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Make a stream wait for it, of whatever device, if it is not known to have passed."""
        if self.has_passed:
            return
        if current_device() != stream.device_index or not this_thread.ready:
            with ready(stream.device_index):
                self._driver.check(self._driver.wait(stream.cuda_stream, self.address, 0))
        elif status := self._driver.wait(stream.cuda_stream, self.address, 0):
            self._driver.check(status)

    def query(self) -> bool:
        """Return whether it has passed; waits for nothing."""
        if self.has_passed:
            return True
        if this_thread.ready:  # whatever device is the current one
            status = self._driver.query(self.address)
        else:
            with ready(self._index):
                status = self._driver.query(self.address)
        if status and status != NOT_READY:
            self._driver.check(status)
        self.has_passed = not status
        return not status

    def synchronize(self) -> None:
        """Wait on the host until it has passed."""
        if not self.has_passed:
            with ready(self._index):
                self._driver.check(self._driver.synchronize(self.address))
            self.has_passed = True

    def __del__(self) -> None:
        # Where `__init__` failed there is none.
        if (event := getattr(self, "_event", None)) is not None:
            self._free.append(event)
