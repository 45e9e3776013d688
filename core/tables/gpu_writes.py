"""Rows that a GPU packs into a table by itself; the host's metadata follows when asked for."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import torch

from ..engine.kernels.rewriting import (
    FREE,
    USED,
    USED_BITS,
    LeavingRows,
    OverflowPlaces,
)
from ..engine.memory.host import HostBuffer
from ..engine.memory.locks import ReadersAndWriter
from ..errors import BitslabError
from .device import DeviceCopies
from .overflow import Overflow
from .rows import HostRows

#: The overflow area is made for so many batches at once: the host learns later, and without
#: waiting, how many of their rows took a place there,
BATCHES_AHEAD = 4
#: but for at most this share of the table's rows where two batches need no more.
AHEAD_SHARE = 1 / 8

_NONE = np.empty(0, np.int64)


class GpuWrites:
    """Packs rows into a table in page-locked memory by a GPU's kernels, without waiting for them.

    The words are written where they belong; what finds rows among them (which have moved, which are
    packed, their clusters) is kept on the GPU, and copied to the host by `finish`, which whatever
    reads rows there calls first. Each row is written there whole before: one thread writes, and
    nobody reads rows on the host meanwhile.

    Parameters
    ----------
    rows : HostRows
        The rows: packed, one item in each.
    copies : DeviceCopies
        Their metadata on GPUs.
    lock : ReadersAndWriter
        The table's lock.
    device : torch.device
        Where rows are written from.
    """

    def __init__(
        self, rows: HostRows, copies: DeviceCopies, lock: ReadersAndWriter, device: torch.device
    ) -> None:
        self.rows = rows
        self.device = device
        self._copies = copies
        self._table_lock = lock
        self._lock = threading.RLock()
        self._report_memory = HostBuffer.allocate(16)
        self._report = self._report_memory.tensor.view(torch.int64).numpy()
        self._places: OverflowPlaces | None = None
        self._sent: torch.cuda.Event | None = None
        self._launches = 0
        # Number and most rows of the launches that the report may not count yet.
        self._under_way: deque[tuple[int, int]] = deque()
        self._counted = 0
        # Whether the device knows anything that the host does not.
        self._pending = False

    # On the device

    def reserve(self, n_rows: int) -> None:
        """Make room for so many rows; this waits for the GPU only when the overflow area grows.

        Raises
        ------
        BitslabError
            When there is no memory for it that the GPU can reach; nothing has changed then.
        """
        if self._has_room(n_rows):
            return
        self._wait()  # then the report is exact
        if self._has_room(n_rows):
            return
        with self._table_lock.writing(), self._lock:  # in the order of those who read
            self.finish()
            with torch.inference_mode(False):
                self._grow(n_rows)

    @property
    def _used(self) -> int:
        return int(self._report[0]) & (1 << USED_BITS) - 1

    def _has_room(self, n_rows: int) -> bool:
        if self._places is None:
            return False
        overflow = self.rows.overflow
        if overflow is None or overflow.capacity >= self.rows.parts.n_rows:
            return True
        # First the launches that are under way: one that ends meanwhile counts twice, not never.
        done = int(self._report[0]) >> USED_BITS
        while self._under_way and self._under_way[0][0] <= done:
            self._under_way.popleft()
        most = sum(n for _, n in self._under_way) + n_rows
        return self._used + most <= overflow.capacity

    def _grow(self, n_rows: int) -> None:
        """Have room for `n_rows`, and for some batches more; the GPU writes nothing meanwhile."""
        rows, parts, stale = self.rows, self.rows.parts, None
        self._places = None  # unless all of this succeeds
        if parts.layout == "inplace":
            # What a row may grow to, for those who fetch it.
            facts = parts.facts
            facts["max_packed_words"] = max(facts["max_packed_words"], parts.row_words - 1)
            self._copies.refresh(rows, {})
            free, used, capacity = torch.empty(0, dtype=torch.int32), 0, 0
        else:
            if rows.overflow is None:
                rows.overflow = Overflow(parts.n_rows, parts.row_words, pin=rows.pin)
            overflow = rows.overflow
            ahead = max(2 * n_rows, min(BATCHES_AHEAD * n_rows, int(AHEAD_SHARE * parts.n_rows)))
            stale = overflow.reserve_behind(min(ahead, parts.n_rows))
            rows.overflow_moves += stale is not None
            self._copies.refresh(rows, {"moved": _NONE})
            free, used, capacity = overflow.free, overflow.used, overflow.capacity
            self._check_locked(overflow.buffer)
        self._check_locked(self._report_memory)
        self._counted -= int(self._report[1])  # which begins at 0 again
        self._places = OverflowPlaces.on(
            self.device, free, used, capacity, torch.from_numpy(self._report)
        )
        self._launches = 0
        self._under_way.clear()
        if stale is not None:
            stale.close()

    def _check_locked(self, memory: HostBuffer) -> None:
        if self.device.type == "cuda" and not memory.ensure_pinned():
            raise BitslabError(
                f"table: {memory.nbytes} bytes for rows that outgrow their place could not be "
                "page-locked; give ids on the CPU, or raise the limit of locked memory"
            )

    def write(self, batch: LeavingRows) -> None:
        """Pack rows into the table, for as many of which there is room, on torch's current stream.

        See `RowKernels.rewrite`.
        """
        places = self._places
        assert places is not None
        self._copies.keep_only(self.device)  # others would not hear of it
        storage, kernels = self._copies.get(self.device, self.rows)
        self.rows.dirty = self._pending = True
        self._launches += 1
        self._under_way.append((self._launches, batch.most))
        kernels.rewrite(storage, places, batch)
        if self.device.type == "cuda":
            if self._sent is None:
                self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record(torch.cuda.current_stream(self.device))
            self._table_lock.mark_gpu_read(self.device)
        self._pending = True  # again: a reader may have asked before the event was recorded

    def take_count(self) -> int:
        """Return how many rows the GPU has reported as written since the last call."""
        before, self._counted = self._counted, int(self._report[1])
        return self._counted - before

    @property
    def outgrown_bytes(self) -> int:
        """Bytes of the overflow area that were in use at the last report, about."""
        return 4 * self.rows.parts.row_words * self._used

    # On the host

    def _wait(self) -> None:
        if self._sent is not None:
            self._sent.synchronize()

    def finish(self) -> None:
        """Copy the metadata of rows that the GPU has written to the host; waits for the GPU."""
        with self._lock:
            if not self._pending:
                return
            self._pending = False  # first: rows that are written meanwhile are copied later
            try:
                self._copy_metadata()
            except BaseException:
                self._pending = True
                raise

    def _copy_metadata(self) -> None:
        self._wait()
        rows, tensors = self.rows, self.rows.parts.tensors
        storage, _ = self._copies.get(self.device, rows)
        if storage.row_clusters is not None:
            _copy(storage.row_clusters, tensors["row_clusters"])
        if storage.flags is not None:
            _copy(storage.flags, tensors["flags"])
            rows.parts.facts["packed_rows"] = _count_bits(tensors["flags"])
        elif rows.overflow is not None and self._places is not None:
            assert storage.moved is not None
            state = self._places.state.cpu()
            free = self._places.free[: int(state[FREE])].cpu()
            rows.overflow.follow(storage.moved, int(state[USED]), free)

    def restart(self) -> None:
        """Record that the host has changed rows; `finish` came before that."""
        self._places = None


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    # By NumPy, for tensors that were made in inference mode too.
    target.numpy()[:] = source.cpu().numpy()


def _count_bits(bits: torch.Tensor) -> int:
    return int(np.unpackbits(bits.numpy().view(np.uint8)).sum())
