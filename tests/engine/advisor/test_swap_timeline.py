"""Decisions by the timeline of a step: beside copies that are followed one by one."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from bitslab import ArgumentError, ArgumentTypeError
from bitslab.engine.advisor import (
    CodecTimes,
    Decision,
    Line,
    SiteRecord,
    SwapLimits,
    SwapLink,
    TimeModel,
    decide,
)

MB = 1_000_000
CODECS = ("zvc", "csr")
#: As on an H200: 55 GB/s each way, encoding at 1,300 and 900 GB/s, decoding at 1,800 and 1,400.
LINK = SwapLink(55e9, 54e9, 1e-5)
RATES = {"zvc": (1300e9, 1800e9), "csr": (900e9, 1400e9)}


def times(rates: tuple[float, float]) -> CodecTimes:
    encoding, decoding = (((Line(0.0, 1 / rate, 0.0),),) for rate in rates)
    return CodecTimes((0.2, 0.8), (1.0 * MB, 2000.0 * MB), encoding, decoding)


MODEL = TimeModel({(name, 4): times(rates) for name, rates in RATES.items()})


def record(
    site: str, megabytes: float, forward_ms: float, backward_ms: float, zvc: float, csr: float = 2
) -> SiteRecord:
    ratio = {name: share for name, share in (("zvc", zvc), ("csr", csr)) if share < 1.1}
    return SiteRecord(
        site=site,
        shape=(int(megabytes * MB) // 4,),
        dtype=torch.float32,
        nbytes=int(megabytes * MB),
        hidden_forward_s=forward_ms / 1e3,
        hidden_backward_s=backward_ms / 1e3,
        ratio=ratio,
    )


def step_seconds(
    sites: Sequence[SiteRecord], plan: Sequence[str | None], limits: SwapLimits
) -> float:
    """Return what a step takes with a plan, by following what the executor does, as it does it."""
    clock = link = to_host = 0.0
    sent: list[float] = []
    raw: deque[tuple[int, float]] = deque()
    staged: deque[tuple[int, float]] = deque()
    for i, (site, codec) in enumerate(zip(sites, plan, strict=True)):
        nbytes: float = site.nbytes
        if codec is not None:
            clock += MODEL.predict(codec, site.nbytes, site.ratio[codec])[0]
            nbytes *= site.ratio[codec]
        link = max(link, clock) + LINK.to_host_seconds(nbytes)
        to_host += LINK.to_host_seconds(nbytes)
        sent.append(link)
        (raw if codec is None else staged).append((i, site.nbytes))
        while raw and sum(size for _, size in raw) > limits.in_flight_bytes:
            clock = max(clock, sent[raw.popleft()[0]])
        while sum(size for _, size in list(staged)[:-2]) > limits.in_flight_bytes:
            clock = max(clock, sent[staged.popleft()[0]])
        clock += site.hidden_forward_s
    there = {i for i, _ in [*raw, *list(staged)[-2:]]}
    on_device = there | {i for i, _ in staged}  # encoded, if not as they were
    fetched: dict[int, float] = {}
    link = 0.0
    for i in reversed(range(len(sites))):
        clock += sites[i].hidden_backward_s
        window, ahead_bytes = [i], 0
        for j in range(i - 1, max(-1, i - 1 - limits.depth), -1):
            if ahead_bytes and ahead_bytes + sites[j].nbytes > limits.in_flight_bytes:
                break
            ahead_bytes += sites[j].nbytes
            window.append(j)
        for j in window:  # its own, which is waited for and decoded, and then those ahead
            codec, site = plan[j], sites[j]
            if j not in on_device and j not in fetched:
                nbytes = site.nbytes * (1.0 if codec is None else site.ratio[codec])
                link = fetched[j] = max(link, clock, sent[j]) + LINK.to_device_seconds(nbytes)
            if j == i and j not in there:
                clock = max(clock, fetched.get(j, 0.0))
                if codec is not None:
                    clock += MODEL.predict(codec, site.nbytes, site.ratio[codec])[1]
    return max(clock, to_host)  # what is behind waits in the next step


def plan_of(decisions: Sequence[Decision]) -> list[str | None]:
    return [decision.codec for decision in decisions]


def drawn(seed: int, n: int) -> tuple[list[SiteRecord], SwapLimits]:
    """Return sites as of a network that is drawn, and limits that make it wait, or not."""
    random_ = random.Random(seed)
    shrinks = random_.uniform(0.5, 1.0)
    busy = random_.uniform(0.2, 2.0)
    sites = []
    megabytes = random_.uniform(100, 900)
    for i in range(n):
        megabytes = max(5.0, megabytes * random_.uniform(shrinks, 1.2))
        ms = megabytes / 55 * busy
        zvc = random_.choice([random_.uniform(0.15, 0.9), 1.03])
        csr = zvc * random_.uniform(0.9, 1.5)
        hidden = random_.uniform(0, 2) * ms, random_.uniform(0, 3) * ms if i < n - 1 else 0.0
        sites.append(record(f"layer{i}", megabytes, *hidden, zvc, csr))
    limit = int(random_.choice([0, 64, 256, 1024, 4400]) * MB)
    return sites, SwapLimits(limit, random_.choice([1, 3]))


def static_plans(sites: Sequence[SiteRecord]) -> list[list[str | None]]:
    """Return the plans in which all sites are raw, or all packed by one codec that takes them."""
    packed = [[name if name in site.ratio else None for site in sites] for name in CODECS]
    return [[None] * len(sites), *packed]


@pytest.mark.parametrize("seed", range(10))
def test_what_is_charged_is_what_the_step_takes_longer(seed: int) -> None:
    sites, limits = drawn(seed, 30)
    for policy in ("auto", "raw", "static"):
        decisions = decide(sites, MODEL, LINK, policy=policy, limits=limits)
        plan = plan_of(decisions)
        seconds = step_seconds(sites, plan, limits)
        for i, decision in enumerate(decisions):
            if plan[i] is None:
                continue
            assert decision.packed_s is not None
            other = step_seconds(sites, [*plan[:i], None, *plan[i + 1 :]], limits)
            assert decision.raw_s - decision.packed_s == pytest.approx(other - seconds, abs=1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_auto_is_within_2_percent_of_the_best_static_plan(seed: int) -> None:
    sites, limits = drawn(seed, random.Random(seed).choice([5, 13, 17, 60]))
    auto = step_seconds(sites, plan_of(decide(sites, MODEL, LINK, limits=limits)), limits)
    best = min(step_seconds(sites, plan, limits) for plan in static_plans(sites))
    assert auto <= best + 1e-9


@pytest.mark.drawn(3)
@pytest.mark.parametrize("seed", range(100, 106))
def test_auto_is_within_2_percent_of_the_best_of_all_plans(seed: int) -> None:
    sites, limits = drawn(seed, 9)  # more plans than are all tried
    auto = step_seconds(sites, plan_of(decide(sites, MODEL, LINK, limits=limits)), limits)
    ways = [[None, *site.ratio] for site in sites]
    best = min(step_seconds(sites, plan, limits) for plan in itertools.product(*ways))
    assert auto <= 1.02 * best


@pytest.mark.parametrize("seed", range(8))
def test_what_is_held_from_the_last_decisions_costs_little(seed: int) -> None:
    sites, limits = drawn(seed, 17)
    last = decide(sites, MODEL, LINK, limits=limits)
    random_ = random.Random(seed)
    for _ in range(6):
        sites = [
            replace(site, ratio={c: r * random_.uniform(0.8, 1.2) for c, r in site.ratio.items()})
            for site in sites
        ]
        last = decide(sites, MODEL, LINK, limits=limits, previous=last)
        auto = step_seconds(sites, plan_of(last), limits)
        assert auto <= 1.02 * min(step_seconds(sites, p, limits) for p in static_plans(sites))


def test_compute_that_waits_for_a_raw_copy_is_charged_for_it() -> None:
    # As the inputs of AlexNet's convolutions, 1024 images: those of the first have no zeros. Its
    # copy is hidden by the compute behind it, unless that has to wait until the original is read.
    sites = [
        record("images", 616, 4.0, 9.0, 1.03),
        record("pool1", 191, 3.0, 6.0, 0.55),
        record("pool2", 133, 2.0, 4.0, 0.6),
        record("relu3", 266, 2.0, 4.0, 0.6),
        record("relu4", 177, 3.0, 0.0, 0.65),
    ]
    narrow, wide = SwapLimits(256 << 20, 3), SwapLimits(4 << 30, 3)
    images = decide(sites, MODEL, LINK, limits=narrow)[0]
    assert images.codec == "zvc" and images.packed_s is not None
    # 616 MB take 11.2 ms; packed, though no smaller, they cross while the step goes on.
    assert images.raw_s > 0.011 and images.packed_s < 0.006
    assert decide(sites, MODEL, LINK, limits=wide)[0].action == "raw"
    assert decide(sites, MODEL, LINK)[0].action == "raw"  # what the link's queue alone says


def test_many_equal_layers_are_decided_together() -> None:
    layers = [
        record(f"{i}.{part}", size, 0.4, 0.8, zvc)
        for i in range(60)
        for part, size, zvc in (("norm", 33, 1.03), ("gelu", 134, 0.5), ("drop", 33, 0.3))
    ]
    limits = SwapLimits(1 << 30, 3)
    decisions = decide(layers, MODEL, LINK, limits=limits)
    # The originals of the last ones are still there.
    early = [d for d in decisions if int(d.site.split(".")[0]) < 50]
    assert {d.codec for d in early if d.site.endswith("gelu")} == {"zvc"}
    assert {d.codec for d in early if d.site.endswith("norm")} == {None}
    auto = step_seconds(layers, plan_of(decisions), limits)
    assert auto <= min(step_seconds(layers, plan, limits) for plan in static_plans(layers))
    again = decide(layers, MODEL, LINK, limits=limits, previous=decisions)
    assert plan_of(again) == plan_of(decisions)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ((-1, 3), ArgumentError, "in_flight_bytes: -1, accepted are numbers from 0"),
        ((0, -3), ArgumentError, "depth: -3, accepted are numbers from 0"),
        ((0, 3, 0), ArgumentError, "staged_copies: 0, accepted are numbers from 1"),
        ((1.5, 3), ArgumentTypeError, "in_flight_bytes: expected an int, got 1.5"),
    ],
)
def test_limits_are_checked(values: tuple[int, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        SwapLimits(*values)
    assert message in str(caught.value)
