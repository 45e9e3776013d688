"""The table of what was done: a row for equal sites of equal layers."""

from __future__ import annotations

from rich.console import Console

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
