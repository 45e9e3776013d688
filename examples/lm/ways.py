"""Ways to keep what a model needs for its backward pass."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

import bitslab

#: By name: what is done.
WAYS = {
    "keep": "every tensor is kept on the device",
    "checkpoint": "each layer keeps its input, and computes again what is between",
    "save_on_cpu": "torch.autograd.graph.save_on_cpu: all to the host, the step waits",
    "host": "bitslab.offload_activations(model): to the host, beside the computation",
    "disk": "bitslab.offload_activations(model, disk=...): on to an SSD, and back in time",
    "planned": "bitslab.offload_activations(model, memory=...): a plan for each, with --disk "
    "of the SSD, too",
}
#: The way that is torch's own, whose losses say nothing of the others'.
PEER = "save_on_cpu"
OFFLOADED = ("host", "disk", "planned")
#: Share of a step that a plan without a limit of memory may cost.
SLOWDOWN = 0.02


class Way:
    """A way in use with a model; this one leaves everything where it is."""

    def __init__(self, context: Any = nullcontext) -> None:
        self._context = context

    def step(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass."""
        made: AbstractContextManager[object] = self._context()
        return made

    def stats(self) -> dict[str, int]:
        """Return what was moved so far, by `ActivationOffload.stats`'s names."""
        return {}

    def notes(self) -> list[str]:
        """Return lines for the reader."""
        return []


class Offloaded(Way):
    """`bitslab.offload_activations`; the loop and the model are not changed."""

    def __init__(self, offload: bitslab.ActivationOffload) -> None:
        super().__init__()
        self.offload = offload

    def stats(self) -> dict[str, int]:
        return self.offload.stats()

    def notes(self) -> list[str]:
        return list(self.offload.report().notes)


def disk_of(way: str, options: argparse.Namespace) -> str | None:
    """Return the folder that a way may write to; a plan only to one that was given."""
    if way == "disk":
        return options.disk or "."
    return options.disk if way == "planned" else None


@contextmanager
def use(way: str, model: Any, options: argparse.Namespace) -> Iterator[Way]:
    """Train a model in a way of WAYS while the context is open."""
    if way in OFFLOADED:
        more: dict[str, Any] = {"policy": options.policy}
        if way == "planned":
            no_limit = options.memory is None
            more = {"slowdown": SLOWDOWN} if no_limit else {"memory": options.memory}
        folder = disk_of(way, options)
        if folder is not None:
            more |= {"disk": folder, "write_budget": options.write_budget}
        offload = bitslab.offload_activations(
            model,
            min_bytes=options.min_bytes,
            in_flight_bytes=options.in_flight_mb << 20,
            verify=options.verify,
            **more,
        )
        try:
            yield Offloaded(offload)
        finally:
            offload.close()
        return
    if way == "checkpoint":
        turn_on_checkpoints(model)
    on_gpu = next(model.parameters()).device.type == "cuda"
    yield Way((lambda: save_on_cpu(pin_memory=on_gpu)) if way == PEER else nullcontext)


def turn_on_checkpoints(model: Any) -> None:
    """Make each layer a checkpoint, by the name that this version of transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        enable({"use_reentrant": False})


def give_memory_back() -> None:
    """Return freed memory to the system, so that the peak of the next way is its own."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc's
        trim(0)
