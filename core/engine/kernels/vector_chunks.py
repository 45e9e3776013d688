"""Tensors and their bodies as kernels take them: one row of numbers for each.

The order of the numbers is that of `Chunk` in vectors.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from ...dtypes import element_bytes
from ...errors import ArgumentError, ArgumentTypeError
from .blob_format import ALIGN_BYTES, HEADER_BYTES, aligned
from .vector_format import (
    BODY_HEADER_BYTES,
    BYTE_SYMBOLS,
    CODE_HEADER_BYTES,
    CODE_LIMIT_BITS,
    KINDS,
    LEAST_STEP,
    LENGTH_BITS,
    MOST_CODE,
    MOST_STEP,
    MOST_SYMBOLS,
    NO_CODE,
    PIECE_CODES,
    STEP_SHARE,
    raw_body_bytes,
    row_elements,
)

Array = np.ndarray[Any, Any]

#: Bits of the flags of a chunk; from WINDOW_AT on stands the window.
BOUNDED, FRAMED, RELATIVE, REFERENCES, COMPLEX, BOUND_THERE, NO_HUFFMAN = 1, 2, 4, 8, 16, 32, 64
WINDOW_AT = 16
#: Bytes of what kernels find out about a body, and of a table to look codes up in.
STATE_BYTES, TABLE_BYTES = 256, 4 << CODE_LIMIT_BITS
#: One more than the most real numbers of a chunk: kernels divide numbers of 32 bits, and number the
#: slots of a hash table, up to four for each row, by as many.
MOST_DECODED, MOST_ENCODED = 1 << 32, 1 << 30
#: Bytes of a chunk that a kernel writes itself, where a call has one.
ONLY_BYTES = 256
#: Parts of a tensor whose ranges are found apart, at the most.
RANGE_PARTS = 64
#: Plans that kernels keep.
MOST_PLANS = 64
#: Chunks of a call at the most: rows of a grid.
MOST_CHUNKS = 65535

#: Numbers of a chunk, by name; those from `state` on are addresses of scratch memory.
FIELDS = (
    "data",
    "data_bytes",
    "values",
    "rows",
    "row",
    "flags",
    "form",
    "bound",
    "state",
    "tables",
    "row_starts",
    "references",
    "ranks",
    "places",
    "symbols",
    "slots",
)
_BOUND_AT, _SCRATCH_AT = FIELDS.index("bound"), FIELDS.index("state")

#: Kernels by the file of their text.
VECTOR_KERNELS: dict[str, tuple[str, ...]] = {
    "vector_decode": ("open_bodies", "read_streams", "find_places", "write_rows"),
    "vector_encode": (
        "begin_chunks",
        "quantise_rows",
        "find_rows",
        "number_rows",
        "count_codes",
        "measure_pieces",
        "place_bodies",
        "write_bodies",
    ),
}
#: What they are compiled for: bytes of a real number, and the kind of its values, or -1.
VECTOR_NUMBERS = ((1, -1), (2, 0), (2, 1), (4, 2), (8, -1))
_DEFINES: dict[str, int | str] = {
    "ALIGN_BYTES": ALIGN_BYTES,
    "HEADER_BYTES": HEADER_BYTES,
    "BODY_HEADER_BYTES": BODY_HEADER_BYTES,
    "CODE_HEADER_BYTES": CODE_HEADER_BYTES,
    "PIECE_CODES": PIECE_CODES,
    "CODE_LIMIT_BITS": CODE_LIMIT_BITS,
    "LENGTH_BITS": LENGTH_BITS,
    "MOST_SYMBOLS": MOST_SYMBOLS,
    "BYTE_SYMBOLS": BYTE_SYMBOLS,
    "MOST_CODE": MOST_CODE,
    "NO_CODE": f"({NO_CODE})",
    "STEP_SHARE": repr(STEP_SHARE),
    "MOST_WANTED": repr(MOST_STEP),
    "LEAST_STEP": f"{LEAST_STEP}f",
    "FLAG_BOUNDED": BOUNDED,
    "FLAG_FRAMED": FRAMED,
    "FLAG_RELATIVE": RELATIVE,
    "FLAG_REFERENCES": REFERENCES,
    "FLAG_COMPLEX": COMPLEX,
    "FLAG_BOUND_THERE": BOUND_THERE,
    "FLAG_NO_HUFFMAN": NO_HUFFMAN,
    "WINDOW_AT": WINDOW_AT,
}


def vector_settings(width: int, kind: int) -> tuple[tuple[str, int | str], ...]:
    """Return what kernels for numbers of so many bytes are compiled with.

    Of integers those for floats of as many bytes, whose values are never asked for.
    """
    known = next(k for w, k in VECTOR_NUMBERS if w == width and kind in (k, -1))
    coded = ("HAS_CODES", int(known >= 0))
    return (("CHUNK_BYTES", width), ("KIND", max(known, 0)), coded, *_DEFINES.items())


@dataclass(frozen=True, eq=False)
class VectorOptions:
    """How a tensor is encoded.

    Parameters
    ----------
    bound : float or torch.Tensor
        How far a decoded finite element may be from the given one; 0: every bit is kept. A tensor
        of float64 without dimensions is on the tensor's device, is read there, and lives until the
        kernels are queued.
    relative : bool
        Whether that is a share of the largest less the least finite value.
    window : int or None
        Rows that a reference may reach back; None: all.
    references : bool
        Whether equal rows are looked for.
    huffman : bool
        Whether what is left of them gets a Huffman code where that is shorter; else codes of values
        are fields of one width, and rows whose every bit is kept stand as they are.
    """

    bound: float | torch.Tensor = 0.0
    relative: bool = False
    window: int | None = None
    references: bool = True
    huffman: bool = True

    @cached_property
    def bounded(self) -> bool:
        """Whether there is a bound; one on a device may be 0."""
        return isinstance(self.bound, torch.Tensor) or self.bound > 0

    @cached_property
    def bound_bits(self) -> int:
        """The bits of the bound as int64, or its address."""
        if isinstance(self.bound, torch.Tensor):
            return self.bound.data_ptr()
        return int(np.float64(self.bound).view(np.int64))

    @cached_property
    def flags(self) -> int:
        """What a chunk says of them."""
        found = BOUNDED if self.bounded else 0
        found |= BOUND_THERE if isinstance(self.bound, torch.Tensor) else 0
        found |= RELATIVE if self.relative and self.bounded else 0
        found |= REFERENCES if self.references else 0
        found |= 0 if self.huffman else NO_HUFFMAN
        return found | (self.window or 0) << WINDOW_AT


@dataclass(frozen=True, eq=False)
class VectorPlan:
    """What kernels need to know of tensors but their addresses: the same for steps that repeat.

    Parameters
    ----------
    shapes : list of torch.Size
        Of the tensors.
    dtype : torch.dtype
        Of all of them.
    numbers : numpy.ndarray
        int64 ``[tensors, len(FIELDS)]``; the scratch memory counts from 0 on.
    scratch_bytes : int
        Bytes of the scratch memory of all of them.
    most_rows, most_numbers : int
        Of a tensor at the most.
    bounded, refers : bool
        Whether one has a bound, and whether equal rows of one are looked for.
    """

    shapes: list[torch.Size]
    dtype: torch.dtype
    numbers: Array
    scratch_bytes: int
    most_rows: int
    most_numbers: int
    bounded: bool
    refers: bool

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.shapes)

    @property
    def width(self) -> int:
        """Bytes of a real number."""
        return element_bytes(self.dtype)

    @property
    def kind(self) -> int:
        """What `cpu.floats` calls the dtype; -1 where it has no codes of values."""
        return KINDS.get(self.dtype, -1)

    @classmethod
    def encoding(
        cls,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        options: Sequence[VectorOptions],
        form: int | None = None,
    ) -> VectorPlan:
        """Return the plan of tensors that are encoded.

        Parameters
        ----------
        shapes, dtype
            Of the tensors, each of fewer than 2**30 real numbers.
        options : sequence of VectorOptions
            Of each.
        form : int, optional
            What a header before the body has at byte 16; none where left out.

        Raises
        ------
        ArgumentError
            When there are no tensors, or too many, or one is too large.
        """
        rows, numbers = _counts(shapes, dtype, len(options), MOST_ENCODED)
        flags = np.array([each.flags for each in options], np.int64)
        bounds = np.array([each.bound_bits for each in options], np.int64)
        scratch = _encode_scratch(rows, numbers, flags)
        return cls._of(shapes, dtype, rows, numbers, flags, form, bounds, scratch)

    @classmethod
    def decoding(
        cls,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        bounded: Sequence[bool],
        form: int | None = None,
    ) -> VectorPlan:
        """Return the plan of tensors that are decoded, each of fewer than 2**32 real numbers.

        Parameters
        ----------
        shapes, dtype, form
            As for `encoding`.
        bounded : sequence of bool
            Whether codes may stand for values in each.

        Raises
        ------
        ArgumentError
            As by `encoding`.
        """
        rows, numbers = _counts(shapes, dtype, len(bounded), MOST_DECODED)
        flags = np.array(bounded, np.int64) * BOUNDED
        scratch = _decode_scratch(rows, numbers)
        return cls._of(
            shapes, dtype, rows, numbers, flags, form, np.zeros(len(rows), np.int64), scratch
        )

    @classmethod
    def _of(
        cls,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        rows: Array,
        numbers: Array,
        flags: Array,
        form: int | None,
        bounds: Array,
        scratch: list[Array],
    ) -> VectorPlan:
        found = np.zeros((len(shapes), len(FIELDS)), np.int64)
        found[:, 3] = rows
        found[:, 4] = [row_elements(shape)[1] for shape in shapes]
        found[:, 5] = flags | (COMPLEX if dtype.is_complex else 0)
        found[:, 5] |= FRAMED if form is not None else 0
        found[:, 6] = form or 0
        found[:, _BOUND_AT] = bounds
        sizes = -(-np.stack(scratch, 1) // 16) * 16
        ends = np.cumsum(sizes.reshape(-1))
        found[:, _SCRATCH_AT:] = (ends - sizes.reshape(-1)).reshape(sizes.shape)
        return cls(
            list(shapes),
            dtype,
            found,
            int(ends[-1]),
            int(rows.max()),
            int(numbers.max()),
            bool((flags & BOUNDED).any()),
            bool((flags & REFERENCES).any()),
        )

    def with_bounds(self, options: Sequence[VectorOptions]) -> VectorPlan:
        """Return the plan of the same tensors with bounds of other values."""
        bits = [each.bound_bits for each in options]
        if not self.bounded or bits == self.numbers[:, _BOUND_AT].tolist():
            return self
        numbers = self.numbers.copy()
        numbers[:, _BOUND_AT] = bits
        return replace(self, numbers=numbers)

    def addressed(
        self,
        data: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        scratch: torch.Tensor,
    ) -> Array:
        """Return the numbers of tensors at their addresses.

        Parameters
        ----------
        data : sequence of torch.Tensor
            uint8: their bodies, or buffers with header and body.
        values : sequence of torch.Tensor
            Contiguous.
        scratch : torch.Tensor
            Of `scratch_bytes`.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            When the tensors are not those of the plan.
        """
        shapes = [t.shape for t in values]
        if shapes != self.shapes or len(data) != len(shapes):
            raise ArgumentError(
                f"tensors: {len(shapes)} and {len(data)} bodies, the plan is of {len(self)}, or "
                "of other shapes"
            )
        if any(t.dtype != self.dtype for t in values):
            dtypes = sorted({str(t.dtype) for t in values})
            raise ArgumentTypeError(f"tensors: of {dtypes}, the plan is of {self.dtype}")
        found = self.numbers.copy()
        found[:, 0] = [t.data_ptr() for t in data]
        found[:, 1] = [t.shape[0] for t in data]
        found[:, 2] = [t.data_ptr() for t in values]
        found[:, _SCRATCH_AT:] += scratch.data_ptr()
        return found


class VectorPlans:
    """Plans of calls without one, as calls repeat: at most `MOST_PLANS`, else all go.

    What differs between calls of one plan is checked in each: see `VectorPlan.addressed`.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], VectorPlan] = {}

    def __len__(self) -> int:
        """Return the number of plans."""
        return len(self._kept)

    def encoding(
        self, values: Sequence[torch.Tensor], options: Sequence[VectorOptions]
    ) -> VectorPlan:
        """Return what `VectorPlan.encoding` does."""
        dtype = values[0].dtype if values else torch.uint8
        shapes = [t.shape for t in values]
        key = (dtype, *shapes, *[each.flags for each in options])
        found = self._kept.get(key)
        if found is None:
            found = self._keep(key, VectorPlan.encoding(shapes, dtype, options))
        return found.with_bounds(options)

    def decoding(
        self, outs: Sequence[torch.Tensor], bounded: Sequence[bool], form: int | None
    ) -> VectorPlan:
        """Return what `VectorPlan.decoding` does."""
        dtype = outs[0].dtype if outs else torch.uint8
        shapes = [t.shape for t in outs]
        key = (dtype, form, *shapes, *bounded)
        found = self._kept.get(key)
        if found is None:
            found = self._keep(key, VectorPlan.decoding(shapes, dtype, bounded, form))
        return found

    def _keep(self, key: tuple[object, ...], made: VectorPlan) -> VectorPlan:
        if len(self._kept) >= MOST_PLANS:
            self._kept.clear()
        self._kept[key] = made
        return made


def _counts(
    shapes: Sequence[torch.Size], dtype: torch.dtype, given: int, most: int
) -> tuple[Array, Array]:
    """Return the rows of tensors, and their real numbers, int64 ``[tensors]`` each."""
    if not 0 < len(shapes) <= MOST_CHUNKS or given != len(shapes):
        raise ArgumentError(
            f"tensors: {len(shapes)}, of {given} something is said; accepted are 1 to {MOST_CHUNKS}"
        )
    rows = np.array([row_elements(shape)[0] for shape in shapes], np.int64)
    parts = 2 if dtype.is_complex else 1
    numbers = np.array([math.prod(shape) * parts for shape in shapes], np.int64)
    found = max(int(numbers.max()), 2 * int(rows.max()))
    if found >= most:
        raise ArgumentError(
            f"tensors: one has {int(numbers.max())} numbers, or {int(rows.max())} rows; a GPU "
            f"takes fewer than {most} numbers of each, and half as many rows"
        )
    return rows, numbers


def _starts_bytes(codes: Array) -> Array:
    """Return the bytes of where the pieces of streams begin, and the last one ends."""
    return 4 * (-(-codes // PIECE_CODES) + 1)


def _decode_scratch(rows: Array, numbers: Array) -> list[Array]:
    """Return the bytes of the scratch memory that decoding takes, array by array."""
    every = np.ones_like(rows)
    return [
        STATE_BYTES * every,
        2 * TABLE_BYTES * every,
        _starts_bytes(numbers),
        _starts_bytes(rows),
        4 * (-(-rows // 32)),
        4 * rows,
        2 * numbers,
        0 * every,
    ]


def _encode_scratch(rows: Array, numbers: Array, flags: Array) -> list[Array]:
    """Return the bytes of the scratch memory that encoding takes, array by array."""
    every = np.ones_like(rows)
    looks = (flags & REFERENCES) > 0
    powers = np.array([1 << max(1, (2 * n - 1).bit_length()) for n in rows.tolist()], np.int64)
    pieces = -(-rows // PIECE_CODES)
    return [
        STATE_BYTES * every,
        8 * (MOST_SYMBOLS + RANGE_PARTS) * every,
        2 * _starts_bytes(numbers),
        # Bitmap and fields, or about as many words of a code.
        4 * (rows + -(-rows // 32) + pieces + ALIGN_BYTES) * looks,
        4 * rows * looks,
        3 * 4 * rows * looks,
        2 * numbers * ((flags & BOUNDED) > 0),
        4 * powers * (looks & (flags >> WINDOW_AT == 0)),
    ]


def uploaded_chunks(numbers: Array, device: torch.device) -> torch.Tensor:
    """Return chunks on a device, int64 ``[chunks, len(FIELDS)]``, without waiting for it."""
    table = torch.from_numpy(numbers)
    if device.type == "cuda":
        table = table.pin_memory()
    return table.to(device, non_blocking=True)


def send_bytes(values: Sequence[torch.Tensor]) -> int:
    """Return the most bytes that the bodies of tensors take in one buffer."""
    return sum(map(_room_for, [t.nbytes for t in values]))


@lru_cache(1024)
def _room_for(n_bytes: int) -> int:
    return aligned(raw_body_bytes(n_bytes))
