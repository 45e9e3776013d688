"""WeightPacker: packs parameters one by one, and makes a unit's image with its last one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import torch

from ..devices import checked_device
from ..engine.codecs import RowCodec
from ..engine.tasks import ThreadTask
from ..engine.transfer.lanes import Mark, wait_on_host
from ..errors import ArgumentError, ArgumentTypeError, BitslabError
from .device_packing import DevicePacking, OnDevice, packed_here, take_device_memory
from .files import WeightFile
from .images import DeviceImage, HostImage, Image
from .records import lay_out, write_parts
from .store import PackedUnit, PackedWeights
from .tensor_packer import CodecName, TensorPacker

#: Smaller tensors are copied to a GPU at once: a thread would take as long.
MIN_UPLOAD_BYTES = 1 << 20


@dataclass
class _Piece:
    """A tensor that is packed or on its way, and what it is packed from."""

    packed: ThreadTask[OnDevice]
    shape: tuple[int, ...]
    order: tuple[int, ...]
    raw_nbytes: int


class WeightPacker:
    """Packs named tensors into `PackedWeights`, in any order, in bounded extra memory.

    A tensor is packed by `add`; when the last one of a unit is there, the unit's image is put
    together and its pieces are released. In addition to what is packed already, the extra memory is
    that of the units that are not complete: one, when tensors come unit by unit.

    With a GPU, tensors are packed there, those in host memory as well, and images are put together
    in threads while further tensors are added (see `DevicePacking`): `completed` tells which are
    there. An error of a thread is raised by a later `add` or `completed`, or by `finish`.

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
    device : torch.device, optional
        A GPU that packs tensors in host memory; they are packed where they are when left out.
    images_on : torch.device, optional
        A GPU that keeps the images, instead of host memory.
    upload_bytes : int
        Bytes of all tensors for `upload`: memory of the GPU for them is taken here, at once.
    tensors_bytes : int, optional
        Raw bytes of all tensors, those for `upload` too. With a GPU, two thirds of them are on the
        way at a time at most; 2 GiB when left out, or where that is less.

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
        device: torch.device | None = None,
        images_on: torch.device | None = None,
        upload_bytes: int = 0,
        tensors_bytes: int | None = None,
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
        self._device = _gpu(device)
        self._images_on = _gpu(images_on)
        if self._device is not None:
            take_device_memory(upload_bytes, self._device)
        self._tensors_bytes = tensors_bytes
        self._lanes: DevicePacking | None = None
        self._incomplete: dict[str, dict[str, _Piece]] = {}
        self._on_way: dict[str, ThreadTask[PackedUnit]] = {}
        self._done: dict[str, PackedUnit] = {}
        self._uploads: list[ThreadTask[Mark]] = []
        self._completed: list[str] = []
        self._finished = False
        self._file = None if disk is None else WeightFile(disk, list(self._wanted))

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the images of the units that are complete."""
        return sum(held.image.nbytes for held in list(self._done.values()))

    def missing(self) -> list[str]:
        """Return the names that were not added yet."""
        there = {name for held in self._incomplete.values() for name in held}
        complete = self._done.keys() | self._on_way.keys()
        return [n for n, unit in self._stored_in.items() if unit not in complete and n not in there]

    def add(self, name: str, tensor: torch.Tensor) -> bool:
        """Pack a tensor.

        Parameters
        ----------
        name : str
            One of the names in `units`, once.
        tensor : torch.Tensor
            Dense, of any dtype, on a CPU or GPU. It must not change before its unit is complete:
            what is kept raw may share its memory, and threads may read it.

        Returns
        -------
        bool
            Whether the tensors of its unit are all there now.

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
        self._collect()
        held = self._incomplete.setdefault(unit, {})
        complete = unit in self._done or unit in self._on_way
        if complete or (name in held and len(held) < len(self._wanted[unit])):
            raise ArgumentError(f"name: {name!r} was added before")
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentTypeError(f"tensor: expected a tensor, got {type(tensor).__name__}")
        if tensor.is_meta:
            raise ArgumentTypeError(f"tensor: {name!r} is on the meta device, it has no data")
        plan = self._packer.plan(tensor, self._device)
        lanes = self._lanes_for(tensor)
        if lanes is None:
            packed = packed_here(plan)
        else:
            lanes.admit(tensor.nbytes, self._spill)
            packed = lanes.pack(plan)
        held[name] = _Piece(packed, tuple(tensor.shape), plan.order, tensor.nbytes)
        if len(held) < len(self._wanted[unit]):
            return False
        self._complete(unit)
        return True

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor on the GPU of `device`, not packed and in no unit.

        A large tensor in host memory crosses in threads, as those that are packed do: its bytes are
        there after ``completed(wait=True)``, `take` or `finish`.

        Parameters
        ----------
        tensor : torch.Tensor
            Dense, of any dtype. It must not change before its bytes are there.

        Raises
        ------
        ArgumentError
            When the packer has no GPU.
        """
        if self._device is None:
            raise ArgumentError("device: none, accepted for an upload is a GPU")
        self._collect()
        lanes = self._lanes_for(tensor)
        whole = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj()
        if lanes is None or not whole or tensor.nbytes < MIN_UPLOAD_BYTES:
            return tensor.to(self._device)
        lanes.admit(tensor.nbytes, self._spill)
        copy, crossed = lanes.upload(tensor.detach())
        self._uploads.append(crossed)
        return copy

    def completed(self, *, wait: bool = False) -> list[str]:
        """Return the units whose images are there, each once; with `wait`, all that are on the way.

        Their tensors are no longer needed.

        Raises
        ------
        BitslabError
            When the host memory for an image could not be had, or its file not be written.
        """
        self._collect(wait=wait)
        completed, self._completed = self._completed, []
        return completed

    def _lanes_for(self, tensor: torch.Tensor) -> DevicePacking | None:
        """Return what packs on a GPU, made at the first use; None where none has to do with it."""
        device = self._device or (tensor.device if tensor.is_cuda else self._images_on)
        if self._lanes is None and device is not None:
            self._lanes = DevicePacking(
                device,
                images_in_turn=self._file is not None,
                tensors_bytes=self._tensors_bytes,
            )
        return self._lanes

    def _spill(self) -> int:
        """Take tensors of incomplete units off the GPU; return their raw bytes, which wait for all.

        So units that are larger than what may be on the way, or come mixed, are packed as well.
        """
        nbytes = 0
        for pieces in self._incomplete.values():
            for piece in pieces.values():
                held = piece.packed.result()
                if held.made is not None:
                    piece.packed = ThreadTask.of(held.on_host())
                nbytes += piece.raw_nbytes
                piece.raw_nbytes = 0
        return nbytes

    def _complete(self, unit: str) -> None:
        """Put a unit's image together, or have it done."""
        pieces = self._incomplete[unit]
        if self._lanes is None:
            made = self._made(unit, pieces, {n: p.packed.result() for n, p in pieces.items()})
            del self._incomplete[unit]
            self._done[unit] = made
            self._completed.append(unit)
            return
        del self._incomplete[unit]
        self._on_way[unit] = self._lanes.image(
            {name: piece.packed for name, piece in pieces.items()},
            sum(piece.raw_nbytes for piece in pieces.values()),
            partial(self._made, unit, pieces),
        )

    def _made(
        self, unit: str, pieces: Mapping[str, _Piece], packed: Mapping[str, OnDevice]
    ) -> PackedUnit:
        """Return a unit with its image; with a GPU, in a thread."""
        names = self._wanted[unit]
        records, nbytes = lay_out(
            [(packed[name].tensor, pieces[name].shape, pieces[name].order) for name in names]
        )
        placed = dict(zip(names, records, strict=True))
        image: Image
        if self._file is not None:
            data = torch.zeros(nbytes, dtype=torch.uint8)
        elif self._images_on is not None:
            data = torch.zeros(nbytes, dtype=torch.uint8, device=self._images_on)
            image = DeviceImage(data)
        else:
            try:
                image = HostImage(nbytes)
            except BitslabError as error:
                raise BitslabError(
                    f"host memory ran out while packing {unit!r}: its packed weights need {nbytes} "
                    f"bytes, {self.packed_nbytes} bytes of {len(self._done)} units are packed "
                    f"already and about {self._expected(nbytes)} are needed in all; {error}"
                ) from error
            data = image.tensor()
        if self._lanes is not None:
            self._lanes.fill(data, placed, packed)
        else:
            for name, record in placed.items():
                write_parts(packed[name].tensor, record, data)
        if self._file is not None:
            image = self._file.write(unit, data, placed)
        return PackedUnit(image, placed)

    def _collect(self, *, wait: bool = False) -> None:
        """Take note of images that are there; raise the error of one that failed."""
        while wait and self._uploads:
            wait_on_host(self._uploads.pop().result())
        for unit, task in list(self._on_way.items()):
            if wait or task.done():
                made = task.result()
                del self._on_way[unit]
                self._done[unit] = made
                self._completed.append(unit)

    def _expected(self, nbytes: int) -> int:
        """Guess the bytes of all images: units differ little."""
        known = self.packed_nbytes + nbytes
        return known * len(self._wanted) // (len(self._done) + 1)

    def take(self) -> dict[str, PackedUnit]:
        """Return the complete units and forget them; those on the way are waited for.

        Raises
        ------
        BitslabError
            As `completed`.
        """
        self._collect(wait=True)
        return self._forget()

    def salvage(self) -> dict[str, PackedUnit]:
        """Return the complete units and forget them, for undoing after an error; raise none.

        No thread reads any tensor afterwards, and nothing can be added.
        """
        if self._lanes is not None:
            self._lanes.close()
        for unit, task in self._on_way.items():
            with contextlib.suppress(BaseException):  # it was raised, or something before it
                self._done[unit] = task.result()
        self._on_way.clear()
        self._uploads.clear()
        self._incomplete.clear()
        return self._forget()

    def _forget(self) -> dict[str, PackedUnit]:
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
        self._collect(wait=True)
        if self._lanes is not None:
            self._lanes.close()
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
        salvaged = self.salvage()
        if self._file is not None:
            self._file.abandon()
        for held in salvaged.values():
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


def _gpu(device: torch.device | None) -> torch.device | None:
    """Return a GPU with its index; None for another device."""
    if device is None or device.type != "cuda":
        return None
    return checked_device(device)
