"""The offloaded weights that accelerate's hooks hold of a dispatched model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset, named_module_tensors
from torch import nn

from bitslab.errors import ArgumentError
from bitslab.module_tensors import own_buffers
from bitslab.offload import OffloadedModel, find_offloaded

#: Methods that accelerate sets on a model with offloaded parts.
_METHODS = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "neuron")


@dataclass(frozen=True)
class OffloadedTensor:
    """A parameter or buffer that accelerate has taken out of a model.

    Parameters
    ----------
    name : str
        Its full name in the model.
    module : torch.nn.Module
        The module that owns it.
    attribute : str
        Its name there.
    key : str
        Its name in `weights`.
    weights : mapping
        The hook's map of weights.
    device : torch.device
        Where its module runs.
    """

    name: str
    module: nn.Module
    attribute: str
    key: str
    weights: Mapping[str, torch.Tensor]
    device: torch.device

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer."""
        return self.attribute in own_buffers(self.module)

    def value(self) -> torch.Tensor:
        """Return its data, on whatever device the map gives them."""
        return self.weights[self.key]

    @property
    def in_memory(self) -> bool:
        """Whether a dict in host memory holds it, not a file."""
        found, key = self._owner()
        return isinstance(found, dict) and key in found

    def release(self) -> bool:
        """Take it out of the dict that holds it; False when it is in a file."""
        if not self.in_memory:
            return False
        found, key = self._owner()
        del found[key]
        return True

    def put_back(self, value: torch.Tensor) -> None:
        """Put it back into the dict that it was taken out of."""
        found, key = self._owner()
        found[key] = value

    def _owner(self) -> tuple[Any, str]:
        """Return the innermost mapping of the hook's map and the key there."""
        found: Any = self.weights
        key = self.key
        while isinstance(found, PrefixedDataset):
            key = f"{found.prefix}{key}"
            found = found.dataset
        if isinstance(found, OffloadedWeightsLoader):
            found = found.state_dict
        return found, key


def streamed_model(model: nn.Module) -> OffloadedModel:
    """Return the `OffloadedModel` of a model.

    Raises
    ------
    ArgumentError
        When no weights of the model stream.
    """
    try:
        return find_offloaded(model)
    except ArgumentError as error:
        if not isinstance(model, nn.Module):
            raise
        raise ArgumentError(
            "model: none of its weights are packed; call offload_compressed(model), or "
            "compress_offloaded(model) where accelerate has offloaded it, first"
        ) from error


def check_unpacked(model: nn.Module) -> None:
    """Refuse a model whose weights are packed already.

    Raises
    ------
    ArgumentError
        When some are.
    """
    try:
        find_offloaded(model)
    except ArgumentError:
        return
    raise ArgumentError("model: its weights are packed already; call restore(model) first")


def hooks_of(module: nn.Module) -> list[Any]:
    """Return accelerate's hooks of a module, those in a sequence one by one."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        return []
    return list(hook.hooks) if isinstance(hook, SequentialHook) else [hook]


def offloading_hook(module: nn.Module) -> AlignDevicesHook | None:
    """Return the hook that offloads a module's weights, if there is one."""
    for hook in hooks_of(module):
        if isinstance(hook, AlignDevicesHook) and hook.offload:
            return hook
    return None


def offloaded_tensors(model: nn.Module) -> Iterator[OffloadedTensor]:
    """Yield what accelerate has offloaded of a model.

    Raises
    ------
    ArgumentError
        When a hook does not say where its module runs.
    """
    for name, module in model.named_modules():
        hook = offloading_hook(module)
        if hook is None:
            continue
        if hook.execution_device is None or hook.weights_map is None:
            raise ArgumentError(
                f"model: accelerate's hook of {name!r} has no execution device or no weights"
            )
        found = named_module_tensors(
            module,
            include_buffers=hook.offload_buffers,
            recurse=hook.place_submodules,
            remove_non_persistent=True,
        )
        for key, _ in found:
            below, _, attribute = key.rpartition(".")
            yield OffloadedTensor(
                f"{name}.{key}" if name else key,
                module.get_submodule(below),
                attribute,
                key,
                hook.weights_map,
                device_of(hook.execution_device),
            )


def device_of(device: Any) -> torch.device:
    """Return accelerate's name of a device, which may be a number, as a device."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def remove_offloading(model: nn.Module) -> None:
    """Remove the hooks that offload weights from a model, and no others.

    Not by accelerate's own function, which loads the raw weights first.
    """
    for module in model.modules():
        hook = offloading_hook(module)
        if hook is None:
            continue
        rest = [other for other in hooks_of(module) if other is not hook]
        if rest:
            module._hf_hook = rest[0] if len(rest) == 1 else SequentialHook(*rest)
        else:
            del module._hf_hook
            if "_old_forward" in module.__dict__:
                module.forward = module.__dict__["_old_forward"]
                if getattr(module.forward, "__self__", None) is module:
                    del module.forward  # the class has it
                del module._old_forward


def allow_moves(model: nn.Module, device: torch.device) -> None:
    """Undo what accelerate does to models with offloaded parts that have none any more.

    Its map of devices names where the parts are now, and ``model.to`` is the class's again unless
    parts are on several devices.
    """
    found = getattr(model, "hf_device_map", None)
    if isinstance(found, dict):
        # Not by the name "cpu", which says there that a part is offloaded.
        place = device.index if device.type == "cuda" else device
        for part, where in found.items():
            if where in ("disk", "cpu"):
                found[part] = place
    places = set(found.values()) if isinstance(found, dict) else set()
    if len(places) <= 1:
        for method in _METHODS:
            model.__dict__.pop(method, None)
