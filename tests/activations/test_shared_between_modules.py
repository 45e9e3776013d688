"""Tensors that several modules save, such as the tables of rotary positions, in plans."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from bitslab.engine.advisor.planning import CHECKPOINT, Plan, StepProfile
from tests.activations.test_planned import HIDDEN, ROWS, Block, check, follow, plan_of

pytestmark = pytest.mark.usefixtures("one_thread", "quick_measuring")


class Turned(nn.Module):
    """Blocks that all multiply by one table, which is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.linspace(0.5, 1.5, ROWS * HIDDEN).view(ROWS, HIDDEN)
        for layer in self.layers:
            x = layer(x, table)
        return x


class Layer(Block):
    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x * table)


@pytest.mark.parametrize("limit", [None, 1 << 40], ids=["kept while profiled", "moved while"])
def test_what_all_layers_save_is_none_of_their_own(
    limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles: list[StepProfile] = []

    def choose(profile: StepProfile) -> Plan:
        profiles.append(profile)
        chosen = {s.site: CHECKPOINT for s in profile.sites if s.module}
        return plan_of(profile, chosen)

    plans = follow(monkeypatch, choose)
    options = {"slowdown": 0.5} if limit is None else {"memory": limit}
    check(Turned, n=8, codecs=[], **options)
    (profile, *_), (plan, *_) = profiles, plans
    assert len(plan.modules) == 4
    tables = [s for s in profile.sites if s.nbytes == ROWS * HIDDEN * 4 and not s.module]
    assert tables and all(s.site.startswith("layers.0:") for s in tables)
    # The backward pass is through one layer when that of the layer before it begins.
    by_begin = sorted(profile.modules, key=lambda m: m.begin_s, reverse=True)
    for later, earlier in itertools.pairwise(by_begin):
        assert later.backward_end_s <= earlier.backward_begin_s, (later, earlier)
    assert plan.prediction.peak_bytes < plan.plain.peak_bytes / 2
