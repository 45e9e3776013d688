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
        self._module = module
        self._attributes = [(each, _plain_attributes(each)) for each in module.modules()]
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)

    def what_differs(self) -> str:
        """Return what is another one now, in words; "" where nothing is."""
        now = PlainState(self._module)
        if self._python != now._python:
            return "Python's random"
        if _frozen(self._numpy) != _frozen(now._numpy):
            return "NumPy's random"
        before = {id(each): own for each, own in self._attributes}
        for each, own in now._attributes:
            was = before.get(id(each), own)
            for name in {*was, *own}:
                if _differ(was.get(name, _MISSING), own.get(name, _MISSING)):
                    return f"{type(each).__name__}.{name}"
        return ""

    def restore(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Set all back to what it was; return the attributes that differed, as they were found."""
        found: list[tuple[dict[str, Any], str, Any]] = []
        for each, own in self._attributes:
            attributes = vars(each)
            for name in {*own, *_plain_attributes(each)}:
                value, current = own.get(name, _MISSING), attributes.get(name, _MISSING)
                if _differ(value, current):
                    found.append((attributes, name, current))
                    _set(attributes, name, value)
        if random.getstate() != self._python:
            random.setstate(self._python)
        if _frozen(np.random.get_state(legacy=False)) != _frozen(self._numpy):
            np.random.set_state(self._numpy)
        return found

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Run a block with all as it was; behind it all is as before the block."""
        now = PlainState(self._module)
        found = self.restore()
        try:
            yield
        finally:
            now.restore()
            for attributes, name, value in found:  # of any kind
                _set(attributes, name, value)


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
