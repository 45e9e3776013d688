"""Tensors and their bodies as kernels take them: one row of numbers for each.

The order of the numbers is that of `Chunk` in vectors.cuh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
BOUNDED, FRAMED, RELATIVE, REFERENCES, COMPLEX, WINDOW_AT = 1, 2, 4, 8, 16, 16
#: Bytes of what kernels find out about a body, and of a table to look codes up in.
STATE_BYTES, TABLE_BYTES = 256, 4 << CODE_LIMIT_BITS
#: One more than the most real numbers of a chunk: kernels divide numbers of 32 bits, and those that
#: encode add up as many counts as a code has bits.
MOST_DECODED, MOST_ENCODED = 1 << 32, 1 << 28
#: Parts of a tensor whose ranges are found apart, at the most.
RANGE_PARTS = 64
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
_SCRATCH_AT = FIELDS.index("state")

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
    "WINDOW_AT": WINDOW_AT,
}


def vector_settings(width: int, kind: int) -> tuple[tuple[str, int | str], ...]:
    """Return what kernels for numbers of so many bytes are compiled with.

    Of integers those for floats of as many bytes, whose values are never asked for.
    """
    known = next(k for w, k in VECTOR_NUMBERS if w == width and kind in (k, -1))
    coded = ("HAS_CODES", int(known >= 0))
    return (("CHUNK_BYTES", width), ("KIND", max(known, 0)), coded, *_DEFINES.items())


@dataclass(frozen=True)
class Described:
    """Chunks as kernels take them.

    Parameters
    ----------
    numbers : numpy.ndarray
        int64 ``[chunks, len(FIELDS)]``; the scratch memory counts from 0 on.
    scratch_bytes : int
        Bytes of the scratch memory of all of them.
    width : int
        Bytes of a real number: 1, 2, 4 or 8.
    kind : int
        What `cpu.floats` calls the dtype; -1 where it has no codes of values.
    """

    numbers: Array
    scratch_bytes: int
    width: int
    kind: int

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.numbers)

    def most(self, name: str) -> int:
        """Return the largest number of a name."""
        return int(self.numbers[:, FIELDS.index(name)].max())

    def at(self, scratch: torch.Tensor) -> Array:
        """Return the numbers with the addresses of scratch memory."""
        found = self.numbers.copy()
        found[:, _SCRATCH_AT:] += scratch.data_ptr()
        return found


def described(
    data: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    flags: Sequence[int],
    forms: Sequence[int],
    bounds: Sequence[float],
    scratch: Sequence[Array],
) -> Described:
    """Return chunks as kernels take them.

    Parameters
    ----------
    data : sequence of torch.Tensor
        uint8: their bodies, or buffers with header and body.
    values : sequence of torch.Tensor
        ``[N, ...]`` contiguous, of one dtype.
    flags, forms, bounds
        Of each; of `forms` what a header has at byte 16.
    scratch : sequence of numpy.ndarray
        int64 ``[chunks]`` each: bytes of the arrays of scratch memory, in the order of `FIELDS`.
    """
    dtype = values[0].dtype
    width = element_bytes(dtype)
    shapes = [row_elements(t.shape) for t in values]
    numbers = np.empty((len(values), len(FIELDS)), np.int64)
    numbers[:, 0] = [t.data_ptr() for t in data]
    numbers[:, 1] = [t.shape[0] for t in data]
    numbers[:, 2] = [t.data_ptr() for t in values]
    numbers[:, 3:5] = shapes
    numbers[:, 5] = flags
    if dtype.is_complex:
        numbers[:, 5] |= COMPLEX
    numbers[:, 6] = forms
    numbers[:, 7] = np.array(bounds, np.float64).view(np.int64)
    sizes = -(-np.stack(scratch, 1) // 16) * 16
    ends = np.cumsum(sizes.reshape(-1))
    numbers[:, _SCRATCH_AT:] = (ends - sizes.reshape(-1)).reshape(sizes.shape)
    return Described(numbers, int(ends[-1]), width, KINDS.get(dtype, -1))


def counts(values: Sequence[torch.Tensor], most: int) -> tuple[Array, Array]:
    """Return the rows of tensors, and their real numbers, int64 ``[chunks]`` each.

    Raises
    ------
    ArgumentError
        When there are no tensors, or too many, or one has `most` numbers or rows, or more.
    ArgumentTypeError
        When they are not of one dtype.
    """
    if not 0 < len(values) <= MOST_CHUNKS:
        raise ArgumentError(f"tensors: {len(values)}, accepted are 1 to {MOST_CHUNKS}")
    dtypes = {t.dtype for t in values}
    if len(dtypes) > 1:
        raise ArgumentTypeError(f"tensors: of {sorted(map(str, dtypes))}, accepted is one dtype")
    rows = np.array([row_elements(t.shape)[0] for t in values], np.int64)
    parts = 2 if values[0].dtype.is_complex else 1
    numbers = np.array([t.numel() * parts for t in values], np.int64)
    found = max(int(numbers.max()), 2 * int(rows.max()) if most == MOST_DECODED else 0)
    if found >= most:
        raise ArgumentError(
            f"tensors: one has {int(numbers.max())} numbers in {int(rows.max())} rows, a GPU takes "
            f"fewer than {most} numbers of each"
        )
    return rows, numbers


def starts_bytes(codes: Array) -> Array:
    """Return the bytes of where the pieces of streams begin, and the last one ends."""
    return 4 * (-(-codes // PIECE_CODES) + 1)


def decode_scratch(rows: Array, numbers: Array) -> list[Array]:
    """Return the bytes of the scratch memory that decoding takes, as `described` wants them."""
    every = np.ones_like(rows)
    return [
        STATE_BYTES * every,
        2 * TABLE_BYTES * every,
        starts_bytes(numbers),
        starts_bytes(rows),
        4 * (-(-rows // 32)),
        4 * rows,
        2 * numbers,
        0 * every,
    ]


@dataclass(frozen=True)
class VectorOptions:
    """How a tensor is encoded.

    Parameters
    ----------
    bound : float
        How far a decoded finite element may be from the given one; 0: every bit is kept.
    relative : bool
        Whether that is a share of the largest less the least finite value.
    window : int or None
        Rows that a reference may reach back; None: all.
    references : bool
        Whether equal rows are looked for.
    """

    bound: float = 0.0
    relative: bool = False
    window: int | None = None
    references: bool = True

    @property
    def flags(self) -> int:
        """What a chunk says of them."""
        found = BOUNDED if self.bound > 0 else 0
        found |= RELATIVE if self.relative and self.bound > 0 else 0
        found |= REFERENCES if self.references else 0
        return found | (self.window or 0) << WINDOW_AT


def encode_scratch(rows: Array, numbers: Array, flags: Array) -> list[Array]:
    """Return the bytes of the scratch memory that encoding takes, as `described` wants them."""
    every = np.ones_like(rows)
    looks = (flags & REFERENCES) > 0
    powers = np.array([1 << max(1, (2 * n - 1).bit_length()) for n in rows.tolist()], np.int64)
    pieces = -(-rows // PIECE_CODES)
    return [
        STATE_BYTES * every,
        8 * (MOST_SYMBOLS + RANGE_PARTS) * every,
        2 * starts_bytes(numbers),
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
    return sum(aligned(raw_body_bytes(t.nbytes)) for t in values)
