"""What the Numba functions read of a row layout, computed once for each layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..format import GROUP_CHUNKS, RowLayout, ceil_div

Array = np.ndarray[Any, Any]

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {2: np.int16, 4: np.int32}

# Bits of payload that fit into the 64 bits in which `groups.decode_group` reads the chunks of 64
# bits, together with the bits of the byte that they start in.
_MAX_PAYLOAD_BITS = {1: 7, 2: 15, 4: 29, 8: 57}
_CACHE_LINE = 64


@dataclass(frozen=True, eq=False)
class Field:
    """What fields.py reads of a layout each of whose clusters has one mask for all positions.

    The field is the bits where that mask is 1.

    Parameters
    ----------
    numbers : numpy.ndarray
        int64 ``[K, NUMBERS]``, by their place in fields.py: bits of the payload of a chunk, how
        they are read, the mask of those that then are in place, bits of the field; for each run of
        bits that moves its mask and its shift, for all chunks of 64 bits, as the mask before; the
        same for each run of the field, for one chunk.
    values : numpy.ndarray
        ``[K, G, ...]``, in lines of the cache of their own: what the codes stand for in the chunks
        of a group, as `groups.decode_group` reads it. G is 1 where that is the same in all groups.
    each : bool
        Whether positions have values of their own.
    bytes : numpy.ndarray or None
        uint8 ``[K, VALUES_BYTES]``: what the codes stand for where bytefields.py serves these rows
        on a processor that has what it needs.
    """

    numbers: Array
    values: Array
    each: bool
    bytes: Array | None

    @property
    def group_values_bytes(self) -> int:
        """Bytes between the values of a group and those of the next one."""
        return self.values.strides[1] if self.values.shape[1] > 1 else 0


@dataclass(frozen=True, eq=False)
class Constants:
    """What the kernels read of a layout.

    Parameters
    ----------
    tables, starts : numpy.ndarray
        As rows.py reads them: for each position, or 32 times the one.
    field : Field or None
        None where `rows.decode_row` has to decode.
    """

    tables: Array
    starts: Array
    field: Field | None


_constants: WeakKeyDictionary[RowLayout, Constants] = WeakKeyDictionary()


def constants_of(layout: RowLayout) -> Constants:
    """Return the constants of a layout, worked out at its first use."""
    found = _constants.get(layout)
    if found is None:
        tables, starts = unsigned(layout.tables), layout.starts.numpy()
        field = _field_of(layout, tables)
        if layout.format.uniform:
            tables = np.repeat(tables, GROUP_CHUNKS, axis=2)
            starts = starts[:, 1:] * np.arange(GROUP_CHUNKS + 1, dtype=np.int32)
        found = _constants[layout] = Constants(tables, starts, field)
    return found


def unsigned(t: torch.Tensor) -> Array:
    """View a tensor of integers as the unsigned numpy array of the same width."""
    return t.numpy().view(UNSIGNED[t.element_size()])


def chunks_of(rows: torch.Tensor, chunk_bytes: int) -> Array:
    """View contiguous ``[N, row_bytes]`` uint8 rows as ``[N, C]`` chunks.

    An address that is no multiple of the chunk is fine: numpy marks such a view, and Numba
    compiles accesses for it.
    """
    return rows.numpy().view(UNSIGNED[chunk_bytes])


def _field_of(layout: RowLayout, tables: Array) -> Field | None:
    """Return what fields.py needs, or None where a mask is not of the kind that it decodes."""
    from . import bytefields, fields

    f = layout.format
    masks = tables[:, 0]
    if not f.chunks or (masks != masks[:, :1]).any():
        return None
    numbers = np.zeros((f.clusters, fields.NUMBERS), np.int64)
    for cluster, mask in enumerate(masks[:, 0].tolist()):
        if not _describe(mask, f.chunk_bytes, numbers[cluster]):
            return None
    by_code = tables[:, 1 : 1 + f.values].astype(UNSIGNED[f.chunk_bytes])
    each = f.chunk_bytes == 8 or bool((by_code != by_code[:, :, :1]).any())
    values = _values_of_places(by_code) if each else _values_tables(by_code)
    one_byte = not each and bytefields.available() and bytefields.serves(numbers, f)
    as_bytes = bytefields.values_of(by_code[:, :, 0], numbers) if one_byte else None
    return Field(numbers, values, each, as_bytes)


def _describe(mask: int, chunk_bytes: int, numbers: Array) -> bool:
    """Return whether a mask is of the kind, and write its `Field.numbers`."""
    from . import fields, groups

    width = 8 * chunk_bytes
    payload = runs_of(((1 << width) - 1) & ~mask, width)
    field = runs_of(mask, width)
    bits = width - mask.bit_count()
    kind = groups.WINDOWS if bits else groups.NO_PAYLOAD
    twice = 0  # bits that also stand 8 places higher, once they are read
    if (width, bits) in ((32, 24), (16, 8)):
        kind = groups.WHOLE_BYTES
        twice = 255 << (bits - 8)
    in_place = [
        (run, shift) for run, shift in payload if shift == 0 or (shift == 8 and not run & ~twice)
    ]
    moving = [run for run in payload if run not in in_place]
    fixed = sum(run << shift for run, shift in in_place)
    if len(moving) > fields.MAX_RUNS or not 0 < len(field) <= fields.MAX_FIELD_RUNS:
        return False
    if bits > _MAX_PAYLOAD_BITS[chunk_bytes]:
        return False
    in_all = sum(1 << bit for bit in range(0, 64, width))
    facts = {
        fields.PAYLOAD_BITS: bits,
        fields.KIND: kind,
        fields.FIXED: fixed * in_all,
        fields.FIELD_BITS: width - bits,
    }
    for i, (run, shift) in enumerate(moving):
        facts[fields.FIRST_RUN + 2 * i] = run * in_all
        facts[fields.FIRST_RUN + 2 * i + 1] = shift
    for i, (run, shift) in enumerate(field):
        facts[fields.FIRST_FIELD_RUN + 2 * i] = run
        facts[fields.FIRST_FIELD_RUN + 2 * i + 1] = shift
    for place, number in facts.items():
        numbers[place] = np.uint64(number).astype(np.int64)
    return True


def runs_of(mask: int, width: int) -> list[tuple[int, int]]:
    """Return the runs of ones of a mask: where they lie when gathered at the low end, and moves."""
    runs = []
    taken = bit = 0
    while bit < width:
        size = 0
        while bit + size < width and mask >> (bit + size) & 1:
            size += 1
        if size:
            runs.append((((1 << size) - 1) << taken, bit - taken))
        taken += size
        bit += size + 1
    return runs


def _values_tables(by_code: Array) -> Array:
    """Return `Field.values` for ``[K, values, positions]`` that do not depend on the position."""
    from . import groups

    clusters, codes, _ = by_code.shape
    values = np.zeros((clusters, 8), by_code.dtype)
    values[:, 1 : 1 + codes] = by_code[:, :, 0]
    tables = _in_lines((clusters, 1, _CACHE_LINE), np.dtype(np.uint8))
    for cluster in range(clusters):
        table = groups.values_table(values[cluster]).view(np.uint8).ravel()
        tables[cluster, 0, : len(table)] = table
    return tables


def _values_of_places(by_code: Array) -> Array:
    """Return `Field.values` for ``[K, values, positions]``, of which there may be one."""
    clusters, codes, positions = by_code.shape
    n_groups = ceil_div(positions, GROUP_CHUNKS)
    values = _in_lines((clusters, n_groups, 8, GROUP_CHUNKS), by_code.dtype)
    for group in range(n_groups):
        some = by_code[:, :, group * GROUP_CHUNKS : (group + 1) * GROUP_CHUNKS]
        size = GROUP_CHUNKS if positions == 1 else some.shape[2]
        values[:, group, 1 : 1 + codes, :size] = some
    return values


def _in_lines(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return zeros that start where a line of the cache does."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(nbytes + _CACHE_LINE, np.uint8)
    first = -memory.ctypes.data % _CACHE_LINE
    return memory[first : first + nbytes].view(dtype).reshape(shape)
