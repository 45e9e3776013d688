"""Plans of equal layers beside ones made by hand, and the least seconds of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest

from bitslab.engine.advisor import SwapLink
from bitslab.engine.advisor.planning import (
    CHECKPOINT,
    REPLAY,
    Candidate,
    Choices,
    ModuleProfile,
    Packing,
    SiteProfile,
    Solver,
    StepProfile,
    Timeline,
    drawn_profile,
)
from bitslab.engine.advisor.planning.module_layouts import ModuleLayouts
from bitslab.engine.advisor.planning.option_costs import OptionCosts

HOST = Candidate("host")
#: What a layer of Llama saves in bfloat16: name, size in hidden states, what it is replayed from.
SAVED: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    ("cast", 2, ()), ("normed", 1, ("cast",)), ("input", 1, ("normed",)), ("q", 1, ()),
    ("k", 1, ()), ("v", 1, ()), ("attended", 1, ()), ("cast2", 2, ()), ("normed2", 1, ("cast2",)),
    ("input2", 1, ("normed2",)), ("gate", 2.75, ()), ("silu", 2.75, ("gate",)), ("up", 2.75, ()),
    ("product", 2.75, ("silu", "up")),
)  # fmt: skip
#: Of a layer at 16 x 1,024 tokens of width 4,096, and what an H200 takes for it.
STATE_BYTES, FORWARD_S, BACKWARD_S, RECOMPUTE_S = 134_217_728, 14.4e-3, 28.9e-3, 12.6e-3
WORK_BYTES = 870_000_000


def layers_profile(n_layers: int, *, link_bytes_per_s: float, replays: bool) -> StepProfile:
    """Return a step of equal layers."""
    turn_s = n_layers * FORWARD_S
    sites, modules = [], []
    for layer in range(n_layers):
        begin_s, back_s = layer * FORWARD_S, turn_s + (n_layers - 1 - layer) * BACKWARD_S
        for i, (name, states, sources) in enumerate(SAVED):
            nbytes = int(states * STATE_BYTES)
            replayed = replays and bool(sources)
            saved, read = i / len(SAVED), 1 - (i + 1) / len(SAVED)
            sites.append(
                SiteProfile(
                    site=f"{layer}.{name}",
                    nbytes=nbytes,
                    saved_s=begin_s + saved * FORWARD_S,
                    released_s=begin_s + (saved + 1 / len(SAVED)) * FORWARD_S,
                    read_s=back_s + read * BACKWARD_S,
                    freed_s=back_s + (read + 1 / len(SAVED)) * BACKWARD_S,
                    module=str(layer),
                    replay_s=nbytes / 1e12 if replayed else None,
                    replay_from=tuple(f"{layer}.{each}" for each in sources) if replayed else (),
                )
            )
        modules.append(
            ModuleProfile(
                module=str(layer),
                begin_s=begin_s,
                backward_begin_s=back_s,
                backward_end_s=back_s + BACKWARD_S,
                checkpoint_s=RECOMPUTE_S,
                checkpoint_bytes=STATE_BYTES,
            )
        )
    return StepProfile(
        sites=tuple(sites),
        modules=tuple(modules),
        turn_s=turn_s,
        end_s=turn_s + n_layers * BACKWARD_S * 1.000001,
        other_bytes=((0.0, WORK_BYTES // 2), (turn_s, WORK_BYTES)),
        link=SwapLink(link_bytes_per_s, link_bytes_per_s, 1e-5),
    )


def packed(profile: StepProfile) -> StepProfile:
    """Return a step whose tensors may be packed, by codecs that gain much, and nothing."""

    def codecs(nbytes: int) -> dict[str, Packing]:
        return {
            "ibp-blob": Packing(0.72, nbytes / 700e9, nbytes / 1500e9),
            "zvc": Packing(0.99, nbytes / 900e9, nbytes / 1500e9),
        }

    sites = (replace(site, packings=codecs(site.nbytes)) for site in profile.sites)
    return replace(profile, sites=tuple(sites))


def by_hand(timeline: Timeline, moved: Collection[int], n_kept: int) -> Choices:
    """Return the plan that moves or replays some layers, keeps the last and checkpoints others."""
    chosen = {}
    n = len(timeline.profile.modules)
    for site, own in zip(timeline.profile.sites, timeline.candidates, strict=True):
        if int(site.module) in moved:
            chosen[site.site] = REPLAY if REPLAY in own else HOST
        elif int(site.module) < n - n_kept:
            chosen[site.site] = CHECKPOINT
    return timeline.choices(chosen)


def least_by_hand_s(timeline: Timeline, limit: float) -> float:
    """Return the seconds of the best of many plans that fit."""
    found = []
    n = len(timeline.profile.modules)
    for apart, n_moved, n_kept in itertools.product((1, 2, 3, 4), range(n), (0, 1, 2)):
        choices = by_hand(timeline, range(0, n - n_kept, apart)[:n_moved], n_kept)
        if timeline.floor(choices).max() <= limit:
            predicted = timeline.predict(choices, limit_bytes=limit)
            found += [predicted.step_s] if predicted.peak_bytes <= limit + 0.5 else []
    return min(found)


def checkpointed_bytes(timeline: Timeline) -> float:
    return timeline.predict(by_hand(timeline, (), 0)).peak_bytes


@pytest.mark.drawn(2)
@pytest.mark.parametrize("times", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("replays", [True, False])
def test_equal_layers_are_planned_as_well_as_by_hand(replays: bool, times: float) -> None:
    timeline = Timeline(layers_profile(16, link_bytes_per_s=55e9, replays=replays))
    limit = times * checkpointed_bytes(timeline)
    found = Solver(timeline).solve(limit)
    assert found.fits
    assert found.prediction.step_s <= least_by_hand_s(timeline, limit) * 1.001


@pytest.mark.parametrize("packs", [False, True])
def test_checkpointing_is_beaten_at_its_own_peak(packs: bool) -> None:
    profile = layers_profile(16, link_bytes_per_s=55e9, replays=True)
    timeline = Timeline(packed(profile) if packs else profile)
    checkpointed = timeline.predict(by_hand(timeline, (), 0))
    found = Solver(timeline).solve(checkpointed.peak_bytes)
    assert found.prediction.peak_bytes <= checkpointed.peak_bytes + 0.5
    assert found.prediction.step_s <= 0.9 * checkpointed.step_s


@pytest.mark.drawn(1)
@pytest.mark.parametrize("times", [1.0, 1.5])
@pytest.mark.parametrize("replays", [True, False])
def test_codecs_make_no_plan_of_equal_layers_slower(replays: bool, times: float) -> None:
    plain = layers_profile(16, link_bytes_per_s=55e9, replays=replays)
    limit = times * checkpointed_bytes(Timeline(plain))
    raw, found = (Solver(Timeline(each)).solve(limit) for each in (plain, packed(plain)))
    assert found.fits
    assert found.prediction.step_s <= raw.prediction.step_s * 1.002


def with_products(profile: StepProfile) -> StepProfile:
    """Return the profile with replays of what linear layers return, at 370 TFLOP/s."""
    made_from = {"v": "input", "gate": "input2", "up": "input2"}

    def replayed(site: SiteProfile) -> SiteProfile:
        layer, name = site.site.split(".")
        source = made_from.get(name)
        if source is None:
            return site
        seconds = site.nbytes * 4096 / 370e12
        return replace(site, replay_s=seconds, replay_from=(f"{layer}.{source}",))

    return replace(profile, sites=tuple(map(replayed, profile.sites)))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("more_bytes", [-(3 * 10**8), 0, 3 * 10**8])
def test_replays_of_products_lead_no_search_astray(more_bytes: int) -> None:
    """Where layers are computed again as fast as here, they gain nothing, and are more to try."""
    layers = packed(layers_profile(16, link_bytes_per_s=55e9, replays=True))
    timeline, without = Timeline(with_products(layers)), Timeline(layers)
    limit = checkpointed_bytes(timeline) + more_bytes
    found = Solver(timeline).solve(limit)
    assert found.fits
    assert found.prediction.step_s < 1.015 * Solver(without).solve(limit).prediction.step_s
    every = timeline.choices({site.site: CHECKPOINT for site in layers.sites})
    assert found.prediction.step_s < 0.9 * timeline.predict(every).step_s


def as_profiled(site: SiteProfile) -> SiteProfile:
    """Return a site with what an H200 was profiled to take for its packing and replay."""
    name = site.site.split(".")[1]
    share, encodes, decodes = (0.36, 630e9, 1.1e12) if "cast" in name else (0.7, 315e9, 1.3e12)
    packing = Packing(share, site.nbytes / encodes, site.nbytes / decodes)
    replays = {"normed": 332e-6, "input": 186e-6, "silu": 214e-6, "product": 293e-6}
    replay_s = replays.get(name.rstrip("2"), site.replay_s)
    return replace(site, packings={"ibp-blob": packing}, replay_s=replay_s)


def test_layouts_of_layers_are_no_dead_end() -> None:
    """A plan of whole layers that is better at first is not all that is improved."""
    layers = with_products(layers_profile(16, link_bytes_per_s=55e9, replays=True))
    modules = tuple(replace(each, checkpoint_s=14.37e-3) for each in layers.modules)
    profile = replace(layers, sites=tuple(map(as_profiled, layers.sites)), modules=modules)
    timeline = Timeline(profile)
    limit = checkpointed_bytes(timeline)
    every = timeline.choices({site.site: CHECKPOINT for site in profile.sites})
    found = [Solver(timeline).solve(limit + more * 10**8) for more in (-3, -1, 1, 3)]
    assert all(each.fits for each in found)
    mean_s = sum(each.prediction.step_s for each in found) / len(found)
    assert mean_s < 0.876 * timeline.predict(every).step_s


@pytest.mark.drawn(1)
@pytest.mark.parametrize("link_bytes_per_s", [25e9, 55e9])
def test_more_memory_makes_no_plan_of_equal_layers_slower(link_bytes_per_s: float) -> None:
    timeline = Timeline(layers_profile(12, link_bytes_per_s=link_bytes_per_s, replays=True))
    last_s = np.inf
    for times in (1.0, 1.2, 1.5, 2.0, 3.0):
        found = Solver(timeline).solve(times * checkpointed_bytes(timeline))
        assert found.fits
        assert found.prediction.step_s <= last_s * 1.005
        last_s = found.prediction.step_s


@pytest.mark.drawn(1)
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_takes_less_than_its_least_seconds(seed: int) -> None:
    timeline = Timeline(drawn_profile(seed, 20))
    layouts = ModuleLayouts(timeline, OptionCosts.of(timeline))
    draw = np.random.default_rng(seed)
    for _ in range(20):
        options = [draw.integers(len(own)) for own in timeline.candidates]
        flags = draw.random(len(timeline.profile.modules)) < 0.5
        choices = Choices(np.array(options, np.intp), flags)
        if timeline.valid(choices):
            predicted = timeline.predict(choices)
            waited_s = predicted.stall_s
            assert layouts.least_s(choices) == pytest.approx(predicted.step_s - waited_s)
