"""What a model saves for its backward pass: each storage once, with the layer that saved it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

#: Of each module: what its output is.
KINDS: dict[type[nn.Module], str] = {
    nn.ReLU: "activation",
    nn.LeakyReLU: "activation",
    nn.ELU: "activation",
    nn.Tanh: "activation",
    nn.PReLU: "activation",
    nn.Conv2d: "convolution",
    nn.BatchNorm2d: "norm",
    nn.MaxPool2d: "pooled",
    nn.AdaptiveAvgPool2d: "pooled",
    nn.Dropout: "dropout",
    nn.Linear: "linear",
}
#: Of each module: what it saves that no module returned.
INNER: dict[type[nn.Module], str] = {
    nn.MaxPool2d: "pool indices",
    nn.Dropout: "dropout mask",
    nn.BatchNorm2d: "statistics",
    nn.Conv2d: "input",  # a cast of its input
    nn.Linear: "input",
}


@dataclass(frozen=True)
class Saved:
    """One storage that backward needs.

    Parameters
    ----------
    layer : str
        Path of the module that saved it first; empty outside the model.
    kind : str
        Of KINDS or INNER: "input" for images, "other" for the rest.
    shape : torch.Size
        Of the first tensor that was saved of it.
    values : torch.Tensor
        All elements of the storage in the order of memory, ``[N]``, no copy.
    """

    layer: str
    kind: str
    shape: torch.Size
    values: torch.Tensor

    @property
    def name(self) -> str:
        """Layer, and kind."""
        return f"{self.layer or '-'}: {self.kind}"

    @property
    def zeros(self) -> float:
        """Share of the elements whose bits are all zero."""
        if not self.values.numel():
            return 0.0
        size = self.values.element_size()
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        return 1 - int(self.values.view(words).count_nonzero()) / self.values.numel()


class _Recorder:
    """Collects what is saved while it is active; see `recorded`."""

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        # Storages are kept, so that no other gets their numbers.
        self._own = {id(s): s for s in (t.untyped_storage() for t in tensors)}
        self._kinds: dict[int, tuple[Any, str]] = {}
        self._seen: dict[int, Any] = {}
        self._path: list[tuple[str, type[nn.Module]]] = []
        self.found: list[Saved] = []

    def mark(self, t: torch.Tensor, kind: str) -> None:
        storage = t.untyped_storage()
        self._kinds[id(storage)] = (storage, kind)

    def enter(self, name: str, module: nn.Module) -> None:
        self._path.append((name, type(module)))

    def leave(self, module: nn.Module, out: Any) -> None:
        self._path.pop()
        kind = KINDS.get(type(module))
        if kind and isinstance(out, torch.Tensor):
            self.mark(out, kind)

    def pack(self, t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if id(storage) not in self._seen and id(storage) not in self._own and not of_a_leaf(t):
            self._seen[id(storage)] = storage
            layer, module = self._path[-1] if self._path else ("", nn.Module)
            values = torch.empty(0, dtype=t.dtype, device=t.device)
            values.set_(storage, 0, (storage.nbytes() // t.element_size(),), (1,))
            known = self._kinds.get(id(storage))
            kind = INNER.get(module, "other") if known is None else known[1]
            self.found.append(Saved(layer, kind, t.shape, values))
        # Not t itself: an output that its own operation holds would never be freed.
        return t.detach()

    def named(self) -> list[Saved]:
        """Return what was found, with the kinds of the end: in-place layers change theirs."""
        kinds = {id(s): kind for s, kind in self._kinds.values()}
        return [
            Saved(s.layer, kinds.get(id(s.values.untyped_storage()), s.kind), s.shape, s.values)
            for s in self.found
        ]


def of_a_leaf(t: torch.Tensor) -> bool:
    """Return whether a tensor is a view or a cast of a parameter, as autocast makes them."""
    node: Any = t.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
        if hasattr(node, "variable"):
            return True
        if node is None or "View" not in node.name() and "Copy" not in node.name():
            return False
    return False


@contextmanager
def recorded(model: nn.Module, images: torch.Tensor) -> Iterator[_Recorder]:
    """Record what a forward pass of the model saves; `images` is its input."""
    recorder = _Recorder(model)
    recorder.mark(images, "input")
    handles = []
    for name, module in model.named_modules():

        def enter(module: nn.Module, args: Any, name: str = name) -> None:
            recorder.enter(name, module)

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            recorder.leave(module, out)

        handles += [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave),
        ]
    try:
        with saved_tensors_hooks(recorder.pack, lambda t: t):
            yield recorder
    finally:
        for handle in handles:
            handle.remove()


def saved_tensors(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> list[Saved]:
    """Return what a copy of the model saves for a batch, in the order of the forward pass.

    Neither the model nor the random numbers of the process change.

    Parameters
    ----------
    model : torch.nn.Module
        In training mode.
    images : torch.Tensor
        float32 ``[B, 3, side, side]``.
    labels : torch.Tensor
        int64 ``[B]``.
    dtype : torch.dtype
        float32; or what autocast computes in.
    """
    devices = [images.device] if images.device.type == "cuda" else []
    other = copy.deepcopy(model)
    with torch.random.fork_rng(devices), recorded(other, images) as recorder:
        torch.manual_seed(0)
        loss = loss_of(other, images, labels, dtype)
    found = recorder.named()
    del loss
    return found


def loss_of(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the loss of a batch, float32 ``[]``."""
    half = dtype != torch.float32
    with torch.autocast(images.device.type, dtype if half else torch.bfloat16, enabled=half):
        scores = model(images)
    return nn.functional.cross_entropy(scores.float(), labels)
