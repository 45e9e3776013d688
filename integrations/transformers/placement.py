"""Placement of units by a device map, for a model that runs on one device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from bitslab.errors import ArgumentError

#: Values of a device map: a GPU's number, a name, "cpu" or "disk".
Place = Any


def is_gpu(place: Place) -> bool:
    """Return whether a value of a device map is a GPU."""
    if isinstance(place, int):
        return True
    return str(place) not in ("cpu", "disk")


def device_of(place: Place) -> torch.device:
    """Return the torch device of a value of a device map that is no disk.

    Raises
    ------
    ArgumentError
        When it is neither a CPU nor a CUDA GPU.
    """
    try:
        found = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"device_map: {place!r}, accepted are GPUs, 'cpu', 'disk'") from error
    if found.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device_map: {place!r}, accepted are CUDA GPUs, 'cpu' and 'disk'")
    if found.type == "cpu":
        return found
    current = torch.cuda.current_device() if _has_gpu() else 0
    return torch.device("cuda", current if found.index is None else found.index)


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def execution_device(device_map: Mapping[str, Place] | None, asked: str | None) -> torch.device:
    """Return the one device that the model runs on.

    Parameters
    ----------
    device_map : mapping or None
        Modules to places; None where the caller gave none.
    asked : str or None
        The device that the caller asked for.

    Raises
    ------
    ArgumentError
        When the map names several GPUs, or another one than was asked for.
    """
    named = sorted({str(device_of(p)) for p in (device_map or {}).values() if is_gpu(p)})
    if len(named) > 1:
        raise ArgumentError(
            f"device_map: places weights on {' and '.join(named)}; the model runs on one device, "
            "so accepted are one GPU, 'cpu' and 'disk'"
        )
    if asked is not None:
        device = device_of(asked)
        if named and named[0] != str(device):
            raise ArgumentError(
                f"execution_device: {asked}, but device_map places weights on {named[0]}"
            )
        return device
    if named:
        return torch.device(named[0])
    if device_map is None and _has_gpu():
        return device_of("cuda")
    return torch.device("cpu")


def place_of(name: str, device_map: Mapping[str, Place]) -> Place:
    """Return the place of a module or parameter: that of the longest name that it lies under.

    Raises
    ------
    ArgumentError
        When the map says nothing of it.
    """
    part = name
    while True:
        if part in device_map:
            return device_map[part]
        if not part:
            raise ArgumentError(
                f"device_map: has no place for {name}; accepted are maps that name every module, "
                "or '' for all others"
            )
        part = part.rpartition(".")[0]


def unit_places(
    units: Mapping[str, Iterable[str]], device_map: Mapping[str, Place]
) -> dict[str, str]:
    """Return "gpu", "cpu" or "disk" for each unit.

    Parameters
    ----------
    units : mapping of str to iterable of str
        Names of the parameters of each unit.
    device_map : mapping
        Modules to places. A unit that it divides crosses whole, from the slowest of its places.
    """
    found = {}
    for unit, names in units.items():
        places = {place_of(name, device_map) for name in names}
        if any(str(place) == "disk" for place in places):
            found[unit] = "disk"
        elif all(is_gpu(place) for place in places):
            found[unit] = "gpu"
        else:
            found[unit] = "cpu"
    return found


def unpack_while_room(
    units: Iterable[str], raw: Mapping[str, float], packed: Mapping[str, float], room: float
) -> set[str]:
    """Return the units that may lie on the device uncompressed.

    Parameters
    ----------
    units : iterable of str
        Those that lie on the device, in the order of the model.
    raw, packed : mapping of str to float
        Bytes of each, uncompressed and packed.
    room : float
        Bytes that weights may take on the device.
    """
    units = list(units)
    room -= sum(packed[unit] for unit in units)
    found = set()
    for unit in units:
        more = raw[unit] - packed[unit]
        if more <= room:
            found.add(unit)
            room -= more
    return found
