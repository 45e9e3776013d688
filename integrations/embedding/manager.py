"""Cached rows by the names of ColossalAI's cache manager."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from bitslab.embedding import CachedRows, EvictionStrategy, SlotTable, sync_from_device
from bitslab.errors import ArgumentError


class CacheManager:
    """What ``CachedEmbeddingBag.cache_weight_mgr`` is in ColossalAI, over `CachedRows`.

    It is no module, and its maps are copies. ``_admit`` and ``_evict``, deprecated there, and
    ``limit_buff_index_copyer`` are left out; so are the bags' ``swap_in_bandwidth`` and
    ``swap_out_bandwidth``: to measure those, each lookup would have to wait for the GPU.
    `print_comm_stats` prints what was moved.

    Parameters
    ----------
    rows : CachedRows
        The rows.
    evict_strategy : EvictionStrategy
        Which row leaves first.
    """

    def __init__(self, rows: CachedRows, evict_strategy: EvictionStrategy) -> None:
        self._rows = rows
        self._evict = evict_strategy
        #: Seconds of the blocks that `timer` has timed, by name.
        self._elapsed_s: dict[str, float] = {}

    @property
    def _slot_table(self) -> SlotTable:
        """The slot table, synchronised with the device."""
        with self._rows.lock:
            self._rows.training.retire_steps()
            sync_from_device(self._rows)
            return self._rows.slot_table

    @property
    def num_embeddings(self) -> int:
        """Rows of the table."""
        return len(self._rows)

    @property
    def embedding_dim(self) -> int:
        """Elements of a row."""
        return self._rows.row_dim

    @property
    def cuda_row_num(self) -> int:
        """Rows that the cache holds, but for one that always pads."""
        return self._rows.cache_rows - (
            0 if self._rows.all_resident else len(self._rows.pinned_ids)
        )

    @property
    def cuda_available_row_num(self) -> int:
        """Slots of the cache that hold no row."""
        return self._slot_table.free_rows

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the whole table ``[N, D]`` on the CPU, in the order of the ids."""
        return self._rows.whole()

    @property
    def cuda_cached_weight(self) -> torch.nn.Parameter:
        """The resident rows ``[C, D]``."""
        with self._rows.lock:
            self._rows.training.retire_steps()
        return self._rows.parameter

    @property
    def idx_map(self) -> torch.Tensor:
        """int64 ``[N]``: with DATASET the rank of each id by use, 0 the most used; else the ids."""
        order = self._slot_table.order
        ranks = np.arange(len(self._rows)) if order is None else order.astype(np.int64)
        return torch.from_numpy(ranks)

    @property
    def cached_idx_map(self) -> torch.Tensor:
        """int64 ``[C]``: the row in each slot, as `idx_map` numbers it, or -1."""
        ids = self._slot_table.id_of
        return torch.where(
            torch.from_numpy(ids) >= 0, self.idx_map[torch.from_numpy(np.maximum(ids, 0))], -1
        )

    @property
    def inverted_cached_idx(self) -> torch.Tensor:
        """int64 ``[N]``: the slot of each row, as `idx_map` numbers it, or -1."""
        slots = torch.empty(len(self._rows), dtype=torch.int64)
        slots[self.idx_map] = torch.from_numpy(self._slot_table.slot_of).to(torch.int64)
        return slots

    @property
    def freq_cnter(self) -> torch.Tensor:
        """int64 ``[C]``: with LFU how often each resident row was looked up."""
        return torch.from_numpy(self._slot_table.keys.copy())

    @property
    def evict_backlist(self) -> torch.Tensor:
        """int64: rows that may not leave yet, as `idx_map` numbers them.

        Their gradient is pending or may still be computed, or they are padding rows.
        """
        with self._rows.lock:
            slot_table = self._slot_table
            self._rows.training.pin()
            ids = slot_table.id_of[slot_table.pinned]
        return self.idx_map[torch.from_numpy(ids)]

    @property
    def buffer_size(self) -> int:
        """The most rows that are fetched at once; 0 for no bound."""
        return self._rows.buffer_rows

    @property
    def elem_size_in_byte(self) -> int:
        """Bytes of an element of a row."""
        return self._rows.dtype.itemsize

    @property
    def num_hits_history(self) -> list[int]:
        """Different rows of each batch that were resident."""
        with self._rows.lock:
            return self._rows.statistics.hits_history

    @property
    def num_miss_history(self) -> list[int]:
        """Different rows of each batch that were not."""
        with self._rows.lock:
            return self._rows.statistics.misses_history

    @property
    def num_write_back_history(self) -> list[int]:
        """Rows that were packed again for each batch."""
        return self._rows.statistics.written_back_history

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Time a block, to its end on the GPU, for `print_comm_stats`.

        Parameters
        ----------
        name : str
            What the seconds are printed under; blocks of one name add up.
        """
        began_s = time.perf_counter()
        yield
        if self._rows.device.type == "cuda":
            torch.cuda.synchronize(self._rows.device)
        elapsed_s = time.perf_counter() - began_s
        self._elapsed_s[name] = self._elapsed_s.get(name, 0.0) + elapsed_s

    def reorder(
        self,
        ids_freq_mapping: torch.Tensor | Sequence[int] | None = None,
        warmup_ratio: float = 0.7,
    ) -> None:
        """Fill the cache with the ids that are used most.

        Parameters
        ----------
        ids_freq_mapping : torch.Tensor, sequence or None
            ``[N]``. Ids used equally often are ranked as torch's `argsort` does, as in ColossalAI.
        warmup_ratio : float
            Share of the cache to fill.
        """
        self._rows.warm_up(ids_freq_mapping, warmup_ratio)

    def prepare_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Make the rows of a batch resident; return their slots.

        Parameters
        ----------
        ids : torch.Tensor
            int32 or int64 ``[n]``.

        Raises
        ------
        ArgumentError
            When they have more different rows than fit; `forward` copes with that.
        """
        slots = self._rows.fetch(ids)
        if slots is None:
            raise ArgumentError(
                f"ids: more different rows than the {self.cuda_row_num} that can be resident"
            )
        return slots

    def flush(self) -> None:
        """Send all rows back to the host and leave the cache empty, but for a row that pads."""
        self._rows.flush(evict=True)

    def cpu_weight_data(self, row_idx: int) -> torch.Tensor:
        """Return a row of the table as the host has it, ``[1, D]``."""
        return self._rows.table.decoded(row_idx, row_idx + 1)

    def print_comm_stats(self) -> None:
        """Print what was moved between host and device, and the seconds of `timer`."""
        stats: dict[str, Any] = self._rows.stats()
        raw_mb = stats["misses"] * stats["row_bytes"] / 1e6
        print(f"host to device: {stats['misses']:,} rows, {raw_mb:.1f} MB", end=" ")
        print(f"in {stats['moved_bytes'] / 1e6:.1f} MB packed")
        back_mb = stats["written_back"] * stats["row_bytes"] / 1e6
        print(f"device to host: {stats['written_back']:,} rows, {back_mb:.1f} MB")
        for name, elapsed_s in self._elapsed_s.items():
            print(f"{name}: {elapsed_s}")
        print(f"cache miss ratio {1 - stats['hit_rate']:.4f}")
