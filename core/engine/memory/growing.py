"""Host memory at one address that grows in the background, piece by piece."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time

import torch

from ..kernels.format import ceil_div
from . import page_locking
from .host import LARGE_BYTES, HostBuffer
from .page_taking import HUGE_PAGE_BYTES

#: Memory is taken and page-locked by so much at a time, which takes some milliseconds.
PIECE_BYTES = 16 << 20
THREAD_NAME = "bitslab-growth"
#: After a refusal in the background it is not tried again for so long.
RETRY_SECONDS = 10.0


class GrowingBuffer:
    """Host memory of which the addresses are reserved at once, and the pages taken as it grows.

    What is there is never copied, and who has the address keeps it: kernels on a GPU go on while
    it grows. Each piece is page-locked by itself, so that kernels read it over the link, but one
    copy by CUDA may not reach over several pieces.

    Parameters
    ----------
    most_bytes : int
        What it may grow to.
    pin : bool
        Whether to page-lock it where this process can use a GPU.

    Attributes
    ----------
    tensor : torch.Tensor
        uint8 ``[most_bytes]`` on the CPU, zeros at first, of which the first `nbytes` may be used.
    nbytes : int
        What it has grown to.

    Notes
    -----
    Threads may use it. Forked children see it, as far as it has grown; only its maker lets it grow.
    """

    def __init__(self, most_bytes: int, *, pin: bool) -> None:
        self._buffer = HostBuffer.reserve(most_bytes, near_gpu=pin)
        self._pin = pin
        self._unit_bytes = HUGE_PAGE_BYTES if most_bytes >= LARGE_BYTES else mmap.PAGESIZE
        self.nbytes = 0
        # How far pages are taken, and which of them could not be page-locked: begin and bytes.
        self._end = 0
        self._unlocked: list[tuple[int, int]] = []
        self._lock_refused = False
        self._taking = threading.Lock()
        self._asking = threading.Lock()
        self._wanted = 0
        self._growing = False
        self._refused_until = 0.0

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, always the same tensor."""
        return self._buffer.tensor

    @property
    def most_bytes(self) -> int:
        """What it may grow to."""
        return self._buffer.nbytes

    @property
    def growing(self) -> bool:
        """Whether it grows in the background."""
        return self._growing

    @property
    def refused(self) -> bool:
        """Whether memory in the background was refused lately: `grow_soon` does nothing then."""
        return time.monotonic() < self._refused_until

    @property
    def pinned(self) -> bool:
        """Whether all that it has grown to is page-locked by this process."""
        return not self._unlocked and (not self._end or self._buffer.pinned)

    def ensure_pinned(self) -> bool:
        """Page-lock what is not, unless the system has refused that; return whether all is."""
        if self._unlocked and self._pin and not self._lock_refused:
            with self._taking:
                pieces, self._unlocked = self._unlocked, []
                for piece in pieces:
                    self._keep_locked(*piece, locked=self._buffer.pin_piece(*piece))
        return self.pinned

    def _keep_locked(self, begin: int, nbytes: int, *, locked: bool) -> None:
        if not locked:
            self._unlocked.append((begin, nbytes))
            self._lock_refused |= page_locking.registrar.available()

    def grow(self, nbytes: int) -> None:
        """Grow to so many bytes, page-locked or not: at most `most_bytes`.

        Raises
        ------
        BitslabError
            When the memory cannot be had.
        """
        while self.nbytes < min(nbytes, self.most_bytes):
            self._grow_by_piece(nbytes, only_pinned=False)

    def grow_soon(self, nbytes: int, device: torch.device) -> None:
        """Grow to so many bytes in the background, or to what can be had and page-locked.

        Parameters
        ----------
        nbytes : int
            At most `most_bytes`.
        device : torch.device
            Of who reads it: what is not page-locked is of no use to a GPU.
        """
        with self._asking:
            self._wanted = max(self._wanted, nbytes)
            if self._growing or self._wanted <= self.nbytes or self.refused:
                return
            self._growing = True
        thread = threading.Thread(
            target=self._grow_in_thread, args=(device,), name=THREAD_NAME, daemon=True
        )
        thread.start()

    def _grow_in_thread(self, device: torch.device) -> None:
        try:
            # The current GPU of a new thread is the first one, and page-locking makes a context
            # on the current one.
            on_gpu = device.type == "cuda"
            with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
                while self._is_to_grow():
                    if not self._grow_by_piece(self._wanted, only_pinned=on_gpu):
                        break
                else:
                    return
        except BaseException:  # of a thread nobody hears: who needs the memory asks for it
            pass
        with self._asking:
            self._refused_until = time.monotonic() + RETRY_SECONDS
            self._wanted, self._growing = 0, False

    def _is_to_grow(self) -> bool:
        with self._asking:
            self._growing = self.nbytes < self._wanted
            return self._growing

    def _grow_by_piece(self, nbytes: int, *, only_pinned: bool) -> bool:
        """Grow by one piece towards `nbytes`; False where it cannot, or not page-locked."""
        with self._taking:
            begin, nbytes = self._end, min(nbytes, self.most_bytes)
            if nbytes > begin:
                end = ceil_div(nbytes, self._unit_bytes) * self._unit_bytes
                end = min(end, begin + PIECE_BYTES, self.most_bytes)
                locked = self._buffer.take_piece(begin, end - begin, pin=self._pin)
                if only_pinned and not locked:
                    return False
                self._keep_locked(begin, end - begin, locked=locked)
                self._end = end
            self.nbytes = max(self.nbytes, min(nbytes, self._end))
            return True

    def close(self) -> None:
        """Free the memory, after what grows; waits for the GPUs that may still read it."""
        with self._asking:
            self._wanted = 0
        with self._taking:
            self._buffer.close()
