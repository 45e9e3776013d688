"""Opening files of tables, memory-mapped where possible."""

from __future__ import annotations

import contextlib
import os

import torch

from ..compressed import CompressedTensor, load
from ..engine.codecs.base import elements
from ..engine.files.new_file import PathLike
from ..engine.kernels.format import MAX_SHARED_ROW_BYTES
from ..engine.progress import Progress
from ..errors import ArgumentError
from .build import build_parts, check_table_codec, slices_of
from .changes import MappedFile
from .parts import Layout, TableParts
from .rows import HostRows
from .sharing import checksum_of_file


def parts_of_file(
    path: PathLike, layout: Layout, *, pin: bool
) -> tuple[TableParts, MappedFile | None]:
    """Return the buffers of the table in a file, and the file where they map it."""
    ct = load(path)
    if not isinstance(ct, CompressedTensor):
        raise ArgumentError(
            f"{os.fspath(path)}: codec {ct.codec.name!r} packs whole tensors, a table needs "
            "a codec of rows"
        )
    whole = len(ct.shape) >= 1 and tuple(ct.codec.row_shape) == tuple(ct.shape[1:])
    if not whole and not _holds_shared_rows(ct):
        raise ArgumentError(
            f"{os.fspath(path)}: holds a tensor {list(ct.shape)} in rows of "
            f"{list(ct.codec.row_shape)}, expected one row for each item, or for several where "
            "they are narrow, as CompressedTable.save writes them"
        )
    check_table_codec(type(ct.codec), os.fspath(path))
    shape = tuple(ct.shape[1:])
    with Progress("reading", len(ct), None) as shown:
        if ct.codec.keeps_raw:
            batches = slices_of(ct.packed.parts["rows"])
            return build_parts(batches, ct.codec, shape, layout, pin=pin, progress=shown), None
        mapped = TableParts.from_compressed(ct)
        if layout == "inplace":
            with contextlib.closing(HostRows(mapped, pin=False)) as rows:
                batches = rows.batches()
                parts = build_parts(batches, ct.codec, shape, layout, pin=pin, progress=shown)
            return parts, None
        if pin and torch.cuda.is_available():
            return mapped.copy(pin=pin, progress=shown), None
        return mapped, MappedFile(os.path.abspath(path), checksum_of_file(path))


def _holds_shared_rows(ct: CompressedTensor) -> bool:
    """Return whether several items of a tensor make one row, of a kind that tables hold."""
    item, row = elements(ct.shape[1:]), elements(ct.codec.row_shape)
    shared = len(ct.shape) >= 1 and 0 < item < row and row % item == 0
    return shared and ct.codec.shares_rows and ct.codec.row_bytes <= MAX_SHARED_ROW_BYTES
