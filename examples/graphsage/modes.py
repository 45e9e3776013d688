"""The five ways to keep features, as IBP (section 6.2) compares them, and what each one moves."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from typing import Any

import torch

import bitslab

MODES = ("raw", "unified", "host", "cache", "both")
#: Legion without compression: raw rows, the hottest ones on the GPU too. For benchmarks.
RAW_CACHE = "raw cache"
#: Modes of `compress_features` and their arguments; the other modes keep tensors.
COMPRESSED: dict[str, dict[str, Any]] = {
    "host": {},
    "cache": {"codec": "raw", "cache_codec": "auto"},
    "both": {},
    RAW_CACHE: {"codec": "raw"},
}
PAPER_NAMES = {"host": "IBP(M)", "cache": "IBP(C)", "both": "IBP(C/M)"}


def compress_options(mode: str, cache_ratio: float) -> dict[str, Any]:
    """Return the arguments of `compress_features` in one of the COMPRESSED modes."""
    return COMPRESSED[mode] | ({} if mode == "host" else {"cache_ratio": cache_ratio})


def placed(x: torch.Tensor, mode: str) -> torch.Tensor:
    """Return features as a mode that keeps tensors has them."""
    return bitslab.unified(x) if mode == "unified" else x


@dataclass
class Traffic:
    """Bytes requested of features, and bytes moved."""

    gathered_bytes: int = 0
    moved_bytes: int = 0
    hits: int = 0
    misses: int = 0

    @property
    def ratio(self) -> float | None:
        """Bytes requested over bytes moved; None if all came from a cache."""
        return self.gathered_bytes / self.moved_bytes if self.moved_bytes else None

    @property
    def hit_rate(self) -> float | None:
        asked = self.hits + self.misses
        return self.hits / asked if asked else None

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(self.numbers(), other.numbers(), strict=True)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*(a - b for a, b in zip(self.numbers(), other.numbers(), strict=True)))

    def numbers(self) -> tuple[int, int, int, int]:
        return self.gathered_bytes, self.moved_bytes, self.hits, self.misses


@dataclass
class Column:
    """A feature of nodes or edges, in any mode."""

    rows: torch.Tensor | bitslab.CompressedFeature
    _asked_rows: int = field(default=0, init=False)

    @property
    def raw_bytes(self) -> int:
        return self.row_bytes * len(self.rows)

    @property
    def row_bytes(self) -> int:
        return int(torch.Size(self.rows.shape[1:]).numel()) * self.rows.dtype.itemsize

    @property
    def host_bytes(self) -> int:
        return self.rows.nbytes

    @property
    def memory(self) -> str:
        """Identity of the memory of the rows, equal on ranks that share a copy."""
        if isinstance(self.rows, bitslab.CompressedFeature):
            return self.rows.table.token
        return f"{os.getpid()} {platform.node()} {self.rows.data_ptr()}"

    def fetch(self, ids: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return rows by id, ids and rows on one GPU; plain tensors are gathered by the CPU."""
        if isinstance(self.rows, bitslab.CompressedFeature):
            return self.rows.gather(ids, device=device)
        if isinstance(self.rows, bitslab.UnifiedTensor):
            return torch.index_select(self.rows, 0, ids)
        # Page-locked, so that the copy to the GPU runs by itself.
        shape = (len(ids), *self.rows.shape[1:])
        out = torch.empty(shape, dtype=self.rows.dtype, pin_memory=True)
        return torch.index_select(self.rows, 0, ids.cpu(), out=out).to(device, non_blocking=True)

    def count(self, n_rows: int) -> None:
        """Count requested rows: tensors do not count by themselves."""
        self._asked_rows += n_rows

    def traffic(self) -> Traffic:
        """Return the bytes moved since the column was made."""
        if isinstance(self.rows, torch.Tensor):
            asked_bytes = self._asked_rows * self.row_bytes
            return Traffic(asked_bytes, asked_bytes)
        stats = self.rows.stats()
        cache = stats["cache"] or {"hits": 0, "misses": 0}
        return Traffic(
            stats["gathered_bytes"], stats["moved_bytes"], cache["hits"], cache["misses"]
        )
