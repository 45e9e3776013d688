"""Pictures of what benchmarks/kvcomp.py has measured: figures 5 to 8 of the paper, re-drawn.

- ``accuracy-over-scale.svg``: accuracy over the scale of K or of V, with turning points (figure 5)
- ``accuracy-over-ratio.svg``: the same over the ratio of that side alone (figures 6 and 7)
- ``ratio-over-context.svg``: ratio of K and V together over the context (figure 8)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcomp_figures import CRITERION, CURVES, turning_points

Rows = Sequence[Mapping[str, Any]]
#: Which table is which, by the begin of its title.
OF_SCALES = "SmolLM2: accuracy over the scale of one side"
OF_CONTEXTS = "SmolLM2: ratio over the context"
#: Columns of a table of contexts that are no curve.
BESIDE = ("context", "rotations")
ACCURACY = "accuracy, of plain"


def draw(tables: Mapping[str, Rows], folder: Path) -> list[Path]:
    """Draw what there are tables of; return the files.

    Parameters
    ----------
    tables : mapping
        As the parts "figures" and "ratio" return them, or ``--json`` has printed them.
    folder : Path
        Made if it is not there.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    drawn: list[tuple[str, Callable[[Any, Rows], None], Rows]] = []
    for title, rows in tables.items():
        if title.startswith(OF_SCALES):
            drawn.append(("accuracy-over-scale", _over_scale, rows))
            drawn.append(("accuracy-over-ratio", _over_ratio, rows))
        elif title.startswith(OF_CONTEXTS):
            drawn.append(("ratio-over-context", _over_context, rows))
    with mpl.rc_context({"svg.fonttype": "none"}):  # names can be searched for
        return [_saved(folder, *each) for each in drawn]


def _saved(folder: Path, name: str, onto: Callable[[Any, Rows], None], rows: Rows) -> Path:
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.svg"
    figure = pyplot.figure(figsize=(9, 4.2))
    try:
        onto(figure, rows)
        figure.tight_layout()
        figure.savefig(file)
    finally:
        pyplot.close(figure)
    return file


def _over_scale(figure: Any, rows: Rows) -> None:
    _accuracy(figure, rows, "scale")


def _over_ratio(figure: Any, rows: Rows) -> None:
    _accuracy(figure, rows, "ratio")


def _accuracy(figure: Any, rows: Rows, column: str) -> None:
    """Draw accuracy over a column, of K on the left and of V on the right, with turning points."""
    turning = {row["curve"]: row for row in turning_points([dict(row) for row in rows])}
    sides = figure.subplots(1, 2, sharey=True)
    for kind, (axes, side) in enumerate(zip(sides, "KV", strict=True)):
        for curve in dict.fromkeys(row["curve"] for row in rows):
            if CURVES[curve].kind != kind:
                continue
            mine = sorted((row[column], row[ACCURACY]) for row in rows if row["curve"] == curve)
            [line] = axes.plot(*zip(*mine, strict=True), "o-", label=curve)
            at = turning[curve].get(column)
            if at is not None:
                axes.axvline(at, color=line.get_color(), linestyle=":")
        axes.axhline(CRITERION, color="grey", linestyle="--")
        unit = "step, in the units of its curve" if column == "scale" else "16 bits over its bits"
        axes.set(title=f"{side} alone", xlabel=f"{column} of {side}: {unit}", xscale="log")
        if axes.lines[:-1]:
            axes.legend(fontsize=8)
    sides[0].set_ylabel("right next tokens, of plain K and V")


def _over_context(figure: Any, rows: Rows) -> None:
    """Draw a curve for each column that is a ratio."""
    axes = figure.subplots()
    contexts = [row["context"] for row in rows]
    names = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if name not in BESIDE and not name.endswith(": measured")
    ]
    for name in names:
        axes.plot(contexts, [row[name] for row in rows], "o-", label=name)
    axes.set(xlabel="tokens", ylabel="16-bit bytes over packed bytes", xscale="log", ylim=(0, None))
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.minorticks_off()
    axes.legend(fontsize=8)
