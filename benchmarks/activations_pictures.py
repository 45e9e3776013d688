"""The picture of what benchmarks/activations.py --only rok has measured: SSDTrain's figure 5.12."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
#: How the titles of its tables begin; the model's name follows, and a comma.
ROK = "rok: "


def draw(tables: Mapping[str, Rows], file: Path) -> None:
    """Draw throughput over peak: a picture for each model, a line for each way.

    The points of a line are its batches, whose sizes stand beside them.

    Parameters
    ----------
    tables : mapping
        As the part "rok" returns them, or ``--json`` has printed them; others are left out.
    file : Path
        Its suffix names the format, such as .svg or .png.

    Raises
    ------
    ValueError
        When there is no table of that part.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    drawn = {title: rows for title, rows in tables.items() if title.startswith(ROK)}
    if not drawn:
        raise ValueError(f"tables: none begins with {ROK!r}, as those of the part rok do")
    columns = min(len(drawn), 2)
    lines = math.ceil(len(drawn) / columns)
    with mpl.rc_context({"svg.fonttype": "none"}):  # names can be searched for
        figure, axes = pyplot.subplots(
            lines, columns, figsize=(8 * columns, 5 * lines), layout="constrained", squeeze=False
        )
        try:
            for each in list(axes.flat)[len(drawn) :]:
                each.set_axis_off()
            for onto, (title, rows) in zip(axes.flat, drawn.items(), strict=False):
                _curves(onto, title, rows)
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file)
        finally:
            pyplot.close(figure)


def _curves(axes: Any, title: str, rows: Rows) -> None:
    """Draw the lines of one model."""
    for number, way in enumerate(dict.fromkeys(row["way"] for row in rows)):
        mine = sorted((row["batch"], row["peak MB"], row["tokens/s"]) for row in rows
                      if row["way"] == way)  # fmt: skip
        batches, peaks, rates = zip(*mine, strict=True)
        style = "s--" if way.startswith("planned") else "o-"
        axes.plot(peaks, rates, style, color=f"C{number % 10}", label=way)
        for batch, peak, rate in zip(batches, peaks, rates, strict=True):
            axes.annotate(f"{batch}", (peak, rate), xytext=(3, 3), textcoords="offset points")
    axes.set(xlabel="peak, MB", ylabel="tokens/s", xlim=(0, None), ylim=(0, None))
    axes.set_title(title.removeprefix(ROK), fontsize=10)
    axes.legend(fontsize=8)
