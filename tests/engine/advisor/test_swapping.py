"""The cost model of swapping: equations 3 to 7, the queue of the link, hysteresis, rows."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from bitslab import ArgumentError
from bitslab.engine.advisor import (
    CodecTimes,
    Decision,
    DecisionHistory,
    Line,
    LinkModel,
    SiteRecord,
    SwapLink,
    TimeModel,
    agreement,
    decide,
    packed_bytes,
    swap_cost,
)
from bitslab.engine.advisor.decision_history import MOST_PROFILES

MB = 1_000_000


def times(encode: float, decode: float) -> CodecTimes:
    """Return times of so many seconds a raw byte."""
    encoding, decoding = (((Line(0.0, rate, 0.0),),) for rate in (encode, decode))
    return CodecTimes((0.2, 0.8), (1.0 * MB, 2000.0 * MB), encoding, decoding)


# 1 GB/s on the link; the codecs take 1/10 and 1/4 of the link's time for a byte.
LINK = SwapLink(1e9, 1e9)
MODEL = TimeModel({("zvc", 4): times(5e-11, 5e-11), ("csr", 4): times(1e-10, 1.5e-10)})


def record(site: str, megabytes: float, forward: float = 0.0, backward: float = 0.0, **more: Any):
    facts: dict[str, Any] = {"ratio": {"zvc": 0.5}, "sparsity": 0.53, "sparse": True, **more}
    return SiteRecord(
        site=site,
        shape=(int(megabytes * MB) // 4,),
        dtype=torch.float32,
        nbytes=int(megabytes * MB),
        hidden_forward_s=forward,
        hidden_backward_s=backward,
        **facts,
    )


def step_seconds(
    records: Sequence[SiteRecord], plan: Sequence[str | None], link: SwapLink = LINK
) -> float:
    """Return what a step waits and packs, by following its copies one by one."""
    moved, codec_s = [], 0.0
    for site, codec in zip(records, plan, strict=True):
        moved.append(site.nbytes if codec is None else packed_bytes(site, codec))
        if codec is not None:
            codec_s += sum(MODEL.predict(codec, site.nbytes, site.ratio[codec]))
    clock = link_is_free = 0.0
    for site, n_bytes in zip(records, moved, strict=True):
        link_is_free = max(clock, link_is_free) + link.to_host_seconds(n_bytes)
        clock += site.hidden_forward_s
    waited = max(0.0, link_is_free - clock)
    clock = arrived = late = 0.0
    for site, n_bytes in reversed(list(zip(records, moved, strict=True))):
        arrived += link.to_device_seconds(n_bytes)
        clock += site.hidden_backward_s
        late = max(late, arrived - clock)
    return codec_s + waited + late


def plan_of(decisions: Sequence[Decision]) -> list[str | None]:
    return [decision.codec for decision in decisions]


@pytest.mark.parametrize(
    ("forward", "backward", "raw_s", "packed_s"),
    [
        (0.0, 0.0, 0.2, 0.1 + 0.01),
        (0.06, 0.02, 0.04 + 0.08, 0.0 + 0.03 + 0.01),
        (0.08, 0.3, 0.02, 0.01),
        (0.2, 0.3, 0.0, 0.01),  # hidden: raw
    ],
)
@pytest.mark.parametrize("published", [False, True])
def test_one_tensor_is_charged_as_in_equations_3_to_6(
    forward: float, backward: float, raw_s: float, packed_s: float, published: bool
) -> None:
    # With half of the elements zero and no metadata both sizes are the same.
    site = record("a", 100, forward, backward, sparsity=0.5)
    (decision,) = decide([site], MODEL, LINK, published=published)
    assert decision.raw_s == pytest.approx(raw_s)
    assert decision.packed_s == pytest.approx(packed_s)
    assert decision.action == ("pack" if raw_s > packed_s else "raw")
    cost = swap_cost(site, LINK, 50 * MB, 0.004, 0.006)
    assert cost.total_s == pytest.approx(packed_s)
    assert (cost.encode_s, cost.decode_s) == (0.004, 0.006)


def test_published_sizes_are_those_of_equation_7() -> None:
    site = record("a", 100)
    assert packed_bytes(site, "zvc") == 50 * MB
    assert packed_bytes(site, "zvc", published=True) == pytest.approx(47 * MB)
    dense = record("b", 100, sparse=False, ratio={"zfp": 32 / 128})
    assert packed_bytes(dense, "zfp", published=True) == 25 * MB
    (published,) = decide([site], MODEL, LINK, published=True)
    (ours,) = decide([site], MODEL, LINK)
    assert published.packed_s == pytest.approx(2 * 0.047 + 0.01)
    assert ours.packed_s == pytest.approx(2 * 0.05 + 0.01)


def test_published_charges_no_tensor_for_another() -> None:
    # Each alone is hidden nearly, but all are saved at once.
    sites = [
        record(f"{i}", 10, 0.011 if i == 3 else 0.0, 0.011 if i == 3 else 0.0) for i in range(4)
    ]
    published = decide(sites, MODEL, LINK, published=True)
    assert [decision.raw_s for decision in published] == pytest.approx([0.02, 0.02, 0.02, 0.0])
    assert [decision.action for decision in published] == ["pack", "pack", "pack", "raw"]
    ours = decide(sites, MODEL, LINK)
    # 40 ms of copies and 11 of compute each way: the last one waits for the others.
    assert ours[3].action == "pack" and ours[3].raw_s > 0
    costly = SwapLink(1e9, 1e9, copy_seconds=1.0)
    assert decide(sites, MODEL, costly, published=True) == published


def test_compute_that_comes_later_hides_what_waits() -> None:
    # The first copy ends long after its own compute, and long before the pass does.
    sites = [record("a", 100, 0.01, 1.0), record("b", 1, 1.0, 0.01)]
    assert decide(sites, MODEL, LINK, published=True)[0].action == "pack"
    first, second = decide(sites, MODEL, LINK)
    assert (first.action, first.raw_s) == ("raw", 0.0)
    assert first.reason.startswith("Raw: hidden; 0 ms raw, 10 ms by zvc (53% zeros, 50% of the")
    assert second.action == "raw"


def random_records(seed: int, n: int) -> list[SiteRecord]:
    random_ = random.Random(seed)
    return [
        record(
            f"layer{i}",
            random_.uniform(1, 200),
            random_.choice([0.0, random_.uniform(0, 0.2)]),
            random_.choice([0.0, random_.uniform(0, 0.2)]),
            ratio={"zvc": random_.uniform(0.2, 1.03), "csr": random_.uniform(0.3, 1.4)},
        )
        for i in range(n)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_never_behind_raw_or_static_and_close_to_the_best_plan(seed: int) -> None:
    sites = random_records(seed, 6)
    link = SwapLink(1e9, 0.8e9, copy_seconds=1e-4)
    seconds = {
        policy: step_seconds(sites, plan_of(decide(sites, MODEL, link, policy=policy)), link)
        for policy in ("auto", "raw", "static")
    }
    assert seconds["auto"] <= min(seconds["raw"], seconds["static"]) + 1e-12
    plans = itertools.product([None, "zvc", "csr"], repeat=len(sites))
    best = min(step_seconds(sites, plan, link) for plan in plans)
    assert seconds["auto"] <= 1.02 * best + 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_what_a_tensor_is_charged_is_what_the_step_takes_longer(seed: int) -> None:
    sites = random_records(seed, 40)
    decisions = decide(sites, MODEL, LINK)
    plan = plan_of(decisions)
    for i, decision in enumerate(decisions):
        assert decision.packed_s is not None
        other = [*plan[:i], None, *plan[i + 1 :]]
        if plan[i] is not None:
            gain = step_seconds(sites, other) - step_seconds(sites, plan)
            assert decision.raw_s - decision.packed_s == pytest.approx(gain, abs=1e-9)
            assert gain > 0
        # What is charged is no more than all that the step would wait.
        assert -1e-12 <= decision.raw_s <= step_seconds(sites, other) + 1e-9


def test_policies() -> None:
    sites = random_records(3, 8) + [record("plain", 10, ratio={})]
    assert {d.action for d in decide(sites, MODEL, LINK, policy="raw")} == {"raw"}
    kept = decide(sites, MODEL, LINK, policy="keep")
    assert {d.action for d in kept} == {"keep"}
    static = decide(sites, MODEL, LINK, policy="static")
    assert [d.action for d in static] == ["pack"] * 8 + ["raw"]
    assert static[-1].packed_s is None
    assert decide([], MODEL, LINK) == []
    unknown = decide([record("a", 100, ratio={"lz4": 0.1})], MODEL, LINK)
    assert unknown[0].action == "raw" and "no codec may pack it" in unknown[0].reason


def test_the_best_codec_of_a_site_is_taken() -> None:
    site = record("a", 100, ratio={"zvc": 0.5, "csr": 0.2})
    assert decide([site], MODEL, LINK)[0].codec == "csr"  # 0.04 + 0.025 s against 0.1 + 0.01
    site = record("a", 100, ratio={"zvc": 0.5, "csr": 0.45})
    assert decide([site], MODEL, LINK)[0].codec == "zvc"


def test_hysteresis() -> None:
    # Packed by zvc T is 2 S x ratio + S / 10, and T' is 2 S: equal at a ratio of 0.95.
    def at(ratio: float) -> list[SiteRecord]:
        return [record("a", 100, ratio={"zvc": ratio})]

    packed, raw = decide(at(0.5), MODEL, LINK), decide(at(1.0), MODEL, LINK)
    assert (packed[0].action, raw[0].action) == ("pack", "raw")
    for ratio, unchanged in ((0.94, True), (0.96, True), (0.89, False)):
        (now,) = decide(at(ratio), MODEL, LINK, previous=raw)
        assert (now.action == "raw") == unchanged
    for ratio, unchanged in ((0.94, True), (0.99, True), (1.01, False)):
        (now,) = decide(at(ratio), MODEL, LINK, previous=packed)
        assert (now.action == "pack") == unchanged
    (held,) = decide(at(0.94), MODEL, LINK, previous=raw)
    assert "as before, since the change would save too little" in held.reason
    assert decide(at(0.94), MODEL, LINK, previous=raw, hysteresis=0.0)[0].action == "pack"
    # All that there is may be held, and costs what it costs now.
    for last, action in ((packed, "pack"), (raw, "raw")):
        (kept,) = decide(at(1.5), MODEL, LINK, previous=last, hysteresis=math.inf)
        assert kept.action == action and kept.packed_s is not None
        assert kept.packed_s > kept.raw_s == raw[0].raw_s
    # Of sites or codecs that were not there before, nothing is held.
    assert decide(at(0.94), MODEL, LINK, previous=[])[0].action == "pack"
    gone = [Decision("a", "pack", "lz4", 0.0, 0.0, "")]
    assert decide(at(0.94), MODEL, LINK, previous=gone)[0].action == "pack"


def test_decisions_do_not_flutter() -> None:
    random_ = random.Random(0)
    base = random_records(0, 30)
    decisions, changes = decide(base, MODEL, LINK), {0.0: 0, 0.05: 0}
    for hysteresis in changes:
        last = decisions
        for _ in range(10):
            noisy = [
                record(
                    site.site,
                    site.nbytes / MB,
                    site.hidden_forward_s,
                    site.hidden_backward_s,
                    ratio={c: r * random_.uniform(0.98, 1.02) for c, r in site.ratio.items()},
                )
                for site in base
            ]
            now = decide(noisy, MODEL, LINK, previous=last, hysteresis=hysteresis)
            pairs = zip(now, last, strict=True)
            changes[hysteresis] += sum(a.codec != b.codec for a, b in pairs)
            last = now
    assert changes[0.05] < changes[0.0]


def test_outside_the_fitted_range_is_said() -> None:
    (decision,) = decide([record("a", 100, ratio={"zvc": 0.1})], MODEL, LINK)
    assert decision.reason.endswith("; outside the fitted range: a share of 0.10 (0.20 to 0.80).")


def test_drift() -> None:
    then = record("a", 100, ratio={"zvc": 0.50}, sparsity=0.53)
    assert not record("a", 100, ratio={"zvc": 0.54}, sparsity=0.50).drifted(then)
    assert record("a", 100, ratio={"zvc": 0.56}, sparsity=0.53).drifted(then)
    assert record("a", 100, ratio={}, sparsity=0.60).drifted(then)
    assert record("a", 100, ratio={"csr": 0.5}, sparsity=0.53).drifted(then)
    assert record("a", 101, ratio={"zvc": 0.50}, sparsity=0.53).drifted(then)


def test_the_link() -> None:
    model = LinkModel(device_to_host_bytes_per_s=3e9, host_to_device_bytes_per_s=2e9)
    link = SwapLink.of(model)
    assert link.to_host_seconds(3e9) == pytest.approx(1 + model.copy_seconds)
    assert link.to_device_seconds(3e9) == pytest.approx(1.5 + model.copy_seconds)
    assert SwapLink.measured("cpu").d2h_bytes_per_s > 1e6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda: decide([], MODEL, LINK, policy=cast(Any, "best")),
            "policy: 'best', accepted are auto, raw",
        ),
        (lambda: decide([record("a", 1)] * 2, MODEL, LINK), "records: two of site 'a'"),
        (lambda: decide([], MODEL, LINK, hysteresis=-1), "hysteresis: -1, accepted"),
        (lambda: decide([], MODEL, LINK, hysteresis=math.nan), "hysteresis: nan, accepted"),
        (lambda: record("a", 1, ratio={"zvc": float("nan")}), "site 'a': ratio of 'zvc': nan"),
        (lambda: record("a", 1, forward=-1.0), "site 'a': hidden_forward_s: -1.0"),
        (lambda: record("a", 1, sparsity=1.5), "site 'a': sparsity: 1.5"),
        (lambda: SwapLink(0.0, 1.0), "d2h_bytes_per_s: 0.0"),
        (lambda: SwapLink(1.0, 1.0, -1.0), "copy_seconds: -1.0"),
        (lambda: DecisionHistory().add(0, [record("a", 1)], []), "decisions: of other sites"),
    ],
)
def test_bad_arguments(wrong: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        wrong()
    assert message in str(caught.value)


def test_rows_of_figures_8_and_9() -> None:
    history, last = DecisionHistory(), None
    for epoch, shares in enumerate([(1.0, 0.97), (0.6, 0.97), (0.5, 0.6)]):
        sites = [record(name, 100, ratio={"zvc": s}) for name, s in zip("ab", shares, strict=True)]
        last = decide(sites, MODEL, LINK, previous=last)
        history.add(epoch, sites, last)
    assert history.packed_sites() == {0: 0, 1: 1, 2: 2}
    assert history.grid() == {
        "a": {0: "raw", 1: "zvc", 2: "zvc"},
        "b": {0: "raw", 1: "raw", 2: "zvc"},
    }
    rows = history.rows()
    assert [row["changed"] for row in rows] == [False, False, True, False, False, True]
    assert rows[2]["reason"].startswith("Packed by zvc: 200 ms raw")
    assert rows[2]["nbytes"] == 100 * MB


def test_agreement_with_measured_times() -> None:
    decisions = decide([record(name, 100) for name in "abc"], MODEL, LINK)
    assert agreement(decisions, {"a": (2.0, 1.0), "b": (1.0, 2.0)}) == 0.5
    assert agreement(decisions, {}) == 1.0


def test_a_long_history_is_thinned_out() -> None:
    history, n = DecisionHistory(), 20 * MOST_PROFILES
    sites = [record("a", 100), record("b", 100)]
    made = decide(sites, MODEL, LINK)
    for epoch in range(n):
        history.add(epoch, sites[:1], made[:1])  # of one device, and of another one
        history.add(epoch, sites[1:], made[1:])
        assert len(history.packed_sites()) <= MOST_PROFILES
    kept = list(history.packed_sites())
    assert kept[0] == 0 and kept[-1] == n - 1 and kept == sorted(kept)
    assert len(kept) >= MOST_PROFILES // 2 and len(history.rows()) == 2 * len(kept)
