"""Modules that a plan computes again in the backward pass, and what is seen of them before."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..engine.versions import version_of
from ..module_methods import MethodOverride
from ..module_tensors import own_buffers
from .attached import PlainCopies
from .compiled import hook_functions
from .guards import is_transformed, modified
from .module_state import PlainState, detached_leaves, same_bits, torch_generators
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


def _changes(module: nn.Module, inputs: list[torch.Tensor]) -> Callable[[], str]:
    """Return what says why a module cannot be computed again, by what it has changed since."""
    before = _versions((*_buffers(module), *inputs))
    state = PlainState(module)

    def why_not() -> str:
        if any(version_of(t) != version for t, version in before):
            return "It changes buffers or inputs, and would change them twice."
        differs = state.what_differs()
        return f"It changes {differs}, and would change it twice." if differs else ""

    return why_not


def _buffers(module: nn.Module) -> Iterator[torch.Tensor]:
    for each in module.modules():
        yield from (t for t in own_buffers(each).values() if t is not None)


def _versions(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    return [(t, version_of(t)) for t in tensors if not t.is_inference()]


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
            changes: list[Callable[[], str]] = []
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
    changes: list[Callable[[], str]],
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
    changes: list[Callable[[], str]],
    module: nn.Module,
    args: tuple[Any, ...],
    result: Any,
) -> None:
    recorder.leave_module(name, changes.pop()() if changes else "")


class _Distinct:
    """Arguments of a module, each tensor once.

    `checkpoint` gives the pass that is computed again what saved-tensor hooks return, another
    object for each time that a tensor was given: attention, for one, takes another way where its
    query is not its key.

    Parameters
    ----------
    args : tuple
        What the module is given by place.
    kwargs : dict
        And by name.

    Attributes
    ----------
    values : list
        Different objects of `args`.
    named : dict
        What of `kwargs` is none of these.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        number: dict[int, int] = {}
        self._places = tuple(number.setdefault(id(value), len(number)) for value in args)
        self.values = [args[self._places.index(i)] for i in range(len(number))]
        self._by_name = {
            name: number[id(value)] for name, value in kwargs.items() if id(value) in number
        }
        self.named = {n: value for n, value in kwargs.items() if n not in self._by_name}

    def calling(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what calls `run` with all arguments, and is called with the different ones."""
        places, by_name = self._places, self._by_name

        def call(*values: Any, **named: Any) -> Any:
            again = {name: values[i] for name, i in by_name.items()}
            return run(*(values[i] for i in places), **again, **named)

        return call


class _Run:
    """One forward pass of a checkpointed module, which `checkpoint` calls again for the backward.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    original : callable
        Its own forward.
    name : str
        Its path.
    given : iterable of torch.Tensor
        Tensors of its keyword arguments, which `checkpoint` holds and does not watch.
    begins : callable
        Called before it is computed again.
    """

    def __init__(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        name: str,
        given: Iterable[torch.Tensor],
        begins: Callable[[], None],
    ) -> None:
        self._original, self._name, self._begins, self._ran = original, name, begins, False
        self._state = PlainState(module)
        self._versions = _versions((*module.parameters(), *_buffers(module), *given))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._ran:
            self._ran = True
            return self._original(*args, **kwargs)
        for t, version in self._versions:
            if (found := version_of(t)) != version:
                what = f", which {self._name!r} is computed again from,"
                raise modified(t.shape, t.dtype, found, version, what)
        self._begins()
        with self._state.again():
            return self._original(*args, **kwargs)


class _Checkpointed(MethodOverride):
    """Runs a module's forward pass so that the backward pass computes it again.

    The first one is run twice, to see whether that gives the same bits: only one module's tensors
    are there for it at a time, however many are checkpointed.
    """

    def __init__(self, module: nn.Module, name: str, guide: CheckpointedModules) -> None:
        self._path = name
        self._guide: CheckpointedModules | None = guide
        super().__init__(module, "forward")

    def replacement(self) -> Callable[..., Any]:
        """Return a function with the signature of the module's own."""

        @functools.wraps(self.original())
        def forward(*args: Any, **kwargs: Any) -> Any:
            original, guide = self.original(), self._guide
            if guide is None or not guide.is_on(self._path):
                return original(*args, **kwargs)
            given = list(_tensors((args, kwargs)))
            if any(t is None for t in given) or is_transformed():  # unlike what was profiled
                return original(*args, **kwargs)
            if guide.is_proven(self._path):
                return self._checkpointed(guide, args, kwargs)
            return self._first(guide, [t for t in given if t is not None], args, kwargs)

        forward.__signature__ = inspect.signature(self.module.forward)  # type: ignore[attr-defined]
        return forward

    def _checkpointed(
        self, guide: CheckpointedModules, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given = [t for t in _tensors(tuple(kwargs.values())) if t is not None]
        begins = guide.begins(self._path)
        run = _Run(self.module, self.original(), self._path, given, begins)
        distinct = _Distinct(args, kwargs)
        call = distinct.calling(run)
        return checkpoint(call, *distinct.values, use_reentrant=False, **distinct.named)

    def _first(
        self,
        guide: CheckpointedModules,
        given: list[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run it twice, and as it is where that gives other bits."""
        module, original = self.module, self.original()
        state = PlainState(module)
        restore_torch = torch_generators((*given, *module.parameters()))
        changes = _changes(module, given)
        try:
            # With a graph, since without one modules may take other ways; none of it is moved.
            with torch.autograd.graph.saved_tensors_hooks(*hook_functions(_detached, _as_it_is)):
                before = detached_leaves(original(*args, **kwargs))
            why_not = changes()
        except Exception as error:  # if it is the module's own, that is raised below
            before, why_not = [], f"It could not be tried ({type(error).__name__}: {error})."
        restore_torch()
        state.restore()
        if not why_not:
            result = self._checkpointed(guide, args, kwargs)
            if same_bits(before, detached_leaves(result)):
                guide.proven(self._path)
                return result
            del result
            why_not = "Computed again, it gives other bits."
            restore_torch()
            state.restore()
        guide.refuse(self._path, why_not)
        return original(*args, **kwargs)

    def remove(self) -> None:
        """Give the module its own method back; whoever has this one runs that."""
        self._guide = None
        super().remove()


def _detached(t: torch.Tensor) -> torch.Tensor:
    """Return what stands for a tensor: an output that its own node saved would never be freed."""
    return t.detach()


def _as_it_is(t: torch.Tensor) -> torch.Tensor:
    return t


class _OneModule:
    """What is set on a module that is checkpointed."""

    def __init__(self, module: nn.Module, name: str, guide: CheckpointedModules) -> None:
        self._overrides = [
            _Checkpointed(module, name, guide),
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
    begins : callable
        Returns what is to be called when a module of that pass begins to be computed again.

    Attributes
    ----------
    refused : dict of str to str
        Modules that gave other bits when they were computed again, for good, and what was found.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        is_on: Callable[[str], bool],
        begins: Callable[[str], Callable[[], None]],
    ) -> None:
        self.modules = dict(modules)
        self.refused: dict[str, str] = {}
        self._is_on, self.begins = is_on, begins
        self._proven: set[str] = set()
        self._set: dict[str, _OneModule] = {}

    def apply(self, names: Iterable[str]) -> None:
        """Checkpoint these modules, and no others."""
        wanted = set(names)
        for name in [name for name in self._set if name not in wanted]:
            self._set.pop(name).remove()
        for name in sorted(wanted - set(self._set)):
            self._set[name] = _OneModule(self.modules[name], name, self)

    # For what is set on the modules

    def is_on(self, name: str) -> bool:
        """Return whether a module is checkpointed now."""
        return name not in self.refused and self._is_on(name)

    def is_proven(self, name: str) -> bool:
        """Return whether a module was found to give the same bits again."""
        return name in self._proven

    def proven(self, name: str) -> None:
        """Take note of a module that gave the same bits."""
        self._proven.add(name)

    def refuse(self, name: str, why: str) -> None:
        """Checkpoint a module no more, and tell of it."""
        if name in self.refused:
            return
        self.refused[name] = why
        warnings.warn(
            f"bitslab: {name!r} is not computed again in the backward pass any more, since its "
            f"gradients would be others ({why})",
            UserWarning,
            stacklevel=2,
        )
