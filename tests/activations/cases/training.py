"""What runs a program with saved tensors moved and without, and the table of programs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import bitslab

Tensors = list[torch.Tensor]
CASES: dict[str, Callable[[Any], Tensors]] = {}


class Training:
    """Where a case runs, and what moves its saved tensors: nothing here."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator().manual_seed(5)

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def attach(self, model: nn.Module) -> None:
        model.to(self.device)

    def detach(self, model: nn.Module) -> None:
        pass

    def tensor(self, *shape: int, grad: bool = True, dtype: Any = torch.float32) -> torch.Tensor:
        t = torch.randn(*shape, generator=self.generator).to(self.device, dtype)
        return t.requires_grad_(grad)

    def seeded(self, make: Callable[[], nn.Module]) -> nn.Module:
        torch.manual_seed(3)
        return make().to(self.device)


class Offloaded(Training):
    """Saved tensors are moved."""

    def __init__(self, device: str = "cpu", **options: Any) -> None:
        super().__init__(device)
        self.options = {"min_bytes": 64, "in_flight_bytes": 0, "verify": True} | options
        self.offloads: list[bitslab.ActivationOffload] = []

    def context(self) -> AbstractContextManager[Any]:
        self.offloads.append(bitslab.ActivationOffload(**self.options))
        return self.offloads[-1]

    def attach(self, model: nn.Module) -> None:
        model.to(self.device)
        self.offloads.append(bitslab.offload_activations(model, **self.options))

    def detach(self, model: nn.Module) -> None:
        self.offloads[-1].detach()

    @property
    def moved(self) -> int:
        return sum(offload.stats()["moved_tensors"] for offload in self.offloads)

    def close(self) -> None:
        for offload in self.offloads:
            offload.detach()


def case(function: Callable[[Any], Tensors]) -> Callable[[Any], Tensors]:
    CASES[function.__name__.replace("_", "-")] = function
    return function


def gradients(model: nn.Module) -> Tensors:
    return [p.grad for p in model.parameters() if p.grad is not None]


def attached(t: Training, make: Callable[[], nn.Module], *inputs: torch.Tensor) -> Tensors:
    """Two steps of a model with SGD."""
    model = t.seeded(make)
    t.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(*inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses + gradients(model) + [p.detach() for p in model.parameters()]


def small_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )
