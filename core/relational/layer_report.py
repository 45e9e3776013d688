"""What became of the layers of a model, and how often each ran which way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import nn

#: The attribute of a layer with its calls by reason; "" for those that ran compiled.
_CALLS = "_relational_calls"


def count_call(layer: nn.Module, reason: str = "") -> None:
    """Count a call of a layer; `reason` says why the framework's own code ran."""
    if not torch.compiler.is_compiling():
        layer.__dict__.setdefault(_CALLS, Counter())[reason] += 1


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
