"""TableParts: the buffers and metadata of a table in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from ..compressed import CompressedTensor
from ..dtypes import dtype_from_name, dtype_name
from ..engine.codecs import PackedRows, RowCodec
from ..engine.codecs.base import elements
from ..engine.codecs.registry import row_codec_class
from ..engine.kernels.format import TableStorage, ceil_div
from ..engine.memory.host import HostBuffer
from ..engine.memory.writer import HostWriter
from ..engine.progress import Progress

Layout = Literal["compact", "inplace"]

#: Raw rows up to this share of a table are rare enough to be gathered more slowly than the others.
RARE_SHARE = 1 / 32


@dataclass(frozen=True)
class TableParts:
    """Buffers and metadata of a table in host memory.

    A row here is a row of the codec, an item is a row of the table. They are the same, except that
    several narrow items share one row.

    Parameters
    ----------
    codec : RowCodec
        The codec of the rows; one that keeps them raw for a raw table.
    layout : {"compact", "inplace"}
        How rows are stored.
    shape : tuple of int
        Shape of the table, ``[n_items, *item_shape]``.
    tensors : dict of str to torch.Tensor
        ``words``, and ``bases`` and ``lengths``, or ``flags``; ``row_clusters`` with clusters. As
        in TableStorage.
    buffers : dict of str to HostBuffer
        The memory behind the tensors; none for tensors in a mapped file.
    facts : dict of str to int
        Metadata: ``max_packed_words`` (of a row, raw rows not counted), ``typical_words``,
        ``packed_words`` (of all rows together) and ``packed_rows`` (those not kept raw).
    """

    codec: RowCodec
    layout: Layout
    shape: tuple[int, ...]
    tensors: dict[str, torch.Tensor]
    buffers: dict[str, HostBuffer] = field(default_factory=dict)
    facts: dict[str, int] = field(default_factory=dict)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return self.codec.dtype

    @cached_property
    def item_shape(self) -> tuple[int, ...]:
        """Shape of an item."""
        return self.shape[1:]

    @cached_property
    def n_items(self) -> int:
        """Number of items."""
        return self.shape[0]

    @cached_property
    def item_bytes(self) -> int:
        """Bytes of an item before packing."""
        return elements(self.item_shape) * self.dtype.itemsize

    @cached_property
    def items_per_row(self) -> int:
        """Items of a row; the last row may have fewer and is padded."""
        return items_per_row(self.codec, self.item_shape)

    @cached_property
    def n_rows(self) -> int:
        """Number of rows."""
        return ceil_div(self.n_items, self.items_per_row)

    @cached_property
    def raw_bytes(self) -> int:
        """Bytes of all items before packing."""
        return self.n_items * self.item_bytes

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row before packing."""
        return self.codec.row_bytes

    @cached_property
    def row_words(self) -> int:
        """Words of a row kept raw among packed ones."""
        return ceil_div(self.row_bytes, 4)

    @cached_property
    def raw(self) -> bool:
        """Whether the whole table is kept raw."""
        return self.codec.keeps_raw

    def storage(
        self, moved: Mapping[str, torch.Tensor] | None = None, moved_rows: int = 0
    ) -> TableStorage:
        """Return the kernels' view; `moved` holds the tensors ``moved`` and ``overflow``."""
        t = self.tensors
        n_rows, each = self.n_rows, self.items_per_row
        raw_rows = n_rows - self.facts["packed_rows"] + moved_rows
        return TableStorage(
            n_rows=n_rows,
            items_per_row=each,
            filler_items=n_rows * each - self.n_items,
            words=t["words"],
            bases=t.get("bases"),
            lengths=t.get("lengths"),
            row_clusters=t.get("row_clusters"),
            flags=t.get("flags"),
            typical_words=self.facts["typical_words"],
            max_packed_words=self.facts["max_packed_words"],
            max_words=staged_words(
                self.facts["max_packed_words"], self.row_words, raw_rows, n_rows
            ),
            **(moved or {}),
        )

    def raw_rows(self) -> torch.Tensor:
        """View the rows of a raw table as uint8 ``[N, row_bytes]``."""
        data = self.tensors["words"].view(torch.uint8)[: self.raw_bytes]
        return data.view(self.n_rows, self.row_bytes)

    def close(self) -> None:
        """Free the memory, as soon as no other reference to one of the tensors is left."""
        self.tensors.clear()
        for buffer in self.buffers.values():
            buffer.close()

    def gains_nothing(self) -> bool:
        """Return whether packed rows with their metadata and profile are no smaller than raw.

        In place, what counts is the bytes that gathers read; the padding of each row to whole words
        counts as read.
        """
        packed = 4 * self.facts["packed_words"] + self.metadata_bytes + self.codec.profile_bytes
        if self.layout == "inplace":
            packed += max(0, 4 * self.row_words * self.n_rows - self.raw_bytes)
        return packed >= self.raw_bytes

    @property
    def metadata_bytes(self) -> int:
        """Bytes of the metadata that locates rows among the words."""
        return sum(t.nbytes for name, t in self.tensors.items() if name != "words")

    def as_packed(self) -> PackedRows:
        """Return a compact or raw table as its codec's packed rows."""
        if self.raw:
            rows = self.raw_rows().view(-1).view(self.dtype).view(self.shape)
            return PackedRows(self.n_rows, {"rows": rows})
        return PackedRows(self.n_rows, dict(self.tensors), {"n_words": self.facts["packed_words"]})

    def describe(self) -> dict[str, Any]:
        """Return all but the memory, as JSON-able values; see `from_description`."""
        return {
            "codec": self.codec.name,
            "config": self.codec.to_config(),
            "layout": self.layout,
            "shape": list(self.shape),
            "facts": self.facts,
            "dtypes": {name: dtype_name(t.dtype) for name, t in self.tensors.items()},
        }

    @classmethod
    def from_description(
        cls, state: Mapping[str, Any], buffers: dict[str, HostBuffer]
    ) -> TableParts:
        """Return the parts from what `describe` returned and their memory."""
        codec = row_codec_class(state["codec"]).from_config(state["config"])
        dtypes = {name: dtype_from_name(text) for name, text in state["dtypes"].items()}
        tensors = {name: buffers[name].tensor.view(dtype) for name, dtype in dtypes.items()}
        return cls(
            codec,
            state["layout"],
            tuple(state["shape"]),
            tensors,
            buffers,
            dict(state["facts"]),
        )

    @classmethod
    def from_compressed(cls, ct: CompressedTensor) -> TableParts:
        """Return a view of a compressed tensor as a compact table that owns no memory."""
        facts = ct.packed.facts
        lengths = as_unsigned(ct.packed.parts["lengths"])
        return cls(
            ct.codec,
            "compact",
            tuple(ct.shape),
            dict(ct.packed.parts),
            {},
            {
                "max_packed_words": int(lengths.max(initial=0)),
                "typical_words": facts["max_row_words"],
                "packed_words": facts["n_words"],
                "packed_rows": int(np.count_nonzero(lengths)),
            },
        )

    def copy(self, *, pin: bool, progress: Progress) -> TableParts:
        """Copy the table to memory of its own."""
        buffers: dict[str, HostBuffer] = {}
        try:
            for name, t in self.tensors.items():
                writer = HostWriter(pin=pin and name == "words")
                for piece in torch.split(t, 8 << 20):
                    writer.append(piece)
                buffers[name] = writer.finish()
        except BaseException:
            for buffer in buffers.values():
                buffer.close()
            raise
        progress.advance(self.n_items)
        tensors = {name: b.tensor.view(self.tensors[name].dtype) for name, b in buffers.items()}
        return replace(self, tensors=tensors, buffers=buffers)


def items_per_row(codec: RowCodec, item_shape: tuple[int, ...]) -> int:
    """Return the number of items of a shape in a row of a codec."""
    return elements(codec.row_shape) // max(1, elements(item_shape)) or 1


def as_unsigned(lengths: torch.Tensor) -> np.ndarray[Any, Any]:
    """View lengths as unsigned; torch's dtype may be the signed one of that width."""
    kinds = {1: np.uint8, 2: np.uint16, 4: np.uint32}
    return lengths.numpy().view(kinds[lengths.element_size()])


def staged_words(max_packed_words: int, row_words: int, raw_rows: int, n_rows: int) -> int:
    """Return the words that kernels stage for each row: enough for raw rows, unless these are rare.

    The fewer words, the more rows a GPU works on at once.
    """
    return row_words if raw_rows > RARE_SHARE * n_rows else max(1, max_packed_words)


def widened(lengths: torch.Tensor) -> np.ndarray[Any, Any]:
    """Copy lengths to int64."""
    return as_unsigned(lengths).astype(np.int64)


def bits_of(flags: np.ndarray[Any, Any]) -> torch.Tensor:
    """Pack bools ``[n]`` into int32 ``[ceil(n / 32)]``, the first in the lowest bit."""
    data = np.packbits(flags, bitorder="little")
    padded = np.zeros(4 * ceil_div(len(flags), 32), np.uint8)
    padded[: len(data)] = data
    return torch.from_numpy(padded.view(np.int32))
