"""What became of the layers of a model, and how often each ran which way."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import ArgumentTypeError
from .plan_memory import PlanMemoryError
from .program import PACKED

#: The attribute of a layer with its calls by reason; "" for those that ran compiled.
_CALLS = "_relational_calls"


def count_call(layer: nn.Module, reason: str = "") -> None:
    """Count a call of a layer; `reason` says why the framework's own code ran."""
    if not torch.compiler.is_compiling():
        layer.__dict__.setdefault(_CALLS, Counter())[reason] += 1


#: Why a call ran the framework's own code where memory ran out.
NO_PLAN = "no memory for a plan"


def or_own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's forward pass that, without memory for a plan, runs the framework's own."""

    def run(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(layer, *args, **kwargs)
        try:
            return forward(layer, *args, **kwargs)
        except PlanMemoryError:
            if _has_packed((args, kwargs.values())):
                raise  # the framework's code takes tensors
            calls: Counter[str] = layer.__dict__[_CALLS]
            calls[NO_PLAN] += 1
            calls[""] -= 1  # it was counted as one that runs compiled
            if not calls[""]:
                del calls[""]
        # Behind the handler, whose traceback holds what the plan had of memory.
        return _own_forward(type(layer))(layer, *args, **kwargs)

    # `torch.compile` limits how often it compiles a code object, which all layers would share.
    run.__code__ = run.__code__.replace(co_name=forward.__name__)
    return functools.wraps(forward)(run)


def _has_packed(values: Iterable[Any]) -> bool:
    """Return whether packed rows are among arguments, or elements of tuples and dicts."""
    return any(
        isinstance(value, PACKED)
        or (isinstance(value, tuple | list | ValuesView) and _has_packed(value))
        or (isinstance(value, Mapping) and _has_packed(value.values()))
        for value in values
    )


def check_no_packed(arguments: Mapping[str, Any], reason: str = "") -> None:
    """Raise an error for packed tables and caches among arguments that must be tensors.

    Parameters
    ----------
    arguments : mapping of str to object
        The arguments by name; tuples, lists and dicts are looked into.
    reason : str
        Why the call runs the framework's own code, if that is what takes tensors alone.
    """
    why = f", and this call runs the framework's own code ({reason})" if reason else ""
    for name, value in arguments.items():
        if isinstance(value, PACKED):
            raise ArgumentTypeError(f"{name} is {type(value).__name__}{why}; accepted are tensors")
        if isinstance(value, Mapping):
            check_no_packed({f"{name}[{key!r}]": each for key, each in value.items()}, reason)
        elif isinstance(value, tuple | list):
            check_no_packed({f"{name}[{i}]": each for i, each in enumerate(value)}, reason)


def overridden(kind: type, hooks: Collection[str]) -> str:
    """Return which of the framework's hooks a class derived from a compiled one defines, or ''.

    A compiled forward pass calls none of them.
    """
    for each in kind.__mro__:
        if each.__module__.startswith("bitslab."):
            return ""
        for name in hooks:
            if name in vars(each):
                return f"{each.__name__} defines {name}"
    return ""


def _own_forward(kind: type) -> Callable[..., Any]:
    """Return the forward pass of the framework's class that a compiled one is derived from."""
    ours = [each.__module__.startswith("bitslab.") for each in kind.__mro__]
    after = kind.__mro__[ours.index(True) :]
    found: Callable[..., Any] = next(
        vars(each)["forward"]
        for each in after
        if "forward" in vars(each) and not each.__module__.startswith("bitslab.")
    )
    return found


@dataclass
class LayerReport:
    """Which layers of a model are compiled.

    Attributes
    ----------
    compiled : dict of str to str
        Name of the layer in the model, and its class.
    left : dict of str to str
        Name of each layer that was left as it is, and why.
    """

    compiled: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{name or 'the model'}: {kind}, compiled" for name, kind in self.compiled.items()]
        lines += [f"{name or 'the model'}: left, {why}" for name, why in self.left.items()]
        return "\n".join(lines) or "no layers of typed edges"


def calls_of(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return the calls of each compiled layer by reason; "" for those that ran compiled."""
    return {
        name: dict(layer.__dict__[_CALLS])
        for name, layer in model.named_modules()
        if _CALLS in layer.__dict__
    }


def forget_calls(layer: nn.Module) -> None:
    """Remove the counters of a layer."""
    layer.__dict__.pop(_CALLS, None)
