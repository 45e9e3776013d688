"""Lossy codecs: which tensors, at which rate in which epoch, and what the report says of it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bitslab
from bitslab import ArgumentError, ArgumentTypeError
from bitslab.activations import Lossy
from bitslab.activations.lossy import LossyRate
from bitslab.activations.sites import is_exact
from bitslab.engine.advisor import LossyRange, SiteRecord, SwapLink
from bitslab.engine.codecs import ZfpCodec
from bitslab.engine.kernels.cuda.runner import do_nothing
from bitslab.engine.transfer import wait_on_host

pytestmark = pytest.mark.usefixtures("one_thread")

SLOW, FAST = 1e6, 1e13


def saved_by(program: Callable[[torch.Tensor], torch.Tensor]) -> list[bool]:
    """Return of each tensor that a program saves whether it must keep every bit."""
    found: list[bool] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        found.append(is_exact(t))
        return t.detach()

    x = torch.randn(4, 6, 8, 8, requires_grad=True) * 1
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        program(x)
    return found


#: Of each tensor that is saved, in order, whether it must keep every bit.
EXACT: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[bool]]] = {
    "an output": (lambda x: x.relu(), [False]),
    "two of one dimension": (lambda x: x.flatten().exp(), [True]),
    "indices of a pool": (lambda x: F.max_pool2d(x, 2), [False, True]),
    "a mask of bools": (lambda x: x.where(x > 0, 0), [True]),
    "a mask of floats": (lambda x: F.dropout(x, 0.5), [True]),
    "statistics of groups": (lambda x: F.group_norm(x, 3), [False, True, True]),
    "statistics of rows": (lambda x: F.layer_norm(x, (8,)), [False, True, True]),
    "a deviation that has a gradient": (
        lambda x: x * x.square().mean(-1, keepdim=True).rsqrt(),
        [False, True, True, False],
    ),
    "batch norm's": (nn.BatchNorm2d(6), [False, *[True] * 5]),
    "an input": (lambda x: x.detach() * x, [True]),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_must_keep_every_bit(name: str) -> None:
    program, expected = EXACT[name]
    assert saved_by(program) == expected


def layers() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(m for _ in range(2) for m in (nn.Linear(128, 128), nn.Tanh())))


def train(model: nn.Module, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        model(torch.randn(64, 128)).square().sum().backward()


def attach(model: nn.Module, **options: Any) -> bitslab.ActivationOffload:
    return bitslab.offload_activations(model, min_bytes=1024, in_flight_bytes=0, **options)


def lossy_sites(offload: bitslab.ActivationOffload) -> dict[str, Any]:
    sites = offload.report().sites
    return {site.unit.name: site.error for site in sites if site.error is not None}


def test_a_schedule_follows_the_passes_and_errors_are_reported() -> None:
    model = layers()
    train(model, 1)
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    lossy = Lossy(epochs=3, epoch_passes=2, top=100, bottom=40)
    offload = attach(model, policy="static", lossy=lossy)
    codecs, errors = [], []
    for _ in range(8):
        train(model, 1)
        found = lossy_sites(offload)
        assert set(found) == {"1:0", "3:0"}  # the input is none
        codecs.append(found["1:0"].codec)
        errors.append(found["1:0"].relative)
    # Equation 2: by floor(60 / 3 + 0.5) an epoch.
    assert codecs == [f"zfp {bits}" for bits in (100, 100, 80, 80, 60, 60, 40, 40)]
    assert 0 < errors[0] < errors[2] < errors[4] < errors[6] < 0.02
    near = zip(plain, model.parameters(), strict=True)
    assert all(
        torch.allclose(g, p.grad, rtol=0.05, atol=1.0) for g, p in near if p.grad is not None
    )
    (note,) = [note for note in offload.report().notes if note.startswith("Lossy")]
    where = "zfp, P = 40 of 128: sliding, Top 100, Bottom 40, epoch 3 of 3"
    assert note.startswith(f"Lossy ({where}): 1:0 (zfp 40, error ")
    assert re.search(r"3:0 \(zfp 40, error \d\.\de-0\d of its size, \d\.\de-\d\d at most\)", note)
    rows = {
        row["unit" if "unit" in row else "name"]: row for row in offload.report().to_dict()["sites"]
    }
    assert rows["1:0"]["error"]["codec"] == "zfp 40" and rows["0:0"]["error"] is None
    offload.detach()


def test_epochs_that_the_loop_tells_of() -> None:
    model = layers()
    schedule = Lossy(schedule="inverse", epochs=2, top=64, bottom=32)
    offload = attach(model, policy="static", lossy=schedule)
    codecs = []
    for epoch in (0, 1, 7):
        offload.begin_epoch(epoch)
        train(model, 2)
        codecs.append(lossy_sites(offload)["3:0"].codec)
    assert codecs == ["zfp 32", "zfp 48", "zfp 64"]
    for wrong, error in ((-1, ArgumentError), ("1", ArgumentTypeError)):
        with pytest.raises(error, match="epoch: "):
            offload.begin_epoch(wrong)  # type: ignore[arg-type]
    offload.detach()


def test_a_fixed_rate_of_bfloat16() -> None:
    offload = bitslab.ActivationOffload(
        "static", min_bytes=1, lossy=Lossy(schedule="fixed", bottom=32), in_flight_bytes=0
    )
    x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
    with offload:
        loss = (x * 2).sin().sum()
    loss.backward()
    assert offload.report().ratio == pytest.approx(2, rel=0.01)  # P / 64 of 16 bits
    assert 0 < offload.report().sites[0].error.relative < 0.1  # type: ignore[union-attr]
    offload.detach()


@pytest.mark.parametrize("in_flight_bytes", [0, 1 << 30])
def test_what_is_lossy_is_read_from_its_copy(in_flight_bytes: int) -> None:
    """Gradients do not depend on how far copies have come when the backward pass reads."""
    x = torch.randn(64, 64, requires_grad=True)
    h = (x * 2).detach()
    expected = 2 * ZfpCodec(32).decode(ZfpCodec(32).encode(h)).cos()
    offload = bitslab.ActivationOffload(
        "static", min_bytes=1, in_flight_bytes=in_flight_bytes, lossy=ZfpCodec(32)
    )
    gate = threading.Event()

    def hold() -> None:
        gate.wait()

    timer = threading.Timer(0.1, gate.set)
    for step in range(3):
        if in_flight_bytes and step:  # the copy is made while the backward pass waits for it
            offload._hooks.executor(x.device)._out.run(hold)
            timer.start() if step == 1 else None
        with offload:
            loss = (x * 2).sin().sum()
        (found,) = torch.autograd.grad(loss, x)
        assert torch.equal(found, expected)
    assert not torch.equal(found, 2 * h.cos())
    offload.detach()


def test_a_lossy_tensor_that_could_not_be_encoded_is_read_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = ZfpCodec.encode

    def fail(codec: ZfpCodec, t: torch.Tensor, out: Any = None, **more: Any) -> Any:
        if out is not None:  # not of a sample, whose error is found
            raise RuntimeError("on purpose")
        return real(codec, t, **more)

    monkeypatch.setattr(ZfpCodec, "encode", fail)
    x = torch.randn(64, 64, requires_grad=True)
    offload = bitslab.ActivationOffload("static", min_bytes=1, lossy=ZfpCodec(32))
    with pytest.warns(UserWarning, match="could not be packed"):
        with offload:
            loss = (x * 2).sin().sum()
        wait_on_host(offload._hooks.executor(x.device)._out.run(do_nothing))
        (found,) = torch.autograd.grad(loss, x)
    offload.detach()
    assert torch.equal(found, 2 * (x * 2).cos())


def test_integers_of_the_same_bytes_keep_every_bit() -> None:
    offload = bitslab.ActivationOffload("static", min_bytes=1, in_flight_bytes=0, lossy="zfp")
    x = torch.randn(64, 64, requires_grad=True)
    kept = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(h, h.view(torch.int32))
            return h.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            kept.extend(ctx.saved_tensors)
            return grad

    h = x * 2
    with offload:
        y = Function.apply(h)
    y.sum().backward()
    lossy, exact = kept
    assert torch.equal(exact.view(torch.float32), h)
    assert not torch.equal(lossy, h) and torch.allclose(lossy, h, atol=1.0)
    offload.detach()


# The range by bisection


@pytest.mark.usefixtures("quick_measuring")
def test_auto_finds_the_range_and_packs_dense_tensors(link: Callable[[float], None]) -> None:
    link(SLOW)
    torch.manual_seed(7)
    layer = nn.Linear(128, 128)
    model = nn.Sequential(layer, nn.LeakyReLU(), nn.Linear(128, 128), nn.ReLU())
    lossy = Lossy(epochs=4, epoch_passes=4, bottom=24)
    offload = attach(model, profile_every=1, codecs="zvc", lossy=lossy)
    train(model, 4)
    report = offload.report()
    choices = {site.unit.name: site.choice for site in report.sites}
    # What LeakyReLU leaves is dense. Half of what ReLU leaves is zeros: packed with every bit.
    assert choices["1:0"] == "zfp" and choices["3:0"] == "zvc" and choices["0:0"] == "raw"
    assert set(lossy_sites(offload)) == {site for site, c in choices.items() if c == "zfp"}
    (note,) = [note for note in report.notes if note.startswith("Lossy")]
    found = re.search(r"P = (\d+) of 128: sliding, Top (\d+), Bottom 24, epoch 0 of 4", note)
    assert found and found[1] == found[2] and int(found[2]) > 100  # crossing is all that costs
    (row,) = [r for r in report.decisions if r["site"] == "1:0" and r["profile"] == 0]
    assert row["ratio"]["zfp"] == pytest.approx(int(found[1]) / 128, rel=0.1)
    train(model, 4)
    offload.report()
    train(model, 1)
    assert "epoch 2 of 4" in " ".join(offload.report().notes)
    assert {row["epoch"] for row in offload.report().decisions} == {0, 1}
    offload.detach()


@pytest.mark.usefixtures("quick_measuring")
def test_auto_uses_no_lossy_codec_where_none_pays(link: Callable[[float], None]) -> None:
    link(FAST)
    model = layers()
    offload = attach(model, profile_every=1, codecs=[], lossy=Lossy(epochs=2))
    assert any("zfp, no range of P yet): none." in note for note in offload.report().notes)
    train(model, 4)
    report = offload.report()
    assert {site.choice for site in report.sites} == {"raw"}
    assert any(re.search("zfp, no P pays: Top 1?.*: none", note) for note in report.notes)
    offload.detach()


class Times:
    """Codecs that take no time."""

    def predict(self, *args: Any) -> tuple[float, float]:
        return 0.0, 0.0

    def outside(self, *args: Any) -> str:
        return ""


def test_the_range_is_found_in_the_first_epoch_alone() -> None:
    rate = LossyRate(Lossy(epochs=2, epoch_passes=3))
    assert rate.describe() == "zfp, no range of P yet"

    def record(hidden_s: float) -> SiteRecord:
        return SiteRecord(
            site="a",
            shape=(1000, 1000),
            dtype=torch.float32,
            nbytes=4_000_000,
            hidden_forward_s=hidden_s,
            hidden_backward_s=hidden_s,
        )

    swap_link = SwapLink(1e9, 1e9)
    rate.begin_pass()
    rate.find([record(1e-3)], Times(), swap_link)
    assert rate.range == LossyRange(128, 32, True)  # a quarter crosses in 1 ms
    rate.find([record(2e-3)], Times(), swap_link)
    assert rate.range == LossyRange(128, 64, True)
    for _ in range(3):
        rate.begin_pass()
    assert rate.epoch == 1
    rate.find([record(1e-3)], Times(), swap_link)
    assert rate.range == LossyRange(128, 64, True) and rate.block_bits == 96
    rate.find([], Times(), swap_link)
    assert rate.block_bits == 96


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"codec": "zvc"}, ArgumentError, "lossy: codec 'zvc' has no rate to choose, zfp has"),
        ({"codec": "ibp"}, ArgumentError, "'ibp' packs rows"),
        ({"schedule": "up"}, ArgumentError, "schedule 'up', accepted are sliding, inverse, fixed"),
        ({"epochs": 0}, ArgumentError, "lossy: epochs: 0, accepted are numbers from 1"),
        ({"epochs": None}, ArgumentTypeError, "lossy: epochs: expected an int, got None"),
        ({"epoch_passes": 1.5}, ArgumentTypeError, "lossy: epoch_passes: expected an int"),
        ({"top": 129}, ArgumentError, "block_bits: 129"),
        ({"bottom": 11}, ArgumentError, "block_bits: 11"),
        ({"top": 20, "bottom": 30}, ArgumentError, "lossy: bottom 30 is above top 20"),
    ],
)
def test_bad_schedules(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        Lossy(**options)


def test_a_schedule_without_a_range() -> None:
    with pytest.raises(ArgumentError, match="lossy: policy 'static' measures nothing"):
        bitslab.ActivationOffload("static", lossy=Lossy(epochs=3, top=100))
    bitslab.ActivationOffload("auto", lossy=Lossy(epochs=3, top=100))
