"""CacheOptions: how an embedding table is packed and cached, for all modules that own one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.codecs import RowCodec
from ..errors import ArgumentError
from ..tables.build import Rows, check_layout
from ..tables.parts import Layout
from ..tables.table import CompressedTable
from .arguments import CacheKind, check_options, check_warmup_ratio
from .cached_rows import CachedRows
from .eviction import EvictionStrategy


@dataclass(frozen=True)
class CacheOptions:
    """How an embedding table is packed and cached.

    Parameters
    ----------
    cache_ratio : float
        Share of the rows that is resident on the device, more than 0 to 1; at least one row.
    cache : {"rows", "packed"}
        How resident rows are kept; see `CachedRows`.
    evict : EvictionStrategy
        Which resident row leaves first.
    warmup_ratio : float
        Share of the resident rows that is filled at first, 0 to 1.
    buffer_rows : int
        The most rows that are fetched at once; 0 for no bound.
    codec : str or RowCodec
        How rows are packed; see `CompressedTable.from_tensor`.
    layout : {"compact", "inplace"}
        How packed rows lie on the host.
    pin : bool
        Whether the packed table is page-locked.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When a value is not accepted.
    """

    cache_ratio: float = 0.01
    cache: CacheKind = "rows"
    evict: EvictionStrategy = EvictionStrategy.LFU
    warmup_ratio: float = 0.7
    buffer_rows: int = 0
    codec: str | RowCodec = "auto"
    layout: Layout = "compact"
    pin: bool = True

    def __post_init__(self) -> None:
        """Check the values before a table is read; the codec is checked when rows are packed."""
        rows_for_ratio(1, self.cache_ratio)
        check_layout(self.layout)
        check_options(self.buffer_rows, self.cache, self.evict)
        check_warmup_ratio(self.warmup_ratio)

    def pack(
        self,
        weight: CompressedTable | Rows | Iterable[Rows],
        n_rows: int,
        *,
        device: torch.device | str | None,
        trainable: bool,
        counts: torch.Tensor | Sequence[int] | None = None,
        pinned_ids: Sequence[int] = (),
    ) -> CachedRows:
        """Return cached rows of a table with these options.

        Parameters
        ----------
        weight : CompressedTable, torch.Tensor, numpy.ndarray, or iterable of the latter two
            ``[N, D]``, or batches of its rows. A CompressedTable is used as it is, whatever
            `codec`, `layout` and `pin` are.
        n_rows : int
            N.
        device, trainable, counts, pinned_ids
            As for `CachedRows`.
        """
        options: dict[str, Any] = {
            "cache_rows": rows_for_ratio(n_rows, self.cache_ratio),
            "device": device,
            "cache": self.cache,
            "evict": self.evict,
            "trainable": trainable,
            "counts": counts,
            "warmup_ratio": self.warmup_ratio,
            "pinned_ids": pinned_ids,
            "buffer_rows": self.buffer_rows,
        }
        if isinstance(weight, CompressedTable):
            return CachedRows(weight, **options)
        return CachedRows.from_tensor(
            weight, codec=self.codec, layout=self.layout, pin=self.pin, **options
        )


def rows_for_ratio(n_rows: int, cache_ratio: float) -> int:
    """Return how many rows a share of a table is, at least one.

    Parameters
    ----------
    n_rows : int
        Rows of the table.
    cache_ratio : float
        Share of them, more than 0 and up to 1.
    """
    if (
        isinstance(cache_ratio, bool)
        or not isinstance(cache_ratio, (int, float))
        or not 0 < cache_ratio <= 1
    ):
        raise ArgumentError(f"cache_ratio: {cache_ratio!r:.60}, accepted are more than 0 to 1")
    return max(1, int(n_rows * cache_ratio))
