"""Where a copy goes, by tiers, limits and what a policy wants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bitslab
from bitslab import ArgumentError, ArgumentTypeError
from bitslab.activations.disk import DiskRates, DiskTier
from bitslab.activations.tiers import HostLimit, Tiers

KIB = 1 << 10
RATES = DiskRates(64 * KIB, 1, 1, 1e9, 1e9, 1e9, 1e9, direct=True)
GPU = {"on_gpu": True, "encoded": False}
CPU = {"on_gpu": False, "encoded": False}
PACKED = {"on_gpu": False, "encoded": True}


def test_the_host_alone() -> None:
    assert Tiers().place(1 << 60, None, **CPU) == "host"
    limit = HostLimit(8 * KIB)
    tiers = Tiers(limit=limit)
    assert tiers.place(8 * KIB, "disk", **GPU) == "host"  # there is none
    give_back = limit.take(6 * KIB)
    assert tiers.place(4 * KIB, None, **GPU) is None and not tiers.has_room_to_read(4 * KIB)
    give_back()
    assert limit.taken_bytes == 0
    assert tiers.place(4 * KIB, None, **GPU) == "host"


@pytest.mark.parametrize(
    ("options", "wanted", "where", "place"),
    [
        ({}, None, GPU, "disk"),
        ({}, None, CPU, "disk"),
        ({}, "host", GPU, "host"),
        ({}, "host", CPU, "host"),
        ({"host": False}, "host", GPU, "disk"),
        ({"limit": HostLimit(16 * KIB)}, None, GPU, "host"),
        ({"limit": HostLimit(16 * KIB)}, None, CPU, "disk"),
        ({"limit": HostLimit(12 * KIB)}, None, GPU, "disk"),  # the host's half is too small
        ({"limit": HostLimit(4 * KIB)}, None, GPU, None),  # and so is what is for the way
        ({"limit": HostLimit(4 * KIB)}, None, CPU, "disk"),  # it passes through no host memory
        ({"limit": HostLimit(4 * KIB)}, None, PACKED, None),
    ],
)
def test_a_disk_that_takes_everything(
    options: dict[str, Any], wanted: Any, where: Any, place: str | None, tmp_path: Path
) -> None:
    with DiskTier(tmp_path, rates=RATES) as disk:
        assert Tiers(disk=disk, **options).place(8 * KIB, wanted, **where) == place


@pytest.mark.parametrize(
    ("options", "wanted", "where", "place"),
    [
        ({}, None, GPU, "host"),
        ({}, None, PACKED, "host"),
        ({}, None, CPU, None),  # a copy in the same memory gains nothing
        ({}, "disk", GPU, "host"),
        ({"host": False}, None, GPU, None),
        ({"limit": HostLimit(12 * KIB)}, None, GPU, None),
        ({"limit": HostLimit(16 * KIB)}, "disk", GPU, "host"),
    ],
)
def test_a_disk_that_takes_nothing(
    options: dict[str, Any], wanted: Any, where: Any, place: str | None, tmp_path: Path
) -> None:
    with DiskTier(tmp_path, rates=RATES, write_budget=1e-9) as disk:
        assert Tiers(disk=disk, **options).place(8 * KIB, wanted, **where) == place


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"tiers": 5}, ArgumentTypeError, "tiers: expected names of tiers .host, disk., got 5"),
        ({"tiers": [5]}, ArgumentError, "tiers: 5, accepted are host, disk"),
        ({"disk": ""}, ArgumentError, "disk: '' names no folder"),
        ({"disk": ["/tmp", ""]}, ArgumentError, "disk: '' names no folder"),
        ({"codecs": []}, ArgumentError, "codecs: policy 'auto' .* none is named; accepted with"),
    ],
)
def test_arguments_that_are_refused(options: dict[str, Any], error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        bitslab.ActivationOffload(**options)


@pytest.mark.parametrize("options", [{"policy": "raw"}, {"slowdown": 0.1}, {"lossy": "zfp"}])
def test_ways_that_need_no_lossless_codec(options: dict[str, Any]) -> None:
    bitslab.ActivationOffload(codecs=[], **options)
