"""Rows of one table for one rank as a part of a message, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..dtypes import flat_bytes
from ..engine.codecs.vectors import decode_body, encode_body, packed_fields, unpacked_fields
from ..engine.kernels.vector_format import field_words, raw_body_bytes
from ..errors import CorruptedDataError
from .wire import BY_ID, BY_ID_HEADER

Array = np.ndarray[Any, Any]


def on_device(numbers: Array, device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device; the host waits for nothing."""
    t = torch.from_numpy(numbers)
    return t if device.type == "cpu" else t.pin_memory().to(device, non_blocking=True)


def ids_on(ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ids on a device; of those of the CPU the host waits for nothing."""
    if ids.device == device:
        return ids
    return ids.to(device) if ids.is_cuda else on_device(ids.contiguous().numpy(), device)


@dataclass(frozen=True)
class Repeats:
    """Rows of one id, of which one is sent.

    Parameters
    ----------
    places : numpy.ndarray
        int64 ``[rows]``: of each row the number of the sent one.
    first : numpy.ndarray
        int64 ``[sent]``: the rows that are sent.
    first_on_device : torch.Tensor or None
        The same where the rows are, where it is there already.
    """

    places: Array
    first: Array
    first_on_device: torch.Tensor | None = None

    @classmethod
    def of(cls, ids: torch.Tensor) -> Repeats | None:
        """Return the rows that share ids ``[rows]``, None where none do."""
        distinct, first, places = np.unique(ids.numpy(), return_index=True, return_inverse=True)
        return None if len(distinct) == len(ids) else cls(places.reshape(-1), first)

    def first_on(self, device: torch.device) -> torch.Tensor:
        """Return the rows that are sent, on the device of the rows."""
        return (
            on_device(self.first, device) if self.first_on_device is None else self.first_on_device
        )

    @property
    def field_bits(self) -> int:
        """Bits of a field."""
        return max(1, (len(self.first) - 1).bit_length())

    @property
    def nbytes(self) -> int:
        """Bytes of header and fields in a part."""
        return BY_ID_HEADER.size + 4 * field_words(len(self.places), self.field_bits)

    def write(self, out: Array) -> None:
        """Write header and fields to uint8 ``[nbytes]``."""
        header = BY_ID_HEADER.pack(BY_ID, self.field_bits, 0, len(self.first))
        out[: len(header)] = np.frombuffer(header, np.uint8)
        fields = packed_fields(self.places.astype(np.int32), 0, self.field_bits)
        out[len(header) :] = fields.view(np.uint8)


@dataclass(frozen=True)
class Fields:
    """Header of a part whose rows of one id cross once.

    Parameters
    ----------
    bits : int
        Of a field.
    sent_rows : int
        Rows that cross.
    rows : int
        Fields.
    """

    bits: int
    sent_rows: int
    rows: int

    @classmethod
    def of(cls, head: bytes, rows: int, part_bytes: int) -> Fields | None:
        """Return what the first bytes of a part for so many rows say; None of another part.

        Raises
        ------
        CorruptedDataError
            When the header is damaged.
        """
        if not head or head[0] != BY_ID:
            return None
        if len(head) < BY_ID_HEADER.size:
            raise CorruptedDataError("message: it ends in the header of its fields")
        _, bits, _, sent = BY_ID_HEADER.unpack_from(head)
        found = cls(bits, sent, rows)
        if not 0 < bits <= 32 or not 0 < sent < rows or found.nbytes > part_bytes:
            raise CorruptedDataError("message: its fields are damaged")
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of header and fields."""
        return BY_ID_HEADER.size + 4 * field_words(self.rows, self.bits)

    def places(self, data: Array) -> Array:
        """Return int64 ``[rows]``: which row that crossed each is, of bytes behind the header.

        Raises
        ------
        CorruptedDataError
            When one is none of them.
        """
        found: Array = unpacked_fields(data, self.rows, self.bits, np.uint32).astype(np.int64)
        if int(found.max()) >= self.sent_rows:
            raise CorruptedDataError("message: a field is out of range")
        return found


@dataclass(frozen=True)
class Candidate:
    """A way to write rows.

    Parameters
    ----------
    name : str
        For reports and states.
    raw : bool
        Whether they are sent as they are.
    bounded : bool
        Whether elements are quantised, where there is a bound.
    window : int or None
        Rows that a reference may reach back; None: all.
    references : bool
        Whether equal rows are looked for.
    huffman : bool
        Whether codes get a Huffman code where that is shorter than fields of one width.
    """

    name: str
    raw: bool = False
    bounded: bool = True
    window: int | None = None
    references: bool = True
    huffman: bool = True


#: References to equal rows however far back, then a Huffman code or fixed fields, what is smaller.
REFERENCES = Candidate("references")
RAW = Candidate("raw", raw=True)


def most_part_bytes(rows: int, row_bytes: int) -> int:
    """Return how many bytes `encode_part` needs to write to."""
    # Header and fields of up to 32 bits, where rows of one id cross once.
    return raw_body_bytes(rows * row_bytes) + BY_ID_HEADER.size + 4 * (rows + 1)


def encode_part(
    rows: torch.Tensor,
    bound: float,
    candidate: Candidate,
    repeats: Repeats | None,
    out: Array,
) -> tuple[int, bool]:
    """Write rows ``[n, row]`` on the CPU as a part of a message.

    Parameters
    ----------
    rows : torch.Tensor
        Contiguous.
    bound : float
        How far an element may be from the given one; 0: every bit is kept.
    candidate : Candidate
        How.
    repeats : Repeats or None
        Rows of one id.
    out : numpy.ndarray
        uint8, of `most_part_bytes`.

    Returns
    -------
    tuple of int and bool
        Bytes that were written, and whether rows of one id cross once: not where rows that cross as
        they are take as few bytes.
    """
    if repeats is not None:
        at = repeats.nbytes
        repeats.write(out[:at])
        kept = rows[torch.from_numpy(repeats.first)]
        used = at + _encode_rows(kept, bound, candidate, out[at:])
        if used < rows.nbytes:
            return used, True
    return _encode_rows(rows, bound, candidate, out), False


def _encode_rows(rows: torch.Tensor, bound: float, candidate: Candidate, out: Array) -> int:
    """Write rows as a body, or as they are where that is no longer; return the bytes."""
    if not candidate.raw:
        limit = bound if candidate.bounded else 0.0
        used = encode_body(
            rows,
            limit,
            candidate.window,
            out[: raw_body_bytes(rows.nbytes)],
            references=candidate.references,
            huffman=candidate.huffman,
        )
        if used < rows.nbytes:
            return used
    out[: rows.nbytes] = flat_bytes(rows).numpy()
    return rows.nbytes


def decode_part(data: Array, out: torch.Tensor) -> Array | None:
    """Write the rows of a part to `out` ``[n, row]`` on the CPU, contiguous.

    Returns
    -------
    numpy.ndarray or None
        int64 ``[n]``: of each row the number of the row that crossed, where those are fewer.

    Raises
    ------
    CorruptedDataError
        When the part is damaged; nothing is written.
    """
    fields = None
    if len(data) != out.nbytes:
        fields = Fields.of(data[: BY_ID_HEADER.size].tobytes(), len(out), len(data))
    if fields is None:
        _decode_rows(data, out)
        return None
    places = fields.places(data[BY_ID_HEADER.size : fields.nbytes])
    target = torch.empty((fields.sent_rows, out.shape[1]), dtype=out.dtype)
    _decode_rows(data[fields.nbytes :], target)
    torch.index_select(target, 0, torch.from_numpy(places), out=out)
    return places


def _decode_rows(data: Array, out: torch.Tensor) -> None:
    if len(data) == out.nbytes:
        flat_bytes(out).numpy()[:] = data
    else:
        decode_body(data, out, bounded=True)
