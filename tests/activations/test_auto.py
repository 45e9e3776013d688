"""Decisions of ``policy="auto"``: by profiles, link and codecs, and anew in later passes."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import bitslab
from bitslab.activations import auto as auto_module
from bitslab.activations import hooks as hooks_module
from bitslab.activations import profile as profile_module
from bitslab.activations import time_models
from bitslab.activations.moments import TIMED_EVERY
from bitslab.activations.policies import USUAL_CODECS, Codecs
from bitslab.activations.profile import PassProfile
from bitslab.engine import advisor
from bitslab.engine import codecs as codecs_module

pytestmark = pytest.mark.usefixtures("quick_measuring", "one_thread")

SLOW, FAST = 1e6, 1e13


class Gate(nn.Module):
    """Saves a tensor with a share of zeros that can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.zeros = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * (torch.rand(x.shape) >= self.zeros)
        return h * h.sin()


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(64, 256, requires_grad=True)).square().sum().backward()


def attach(model: nn.Module, **options: Any) -> bitslab.ActivationOffload:
    return bitslab.offload_activations(model, min_bytes=1024, **options)


def printed(table: Any) -> str:
    console = Console(width=160, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def choices(offload: bitslab.ActivationOffload) -> dict[str, str]:
    return {site.unit.name: site.choice for site in offload.report().sites}


def test_the_link_decides(link: Callable[[float], None]) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
    link(SLOW)
    offload = attach(model, profile_every=1)
    train(model, 1)
    assert set(choices(offload).values()) == {"raw"}
    assert all("not profiled" in site.reason for site in offload.report().sites)
    train(model, 2)
    slow = choices(offload)
    assert slow["1:0"] in USUAL_CODECS  # of a ReLU: half of it zeros
    link(FAST)
    train(model, 2)
    assert set(choices(offload).values()) == {"raw"}
    report = offload.report()
    reasons = {site.unit.name: site.reason for site in report.sites}
    assert re.search(r"ms raw, .* ms by .* \(5\d% zeros, \d+% of the bytes cross", reasons["1:0"])
    rows = [row for row in report.to_dict()["decisions"] if row["site"] == "1:0"]
    assert [row["profile"] for row in rows] == list(range(len(rows)))
    assert {row["action"] for row in rows} == {"pack", "raw"} and any(r["changed"] for r in rows)
    assert rows[0]["nbytes"] == 64 * 256 * 4 and 0.4 < rows[0]["sparsity"] < 0.6
    shown = printed(report.table())
    assert re.search(r"1:0 +│ raw +│ +\d+ │ +\d\.\d\d │.*│ Raw: ", shown)
    grid = printed(report.decision_table())
    assert re.search(rf"1:0 +│ {re.escape(slow['1:0'])} 5\d% +│.*│ raw 5\d%", grid)
    assert re.search(r"packed +│ [12] +│.*│ 0 ", grid)
    offload.detach()


def test_profiles_come_every_so_many_passes(link: Callable[[float], None]) -> None:
    link(SLOW)
    model = Gate()
    offload = attach(model, profile_every=5)
    train(model, 12)
    # Passes 0, 2, 5 and 10, each evaluated when the one after it begins.
    assert len({row["profile"] for row in offload.report().decisions}) == 4
    offload.detach()


class Clock:
    """In the place of ``time``: seconds pass where a test says so."""

    def __init__(self) -> None:
        self.now_s, self.passes = 0.0, 0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def profiled(link: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trains with a clock that a test sets, and returns the numbers of the passes profiled."""
    link(SLOW)
    clock = Clock()
    monkeypatch.setattr(auto_module, "PROFILE_EVERY", 5)
    monkeypatch.setattr(auto_module, "PROFILE_SHARE", 0.1)
    for module in (auto_module, profile_module):
        monkeypatch.setattr(module, "time", clock)
    count, read_back, decide = (
        codecs_module.count_zeros,
        PassProfile._to_host,
        advisor.decide,
    )

    def run(
        passes: int, profile_ms: Callable[[int], float], where: str, pass_ms: float = 10.0
    ) -> list[int]:
        seen: list[int] = []

        def spend(what: str) -> None:
            clock.now_s += profile_ms(len(seen) - 1) / 1e3 if what == where else 0.0

        def count_zeros(flat: torch.Tensor) -> torch.Tensor:
            seen.append(clock.passes)
            spend("counting")
            return count(flat)

        def counted(self: Any, device: torch.device) -> Any:
            spend("reading back")
            return read_back(self, device)

        def decided(*args: Any, **more: Any) -> Any:
            spend("deciding")
            return decide(*args, **more)

        monkeypatch.setattr(profile_module, "count_zeros", count_zeros)
        monkeypatch.setattr(PassProfile, "_to_host", counted)
        monkeypatch.setattr(auto_module, "decide", decided)
        model = nn.Sequential(nn.Linear(256, 64), nn.Tanh())  # of which one tensor is moved
        offload = attach(model)
        for clock.passes in range(passes):
            train(model, 1)
            clock.now_s += pass_ms / 1e3
        offload.detach()
        return seen

    return run


@pytest.mark.drawn(4)
@pytest.mark.parametrize("where", ["counting", "reading back", "deciding"])
@pytest.mark.parametrize(
    ("profile_ms", "interval"), [(0.1, 5), (4.0, 5), (7.5, 10), (29.5, 40), (1e6, 80)], ids=str
)
def test_profiles_take_a_share_of_the_time_at_most(
    profiled: Any, profile_ms: float, interval: int, where: str
) -> None:
    seen = profiled(200, lambda i: profile_ms, where)
    # The first one, and the one behind what compiles; then by numbers, which ranks agree on.
    assert seen == [0, 2, *range(interval, 200, interval)]


def test_a_slow_profile_or_two_change_little(profiled: Any) -> None:
    seen = profiled(400, lambda i: 3000.0 if i in (1, 4) else 0.1, "counting")
    assert seen[:2] == [0, 2] and seen[2] == 80  # not before what the slow one asks for
    assert {after - before for before, after in itertools.pairwise(seen[5:])} <= {5, 80}
    assert sum(n >= 200 for n in seen) > 10


def test_codecs_are_fitted_anew_when_ratios_drift(
    link: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    link(SLOW)
    refitted = []
    real = Codecs.refit

    def refit(codecs: Any, site: Any) -> None:
        refitted.append(site.name)
        real(codecs, site)

    monkeypatch.setattr(Codecs, "refit", refit)
    model = Gate()
    offload = attach(model, profile_every=1)
    train(model, 4)
    assert not refitted
    model.zeros = 0.9
    train(model, 2)
    assert refitted
    offload.detach()


def test_times_between_hooks_are_hidden_seconds(
    monkeypatch: pytest.MonkeyPatch, link: Callable[[float], None]
) -> None:
    link(SLOW)
    seen = []
    real = advisor.decide

    def decide(records: Any, *args: Any, **more: Any) -> Any:
        seen.append(list(records))
        return real(records, *args, **more)

    ticks = itertools.count()

    def now(device: torch.device) -> float:
        return float(next(ticks))

    monkeypatch.setattr(auto_module, "decide", decide)
    monkeypatch.setattr(profile_module, "now", now)
    monkeypatch.setattr(hooks_module, "now", now)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64), nn.ReLU())
    offload = attach(model, profile_every=100)
    train(model, 2)
    (records,) = seen
    # A hook takes one tick from its begin to its end, and the next begins one tick later.
    assert [r.hidden_forward_s for r in records] == [1.0] * len(records)
    assert [r.hidden_backward_s for r in records] == [1.0] * (len(records) - 1) + [0.0]
    assert [r.site for r in records] == ["1:0", "3:0"]
    offload.detach()


def test_a_pass_without_backward_decides_nothing(link: Callable[[float], None]) -> None:
    link(SLOW)
    model = Gate()
    offload = attach(model, profile_every=100)
    model(torch.randn(64, 256, requires_grad=True))
    train(model, 1)
    assert not offload.report().decisions
    train(model, 1)
    assert offload.report().decisions
    offload.detach()


def test_codecs_that_cannot_be_measured(
    link: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    link(SLOW)

    def fail(*args: Any, **more: Any) -> Any:
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr(time_models, "fit_time_model", fail)
    model = Gate()
    offload = attach(model, profile_every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, 4)
    assert ["on purpose" in str(w.message) for w in caught] == [True]
    assert set(choices(offload).values()) == {"raw"}
    offload.detach()


def test_sites_that_are_not_selected_and_a_lossy_codec(link: Callable[[float], None]) -> None:
    link(SLOW)
    model = Gate()
    offload = attach(model, profile_every=1, select=lambda site: site.name.endswith(":1"))
    train(model, 3)
    kept = [site for site in offload.report().sites if site.choice == "keep"]
    assert kept and all(site.reason == "Kept: not selected." for site in kept)
    offload.detach()

    lossy = bitslab.offload_activations(
        model, min_bytes=1024, profile_every=1, codecs=[], lossy="zfp"
    )
    train(model, 3)
    assert "zfp" in choices(lossy).values()
    assert any("Lossy (zfp)" in note for note in lossy.report().notes)
    lossy.detach()


def test_real_swaps_correct_the_model(link: Callable[[float], None]) -> None:
    link(SLOW)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
    offload = attach(model, profile_every=1, codecs="zvc", in_flight_bytes=0)
    train(model, 3)
    policy = offload._policy
    assert isinstance(policy, auto_module.AutoPolicy)
    (measured,) = policy._models.values()
    assert choices(offload)["1:0"] == "zvc"
    train(model, 2 * TIMED_EVERY)
    offload.stats()
    # Both directions of tensors of 64 KiB, and what all sizes are corrected by.
    found = measured.corrections()
    assert set(found) == {("zvc", 4, (64 * 256 * 4).bit_length()), ("zvc", 4, 0)}
    assert all(factor != 1.0 for factors in found.values() for factor in factors)
    offload.detach()


def test_a_size_that_was_not_measured_is_named(
    link: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    link(SLOW)
    monkeypatch.setattr(auto_module.AutoPolicy, "observed", None)
    model = nn.Sequential(nn.Linear(16, 1024), nn.ReLU(), nn.Linear(1024, 16))
    offload = attach(model, profile_every=1, codecs="zvc")
    for _ in range(3):
        model(torch.randn(128, 16)).square().sum().backward()
    (reason,) = [site.reason for site in offload.report().sites if site.unit.name == "1:0"]
    # Synthetic tensors of these tests have up to 256 KiB at most.
    assert re.search(r"; outside the fitted range: 0\.524 MB \(.* to 0\.\d+\)", reason)
    offload.detach()


def test_an_epoch_begins_with_a_profile(link: Callable[[float], None]) -> None:
    link(SLOW)
    model = Gate()
    offload = attach(model, profile_every=100)
    train(model, 6)
    assert len({row["profile"] for row in offload.report().decisions}) == 2
    offload.begin_epoch(1)
    train(model, 4)
    assert len({row["profile"] for row in offload.report().decisions}) == 3
    offload.begin_epoch(5)
    train(model, 2)
    offload.begin_epoch(6)  # of a pass that the last profile is not of
    train(model, 1)
    report = offload.report()
    epochs = {row["profile"]: row["epoch"] for row in report.decisions}
    assert epochs == {0: None, 1: None, 2: 1, 3: 5}
    headings = [str(column.header) for column in report.decision_table().columns]
    assert headings == ["site", "0", "1", "2, epoch 1", "3, epoch 5"]
    offload.detach()
