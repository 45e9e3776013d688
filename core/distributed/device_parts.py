"""Messages of tensors on a GPU, part by part: what is sent, and what came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..engine.kernels.vector_chunks import VectorOptions
from .messages import Array, Fields, Repeats
from .wire import PART_SIZE


class Coder(Protocol):
    """Codes tensors on one device, any number at once, without waiting for it."""

    def encode_vectors(
        self, values: Sequence[torch.Tensor], options: Sequence[VectorOptions], out: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write bodies of tensors of one dtype to `out`; return offsets and sizes, int64 there."""

    def decode_vectors(
        self, bodies: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], bounded: Sequence[bool]
    ) -> None:
        """Write the tensors of bodies, of one dtype, whose memory begins at words."""


@dataclass(frozen=True)
class Part:
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
    """Parts of one dtype: their bodies in one buffer, places and sizes on the device."""

    parts: list[Part]
    out: torch.Tensor
    offsets: torch.Tensor
    sizes: torch.Tensor


@dataclass(frozen=True)
class Came:
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


@dataclass
class Outcome:
    """What a piece leaves for the caller.

    Parameters
    ----------
    numbers : list
        Of each rank.
    done : torch.cuda.Event or None
        Behind all that was queued.
    """

    numbers: list[list[int]]
    done: torch.cuda.Event | None


@dataclass
class Message:
    """What is sent to a rank: heads on the host, bodies and rows on the device, one after another.

    Parameters
    ----------
    parts : list
        For each its table, its head, and its body or rows.
    """

    parts: list[tuple[int, bytes, torch.Tensor]] = field(default_factory=list)

    def sections(self) -> list[bytes | torch.Tensor]:
        """Return the sizes of all parts but the last one, and the parts."""
        parts = sorted(self.parts, key=lambda part: part[0])
        sizes = [len(head) + body.nbytes for _, head, body in parts]
        found: list[bytes | torch.Tensor] = [b"".join(PART_SIZE.pack(n) for n in sizes[:-1])]
        for _, head, body in parts:
            found += [head, body]
        return [section for section in found if len(section)]

    @property
    def by_id(self) -> bool:
        """Whether rows of a part cross once for each id."""
        return any(head for _, head, _ in self.parts)
