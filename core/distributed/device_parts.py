"""Messages of tensors on a GPU, part by part: what is sent, and what came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from ..engine.kernels.vector_chunks import VectorOptions
from .layout import Rows
from .messages import Array, Fields, Repeats


class Coder(Protocol):
    """Codes tensors on one device, any number at once, without waiting for it."""

    def encode_vectors(
        self,
        values: Sequence[torch.Tensor],
        options: Sequence[VectorOptions],
        out: torch.Tensor,
        *,
        numbers: torch.Tensor,
    ) -> object:
        """Write bodies of tensors of one dtype to `out`, offsets and then sizes to `numbers`.

        The latter are int64 ``[2 * tensors + 1]`` there.
        """

    def decode_vectors(
        self, bodies: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], bounded: Sequence[bool]
    ) -> None:
        """Write the tensors of bodies, of one dtype, whose memory begins at words."""


class Part(NamedTuple):
    """Rows of a table for a rank.

    Parameters
    ----------
    to, table : int
        The rank, and the table's number.
    rows : torch.Tensor
        All of them.
    coded : torch.Tensor
        Those that are encoded: with `repeats` one of each id.
    repeats : Repeats or None
        Rows of one id.
    """

    to: int
    table: int
    rows: torch.Tensor
    coded: torch.Tensor
    repeats: Repeats | None = None


@dataclass(frozen=True)
class Coded:
    """Parts of one dtype: their bodies in one buffer, on the device as their numbers are.

    These are int64 ``[2 * parts + 1]``: where each body begins, where the last one ends, and sizes.
    """

    parts: list[Part]
    out: torch.Tensor
    numbers: torch.Tensor


class Came(NamedTuple):
    """A part that came.

    Parameters
    ----------
    source, table : int
        The rank, and the table's number.
    data : torch.Tensor
        uint8 on the device: the bytes of the part.
    out : torch.Tensor
        Where its rows go.
    """

    source: int
    table: int
    data: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class Places:
    """Which row that crossed each row of a part is, int64 ``[rows]`` on the host."""

    fields: Fields
    places: Array


class Section(NamedTuple):
    """A part of a message.

    Parameters
    ----------
    table : int
        Its number.
    head : bytes
        Header and fields, where rows cross once for each id.
    body : torch.Tensor
        uint8 on the device.
    n_bytes : int
        Of both.
    """

    table: int
    head: bytes
    body: torch.Tensor
    n_bytes: int


#: What is sent to a rank: its parts in the order of the tables.
Message = list[Section]


class Joined(NamedTuple):
    """What is sent in both stages.

    Parameters
    ----------
    data : torch.Tensor
        uint8 on the device: messages, rank after rank.
    sizes : list of int
        Of the messages.
    said, found : torch.Tensor
        int64 ``[ranks, 2]`` there: a descriptor and a number for each rank, and where those of each
        come to.
    """

    data: torch.Tensor
    sizes: list[int]
    said: torch.Tensor
    found: torch.Tensor


def bytes_of(rows: torch.Tensor) -> torch.Tensor:
    """Return rows ``[n, row]``, contiguous, as bytes."""
    return rows.view(-1).view(torch.uint8)


def uploaded(data: bytearray, device: torch.device) -> torch.Tensor:
    """Return bytes, of which there are some, on a device; the host waits for nothing."""
    t = torch.frombuffer(data, dtype=torch.uint8)
    return t if device.type == "cpu" else t.pin_memory().to(device, non_blocking=True)


def options_of(table: Rows) -> VectorOptions:
    """Return how the kernels encode rows of a table."""
    candidate = table.candidate
    bound = table.bound if candidate.bounded else 0.0
    make = VectorOptions if isinstance(bound, torch.Tensor) else _kept_options
    how = candidate.window, candidate.references, candidate.huffman
    return make(bound, table.relative, *how)


#: Those of one bound are one object: kernels then know it for the same.
_kept_options = lru_cache(1024)(VectorOptions)
