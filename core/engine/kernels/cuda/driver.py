"""Calls of the CUDA driver by address: what torch does in 5 to 20 us with tensors takes 1 to 3.

The library is the one that torch itself has loaded. Streams and events are those of torch's
runtime, whose numbers are the driver's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

LIBRARY = "libcuda.so.1"
NOT_READY = 600  # CUDA_ERROR_NOT_READY


class _Thread(threading.local):
    #: Whether this thread has a context, so that it may call the driver.
    ready = False


#: What is known of the calling thread.
this_thread = _Thread()
#: Returns torch's current device; torch for the CPU alone has no such function.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
#: By device, its context, which torch's runtime uses, too.
_contexts: dict[int, int] = {}

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class Driver:
    """Functions of the driver; each returns a status, 0 where all is well: see `check`.

    They queue work and return. A thread that calls one is to be ready for a device: it is torch's
    current one, and `this_thread` says so, or it does in `ready`.

    Parameters
    ----------
    library : ctypes.CDLL
        The driver.

    Attributes
    ----------
    copy : callable
        ``copy(target, source, nbytes, stream)``: addresses of a GPU or of page-locked memory.
    fill : callable
        ``fill(target, byte, nbytes, stream)``.
    record : callable
        ``record(event, stream)``.
    wait : callable
        ``wait(stream, event, 0)``.
    query, synchronize : callable
        ``query(event)``, which is `NOT_READY` until it has passed, and ``synchronize(event)``.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self.copy = self._function("cuMemcpyAsync", _POINTER, _POINTER, _SIZE, _POINTER)
        self.fill = self._function("cuMemsetD8Async", _POINTER, ctypes.c_ubyte, _SIZE, _POINTER)
        self.record = self._function("cuEventRecord", _POINTER, _POINTER)
        self.wait = self._function("cuStreamWaitEvent", _POINTER, _POINTER, ctypes.c_uint)
        self.query = self._function("cuEventQuery", _POINTER)
        self.synchronize = self._function("cuEventSynchronize", _POINTER)

    def _function(self, name: str, *types: Any) -> Callable[..., int]:
        found: Any = getattr(self._library, name)
        found.argtypes, found.restype = types, ctypes.c_int
        return found  # type: ignore[no-any-return]

    def check(self, status: int) -> None:
        """Raise the error of a call.

        Raises
        ------
        RuntimeError
            As torch does.
        """
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
            what = (text.value or b"unknown error").decode()
            raise RuntimeError(f"CUDA error: {what} (the driver's number {status})")

    def bind_thread(self, index: int) -> None:
        """Give a thread that has no context yet the one of a device."""
        found = ctypes.c_void_p()
        self.check(self._library.cuCtxGetCurrent(ctypes.byref(found)))
        if not found.value:
            if index not in _contexts:
                device = ctypes.c_int()
                self.check(self._library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index)))
                self.check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(found), device))
                _contexts[index] = found.value or 0
            self.check(self._library.cuCtxSetCurrent(ctypes.c_void_p(_contexts[index])))
        this_thread.ready = True


@functools.cache
def driver() -> Driver:
    """Return the driver of this process."""
    return Driver(ctypes.CDLL(LIBRARY))


def zero_words(count: int, device: torch.device) -> torch.Tensor:
    """Return int64 ``[count]`` of zeros, as `torch.zeros` for torch's current stream does.

    That takes 23 us on a GPU, and this 6.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int64, device=device)
    made = torch.empty(count, dtype=torch.int64, device=device)
    index, where = device.index, made.data_ptr()
    if current_device() != index or not this_thread.ready:
        with ready(index):
            stream = torch._C._cuda_getCurrentRawStream(index)
            driver().check(driver().fill(where, 0, 8 * count, stream))
    elif status := driver().fill(where, 0, 8 * count, torch._C._cuda_getCurrentRawStream(index)):
        driver().check(status)
    return made


@contextlib.contextmanager
def ready(index: int) -> Iterator[None]:
    """Make a device torch's current one, and let this thread call the driver."""
    with torch.cuda.device(index):
        if not this_thread.ready:
            driver().bind_thread(index)
        yield
