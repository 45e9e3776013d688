"""Programs whose gradients are compared with those of plain training, bit for bit.

Each takes a `Training` and returns all that it computed: gradients, losses, outputs. It must do the
same each time, whatever moves its saved tensors.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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


# Views of one storage


@case
def chunks(t: Any) -> Tensors:
    x, w = t.tensor(4, 6, 8), t.tensor(8, 24)
    with t.context():
        q, k, v = (x @ w).chunk(3, -1)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
    y.square().sum().backward()
    return [x.grad, w.grad, y]


@case
def expands_and_slices(t: Any) -> Tensors:
    x, b = t.tensor(6, 1, 8), t.tensor(8, 8)
    with t.context():
        wide = (x * 2).expand(6, 5, 8)
        part = (b * 3)[2:7, 1::2]
        y = (wide * wide.sin()).sum(1)[:5, :4] * part * part
    y.sum().backward()
    return [x.grad, b.grad, y]


@case
def transposes_share_a_copy(t: Any) -> Tensors:
    x = t.tensor(8, 8)
    with t.context():
        h = x.exp()
        y = h @ h.t() + h[2:6].sum() * h
    y.sum().backward()
    return [x.grad, y]


@case
def as_strided(t: Any) -> Tensors:
    x = t.tensor(64)
    with t.context():
        h = (x * 2).as_strided((8, 9), (5, 3), 1)
        y = h * h.cos()
    y.sum().backward()
    return [x.grad, y]


@case
def channels_last(t: Any) -> Tensors:
    def make() -> nn.Module:
        model: nn.Module = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1)
        )
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    x = t.tensor(4, 3, 8, 8, grad=False).contiguous(memory_format=torch.channels_last)
    return attached(t, make, x)


@case
def complex_conjugates(t: Any) -> Tensors:
    x = t.tensor(8, 8, dtype=torch.complex64)
    with t.context():
        h = x * 2
        y = h.conj() * h @ h.mH
        z = torch.view_as_real(y) * h.conj().imag.unsqueeze(-1)
    z.sum().backward()
    return [x.grad, z]


@case
def other_dtypes(t: Any) -> Tensors:
    x = t.tensor(16, 32)
    with t.context():
        half = x.to(torch.bfloat16)
        y = F.max_pool1d(half.float().unsqueeze(0), 2) * 2
        y = torch.where(y > 0, y * y, y.exp())
        z = half.double().sin() * half.view(torch.int16).double()
    (y.sum() + z.sum()).backward()
    return [x.grad, y, z]


@case
def small_part_of_a_large_storage(t: Any) -> Tensors:
    x = t.tensor(64, 64)
    with t.context():
        h = x * 2
        y = (h[3] * h[3]).sum() + (h[3] * h[4]).sum() + (h[50:51] * h[3]).sum()
    y.backward()
    return [x.grad, y]


# Operators that save their outputs, and several that save one storage


@case
def outputs_saved_by_their_operator(t: Any) -> Tensors:
    x = t.tensor(8, 16)
    with t.context():
        y = x.sigmoid().softmax(-1).exp().tanh()
    y.square().sum().backward()
    return [x.grad, y]


@case
def saved_by_several(t: Any) -> Tensors:
    x, w = t.tensor(8, 16), t.tensor(16, 16)
    with t.context():
        h = (x @ w).relu()
        y = h * h.sin() + (h @ w).relu() * h
    y.sum().backward()
    return [x.grad, w.grad, y]


# Changes in place


@case
def inplace_relu(t: Any) -> Tensors:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3)
        )

    return attached(t, make, t.tensor(4, 3, 8, 8, grad=False))


@case
def inplace_where_torch_allows_it(t: Any) -> Tensors:
    x = t.tensor(8, 16)
    with t.context():
        h = x * 2
        y = h + 1
        y.mul_(3).add_(1).relu_()
        z = y.sin()
        h.add_(5)  # nobody has saved it
        y = y.cos()
    (z.sum() + y.sum() + h.sum()).backward()
    return [x.grad, z, y]


@case
def saved_again_after_a_change(t: Any) -> Tensors:
    x = t.tensor(8, 16)
    h = torch.zeros(8, 16, device=t.device)
    results = []
    for step in range(3):
        with t.context():
            h.fill_(step + 1)  # a buffer that is used in each step
            y = (x * h).sum()
        y.backward()
        results.append(x.grad.clone())
    return results


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


def small_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )


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


# Precision, functions, whole models


@case
def autocast_and_scaler(t: Any) -> Tensors:
    results = []
    for dtype in (torch.float16, torch.bfloat16):
        model = t.seeded(lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)))
        t.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(t.device.type, init_scale=64.0)
        x = t.tensor(8, 16, grad=False)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast(t.device.type, dtype):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        results += [loss.detach(), *gradients(model)]
    return results


class Cube(torch.autograd.Function):
    """Saves an input, an output, and a tensor of its own that it changes before."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        own = x.clone().mul_(2)
        y = x * x * x
        own.add_(1)
        ctx.save_for_backward(x, y, own)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, y, own = ctx.saved_tensors
        factor: torch.Tensor = 3 * x * x + 0 * y + 0 * own
        return grad * factor


class Doubled(torch.autograd.Function):
    """Changes its input in place, and saves it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = ctx.saved_tensors[0]
        return grad * 2 + 0 * x


@case
def custom_functions(t: Any) -> Tensors:
    x = t.tensor(8, 8)
    with t.context():
        h = Cube.apply(x.sin())
        h = Doubled.apply(h * 2)
        y = h.exp()
    y.sum().backward()
    return [x.grad, y]


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


@case
def sparse_and_subclass_tensors(t: Any) -> Tensors:
    x, w = t.tensor(8, 8), t.tensor(8, 4)

    class Named(torch.Tensor):
        pass

    with t.context():
        sparse = (x * (x > 0.5)).to_sparse()
        y = torch.sparse.mm(sparse, w).sin()
        z = (w * 2).as_subclass(Named)
        z = (z * z.sin()).exp()
    (y.sum() + z.sum().as_subclass(torch.Tensor)).backward()
    return [x.grad.to_dense(), w.grad, y]
