"""The table of `bitslab inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import load_optional
from .measure import INVARIANT_AT, Link, TensorReport, Total, total

if TYPE_CHECKING:
    from rich.table import Table


def build_table(reports: Sequence[TensorReport], link: Link | None = None) -> Table:
    """Return a rich table of reports, one row each, and their total.

    Parameters
    ----------
    reports : sequence of TensorReport
        What `inspect_tensor` found.
    link : Link, optional
        The one that the reports were made with, for the caption and the total.

    Raises
    ------
    MissingExtraError
        When rich is not installed.
    """
    load_optional("rich", extra=None, purpose="printing a table")
    from rich.table import Table
    from rich.text import Text

    link = Link() if link is None else link
    table = Table(
        caption=(
            f"MB = 10^6 bytes. Speed-up: raw over packed transfer time on a {link.link_gbps:g} "
            f"GB/s link, decoding at {link.decode_gbps:g} GB/s meanwhile."
        ),
        caption_justify="left",
        show_footer=True,
    )
    sums = total(reports, link)
    footers = [f"total of {sums.tensors}", "", "", "", *_figures(sums)]
    headings = (
        ["tensor", "shape", "dtype", "plan"],
        ["raw MB", "ratio", "saved MB", f"invariant at {INVARIANT_AT:.0%}", "speed-up"],
    )
    for heading, footer in zip(headings[0], footers[:4], strict=True):
        table.add_column(heading, footer, overflow="fold", no_wrap=heading != "tensor")
    for heading, footer in zip(headings[1], footers[4:], strict=True):
        table.add_column(heading, footer, justify="right", min_width=len(footer))
    for r in reports:
        shape = " x ".join(map(str, r.shape)) or "0-d"
        # As text, because rich takes square brackets for markup.
        table.add_row(Text(r.name), shape, r.dtype, Text(r.plan), *_figures(r))
    return table


def _figures(r: TensorReport | Total) -> list[str]:
    return [
        f"{r.raw_bytes / 1e6:,.2f}",
        f"{r.ratio:.2f}x",
        f"{r.saved_mb:,.2f}",
        f"{r.invariant_share:.0%}",
        f"{r.speedup:.2f}x",
    ]
