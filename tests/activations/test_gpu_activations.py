"""Saved tensors of a GPU, moved: the same cases, and what only a GPU shows."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bitslab
from bitslab.activations import Lossy
from bitslab.activations.auto import AutoPolicy
from bitslab.activations.moments import TIMED_EVERY
from bitslab.activations.policies import blob_codec_names
from bitslab.engine.codecs import ZfpCodec
from bitslab.engine.codecs.registry import get_codec
from bitslab.engine.memory import host_arena
from bitslab.engine.transfer import StreamLane
from tests.activations.cases import CASES, Offloaded
from tests.activations.test_gradients import check_case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

POLICIES: dict[str, dict[str, Any]] = {
    "keep": {"policy": "keep"},
    "raw": {"policy": "raw"},
    "raw-in-flight": {"policy": "raw", "in_flight_bytes": 1 << 20},
    "static": {"policy": "static"},
    "static-in-flight": {"policy": "static", "in_flight_bytes": 4096, "sm_budget": 8},
    "host": {"policy": "host", "codecs": "zvc"},
    "auto": {"policy": "auto", "profile_every": 1},
}
LOSSLESS = [
    name
    for name in blob_codec_names()
    if get_codec(name).error_bound is None and "cuda" in get_codec(name).device_types
]


@pytest.mark.usefixtures("fits_at_once")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_plain_training(
    name: str, policy: str, link: Callable[[float], None], quick_measuring: None
) -> None:
    link(1e6)
    check_case(name, Offloaded("cuda", **POLICIES[policy]), policy != "keep")


@pytest.mark.usefixtures("fits_at_once")
@pytest.mark.parametrize("codec", LOSSLESS)
@pytest.mark.parametrize("name", CASES)
def test_every_codec_returns_every_bit(name: str, codec: str) -> None:
    training = Offloaded("cuda", policy="static", codecs=codec)
    check_case(name, training)
    packed = {site.choice for each in training.offloads for site in each.report().sites}
    assert codec in packed


def model() -> nn.Module:
    torch.manual_seed(3)
    layers = [m for _ in range(4) for m in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers).cuda()


@pytest.mark.parametrize("policy", ["raw", "static"])
def test_passes_wait_for_no_gpu_and_take_no_host_memory(policy: str, no_waiting: Any) -> None:
    net = model()
    offload = bitslab.offload_activations(net, policy=policy, min_bytes=1024, in_flight_bytes=0)
    x = torch.randn(256, 512, device="cuda")
    step_until_fitted(offload, lambda: net(x).sum().backward())
    for _ in range(3):  # compiles, takes host memory
        net(x).sum().backward()
    before = host_arena().stats()["reserved_bytes"]
    with no_waiting():
        for _ in range(3):
            net(x).sum().backward()
    assert host_arena().stats()["reserved_bytes"] == before
    offload.detach()


@pytest.mark.parametrize("policy", ["raw", "static", "auto"])
def test_a_step_is_queued_far_ahead_of_the_gpu(
    policy: str, run_ahead: Any, link: Callable[[float], None], quick_measuring: None
) -> None:
    """Nothing the host does in a step waits: not for sizes, memory, or what a profile counted."""
    link(1e6)
    net = model()
    options: dict[str, Any] = {"profile_every": 4} if policy == "auto" else {}
    x = torch.randn(256, 512, device="cuda", requires_grad=True)
    (plain,) = torch.autograd.grad(net(x).sum(), x)
    offload = bitslab.offload_activations(
        net, policy=policy, min_bytes=1024, in_flight_bytes=0, **options
    )
    step_until_fitted(offload, lambda: torch.autograd.grad(net(x).sum(), x))
    for _ in range(8):  # compiles, decides, takes host memory
        torch.autograd.grad(net(x).sum(), x)
        torch.cuda.synchronize()
    found = []
    run_ahead(lambda: found.append(torch.autograd.grad(net(x).sum(), x)[0]))
    assert torch.equal(found[0], plain)
    if policy != "raw":
        stats = offload.stats()
        assert stats["crossed_out_bytes"] < stats["moved_out_bytes"]
        assert stats["crossed_in_bytes"] < stats["moved_in_bytes"]  # sizes that came late count
    offload.detach()


def test_profiles_of_auto_wait_for_no_gpu(
    no_waiting: Any, link: Callable[[float], None], quick_measuring: None
) -> None:
    link(1e6)
    net = model()
    x = torch.randn(256, 512, device="cuda")
    offload = bitslab.offload_activations(net, min_bytes=1024, profile_every=2)

    def step() -> None:
        net(x).sum().backward()
        while not torch.cuda.current_stream().query():  # the host waits for nothing itself
            time.sleep(1e-3)

    step_until_fitted(offload, step)
    for _ in range(8):  # measures codecs and link
        step()
    before = len(offload.report().decisions)
    with no_waiting():
        for _ in range(6):
            step()
    assert len(offload.report().decisions) > before
    offload.detach()


def test_real_swaps_correct_the_model(link: Callable[[float], None], quick_measuring: None) -> None:
    link(1e6)
    net = model()
    x = torch.randn(1024, 512, device="cuda")
    offload = bitslab.offload_activations(net, min_bytes=1024, codecs="zvc", profile_every=2)
    for _ in range(4 + TIMED_EVERY):
        net(x).sum().backward()
        torch.cuda.synchronize()
    offload.stats()
    policy = offload._policy
    assert isinstance(policy, AutoPolicy)
    corrections = [model.corrections() for model in policy._models.values()]
    assert any(("zvc", 4, 0) in each for each in corrections)
    assert all(
        0 < factor < 100 for each in corrections for pair in each.values() for factor in pair
    )
    offload.detach()


@pytest.mark.usefixtures("fits_at_once")
def test_a_model_on_two_devices(link: Callable[[float], None], quick_measuring: None) -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.first = nn.Sequential(nn.Linear(64, 128), nn.ReLU())
            self.second = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8)).cuda()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.second(self.first(x).cuda())
            return out

    def step(net: nn.Module) -> list[torch.Tensor]:
        net.zero_grad()
        net(torch.linspace(-1, 1, 64 * 64).view(64, 64)).square().sum().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    link(1e6)
    net = Split()
    plain = step(net)
    for options in (POLICIES[name] for name in POLICIES if name != "keep"):
        given = {"min_bytes": 64, "in_flight_bytes": 0, "verify": True} | options
        offload = bitslab.offload_activations(net, **given)
        for _ in range(4):
            assert all(map(torch.equal, step(net), plain))
        report = offload.report()
        assert report.device == "cpu, cuda:0"
        devices = {each.device.type: each.traffic for each in offload._hooks.executors()}
        assert all(devices[name].moved_in_bytes > 0 for name in ("cpu", "cuda"))
        offload.detach()


@pytest.mark.parametrize("in_flight_bytes", [0, 1 << 30])
@pytest.mark.parametrize("policy", ["raw", "static", "host"])
def test_what_is_dropped_while_it_crosses_harms_nobody(policy: str, in_flight_bytes: int) -> None:
    """Memory that is being read or written for a copy is given to nobody before that is over."""
    offload = bitslab.ActivationOffload(
        policy, codecs="zvc", min_bytes=1024, in_flight_bytes=in_flight_bytes
    )
    nbytes = 64 << 20

    def saved() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(nbytes // 4, device="cuda", requires_grad=True)
        with offload:
            y = (x * 2).relu().sin()
            z = (y * 3).exp().cos().sum()
        return y, z

    for _ in range(2):
        y, z = saved()
        z.backward()
        del y, z
    for _ in range(6):
        y, z = saved()
        torch.autograd.grad(z, y)  # which fetches what comes before, and never reads it
        del y, z
        others = [torch.full((nbytes,), n, dtype=torch.uint8, device="cuda") for n in range(6)]
        assert all(bool((t == n).all()) for n, t in enumerate(others))
        del others
    offload.detach()


@pytest.mark.parametrize("policy", ["raw", "static", "host"])
def test_passes_on_streams_of_their_own(policy: str) -> None:
    """Two streams save, and read in the order of the other one; memory goes from each to each."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def chain(x: torch.Tensor) -> torch.Tensor:  # of operators with the same bits on each stream
        for _ in range(4):
            x = (x * 1.5).relu().sin()
        return x.square().sum()

    inputs = [torch.randn(1 << 22, device="cuda", requires_grad=True) for _ in streams]
    plain = [torch.autograd.grad(chain(x), x)[0] for x in inputs]
    torch.cuda.synchronize()
    offload = bitslab.ActivationOffload(
        policy, codecs="zvc", min_bytes=1024, in_flight_bytes=1 << 20
    )
    for _ in range(8):
        losses = []
        for stream, x in zip(streams, inputs, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), offload:
                losses.append(chain(x))
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        for i in (1, 0):
            (found,) = torch.autograd.grad(losses[i], inputs[i])
            assert torch.equal(found, plain[i])
    offload.detach()


@pytest.mark.parametrize("policy", ["raw", "static"])
def test_a_tensor_that_another_stream_reads(policy: str) -> None:
    """Its memory is given to nobody before that stream is done."""
    offload = bitslab.ActivationOffload(policy, codecs="zvc", min_bytes=1024, in_flight_bytes=0)
    side = torch.cuda.Stream()
    x = torch.randn(1 << 22, device="cuda", requires_grad=True)
    h = (x.detach() * 2).exp()
    expected = h.cos() * h * 2
    del h
    for _ in range(4):
        with offload:
            h = (x * 2).exp()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                y = h.sin()
            del h
        others = [torch.full_like(x, 7.0) for _ in range(4)]
        torch.cuda.current_stream().wait_stream(side)
        loss = y.sum()
        assert torch.equal(y, (x.detach() * 2).exp().sin())
        (found,) = torch.autograd.grad(loss, x)
        assert torch.equal(found, expected)
        del others, y, loss
    offload.detach()


def test_two_streams_read_one_copy() -> None:
    """A copy that one stream has brought back is whole when another one reads it."""
    offload = bitslab.ActivationOffload("static", codecs="zvc", min_bytes=1024, in_flight_bytes=0)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    x = torch.randn(1 << 22, device="cuda", requires_grad=True)
    expected = 2 * (2 * x.detach()).relu().cos()
    for _ in range(8):
        with offload:
            h = (x * 2).relu()
            losses = []
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    losses.append(h.sin().sum())  # both save one copy
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        for loss in losses:
            (found,) = torch.autograd.grad(loss, x, retain_graph=True)
            torch.cuda.synchronize()
            assert torch.equal(found, expected * (x > 0))
        del h, losses
    offload.detach()


@pytest.mark.parametrize("when", ["backward", "detached"])
def test_a_copy_that_is_larger_than_those_before(when: str) -> None:
    """Its host memory is too small: it is sent again from its original."""
    x = torch.randn(1 << 22, device="cuda", requires_grad=True)

    def loss_of(zeros: float) -> torch.Tensor:
        torch.manual_seed(7)
        loss: torch.Tensor = (x * 2).where(torch.rand_like(x) >= zeros, 0.0).sin().sum()
        return loss

    (plain,) = torch.autograd.grad(loss_of(0.1), x)
    offload = bitslab.ActivationOffload(
        "static", codecs="zvc", min_bytes=1 << 23, in_flight_bytes=1 << 30, verify=True
    )
    for zeros in (0.9, 0.9, 0.9, 0.1, 0.9, 0.1):
        with offload:
            loss = loss_of(zeros)
        if when == "detached":
            offload.detach()
        (found,) = torch.autograd.grad(loss, x)
        assert zeros > 0.5 or torch.equal(found, plain)
        torch.cuda.synchronize()
        del loss
    if when == "detached":
        assert offload.stats()["moved_out_bytes"] > 6 * x.nbytes  # some went twice
    offload.detach()


def test_zeros_are_packed_by_the_cpu() -> None:
    offload = bitslab.ActivationOffload("host", codecs="zvc", min_bytes=1024, in_flight_bytes=0)
    x = torch.randn(1 << 20, device="cuda")
    x = x.where(torch.rand_like(x) > 0.9, 0.0).requires_grad_()
    for _ in range(3):
        with offload:
            loss = (x * 2).square().sum()
        offload.detach()  # waits for the CPU
        (found,) = torch.autograd.grad(loss, x)
        assert torch.equal(found, 8 * x)
    assert offload.stats()["packed_on_host_tensors"] == 3
    offload.detach()


def test_lossy_rates_and_errors() -> None:
    net = nn.Sequential(nn.Linear(512, 512), nn.LeakyReLU(), nn.Linear(512, 512)).cuda()
    lossy = Lossy(epochs=2, epoch_passes=2, top=100, bottom=40)
    offload = bitslab.offload_activations(net, policy="static", lossy=lossy, min_bytes=1024)
    errors: list[Any] = []
    for _ in range(6):
        net(torch.randn(512, 512, device="cuda")).square().sum().backward()
        (site,) = [site for site in offload.report().sites if site.unit.name == "1:0"]
        errors.append(site.error)
    assert [error.codec for error in errors] == [f"zfp {p}" for p in (100, 100, 70, 70, 40, 40)]
    assert 0 < errors[0].relative < errors[2].relative < errors[4].relative < 0.1
    offload.detach()


@pytest.mark.parametrize("policy", ["raw", "static"])
def test_saved_bytes_at_the_peak(policy: str) -> None:
    net = model()
    x = torch.randn(1 << 14, 512, device="cuda")
    offload = bitslab.offload_activations(net, policy=policy, in_flight_bytes=0)
    for _ in range(2):
        net(x).sum().backward()
    # The outputs of the last ReLU and of those before it: 32 MiB each, and the input.
    assert offload.stats()["peak_saved_bytes"] == 5 * (32 << 20)
    offload.detach()


def test_originals_leave_the_device() -> None:
    net = nn.Sequential(model(), model())
    x = torch.randn(1 << 14, 512, device="cuda")
    net(x).sum().backward()

    def peak() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        net(x).sum().backward()
        return torch.cuda.max_memory_allocated()

    plain = peak()
    offload = bitslab.offload_activations(net, policy="raw", in_flight_bytes=0)
    peak()
    # The outputs of eight ReLUs, 32 MiB each, of which two are there at once, and the input, of
    # which a copy comes back.
    assert peak() < plain - (4 * 32 << 20)
    offload.detach()


def test_an_executor_that_is_dropped_while_it_encodes_harms_nobody() -> None:
    """What it has staged is written and read by streams that nobody waits for any more."""
    nbytes = 64 << 20
    x = torch.randn(nbytes // 4, device="cuda", requires_grad=True)
    for _ in range(4):
        offload = bitslab.ActivationOffload("static", codecs="zvc", min_bytes=1024)
        with offload:
            y = (x * 2).relu().sin()
        torch.cuda._sleep(20_000_000)  # what encodes is behind
        with offload:
            z = (y * 3).cos()
        del offload, y, z
        gc.collect()
        others = [torch.full((nbytes,), n, dtype=torch.uint8, device="cuda") for n in range(6)]
        torch.cuda.synchronize()
        assert all(bool((t == n).all()) for n, t in enumerate(others))
        del others


def test_what_is_staged_is_read_there(held_stream: Any) -> None:
    """Nothing has crossed to the host when the backward pass reads; and nothing comes back."""
    offload = bitslab.ActivationOffload(
        "static", codecs="zvc", min_bytes=1 << 20, in_flight_bytes=1 << 30
    )
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)

    def loss_of() -> torch.Tensor:
        h = x
        for _ in range(8):
            h = (h * 1.5).relu().sin()
        return h.sum()

    (plain,) = torch.autograd.grad(loss_of(), x)
    for _ in range(8):  # compiles, and learns how much host memory is needed
        with offload:
            loss = loss_of()
        torch.autograd.grad(loss, x)
        torch.cuda.synchronize()
    offload.stats()
    out = offload._hooks.executor(x.device)._out
    assert isinstance(out, StreamLane)
    spare = [torch.empty(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(8)]
    del spare
    found = []
    with held_stream(out.stream):
        before = offload.stats()["moved_in_bytes"]
        with offload:
            loss = loss_of()
        # Others take what was given up in the meantime.
        others = [torch.full_like(x, float(n)) for n in range(8)]
        found.append(torch.autograd.grad(loss, x)[0])
        assert offload.stats()["moved_in_bytes"] == before
        del loss, others
    assert torch.equal(found[0], plain)
    with offload:  # and what was held is in order again
        loss = loss_of()
    assert torch.equal(torch.autograd.grad(loss, x)[0], plain)
    offload.detach()


def test_lossy_gradients_do_not_depend_on_how_far_copies_are() -> None:
    x = torch.randn(1 << 10, 1 << 10, device="cuda", requires_grad=True)
    codec = ZfpCodec(32)
    expected = 2 * codec.decode(codec.encode((x * 2).detach())).cos()
    for in_flight_bytes in (0, 1 << 30):
        offload = bitslab.ActivationOffload(
            "static", lossy=codec, min_bytes=1024, in_flight_bytes=in_flight_bytes
        )
        for waits in (False, True, True):
            with offload:
                loss = (x * 2).sin().sum()
            if waits:
                torch.cuda.synchronize()
            assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
        offload.detach()
    assert not torch.equal(expected, 2 * (x * 2).detach().cos())


def test_the_peak_of_small_steps_is_near_that_of_plain_training() -> None:
    """What is staged is as large as the tensors at hand, not as the largest of the step."""
    x = torch.randn(64 << 20, device="cuda", requires_grad=True)  # 256 MiB

    def peak() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        h = (x * 2).sin()[: 4 << 20]
        for _ in range(24):  # 16 MiB each
            h = (h * 1.5).sin()
        torch.cuda.synchronize()  # all have crossed
        h.sum().backward()
        x.grad = None
        return torch.cuda.max_memory_allocated() - before

    plain = peak()
    offload = bitslab.ActivationOffload("static", codecs="zvc", in_flight_bytes=1 << 30)
    for _ in range(3):
        with offload:
            found = peak()
    assert found < plain + (80 << 20)  # four or five of the small ones
    offload.detach()


def step_until_fitted(offload: bitslab.ActivationOffload, step: Callable[[], Any]) -> None:
    """Run steps until codecs that learn have done so."""
    end = time.monotonic() + 120  # their thread may compile, and wait for others that do
    while time.monotonic() < end:
        step()
        torch.cuda.synchronize()
        if not offload._codecs.fitting and not offload._codecs.was_fitting:
            return
        offload._codecs.was_fitting = False
        time.sleep(0.01)
    raise AssertionError("codecs are still not fitted")


@pytest.mark.parametrize("codec", ["ibp-blob", "zvc+ibp"])
def test_codecs_learn_while_tensors_cross_raw(codec: str, no_waiting: Any) -> None:
    """No pass waits for a fit: the first tensors of a site cross raw."""
    others = fitting_threads()  # of what other tests have left
    net = model()
    x = torch.randn(1 << 12, 512, device="cuda", requires_grad=True)
    (plain,) = torch.autograd.grad(net(x).sum(), x)

    def step() -> None:
        assert torch.equal(torch.autograd.grad(net(x).sum(), x)[0], plain)

    def attach() -> bitslab.ActivationOffload:
        return bitslab.offload_activations(
            net, policy="static", codecs=codec, min_bytes=1024, in_flight_bytes=0
        )

    offload = attach()
    step_until_fitted(offload, step)  # compiles
    offload.detach()
    offload = attach()
    with no_waiting():
        torch.autograd.grad(net(x).sum(), x)
        first = offload.stats()
        torch.autograd.grad(net(x).sum(), x)
    torch.cuda.synchronize()
    sites = offload.report().sites
    assert {site.choice for site in sites if site.choice != "keep"} == {codec}
    assert first["crossed_out_bytes"] == first["moved_out_bytes"] > 0
    step_until_fitted(offload, step)
    before = offload.stats()
    step()
    torch.cuda.synchronize()
    after = offload.stats()
    moved, crossed = (after[n] - before[n] for n in ("moved_out_bytes", "crossed_out_bytes"))
    assert 0 < crossed < 0.95 * moved
    offload.detach()
    assert fitting_threads() <= others


def fitting_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name == "bitslab-fit"}


def test_auto_measures_and_decides_on_the_device(link: Any, quick_measuring: None) -> None:
    net = model()
    x = torch.randn(1 << 12, 512, device="cuda")
    choices = []
    link(1e7)
    offload = bitslab.offload_activations(net, min_bytes=1024, profile_every=1)
    for rate in (1e7, 1e14):
        link(rate)
        for _ in range(4):
            net(x).sum().backward()
            torch.cuda.synchronize()
        choices.append({site.unit.name: site.choice for site in offload.report().sites})
    assert choices[0]["1:0"] not in ("raw", "keep")
    assert choices[1]["1:0"] == "raw"
    offload.detach()
