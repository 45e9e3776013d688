"""Modules that a plan computes again in the backward pass, and what is seen of them before."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..engine.versions import version_of
from ..module_methods import MethodOverride
from ..module_tensors import own_buffers
from .attached import PlainCopies
from .sites import is_compiled
from .step_recorder import StepRecorder

#: Lists of modules that are called one after the other.
_LISTS = (nn.ModuleList, nn.Sequential)
#: What a module may be given to be computed again, besides tensors.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def checkpointable(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model that may be checkpointed: the layers of its outermost lists.

    None of them lies in another one. Those with no modules of their own save too little.
    """
    found: dict[str, nn.Module] = {}
    pending = [("", model)]
    while pending:
        path, module = pending.pop(0)
        for name, child in module.named_children():
            full = f"{path}.{name}" if path else name
            is_layer = isinstance(module, _LISTS) and len(module) > 1
            if is_layer and not isinstance(child, _LISTS) and any(True for _ in child.children()):
                if not is_compiled(child):
                    found[full] = child
            else:
                pending.append((full, child))
    return found


def _tensors(values: Any) -> Iterator[torch.Tensor | None]:
    """Yield the tensors in arguments; None for what is neither a tensor nor plain."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
    elif type(values) is dict:
        yield from _tensors(tuple(values.values()))
    elif not isinstance(values, _PLAIN):
        yield None


def _changes(module: nn.Module, inputs: list[torch.Tensor]) -> Callable[[], bool]:
    """Return what checks whether a module's buffers or inputs were changed in place since."""
    buffers = [t for each in module.modules() for t in own_buffers(each).values() if t is not None]
    before = [(t, version_of(t)) for t in (*buffers, *inputs) if not t.is_inference()]
    return lambda: any(version_of(t) != version for t, version in before)


class ModuleWatch:
    """Tells a recorder when modules begin and end; taken off when the pass is over.

    Parameters
    ----------
    modules : mapping of str to torch.nn.Module
        By path.
    recorder : StepRecorder
        The recorder.
    """

    def __init__(self, modules: Mapping[str, nn.Module], recorder: StepRecorder) -> None:
        self._handles: list[Any] = []
        for name, module in modules.items():
            changes: list[Callable[[], bool]] = []
            enter = functools.partial(_enter, recorder, name, changes)
            leave = functools.partial(_leave, recorder, name, changes)
            self._handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave),
            ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _enter(
    recorder: StepRecorder,
    name: str,
    changes: list[Callable[[], bool]],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    given = list(_tensors((args, kwargs)))
    tensors = [t for t in given if t is not None]
    why_not = ""
    if len(tensors) < len(given):
        kinds = {type(v).__name__ for v in (*args, *kwargs.values()) if None in _tensors(v)}
        why_not = f"It is given {', '.join(sorted(kinds))}, which it may change."
    elif is_compiled(module):
        why_not = "It is compiled."
    changes.append(_changes(module, tensors))
    recorder.enter_module(name, [t for t in tensors if t.layout is torch.strided], why_not)


def _leave(
    recorder: StepRecorder,
    name: str,
    changes: list[Callable[[], bool]],
    module: nn.Module,
    args: tuple[Any, ...],
    result: Any,
) -> None:
    changed = bool(changes) and changes.pop()()
    why_not = "It changes buffers or inputs, and would change them twice." if changed else ""
    recorder.leave_module(name, why_not)


class _Checkpointed(MethodOverride):
    """Runs a module's forward pass so that the backward pass computes it again."""

    def __init__(self, module: nn.Module, is_on: Callable[[], bool]) -> None:
        self._is_on: Callable[[], bool] | None = is_on
        super().__init__(module, "forward")

    def replacement(self) -> Callable[..., Any]:
        """Return a function with the signature of the module's own."""

        @functools.wraps(self.original())
        def forward(*args: Any, **kwargs: Any) -> Any:
            original = self.original()
            if self._is_on is None or not self._is_on():
                return original(*args, **kwargs)
            if any(t is None for t in _tensors((args, kwargs))):  # unlike what was profiled
                return original(*args, **kwargs)
            return checkpoint(original, *args, use_reentrant=False, **kwargs)

        forward.__signature__ = inspect.signature(self.module.forward)  # type: ignore[attr-defined]
        return forward

    def remove(self) -> None:
        """Give the module its own method back; whoever has this one runs that."""
        self._is_on = None
        super().remove()


class _OneModule:
    """What is set on a module that is checkpointed."""

    def __init__(self, module: nn.Module, is_on: Callable[[], bool]) -> None:
        self._overrides = [
            _Checkpointed(module, is_on),
            PlainCopies(module, "__reduce_ex__", self),
            PlainCopies(module, "_replicate_for_data_parallel", self),
        ]

    def remove(self) -> None:
        for override in self._overrides:
            override.remove()
        self._overrides.clear()

    def remove_from(self, attributes: dict[str, Any]) -> None:
        for override in self._overrides:
            override.remove_from(attributes)


class CheckpointedModules:
    """The modules of a model that are computed again in passes that follow a plan.

    Parameters
    ----------
    modules : mapping of str to torch.nn.Module
        Those that may be, by path.
    is_on : callable
        Returns whether the running pass of this thread checkpoints a module.
    """

    def __init__(self, modules: Mapping[str, nn.Module], is_on: Callable[[str], bool]) -> None:
        self.modules = dict(modules)
        self._is_on = is_on
        self._set: dict[str, _OneModule] = {}

    def apply(self, names: Iterable[str]) -> None:
        """Checkpoint these modules, and no others."""
        wanted = set(names)
        for name in [name for name in self._set if name not in wanted]:
            self._set.pop(name).remove()
        for name in sorted(wanted - set(self._set)):
            is_on = functools.partial(self._is_on, name)
            self._set[name] = _OneModule(self.modules[name], is_on)
