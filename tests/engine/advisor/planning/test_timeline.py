"""The timeline: waits, handing back, fetching ahead, replays and memory, by hand and drawn."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bitslab import ArgumentError
from bitslab.engine.advisor import SwapLink
from bitslab.engine.advisor.planning import (
    CHECKPOINT,
    KEEP,
    REPLAY,
    Candidate,
    Choices,
    DiskRates,
    ModuleProfile,
    Packing,
    SiteProfile,
    StepProfile,
    Timeline,
    drawn_profile,
)

MB = 1_000_000
HOST, DISK = Candidate("host"), Candidate("disk")
# 1 MB takes 1 ms on the link each way, and 4 ms on the SSD.
LINK, SLOW_DISK = SwapLink(1e9, 1e9), DiskRates(0.25e9, 0.25e9)


def layers(sizes: list[int], **more: Any) -> StepProfile:
    """Return a step with a tensor of so many megabytes after each 10 ms, read after 10 ms each."""
    n = len(sizes)
    sites = tuple(
        SiteProfile(
            site=str(i),
            nbytes=size * MB,
            saved_s=0.01 * (i + 1),
            read_s=0.01 * (n + 1 + n - i),
            freed_s=0.01 * (n + 2 + n - i),
            packings={"zvc": Packing(0.5, 0.001, 0.002)},
        )
        for i, size in enumerate(sizes)
    )
    facts: dict[str, Any] = {
        "sites": sites,
        "turn_s": 0.01 * (n + 1),
        "end_s": 0.01 * (2 * n + 2),
        "link": LINK,
        "disk": SLOW_DISK,
        **more,
    }
    return StepProfile(**facts)


def followed(profile: StepProfile, chosen: dict[str, Candidate], **limits: float):
    timeline = Timeline(profile)
    return timeline.follow(timeline.choices(chosen), **limits)


def test_everything_kept_takes_what_was_profiled() -> None:
    profile = layers([4, 4, 2], rest_s=0.5, other_bytes=((0.0, 7 * MB), (0.05, 8 * MB)))
    prediction, trace = followed(profile, {})
    assert prediction.step_s == pytest.approx(0.58)
    # All three are alive at the turn (40 ms) and until the last is freed at 60 ms.
    assert prediction.peak_bytes == (10 + 8) * MB
    assert prediction.stall_s == prediction.codec_s == prediction.link_bytes == 0
    assert max(trace.bytes) == prediction.peak_bytes


def sized_late(profile: StepProfile) -> StepProfile:
    """Return a profile of a GPU, where packed tensors take their raw bytes until they are sized."""
    late = {"zvc": Packing(0.5, 0.001, 0.002, 1.0)}
    return replace(profile, sites=tuple(replace(each, packings=late) for each in profile.sites))


def test_packed_tensors_take_what_they_may_need_until_they_are_on_the_host() -> None:
    profile = layers([4, 4])
    plan = {"0": Candidate("host", "zvc")}
    assert followed(profile, plan)[0].peak_bytes == 6 * MB
    assert followed(sized_late(profile), plan)[0].peak_bytes == 8 * MB
    slow = replace(profile, link=SwapLink(0.1e9, 0.1e9))
    assert followed(slow, plan)[0].peak_bytes == (2 + 4) * MB
    assert followed(sized_late(slow), plan)[0].peak_bytes == (4 + 4) * MB


def test_what_is_packed_in_place_is_given_back_when_its_size_is_known() -> None:
    profile = layers([4, 4, 4, 4])
    plan = {str(i): Candidate("device", "zvc") for i in range(4)}
    assert followed(profile, plan)[0].peak_bytes == 12 * MB  # 8 packed, and the last one raw
    # The third one is raw, too, while the fourth is packed, to 4 MB at first.
    late = followed(sized_late(profile), plan)[0]
    assert late.peak_bytes == (2 * 4 + 4 * 2 + 4) * MB


def test_copies_that_compute_hides_cost_nothing() -> None:
    prediction, trace = followed(layers([4, 4, 4]), {"0": HOST}, limit_bytes=8 * MB)
    assert prediction.step_s == pytest.approx(0.08)
    assert prediction.peak_bytes == 8 * MB
    assert prediction.link_bytes == 4 * MB
    # There is room for it from when the last one is freed, after the read of the middle one.
    timeline = Timeline(layers([4, 4, 4]))
    assert timeline.moments[trace.fetch_at[0]] == pytest.approx(0.06)


def test_the_device_waits_for_memory_and_for_what_is_not_back() -> None:
    # 30 MB leave in 30 ms: from 10 to 40. The third tensor has room at 40 in the place of 30.
    profile = layers([30, 2, 30])
    prediction, _ = followed(profile, {"0": HOST, "1": KEEP}, limit_bytes=32 * MB)
    assert prediction.forward_stall_s == pytest.approx(0.010)
    # It may come when the third is freed: read at 50 + 10, freed at 60 + 10, and 0 is read at 80.
    assert prediction.backward_stall_s == pytest.approx(0.020)
    assert prediction.step_s == pytest.approx(0.08 + 0.030)
    assert prediction.peak_bytes == 32 * MB


def test_a_tensor_on_its_way_out_is_handed_back() -> None:
    profile = layers([4, 100])
    prediction, trace = followed(profile, {"1": HOST})
    assert prediction.step_s == pytest.approx(profile.step_s)
    assert trace.queues["down"] == []
    assert prediction.peak_bytes == 104 * MB


def test_what_was_handed_back_takes_memory_until_it_has_left() -> None:
    # It leaves from 20 to 120 ms, and is freed at 50, when 20 MB come.
    profile = layers([4, 100], other_bytes=((0.0, 0), (0.05, 20 * MB)))
    prediction, trace = followed(profile, {"1": HOST})
    assert prediction.peak_bytes == (4 + 20 + 100) * MB
    assert trace.queues["down"] == []
    prediction, _ = followed(profile, {"1": HOST}, limit_bytes=110 * MB)
    assert prediction.peak_bytes == 104 * MB
    assert prediction.backward_stall_s == pytest.approx(0.07)


def test_a_tensor_on_disk_leaves_when_it_is_written() -> None:
    # 4 MB: 4 ms on the link, 16 on the SSD. From 10 to 26; the second would come at 20.
    sizes = [4, 4, 4]
    prediction, trace = followed(layers(sizes), {"0": DISK}, limit_bytes=8 * MB)
    assert prediction.written_bytes == 4 * MB
    assert prediction.host_bytes == 0
    # Room from 60 ms on, read at 70: 16 ms from the SSD.
    assert prediction.backward_stall_s == pytest.approx(0.006)
    assert trace.waited_for["read"] == [(0, 0)]
    assert trace.waited_for["down"] == []
    prediction, trace = followed(layers([4, 4]), {"0": DISK}, limit_bytes=4 * MB)
    assert prediction.forward_stall_s == pytest.approx(0.006)
    assert trace.waited_for["write"] == [(0, 0)]


def test_tensors_on_disk_are_read_before_there_is_room_for_them() -> None:
    sizes = [4, 4, 4]
    profile = layers(sizes, read_ahead_bytes=4 * MB)
    prediction, trace = followed(profile, {"0": DISK}, limit_bytes=8 * MB)
    # Read from 40 to 56 ms to host memory; it crosses at 60, when there is room, in 4 ms.
    timeline = Timeline(profile)
    assert trace.read_at == {0: timeline.turn}
    assert timeline.moments[trace.fetch_at[0]] == pytest.approx(0.06)
    assert prediction.backward_stall_s == 0
    assert prediction.peak_bytes == 8 * MB
    # Two of them: the second one's host memory is free when the first has been read, at 60 ms.
    both = {"0": DISK, "1": DISK}
    _, trace = followed(profile, both, limit_bytes=8 * MB)
    assert {i: timeline.moments[at] for i, at in trace.read_at.items()} == {
        1: pytest.approx(0.04),
        0: pytest.approx(0.06),
    }
    _, trace = followed(replace(profile, read_ahead_bytes=8 * MB), both, limit_bytes=8 * MB)
    assert trace.read_at == {0: timeline.turn, 1: timeline.turn}


def test_a_late_read_is_waited_for_and_one_that_waits_to_be_written_is_not_read() -> None:
    slow = DiskRates(1e9, 0.1e9)  # 4 MB are read in 40 ms
    profile = layers([4, 4, 4], disk=slow, read_ahead_bytes=4 * MB)
    prediction, trace = followed(profile, {"0": DISK}, limit_bytes=8 * MB)
    # From 40 to 80, and 4 ms on the link; it is wanted at 70.
    assert prediction.backward_stall_s == pytest.approx(0.014)
    assert trace.waited_for["read"] == [(0, 0)]
    profile = layers([4, 4, 4], disk=DiskRates(0.1e9, 0.25e9), read_ahead_bytes=4 * MB)
    prediction, trace = followed(profile, {"0": DISK})  # written from 10 to 50 ms
    assert trace.read_at == {0: Timeline(profile).turn}
    assert trace.queues["read"] == []
    assert prediction.backward_stall_s == 0


def test_codecs_take_the_devices_time_and_fewer_bytes_cross() -> None:
    profile = layers([4, 4, 4])
    prediction, _ = followed(profile, {"0": Candidate("host", "zvc")})
    assert prediction.link_bytes == 2 * MB
    assert prediction.codec_s == pytest.approx(0.003)
    assert prediction.step_s == pytest.approx(0.083)
    packed, trace = followed(profile, {"0": Candidate("device", "zvc")})
    assert packed.link_bytes == 0
    assert packed.codec_s == pytest.approx(0.003)
    at_turn = trace.bytes[int(np.searchsorted(np.array(trace.moments_s), 0.0409))]
    assert at_turn == (2 + 4 + 4) * MB


def test_a_replayed_tensor_brings_its_source_back_sooner() -> None:
    profile = layers([4, 4, 4])
    last = replace(profile.sites[2], replay_s=0.001, replay_from=("0",))
    profile = replace(profile, sites=(*profile.sites[:2], last))
    timeline = Timeline(profile)
    choices = timeline.choices({"2": REPLAY})
    assert timeline.predict(choices).recompute_s == pytest.approx(0.001)
    assert timeline.predict(choices).peak_bytes == 12 * MB  # while it is read
    choices = timeline.choices({"2": REPLAY, "0": HOST})
    need, read = timeline.needed(choices)
    assert timeline.moments[read[0]] == pytest.approx(0.05)
    assert need.max() == 12 * MB


def test_a_checkpointed_module_is_there_at_once_in_its_backward_pass() -> None:
    module = ModuleProfile(
        module="m",
        begin_s=0.005,
        backward_begin_s=0.06,
        backward_end_s=0.08,
        checkpoint_s=0.02,
        checkpoint_bytes=MB,
    )
    plain = layers([4, 4, 4])
    sites = tuple(replace(s, module="m") if s.site in "01" else s for s in plain.sites)
    profile = replace(plain, sites=sites, modules=(module,))
    timeline = Timeline(profile)
    choices = timeline.choices({"0": CHECKPOINT})
    assert set(timeline.named(choices).values()) == {CHECKPOINT, KEEP}
    prediction, trace = timeline.follow(choices)
    assert prediction.step_s == pytest.approx(0.10)
    curve = dict(zip(np.round(trace.moments_s, 4).tolist(), trace.bytes, strict=True))
    assert curve[0.04] == (1 + 4) * MB
    assert prediction.peak_bytes == (1 + 4 + 4) * MB


def test_both_ways_at_once_are_slower() -> None:
    # The last one is still leaving when the first is fetched: from the turn on, as all may be.
    plain = layers([10, 30, 60])
    chosen = {"0": HOST, "1": KEEP, "2": HOST}
    fast, _ = followed(plain, chosen, limit_bytes=1000 * MB, ahead_bytes=10 * MB)
    slow, _ = followed(
        replace(plain, link_share_both_ways=0.1),
        chosen,
        limit_bytes=1000 * MB,
        ahead_bytes=10 * MB,
    )
    assert fast.backward_stall_s == 0
    assert slow.backward_stall_s > 0.01


def test_bytes_in_flight_are_bounded() -> None:
    profile = layers([30, 30, 30])
    free, _ = followed(profile, {"0": HOST, "1": HOST})
    bound, _ = followed(profile, {"0": HOST, "1": HOST}, in_flight_bytes=30 * MB)
    assert free.forward_stall_s == 0
    # The second is given up at 30 ms, when the first is on its way until 40.
    assert bound.forward_stall_s == pytest.approx(0.010)


def random_choices(timeline: Timeline, draw: random.Random) -> Choices:
    options = [draw.randrange(len(own)) for own in timeline.candidates]
    flags = [draw.random() < 0.3 for _ in timeline.profile.modules]
    return Choices(np.array(options, np.intp), np.array(flags, bool))


@pytest.mark.parametrize("seed", range(12))
def test_drawn_plans_keep_to_the_limit_and_account_for_all_seconds(seed: int) -> None:
    draw = random.Random(seed)
    timeline = Timeline(drawn_profile(seed, draw.randint(1, 30)))
    plain = timeline.predict(timeline.keep_all())
    assert plain.step_s == pytest.approx(timeline.profile.step_s)
    for _ in range(20):
        choices = random_choices(timeline, draw)
        floor = float(timeline.floor(choices).max())
        limit = floor * draw.uniform(1.0, 1.2)
        found, trace = timeline.follow(choices, limit_bytes=limit)
        assert found.peak_bytes <= limit + 0.5
        assert found.peak_bytes >= floor * 0.4
        parts = found.stall_s + found.codec_s + found.recompute_s
        assert found.step_s == pytest.approx(plain.step_s + parts)
        assert max(trace.bytes) <= found.peak_bytes
        assert trace.moments_s == sorted(trace.moments_s)
        roomy = timeline.predict(choices, limit_bytes=plain.peak_bytes * 3)
        assert roomy.forward_stall_s == 0


@pytest.mark.parametrize("seed", range(12))
def test_no_fetch_begins_amid_a_module_that_is_computed_again(seed: int) -> None:
    """But with the read itself: what such a module reads is not seen."""
    draw = random.Random(seed)
    timeline = Timeline(drawn_profile(seed, 30))
    fetches = 0
    for _ in range(20):
        choices = random_choices(timeline, draw)
        limit = float(timeline.floor(choices).max()) * draw.uniform(1.0, 1.5)
        _, trace = timeline.follow(choices, limit_bytes=limit)
        fetches += len(trace.fetch_at)
        inside = [
            (timeline.recomputed[m], timeline.ends[m]) for m in np.flatnonzero(choices.checkpointed)
        ]
        reads = timeline.needed(choices)[1]
        for i, at in trace.fetch_at.items():
            assert at == reads[i] or not any(begin < at < end for begin, end in inside)
    assert fetches


def test_choices_are_checked() -> None:
    timeline = Timeline(layers([1]))
    with pytest.raises(ArgumentError, match="'x' is no site"):
        timeline.choices({"x": KEEP})
    with pytest.raises(ArgumentError, match="replay of '0', accepted are keep, device:zvc, host"):
        timeline.choices({"0": REPLAY})
    with pytest.raises(ArgumentError, match="action"):
        Candidate("moved")  # type: ignore[arg-type]
    for wrong in ("device", "keep:zvc", "replay:zvc"):
        with pytest.raises(ArgumentError, match="codec"):
            Candidate.named(wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"link": None}, "disk: given with no link"),
        ({"turn_s": 9.0}, "turn_s: 9.0"),
        ({"link_share_both_ways": 0.0}, "link_share_both_ways"),
        ({"other_bytes": ((1.0, 1), (0.0, 1))}, "ascending"),
    ],
)
def test_profiles_are_checked(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        layers([1], **wrong)


def test_sites_are_checked() -> None:
    profile = layers([1, 1])
    first, second = profile.sites
    wrong = [
        ((first, first), "two of '0'"),
        ((second, first), "before the site in front"),
        ((replace(first, module="m"),), "module 'm'"),
        ((replace(first, replay_from=("1",)), second), "'1' was not saved before"),
        ((replace(first, read_s=0.0, freed_s=0.05),), "the backward pass is from"),
    ]
    for sites, said in wrong:
        with pytest.raises(ArgumentError, match=said):
            replace(profile, sites=sites)
    with pytest.raises(ArgumentError, match="no order"):
        replace(first, read_s=first.freed_s + 1)
    with pytest.raises(ArgumentError, match="nbytes"):
        replace(first, nbytes=-1)


def test_profiles_are_written_and_read() -> None:
    profile = drawn_profile(3, 12)
    assert StepProfile.from_dict(profile.to_dict()) == profile
    with pytest.raises(ArgumentError, match="version 9"):
        StepProfile.from_dict({**profile.to_dict(), "version": 9})
    for damaged in ({}, {**profile.to_dict(), "sites": [1]}):
        with pytest.raises(ArgumentError, match="not one that was written here"):
            StepProfile.from_dict(damaged)


def test_times_are_scaled_by_kind() -> None:
    plain = layers([4, 4, 4])
    scaled = plain.scaled(compute=2, codecs=3, link=4, disk=5)
    assert scaled.step_s == pytest.approx(2 * plain.step_s)
    chosen = {"0": Candidate("disk", "zvc")}
    before, after = followed(plain, chosen)[0], followed(scaled, chosen)[0]
    assert after.codec_s == pytest.approx(3 * before.codec_s)
    assert after.up_s == pytest.approx(4 * before.up_s)
    assert after.write_s == pytest.approx(5 * before.write_s)
    packed = followed(plain.scaled(encoding=6), chosen)[0]
    assert packed.encode_s == pytest.approx(6 * before.encode_s)
    unpacking = before.codec_s - before.encode_s
    assert packed.codec_s - packed.encode_s == pytest.approx(unpacking)
    assert before.encode_s > 0 < unpacking
    with pytest.raises(ArgumentError, match="link: 0"):
        plain.scaled(link=0)
