"""What the kernels take that work at many chunks of rows at once."""

from __future__ import annotations

from dataclasses import dataclass

from .parameters import Address, Int32, Int64, Parameters


@dataclass(init=False)
class OfChunks(Parameters):
    """`count` chunks, by the address of what describes them."""

    chunks: Address
    count: Int32


@dataclass(init=False)
class DescribesChunks(OfChunks):
    """`count` chunks, or the numbers of the only one, which are written to `described`."""

    described: Address
    data: Int64
    data_bytes: Int64
    values: Int64
    rows: Int64
    row: Int64
    flags: Int64
    form: Int64
    bound: Int64
    state: Int64
    tables: Int64
    row_starts: Int64
    references: Int64
    ranks: Int64
    places: Int64
    symbols: Int64
    slots: Int64
