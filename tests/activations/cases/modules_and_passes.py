"""Modules of many kinds, and the orders in which backward passes run."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from typing import Any

import torch
from torch import nn

from tests.activations.cases.training import Tensors, attached, case, gradients, small_model

# Modules


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for _ in range(3):
            h = self.body(h).relu()
        logits: torch.Tensor = self.head(h)
        return logits


@case
def tied_and_called_several_times(t: Any) -> Tensors:
    return attached(t, Tied, torch.arange(12, device=t.device).view(3, 4))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[1], 8)
        out = []
        for step in x:
            h = self.cell(step, h)
            out.append(h)
        result: torch.Tensor = self.lstm(torch.stack(out))[0]
        return result


@case
def recurrent(t: Any) -> Tensors:
    return attached(t, Recurrent, t.tensor(5, 4, 8, grad=False))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.25, batch_first=True)


@case
def dropout_and_random_numbers(t: Any) -> Tensors:
    torch.manual_seed(11)
    results = attached(t, attention, t.tensor(3, 5, 16, grad=False))
    return [*results, torch.get_rng_state()]


@case
def frozen_parts_eval_and_no_grad(t: Any) -> Tensors:
    model = t.seeded(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Tanh()))
    model[1].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    t.attach(model)
    x = t.tensor(16, 8)
    with torch.no_grad():
        before = model(x)
    model.eval()
    evaluated = model(x)
    evaluated.sum().backward()
    model.train()
    model(x).sin().sum().backward()
    with torch.inference_mode():
        after = model(x).clone()
    return [before, after, evaluated, x.grad, *gradients(model)]


@case
def arguments_by_name_and_structures(t: Any) -> Tensors:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
            return {"y": self.linear(x).relu() * scale, "pair": (x * 2, None)}

    model = t.seeded(Named)
    t.attach(model)
    x = t.tensor(4, 8)
    found = model(x, scale=2.0)
    (found["y"].square().sum() + found["pair"][0].sum()).backward()
    return [x.grad, *gradients(model)]


# Backward passes


@case
def retained_graph(t: Any) -> Tensors:
    x = t.tensor(8, 16)
    with t.context():
        h = x.exp()
        y = (h @ h.t() * 2).tanh().sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward(retain_graph=True)
    y.backward()
    return [first, x.grad]


@case
def double_backward(t: Any) -> Tensors:
    x, w = t.tensor(4, 8), t.tensor(8, 8)
    with t.context():
        y = ((x @ w).tanh() @ w).sigmoid().sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        z = g.square().sum()
    z.backward()
    return [x.grad, w.grad, g]


@case
def double_backward_outside(t: Any) -> Tensors:
    x, w = t.tensor(4, 8), t.tensor(8, 8)
    with t.context():
        y = ((x @ w).tanh() @ w).exp().sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    g.square().sum().backward()
    return [x.grad, w.grad, g]


@case
def grad_of_a_part(t: Any) -> Tensors:
    x = t.tensor(8, 8)
    with t.context():
        h = (x * 2).sin()
        y, z = (h * h).sum(), (h @ h).exp().sum()
    first = torch.autograd.grad(y, h, retain_graph=True)
    second = torch.autograd.grad(y, x, retain_graph=True)
    third = torch.autograd.grad(z, x)
    return [*first, *second, *third]


@case
def graph_dropped_half_way(t: Any) -> Tensors:
    x = t.tensor(8, 8)
    with t.context():
        h = x.exp()
        y = (h * h).sum()
        z = (h @ h).sin().sum()
    del z
    gc.collect()
    y.backward()
    return [x.grad]


@case
def in_another_thread(t: Any) -> Tensors:
    model = t.seeded(small_model)
    t.attach(model)
    x = t.tensor(8, 8)
    loss = model(x).square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return [x.grad, *gradients(model)]


@case
def in_another_order(t: Any) -> Tensors:
    model = t.seeded(small_model)
    t.attach(model)
    inputs = [t.tensor(8, 8) for _ in range(4)]
    results = []
    for order in ((3, 1, 0, 2), (0, 1, 2, 3), (2, 3, 1, 0)):
        losses = [model(x).square().sum() for x in inputs]
        for i in order:
            losses[i].backward()
        results += [x.grad.clone() for x in inputs]
    return results + gradients(model)


@case
def accumulated_micro_batches(t: Any) -> Tensors:
    model = t.seeded(small_model)
    t.attach(model)
    for _ in range(2):
        losses = [model(t.tensor(8, 8)).square().mean() for _ in range(3)]
        sum(losses[1:], losses[0]).backward()
    return gradients(model)


# Whole models


@case
def copied_pickled_moved_cast_detached(t: Any) -> Tensors:
    model = t.seeded(small_model)
    before = set(model.__dict__)
    t.attach(model)
    x = t.tensor(8, 8)
    results = []
    copies = [copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))]
    for each in (model, *copies):
        each.zero_grad()
        each(x).square().sum().backward()
        results += gradients(each)
    for each in copies:
        assert set(each.__dict__) == before and type(each) is type(model)
    model.double().float().to("cpu").to(t.device)
    model(x).square().sum().backward()
    results += [*gradients(model), *model.state_dict().values()]
    loss = model(x).square().sum()
    t.detach(model)
    assert set(model.__dict__) == before
    loss.backward()
    model(x).square().sum().backward()
    return [*results, x.grad, *gradients(model)]
