"""Models of transformers under limits of memory: the same losses and gradients, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bitslab
from bitslab.engine.advisor.planning import CHECKPOINT, Candidate, Plan, StepProfile
from tests.activations.test_layer_sizes import bert, gpt2, llama, t5
from tests.activations.test_planned import follow, plan_of

pytestmark = pytest.mark.usefixtures("one_thread", "quick_measuring")

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: llama(3, "eager", 4),
    "gpt2": lambda: gpt2(3, "sdpa", 0.1),
    "bert": lambda: bert(3, "sdpa", 0.1),
    "t5": lambda: t5(2, 2, 0.1),
}
SHAPE = 2, 64


def made(name: str, use_cache: bool = False) -> nn.Module:
    torch.manual_seed(3)
    model = MODELS[name]().train()
    model.config.use_cache = use_cache  # type: ignore[union-attr]
    return model


def train(name: str, model: nn.Module, n: int = 6) -> list[torch.Tensor]:
    """Train on drawn ids; return losses and the last gradients."""
    generator = torch.Generator().manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(11)
    found = []
    for _ in range(n):
        ids = torch.randint(0, 100, SHAPE, generator=generator)
        inputs = {"input_ids": ids}
        if name == "t5":
            inputs["decoder_input_ids"] = ids
        optimizer.zero_grad()
        loss = model(**inputs).last_hidden_state.square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found + [p.grad for p in model.parameters() if p.grad is not None]


def check(name: str, use_cache: bool = False, **options: Any) -> Any:
    expected = train(name, made(name, use_cache))
    model = made(name, use_cache)
    offload = bitslab.offload_activations(model, min_bytes=4096, **options)
    found = train(name, model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    offload.detach()
    return offload


@pytest.mark.drawn(2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models_train_alike_under_a_limit(name: str, recompute: bool, holds: None) -> None:
    offload = check(name, memory=3_000_000, recompute=recompute)
    plan = offload.plan
    assert plan.prediction.peak_bytes <= 3_000_000 < plan.plain.peak_bytes
    actions = {each.candidate.action for each in plan.sites}
    assert actions - {"keep"} and (recompute or not actions & {"replay", "checkpoint"})


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", MODELS)
def test_models_train_alike_with_every_kind_of_choice(
    name: str, monkeypatch: pytest.MonkeyPatch, holds: None
) -> None:
    def choose(profile: StepProfile) -> Plan:
        chosen = {}
        layers = [module.module for module in profile.modules]
        for i, site in enumerate(profile.sites):
            if site.module in layers[:1]:
                chosen[site.site] = CHECKPOINT
            elif site.replay_s is not None and not any(s in chosen for s in site.replay_from):
                chosen[site.site] = Candidate("replay")
            elif i % 3 == 0 and site.movable and site.nbytes:
                chosen[site.site] = Candidate("host")
        return plan_of(profile, chosen)

    plans = follow(monkeypatch, choose)
    check(name, slowdown=0.1)
    actions = {each.candidate.action for each in plans[0].sites}
    assert {"checkpoint", "host", "keep"} <= actions
    assert "replay" in actions or name == "t5"  # whose MLP keeps the output of its ReLU


def test_layers_that_fill_a_cache_are_not_computed_again(holds: None) -> None:
    offload = check("llama", use_cache=True, memory=3_000_000)
    assert not offload.plan.modules
    assert "layers.0: It is given DynamicCache, which it may change." in "".join(
        offload.report().notes
    )
