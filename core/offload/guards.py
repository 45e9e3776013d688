"""State dicts, moves, casts and pickling of a model with packed weights."""

from __future__ import annotations

import contextvars
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from ..errors import BitslabError
from ..module_methods import MethodOverride, alive
from ..module_tensors import own_parameters
from ..tracing import not_traced
from .handles import WeightHandle
from .store import PackedWeights
from .units import ParameterRef

#: What stands for a packed weight in the state dict that `deferred_state_dict` makes.
_StandIns = dict[tuple[PackedWeights, str], WeightHandle]
_stand_ins: contextvars.ContextVar[_StandIns | None]
_stand_ins = contextvars.ContextVar("bitslab_stand_ins", default=None)


def deferred_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return a model's state dict whose packed weights are decoded when they are used.

    ``model.state_dict()`` decodes all weights at once. This one is for writers that work shard by
    shard: in addition to the packed weights they need memory for one shard.

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
    """The source of weights of a deferred state dict: everything is decoded on the CPU."""

    def __init__(self, weights: PackedWeights) -> None:
        self._weights = weights

    def whole(self, name: str) -> torch.Tensor:
        """Decode a tensor on the CPU."""
        return self._weights.read(name)

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Decode rows of a tensor on the CPU."""
        return self._weights.rows(name, ids)


class StateGuard:
    """Replaces handles in a module's state dict by the decoded weights.

    Parameters
    ----------
    weights : PackedWeights
        The packed weights.
    refs : sequence of ParameterRef
        The module's own parameters that are handles.
    """

    def __init__(self, weights: PackedWeights, refs: Sequence[ParameterRef]) -> None:
        self._weights = weights
        self._attributes = [ref.attribute for ref in refs]
        module = refs[0].module
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
        """Return what replaces a handle in a state dict."""
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
            held = own_parameters(module).get(attribute)
            if prefix + attribute in state_dict and isinstance(held, WeightHandle):
                raise BitslabError(
                    f"{prefix}{attribute}: this weight is packed and cannot be loaded into; call "
                    "bitslab.offload.restore_weights(model) first, and pack again after"
                )

    def remove(self) -> None:
        """Take the hooks off the module."""
        for remover in self._removers:
            remover.remove()


class ApplyGuard(MethodOverride):
    """Makes ``module.to`` and the like move what is not packed, and refuse to change handles.

    Parameters
    ----------
    module : torch.nn.Module
        A module that owns handles, or the model itself.
    handles : sequence of WeightHandle
        Whose dtype and device must not change: for the model those of all modules, so that a
        refused change has changed nothing.
    """

    def __init__(self, module: nn.Module, handles: Sequence[WeightHandle]) -> None:
        self._handles = list(handles)
        super().__init__(module, "_apply")

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Apply a function to what is not packed, once it is known to change no handle."""
        kinds = {(handle.dtype, handle.device): handle for handle in self._handles}
        for (dtype, device), handle in kinds.items():
            probe = fn(torch.empty(0, dtype=dtype, device=device))
            if (probe.dtype, probe.device) != (dtype, device):
                raise BitslabError(
                    f"{handle.packed_name}: this weight is packed as {dtype} for {device} and "
                    f"cannot become {probe.dtype} on {probe.device}; call "
                    "bitslab.offload.restore_weights(model) first"
                )
        parameters = own_parameters(self.module)
        held = {n: p for n, p in parameters.items() if isinstance(p, WeightHandle)}
        for name in held:
            parameters[name] = None
        try:
            return self.original()(fn, *args, **kwargs)
        finally:
            parameters.update(held)


class CallGuard:
    """Keeps the forward pass of a module that uses a handle out of compiled graphs.

    torch.compile knows no handles. Where accelerate has put its own forward pass before that of the
    module, the one behind it is kept out, and is still there when accelerate removes its own.

    Parameters
    ----------
    module : torch.nn.Module
        An embedding or a linear layer with a handle.
    around : callable, optional
        Gets the forward pass and returns what is put in its place.
    """

    def __init__(
        self,
        module: nn.Module,
        around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        self._name = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
        self._own = module.__dict__.get(self._name)
        forward = _weakly_bound(getattr(module, self._name))
        self._method = not_traced(forward if around is None else around(forward))
        self._module = weakref.ref(module)
        module.__dict__[self._name] = self._method

    def remove(self) -> None:
        """Give the module its own forward pass back, also where accelerate's is before it now."""
        held = alive(self._module).__dict__
        for name in ("forward", "_old_forward"):
            if held.get(name) is not self._method:
                continue
            if self._own is not None:
                held[name] = self._own
            elif name == "forward":
                del held[name]
            else:
                module = alive(self._module)
                held[name] = functools.partial(type(module).forward, module)


class PickleGuard(MethodOverride):
    """Refuses to pickle or copy a module whose weights are packed, since its hooks cannot be.

    Parameters
    ----------
    module : torch.nn.Module
        A module with hooks or handles.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, "__reduce_ex__")

    def call(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        raise BitslabError(
            f"{type(self.module).__name__}: weights of this module are packed, so it "
            "cannot be pickled or copied; save model.state_dict(), which has the plain weights, or "
            "call bitslab.offload.restore_weights(model) first"
        )


def _weakly_bound(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method without keeping its object."""
    if getattr(method, "__self__", None) is None:
        return method
    module, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(alive(module), *args, **kwargs)

    called.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return called
