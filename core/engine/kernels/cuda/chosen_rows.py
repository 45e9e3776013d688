"""What kernels that include chosen_rows.cuh take of a table, and of a cache beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..format import BUCKET_ENTRIES, PAD_WORDS, CacheStorage, RowFormat, TableStorage
from .parameters import Address, Int32, Int64, Parameters, UInt32, Value


@dataclass(init=False)
class ChosenRows(Parameters):
    """The tensors of a `TableStorage` and a `CacheStorage`, which come first; some may be None."""

    words: Address
    n_words: Int64
    bases: Address
    lengths: Address
    length_bytes: Int32
    flags: Address
    moved: Address
    overflow: Address
    overflow_rows: Int64
    typical_words: Int32
    entries: Address
    bucket_mask: UInt32
    slabs: Address


def values_of(
    table: TableStorage,
    cache: CacheStorage | None,
    row_format: RowFormat,
    words: torch.Tensor,
    typical_words: int,
) -> dict[str, Value]:
    """Return the values of `ChosenRows`.

    Parameters
    ----------
    table : TableStorage
        As it is read together with `cache`.
    cache : CacheStorage or None
        Rows in slabs.
    row_format : RowFormat
        That of the table's rows.
    words : torch.Tensor
        The table's words, aligned; its caller keeps them until the kernel has been started.
    typical_words : int
        Words of a row that are fetched before its length is known.
    """
    overflow, lengths = table.overflow, table.lengths
    rows = 0 if overflow is None else (len(overflow) - PAD_WORDS) // row_format.row_words
    return {
        "words": words,
        "n_words": table.words.shape[0] - PAD_WORDS,
        "bases": table.bases,
        "lengths": lengths,
        "length_bytes": 0 if lengths is None else lengths.element_size(),
        "flags": table.flags,
        "moved": table.moved,
        "overflow": overflow,
        "overflow_rows": rows,
        "typical_words": typical_words,
        "entries": None if cache is None else cache.entries,
        "bucket_mask": 0 if cache is None else cache.entries.shape[0] // BUCKET_ENTRIES - 1,
        "slabs": None if cache is None else cache.addresses,
    }
