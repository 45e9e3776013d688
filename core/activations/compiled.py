"""Models that torch.compile has compiled: what is said of them, and hooks that it leaves alone.

The saved tensors of a compiled graph are packed when its forward pass is over, and all of them are
asked for when its backward pass begins. Layers that are compiled one by one come back one by one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .sharded import Pack, Unpack, sharded_hooks
from .sites import is_compiled

_COMPILED = "CompiledFunctionBackward"
_LEAF = "torch::autograd::AccumulateGrad"


def hook_functions(pack: Pack, unpack: Unpack) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what autograd calls, which takes DTensors and which torch.compile leaves as it is."""
    pack, unpack = sharded_hooks(pack, unpack)
    if "torch._dynamo" not in sys.modules:  # which takes a second to import
        return pack, unpack
    return _uncompiled(pack), _uncompiled(unpack)


def _uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that torch.compile leaves as it is.

    What `torch.compiler.disable` makes of it takes 2 us, and is called where frames are compiled:
    below a compiled function.
    """
    disabled: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    frames = sys.modules.get("torch._dynamo.eval_frame")
    skip_code = getattr(frames, "skip_code", None)
    compiles = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    if skip_code is None or compiles is None:  # another torch
        return disabled

    def call(given: Any) -> Any:
        return hook(given) if compiles() is None else disabled(given)

    skip_code(call.__code__)
    return functools.wraps(disabled)(call)  # by whose attributes the compiler knows it


def compiled_notes(model: nn.Module) -> list[str]:
    """Return what is to be known of a model's compiled parts."""
    found = [name or "the model" for name, m in model.named_modules() if is_compiled(m)]
    if not found:
        return []
    notes = [
        f"Compiled by torch.compile: {', '.join(found)}. Its graphs save what their own "
        "partitioning keeps, and its sites are not named by modules."
    ]
    return notes + ([whole_note(model)] if is_compiled(model) else [])


def is_one_graph(output: torch.Tensor) -> bool:
    """Return whether all between a model's parameters and an output of it is one compiled graph."""
    node = output.grad_fn
    if node is None or type(node).__name__ != _COMPILED:
        return False
    return all(each is None or each.name() == _LEAF for each, _ in node.next_functions)


def whole_note(model: nn.Module) -> str:
    """Return what is said of a model that is compiled as one graph."""
    return (
        "The model is compiled whole: its saved tensors all come back before its backward pass "
        "begins, so that memory is not lower there. Compile its layers one by one: "
        f"{compile_line(model)}"
    )


def compile_line(model: nn.Module) -> str:
    """Return the line of Python that compiles the layers of `model`, one by one.

    They are those of its outermost lists.
    """
    names: list[str] = []
    pending = [("model", getattr(model, "_orig_mod", model))]
    while pending:
        path, module = pending.pop(0)
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            names.append(path)
            continue
        for name, child in module.named_children():
            pending.append((f"{path}[{name}]" if name.isdigit() else f"{path}.{name}", child))
    if not names:
        names = ["model.children()"]
    layers = names[0] if len(names) == 1 else f"[*{', *'.join(names)}]"
    return f"for layer in {layers}: layer.compile()"
