"""Hooks around a unit's forward pass: its parameters are decoded tensors while it runs."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import BitslabError
from ..saved_hooks import present_hooks
from ..tracing import not_traced
from .fused import FusedUnit
from .handles import WeightHandle, bound_parameter
from .stream import WeightStream
from .units import Unit

#: Called with the name of a unit that a thread is about to enter, before its weights are acquired.
EnterCallback = Callable[[str], None]


@dataclass
class _Activation:
    """One running forward pass of a unit, in one thread."""

    acquired: bool = False
    packed: bool = False  # acquired without being decoded
    saving: contextlib.AbstractContextManager[Any] | None = None


class UnitHooks:
    """Binds the weights of a unit around each forward pass of its module.

    Parameters
    ----------
    unit : Unit
        The unit; its refs hold handles.
    stream : WeightStream
        What fetches and decodes its weights.
    fused : FusedUnit, optional
        The passes in which its packed weights are not decoded: handles are left in place.

    Notes
    -----
    Several threads, and a module that calls itself, may be in one unit: the first binds and the
    last unbinds. Weights that autograd keeps for the backward pass are not kept but decoded
    again there, because their memory is used for the next units meanwhile; what else it keeps goes
    to the hooks that were there before, as those of `torch.utils.checkpoint`. For the same reason a
    view of a weight that the module returns becomes a copy.
    """

    def __init__(self, unit: Unit, stream: WeightStream, fused: FusedUnit | None = None) -> None:
        self.unit = unit
        self._fused = fused
        self.enter_callback: EnterCallback | None = None
        self._stream = stream
        self._handles: list[WeightHandle] = []
        for ref in unit.refs:
            handle = ref.get()
            if not isinstance(handle, WeightHandle):
                raise BitslabError(f"{ref.name}: expected a handle, got {type(handle).__name__}")
            self._handles.append(handle)
        #: In place of each handle; None where it is left.
        self._bound: list[nn.Parameter | None] = []
        self._storages: set[int] = set()
        self._active = 0
        self._lock = threading.Lock()
        self._local = threading.local()
        #: Parameters over a buffer's tensors, made once for each buffer.
        self._parameters: dict[int, tuple[dict[str, torch.Tensor], list[nn.Parameter | None]]] = {}
        # Outside of compiled graphs: torch.compile traces what is between the hooks.
        before, after = not_traced(self._before), not_traced(self._after)
        self._removers = [
            unit.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            unit.module.register_forward_hook(after, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off the module."""
        for remover in self._removers:
            remover.remove()
        self._parameters.clear()

    def is_active(self) -> bool:
        """Return whether this thread is in the unit's forward pass; also after an interrupt."""
        return bool(self._activations())

    def abandon(self) -> None:
        """Undo this thread's activations that never ended: torch calls no hook on an interrupt."""
        while self._activations():
            self._leave()

    def _activations(self) -> list[_Activation]:
        activations: list[_Activation] = self._local.__dict__.setdefault("activations", [])
        return activations

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # First of all, because `_after` comes whatever happens here.
        activation = _Activation()
        self._activations().append(activation)
        if self.enter_callback is not None:
            self.enter_callback(self.unit.name)
        # Of threads in one unit at the same time all do as the first, which binds.
        packed = self._fused is not None and self._fused.takes(args, kwargs)
        with self._lock:
            packed = self._is_fused() if self._active else packed
            if packed:
                views = self._stream.acquire_packed(self.unit.name)
                activation.acquired = activation.packed = True
                self._enter(views, packed=True)
        if not packed:
            views = self._stream.acquire(self.unit.name)
            activation.acquired = True
            with self._lock:
                self._enter(views, packed=False)
        if torch.is_grad_enabled():
            save = functools.partial(self._save, *_present_hooks())
            activation.saving = torch.autograd.graph.saved_tensors_hooks(save, _load)
            activation.saving.__enter__()
        return aligned(args, kwargs, self._stream.device)

    def _is_fused(self) -> bool:
        return self._fused is not None and self._fused.active

    def _enter(self, views: dict[str, torch.Tensor], *, packed: bool) -> None:
        """Count an activation whose tensors are acquired, and bind those of the first."""
        self._active += 1
        if self._active == 1:
            if self._fused is not None:
                self._fused.active = packed
            self._bind(views)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._activations():
            return None  # another hook, before `_before`, has raised
        kept = _changed(output, self._copied)
        self._leave()
        return None if kept is output else kept

    def _leave(self) -> None:
        activation = self._activations().pop()
        if activation.saving is not None:
            activation.saving.__exit__(None, None, None)
        if activation.acquired:
            with self._lock:
                self._active -= 1
                if self._active == 0:
                    self._unbind()
                    if self._fused is not None:
                        self._fused.active = False
            if activation.packed:
                self._stream.release_packed(self.unit.name)
            else:
                self._stream.release(self.unit.name)

    def _bind(self, views: dict[str, torch.Tensor]) -> None:
        found = self._parameters.get(id(views))
        if found is None:
            made = {name: bound_parameter(view) for name, view in views.items()}
            found = views, [made.get(handle.packed_name) for handle in self._handles]
            self._parameters[id(views)] = found
        self._bound = found[1]
        bound = [p for p in self._bound if p is not None]
        self._storages = {p.untyped_storage().data_ptr() for p in bound} - {0}
        for ref, handle, parameter in zip(self.unit.refs, self._handles, self._bound, strict=True):
            # A parameter that has replaced the handle since is used as it is.
            if parameter is not None and ref.get() is handle:
                ref.put(parameter)

    def _unbind(self) -> None:
        for ref, handle, parameter in zip(self.unit.refs, self._handles, self._bound, strict=True):
            if parameter is not None and ref.get() is parameter:
                ref.put(handle)

    # Tensors that outlive the pass

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor that shares memory with a weight."""
        if not _has_data(tensor) or tensor.untyped_storage().data_ptr() not in self._storages:
            return tensor
        return tensor.clone()

    def _save(
        self,
        pack: Callable[[torch.Tensor], Any],
        unpack: Callable[[Any], torch.Tensor],
        tensor: torch.Tensor,
    ) -> Callable[[], torch.Tensor]:
        """Keep the name of a weight instead of its data, and of others what `pack` says."""
        address = tensor.data_ptr() if _has_data(tensor) else 0
        for handle, parameter in zip(self._handles, self._bound, strict=True):
            if parameter is None:
                continue
            offset = address - parameter.data_ptr()
            if address and 0 <= offset < max(1, parameter.nbytes) and tensor.numel():
                offset //= parameter.element_size()
                view = tensor.shape, tensor.stride(), offset
                return functools.partial(_decoded, handle, tensor.dtype, *view)
        return functools.partial(unpack, pack(tensor))


def _load(kept: Callable[[], torch.Tensor]) -> torch.Tensor:
    return kept()


def _decoded(
    handle: WeightHandle,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
) -> torch.Tensor:
    """Decode a weight again, and take the view of it that autograd kept."""
    whole = handle.decode()
    if dtype != whole.dtype:
        raise BitslabError(
            f"{handle.packed_name}: a backward pass needs this packed {whole.dtype} weight as "
            f"{dtype}; restore the weights, or train with keep='all'"
        )
    found: torch.Tensor = whole.as_strided(shape, stride, whole.storage_offset() + offset)
    return found


def _has_data(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory whose address can be compared with that of weights."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return plain and not tensor.is_meta and tensor.layout == torch.strided


def _present_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Return the functions by which autograd keeps tensors now; torch asks the innermost only."""
    # Detached, because a result that kept itself would never be freed.
    return present_hooks(tracing=True) or (torch.Tensor.detach, lambda tensor: tensor)


def aligned(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return arguments with their tensors on `device`; None when they are there already."""

    def there(value: torch.Tensor) -> torch.Tensor:
        return value if value.device == device else value.to(device, non_blocking=True)

    moved_args, moved_kwargs = _changed(args, there), _changed(kwargs, there)
    if moved_args is args and moved_kwargs is kwargs:
        return None
    return moved_args, moved_kwargs


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with the tensors in it changed; the same object where none is.

    Only tuples, lists and dicts are looked into: a cache would not be the caller's any more.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        items = {key: _changed(item, change) for key, item in value.items()}
        fresh = {key: item for key, item in items.items() if item is not value[key]}
        if not fresh:
            return value
        found = copy.copy(value)
        for key, item in fresh.items():
            found[key] = item
        return found
    kind = type(value)
    named = isinstance(value, tuple) and hasattr(kind, "_fields") and kind.__bases__ == (tuple,)
    if kind in (tuple, list) or named:
        parts = [_changed(item, change) for item in value]
        if all(part is item for part, item in zip(parts, value, strict=True)):
            return value
        return kind(*parts) if named else kind(parts)
    return value
