"""Which ranges of which images a unit needs, and where they land: planned once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..engine.kernels.format import RowStorage
from .records import RAW_ALIGNMENT_BYTES, TensorRecord, round_up
from .store import PackedWeights


@dataclass(frozen=True)
class Piece:
    """A range of an image that crosses in one copy.

    Parameters
    ----------
    stored_in : str
        The unit whose image it is of.
    begin, end : int
        The range.
    staged : int
        Its first byte in a staging buffer.
    crosses : bool
        Whether it comes over the link; an image in device memory does not.
    """

    stored_in: str
    begin: int
    end: int
    staged: int
    crosses: bool


@dataclass(frozen=True, eq=False)
class PlannedTensor:
    """A tensor of a unit.

    Parameters
    ----------
    name : str
        Its name among the packed weights.
    record : TensorRecord
        How it is packed.
    stored_in : str
        The unit whose image it lies in.
    shift : int
        What to add to an offset in that image for the offset in a staging buffer.
    decoded_offset : int
        Its first byte in a buffer of decoded tensors.
    """

    name: str
    record: TensorRecord
    stored_in: str
    shift: int
    decoded_offset: int


@dataclass(eq=False)
class UnitPlan:
    """What a unit transfers and decodes, with all offsets.

    Parameters
    ----------
    name : str
        Name of the unit.
    pieces : list of Piece
        The ranges that are copied to staging.
    tensors : list of PlannedTensor
        Its tensors.
    staged_nbytes, decoded_nbytes : int
        Bytes of its staging and its decoded buffer.
    """

    name: str
    pieces: list[Piece] = field(default_factory=list)
    tensors: list[PlannedTensor] = field(default_factory=list)
    staged_nbytes: int = 0
    decoded_nbytes: int = 0

    @property
    def raw_nbytes(self) -> int:
        """Bytes of its tensors before packing."""
        return sum(planned.record.raw_nbytes for planned in self.tensors)

    @property
    def crossing_nbytes(self) -> int:
        """Bytes that cross the link for it."""
        return sum(piece.end - piece.begin for piece in self.pieces if piece.crosses)

    def raw_views(self, weights: PackedWeights) -> dict[str, torch.Tensor]:
        """View the tensors that are kept raw where they are stored."""
        views = {}
        for planned in self.tensors:
            record = planned.record
            if record.raw:
                image = weights.unit(planned.stored_in).image.tensor()
                flat = image[record.offset : record.offset + record.nbytes]
                views[planned.name] = record.restored(flat)
        return views

    def views(self, decoded: torch.Tensor) -> dict[str, torch.Tensor]:
        """View its tensors in a buffer of decoded tensors, uint8 ``[decoded_nbytes]``."""
        return {
            planned.name: planned.record.restored(
                decoded[
                    planned.decoded_offset : planned.decoded_offset + planned.record.decoded_nbytes
                ]
            )
            for planned in self.tensors
        }


def plan_unit(weights: PackedWeights, unit: str, names: Sequence[str]) -> UnitPlan:
    """Plan a unit that needs these tensors, of its own image or, where tied, of another's."""
    plan = UnitPlan(unit)
    by_unit: dict[str, dict[str, TensorRecord]] = {}
    for name in dict.fromkeys(weights.stored_name(name) for name in names):
        by_unit.setdefault(weights.unit_of(name), {})[name] = weights.record(name)
    for stored_in, records in by_unit.items():
        held = weights.unit(stored_in)
        for begin, end, part in _ranges(held.records, held.image.nbytes, records):
            staged = round_up(plan.staged_nbytes, RAW_ALIGNMENT_BYTES) + begin % RAW_ALIGNMENT_BYTES
            crosses = held.image.tier != "device"
            plan.pieces.append(Piece(stored_in, begin, end, staged, crosses))
            plan.staged_nbytes = staged + end - begin
            # In the order of the image, so that tensors kept raw can be copied together.
            for name, record in sorted(part.items(), key=lambda item: item[1].offset):
                at = round_up(plan.decoded_nbytes, RAW_ALIGNMENT_BYTES)
                plan.tensors.append(PlannedTensor(name, record, stored_in, staged - begin, at))
                plan.decoded_nbytes = at + record.decoded_nbytes
    return plan


def _ranges(
    held: Mapping[str, TensorRecord], nbytes: int, wanted: dict[str, TensorRecord]
) -> list[tuple[int, int, dict[str, TensorRecord]]]:
    """Return the ranges of an image that hold the wanted tensors: the whole, or one for each."""
    if len(wanted) == len(held):
        return [(0, nbytes, wanted)]
    return [
        (record.offset, record.offset + record.nbytes, {name: record})
        for name, record in wanted.items()
    ]


def storage_of(planned: PlannedTensor, data: torch.Tensor, shift: int) -> RowStorage:
    """View the tensors of packed rows in a buffer that begins `shift` bytes into their image."""
    parts = {
        name: data[part.offset + shift :][: part.nbytes].view(part.dtype).view(part.shape)
        for name, part in planned.record.parts.items()
    }
    empty = torch.empty(0, dtype=torch.uint8, device=data.device)
    return RowStorage(
        parts["words"], parts["bases"], parts["lengths"], parts.get("row_clusters", empty)
    )
