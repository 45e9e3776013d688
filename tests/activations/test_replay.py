"""Replays: what they cover, that they give every bit, and that gradients do not change by them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from bitslab import BitslabError, ModifiedInPlaceError
from bitslab.activations.replay import Replay, is_exact, replay_of, replayable

DTYPES = [torch.float32, torch.bfloat16]


def inputs(dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two inputs ``[48, 64]`` and one ``[64]``, with special values in the first."""
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(48, 64, generator=g).to(dtype) for _ in range(2))
    a[0, :4] = torch.tensor([0.0, -0.0, float("inf"), float("nan")])
    return a.requires_grad_(), b.requires_grad_(), torch.ones(64, dtype=dtype).requires_grad_()


#: Of what is neither leaf nor pointwise: two tensors and a leaf ``[64]``.
Make = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
REPLAYED: dict[str, Make] = {
    "silu": lambda a, b, w: F.silu(a),
    "gelu": lambda a, b, w: F.gelu(a),
    "gelu tanh": lambda a, b, w: F.gelu(a, approximate="tanh"),
    "transposed": lambda a, b, w: F.gelu(a.t()),
    "product": lambda a, b, w: a * b,
    "square": lambda a, b, w: a.square(),
    "by itself": lambda a, b, w: a * a,
    "broadcast": lambda a, b, w: a * w,
    "swiglu": lambda a, b, w: F.silu(a) * b,
    "cast": lambda a, b, w: F.silu(a).to(torch.float16),
    "cast of relu": lambda a, b, w: F.relu(a).to(torch.float64),
    "relu squared": lambda a, b, w: F.relu(a).square(),
    "dropout": lambda a, b, w: F.dropout(F.gelu(a), 0.3),
    "dropout of a leaf": lambda a, b, w: F.dropout(w, 0.3),
    "fused dropout": lambda a, b, w: torch.native_dropout(F.silu(a), 0.3, True)[0],
    "scaled": lambda a, b, w: F.silu(a) * 2.5,
}
NOT_REPLAYED: dict[str, Make] = {
    "sum": lambda a, b, w: a + b,
    "matrix product": lambda a, b, w: a @ b.t(),
    "relu": lambda a, b, w: F.relu(a),  # which its own node keeps
    "softmax": lambda a, b, w: F.softmax(a, -1),
    "view": lambda a, b, w: F.silu(a).view(-1),
    "leaf": lambda a, b, w: w,
    "unsaved factor": lambda a, b, w: a * 2.0,
    "constant factor": lambda a, b, w: a * torch.full_like(a, 0.5).detach(),
    "cast of what is not saved": lambda a, b, w: a.to(torch.float64),
    "no gradient": lambda a, b, w: F.silu(a.detach()),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", REPLAYED)
def test_pointwise_operations_are_computed_again(name: str, dtype: torch.dtype) -> None:
    a, b, w = inputs(dtype)
    t = REPLAYED[name](a + 0, b + 0, w)
    found = replayable(t)
    assert found is not None
    again = found.tensor()
    assert not again.requires_grad
    assert again.stride() == t.stride()
    assert again.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()
    other = replay_of(REPLAYED[name](*(x + 0 if x.dim() > 1 else x for x in inputs(dtype, 1))))
    assert other is not None
    assert other.signature == found.signature


@pytest.mark.parametrize("name", NOT_REPLAYED)
def test_other_tensors_are_left_alone(name: str) -> None:
    a, b, w = inputs(torch.float32)
    assert replayable(NOT_REPLAYED[name](a + 0, b + 0, w)) is None


def test_what_comes_out_otherwise_is_not_exact() -> None:
    a, b, _ = inputs(torch.float32)
    t = F.silu(a + 0)
    found = replay_of(t)
    assert found is not None
    changed = t.detach().clone()
    assert is_exact(found, changed)
    changed[1, 1] += 1e-7
    assert not is_exact(found, changed)
    zero = t.detach().clone()
    assert zero[0, 0] == 0
    zero[0, 0] = -zero[0, 0]  # equal as numbers, not as bits
    assert not is_exact(found, zero)
    with torch.no_grad():
        other = Replay(("x",), (48, 64), (1, 48), torch.float32, "cpu", lambda: b.detach())
    assert not is_exact(other, b)
    with pytest.raises(BitslabError, match=r"strides \(64, 1\), saved was .* and \(1, 48\)"):
        other.tensor()


class _Replaying(torch.autograd.graph.saved_tensors_hooks):
    """Replays all that it can."""

    def __init__(self) -> None:
        self.replayed = 0

        def pack(t: torch.Tensor) -> Any:
            return replayable(t) or t.detach()

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, Replay):
                self.replayed += 1
                return packed.tensor()
            assert isinstance(packed, torch.Tensor)
            return packed

        super().__init__(pack, unpack)


class Block(torch.nn.Module):
    """SwiGLU and GELU, with dropout and a cast."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down, self.more = (
            torch.nn.Linear(32, 32, dtype=dtype) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(F.silu(self.gate(x)) * self.up(x))
        y = self.more(F.dropout(F.gelu(y), 0.2))
        return F.silu(y).to(torch.float32).pow(2).sum()


def gradients(dtype: torch.dtype, replaying: bool, times: int) -> tuple[list[torch.Tensor], int]:
    block = Block(dtype)
    torch.manual_seed(1)
    x = torch.randn(16, 32, dtype=dtype)
    hooks = _Replaying()
    torch.manual_seed(2)
    if replaying:
        with hooks:
            loss = block(x)
    else:
        loss = block(x)
    for i in range(times):
        loss.backward(retain_graph=i + 1 < times)
    return [p.grad for p in block.parameters() if p.grad is not None], hooks.replayed


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_the_same(dtype: torch.dtype, times: int) -> None:
    plain, _ = gradients(dtype, False, times)
    replayed, count = gradients(dtype, True, times)
    assert len(plain) == 8
    assert count >= 4 * times
    for expected, found in zip(plain, replayed, strict=True):
        assert torch.equal(expected, found)


def test_second_derivatives_are_the_same() -> None:
    def second(replaying: bool) -> list[torch.Tensor]:
        block = Block(torch.float64)
        torch.manual_seed(2)
        x = torch.randn(16, 32, dtype=torch.float64, requires_grad=True)
        if replaying:
            with _Replaying():
                loss = block(x)
                (first,) = torch.autograd.grad(loss, x, create_graph=True)
        else:
            loss = block(x)
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), [*block.gate.parameters()]))

    for expected, found in zip(second(False), second(True), strict=True):
        assert torch.equal(expected, found)


def test_no_graph_is_kept_alive() -> None:
    a, b, _ = inputs(torch.float32)
    with _Replaying():
        hidden = F.silu(a + 0) * (b + 0)
        loss = (hidden @ hidden.t()).sum()
    nodes = [weakref.ref(hidden.untyped_storage())]
    gc.disable()
    try:
        del hidden, loss
        assert nodes[0]() is None
    finally:
        gc.enable()


def test_changed_leaves_and_freed_graphs_are_noticed() -> None:
    a, _, w = inputs(torch.float32)
    t = F.dropout(w, 0.3)
    found = replay_of(t)
    assert found is not None
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(ModifiedInPlaceError, match="that a replay reads"):
        found.tensor()
    t = F.silu(a + 0)
    found = replay_of(t)
    assert found is not None
    t.sum().backward()
    with pytest.raises(BitslabError, match="SiluBackward0: the part of the graph .* was freed"):
        found.tensor()


def test_what_is_saved_under_autocast_is_computed_as_it_was() -> None:
    a, b, _ = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        t = F.silu((a + 0) @ torch.eye(64)) * b.bfloat16()
        found = replayable(t)
    assert t.dtype == torch.bfloat16
    assert found is not None
    assert is_exact(found, t)


@pytest.mark.parametrize("name", [*REPLAYED, *NOT_REPLAYED])
def test_nothing_is_read_to_find_a_replay(name: str) -> None:
    make = {**REPLAYED, **NOT_REPLAYED}[name]
    read: list[torch.Tensor] = []

    def unpack(t: torch.Tensor) -> torch.Tensor:
        read.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
        a, b, w = inputs(torch.float32)
        t = make(a * 1.0, b * 1.0, w)
        t = F.softmax(t, -1) if t.dim() and t.requires_grad else t
        replay_of(t)
        replay_of(make(a * 1.0, b * 1.0, w))
    assert not read
