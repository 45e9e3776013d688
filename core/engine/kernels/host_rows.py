"""HostRowKernels: the row kernels of a codec that is written in Python, on the CPU."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
import torch

from ...errors import ArgumentError, ArgumentTypeError, CorruptedDataError
from .format import (
    MAX_SLABS,
    PAD_WORDS,
    CacheStorage,
    RowFormat,
    RowStorage,
    TableStorage,
    read_together,
    words_of_rows,
)
from .row_kernels import RowKernels

BATCH_ROWS = 1 << 14  # rows that are unpacked at once


class HostRowKernels(RowKernels):
    """RowKernels on the CPU of which only what a packed row's words mean is left to a codec.

    A subclass measures, packs and unpacks rows (`measure`, `pack`, `unpack`); where rows lie in
    tables, overflow areas and cache slabs is found here, and raw rows are copied.

    Parameters
    ----------
    row_bytes : int
        Bytes of a row before packing.
    device : torch.device
        Must be the CPU.
    clusters : int
        Number of profiles that rows choose from, 1 to 256.

    Raises
    ------
    ArgumentTypeError
        For another device than the CPU.
    """

    def __init__(self, row_bytes: int, device: torch.device, clusters: int = 1) -> None:
        if device.type != "cpu":
            raise ArgumentTypeError(
                f"device: {device}; {type(self).__module__}.{type(self).__qualname__} packs and "
                "unpacks rows on the CPU alone"
            )
        super().__init__(row_bytes, device, clusters)
        self._format = RowFormat(row_bytes, 1, 1, grouped=False, uniform=True, clusters=clusters)

    @abstractmethod
    def pack(
        self, rows: torch.Tensor, lengths: torch.Tensor, row_clusters: torch.Tensor
    ) -> torch.Tensor:
        """Return the words of packed rows, back to back.

        Parameters
        ----------
        rows : torch.Tensor
            uint8 ``[m, row_bytes]``: those that become shorter.
        lengths : torch.Tensor
            int64 ``[m]``: the words of each.
        row_clusters : torch.Tensor
            uint8 ``[m]``, or ``[0]`` when there is one cluster.

        Returns
        -------
        torch.Tensor
            int32 ``[lengths.sum()]``.
        """

    @abstractmethod
    def unpack(
        self,
        words: torch.Tensor,
        at: torch.Tensor,
        lengths: torch.Tensor,
        row_clusters: torch.Tensor,
        out: torch.Tensor,
    ) -> int:
        """Write packed rows as they were.

        Parameters
        ----------
        words : torch.Tensor
            int32, of many rows; what they hold may be damaged.
        at : torch.Tensor
            int64 ``[m]``: the first word of each row.
        lengths : torch.Tensor
            int64 ``[m]``: words that belong to it, all of them in `words`. The row may be shorter.
        row_clusters : torch.Tensor
            uint8 ``[m]``; 0 when there is one cluster.
        out : torch.Tensor
            uint8 ``[m, row_bytes]``, to write to.

        Returns
        -------
        int
            -1, or the position of a damaged row.
        """

    def encode(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        row_clusters: torch.Tensor,
        bases: torch.Tensor,
        n_words: int,
    ) -> torch.Tensor:
        """Return rows packed, and raw where their length is 0, back to back."""
        from . import cpu

        sizes = words_of_rows(lengths, self.row_words)
        begin = int(bases[0]) + sizes.cumsum(0) - sizes
        target = torch.zeros(n_words + PAD_WORDS, dtype=torch.int32)
        packed = (lengths != 0).nonzero().flatten()
        if len(packed):
            clusters = row_clusters[packed] if row_clusters.numel() else row_clusters
            found = self.pack(rows[packed], sizes[packed], clusters)
            taken = sizes[packed]
            cpu.move_rows(found, taken.cumsum(0) - taken, taken, target, begin[packed])
        raw = (lengths == 0).nonzero().flatten()
        if len(raw):
            padded = torch.zeros(len(raw), 4 * self.row_words, dtype=torch.uint8)
            padded[:, : self.row_bytes] = rows[raw]
            at = torch.arange(len(raw)) * self.row_words
            source = padded.view(torch.int32).flatten()
            cpu.move_rows(source, at, sizes[raw], target, begin[raw])
        return target

    def decode(
        self,
        storage: RowStorage,
        ids: torch.Tensor | None,
        row_begin: int,
        out: torch.Tensor,
        facts: Mapping[str, int],
        sm_budget: int | None = None,
    ) -> int:
        """Unpack rows to memory of their own, and copy them to `out` if none is damaged."""
        table = TableStorage(
            storage.lengths.shape[0],
            storage.words,
            storage.bases,
            storage.lengths,
            storage.row_clusters if storage.row_clusters.numel() else None,
        )
        decoded = torch.empty_like(out)
        bad = self._unpacked(table, ids, row_begin, decoded, None, None)
        if bad < 0:
            np.copyto(out.numpy(), decoded.numpy())  # a forked child hangs in threads of torch
        return bad

    def gather(
        self,
        table: TableStorage,
        ids: torch.Tensor,
        out: torch.Tensor,
        *,
        cache: CacheStorage | None = None,
        counters: torch.Tensor | None = None,
        first_bad: torch.Tensor | None = None,
        lowest: int | None = None,
        order: torch.Tensor | None = None,
        sm_budget: int | None = None,
    ) -> int:
        """Unpack rows chosen by id, each an item of the table."""
        if table.items_per_row > 1:
            raise ArgumentError(
                f"table: {table.items_per_row} items share a row; these kernels gather whole rows"
            )
        if first_bad is not None and int(first_bad) != -1:
            return -1
        return self._unpacked(read_together(table, cache), ids, 0, out, cache, counters)

    def locate(
        self, table: TableStorage, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return where rows lie, and the most words that each may have."""
        from .cpu.row_finder import RowFinder

        finder = RowFinder(table, self._format, ids)
        bad, (source, at, length, _) = finder.find(0, ids.shape[0])
        if bad >= 0:
            raise CorruptedDataError(f"table: row {finder.row(bad)} is damaged")
        return torch.from_numpy(at >> 2), torch.from_numpy(length), torch.from_numpy(source)

    def check(self, storage: RowStorage) -> int:
        """Return the first row that cannot be unpacked, or -1."""
        n = storage.lengths.shape[0]
        for begin in range(0, n, BATCH_ROWS):
            out = torch.empty(min(BATCH_ROWS, n - begin), self.row_bytes, dtype=torch.uint8)
            bad = self.decode(storage, None, begin, out, {})
            if bad >= 0:
                return bad
        return -1

    def _unpacked(
        self,
        table: TableStorage,
        ids: torch.Tensor | None,
        row_begin: int,
        out: torch.Tensor,
        cache: CacheStorage | None,
        counters: torch.Tensor | None,
    ) -> int:
        """Write rows to `out`; return the number of a damaged one, or -1."""
        from .cpu.compiling import call
        from .cpu.loading import gathering
        from .cpu.row_finder import HOST_SOURCES, SOURCES, RowFinder

        finder = RowFinder(table, self._format, ids, row_begin, cache)
        copy_found, raw = gathering().copy_found, out.numpy()
        counts = np.zeros((SOURCES, 2), np.int64)
        for first in range(0, out.shape[0], BATCH_ROWS):
            bad, found = finder.find(first, min(first + BATCH_ROWS, out.shape[0]))
            if bad >= 0:
                return finder.row(bad)
            source, at, length, cluster = found
            for which, words in enumerate(finder.sources):
                picked = np.flatnonzero((source == which) & (length > 0))
                if not len(words):
                    continue
                call(copy_found, words, which, *found[:3], self.row_words, raw, first, counts)
                if not len(picked):
                    continue
                rows = torch.empty(len(picked), self.row_bytes, dtype=torch.uint8)
                bad = self.unpack(
                    torch.from_numpy(words.view(np.int32)),
                    torch.from_numpy(at[picked] >> 2),
                    torch.from_numpy(length[picked].astype(np.int64)),
                    torch.from_numpy(cluster[picked]),
                    rows,
                )
                if bad >= 0:
                    return finder.row(first + int(picked[bad]))
                raw[first + picked] = rows.numpy()
                counts[which] += len(picked), int(length[picked].sum())
        if counters is not None:
            by_place = counters.numpy().reshape(2, MAX_SLABS + 1)
            by_place[:, :MAX_SLABS] += counts[HOST_SOURCES:].T
            by_place[:, MAX_SLABS] += counts[:HOST_SOURCES].sum(0)
        return -1
