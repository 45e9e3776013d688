"""Which units are kept on the device, unpacked or packed, and which are fetched for each use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

from torch import nn

from ..errors import ArgumentError, ArgumentTypeError
from .units import Unit

#: "device": unpacked in device memory; "packed": packed there, decoded for each use; "host": packed
#: in host memory, or in a file.
Tier = Literal["device", "packed", "host"]
#: What a caller may ask to keep, as far as JSON can hold it, and with functions of a unit's name.
JsonKeep = None | Literal["all", "packed"] | float | Mapping[str, Tier]
Keep = JsonKeep | Callable[[str], Tier | None]

#: Units of fewer raw bytes are kept on the device: a transfer of their own takes longer than what
#: it saves.
MIN_UNIT_BYTES = 64 << 10


def is_lookup(unit: Unit) -> bool:
    """Return whether a unit is an embedding of which rows are looked up."""
    module = unit.module
    return isinstance(module, nn.Embedding) and module.max_norm is None and len(unit.refs) == 1


def choose_tiers(units: Sequence[Unit], keep: Keep, min_bytes: int) -> dict[str, Tier]:
    """Return the tier of each unit.

    Parameters
    ----------
    units : sequence of Unit
        In the order of the model.
    keep : see `offload_weights`
        What the caller asked for.
    min_bytes : int
        Units of fewer raw bytes are kept on the device.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When `keep` is none of the accepted, or names a unit that there is not.
    """
    if not isinstance(min_bytes, int) or isinstance(min_bytes, bool):
        raise ArgumentTypeError(f"min_bytes: expected an int, got {min_bytes!r:.60}")
    if min_bytes < 0:
        raise ArgumentError(f"min_bytes: {min_bytes}, accepted are numbers from 0")
    chosen = _asked_for(units, keep)
    small: dict[str, Tier] = {u.name: "device" for u in units if u.raw_nbytes < min_bytes}
    return {unit.name: small.get(unit.name, chosen[unit.name]) for unit in units}


def _asked_for(units: Sequence[Unit], keep: Keep) -> dict[str, Tier]:
    names = [unit.name for unit in units]
    if keep is None:
        return dict.fromkeys(names, "host")
    if isinstance(keep, str):
        if keep not in ("all", "packed"):
            raise ArgumentError(
                f"keep: {keep!r}, accepted are 'all', 'packed', a share or a mapping"
            )
        return dict.fromkeys(names, "device" if keep == "all" else "packed")
    if isinstance(keep, (int, float)) and not isinstance(keep, bool):
        if not 0 <= keep <= 1:
            raise ArgumentError(f"keep: {keep}, accepted are shares from 0 to 1")
        return _share(units, float(keep))
    if isinstance(keep, Mapping):
        unknown = sorted(set(keep) - set(names))
        if unknown:
            raise ArgumentError(f"keep: no units {unknown[:5]}; there are {names[:5]} and others")
        return {name: _checked(name, keep.get(name, "host")) for name in names}
    if callable(keep):
        return {name: _checked(name, keep(name) or "host") for name in names}
    raise ArgumentTypeError(f"keep: {keep!r:.60}; expected None, str, a share, mapping or function")


def _share(units: Sequence[Unit], share: float) -> dict[str, Tier]:
    """Keep a share of the bytes, spread evenly, so that the others can be fetched meanwhile."""
    tiers: dict[str, Tier] = {}
    seen = kept = 0
    for unit in units:
        # Lookups fetch rows: keeping the whole table gains the least.
        if is_lookup(unit) and share < 1:
            tiers[unit.name] = "host"
            continue
        seen += unit.raw_nbytes
        fits = kept + unit.raw_nbytes <= share * seen + 1e-6 * seen
        kept += unit.raw_nbytes if fits else 0
        tiers[unit.name] = "device" if fits else "host"
    return tiers


def _checked(name: str, tier: object) -> Tier:
    if tier not in get_args(Tier):
        raise ArgumentError(
            f"keep: {tier!r} for {name!r}, accepted are {', '.join(get_args(Tier))}"
        )
    return tier  # type: ignore[return-value]
