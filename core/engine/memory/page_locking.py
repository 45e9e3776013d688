"""Page-locking of mapped memory, so that GPUs read it by themselves; and its release."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import warnings
from typing import Any, Protocol

import torch

from ...errors import BitslabError

_warned_of_refusal = False
_waiting: list[MappedMemory] = []  # to be released when no stream is capturing


class Registrar(Protocol):
    """What page-locks memory for GPUs; tests replace CUDA's by a recording one."""

    def available(self) -> bool:
        """Return whether this process can use a GPU."""

    def pci_address(self) -> str | None:
        """Return where the current GPU is on the PCI bus, "0000:1b:00.0"; None if unknown."""

    def capturing(self) -> bool:
        """Return whether the current stream records a graph, when neither call below is allowed."""

    def register(self, address: int, nbytes: int) -> str:
        """Page-lock memory and map it for every GPU; return why that was refused, or ""."""

    def unregister(self, address: int) -> None:
        """Undo `register`."""

    def synchronize(self) -> None:
        """Wait for every GPU that this process has used."""


class CudaRegistrar:
    """Page-locks memory through the CUDA runtime that torch loads."""

    PORTABLE_MAPPED = 1 | 2  # for every GPU of the process, at the address that the CPU uses

    def available(self) -> bool:
        """Return whether this process can use a GPU; a child forked after CUDA started cannot."""
        return not torch.cuda._is_in_bad_fork() and torch.cuda.is_available()

    def pci_address(self) -> str | None:
        """Return where the current GPU is on the PCI bus, "0000:1b:00.0"; None if unknown."""
        found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        try:
            where = found.pci_domain_id, found.pci_bus_id, found.pci_device_id
        except AttributeError:  # an older torch
            return None
        return "{:04x}:{:02x}:{:02x}.0".format(*where)

    def capturing(self) -> bool:
        """Return whether the current stream records a graph."""
        return torch.cuda.is_current_stream_capturing()

    def register(self, address: int, nbytes: int) -> str:
        """Page-lock memory and map it for every GPU; return why that was refused, or ""."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        result = runtime.cudaHostRegister(address, nbytes, self.PORTABLE_MAPPED)
        if result == runtime.cudaError.success:
            return ""
        # CUDA keeps the refusal as its last error, and the next kernel launch would report it as
        # its own; the launch that does so makes CUDA forget it.
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device="cuda").fill_(1)
        return str(runtime.cudaGetErrorString(result))

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(address)

    def synchronize(self) -> None:
        """Wait for every GPU that this process has used; starts none."""
        for index in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined]
                # A GPU that has failed reads nothing more, and its next use raises.
                with contextlib.suppress(RuntimeError):
                    torch.cuda.synchronize(index)


registrar: Registrar = CudaRegistrar()


class MappedMemory(mmap.mmap):
    """Mapped memory, page-locked at most as long as it is mapped.

    Tensors over it hold this object, so it is freed with the last of them. Only then are the pages
    unlocked, and before they are unmapped.
    """

    address = 0
    # Of what is used, which begins `begin` bytes behind the start.
    begin = nbytes = 0
    refused = False
    _registered_by = 0  # a process id: a forked child has the attribute but not the registration

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock = threading.Lock()

    def is_pinned(self) -> bool:
        """Return whether this process has it page-locked."""
        return self._registered_by == os.getpid()

    def pin(self) -> bool:
        """Page-lock once; False when the system refuses, with one warning in a process."""
        if self.is_pinned() or self.refused or not registrar.available():
            return self.is_pinned()
        with self._lock:
            if self.is_pinned() or self.refused:
                return self.is_pinned()
            if registrar.capturing():
                raise BitslabError(
                    "host memory cannot be page-locked while a graph is captured: gather from it "
                    "once before the capture, or call ensure_pinned()"
                )
            reason = registrar.register(self.address, self.nbytes)
            if reason:
                self.refused = True
                _warn_of_refusal(self.nbytes, reason)
            else:
                self._registered_by = os.getpid()
        return self.is_pinned()

    def release(self) -> bool:
        """Unlock the pages once; False when that has to wait for the end of a graph capture."""
        if not self.is_pinned():
            return True
        with self._lock:
            if self.is_pinned():
                if registrar.capturing():
                    return False
                registrar.synchronize()
                registrar.unregister(self.address)
                self._registered_by = 0
        return True

    def __del__(self) -> None:
        # A process that ends frees everything, and CUDA may be shut down already.
        if not sys.is_finalizing():
            release_or_wait(self)


def release_or_wait(memory: MappedMemory) -> None:
    """Unlock the pages of memory, now or in a later `release_waiting` when a stream is captured."""
    if not memory.release():
        _waiting.append(memory)


def release_waiting() -> None:
    """Release what could not be released while a stream was captured."""
    for _ in range(len(_waiting)):
        with contextlib.suppress(IndexError):  # another thread took the last one
            memory = _waiting.pop()
            if not memory.release():
                _waiting.append(memory)
                return


def _warn_of_refusal(nbytes: int, reason: str) -> None:
    global _warned_of_refusal
    if _warned_of_refusal:
        return
    _warned_of_refusal = True
    warnings.warn(
        f"bitslab: the system refused to page-lock {nbytes} bytes of host memory ({reason}). They "
        "are used as ordinary memory, and rows for a GPU are gathered by the CPU. Raise the limit "
        "of locked memory (ulimit -l unlimited; docker run --ulimit memlock=-1) or use less memory",
        UserWarning,
        stacklevel=2,
    )
