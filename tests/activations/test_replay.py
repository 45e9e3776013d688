"""Replays: what they cover, that they give every bit, and that gradients do not change by them."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bitslab import BitslabError, ModifiedInPlaceError
from bitslab.activations.identity import root_of
from bitslab.activations.matmul_flags import Flags, matmul_flags, under_flags
from bitslab.activations.operands import Operands
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
    "matrix product": lambda a, b, w: a @ b.t(),
    "of more dimensions": lambda a, b, w: torch.mm(a, b.t()).view(6, 8, 48) @ (b * 2),
    "of a batch": lambda a, b, w: torch.bmm(a.view(4, 12, 64), b.view(4, 64, 12)),
    "product and vector": lambda a, b, w: torch.addmm(w, a, b.t() @ b, beta=2, alpha=3),
}
NOT_REPLAYED: dict[str, Make] = {
    "sum": lambda a, b, w: a + b,
    "product with a constant": lambda a, b, w: a @ b.detach().t(),
    "product of a constant": lambda a, b, w: a.detach() @ b.t(),
    "constant and product": lambda a, b, w: torch.addmm(w.detach(), a, (b.t() @ b)),
    "replay and product": lambda a, b, w: torch.addmm(F.silu(a), a, (b.t() @ b)),
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
    a, b, w = inputs(dtype, 1)
    other = replay_of(REPLAYED[name](a + 0, b + 0, w))
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


class Linear(torch.nn.Module):
    """A layer whose output is saved, with a bias or without."""

    def __init__(self, bias: bool = True, autocast: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(32, 48, bias=bias)
        self.autocast = autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            made: torch.Tensor = self.layer(x)
            return made


def x_of(*shape: int, requires_grad: bool = True) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=g, requires_grad=requires_grad)


@contextlib.contextmanager
def recorded(known: Iterable[torch.Tensor | None]) -> Iterator[Operands]:
    """Record what is saved, as a pass of a model with these parameters does."""
    operands = Operands(known)
    operands.unpack = lambda t: t
    pack = operands.recording(lambda t: t.detach())
    with torch.autograd.graph.saved_tensors_hooks(pack, operands.unpack):
        yield operands


@pytest.mark.parametrize("autocast", [False, True], ids=["as it is", "autocast"])
@pytest.mark.parametrize("shape", [(16, 32), (4, 6, 32)], ids=["rows", "batch of rows"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_what_linear_layers_return_is_computed_again(
    bias: bool, shape: tuple[int, ...], autocast: bool
) -> None:
    model = Linear(bias, autocast)
    with recorded(model.parameters()) as operands:
        root = root_of(model(x_of(*shape) * 2))
        found = replayable(root, operands)
    assert found is not None
    assert is_exact(found, root)
    if bias:
        with torch.no_grad():  # as a program may that is not replayed: no node saves it
            model.layer.bias.add_(1)
        assert is_exact(found, root)


def test_changed_weights_are_noticed() -> None:
    model = Linear()
    root = root_of(model(x_of(16, 32) * 2))
    found = replayable(root)
    assert found is not None
    with torch.no_grad():
        model.layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.tensor()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_no_replay_reads_weights_that_are_none_of_the_models(bias: bool) -> None:
    """Weights that are gathered for a layer, and emptied behind it."""
    model = Linear(bias)
    x = x_of(16, 32)
    for known in ([], [model.layer.bias], [model.layer.weight] if bias else []):
        with recorded(known) as operands:
            assert replay_of(root_of(model(x * 2)), operands) is None
    with recorded(model.parameters()) as operands:
        assert replay_of(root_of(model(x * 2)), operands) is not None
        assert replay_of(root_of(model(x)), operands) is None, "a leaf of whoever calls"
    operands = Operands(model.parameters())
    model.layer.weight.data = model.layer.weight.data.clone()  # gathered
    operands.unpack = lambda t: t
    pack = operands.recording(lambda t: t.detach())
    with torch.autograd.graph.saved_tensors_hooks(pack, operands.unpack):
        assert replay_of(root_of(model(x * 2)), operands) is None


def test_a_bias_that_was_changed_since_the_pass_began_is_not_read() -> None:
    """It is saved by no node: the layer may have read another one."""
    model = Linear()
    with recorded(model.parameters()) as operands:
        root = root_of(model(x_of(16, 32) * 2))
        assert replay_of(root, operands) is not None
        with torch.no_grad():
            model.layer.bias.add_(1)
        assert replay_of(root, operands) is None


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_weights_that_are_emptied_are_noticed(bias: bool) -> None:
    """As FSDP2 does behind a layer with those that it kept for the next micro-batch."""
    model = Linear(bias)
    with recorded(model.parameters()) as operands:
        root = root_of(model(x_of(16, 32) * 2))
        found = replay_of(root, operands)
        assert found is not None
        weight = model.layer.weight.untyped_storage()
        nbytes, kept = weight.nbytes(), model.layer.weight.detach().clone()
        operands.close()
        assert not operands.unsure
        weight.resize_(0)
        assert replay_of(root, operands) is None
        with pytest.raises(BitslabError, match="a weight that it reads was given up"):
            found.tensor()
        operands.close()
        assert operands.unsure == set(found.weights)
    weight.resize_(nbytes)
    with torch.no_grad():
        model.layer.weight.copy_(kept)
    if bias:
        with recorded(model.parameters()) as operands:
            root = root_of(model(x_of(16, 32) * 2))
            model.layer.bias.untyped_storage().resize_(0)
            assert replay_of(root, operands) is None


def test_weights_in_memory_that_others_use_are_not_read() -> None:
    flat = torch.nn.Parameter(torch.zeros(2 * 32 * 48))
    one, other = Linear(False), Linear(False)
    x = x_of(16, 32)
    one.layer.weight.data, other.layer.weight.data = flat.data.view(2, 48, 32).unbind()
    weights = one.layer.weight, other.layer.weight
    with recorded(weights) as operands:
        assert replay_of(root_of(one(x * 2)), operands) is None
    # One after another: the second one is not the model's when the pass begins.
    weights[1].data = torch.zeros(48, 32)
    with recorded(weights) as operands:
        found = replay_of(root_of(one(x * 2)), operands)
        assert found is not None and not found.weights.keys() & operands.unsure
        weights[1].data = weights[0].data
        other(x * 2)
        assert found.weights.keys() & operands.unsure
        assert replay_of(root_of(one(x * 2)), operands) is None


def test_what_others_hooks_were_given_is_not_read() -> None:
    """A checkpoint computes its region again for each read, and counts these."""
    model = Linear()

    def region(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = model(F.silu(x))
        return made

    for make, replayed in ((region, True), (checkpointed(region), False)):
        for following in (region, checkpointed(lambda y: y[:, :32])):
            with recorded(model.parameters()) as operands:
                first = make(x_of(16, 32) * 2)
                following(first[:, :32])  # a region saves what it is given, by no node
                assert (replay_of(root_of(first), operands) is not None) == replayed
                assert replay_of(first.square(), operands) is not None, "saved outside of it"


def checkpointed(region: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda x: checkpoint(region, x, use_reentrant=False)


def test_outputs_that_were_changed_in_place_are_no_replays() -> None:
    model = Linear()
    for make in (model, lambda x: F.silu(x)):
        with recorded(model.parameters()) as operands:
            t = make(x_of(16, 32) * 2)
            assert replay_of(root_of(t), operands) is not None
            with torch.no_grad():  # which autograd does not see
                t[3] = 0
            assert replay_of(root_of(t), operands) is None


def test_products_of_operands_at_odd_addresses_are_no_replays() -> None:
    """They come back at even ones, where products may have other bits."""
    model = Linear()
    for first, replayed in ((0, True), (1, False)):
        with recorded(model.parameters()) as operands:
            x = x_of(16 * 32 + 1) * 2
            t = model(x[first : first + 16 * 32].view(16, 32))
            assert (replay_of(root_of(t), operands) is not None) == replayed


def test_products_have_the_settings_that_they_were_made_under() -> None:
    model = Linear()
    before = torch.get_float32_matmul_precision()
    used: list[Flags] = []
    addmm = torch.addmm

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        used.append(matmul_flags())
        return addmm(*args, **options)

    try:
        torch.set_float32_matmul_precision("medium")
        torch.backends.mkldnn.set_flags(False)
        found = replay_of(root_of(model(x_of(16, 32) * 2)))
        flags = matmul_flags()
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.mkldnn.set_flags(True)
    assert found is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "addmm", watched)
        found.tensor()
    assert used == [flags] != [matmul_flags()]
    assert torch.get_float32_matmul_precision() == before
    assert torch.backends.mkldnn.enabled


def set_precisely(precision: str) -> Callable[[], None]:
    return lambda: torch.set_float32_matmul_precision(precision)


def set_of_cuda(name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(torch.backends.cuda.matmul, name, value)


@pytest.mark.parametrize(
    "change",
    [
        set_precisely("medium"),
        set_of_cuda("allow_tf32", True),
        set_of_cuda("allow_bf16_reduced_precision_reduction", False),
        lambda: setattr(torch.backends.mkldnn, "enabled", False),
    ],
    ids=["precision", "TF32", "reductions", "oneDNN"],
)
def test_settings_are_left_as_they_were(change: Callable[[], None], restored: None) -> None:
    before = settings()
    flags = matmul_flags()
    change()
    changed = settings()
    assert changed != before
    with under_flags(flags):
        assert matmul_flags() == flags
    assert settings() == changed


def settings() -> list[Any]:
    """Return all settings of products and convolutions."""
    cuda, mkldnn = torch.backends.cuda.matmul, torch.backends.mkldnn
    found: list[Any] = [torch.get_float32_matmul_precision(), cuda.allow_tf32]
    for owner in (cuda, mkldnn, *(getattr(mkldnn, n, None) for n in ("matmul", "conv", "rnn"))):
        found.append(getattr(owner, "fp32_precision", None))
    found += [cuda.allow_fp16_reduced_precision_reduction, mkldnn.enabled]
    return [*found, cuda.allow_bf16_reduced_precision_reduction]


@pytest.fixture
def restored() -> Iterator[None]:
    """Let torch's settings be the default ones behind a test."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    setattr(torch.backends.mkldnn, "enabled", True)  # noqa: B010 - torch's types have it read


@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_what_frozen_layers_did_not_save_is_not_replayed(frozen: str) -> None:
    model = Linear()
    if frozen != "input":
        getattr(model.layer, frozen).requires_grad_(False)
    with recorded(model.parameters()) as operands:
        t = root_of(model(x_of(16, 32, requires_grad=frozen != "input") * 2))
        assert t.requires_grad
        assert replay_of(t, operands) is None
