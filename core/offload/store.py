"""PackedWeights: the weights of a model, packed, one image a unit."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..compressed import CompressedTensor
from ..devices import checked_device
from ..errors import ArgumentError, ArgumentTypeError, BitslabError, IndexRangeError
from .files import WeightFile, opened
from .images import DeviceImage, Image
from .records import TensorRecord


@dataclass(frozen=True, eq=False)
class PackedUnit:
    """The packed tensors of a unit and the image that holds them.

    Parameters
    ----------
    image : Image
        The memory.
    records : mapping of str to TensorRecord
        Where each tensor lies in it, by the tensor's name.
    """

    image: Image
    records: Mapping[str, TensorRecord]


class PackedWeights:
    """Named tensors, packed, in images of one unit each.

    Made by `WeightPacker` or `PackedWeights.open`. A tensor is stored once; `aliases` are other
    names of it (tied weights).

    Parameters
    ----------
    units : mapping of str to PackedUnit
        The units in the order of the model.
    aliases : mapping of str to str, optional
        Further names of tensors.
    path : str, optional
        The file that holds the images.

    Notes
    -----
    Threads may share it. `close` it when it is no longer used.

    Examples
    --------
    >>> import torch
    >>> from bitslab.offload import WeightPacker
    >>> weight = torch.randn(256, 512).bfloat16()
    >>> packer = WeightPacker({"layer": ["layer.weight"]})
    >>> packer.add("layer.weight", weight)
    True
    >>> weights = packer.finish()
    >>> torch.equal(weights.read("layer.weight"), weight)
    True
    >>> torch.equal(weights.rows("layer.weight", torch.tensor([3, 7])), weight[[3, 7]])
    True
    >>> weights.nbytes < weights.raw_nbytes
    True
    """

    def __init__(
        self,
        units: Mapping[str, PackedUnit],
        aliases: Mapping[str, str] | None = None,
        path: str | None = None,
    ) -> None:
        self._units = dict(units)
        self._aliases = dict(aliases or {})
        self._stored_in = {
            name: unit for unit, held in self._units.items() for name in held.records
        }
        self.path = path
        self._lock = threading.Lock()
        self._shared: weakref.WeakValueDictionary[str, torch.Tensor]
        self._shared = weakref.WeakValueDictionary()
        self._closed = False
        for name, target in self._aliases.items():
            if target not in self._stored_in or name in self._stored_in:
                raise ArgumentError(f"aliases: {name!r} -> {target!r} names no stored tensor")

    # Contents

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units, in the order of the model."""
        return tuple(self._units)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, aliases included."""
        return (*self._stored_in, *self._aliases)

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of stored tensors."""
        return dict(self._aliases)

    @property
    def raw_nbytes(self) -> int:
        """Bytes of all tensors before packing, tied ones counted once."""
        return sum(self.unit_raw_nbytes(unit) for unit in self._units)

    @property
    def nbytes(self) -> int:
        """Bytes of everything: images with all metadata, and profiles."""
        return sum(self.unit_nbytes(unit) for unit in self._units)

    @property
    def ratio(self) -> float:
        """`raw_nbytes` over `nbytes`; 1.0 when there is nothing."""
        return self.raw_nbytes / self.nbytes if self.nbytes else 1.0

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def unit(self, name: str) -> PackedUnit:
        """Return a unit by its name."""
        if self._closed:
            raise BitslabError("these packed weights are closed")
        if name not in self._units:
            raise ArgumentError(f"unit: {name!r}, there are {', '.join(self._units) or 'none'}")
        return self._units[name]

    def unit_of(self, name: str) -> str:
        """Return the name of the unit that stores a tensor."""
        return self._stored_in[self.stored_name(name)]

    def unit_nbytes(self, name: str) -> int:
        """Bytes of a unit's image and profiles."""
        held = self.unit(name)
        return held.image.nbytes + sum(r.codec.profile_bytes for r in held.records.values())

    def unit_raw_nbytes(self, name: str) -> int:
        """Bytes of a unit's tensors before packing."""
        return sum(r.raw_nbytes for r in self.unit(name).records.values())

    def stored_name(self, name: str) -> str:
        """Return the name under which a tensor is stored."""
        name = self._aliases.get(name, name)
        if name not in self._stored_in:
            raise ArgumentError(f"name: no tensor {name!r:.200} among these packed weights")
        return name

    def record(self, name: str) -> TensorRecord:
        """Return how and where a tensor is stored."""
        name = self.stored_name(name)
        return self.unit(self._stored_in[name]).records[name]

    def __contains__(self, name: object) -> bool:
        return name in self._stored_in or name in self._aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self._stored_in) + len(self._aliases)

    # Reading

    def compressed(self, name: str) -> CompressedTensor:
        """Return a tensor as it is stored; its memory is that of the image.

        Its dimensions are in the order of the record's `order`.
        """
        name = self.stored_name(name)
        held = self.unit(self._stored_in[name])
        return held.records[name].compressed(held.image.tensor())

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Decode a whole tensor.

        Parameters
        ----------
        name : str
            Its name or an alias.
        device : torch.device or str
            The device of the result.

        Returns
        -------
        torch.Tensor
            A new tensor that equals what was packed, bit for bit, strides included.

        Raises
        ------
        ArgumentError
            When there is no such tensor.
        CorruptedDataError
            When its packed rows are damaged.
        BitslabError
            When the weights are closed, or their file was removed.
        """
        record, target = self.record(name), checked_device(device)
        ct = self.compressed(name)
        out = torch.empty(record.decoded_nbytes, dtype=torch.uint8, device=ct.device)
        if target.type == "cuda" and ct.device.type == "cpu":
            # Across the link packed, unless it is raw anyway.
            ct = ct.to(target)
            out = out.to(target)
        rows = out.view(record.dtype).view(record.n_rows, *record.codec.row_shape)
        if record.decoded_nbytes:
            ct.codec.decode(ct.packed, out=rows)
        return record.restored(out).to(target)

    def read_shared(self, name: str) -> torch.Tensor:
        """Decode a whole tensor on the CPU, the same one for all its names while one is in use.

        Tied parameters are thereby one tensor in a state dict.
        """
        name = self.stored_name(name)
        with self._lock:
            found = self._shared.get(name)
            if found is None:
                found = self._shared[name] = self.read(name)
        return found

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Decode rows of a tensor on the CPU, and only them.

        Parameters
        ----------
        name : str
            A tensor of two dimensions or more.
        ids : torch.Tensor
            Integers of any shape on the CPU, from 0 on as for torch's embedding.

        Returns
        -------
        torch.Tensor
            ``[*ids.shape, *shape[1:]]``.

        Raises
        ------
        IndexRangeError
            When an id is negative or too large.
        """
        record = self.record(name)
        checked_ids(name, ids, record.shape[0])
        if not record.row_ordered:
            return self.read(name)[ids]
        return self.compressed(name)[ids].to("cpu")

    # Memory and files

    def move_to_device(self, units: Sequence[str], device: torch.device) -> None:
        """Move the images of units to a GPU, packed as they are, and release their host memory."""
        for name in units:
            held = self.unit(name)
            if held.image.tier == "device" or device.type != "cuda":
                continue
            data = held.image.tensor().to(device)
            if held.image.tier == "host":
                held.image.close()
            self._units[name] = PackedUnit(DeviceImage(data), held.records)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights to a safetensors file that `PackedWeights.open` reads.

        Raises
        ------
        ArgumentError
            When it is the file that these weights, or those of another model, are read from, or a
            folder.
        BitslabError
            When it cannot be written, as on a full disk; a file that was there is kept.
        OSError
            When its folder does not exist or cannot be written to.
        """
        if self.path is not None and os.path.realpath(path) == os.path.realpath(self.path):
            raise ArgumentError(f"path: {os.fspath(path)} is the file that holds these weights")
        with WeightFile(path, self.units, "path") as file:
            for name in self.units:
                held = self.unit(name)
                file.write(name, held.image.tensor().cpu(), held.records)
            file.finish(self._aliases)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool = True) -> PackedWeights:
        """Open a file of packed weights; its images are memory-mapped, not read.

        Parameters
        ----------
        path : str or os.PathLike
            As `save`, or a packer with ``disk=``, wrote it.
        verify : bool
            Compare the checksum of every image, which reads all bytes once.

        Raises
        ------
        CorruptedDataError
            When the file is truncated, altered, written by a newer version, or not by bitslab.
        OSError
            When it cannot be read.
        """
        with opened(path, verify=verify) as (units, aliases):
            held = {name: PackedUnit(*unit) for name, unit in units.items()}
            return cls(held, aliases, os.fspath(path))

    def close(self) -> None:
        """Release all memory; again does nothing."""
        if not self._closed:
            self._closed = True
            for held in self._units.values():
                held.image.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.nbytes} bytes of {self.raw_nbytes}"
        return f"PackedWeights({len(self._units)} units, {len(self._stored_in)} tensors, {state})"

    def __deepcopy__(self, memo: dict[int, object]) -> PackedWeights:
        raise ArgumentTypeError("packed weights cannot be copied; save them and open the file")

    def __reduce__(self) -> tuple[object, ...]:
        raise ArgumentTypeError("packed weights cannot be pickled; save them and open the file")


def checked_ids(name: str, ids: torch.Tensor, n_rows: int) -> torch.Tensor:
    """Return ids on the CPU, or refuse those that torch's embedding refuses.

    Raises
    ------
    IndexRangeError
        When one is negative, or too large for `n_rows` rows.
    """
    if ids.numel():
        lowest, highest = (int(bound) for bound in ids.aminmax())
        if lowest < 0 or highest >= n_rows:
            bad = lowest if lowest < 0 else highest
            raise IndexRangeError(f"ids: {bad} for {name!r}, accepted are 0 to {n_rows - 1}")
    return ids
