"""Rows for one rank as a message, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..dtypes import flat_bytes
from ..engine.codecs.vectors import decode_body, encode_body, packed_fields, unpacked_fields
from ..engine.kernels.vector_format import field_words, raw_body_bytes
from ..errors import CorruptedDataError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Repeats:
    """Rows of one id, of which one is sent.

    Parameters
    ----------
    places : numpy.ndarray
        int64 ``[rows]``: of each row the number of the sent one.
    first : numpy.ndarray
        int64 ``[sent]``: the rows that are sent.
    """

    places: Array
    first: Array

    @classmethod
    def of(cls, ids: torch.Tensor) -> Repeats | None:
        """Return the rows that share ids ``[rows]``, None where none do."""
        distinct, first, places = np.unique(ids.numpy(), return_index=True, return_inverse=True)
        return None if len(distinct) == len(ids) else cls(places.reshape(-1), first)


@dataclass(frozen=True)
class Message:
    """What is sent to a rank.

    Parameters
    ----------
    data : numpy.ndarray
        uint8: its bytes.
    body_rows, field_bits : int
        As in `wire.Descriptor`.
    """

    data: Array
    body_rows: int
    field_bits: int


def encode_message(rows: torch.Tensor, bound: float, repeats: Repeats | None) -> Message:
    """Return rows ``[n, row]`` on the CPU as a message; `bound`: 0 keeps every bit."""
    fields = np.empty(0, np.uint8)
    bits = 0
    if repeats is not None:
        bits = max(1, (len(repeats.first) - 1).bit_length())
        fields = packed_fields(repeats.places.astype(np.int32), 0, bits).view(np.uint8)
        rows = rows[torch.from_numpy(repeats.first)]
    body = np.empty(raw_body_bytes(rows.nbytes), np.uint8)
    used = encode_body(rows, bound, None, body)
    coded = body[:used] if used < rows.nbytes else flat_bytes(rows).numpy()
    return Message(np.concatenate([fields, coded]) if bits else coded, len(rows), bits)


def decode_message(data: Array, body_rows: int, field_bits: int, out: torch.Tensor) -> Array | None:
    """Write the rows of a message to `out` ``[n, row]`` on the CPU, contiguous.

    Returns
    -------
    numpy.ndarray or None
        int64 ``[n]``: of each row the number of the row in the body, where those are fewer.

    Raises
    ------
    CorruptedDataError
        When the message is damaged; nothing is written.
    """
    places = None
    if field_bits:
        n_bytes = 4 * field_words(len(out), field_bits)
        if n_bytes > len(data):
            raise CorruptedDataError("message: it ends in its fields")
        places = unpacked_fields(data[:n_bytes], len(out), field_bits).astype(np.int64)
        if int(places.max()) >= body_rows:
            raise CorruptedDataError("message: a field is out of range")
        data = data[n_bytes:]
    target = out if places is None else torch.empty((body_rows, out.shape[1]), dtype=out.dtype)
    if len(data) == target.nbytes:
        flat_bytes(target).numpy()[:] = data
    else:
        decode_body(data, target, bounded=True)
    if places is not None:
        torch.index_select(target, 0, torch.from_numpy(places), out=out)
    return places
