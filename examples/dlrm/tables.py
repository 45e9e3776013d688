"""The embedding tables, kept in several ways; all start from the same weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from common.reproducible import drawn_seed  # next to this package

import bitslab

from .clicks import Batch, sent

#: Returns the weights of a table by its name and number of rows.
Weights = Callable[[str, int], torch.Tensor]


@dataclass
class Traffic:
    """Bytes moved, and cache hits, of tables since they were made."""

    moved_bytes: int = 0
    hits: int = 0
    misses: int = 0
    written_back: int = 0

    @property
    def hit_rate(self) -> float | None:
        asked = self.hits + self.misses
        return self.hits / asked if asked else None

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.moved_bytes - other.moved_bytes,
            self.hits - other.hits,
            self.misses - other.misses,
            self.written_back - other.written_back,
        )


@dataclass
class Memory:
    """Bytes of tables: uncompressed, and what they take on the host and on the device."""

    raw_bytes: int
    host_bytes: int
    device_bytes: int

    @property
    def ratio(self) -> float | None:
        """Raw bytes over those of the host; None when the host has none of the tables."""
        return self.raw_bytes / self.host_bytes if self.host_bytes else None


def initial_weights(width: int, dtype: torch.dtype, seed: int) -> Weights:
    """Return a function that draws a table's weights, always the same: uniform, as DLRM's are."""

    def weights(name: str, rows: int) -> torch.Tensor:
        # A seed for each name, so that no table depends on those before it.
        generator = torch.Generator().manual_seed(drawn_seed(seed, *name.encode()))
        drawn = torch.empty(rows, width).uniform_(-1, 1, generator=generator)
        return drawn.mul_(rows**-0.5).to(dtype)

    return weights


class Tables(ABC):
    """The tables of a model.

    Parameters
    ----------
    table_rows : mapping of str to int
        The rows of each feature's table, in the order of the features.
    weights : callable
        Returns the initial weights of a table.
    device : torch.device
        Device of the embeddings.
    options : TableOptions
        How they are kept.
    """

    #: Has one parameter or more for each table, and saves them as `embedding_bags.NAME.weight`.
    module: torch.nn.Module

    def __init__(
        self,
        table_rows: Mapping[str, int],
        weights: Weights,
        device: torch.device,
        options: TableOptions,
    ) -> None:
        self.table_rows, self.device, self.options = dict(table_rows), device, options
        self.names = list(table_rows)
        self.width = options.width
        self.module = self.make(weights)

    @abstractmethod
    def make(self, weights: Weights) -> torch.nn.Module:
        """Return the module that holds the tables."""

    @abstractmethod
    def look_up(self, batch: Batch) -> torch.Tensor:
        """Return the sum of each bag's rows, ``[B, T, D]``."""

    def prefetch(self, batch: Batch) -> None:  # noqa: B027 (a choice, not a duty)
        """Start to fetch the rows of the next batch, in modes that fetch ahead."""

    def traffic(self) -> Traffic:
        return Traffic()

    def memory(self) -> Memory:
        raw = self.raw_bytes
        on_host = self.device.type == "cpu"
        return Memory(raw, raw if on_host else 0, 0 if on_host else raw)

    @property
    def raw_bytes(self) -> int:
        return sum(self.table_rows.values()) * self.width * self.options.dtype.itemsize

    @property
    def codecs(self) -> list[str]:
        """Codecs of the tables, each once."""
        return []

    def close(self) -> None:  # noqa: B027 (a choice, not a duty)
        """Free what the tables hold in addition to tensors."""


@dataclass(frozen=True)
class TableOptions:
    """Options of the tables.

    `evict` is a name of EvictionStrategy; `cache` is "rows" or "packed"; `counts` has for each
    table how often its rows are used, int64 ``[rows]``.
    """

    width: int
    dtype: torch.dtype
    cache_ratio: float = 0.01
    evict: str = "LFU"
    codec: str = "auto"
    layout: Literal["compact", "inplace"] = "compact"
    sparse: bool = False
    freeze: bool = False
    cache: Literal["rows", "packed"] = "rows"
    counts: Mapping[str, torch.Tensor] | None = None


class Bags(torch.nn.Module):
    """A bag for each feature, under the names that TorchRec's collections have."""

    def __init__(self, bags: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        self.embedding_bags = torch.nn.ModuleDict(bags)


class TorchTables(Tables):
    """An nn.EmbeddingBag for each feature, all on the device."""

    def make(self, weights: Weights) -> torch.nn.Module:
        return Bags(
            {
                name: self.make_bag(name, weights(name, rows))
                for name, rows in self.table_rows.items()
            }
        )

    def make_bag(self, name: str, weight: torch.Tensor) -> torch.nn.Module:
        return torch.nn.EmbeddingBag.from_pretrained(
            weight.to(self.device),
            freeze=self.options.freeze,
            mode="sum",
            sparse=self.options.sparse,
        )

    def bags(self) -> Iterable[Any]:
        assert isinstance(self.module, Bags)
        return self.module.embedding_bags.values()

    def look_up(self, batch: Batch) -> torch.Tensor:
        pooled = [bag(*ids) for bag, ids in zip(self.bags(), batch.bags, strict=True)]
        return torch.stack(pooled, 1)


class HostTables(TorchTables):
    """As above in host memory: pooled by the CPU, then copied to the device."""

    def make_bag(self, name: str, weight: torch.Tensor) -> torch.nn.Module:
        return torch.nn.EmbeddingBag.from_pretrained(
            weight, freeze=self.options.freeze, mode="sum", sparse=self.options.sparse
        )

    def look_up(self, batch: Batch) -> torch.Tensor:
        return sent(super().look_up(batch.to(torch.device("cpu"))), self.device)

    def memory(self) -> Memory:
        return Memory(self.raw_bytes, self.raw_bytes, 0)


class CachedTables(TorchTables):
    """A CachedEmbeddingBag for each feature: packed in host memory, hot rows on the device."""

    def make_bag(self, name: str, weight: torch.Tensor) -> torch.nn.Module:
        from bitslab.embedding import EvictionStrategy
        from bitslab.integrations.embedding import CachedEmbeddingBag

        options = self.options
        return CachedEmbeddingBag(
            len(weight),
            self.width,
            _weight=weight,
            mode="sum",
            sparse=options.sparse,
            dtype=options.dtype,
            device=self.device,
            # A table of few rows keeps at least one of them on the device.
            cache_ratio=max(options.cache_ratio, 1 / len(weight)),
            ids_freq_mapping=None if options.counts is None else options.counts[name],
            evict_strategy=EvictionStrategy[options.evict],
            codec=options.codec,
            layout=options.layout,
            freeze=options.freeze,
            cache=options.cache,
        )

    def prefetch(self, batch: Batch) -> None:
        for bag, ids in zip(self.bags(), batch.bags, strict=True):
            bag.prefetch(*ids)

    def flush(self) -> None:
        """Pack the rows that have changed, as before a checkpoint."""
        for bag in self.bags():
            bag.flush()

    def stats(self) -> list[dict[str, Any]]:
        return [bag.stats() for bag in self.bags()]

    def traffic(self) -> Traffic:
        return traffic_of(self.stats())

    def memory(self) -> Memory:
        self.flush()
        return memory_of(self.stats())

    @property
    def codecs(self) -> list[str]:
        return codecs_of(self.stats())

    def close(self) -> None:
        for bag in self.bags():
            bag.close()


def traffic_of(stats: list[dict[str, Any]]) -> Traffic:
    """Sum what `CachedRows.stats` counts."""
    names = ("moved_bytes", "hits", "misses", "written_back")
    return Traffic(*(sum(of[name] for of in stats) for name in names))


def memory_of(stats: list[dict[str, Any]]) -> Memory:
    """Sum the sizes; the slot tables are in host memory too."""
    return Memory(
        sum(of["raw_bytes"] for of in stats),
        sum(of["host_bytes"] + of["map_bytes"] for of in stats),
        sum(of["device_bytes"] for of in stats),
    )


def codecs_of(stats: list[dict[str, Any]]) -> list[str]:
    """Return the codecs' names, each once."""
    return sorted({str(of["codec"]) for of in stats})


class UncachedTables(Tables):
    """A CompressedTable for each feature: packed in host memory, with nothing on the device."""

    def make(self, weights: Weights) -> torch.nn.Module:
        options = self.options
        self.packed = [
            bitslab.CompressedTable.from_tensor(
                weights(name, rows), options.layout, options.codec, progress=False
            )
            for name, rows in self.table_rows.items()
        ]
        return torch.nn.Module()

    def look_up(self, batch: Batch) -> torch.Tensor:
        pooled = []
        for table, (ids, offsets) in zip(self.packed, batch.bags, strict=True):
            rows = table.gather(ids, device=self.device)
            where = torch.arange(len(ids), device=self.device)
            pooled.append(torch.nn.functional.embedding_bag(where, rows, offsets, mode="sum"))
        return torch.stack(pooled, 1)

    def traffic(self) -> Traffic:
        return Traffic(sum(table.stats()["moved_bytes"] for table in self.packed))

    def memory(self) -> Memory:
        host_bytes = sum(table.nbytes for table in self.packed)
        # In place, a GPU keeps a bit a row to find it.
        flags = self.device.type == "cuda" and self.options.layout == "inplace"
        on_device = sum(-(-len(table) // 8) for table in self.packed) if flags else 0
        return Memory(self.raw_bytes, host_bytes, on_device)

    @property
    def codecs(self) -> list[str]:
        return sorted({table.codec.describe() for table in self.packed})

    def close(self) -> None:
        for table in self.packed:
            table.close()
