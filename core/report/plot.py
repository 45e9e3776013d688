"""The picture of `bitslab inspect`: which bits of a number are equal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from ..dtypes import EXPONENT_FIELDS
from ..errors import ArgumentError, load_optional
from .measure import TensorReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: More tensors of a dtype than this are drawn as a heat-map.
MOST_LINES = 8
#: Rows of a heat-map that are labelled by name.
MOST_NAMES = 40
#: Regions of floating-point numbers.
_SHADES = {"mantissa": "#ffffff", "exponent": "#e8eef7", "sign": "#f7ece1"}


def save_plot(
    reports: Sequence[TensorReport],
    path: str | os.PathLike[str] | BinaryIO,
    image_format: str = "png",
) -> None:
    """Draw the share of equal bits by bit position.

    One panel a dtype; in it one line a tensor, or a heat-map with one row a tensor where there
    are more than 8. Global state of matplotlib is neither used nor changed.

    Parameters
    ----------
    reports : sequence of TensorReport
        What `inspect_tensor` found; those of empty tensors are left out.
    path : str, os.PathLike or binary file
        Where to write the image.
    image_format : str
        ``"png"``, ``"svg"`` or ``"pdf"``.

    Raises
    ------
    ArgumentError
        When there is nothing to draw.
    MissingExtraError
        When matplotlib is not installed.
    """
    load_optional("matplotlib", extra="report", purpose="drawing a plot")
    from matplotlib.figure import Figure  # pyplot would choose a backend for everyone

    panels: dict[str, list[TensorReport]] = {}
    for report in reports:
        if report.equal_bits:
            panels.setdefault(report.dtype, []).append(report)
    if not panels:
        raise ArgumentError("plot: no tensor has any elements, there is nothing to draw")
    heights = [_height_inches(found) for found in panels.values()]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, (dtype, found) in zip(axes, panels.items(), strict=True):
        heat_map = len(found) > MOST_LINES
        (_draw_heat_map if heat_map else _draw_lines)(ax, dtype, found)
        bits = len(found[0].equal_bits)
        ax.set_title(
            f"{dtype}: {len(found)} tensor{'s' if len(found) > 1 else ''}",
            pad=18 if heat_map else 6,
        )
        ax.set_xlabel("bit position (0 = least significant)")
        step = max(1, bits // 16)
        ax.set_xticks(range(0, bits, step))
        ax.set_xlim(bits - 0.5, -0.5)  # most significant on the left, as numbers are written
    figure.savefig(path, format=image_format, dpi=120)


def float_regions(dtype: str) -> list[tuple[str, int, int]]:
    """Return sign, exponent and mantissa of a dtype as (name, lowest bit, one past the highest).

    Empty for a dtype that is not floating point.
    """
    found = EXPONENT_FIELDS.get(getattr(torch, dtype, torch.uint8))
    if found is None:
        return []
    low, width = found
    regions = [("sign", low + width, low + width + 1), ("exponent", low, low + width)]
    return [*regions, ("mantissa", 0, low)]


def _height_inches(found: Sequence[TensorReport]) -> float:
    return 4.0 if len(found) <= MOST_LINES else min(12.0, 2.5 + 0.18 * len(found))


def _draw_lines(ax: Axes, dtype: str, found: Sequence[TensorReport]) -> None:
    for name, low, high in float_regions(dtype):
        ax.axvspan(low - 0.5, high - 0.5, color=_SHADES[name], zorder=0)
        ax.text((low + high - 1) / 2, 1.015, name, ha="center", va="bottom", fontsize=8)
    for report in found:
        bits = range(len(report.equal_bits))
        ax.plot(bits, report.equal_bits, marker=".", linewidth=1, label=_short(report.name))
    ax.set_ylabel("share of equal bits")
    ax.set_ylim(0.48, 1.08)
    ax.legend(fontsize=7, loc="best")


def _draw_heat_map(ax: Axes, dtype: str, found: Sequence[TensorReport]) -> None:
    image: Any = ax.imshow(
        [report.equal_bits for report in found],
        aspect="auto",
        interpolation="nearest",
        vmin=0.5,
        vmax=1.0,
        cmap="viridis",
    )
    for name, low, high in float_regions(dtype):
        if low:
            ax.axvline(low - 0.5, color="tab:red", linewidth=1)
        # Just above the first row, in the units of the rows.
        ax.annotate(
            name,
            ((low + high - 1) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=8,
        )
    step = -(-len(found) // MOST_NAMES)
    ax.set_yticks(range(0, len(found), step))
    ax.set_yticklabels([_short(report.name) for report in found[::step]], fontsize=6)
    ax.set_ylabel("tensor" if step == 1 else f"tensor (1 in {step} is named)")
    bar = ax.figure.colorbar(image, ax=ax)
    bar.set_label("share of equal bits")


def _short(name: str, most: int = 48) -> str:
    return name if len(name) <= most else f"...{name[-most + 3 :]}"
