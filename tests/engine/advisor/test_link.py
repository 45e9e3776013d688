"""The model of the link against what was measured on an H200, and how figures get into it."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from bitslab import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.engine.advisor import LinkModel, measure_link
from bitslab.engine.advisor import link as link_module

GIB = 1 << 30
RATES = {
    "host_to_device_bytes_per_s": 25e9,
    "device_to_host_bytes_per_s": 26e9,
    "zero_copy_bytes_per_s": 25.5e9,
}

# GB/s of row bytes measured on an H200 for 1,000,000 fresh random ids: by table (GiB), for rows of
# 256, 512 and 1024 bytes: as they come, and sorted with the sort included.
MEASURED = {
    0.5: ((51, 55), (51, 60), (51, 68)),
    1: ((28, 54), (51, 60), (51, 71)),
    2: ((15, 52), (28, 55), (49, 58)),
    4: ((11, 50), (21, 52), (38, 54)),
    8: ((9, 50), (17, 51), (32, 52)),
    16: ((8, 32), (16, 51), (30, 51)),
    32: ((8, 17), (15, 35), (29, 51)),
}
CELLS = [
    (table, row_bytes, rates)
    for table, cells in MEASURED.items()
    for row_bytes, rates in zip((256, 512, 1024), cells, strict=True)
]


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    monkeypatch.setattr(link_module, "_measured", {})
    monkeypatch.delenv("BITSLAB_LINK", raising=False)


def predicted_rate(table, row_bytes, n_rows, *, ordered):
    seconds = LinkModel().gather_seconds(table * GIB, row_bytes, n_rows, sorted=ordered)
    return n_rows * row_bytes / seconds / 1e9


# The model


@pytest.mark.parametrize(("table", "row_bytes", "rates"), CELLS)
def test_the_model_gives_what_was_measured(table, row_bytes, rates):
    for ordered, rate in zip((False, True), rates, strict=True):
        found = predicted_rate(table, row_bytes, 1_000_000, ordered=ordered)
        assert found == pytest.approx(rate, rel=0.15), f"sorted: {ordered}"


@pytest.mark.parametrize(("table", "rate"), [(4, 32), (8, 16)])
def test_the_model_knows_what_sparser_batches_gain(table, rate):
    found = predicted_rate(table, 256, 200_000, ordered=True)
    assert found == pytest.approx(rate, rel=0.15)


@pytest.mark.parametrize(("table", "row_bytes", "rates"), CELLS)
def test_sorting_is_advised_where_it_was_faster(table, row_bytes, rates):
    plain, ordered = rates
    assert LinkModel().pays_to_sort(table * GIB, row_bytes, 1_000_000) is (ordered > plain)


@pytest.mark.parametrize(
    ("table_bytes", "row_bytes", "n_rows", "pays"),
    [
        (8 * GIB, 256, 200_000, True),
        (8 * GIB, 256, 1_000, False),  # the sort costs more than the whole gather
        (8 * GIB, 256, 0, False),
        (32 * GIB, 1024, 20_000, False),  # a row on every 26th page: nothing shares a lookup
        (GIB // 4, 256, 100_000, False),  # within the GPU's reach
        (100 << 20, 64, 10_000, False),
        (8 * GIB, 1 << 20, 500, False),  # large rows are bound by bytes
        (0, 256, 10, False),
    ],
)
def test_corners_of_sorting(table_bytes, row_bytes, n_rows, pays):
    assert LinkModel().pays_to_sort(table_bytes, row_bytes, n_rows) is pays


def test_lookups_between_the_points_and_beyond():
    model = LinkModel(random_rows_per_s=((100, 1e8), (400, 2.5e7)))
    assert model.lookups_per_s(100) == pytest.approx(1e8)
    assert model.lookups_per_s(200) == pytest.approx(5e7)
    assert model.lookups_per_s(400) == pytest.approx(2.5e7)
    assert model.lookups_per_s(1) == 1e8
    assert model.lookups_per_s(1e15) == 2.5e7
    assert LinkModel(random_rows_per_s=()).lookups_per_s(1e15) == float("inf")


def test_short_rows_cost_a_line():
    model = LinkModel()
    line = model.gather_seconds(1 << 20, 128, 10_000, sorted=False)
    assert model.gather_seconds(1 << 20, 5, 10_000, sorted=False) == line
    assert model.gather_seconds(1 << 20, 256, 10_000, sorted=False) == pytest.approx(2 * line)


@pytest.mark.parametrize(("mib", "rate"), [(1, 38), (4, 50), (16, 54), (256, 55.5)])
def test_copies_by_their_size(mib, rate):
    n_bytes = mib << 20
    assert n_bytes / LinkModel().copy_time(n_bytes) / 1e9 == pytest.approx(rate, rel=0.03)


def test_a_slower_link_is_slower_in_everything():
    half = LinkModel().scaled_to(LinkModel().zero_copy_bytes_per_s / 2)
    for table in (GIB, 8 * GIB):
        full = LinkModel().gather_seconds(table, 512, 1_000_000, sorted=False)
        assert half.gather_seconds(table, 512, 1_000_000, sorted=False) == pytest.approx(2 * full)


@pytest.mark.parametrize(
    ("figures", "error", "message"),
    [
        ({"zero_copy_bytes_per_s": 0}, ArgumentError, "zero_copy_bytes_per_s: 0, .* above 0"),
        ({"sort_seconds": -1.0}, ArgumentError, "sort_seconds: -1.0, .* from 0 on"),
        ({"copy_seconds": float("nan")}, ArgumentError, "copy_seconds: nan"),
        ({"page_bytes": "64k"}, ArgumentTypeError, "page_bytes: expected a number, got '64k'"),
        ({"page_bytes": True}, ArgumentTypeError, "page_bytes: expected a number, got True"),
        ({"source": 3}, ArgumentTypeError, "source: expected a str, got 3"),
        ({"random_rows_per_s": 3e7}, ArgumentTypeError, "expected pairs"),
        ({"random_rows_per_s": [[1, 2, 3]]}, ArgumentTypeError, "expected pairs"),
        ({"random_rows_per_s": [[1, 0]]}, ArgumentError, "random_rows_per_s: 0"),
        ({"random_rows_per_s": [[2, 1], [1, 1]]}, ArgumentError, r"\[2, 1\], expected ascending"),
        ({"bandwidth": 5}, ArgumentError, r"given: unknown figures \['bandwidth'\], accepted"),
    ],
)
def test_bad_figures_are_refused(figures, error, message, monkeypatch):
    with pytest.raises(error, match=message):
        LinkModel().with_figures(figures)
    with pytest.raises(error, match=message):
        measure_link("cpu", given=figures)
    if "copy_seconds" not in figures:
        monkeypatch.setenv("BITSLAB_LINK", json.dumps(figures))
        with pytest.raises(error, match=f"BITSLAB_LINK: .*{message}"):
            measure_link("cpu")
    assert not link_module._measured, "it measured first"


# Measuring


def test_measuring_on_the_cpu_copies_little_and_is_plausible(monkeypatch):
    """128 MB take some 20 ms."""
    copied: list[int] = []
    real = np.copyto

    def copyto(target: Any, source: Any) -> None:
        copied.append(source.nbytes)
        real(target, source)

    monkeypatch.setattr(np, "copyto", copyto)
    model = measure_link("cpu")
    assert 0 < sum(copied) <= 128e6
    assert 0 < model.zero_copy_bytes_per_s < 1e12
    assert model.source == "measured copies in memory"
    assert not model.pays_to_sort(32 * GIB, 512, 1_000_000)


def test_it_measures_once_for_all_threads(monkeypatch):
    real, calls = link_module._measure_cpu, []

    def counted():
        calls.append(1)
        time.sleep(0.1)
        return real()

    monkeypatch.setattr(link_module, "_measure_cpu", counted)
    found = []
    threads = [threading.Thread(target=lambda: found.append(measure_link("cpu"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(calls) == 1
    assert len(found) == 8
    assert all(model is found[0] for model in found)


def test_given_figures_win_over_the_environment_and_both_over_measured(monkeypatch):
    measured = measure_link("cpu")
    monkeypatch.setenv("BITSLAB_LINK", '{"zero_copy_bytes_per_s": 3e9, "copy_seconds": 0.5}')
    model = measure_link("cpu", given={"copy_seconds": 0.25})
    assert model.zero_copy_bytes_per_s == 3e9
    assert model.copy_seconds == 0.25
    assert model.host_to_device_bytes_per_s == measured.host_to_device_bytes_per_s
    assert model.source == "measured copies in memory, some figures given"
    monkeypatch.delenv("BITSLAB_LINK")
    assert measure_link("cpu") is measured


def test_nothing_is_measured_when_all_rates_are_given(monkeypatch):
    assert measure_link("cpu", given=LinkModel()) == LinkModel()
    monkeypatch.setenv("BITSLAB_LINK", json.dumps(RATES))
    model = measure_link("cpu")
    assert not link_module._measured
    assert {name: getattr(model, name) for name in RATES} == RATES
    assert model.source == "given figures"


def test_lookups_follow_a_given_rate():
    model = link_module._with_given(LinkModel(), RATES, "given figures")
    assert model.lookups_per_s(GIB) == pytest.approx(LinkModel().lookups_per_s(GIB) / 2)


# Both directions at once


@pytest.mark.parametrize(
    ("alone_s", "ends_s", "share"),
    [
        ([1.0, 1.0], [1.0, 1.0], 1.0),  # neither slows the other
        ([1.0, 1.0], [2.0, 2.0], 0.5),  # they take turns
        ([1.0, 1.0], [1.25, 1.25], 0.8),
        ([1.0, 2.0], [2.0, 3.0], 0.5),  # one second of the longer one had the link for itself
        ([1.0, 1.0], [0.9, 0.9], 1.0),  # noise
        ([1.0, 1.0], [100.0, 100.0], 0.05),
    ],
)
def test_the_share_of_a_direction_while_both_are_busy(alone_s, ends_s, share):
    assert link_module.share_of_ends(alone_s, ends_s) == pytest.approx(share)


def test_the_share_is_measured_once_and_not_where_all_rates_are_given(monkeypatch):
    calls = []

    def measure(device):
        calls.append(device)
        return 0.8

    monkeypatch.setattr(link_module, "_shares", {})
    monkeypatch.setattr(link_module, "_measure_both_ways", measure)
    monkeypatch.setattr(link_module, "checked_device", lambda device: device)
    device = torch.device("cuda", 0)
    assert link_module.share_both_ways(torch.device("cpu")) == 1.0
    with monkeypatch.context() as patch:
        patch.setenv("BITSLAB_LINK", json.dumps(RATES))
        assert link_module.share_both_ways(device) == 1.0
    assert not calls
    assert [link_module.share_both_ways(device) for _ in range(2)] == [0.8, 0.8]
    assert calls == [device]


@pytest.mark.parametrize("text", ["{", "5", '["a"]'])
def test_an_environment_variable_that_is_no_object(text, monkeypatch):
    monkeypatch.setenv("BITSLAB_LINK", text)
    with pytest.raises(ArgumentError, match="BITSLAB_LINK: "):
        measure_link("cpu")


def test_devices_that_are_not_accepted():
    with pytest.raises(ArgumentTypeError, match="device: meta, accepted are cpu and cuda"):
        measure_link("meta")
    with pytest.raises(ArgumentTypeError, match="given: expected a LinkModel or a mapping"):
        measure_link("cpu", given=25e9)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(BitslabError, match="torch sees no CUDA GPU"):
        measure_link("cuda")
