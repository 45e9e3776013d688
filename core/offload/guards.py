"""What else a model with packed weights does right: its state dict, and moves and casts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import BitslabError
from .handles import WeightHandle
from .store import PackedWeights
from .units import Slot

_Apply = Callable[..., nn.Module]


class StateGuard:
    """Gives a module's state dict the decoded weights in the places of its handles.

    Parameters
    ----------
    weights : PackedWeights
        Where they come from.
    slots : sequence of Slot
        Places of handles that are the module's own.
    """

    def __init__(self, weights: PackedWeights, slots: Sequence[Slot]) -> None:
        self._weights = weights
        self._attributes = [slot.attribute for slot in slots]
        module = slots[0].module
        self._removers = [
            module._register_state_dict_hook(self._decode),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                self._refuse
            ),
        ]

    def _decode(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        for attribute in self._attributes:
            found = state_dict.get(prefix + attribute)
            if isinstance(found, WeightHandle):
                state_dict[prefix + attribute] = self._weights.read_shared(found.packed_name)

    def _refuse(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any
    ) -> None:
        for attribute in self._attributes:
            held = module._parameters.get(attribute)
            if prefix + attribute in state_dict and isinstance(held, WeightHandle):
                raise BitslabError(
                    f"{prefix}{attribute}: this weight is packed and cannot be loaded into; call "
                    "bitslab.offload.restore_weights(model) first, and pack again after"
                )

    def remove(self) -> None:
        """Take the hooks off the module."""
        for remover in self._removers:
            remover.remove()


class ApplyGuard:
    """Lets ``module.to`` and the like move what is resident, and refuses to change handles.

    Parameters
    ----------
    module : torch.nn.Module
        A module that owns handles, or the model itself.
    handles : sequence of WeightHandle
        Whose dtype and device must stay: for the model those of all modules, so that nothing has
        changed when it is refused.
    """

    def __init__(self, module: nn.Module, handles: Sequence[WeightHandle]) -> None:
        self._module = module
        self._handles = list(handles)
        self._own = module.__dict__.get("_apply")
        module.__dict__["_apply"] = functools.partial(self._apply, module._apply)

    def _apply(self, apply: _Apply, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> nn.Module:
        kinds = {(handle.dtype, handle.device): handle for handle in self._handles}
        for (dtype, device), handle in kinds.items():
            probe = fn(torch.empty(0, dtype=dtype, device=device))
            if (probe.dtype, probe.device) != (dtype, device):
                raise BitslabError(
                    f"{handle.packed_name}: this weight is packed as {dtype} for {device} and "
                    f"cannot become {probe.dtype} on {probe.device}; call "
                    "bitslab.offload.restore_weights(model) first"
                )
        parameters = self._module._parameters
        held = {n: p for n, p in parameters.items() if isinstance(p, WeightHandle)}
        for name in held:
            parameters[name] = None
        try:
            return apply(fn, *args, **kwargs)
        finally:
            parameters.update(held)

    def remove(self) -> None:
        """Give the module its own method back."""
        self._module.__dict__.pop("_apply", None)
        if self._own is not None:
            self._module.__dict__["_apply"] = self._own
