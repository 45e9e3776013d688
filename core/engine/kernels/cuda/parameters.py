"""What kernels take: for each kernel a class whose fields are its parameters, in order.

The class stands in the file with the name of the kernel's .cu text; tests compare the two. A
launcher gives it to `Runner.bind` with the values that are fixed, and calls what comes back
with the grid and the values that change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, NamedTuple, get_type_hints

import torch


class Kind(NamedTuple):
    """How a parameter is passed.

    Parameters
    ----------
    c_type : str
        Its type in the .cu text; ``"*"`` for a pointer to anything.
    lowest, highest : int
        What fits in.
    """

    c_type: str
    lowest: int
    highest: int


#: A pointer: a tensor's memory, an address, or None (0) where the kernel can do without.
Address = Annotated[int, Kind("*", 0, (1 << 64) - 1)]
Int32 = Annotated[int, Kind("int", -(1 << 31), (1 << 31) - 1)]
UInt32 = Annotated[int, Kind("u32", 0, (1 << 32) - 1)]
Int64 = Annotated[int, Kind("i64", -(1 << 63), (1 << 63) - 1)]

#: What stands for a parameter while a kernel is bound; a call takes plain integers.
Value = int | torch.Tensor | None


@dataclass(init=False)
class Parameters:
    """The parameters of a kernel, in the order of its .cu text; never made an object of."""

    kernel: ClassVar[str]


_kinds: dict[type[Parameters], Mapping[str, Kind]] = {}


def kinds_of(parameters: type[Parameters]) -> Mapping[str, Kind]:
    """Return name and kind of each parameter, in order."""
    found = _kinds.get(parameters)
    if found is None:
        hints = get_type_hints(parameters, include_extras=True)
        found = {field.name: hints[field.name].__metadata__[0] for field in fields(parameters)}
        _kinds[parameters] = found
    return found


def split(
    parameters: type[Parameters], fixed: Mapping[str, Value]
) -> tuple[list[str], dict[str, int]]:
    """Return the names of the parameters that change, in order, and the numbers that are fixed.

    Raises
    ------
    TypeError
        When the kernel has no parameter of a fixed name.
    ValueError
        When a fixed number does not fit into its parameter.
    """
    kinds = kinds_of(parameters)
    numbers = {}
    for name, value in fixed.items():
        if name not in kinds:
            raise TypeError(f"{parameters.kernel} has no parameter {name}, only {[*kinds]}")
        kind, number = kinds[name], number_of(value)
        if not kind.lowest <= number <= kind.highest:
            raise ValueError(f"{parameters.kernel}: {name}: {number}, which is no {kind.c_type}")
        numbers[name] = number
    return [name for name in kinds if name not in numbers], numbers


def in_order(parameters: type[Parameters], values: Mapping[str, Value]) -> list[int]:
    """Return the values of all parameters, as a call takes them.

    Tensors are to live until the kernel has been started.

    Raises
    ------
    TypeError
        When the names are not those of the parameters.
    """
    kinds = kinds_of(parameters)
    if values.keys() != kinds.keys():
        wrong = sorted(values.keys() ^ kinds.keys())
        raise TypeError(f"{parameters.kernel}: parameters unknown or left out: {wrong}")
    return [number_of(values[name]) for name in kinds]


def number_of(value: Value) -> int:
    """Return what a kernel gets for a value."""
    if value is None:
        return 0
    return value.data_ptr() if isinstance(value, torch.Tensor) else int(value)
