"""What language models add: adapters on frozen weights, experts, several sequences in one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.activations.cases.training import Tensors, case, gradients

HIDDEN = 16


def trained(
    t: Any, make: Callable[[], nn.Module], steps: Sequence[tuple[torch.Tensor, Any]]
) -> Tensors:
    """Train a step for each input and what else the model takes; return what was computed."""
    model = t.seeded(make)
    t.attach(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    results = []
    for x, more in steps:
        optimizer.zero_grad()
        loss = model(x, more).square().mean()
        loss.backward()
        optimizer.step()
        results += [loss.detach(), *(gradient.clone() for gradient in gradients(model))]
    return [*results, *(p.detach() for p in model.parameters())]


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of rank 2, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.drop = nn.Dropout(0.25)
        self.down = nn.Linear(HIDDEN, 2, bias=False)
        self.up = nn.Linear(2, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.base(x) + 0.5 * self.up(self.down(self.drop(x)))
        return made


class AdaptedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN).requires_grad_(False)
        self.layers = nn.ModuleList(Adapted() for _ in range(3))

    def forward(self, x: torch.Tensor, more: None) -> torch.Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = x + functional.silu(layer(x))
        return x


@case
def adapters_on_frozen_weights(t: Any) -> Tensors:
    x = t.tensor(12, HIDDEN, grad=False)
    return trained(t, AdaptedLayers, [(x, None), (x.flip(0), None), (x, None)])


class Experts(nn.Module):
    """Tokens go to one of two experts; a head's output is kept, and never part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
            for _ in range(2)
        )
        self.head = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
        self.never_read: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, more: None) -> torch.Tensor:
        out = torch.zeros_like(x)
        chosen = (x[:, 0] > 0).long()
        for i, expert in enumerate(self.experts):
            (rows,) = (chosen == i).nonzero(as_tuple=True)
            out = out.index_put((rows,), expert(x[rows]))
        self.never_read = self.head(out)
        return x + out


@case
def experts_of_which_some_are_never_read(t: Any) -> Tensors:
    """In the second step all tokens go to one of them; other numbers of them in each step."""
    x = t.tensor(24, HIDDEN, grad=False)
    return trained(t, Experts, [(x, None), (x.abs(), None), (x.flip(1), None)])


class PackedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        made = []
        for each in self.qkv(x).split(list(lengths)):  # [length, 3 hidden]
            q, k, v = each.unflatten(1, (3, 2, -1)).permute(1, 2, 0, 3)
            scores = (q @ k.transpose(1, 2)).softmax(-1)
            made.append((scores @ v).transpose(0, 1).flatten(1))
        out: torch.Tensor = self.out(torch.cat(made))
        return x + out


@case
def several_sequences_in_one_row(t: Any) -> Tensors:
    x = t.tensor(24, HIDDEN, grad=False)
    return trained(t, PackedAttention, [(x, (10, 8, 6)), (x, (24,)), (x, (4, 4, 8, 8))])
