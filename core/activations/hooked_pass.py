"""Forward passes whose saved tensors are moved: where one may begin, and which one is kept.

A pass that begins within a backward pass is one that a checkpoint computes again, or one of a hook:
its tensors are read at once, so that moving them would cost two crossings and save nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..engine.versions import version_of
from ..errors import ArgumentError
from .compiled import hook_functions
from .guards import storages_of
from .hooks import KeptTensor, SavedTensorHooks
from .operands import Operands

Tensors = Iterable[torch.Tensor | None]

_HOOKS_OFF = (
    "saved tensors are kept on the device where torch's hooks are turned off "
    "(disable_saved_tensors_hooks, or a transform of torch.func)"
)
_AGAIN = (
    "Passes that begin within a backward pass, as a checkpoint around the model computes them "
    "again, are kept: nothing of them is moved, planned or counted as a step."
)


def hooked_pass(
    hooks: SavedTensorHooks,
    parameters: Callable[[], Tensors],
    note: Callable[[str], None],
    rests: Callable[[], bool] = lambda: False,
) -> contextlib.AbstractContextManager[None]:
    """Return the context of a forward pass, whose saved tensors are moved where that may be.

    Parameters
    ----------
    hooks : SavedTensorHooks
        What moves them.
    parameters : callable
        Returns the tensors that are left alone; called where a pass begins that is moved.
    note : callable
        Called with what the report is to say.
    rests : callable
        Returns whether a pass that might be moved needs no hooks.

    Raises
    ------
    ArgumentError
        When a CUDA graph is captured; nothing was begun.
    """
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        note(_HOOKS_OFF)
        return contextlib.nullcontext()
    if torch._C._current_graph_task_id() != -1:
        note(_AGAIN)
        return _kept_pass(hooks)
    refuse_capture()
    return contextlib.nullcontext() if rests() else _moved_pass(hooks, parameters())


def refuse_capture() -> None:
    """Refuse a pass under CUDA-graph capture.

    Raises
    ------
    ArgumentError
        When the current stream is captured.
    """
    # torch without CUDA cannot be asked, and with it asking would be its first use of the GPU.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        raise ArgumentError(
            "a CUDA graph is being captured, and a forward pass whose saved tensors are moved uses "
            "other streams, threads and memory of the host, of which replays would do nothing; "
            "detach() before the capture, or leave the model and the context out of it"
        )


@contextlib.contextmanager
def _moved_pass(hooks: SavedTensorHooks, parameters: Tensors) -> Iterator[None]:
    entered = hooks.enter(storages_of(parameters))
    pack: Callable[..., Any] = hooks.pack
    unpack: Callable[..., Any] = hooks.unpack
    operands = None
    try:
        if entered.has_replays:
            operands = entered.operands = Operands(parameters)
            # An object of this pass alone, by which its saved tensors are known.
            pack, unpack = operands.recording(pack), functools.partial(unpack)
        pack, unpack = hook_functions(pack, unpack)
        if operands is not None:
            operands.unpack = unpack
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        hooks.leave()
        if operands is not None:
            operands.close()


@contextlib.contextmanager
def _kept_pass(hooks: SavedTensorHooks) -> Iterator[None]:
    """Run a pass that keeps its tensors.

    By hooks nevertheless: a checkpoint that is not reentrant counts what its own hooks are given,
    and those saw nothing of the pass that is computed again.
    """
    with torch.autograd.graph.saved_tensors_hooks(*hook_functions(_kept, hooks.unpack)):
        yield


def _kept(t: torch.Tensor) -> KeptTensor:
    return t.detach(), version_of(t)
