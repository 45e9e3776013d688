"""The table of what was done: a row for equal sites of equal layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

import bitslab
from bitslab.activations.report import ActivationReport, SiteReport
from bitslab.engine.transfer.unit_report import UnitReport


def site(name: str, choice: str, packed_bytes: int, reason: str = "") -> SiteReport:
    unit = UnitReport(name, "host", 4_000_000, packed_bytes, None)
    return SiteReport(unit, choice, "SiluBackward0", tensors=3, reason=reason)


REPORT = ActivationReport(
    "auto",
    [
        site("model.layers.0.mlp:0", "zvc", 1_000_000, "the first"),
        site("model.layers.0.mlp:1", "raw", 4_000_000),
        site("model.layers.1.mlp:0", "zvc", 3_000_000, "the second"),
        site("model.layers.1.mlp:1", "zvc", 2_000_000),
        site("blocks.2", "raw", 4_000_000),
        site("3.norm:0", "raw", 4_000_000),
        site("7.norm:0", "raw", 4_000_000),
    ],
    "cuda:0",
    {},
)


def rows(*, every_site: bool) -> list[list[str]]:
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(REPORT.table(every_site=every_site))
    lines = [line for line in captured.get().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_layers_that_differ_in_a_number_share_a_row_where_the_same_is_done() -> None:
    *body, total = rows(every_site=False)
    assert body == [
        ["model.layers.*.mlp:0 (2 sites)", "zvc", "6", "8.00", "4.00", "2.00x", "the first"],
        ["model.layers.0.mlp:1", "raw", "3", "4.00", "4.00", "1.00x", ""],
        ["model.layers.1.mlp:1", "zvc", "3", "4.00", "2.00", "2.00x", ""],
        ["blocks.2", "raw", "3", "4.00", "4.00", "1.00x", ""],
        ["*.norm:0 (2 sites)", "raw", "6", "8.00", "8.00", "1.00x", ""],
    ]
    assert total[:4] == ["total of 7", "", "21", "28.00"]


def test_every_site_has_a_row_of_its_own_where_that_is_asked_for() -> None:
    *body, total = rows(every_site=True)
    assert [row[0] for row in body] == [each.unit.name for each in REPORT.sites]
    assert total == rows(every_site=False)[-1]


def test_the_memory_that_was_saved_and_the_waits_are_printed() -> None:
    stats = {
        "moved_tensors": 40, "moved_out_bytes": 1_208_000_000, "crossed_out_bytes": 806_000_000,
        "peak_saved_bytes": 600_500_000, "host_stall_us": 12_000, "disk_stall_us": 3000,
    }  # fmt: skip
    report = replace(REPORT, stats=stats, passes=2, notes=["What is to be known."])
    said = (
        "At most 600.5 MB of saved tensors were away from the device at one time. A pass moves "
        "604.0 MB, which cross as 403.0, and waits 6 ms for host memory."
    )
    assert report.summary() == said
    with_disk = replace(report, disk={})
    assert with_disk.summary() == said[:-1] + " and 1.5 ms for the disk."
    assert str(report).endswith(f"\n{said}\nWhat is to be known.\n")
    assert report.to_dict()["passes"] == 2
    for nothing in (REPORT, replace(report, passes=0)):
        assert nothing.summary() == ""


def test_what_was_moved_is_in_the_summary() -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
    offload = bitslab.offload_activations(model, policy="raw", min_bytes=1024, in_flight_bytes=0)
    for _ in range(3):
        model(torch.randn(128, 64)).sum().backward()
    report, stats = offload.report(), offload.stats()
    offload.detach()
    assert report.passes == 3
    moved_mb = stats["moved_out_bytes"] / 3e6
    assert moved_mb == pytest.approx(4 * 128 * (512 + 64) / 1e6)
    assert f"A pass moves {moved_mb:,.1f} MB, which cross as {moved_mb:,.1f}" in report.summary()
    assert stats["peak_saved_bytes"] > 0
