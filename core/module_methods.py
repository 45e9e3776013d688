"""Methods that are set on a torch module and hide those of its class."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from .errors import BitslabError


def alive(module: weakref.ref[nn.Module]) -> nn.Module:
    """Return the module of a weak reference.

    Raises
    ------
    BitslabError
        When the module was deleted.
    """
    found = module()
    if found is None:
        raise BitslabError("the model whose weights were packed was deleted")
    return found


class MethodOverride:
    """A method that is set on a module and hides that of its class.

    Parameters
    ----------
    module : torch.nn.Module
        The module; held weakly, because it holds the method.
    name : str
        Name of the method.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._own = module.__dict__.get(name)
        installed = module.__dict__[name] = self.replacement()
        # Weakly: a bound method holds this object, and the cycle would keep what it packs.
        self._installed = weakref.ref(installed)

    def replacement(self) -> Callable[..., Any]:
        """Return what is set on the module."""
        return self.call

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run instead of the module's own method."""
        raise NotImplementedError

    @property
    def module(self) -> nn.Module:
        """The module."""
        return alive(self._module)

    def original(self) -> Callable[..., Any]:
        """Return the method that was replaced, bound to the module."""
        if self._own is not None:
            own: Callable[..., Any] = self._own
            return own
        return functools.partial(getattr(type(self.module), self._name), self.module)

    def remove(self) -> None:
        """Give the module its own method back, unless another one has replaced this since."""
        self.remove_from(self.module.__dict__)

    def remove_from(self, attributes: dict[str, Any]) -> None:
        """Undo the override in a copy of the module's attributes."""
        found = attributes.get(self._name)
        if found is None or found is not self._installed():
            return
        if self._own is None:
            del attributes[self._name]
        else:
            attributes[self._name] = self._own
