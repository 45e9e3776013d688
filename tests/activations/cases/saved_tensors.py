"""Views of one storage, operators that save their outputs, precision, functions."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from tests.activations.cases.training import Tensors, attached, case, gradients, small_model

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


class Holds(torch.autograd.Function):
    """Saves tensors, and its backward pass keeps what it gets, with strides and bits of views."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor, found: Tensors, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.found = found
        return w * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        for each in ctx.saved_tensors:
            ctx.found.append(each.clone().resolve_conj().resolve_neg())
            ctx.found.append(torch.tensor([*each.stride(), each.is_conj(), each.is_neg()]))
        return grad * 2, None, *(None for _ in ctx.saved_tensors)


@case
def views_of_other_dtypes_at_odd_places(t: Any) -> Tensors:
    """Small parts of a large storage, of which one holds the bytes of the next one."""
    w, real = t.tensor(8), t.tensor(4099, grad=False)
    odd = torch.arange(4096, device=t.device).to(torch.uint8)
    found: Tensors = []
    with t.context():
        pairs = real[4:44].view(20, 2), real[4:2004].view(1000, 2)
        views = [torch.view_as_complex(each) for each in pairs]
        y = Holds.apply(
            w, found, odd[1:400], odd[4:84].view(torch.float32), odd[6:206].view(torch.int16)
        )
        z = Holds.apply(w, found, real[1:52], views[0], real, views[1], views[0].conj())
    (y.sum() + z.sum()).backward()
    return [w.grad, *found]


@case
def chunks_with_versions_of_their_own(t: Any) -> Tensors:
    """As gates of an LSTM: they share a storage, and are changed in place one after the other."""
    w = t.tensor(8)
    found: list[torch.Tensor] = []
    with t.context():
        y = torch.zeros((), device=t.device)
        for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int64):
            for dim in (0, 1):
                m = t.tensor(24, 96, grad=False).to(dtype)
                a, b, c = torch.unsafe_chunk(m, 3, dim)
                views = a, a.t(), a[1:5], a[:, 3], a[2:3].expand(5, -1), a[::2, ::3], a.conj()
                y = y + Holds.apply(w, found, *views).sum()
                b.mul_(2)
                y = (
                    y
                    + Holds.apply(
                        w, found, b, c.detach().t(), c.unsqueeze(0).expand(3, -1, -1)
                    ).sum()
                )
    y.backward()
    return [w.grad, *found]


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


# Precision, functions


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


@case
def nested_tensors(t: Any) -> Tensors:
    x, w = [t.tensor(rows, 8) for rows in (3, 6, 2)], t.tensor(8, 8)
    results = []
    for layout in (torch.strided, torch.jagged):
        with warnings.catch_warnings(), t.context():
            warnings.filterwarnings("ignore", message=".*nested tensors is in prototype")
            nested = torch.nested.as_nested_tensor(x, layout=layout)
            y = F.linear(nested * 2, (w * 3).sin()).relu()
            y = y * y
        torch.stack([each.sum() for each in y.unbind()]).sum().backward()
        results += [*y.unbind(), *(each.grad.clone() for each in (*x, w))]
    return results


@case
def fake_tensors(t: Any) -> Tensors:
    """Of shapes alone, as in tracing: they have no memory."""
    model = t.seeded(small_model)
    t.attach(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ones(16, 8, device=t.device, requires_grad=True)
        with t.context():
            made = (fake * 2).exp() * fake.sin()
        made.sum().backward()
        model(fake)
    assert fake.grad is not None and fake.grad.shape == fake.shape
    x = t.tensor(16, 8)
    model(x).square().sum().backward()
    return [x.grad, *gradients(model)]
