"""Packing weights as they are read, in bounded extra memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch

from bitslab.engine import Progress, ProgressFunction
from bitslab.offload import PackedWeights, WeightPacker


class WeightLoader:
    """Packs the weights of a model one by one and moves each to where it is kept.

    Parameters
    ----------
    units : mapping of str to sequence of str
        For each unit, in the order of the model, the names of its tensors; none stands twice.
    places : mapping of str to {"device", "packed", "host"}
        Where each unit lies: on `device` as it is, on `device` packed, or packed in host memory.
    device : torch.device
        Where the model runs.
    disk : str or None
        File for what would lie packed in host memory.
    sizes : mapping of str to int
        Raw bytes of every tensor in the model's dtype, for `progress`.
    progress : callable, bool or None
        Called with the raw bytes that were taken, and those of all tensors.

    Notes
    -----
    A unit's tensors are packed one by one as they come, on `device` where that is a GPU, and its
    packed form is put together when the last one is there. In addition to what is packed, memory is
    needed for the packed tensors of units that are not complete and one raw tensor; with a GPU, for
    raw tensors on their way to it, which are read from the mapped file where that has them as they
    are.
    """

    def __init__(
        self,
        units: Mapping[str, Sequence[str]],
        places: Mapping[str, str],
        device: torch.device,
        *,
        disk: str | None,
        sizes: Mapping[str, int],
        progress: ProgressFunction | bool | None,
    ) -> None:
        self._order = list(units)
        self._unit_of = {name: unit for unit, names in units.items() for name in names}
        self.places = dict(places)
        self.device = device
        chosen = {
            place: {u: names for u, names in units.items() if places[u] == place}
            for place in ("packed", "host")
        }
        raw = {place: 0 for place in ("device", "host", "packed")}
        for unit, names in units.items():
            raw[places[unit]] += sum(sizes[name] for name in names)
        self._streamed = WeightPacker(
            chosen["host"],
            disk=disk if chosen["host"] else None,
            device=device,
            upload_bytes=raw["device"],
            tensors_bytes=raw["device"] + raw["host"],
        )
        self._packed_on_device = WeightPacker(
            chosen["packed"], device=device, images_on=device, tensors_bytes=raw["packed"]
        )
        self._taken: set[str] = set()
        self._sizes = dict(sizes)
        self._progress = Progress("compressing weights", sum(self._sizes.values()), progress)
        # transformers may abort loading without notice; neither a half-written file nor a bar on
        # the terminal may be left.
        weakref.finalize(self, _abandon, self._progress, self._streamed, self._packed_on_device)

    def __contains__(self, name: object) -> bool:
        return name in self._unit_of

    def is_packed(self, name: str) -> bool:
        """Return whether a tensor is one that is packed."""
        return name in self._unit_of and self.places[self._unit_of[name]] != "device"

    def missing(self) -> list[str]:
        """Return the names that were not added yet."""
        return [name for name in self._unit_of if name not in self._taken]

    def add(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Take a tensor and return what replaces it in the model until `finish`.

        Parameters
        ----------
        name : str
            One of those in `units`.
        tensor : torch.Tensor
            Any dense tensor. It is no longer needed after this.

        Returns
        -------
        torch.Tensor
            Of the same shape and dtype: on the device, or on the meta device where it is packed.
            What a GPU keeps as it is may be on its way there until `finish`.

        Raises
        ------
        BitslabError
            When host memory runs out; the message says how much is needed.
        OSError
            When the file cannot be written.
        """
        place = self.places[self._unit_of[name]]
        if place == "device":
            on_gpu = self.device.type == "cuda"
            held = self._streamed.upload(tensor) if on_gpu else tensor.to(self.device)
            self._took(name)
            return held
        if place == "host":
            self._streamed.add(name, tensor)
        else:
            self._packed_on_device.add(name, tensor)
        self._took(name)
        return torch.empty_like(tensor, device="meta")

    def _took(self, name: str) -> None:
        self._taken.add(name)
        self._progress.advance(self._sizes[name])

    def finish(
        self, aliases: Mapping[str, str], untied: Mapping[str, torch.Tensor]
    ) -> PackedWeights:
        """Return what was packed.

        Parameters
        ----------
        aliases : mapping of str to str
            Further names of packed tensors, of tied weights.
        untied : mapping of str to torch.Tensor
            Weights that were thought to be tied and are not: each becomes a unit of its name,
            packed in host memory.

        Raises
        ------
        ArgumentError
            When tensors are missing.
        """
        on_device = self._packed_on_device.finish()
        streamed = self._streamed.finish()
        self._progress.__exit__(None, None, None)
        # Where the device is the CPU, images that lie "on the device" are in host memory.
        units = {unit: held.unit(unit) for held in (streamed, on_device) for unit in held.units}
        ordered = {unit: units[unit] for unit in self._order if unit in units}
        with WeightPacker({name: [name] for name in untied}) as packer:
            for name, tensor in untied.items():
                packer.add(name, tensor)
            ordered |= packer.take()
        return PackedWeights(ordered, aliases, streamed.path)

    def abandon(self) -> None:
        """Release all memory and remove the file."""
        _abandon(self._progress, self._streamed, self._packed_on_device)


def _abandon(progress: Progress, *packers: WeightPacker) -> None:
    progress.__exit__(None, None, None)
    for packer in packers:
        packer.abandon()


def representatives(
    tied: Mapping[str, str], in_checkpoint: Iterable[str]
) -> tuple[dict[str, str], set[str]]:
    """Return the name that each tied weight is packed under.

    Parameters
    ----------
    tied : mapping of str to str
        Names of parameters to the one that they are tied to, as transformers has them.
    in_checkpoint : iterable of str
        Names that the checkpoint has.

    Returns
    -------
    aliases : dict of str to str
        The other names of a tied weight to the one that it is packed under: one in the checkpoint.
    together : set of str
        All names of weights of which the checkpoint has several. Whether they are equal is known
        when all are read, so they are packed last.
    """
    in_checkpoint = set(in_checkpoint)
    groups: dict[str, list[str]] = {}
    for target, source in tied.items():
        groups.setdefault(source, [source]).append(target)
    aliases: dict[str, str] = {}
    together: set[str] = set()
    for names in groups.values():
        there = [name for name in names if name in in_checkpoint]
        kept = there[0] if there else names[0]
        aliases |= {name: kept for name in names if name != kept}
        if len(there) != 1:
            together |= set(names)
    return aliases, together
