"""What a module reads besides tensors: its plain attributes, and generators of Python and NumPy.

torch's checkpoint gives a module the state of torch's own generators back when it is computed
again. A layer that draws from `random`, or counts its calls, would compute something else.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree

from .replay import differing_elements
from .sharded import local_tensor

#: Attributes that torch keeps itself.
_TORCH_ATTRIBUTES = frozenset(nn.Module().__dict__) - {"training"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_MISSING = object()
#: The attributes of a module, the name of one, and its value.
_Attribute = tuple[dict[str, Any], str, Any]


class PlainState:
    """The plain attributes of a module and those in it, and Python's and NumPy's generators, now.

    Plain are numbers, text, None and tuples of these. What lists, dicts and other objects hold is
    not seen.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes = [(each, _plain_attributes(each)) for each in module.modules()]
        self._generators = _Generators()

    def what_differs(self) -> str:
        """Return what is another one now, in words; "" where nothing is."""
        drawn = self._generators.what_differs(_Generators())
        if drawn:
            return drawn
        for attributes, name, _ in self._differing():
            owner = next(each for each, _ in self._attributes if vars(each) is attributes)
            return f"{type(owner).__name__}.{name}"
        return ""

    def restore(self) -> None:
        """Set all back to what it was."""
        self._restore_attributes()
        self._generators.set()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Run a block with all as it was; behind it all is as before the block."""
        generators, found = _Generators(), self._restore_attributes()
        self._generators.set()
        try:
            yield
        finally:
            self._restore_attributes()  # what the block has changed
            for each in found:
                _set(*each)
            generators.set()

    def _restore_attributes(self) -> list[_Attribute]:
        """Set attributes back to what they were; return those that differed, as they were found."""
        differing = list(self._differing())
        found = [(own, name, own.get(name, _MISSING)) for own, name, _ in differing]
        for each in differing:
            _set(*each)
        return found

    def _differing(self) -> Iterator[_Attribute]:
        """Yield the attributes that are others now, with what they were."""
        for each, own in self._attributes:
            attributes = vars(each)
            for name in {*own, *_plain_attributes(each)}:
                value = own.get(name, _MISSING)
                if _differ(value, attributes.get(name, _MISSING)):
                    yield attributes, name, value


class _Generators:
    """The states of Python's and NumPy's generators, now."""

    def __init__(self) -> None:
        self.of_python = random.getstate()
        self.of_numpy = np.random.get_state(legacy=False)

    def what_differs(self, other: _Generators) -> str:
        """Return which of them has another state in `other`, in words; "" where none has."""
        if self.of_python != other.of_python:
            return "Python's random"
        return "NumPy's random" if _frozen(self.of_numpy) != _frozen(other.of_numpy) else ""

    def set(self) -> None:
        """Set both to these states."""
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    attributes = vars(module)
    own = attributes.keys() - _TORCH_ATTRIBUTES  # of each module, in each checkpointed pass
    return {name: attributes[name] for name in own if _is_plain(attributes[name])}


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))


def _differ(a: Any, b: Any) -> bool:
    return a is not b and (type(a) is not type(b) or bool(a != b))


def _set(attributes: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        attributes.pop(name, None)
    else:
        attributes[name] = value


def _frozen(state: Any) -> Any:
    """Return NumPy's state as what can be compared."""
    if isinstance(state, dict):
        return tuple((key, _frozen(value)) for key, value in state.items())
    return state.tobytes() if isinstance(state, np.ndarray) else state


def torch_generators(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Return what sets torch's generators back to now: the CPU's, and those of tensors' GPUs."""
    cpu = torch.get_rng_state()
    gpus = {t.device for t in tensors if t.device.type == "cuda"}
    states = [(device, torch.cuda.get_rng_state(device)) for device in gpus]

    def restore() -> None:
        torch.set_rng_state(cpu)
        for device, state in states:
            torch.cuda.set_rng_state(state, device)

    return restore


def detached_leaves(result: Any) -> list[Any]:
    """Return what a module has returned, one by one and without its graph."""
    leaves = _pytree.tree_leaves(result)
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]


def same_bits(first: list[Any], second: list[Any]) -> bool:
    """Return whether two lists of `detached_leaves` hold the same; waits for the device.

    What is neither a tensor nor plain is not compared.
    """
    if len(first) != len(second):
        return False
    counts = []
    for a, b in zip(first, second, strict=True):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            if type(a) is not type(b) or (_is_plain(a) and _differ(a, b)):
                return False
            continue
        a, b = local_tensor(a), local_tensor(b)
        if (a.shape, a.dtype, a.device, a.layout) != (b.shape, b.dtype, b.device, b.layout):
            return False
        differing = differing_elements(a.contiguous(), b.contiguous())
        if differing is None:
            if not torch.equal(a, b):
                return False
        else:
            counts.append(differing)
    return not any(count.item() for count in counts)
