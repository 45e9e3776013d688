"""Hit and miss counters of lookups, on the host and on devices."""

from __future__ import annotations

import torch

from .slots import Batch

#: Batches whose counts are kept one by one.
HISTORY = 100_000
#: Batches whose counts on a device lie in one tensor.
BLOCK = 1024
#: In a history: a count that is still on a device.
ON_DEVICE = -1


class Statistics:
    """Hit and miss counters, in all and batch by batch.

    Counters on a device are read when hits or misses are asked for.
    """

    def __init__(self) -> None:
        self.lookups = 0
        self._written_back_history: list[int] = []
        self._written_by_gpu = 0
        self._hits = self._misses = 0
        self._hits_history: list[int] = []
        self._misses_history: list[int] = []
        #: Rows that a GPU fetched by itself, as of the last read of its counters.
        self.fetched_by_gpu = 0
        # int64 [BLOCK, 3] each: hits, misses and rows written back of batches, in order, and of
        # how many batches.
        self._blocks: list[torch.Tensor] = []
        self._on_device = 0
        self._address = 0  # of the last block

    @property
    def hits(self) -> int:
        """Rows that were resident."""
        self._read()
        return self._hits

    @property
    def misses(self) -> int:
        """Rows that were not."""
        self._read()
        return self._misses

    @property
    def hits_history(self) -> list[int]:
        """Different rows that hit, for each batch that fetched rows."""
        self._read()
        return list(self._hits_history)

    @property
    def misses_history(self) -> list[int]:
        """Different rows that missed, for each batch that fetched rows."""
        self._read()
        return list(self._misses_history)

    @property
    def written_back_history(self) -> list[int]:
        """Rows written back for each batch that fetched rows."""
        self._read()
        return list(self._written_back_history)

    @property
    def written_by_gpu(self) -> int:
        """Rows that a GPU has written back by itself."""
        self._read()
        return self._written_by_gpu

    def record(self, batch: Batch, written_back: int) -> None:
        """Count a batch: each different row is one hit or one miss."""
        self.record_rows(len(batch.touched), len(batch.missing), len(batch.slots))
        self._append(len(batch.touched), len(batch.missing), written_back)

    def record_on_device(self, n_ids: int, device: torch.device) -> int:
        """Return counters on the device for a batch whose hits and misses only the device knows.

        Parameters
        ----------
        n_ids : int
            Ids of the batch.
        device : torch.device
            Where the batch is looked up.

        Returns
        -------
        int
            Address of int64 ``[3]`` on `device`, zeros: the kernel writes the numbers of different
            rows that hit, that missed, and that were written back.
        """
        if self._on_device == BLOCK * len(self._blocks):
            if len(self._blocks) > 2 * HISTORY // BLOCK:
                self._read()  # waits, once in so many batches, so that they do not pile up
            with torch.inference_mode(False):  # it may be written to in training later
                self._blocks.append(torch.zeros(BLOCK, 3, dtype=torch.int64, device=device))
            self._address = self._blocks[-1].data_ptr()
        counters = self._address + 24 * (self._on_device % BLOCK)
        self._on_device += 1
        self.lookups += n_ids
        self._append(ON_DEVICE, ON_DEVICE, 0)
        return counters

    def record_written_back(self, n_rows: int) -> None:
        """Add rows that were written back since the last batch to that batch's count."""
        if self._written_back_history:
            self._written_back_history[-1] += n_rows

    def _append(self, hits: int, misses: int, written_back: int) -> None:
        self._hits_history.append(hits)
        self._misses_history.append(misses)
        self._written_back_history.append(written_back)
        if len(self._hits_history) > 2 * HISTORY:
            for each in (self._hits_history, self._misses_history, self._written_back_history):
                del each[:HISTORY]

    def _read(self) -> None:
        """Read the counters on devices."""
        if not self._on_device:
            return
        for block in self._blocks:
            if block.is_cuda:
                torch.cuda.synchronize(block.device)  # on whatever streams they were counted
        counts = [pair for block in self._blocks for pair in block.tolist()]
        counts = counts[: self._on_device]
        self._blocks, self._on_device = [], 0
        self._hits += sum(hits for hits, _, _ in counts)
        misses = sum(misses for _, misses, _ in counts)
        self._written_by_gpu += sum(written for _, _, written in counts)
        self._misses += misses
        self.fetched_by_gpu += misses
        unread = [i for i, hits in enumerate(self._hits_history) if hits == ON_DEVICE]
        # The first of them may be gone from the history.
        for position, each in zip(unread, counts[len(counts) - len(unread) :], strict=True):
            self._hits_history[position], self._misses_history[position] = each[:2]
            self._written_back_history[position] += each[2]

    def record_rows(self, hits: int, misses: int, lookups: int | None = None) -> None:
        """Count rows that were resident, rows that were not, and ids looked up."""
        self._hits += hits
        self._misses += misses
        self.lookups += hits + misses if lookups is None else lookups
