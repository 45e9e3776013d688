"""A model whose saved tensors are moved: what is set on it, and how that is taken off again."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ..module_methods import MethodOverride
from ..module_tensors import own_buffers, own_parameters
from .sharded import local_tensor

#: Where the model holds what moves its saved tensors.
ATTRIBUTE = "_bitslab_activations"
#: Modules that are put into a model after it was attached to are found within so many passes.
LISTED_PASSES = 16


class Removable(Protocol):
    """What is set on a module."""

    def remove_from(self, attributes: dict[str, Any]) -> None:
        """Take everything off a copy of the module's attributes."""


#: Given the arguments of a pass, by place and by name.
Hooked = Callable[[tuple[Any, ...], dict[str, Any]], contextlib.AbstractContextManager[Any]]


class ForwardOverride(MethodOverride):
    """Runs a model's forward pass with the hooks on.

    They are taken off whatever ends the pass, Ctrl-C too, of which torch tells no hook of a module.

    Parameters
    ----------
    module : torch.nn.Module
        The model.
    hooked : callable
        Returns the context of a pass; given its arguments.
    returned : callable
        Called with what a pass returns.
    """

    def __init__(self, module: nn.Module, hooked: Hooked, returned: Callable[[Any], None]) -> None:
        self._hooked: Hooked | None = hooked
        self._returned = returned
        super().__init__(module, "forward")

    def replacement(self) -> Callable[..., Any]:
        """Return a function with the signature of the model's own, which some callers read."""
        # Compiled graphs begin behind these, which torch.compile runs as they are.
        begin = torch.compiler.disable(self._begin)  # type: ignore[no-untyped-call]
        end = torch.compiler.disable(self._end)  # type: ignore[no-untyped-call]

        @functools.wraps(self.original())
        def forward(*args: Any, **kwargs: Any) -> Any:
            original, context = begin(args, kwargs)
            result = None
            try:
                result = original(*args, **kwargs)
            finally:
                end(context, result)
            return result

        forward.__signature__ = inspect.signature(self.module.forward)  # type: ignore[attr-defined]
        return torch.compiler.disable(forward, recursive=False)  # type: ignore[no-untyped-call, no-any-return]

    def _begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], contextlib.AbstractContextManager[Any] | None]:
        """Return the model's own forward, and the context of this pass, entered."""
        original = self.original()
        if self._hooked is None:  # by whoever kept this function when it was taken off
            return original, None
        context = self._hooked(args, kwargs)
        context.__enter__()
        return original, context

    def _end(self, context: contextlib.AbstractContextManager[Any] | None, result: Any) -> None:
        """Leave the context, whatever ended the pass; `result` is None where it failed."""
        if context is not None:
            context.__exit__(None, None, None)
            self._returned(result)

    def remove(self) -> None:
        """Give the module its own method back; whoever has this one runs that."""
        self._hooked = None
        super().remove()


class PlainCopies(MethodOverride):
    """Makes copies, pickles and replicas of a model that nothing is attached to.

    Parameters
    ----------
    module : torch.nn.Module
        The model.
    name : str
        ``"__reduce_ex__"``, or ``"_replicate_for_data_parallel"``.
    attachment : Removable
        What is taken off the copies.
    """

    def __init__(self, module: nn.Module, name: str, attachment: Removable) -> None:
        self._attachment = attachment
        super().__init__(module, name)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own method, and take off what it has copied."""
        made = self.original()(*args, **kwargs)
        if isinstance(made, nn.Module):
            self._attachment.remove_from(made.__dict__)
        elif isinstance(made, tuple) and len(made) > 2 and isinstance(made[2], dict):
            state = dict(made[2])
            self._attachment.remove_from(state)
            made = (*made[:2], state, *made[3:])
        return made


class Attachment:
    """What is set on a model.

    Parameters
    ----------
    model : torch.nn.Module
        The model. It holds this object and `owner`.
    owner : object
        Found as the attribute `ATTRIBUTE` of the model.
    hooked, returned
        As for `ForwardOverride`.
    """

    def __init__(
        self,
        model: nn.Module,
        owner: object,
        hooked: Hooked,
        returned: Callable[[Any], None],
    ) -> None:
        model.__dict__[ATTRIBUTE] = owner
        self._model = weakref.ref(model)
        self._overrides = [
            ForwardOverride(model, hooked, returned),
            PlainCopies(model, "__reduce_ex__", self),
            PlainCopies(model, "_replicate_for_data_parallel", self),
        ]

    @property
    def model(self) -> nn.Module | None:
        """The model; None when it was deleted."""
        return self._model()

    def remove(self) -> None:
        """Take everything off the model."""
        model = self.model
        if model is not None:
            model.__dict__.pop(ATTRIBUTE, None)
            for override in self._overrides:
                override.remove()
        self._overrides.clear()  # which hold this object, and it the model

    def remove_from(self, attributes: dict[str, Any]) -> None:
        """Take everything off a copy of the model's attributes."""
        attributes.pop(ATTRIBUTE, None)
        for override in self._overrides:
            override.remove_from(attributes)


class ModuleTensors:
    """The parameters and buffers of a model as they are now; of DTensors the local tensors.

    Parameters
    ----------
    model : torch.nn.Module
        The model, of which the dicts of its modules are held.
    """

    def __init__(self, model: nn.Module) -> None:
        self._dicts: list[Mapping[str, torch.Tensor | None]] = []
        for module in model.modules():
            self._dicts += [own_parameters(module), own_buffers(module)]
        self.passes = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for tensors in self._dicts:
            for t in tensors.values():
                if t is not None:
                    yield local_tensor(t)
