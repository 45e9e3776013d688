"""WeightPacker: packs parameters one by one, and makes a unit's image with its last one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType

import torch

from ..compressed import CompressedTensor
from ..engine.codecs import RowCodec
from ..errors import ArgumentError, ArgumentTypeError, BitslabError
from .files import WeightFile
from .images import HostImage, Image
from .records import TensorRecord, lay_out, write_parts
from .store import PackedUnit, PackedWeights
from .tensor_packer import CodecName, TensorPacker

#: A packed tensor with the shape and the order of dimensions of what it was packed from.
_Packed = tuple[CompressedTensor, tuple[int, ...], tuple[int, ...]]


class WeightPacker:
    """Packs named tensors into `PackedWeights`, in any order, in bounded extra memory.

    A tensor is packed by `add`; when the last one of a unit is there, the unit's image is put
    together and its pieces are released. In addition to what is packed already, the extra memory is
    that of the units that are not complete: one, when tensors come unit by unit.

    Parameters
    ----------
    units : mapping of str to sequence of str
        For each unit, in the order of the model, the names of its tensors. A name stands once.
    codec, plan_with
        See `TensorPacker`.
    disk : str or os.PathLike, optional
        A safetensors file to write the images to, instead of host memory.
    aliases : mapping of str to str, optional
        Further names of tensors, for tied weights.

    Raises
    ------
    ArgumentError
        When a name stands in two units.
    OSError
        When the file cannot be written.

    Notes
    -----
    One thread at a time may use one packer. A packer that is left without `finish` (an error
    inside ``with``) releases its memory and removes its file.

    Examples
    --------
    >>> import torch
    >>> from bitslab.offload import WeightPacker
    >>> with WeightPacker({"a": ["a.weight", "a.bias"]}) as packer:
    ...     complete = packer.add("a.weight", torch.randn(512, 256))
    ...     complete = packer.add("a.bias", torch.zeros(512))
    ...     weights = packer.finish()
    >>> weights.names
    ('a.weight', 'a.bias')
    """

    def __init__(
        self,
        units: Mapping[str, Sequence[str]],
        *,
        codec: CodecName = "auto",
        plan_with: type[RowCodec] | None = None,
        disk: str | os.PathLike[str] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._wanted = {unit: list(names) for unit, names in units.items()}
        self._stored_in: dict[str, str] = {}
        for unit, names in self._wanted.items():
            for name in names:
                if name in self._stored_in:
                    raise ArgumentError(
                        f"units: {name!r} stands in {self._stored_in[name]!r} and here"
                    )
                self._stored_in[name] = unit
        self._aliases = dict(aliases or {})
        self._packer = TensorPacker(codec, plan_with=plan_with)
        self._incomplete: dict[str, dict[str, _Packed]] = {}
        self._done: dict[str, PackedUnit] = {}
        self._finished = False
        self._file = None if disk is None else WeightFile(disk, list(self._wanted))

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the images of the units that are complete."""
        return sum(held.image.nbytes for held in self._done.values())

    def missing(self) -> list[str]:
        """Return the names that were not added yet."""
        there = {name for held in self._incomplete.values() for name in held}
        return [
            n for n, unit in self._stored_in.items() if unit not in self._done and n not in there
        ]

    def add(self, name: str, tensor: torch.Tensor) -> bool:
        """Pack a tensor.

        Parameters
        ----------
        name : str
            One of the names in `units`, once.
        tensor : torch.Tensor
            Dense, of any dtype, on a CPU or GPU. What is kept raw may share its memory until its
            unit is complete.

        Returns
        -------
        bool
            Whether its unit is complete now.

        Raises
        ------
        ArgumentError
            When the name is not wanted, or was added before.
        ArgumentTypeError
            When `tensor` is none, or on the meta device.
        BitslabError
            When the host memory for the unit's image cannot be had; the tensors of this unit are
            kept, and adding the last of them again tries again.
        """
        unit = self._stored_in.get(name)
        if unit is None:
            raise ArgumentError(f"name: {name!r:.200} is in no unit of this packer")
        held = self._incomplete.setdefault(unit, {})
        if unit in self._done or (name in held and len(held) < len(self._wanted[unit])):
            raise ArgumentError(f"name: {name!r} was added before")
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentTypeError(f"tensor: expected a tensor, got {type(tensor).__name__}")
        if tensor.is_meta:
            raise ArgumentTypeError(f"tensor: {name!r} is on the meta device, it has no data")
        ct, order = self._packer.pack(tensor)
        held[name] = (ct.to("cpu"), tuple(tensor.shape), order)
        if len(held) < len(self._wanted[unit]):
            return False
        self._complete(unit)
        return True

    def _complete(self, unit: str) -> None:
        """Put a unit's image together."""
        names = self._wanted[unit]
        pieces = self._incomplete[unit]
        records, nbytes = lay_out([pieces[name] for name in names])
        placed = dict(zip(names, records, strict=True))
        image: Image
        if self._file is None:
            try:
                image = HostImage(nbytes)
            except BitslabError as error:
                raise BitslabError(
                    f"host memory ran out while packing {unit!r}: its packed weights need {nbytes} "
                    f"bytes, {self.packed_nbytes} bytes of {len(self._done)} units are packed "
                    f"already and about {self._expected(nbytes)} are needed in all; {error}"
                ) from error
            self._fill(image.tensor(), pieces, placed)
        else:
            data = torch.zeros(nbytes, dtype=torch.uint8)
            self._fill(data, pieces, placed)
            image = self._file.write(unit, data, placed)
        del self._incomplete[unit]
        self._done[unit] = PackedUnit(image, placed)

    @staticmethod
    def _fill(
        image: torch.Tensor, pieces: Mapping[str, _Packed], placed: Mapping[str, TensorRecord]
    ) -> None:
        for name, record in placed.items():
            write_parts(pieces[name][0], record, image)

    def _expected(self, nbytes: int) -> int:
        """Guess the bytes of all images: units differ little."""
        known = self.packed_nbytes + nbytes
        return known * len(self._wanted) // (len(self._done) + 1)

    def take(self) -> dict[str, PackedUnit]:
        """Return the complete units and forget them, for undoing unit by unit."""
        done, self._done = self._done, {}
        return done

    def finish(self) -> PackedWeights:
        """Return the packed weights.

        Raises
        ------
        ArgumentError
            When tensors are missing; they are named.
        """
        missing = self.missing()
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise ArgumentError(f"units: {len(missing)} tensors were never added: {shown}")
        path = None
        if self._file is not None:
            path = self._file.finish(self._aliases)
        self._finished = True
        units = {unit: self._done[unit] for unit in self._wanted if unit in self._done}
        return PackedWeights(units, self._aliases, path)

    def abandon(self) -> None:
        """Release what was packed, and remove the file; does nothing after `finish`."""
        if self._finished:
            return
        self._finished = True
        self._incomplete.clear()
        if self._file is not None:
            self._file.abandon()
        for held in self.take().values():
            held.image.close()

    def __enter__(self) -> WeightPacker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()
