"""Rows of packed tensors in host memory, read by a GPU itself: look-ups in an embedding."""

from __future__ import annotations

from typing import Any

import torch

from ..engine.codecs import RowKernels
from ..engine.kernels.cuda import kernels_on
from ..engine.kernels.cuda.ids import CHECKED_BY_ALL
from ..engine.kernels.format import TableStorage
from ..engine.row_map import row_map
from .images import HostImage, Image
from .records import TensorRecord
from .store import PackedWeights, checked_ids


class DeviceRows:
    """Decodes rows by id on a GPU.

    The words are read in place; what finds rows among them, one or two bytes a row, is copied to
    the GPU once. Tensors that a GPU cannot read by itself (in a file, or host memory that the
    system refused to page-lock) are looked up on the CPU, which waits for the ids.

    Parameters
    ----------
    weights : PackedWeights
        The weights.
    device : torch.device
        The GPU.
    """

    def __init__(self, weights: PackedWeights, device: torch.device) -> None:
        self._weights = weights
        self._device = device
        #: One object for each tensor: the kernels cache what they prepare for a table.
        self._tables: dict[str, tuple[TableStorage, RowKernels]] = {}

    def rows(self, name: str, ids: torch.Tensor, sm_budget: int | None) -> torch.Tensor:
        """Return ``[*ids.shape, *shape[1:]]`` on the GPU, decoded on the current stream."""
        name = self._weights.stored_name(name)
        record = self._weights.record(name)
        held = self._weights.unit(self._weights.unit_of(name)).image
        readable = held.tier == "device" or (isinstance(held, HostImage) and held.pinned)
        if not readable or not _row_by_row(record):
            on_cpu = checked_ids(name, ids.cpu(), record.shape[0])
            if record.row_ordered and held.tier != "device":
                return self._weights.rows(name, on_cpu).to(self._device)
            return self._weights.read(name, self._device)[on_cpu.to(self._device)]
        wanted = ids.to(self._device).reshape(-1).to(torch.int64)
        shape = (*ids.shape, *record.shape[1:])
        out = torch.empty(shape, dtype=record.dtype, device=self._device)
        if not out.numel():
            return out
        row_bytes = record.codec.row_bytes
        target = out.view(-1).view(torch.uint8).view(wanted.shape[0], row_bytes)
        kernels = kernels_on(self._device)
        first_bad = None
        if wanted.shape[0] > CHECKED_BY_ALL:
            first_bad = torch.empty(1, dtype=torch.int64, device=self._device)
            kernels.ids.check(wanted, record.n_rows, first_bad, 0)
        options: dict[str, Any] = {"first_bad": first_bad, "lowest": 0, "sm_budget": sm_budget}
        if record.raw:
            source = record.parts["rows"].of(held.tensor()).view(-1).view(torch.uint8)
            rows = source.view(record.n_rows, row_bytes)
            kernels.copy_rows(rows, row_bytes, wanted, target, **options)
        else:
            table, packed = self._table(name, record, held)
            packed.gather(table, wanted, target, **options)
        return out

    def _table(
        self, name: str, record: TensorRecord, held: Image
    ) -> tuple[TableStorage, RowKernels]:
        """Return a tensor's rows, with everything but the words on the GPU."""
        found = self._tables.get(name)
        if found is None:
            parts = record.packed(held.tensor()).parts
            clusters = parts.get("row_clusters")
            table = TableStorage(
                n_rows=record.n_rows,
                words=parts["words"],
                bases=parts["bases"].to(self._device),
                lengths=parts["lengths"].to(self._device),
                row_clusters=None if clusters is None else clusters.to(self._device),
                max_words=record.facts["max_row_words"],
            )
            found = self._tables[name] = table, record.codec.kernels(self._device)
        return found

    def close(self) -> None:
        """Release the copies."""
        self._tables.clear()


def _row_by_row(record: TensorRecord) -> bool:
    """Return whether an item of the first dimension is one row of the codec."""
    if not record.row_ordered:
        return False
    row_elements = record.codec.row_bytes // record.dtype.itemsize
    rows = row_map(record.shape, row_elements) if record.n_rows else None
    return rows is not None and rows.rows_per_item == 1 and rows.items_per_row == 1
