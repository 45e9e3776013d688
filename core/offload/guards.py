"""What else a model with packed weights does right: its state dict, and moves and casts."""

from __future__ import annotations

import contextvars
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
#: What stands for a packed weight in the state dict that `deferred_state_dict` makes.
_StandIns = dict[tuple[PackedWeights, str], WeightHandle]
_stand_ins: contextvars.ContextVar[_StandIns | None]
_stand_ins = contextvars.ContextVar("bitslab_stand_ins", default=None)


def deferred_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return a model's state dict whose packed weights are decoded when they are used.

    ``model.state_dict()`` decodes all weights at once. This one is for writers that work shard by
    shard: beside the packed weights they need memory for one shard.

    Parameters
    ----------
    model : torch.nn.Module
        Any model; of one without packed weights it is ``model.state_dict()``.

    Returns
    -------
    dict of str to torch.Tensor
        Each packed weight is a tensor of its shape, dtype and strides on the meta device, which is
        decoded on the CPU, anew each time, for every operation that it is given to (``.to("cpu")``
        is one). It is read-only, cannot be pickled, and raises once the weights were restored.
        Tied weights, which writers tell by their memory, are decoded at once. Everything else is
        as in ``model.state_dict()``.

    Raises
    ------
    BitslabError
        When the file of packed weights was removed.

    Notes
    -----
    It may be given to ``safetensors.torch.save_file``, to ``save_pretrained(folder,
    state_dict=..., max_shard_size=...)`` of transformers, to ``save_pretrained(folder,
    state_dict=...)`` of peft, and to ``load_state_dict`` of a plain model (without ``assign``).

    Examples
    --------
    >>> import torch
    >>> from bitslab.offload import deferred_state_dict, offload_weights
    >>> model = torch.nn.Linear(512, 512)
    >>> before = model.weight.detach().clone()
    >>> report = offload_weights(model, execution_device="cpu")
    >>> weight = deferred_state_dict(model)["weight"]
    >>> weight.device, torch.equal(weight.to("cpu"), before)
    (device(type='meta'), True)
    """
    token = _stand_ins.set({})
    try:
        state: dict[str, Any] = model.state_dict()
    finally:
        _stand_ins.reset(token)
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        if isinstance(tensor, WeightHandle):
            names.setdefault(id(tensor), []).append(name)
    for tied in names.values():
        if len(tied) > 1:
            state.update(dict.fromkeys(tied, state[tied[0]].decode()))
    return state


class _OnHost:
    """Where the tensors of a deferred state dict get their data from."""

    def __init__(self, weights: PackedWeights) -> None:
        self._weights = weights

    def whole(self, name: str) -> torch.Tensor:
        """Decode a tensor on the CPU."""
        return self._weights.read(name)

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Decode rows of a tensor on the CPU."""
        return self._weights.rows(name, ids)


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
                state_dict[prefix + attribute] = self._stand_in(found.packed_name)

    def _stand_in(self, name: str) -> torch.Tensor:
        """Return what a state dict has in the place of a handle."""
        made = _stand_ins.get()
        if made is None:
            return self._weights.read_shared(name)
        found = made.get((self._weights, name))
        if found is None:
            record = self._weights.record(name)
            no_data = torch.empty(record.raw_nbytes, dtype=torch.uint8, device="meta")
            like = record.restored(no_data)
            found = WeightHandle(_OnHost(self._weights), name, like, like.device)
            made[self._weights, name] = found
        return found

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
