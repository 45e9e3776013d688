"""Checkpoints, other hooks, and what fails in the middle of a pass."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.activations.cases.training import Tensors, attached, case, gradients, small_model

# Checkpoints and other hooks


@case
def checkpoints_inside(t: Any) -> Tensors:
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.reentrant = reentrant
            self.a, self.b, self.c = (small_model() for _ in range(3))
            self.d = nn.Linear(4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.d(self.a(x))
            h = self.d(checkpoint(self.b, h, use_reentrant=self.reentrant))
            result: torch.Tensor = self.c(h)
            return result.sin()

    x = t.tensor(6, 8)
    results = []
    for reentrant in (True, False):
        results += attached(t, lambda: Checkpointed(reentrant), x)  # noqa: B023
    return results


@case
def checkpoints_around(t: Any) -> Tensors:
    model = t.seeded(small_model)
    t.attach(model)
    x = t.tensor(6, 8)
    for reentrant in (True, False):
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    return [x.grad, *gradients(model)]


@case
def checkpoints_around_the_context(t: Any) -> Tensors:
    x = t.tensor(6, 8)

    def run(x: torch.Tensor) -> torch.Tensor:
        with t.context():
            return x.exp().sin() * x

    for reentrant in (True, False):
        checkpoint(run, x * 2, use_reentrant=reentrant).sum().backward()
    return [x.grad]


@case
def other_hooks_inside_and_outside(t: Any) -> Tensors:
    seen = []

    def pack(saved: torch.Tensor) -> torch.Tensor:
        seen.append(saved.shape)
        return saved.detach().clone()

    x = t.tensor(8, 8)
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(pack, lambda saved: saved):
        a = x.exp()
        with t.context():
            b = a.sin()
            with hooks(pack, lambda saved: saved):
                c = b.tanh()
            d = c.sigmoid()
        e = d * a
    e.sum().backward()
    assert seen
    return [x.grad, e]


@case
def save_on_cpu_inside(t: Any) -> Tensors:
    x = t.tensor(8, 8)
    with t.context():
        a = x.exp()
        with torch.autograd.graph.save_on_cpu():
            b = (a * a).sin()
        c = b.tanh()
    c.sum().backward()
    return [x.grad, c]


@case
def hooks_disabled(t: Any) -> Tensors:
    model = t.seeded(small_model)
    t.attach(model)
    x = t.tensor(6, 8)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        model(x).square().sum().backward()
    model(x).square().sum().backward()
    return [x.grad, *gradients(model)]


@case
def transforms_of_torch_func(t: Any) -> Tensors:
    """``functional_call`` gives a model tensors that have no storage."""
    model = t.seeded(small_model)
    t.attach(model)
    x = t.tensor(6, 8, grad=False)

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.func.functional_call(model, weights, (x,)).square().sum()
        return made

    weights = {name: p.detach() for name, p in model.named_parameters()}
    several = {name: torch.stack([p, p * 2]) for name, p in weights.items()}
    results = [*torch.func.grad(loss)(weights, x).values()]
    results += torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x.unsqueeze(1)).values()
    for p in several.values():
        p.requires_grad_()
    torch.func.vmap(loss, (0, None))(several, x).sum().backward()
    model(x).square().sum().backward()
    return [*results, *(p.grad for p in several.values()), *gradients(model)]


@case
def nested_contexts(t: Any) -> Tensors:
    x = t.tensor(8, 8)
    with t.context():
        a = x.exp()
        with t.context():
            b = (a * a).sin()
        c = (b * a).tanh()
    c.sum().backward()
    return [x.grad, c]


# Faults


class Failing(nn.Module):
    """Fails where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()
        self.first, self.rest = self.body[0], self.body[1:]
        self.error: BaseException | None = None
        self.backward_error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.error is not None:
            raise self.error
        if self.backward_error is not None:
            error = self.backward_error

            def fail(grad: torch.Tensor) -> torch.Tensor:
                raise error

            h.register_hook(fail)
        result: torch.Tensor = self.rest(h)
        return result


@case
def exceptions_and_interrupts(t: Any) -> Tensors:
    model = t.seeded(Failing)
    t.attach(model)
    x = t.tensor(8, 8)
    outer = []

    def keep(saved: torch.Tensor) -> torch.Tensor:
        outer.append(1)
        return saved

    for error in (ValueError("on purpose"), KeyboardInterrupt()):
        model.error = error
        with contextlib.suppress(ValueError, KeyboardInterrupt):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
                model(x)
        model.error, model.backward_error = None, error
        with contextlib.suppress(ValueError, KeyboardInterrupt):
            model(x).sum().backward()
        model.backward_error = None
        model.zero_grad()
        x.grad = None
    # No hook is left: what is computed outside saves its tensors as ever.
    y = x.exp()
    assert y.grad_fn._saved_result is y or torch.equal(y.grad_fn._saved_result, y)
    model(x).square().sum().backward()
    return [x.grad, *gradients(model)]
