"""Cutting a model into units, the parts whose weights cross the link at once.

The elements of the outermost lists of blocks (`torch.nn.ModuleList` or `torch.nn.Sequential` of at
least two children of one class that hold parameters: the layers of a transformer) are units with
all that is below them. Outside of them, every module with parameters of its own is one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from ..module_methods import alive
from ..module_tensors import own_parameters

#: Returns whether a parameter is to be packed, by its name and itself.
Predicate = Callable[[str, nn.Parameter], bool]


class ParameterRef:
    """A reference to a parameter of a model: the module that owns it, and its name there.

    Parameters
    ----------
    module : torch.nn.Module
        The module whose own parameter it is; held weakly, as what streams a model's weights must
        not keep the model.
    attribute : str
        Its name there.
    name : str
        Its full name in the model.
    """

    __slots__ = ("_module", "attribute", "name")

    def __init__(self, module: nn.Module, attribute: str, name: str) -> None:
        self._module = weakref.ref(module)
        self.attribute = attribute
        self.name = name

    @property
    def module(self) -> nn.Module:
        """The module whose own parameter it is."""
        return alive(self._module)

    def get(self) -> torch.Tensor | None:
        """Return the parameter."""
        return own_parameters(self.module).get(self.attribute)

    def put(self, tensor: torch.Tensor) -> None:
        """Replace the parameter."""
        if isinstance(self.module, nn.RNNBase):  # keeps a second list of its parameters
            setattr(self.module, self.attribute, tensor)
        else:
            own_parameters(self.module)[self.attribute] = tensor  # type: ignore[assignment]


class Unit:
    """A part of a model that crosses at once.

    Parameters
    ----------
    name : str
        Name of its module in the model; "" is the model itself.
    module : torch.nn.Module
        The module whose forward pass needs the parameters; held weakly.
    refs : sequence of ParameterRef
        The parameters that are packed, tied ones included.
    """

    def __init__(self, name: str, module: nn.Module, refs: Sequence[ParameterRef] = ()) -> None:
        self.name = name
        self._module = weakref.ref(module)
        self.refs = list(refs)

    @property
    def module(self) -> nn.Module:
        """The module whose forward pass needs the parameters."""
        return alive(self._module)

    @property
    def slots(self) -> list[ParameterRef]:
        """Older name of `refs`."""
        return self.refs

    @property
    def names(self) -> list[str]:
        """Names of the parameters, of tied ones the first."""
        seen: dict[int, str] = {}
        for ref in self.refs:
            seen.setdefault(id(ref.get()), ref.name)
        return list(seen.values())

    @property
    def raw_nbytes(self) -> int:
        """Bytes of the parameters, tied ones counted once."""
        parameters = {id(p): p.nbytes for ref in self.refs if (p := ref.get()) is not None}
        return sum(parameters.values())


def is_block_list(module: nn.Module) -> bool:
    """Return whether a module is a list of blocks of one kind."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return False
    children = list(module.children())
    kinds = {type(child) for child in children}
    if len(children) < 2 or len(kinds) != 1:
        return False
    # A list of plain layers is no list of blocks: each of them is a unit of its own anyway.
    return all(
        any(True for _ in child.children()) and any(True for _ in child.parameters())
        for child in children
    )


def cut_units(model: nn.Module, predicate: Predicate | None = None) -> list[Unit]:
    """Cut a model into units, in the order of its modules.

    Parameters
    ----------
    model : torch.nn.Module
        The model; its parameters may be on the meta device.
    predicate : callable, optional
        Which parameters to take; all dense ones when left out.

    Returns
    -------
    list of Unit
        Those with at least one parameter. A parameter that is tied between two units is in both.
    """
    units: list[Unit] = []
    for name, module, whole in _walk("", model):
        inner = module.named_modules() if whole else [("", module)]
        unit = Unit(name, module)
        for below, owner in inner:
            prefix = ".".join(part for part in (name, below) if part)
            for attribute, parameter in own_parameters(owner).items():
                if parameter is None or not is_plain(parameter):
                    continue
                full = f"{prefix}.{attribute}" if prefix else attribute
                if predicate is None or predicate(full, parameter):
                    unit.refs.append(ParameterRef(owner, attribute, full))
        if unit.refs:
            units.append(unit)
    return units


def _walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield modules, each once, that may be units, and whether what is below belongs to them."""
    seen: set[int] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield name, module, False
        blocks = is_block_list(module)
        for below, child in module.named_children():
            full = f"{name}.{below}" if name else below
            if blocks:
                if id(child) not in seen:
                    seen.add(id(child))
                    yield full, child, True
            else:
                yield from walk(full, child)

    yield from walk(name, module)


def is_plain(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is an ordinary dense tensor, not a class of its own.

    Quantised weights with a class of their own are left as they are.
    """
    ordinary = type(parameter) in (nn.Parameter, torch.Tensor)
    return ordinary and parameter.layout == torch.strided and not parameter.is_quantized
