"""Row kernels of coded tiles: rows that are tiles, of heads by their numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ...errors import ArgumentError, ArgumentTypeError, CorruptedDataError
from .format import (
    MAX_SLABS,
    CacheStorage,
    RowFormat,
    RowStorage,
    TableStorage,
    words_of_rows,
)
from .row_kernels import RowKernels
from .tile_format import TileTables

_NO_CLUSTERS = torch.empty(0, dtype=torch.uint8)


class TileKernels(RowKernels):
    """Row kernels whose rows are tiles, in compact tables alone.

    Row i of what is measured, packed or stored is of head ``(i // rows_per_head) % heads``.

    Parameters
    ----------
    tables : TileTables
        On the device.
    """

    def __init__(self, tables: TileTables) -> None:
        super().__init__(tables.format.row_bytes, tables.order.device)
        self.tables = tables
        self.row_period = tables.heads * tables.rows_per_head if tables.heads > 1 else 1
        self._format = RowFormat(self.row_bytes, 1, 1, grouped=False, uniform=True)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The codec's tables."""
        return self.tables.tensors

    def locate(
        self, table: TableStorage, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return where rows lie, and the words that each has."""
        from .cpu.row_finder import RowFinder

        self._check_table(table, None)
        finder = RowFinder(table, self._format, ids)
        bad, (source, at, length, _) = finder.find(0, ids.shape[0])
        if bad >= 0:
            raise CorruptedDataError(f"table: row {finder.row(bad)} is damaged")
        return torch.from_numpy(at >> 2), torch.from_numpy(length), torch.from_numpy(source)

    def _check_table(self, table: TableStorage, cache: CacheStorage | None) -> None:
        """Refuse what tiles do not serve."""
        if table.items_per_row > 1:
            raise ArgumentError(
                f"table: {table.items_per_row} items share a row; tiles are gathered whole"
            )
        if table.lengths is None or table.overflow is not None or table.moved is not None:
            raise ArgumentError("table: raw or in place, tiles are gathered out of compact tables")
        if cache is not None:
            raise ArgumentError("cache: given, tiles are gathered out of tables alone")

    def __reduce__(self) -> Any:
        """Take the tables along."""
        return type(self), (self.tables,)


class HostTileKernels(TileKernels):
    """Tiles on the CPU."""

    def measure(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `kernels.cpu.measure_tiles`."""
        from . import cpu

        return cpu.measure_tiles(rows, self.tables), _NO_CLUSTERS

    def encode(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        row_clusters: torch.Tensor,
        bases: torch.Tensor,
        n_words: int,
    ) -> torch.Tensor:
        """See `kernels.cpu.encode_tiles`."""
        from . import cpu

        return cpu.encode_tiles(rows, self.tables, lengths, bases, n_words)

    def decode(
        self,
        storage: RowStorage,
        ids: torch.Tensor | None,
        row_begin: int,
        out: torch.Tensor,
        facts: Mapping[str, int],
        sm_budget: int | None = None,
    ) -> int:
        """Decode tiles to memory of their own, and copy them to `out` if none is damaged."""
        decoded = torch.empty_like(out)
        bad, _ = self._decoded(_table_of(storage), ids, row_begin, decoded)
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
        """Decode tiles chosen by id, of a compact table."""
        self._check_table(table, cache)
        if first_bad is not None and int(first_bad) != -1:
            return -1
        target = out.view(-1, self.row_bytes)
        bad, lengths = self._decoded(table, ids, 0, target)
        if bad < 0 and counters is not None:
            words = np.where(lengths > 0, lengths, self.row_words).sum()
            counters.numpy().reshape(2, MAX_SLABS + 1)[:, MAX_SLABS] += len(lengths), words
        return bad

    def check(self, storage: RowStorage) -> int:
        """Return the first tile that cannot be decoded, or -1."""
        n = storage.lengths.shape[0]
        table = _table_of(storage)
        batch = max(1, (16 << 20) // self.row_bytes)
        for begin in range(0, n, batch):
            out = torch.empty(min(batch, n - begin), self.row_bytes, dtype=torch.uint8)
            bad, _ = self._decoded(table, None, begin, out)
            if bad >= 0:
                return bad
        return -1

    def _decoded(
        self, table: TableStorage, ids: torch.Tensor | None, row_begin: int, out: torch.Tensor
    ) -> tuple[int, np.ndarray[Any, Any]]:
        """Decode to `out`; return the number of a damaged row or -1, and the lengths."""
        from . import cpu
        from .cpu.row_finder import RowFinder

        finder = RowFinder(table, self._format, ids, row_begin)
        bad, (_, at, length, _) = finder.find(0, out.shape[0])
        lengths = length.astype(np.int64)
        if bad >= 0:
            return finder.row(bad), lengths
        if ids is None:
            rows = np.arange(row_begin, row_begin + out.shape[0])
        else:
            rows = np.where(finder.ids < 0, finder.ids + table.n_rows, finder.ids)
        bad = cpu.decode_tiles(
            table.words,
            torch.from_numpy(at >> 2),
            torch.from_numpy(lengths),
            torch.from_numpy(rows),
            self.tables,
            out,
        )
        return (bad if bad < 0 else int(rows[bad])), lengths


class DeviceTileKernels(TileKernels):
    """Tiles on a GPU, without waiting for it."""

    def __init__(self, tables: TileTables) -> None:
        from .cuda import kernels_on

        super().__init__(tables)
        self._kernels = kernels_on(self.device, raise_errors=False)

    def measure(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `kernels.cpu.measure_tiles`."""
        no_clusters = torch.empty(0, dtype=torch.uint8, device=self.device)
        return self._kernels.measure_tiles(rows, self.tables), no_clusters

    def encode(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        row_clusters: torch.Tensor,
        bases: torch.Tensor,
        n_words: int,
    ) -> torch.Tensor:
        """See `kernels.cpu.encode_tiles`; the lengths are not looked at again."""
        return self._kernels.encode_tiles(rows, self.tables, lengths, bases, n_words)

    def pack_rows(self, rows: torch.Tensor) -> RowStorage:
        """Quantise tiles once."""
        words, lengths, bases = self._kernels.pack_tiles(rows, self.tables)
        no_clusters = torch.empty(0, dtype=torch.uint8, device=self.device)
        return RowStorage(words, bases, lengths, no_clusters)

    def decode(
        self,
        storage: RowStorage,
        ids: torch.Tensor | None,
        row_begin: int,
        out: torch.Tensor,
        facts: Mapping[str, int],
        sm_budget: int | None = None,
    ) -> int:
        """Decode tiles; damaged ones and bad ids are in the mailbox."""
        table = _table_of(storage)
        more: dict[str, Any] = {} if ids is None else {"lowest": -table.n_rows}
        return self._kernels.decode_tiles(
            table, self.tables, ids, out, row_begin=row_begin, sm_budget=sm_budget, **more
        )

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
        """Decode tiles chosen by id, of a compact table; what is wrong is in the mailbox.

        With `counters` ids are good and not NO_ROW.
        """
        self._check_table(table, cache)
        target = out.view(-1, self.row_bytes)
        more: dict[str, Any] = {} if lowest is None else {"lowest": lowest}
        bad = self._kernels.decode_tiles(
            table, self.tables, ids, target, first_bad=first_bad, sm_budget=sm_budget, **more
        )
        if counters is not None and table.lengths is not None:
            words = words_of_rows(table.lengths[ids.to(torch.int64)], self.row_words)
            from_table = counters.view(2, MAX_SLABS + 1)[:, MAX_SLABS]
            from_table[0] += ids.shape[0]
            from_table[1] += words.sum()
        return bad

    def check(self, storage: RowStorage) -> int:
        """Return the first tile on the CPU that cannot be decoded, or -1."""
        return HostTileKernels(self.tables.to(torch.device("cpu"))).check(storage)

    def prepare_gather(
        self,
        table: TableStorage,
        ids: torch.Tensor,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> Callable[[], Any]:
        """Return a launch of which all is known."""
        self._check_table(table, None)
        target = out.view(-1, self.row_bytes)
        return self._kernels.prepare_tiles(table, self.tables, ids, target, sm_budget)


def tile_kernels(tables: TileTables, device: torch.device) -> TileKernels:
    """Return the kernels of tiles on a device, with tables copied there.

    Raises
    ------
    ArgumentTypeError
        For a device that is neither a CPU nor a GPU.
    """
    if device.type == "cpu":
        return HostTileKernels(tables)
    if device.type == "cuda":
        return DeviceTileKernels(tables.to(device))
    raise ArgumentTypeError(f"device: {device}, accepted are cpu and cuda")


def _table_of(storage: RowStorage) -> TableStorage:
    return TableStorage(storage.lengths.shape[0], storage.words, storage.bases, storage.lengths)
