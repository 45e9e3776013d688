"""Linear layers of units that are kept packed, multiplied while they are decoded."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from bitslab.engine.advisor import FusedTimes
from bitslab.errors import ArgumentError
from bitslab.offload import find_offloaded, offload_report, offload_weights, restore_weights

WIDTH, INNER = 256, 512


class Block(nn.Module):
    def __init__(self, other: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x)
        if self.other is not None:
            y = self.other(y)
        y = self.down(torch.relu(self.up(y)))
        return x + y


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return with_normal_weights(nn.Sequential(Block(), Block()).bfloat16().eval())


def with_normal_weights(model: nn.Sequential) -> nn.Sequential:
    """Give weights the distribution of trained ones; torch's are uniform, with another plan."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight") and parameter.dim() > 1:
                parameter.normal_(0, 0.05)
    return model


def pack(model: nn.Sequential, **options: Any) -> nn.Sequential:
    offload_weights(
        model, execution_device="cpu", keep="packed", min_bytes=0, progress=False, **options
    )
    return model


def x_of(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, WIDTH, generator=generator).bfloat16()


def stats(model: nn.Module) -> dict[str, int]:
    return dict(offload_report(model).stats)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    # Both round products of up to 512 terms, summed in float32, to bfloat16.
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("shape", [(1,), (16,), (1, 3), (2, 8)], ids=str)
def test_few_rows_are_multiplied_and_nothing_is_decoded(shape):
    plain, packed = model_of(), pack(model_of(), fused=True)
    x = x_of(*shape)
    with torch.inference_mode():
        found = packed(x)
        close(found, plain(x))
    assert found.shape == x.shape
    counts = stats(packed)
    assert counts["fused"] == 2 and counts["loads"] == counts["buffers"] == 0
    assert "in another order" in str(offload_report(packed))


@pytest.mark.parametrize("kind", ["pruned", "parametrized", "buffer"])
def test_a_bias_that_is_no_parameter_is_added(kind):
    plain, packed = model_of(), model_of()
    for model in (plain, packed):
        for block in model:
            up: Any = block.up
            with torch.no_grad():
                up.bias.normal_(0, 3, generator=torch.Generator().manual_seed(2))
            if kind == "pruned":
                prune.l1_unstructured(up, "bias", amount=0.3)
            elif kind == "parametrized":
                parametrize.register_parametrization(up, "bias", nn.Tanh())
            else:
                bias = up.bias.detach()
                del up.bias
                up.register_buffer("bias", bias)
    pack(packed, fused=True)
    x = x_of(3)
    with torch.no_grad():
        close(packed(x), plain(x))
    assert stats(packed)["fused"] == 2


def test_an_input_by_name_is_multiplied_too():
    class Named(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.down(input=torch.relu(self.up(input=self.norm(x))))
            return found

    torch.manual_seed(0)
    model = with_normal_weights(nn.Sequential(Named(), Named()).bfloat16().eval())
    x = x_of(2)
    with torch.no_grad():
        expected = model(x)
        close(pack(model, fused=True)(x), expected)
    counts = stats(model)
    assert counts["fused"] == 2 and counts["loads"] == 0


def test_without_memory_to_measure_a_pass_is_decoded(monkeypatch):
    def times(*_: Any) -> FusedTimes:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("bitslab.offload.fused.fused_times", times)
    plain, packed = model_of(), pack(model_of(), fused="auto")
    x = x_of(2)
    with torch.no_grad():
        assert torch.equal(packed(x), plain(x))
        monkeypatch.setattr("bitslab.offload.fused.fused_times", lambda *_: FusedTimes(1.0, 2.0))
        close(packed(x), plain(x))
    assert stats(packed)["fused"] == 2


@pytest.mark.parametrize(
    "case", ["default", "seventeen-rows", "no-rows", "gradients", "autocast", "float32"]
)
def test_else_they_are_decoded_with_the_same_bits(case):
    plain, packed = model_of(), pack(model_of(), fused=case != "default")
    x = x_of({"seventeen-rows": 17, "no-rows": 0}.get(case, 4))
    grad = case in ("gradients", "float32")
    with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=case == "autocast"):
        x = x.requires_grad_(grad)
        found, expected = packed(x), plain(x)
        assert torch.equal(found, expected)
        if grad:
            gradient = torch.autograd.grad(found.sum(), x)[0]
            assert torch.equal(gradient, torch.autograd.grad(expected.sum(), x)[0])
    assert stats(packed)["fused"] == 0 and stats(packed)["loads"] > 0
    assert "order" not in str(offload_report(packed))


def test_prompts_are_decoded_and_tokens_are_not_in_turn():
    plain, packed = model_of(), pack(model_of(), fused=True)
    with torch.no_grad():
        for rows in (40, 1, 1, 30, 2):
            x = x_of(rows)
            found, expected = packed(x), plain(x)
            close(found, expected)
            assert rows <= 16 or torch.equal(found, expected)
    assert stats(packed)["fused"] == 6


@pytest.mark.parametrize(
    "other",
    [nn.Conv1d(WIDTH, WIDTH, 1), Scaled(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).double()],
    ids=["another-layer", "another-forward", "another-dtype"],
)
def test_units_with_packed_weights_of_another_kind_are_decoded(other):
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = other

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dtype = next(self.inner.parameters()).dtype
            y: torch.Tensor = x.to(dtype)
            y = (
                self.inner(y[..., None])[..., 0]
                if isinstance(self.inner, nn.Conv1d)
                else self.inner(y)
            )
            return y.to(x.dtype)

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        wrapped = Wrapped()
        model = nn.Sequential(Block(), Block(wrapped)).bfloat16()
        if type(other) is nn.Linear:
            wrapped.double()
        return with_normal_weights(model)

    plain = made()
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    x = x_of(2)
    with torch.no_grad():
        expected = plain(x)
        packed = pack(plain, fused=True)
        close(packed(x), expected)
    assert stats(packed)["fused"] == 1 and stats(packed)["loads"] == 1
    restore_weights(packed)
    assert all(torch.equal(value, state[name]) for name, value in packed.state_dict().items())


def test_units_of_raw_tensors_are_used_in_place_and_nothing_is_decoded_ahead():
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER)).bfloat16()
        return with_normal_weights(model)

    plain, packed = made(), pack(made(), fused=True)
    with torch.no_grad():
        close(packed(x_of(2)), plain(x_of(2)))
        assert stats(packed)["loads"] == 0 and stats(packed)["fused"] == 3
        assert torch.equal(packed(x_of(20)), plain(x_of(20)))
    x = x_of(20).requires_grad_()
    (gradient,) = torch.autograd.grad(packed(x).sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(plain(x).sum(), x)[0])
    assert stats(packed)["fused"] == 3


def test_hooks_of_linear_layers_run_and_see_the_product():
    packed = pack(model_of(), fused=True)
    seen = []
    up: Any = packed[0].up
    up.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    up.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    plain = model_of()
    plain_up: Any = plain[0].up
    plain_up.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with torch.no_grad():
        close(packed(x_of(3)), plain(x_of(3)))
    assert seen == [(3, INNER)] and stats(packed)["fused"] == 2


def test_a_weight_that_was_replaced_is_used_as_it_is():
    packed, plain = pack(model_of(), fused=True), model_of()
    weight = nn.Parameter(torch.zeros(INNER, WIDTH, dtype=torch.bfloat16), requires_grad=False)
    for model in (packed, plain):
        up: Any = model[0].up
        up._parameters["weight"] = weight
    with torch.no_grad():
        close(packed(x_of(3)), plain(x_of(3)))


def test_restoring_takes_the_fused_forward_passes_off():
    model = model_of()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    pack(model, fused=True)
    assert "forward" in model[0].up.__dict__
    with torch.no_grad():
        model(x_of(1))
    restore_weights(model)
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys()
    with torch.no_grad():
        assert torch.equal(model(x_of(1)), model_of()(x_of(1)))


def test_a_unit_that_raises_leaves_its_handles_and_can_be_used_again():
    packed, plain = pack(model_of(), fused=True), model_of()
    with torch.no_grad():
        with pytest.raises(RuntimeError):
            packed(x_of(3)[:, :100])
        close(packed(x_of(3)), plain(x_of(3)))
        assert torch.equal(packed(x_of(20)), plain(x_of(20)))


def test_threads_with_few_and_many_rows_in_one_unit():
    packed, plain = pack(model_of(), fused=True), model_of()
    errors: list[BaseException] = []

    def run(rows: int) -> None:
        try:
            x = x_of(rows)
            with torch.no_grad():
                expected = plain(x)
                for _ in range(20):
                    close(packed(x), expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rows,)) for rows in (1, 30, 4, 25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_compiled_models_multiply_outside_of_their_graphs():
    packed, plain = pack(model_of(), fused=True), model_of()
    compiled = torch.compile(packed, backend="eager")
    with torch.no_grad():
        close(compiled(x_of(2)), plain(x_of(2)))
        assert torch.equal(compiled(x_of(20)), plain(x_of(20)))
    assert stats(packed)["fused"] == 2


@pytest.mark.parametrize("faster", [True, False], ids=["faster", "slower"])
def test_auto_is_fused_where_that_was_measured_to_be_faster(monkeypatch, faster):
    asked: list[tuple[str, int]] = []

    def times(name: str, rows: int, device: torch.device, prepare: Any) -> FusedTimes:
        asked.append((name, rows))
        fused, decoded = prepare(rows)
        fused(), decoded()
        return FusedTimes(1.0, 2.0) if faster else FusedTimes(2.0, 1.0)

    monkeypatch.setattr("bitslab.offload.fused.fused_times", times)
    packed, plain = pack(model_of(), fused="auto"), model_of()
    with torch.no_grad():
        for rows in (3, 4, 40, 4):
            found, expected = packed(x_of(rows)), plain(x_of(rows))
            close(found, expected)
            assert faster or torch.equal(found, expected)
    # Both weights of both units, for one number of rows: the power of two.
    assert [rows for _, rows in asked] == [4] * 4
    assert {name.split(" ibp")[0] for name, _ in asked} == {"512 x 256", "256 x 512"}
    assert stats(packed)["fused"] == (6 if faster else 0)


@pytest.mark.parametrize("fused", ["always", None, 1, "True"], ids=repr)
def test_other_values_are_refused(fused):
    model = model_of()
    with pytest.raises(ArgumentError, match="fused: .*accepted are True, False and 'auto'"):
        pack(model, fused=fused)
    assert not hasattr(model, "_bitslab_offload")


def test_only_units_that_are_kept_packed_are_fused():
    packed = model_of()
    offload_weights(
        packed,
        execution_device="cpu",
        keep={"0": "packed", "1": "host"},
        min_bytes=0,
        fused=True,
        progress=False,
    )
    with torch.no_grad():
        close(packed(x_of(2)), model_of()(x_of(2)))
    assert stats(packed)["fused"] == 1
    assert [tier for tier in find_offloaded(packed).report().to_dict()["units"]][0][
        "tier"
    ] == "packed"
