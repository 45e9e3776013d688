"""Draw the pictures of the documentation.

``python docs/make_pictures.py`` draws all, with names after it those.

Bars come from the tables in benchmarks/results, so that no figure is typed twice. Each picture is
written twice, for light and for dark backgrounds, without a date: the same tables and the same
matplotlib give the same bytes. Its description lists what is drawn; tests/test_docs.py compares
that with the tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.result_tables import number, rows_of  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = ROOT / "docs" / "pictures"

#: Colours by use: bars of ours, of peers, and what nothing can pass (`bound`), text and lines.
THEMES: dict[str, dict[str, str]] = {
    "light": {
        "ours": "#0b7a75",
        "peer": "#9aa5b1",
        "bound": "#d9a441",
        "text": "#1f2933",
        "faint": "#616e7c",
        "line": "#cbd2d9",
        "box": "#f5f7fa",
        "ring1": "#cdebe7",
        "ring2": "#e3f3f1",
        "ring3": "#f1f8f7",
    },
    "dark": {
        "ours": "#2cb1a6",
        "peer": "#7b8794",
        "bound": "#d9a441",
        "text": "#e4e7eb",
        "faint": "#9aa5b1",
        "line": "#52606d",
        "box": "#1f2933",
        "ring1": "#17564f",
        "ring2": "#143f3b",
        "ring3": "#122b29",
    },
}


FONT = "DejaVu Sans"  # matplotlib's own


# What is drawn

Kind = Literal["ours", "peer", "bound"]


@dataclass(frozen=True)
class Bar:
    """One bar: its name, its length, and whose it is. Without a length, `missing` stands there."""

    name: str
    value: float | None
    kind: Kind = "peer"
    missing: str = ""


@dataclass(frozen=True)
class Panel:
    """Bars on one axis."""

    title: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Chart:
    """Panels with the same bars, side by side.

    Parameters
    ----------
    title : str
        Of the picture: what is measured, in which unit, and which way is better.
    panels : sequence of Panel
        In reading order.
    columns : int
        Panels in a line.
    source : str
        Below the bars: hardware and the results file.
    unit : str
        Behind each number.
    """

    title: str
    panels: Sequence[Panel]
    columns: int
    source: str
    unit: str = ""

    def description(self) -> str:
        """Return all that is drawn, as text."""
        parts = []
        for panel in self.panels:
            bars = "; ".join(f"{bar.name}: {shown(bar, self.unit)}" for bar in panel.bars)
            parts.append(f"{panel.title}: {bars}")
        return f"{self.title}. {'. '.join(parts)}. {self.source}"


def shown(bar: Bar, unit: str) -> str:
    """Return what stands at the end of a bar."""
    if bar.value is None:
        return bar.missing
    text = f"{bar.value:,.0f}" if bar.value >= 100 else f"{bar.value:.3g}"
    return f"{text}{unit}"


LLM = "2026-11-22-nvidia-h200-llm.md"
GNN = "2026-11-20-nvidia-h200-gnn.md"
GATHER = "2026-11-20-nvidia-h200-gather.md"
LOOKUPS = "2026-11-21-nvidia-h200-embedding.md"
SIZES = "2026-11-20-two-cpu-cores.md"
TILES = "2026-11-28-nvidia-h200-kvcomp-map-weights.md"


def weights() -> Chart:
    """Return a forward pass with offloaded weights, by accelerate, nvCOMP and bitslab."""
    rows = rows_of(LLM, "One forward pass; `ideal`")
    names: list[tuple[str, str, Kind]] = [
        ("accelerate cpu_offload", "accelerate, cpu_offload", "peer"),
        ("raw, streamed", "raw bytes, streamed by bitslab", "peer"),
        ("nvCOMP ANS, streamed: nothing computed", "nvCOMP ANS, streamed, no compute", "peer"),
        ("packed, streamed", "bitslab, streamed", "ours"),
        ("packed, on the device", "bitslab, packed on the GPU", "ours"),
        ("plain, on the device", "plain, all on the GPU", "bound"),
    ]
    bars = [Bar(name, number(rows, "pass ms", way=way), kind) for way, name, kind in names]
    return Chart(
        "One forward pass, 3.5 GB of weights offloaded, milliseconds (less is better)",
        [Panel("Llama's shape, 8 layers, bfloat16", bars)],
        1,
        f"One NVIDIA H200, PCIe 5 x16; benchmarks/results/{LLM}",
    )


def cache() -> Chart:
    """Return the time of a token by how K and V are kept, transformers' caches included."""
    cases = [
        ("paper's workload, 32 K/V heads", "The packed history over the link alone takes 61 ms"),
        ("32k context, 8 K/V heads", "--new-tokens 40 --repetitions 2`: 27 ms over the link"),
        ("8k context, 8 K/V heads", "The same with `--prompt-tokens 8000`"),
    ]
    names: list[tuple[str, str, Kind]] = [
        ("transformers' offloaded", "transformers, offloaded cache", "peer"),
        ("CompressedCache, host", "CompressedCache, host memory", "ours"),
        ("CompressedCache, device", "CompressedCache, on the GPU", "ours"),
        ("DynamicCache", "DynamicCache, raw on the GPU", "bound"),
    ]
    panels = []
    for title, heading in cases:
        rows = rows_of(LLM, heading)
        bars = [Bar(name, number(rows, "token ms", way=way), kind) for way, name, kind in names]
        panels.append(Panel(title, bars))
    return Chart(
        "One token by how K and V are kept, milliseconds (less is better)",
        panels,
        3,
        f"One NVIDIA H200, PCIe 5 x16; benchmarks/results/{LLM}",
    )


def lookups() -> Chart:
    """Return embedding lookups by FBGEMM, ColossalAI and bitslab."""
    second = rows_of(LOOKUPS, "Second run, ids ordered")
    first = rows_of(LOOKUPS, "First run, with ColossalAI")
    panels = []
    for law, title in (("uniform", "uniform ids"), ("zipf", "Zipf ids")):
        for row_bytes, size in (("128", "128 B"), ("512", "512 B"), ("2048", "2 KB")):
            case = {"row_B": row_bytes, "ids": "65536", "law": law}
            bars = [
                Bar("ColossalAI", number(first, "ColossalAI", **case), missing="refuses the batch"),
                Bar("FBGEMM, UVM caching", number(second, "FBGEMM", **case)),
                Bar("raw rows by zero-copy", number(second, "zero-copy", **case)),
                Bar("CachedEmbeddingBag", number(second, "packed, cache", **case), "ours"),
            ]
            panels.append(Panel(f"rows of {size}, {title}", bars))
    return Chart(
        "Lookups of 65,536 ids, table of 1 GiB, cache of 5 %, million a second (more is better)",
        panels,
        3,
        "One NVIDIA H200, PCIe 5 x16; ColossalAI in a run before the others; "
        f"benchmarks/results/{LOOKUPS}",
    )


def epochs() -> Chart:
    """Return epochs of GraphSAGE on raw features, gathered in two ways, and on packed ones."""
    names: list[tuple[str, str, Kind]] = [
        ("raw", "CPU gather and copy", "peer"),
        ("unified", "zero-copy, as DGL's use_uva", "peer"),
        ("host, IBP(M)", "packed in host memory", "ours"),
        ("both, IBP(C/M)", "and a packed cache of 1 %", "ours"),
    ]
    panels = []
    for name, title in (
        ("citeseer", "Citeseer, 58x smaller"),
        ("cora", "Cora, 41x"),
        ("digits", "digits, 5x"),
        ("normal", "dense normal, 1.17x"),
    ):
        rows = rows_of(GNN, f"### PyG as dgl, {name} SU: 500,000 nodes")
        bars = [
            Bar(label, number(rows, "epoch s", features=way), kind) for way, label, kind in names
        ]
        panels.append(Panel(title, bars))
    return Chart(
        "An epoch of GraphSAGE, 32 batches of 1,024, seconds (less is better)",
        panels,
        2,
        "One NVIDIA H200, PyG; DGL has no build for that machine: its use_uva makes the same "
        f"gather; benchmarks/results/{GNN}",
    )


def gathers() -> Chart:
    """Return gathers of rows from host memory, by the usual ways and by bitslab."""
    rows = rows_of(GATHER, "### 200,000 rows of 1 KB float32 out of 2 GiB, beside peers")
    names: list[tuple[str, str, Kind]] = [
        ("CPU gather into page-locked memory, then copy", "CPU gather and copy", "peer"),
        ("unified tensor, u[ids]", "bitslab.unified: raw, zero-copy", "ours"),
        ("CompressedTable, ibp 4B k3 uniform", "CompressedTable, 1.17x smaller", "ours"),
        ("SlabCache of a tenth of the raw bytes (12 % hits)", "and a SlabCache, 12 % hits", "ours"),
    ]
    dense = [Bar(name, number(rows, "GB/s", how=how), kind) for how, name, kind in names]
    packed = rows_of(GATHER, "### Packed rows out of page-locked memory")
    case = {"table_GiB": "0.5", "row_B": "1024"}
    by_saving = [Bar("raw rows", number(packed, "raw GB/s", saved="50 %", **case), "bound")]
    by_saving += [
        Bar(f"{saved} saved", number(packed, "compact GB/s", saved=saved, **case), "ours")
        for saved in ("12 %", "25 %", "50 %", "75 %")
    ]
    return Chart(
        "Random rows of 1 KB from host memory to the GPU, GB/s of rows (more is better)",
        [
            Panel("dense float32", dense),
            Panel("by what packing saves", by_saving),
        ],
        1,
        f"One NVIDIA H200, PCIe 5 x16; benchmarks/results/{GATHER}",
    )


def sizes() -> Chart:
    """Return how much smaller real data get, by bitslab and by the published options."""
    rows = rows_of(SIZES, "### Ratio on real data")
    names = [
        ("Citeseer", "Citeseer features, float32"),
        ("Cora", "Cora features, float32"),
        ("Criteo embeddings 8, float32", "Criteo table 8, float32"),
        ("Pubmed", "Pubmed features, float32"),
        ("MiniLM attention, bfloat16", "MiniLM weights, bfloat16"),
        ("Criteo embeddings 1, bfloat16", "Criteo table 1, bfloat16"),
        ("ml-1m users, bfloat16", "MovieLens users, bfloat16"),
        ("MiniLM attention, float32", "MiniLM weights, float32"),
        ("Criteo embeddings 1, float32", "Criteo table 1, float32"),
        ("ml-1m users, float32", "MovieLens users, float32"),
        ("random bytes", "random bytes (kept raw)"),
    ]

    best = [Bar(name, number(rows, "saved %", data=data), "ours") for data, name in names]
    published = []
    for data, name in names:
        ratio = number(rows, "published ratio", data=data)
        published.append(Bar(name, None if ratio is None else round(100 - 100 / ratio)))
    return Chart(
        "Bytes saved, % (more is better)",
        [
            Panel("bitslab.compress, all counted", best),
            Panel("published options, rows alone", published),
        ],
        2,
        f"benchmarks/results/{SIZES}",
        " %",
    )


def attention() -> Chart:
    """Return attention to tiles of K and V by batch and context, beside that to raw ones."""
    rows = rows_of(TILES, "### Middle steps")
    panels = []
    for context in ("2,048", "8,192", "32,768", "131,072"):
        (row,) = (each for each in rows if each["context"] == context)
        bars = [Bar("raw K and V, cuDNN or flash", 1.0, "bound")]
        for batch in (1, 4, 16, 64):
            cell = row[f"batch {batch}"]  # TB/s, that over the peer's, microseconds, a factor
            share = float(cell.split(",")[1]) if cell else None
            bars.append(Bar(f"tiles, batch {batch}", share, "ours", "not measured"))
        panels.append(Panel(f"{context} tokens", bars))
    return Chart(
        "Attention to K/V tiles, a sixth of the bytes: rate over that of raw K and V (1: as fast)",
        panels,
        4,
        f"One NVIDIA H200, 8 K/V heads of 128, 32 query heads; benchmarks/results/{TILES}",
    )


CHARTS: dict[str, Callable[[], Chart]] = {
    "weights": weights,
    "cache": cache,
    "lookups": lookups,
    "epochs": epochs,
    "gathers": gathers,
    "sizes": sizes,
    "attention": attention,
}

SYSTEMS = "tables tensors embedding offload kvcache activations distributed relational"
#: The rings and what is in them; tests/test_docs.py compares them with the folders.
RINGS = {
    "engine": ("kernels", "memory", "codecs", "transfer", "advisor", "files"),
    "systems": tuple(SYSTEMS.split()),
    "integrations": tuple("dgl pyg embedding torchrec transformers accelerate autograd".split()),
}

OVERVIEW = (
    "Packed bytes lie in host memory or a file, cross the slow link into staging buffers on the "
    "GPU and are decoded there into plain rows; scattered rows are read over the link by the "
    "kernel itself. Three rings: "
    + "; ".join(f"{ring} ({', '.join(parts)})" for ring, parts in RINGS.items())
    + "; imports go inwards only"
)


def descriptions() -> dict[str, str]:
    """Return what every picture shows, by name, from the tables as they are now."""
    return {"overview": OVERVIEW, **{name: make().description() for name, make in CHARTS.items()}}


def path_of(name: str, theme: str) -> Path:
    """Return where a picture is kept."""
    return FOLDER / (f"{name}.svg" if theme == "light" else f"{name}-{theme}.svg")


# Drawing


def draw_chart(chart: Chart, colours: dict[str, str]) -> Figure:
    """Draw bars, panel by panel."""
    import matplotlib.pyplot as plt

    lines = -(-len(chart.panels) // chart.columns)
    heights = [
        max(len(p.bars) for p in chart.panels[i * chart.columns : (i + 1) * chart.columns])
        for i in range(lines)
    ]
    head, foot, gap, bar = 0.62, 0.38, 0.62, 0.34
    height = head + foot + sum(heights) * bar + (lines - 1) * gap
    width = 9.0
    figure = plt.figure(figsize=(width, height))
    figure.text(
        0.012,
        1 - 0.2 / height,
        chart.title,
        color=colours["text"],
        size=11.5,
        weight="bold",
        va="center",
    )
    figure.text(0.012, 0.14 / height, chart.source, color=colours["faint"], size=7.5, va="center")
    longest = max(len(b.name) for p in chart.panels for b in p.bars)
    left = 0.03 + 0.0088 * longest * 8.6 / 9
    right = 0.985
    own = any(
        [b.name for b in p.bars] != [b.name for b in chart.panels[0].bars] for p in chart.panels
    )
    share = (right - left) / chart.columns
    top = height - head
    for i, panel in enumerate(chart.panels):
        line, column = divmod(i, chart.columns)
        y = top - sum(heights[:line]) * bar - line * gap - heights[line] * bar
        room = 0.022 if column < chart.columns - 1 else 0
        axes = figure.add_axes(
            (left + column * share, y / height, share - room, heights[line] * bar / height)
        )
        labels = own or column == 0
        peak = max(b.value or 0 for b in panel.bars)
        _draw_bars(axes, panel, chart.unit, colours, labels, peak)
    return figure


def _draw_bars(
    axes: Axes,
    panel: Panel,
    unit: str,
    colours: dict[str, str],
    labels: bool,
    peak: float,
) -> None:
    n = len(panel.bars)
    for i, bar in enumerate(panel.bars):
        y = n - 1 - i
        axes.barh(y, bar.value or 0, height=0.66, color=colours[bar.kind], linewidth=0)
        axes.text(
            (bar.value or 0) + peak * 0.015,
            y,
            shown(bar, unit),
            va="center",
            size=8.5,
            color=colours["text"] if bar.value is not None else colours["faint"],
            weight="bold" if bar.kind == "ours" else "normal",
        )
        if labels:
            axes.text(
                -peak * 0.02,
                y,
                bar.name,
                ha="right",
                va="center",
                size=8.5,
                color=colours["text"],
                weight="bold" if bar.kind == "ours" else "normal",
            )
    axes.set_title(panel.title, loc="left", size=8.5, color=colours["faint"], pad=4)
    axes.set_xlim(0, peak * 1.17)
    axes.set_ylim(-0.6, n - 0.4)
    axes.axvline(0, color=colours["line"], linewidth=0.8)
    axes.axis("off")


def draw_overview(colours: dict[str, str]) -> Figure:
    """Draw the link with staging and decode, and below it the three rings."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    figure = plt.figure(figsize=(9.0, 4.9))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 90)
    axes.set_ylim(0, 49)
    axes.axis("off")

    def box(
        x: float, y: float, w: float, h: float, face: str, edge: str = "line", **more: Any
    ) -> None:
        axes.add_patch(
            FancyBboxPatch(
                (x, y),
                w,
                h,
                boxstyle="round,pad=0,rounding_size=1.1",
                facecolor=colours.get(face, face),
                edgecolor=colours[edge],
                linewidth=1.1,
                **more,
            )
        )

    def text(x: float, y: float, words: str, size: float = 9, **more: Any) -> None:
        options: dict[str, Any] = {"ha": "center", "va": "center", "color": colours["text"]}
        axes.text(x, y, words, size=size, **{**options, **more})

    def arrow(
        x0: float, y0: float, x1: float, y1: float, colour: str, width: float, **more: Any
    ) -> None:
        axes.add_patch(
            FancyArrowPatch(
                (x0, y0),
                (x1, y1),
                arrowstyle="-|>",
                mutation_scale=11,
                color=colours[colour],
                linewidth=width,
                shrinkA=0,
                shrinkB=0,
                **more,
            )
        )

    faint = {"color": colours["faint"]}
    # Where bytes lie and cross.
    box(2, 24.5, 23, 21.5, "box")
    text(13.5, 43.6, "host memory or file", weight="bold")
    for i, width in enumerate((12.5, 9.5, 14.5, 11)):
        box(5, 38.6 - 3.1 * i, width, 2.1, "ours", "ours")
        box(5, 38.6 - 3.1 * i, 17, 2.1, "none", "line", linestyle=(0, (2, 2)))
    text(13.5, 26.4, "packed rows, page-locked", 8, **faint)

    box(52, 24.5, 36, 21.5, "box")
    text(70, 43.6, "GPU", weight="bold")
    for i in range(3):
        box(55, 38.6 - 3.1 * i, 8.2, 2.1, "ours", "ours")
    text(59.1, 30.4, "staging buffers", 8, **faint)
    box(67, 32.4, 7, 8.3, "ring1", "ours")
    text(70.5, 36.5, "decode", 8.5, weight="bold")
    for i in range(4):
        box(78, 38.6 - 3.1 * i, 8, 2.1, "peer", "peer")
    text(82, 26.4, "plain rows", 8, **faint)
    arrow(63.6, 36.5, 66.6, 36.5, "text", 1.4)
    arrow(74.4, 36.5, 77.6, 36.5, "text", 1.4)

    arrow(25.6, 37.6, 54.4, 37.6, "bound", 5)
    text(38.5, 41.9, "the slow link: PCIe, NVMe", 9.5, weight="bold")
    text(38.5, 39.8, "fewer bytes, by the copy engine, ahead of use", 8, **faint)
    axes.plot((25.6, 70.5), (28.4, 28.4), color=colours["bound"], linewidth=2, dashes=(3, 1.5))
    arrow(70.5, 28.4, 70.5, 32.2, "bound", 2)
    text(38.5, 32, "scattered rows: read by the", 8, **faint)
    text(38.5, 30.3, "kernel itself (zero-copy)", 8, **faint)

    # The rings.
    box(2, 1.2, 86, 20.6, "ring3", "ours")
    box(22, 2.6, 64.6, 14.2, "ring2", "ours")
    box(45, 4, 40.2, 9.2, "ring1", "ours")
    text(4, 19.6, "3  integrations/", 9.5, ha="left", weight="bold")
    text(21.5, 19.6, "one line for each framework", 8, ha="left", **faint)
    text(4, 9.5, "\n".join(RINGS["integrations"]), 8.5, ha="left")
    text(24, 14.9, "2  systems", 9.5, ha="left", weight="bold")
    text(36.3, 14.9, "each on the engine", 8, ha="left", **faint)
    text(24, 8.2, "\n".join(RINGS["systems"]), 8.5, ha="left")
    text(47, 11.3, "1  engine/", 9.5, ha="left", weight="bold")
    text(58.5, 11.3, "bytes in, bytes out", 8, ha="left", **faint)
    text(
        47,
        7.2,
        "{} (CUDA, and twins for the CPU)   {}\n{}   {}   {}   {}".format(*RINGS["engine"]),
        8.5,
        ha="left",
    )
    text(86.5, 19.6, "imports go inwards only", 8, ha="right", **faint)
    return figure


def save(name: str, theme: str, figure: Figure) -> None:
    """Write a picture without what changes from run to run."""
    metadata = {"Date": None, "Creator": None, "Description": descriptions()[name]}
    path = path_of(name, theme)
    figure.savefig(path, transparent=True, metadata=metadata)
    lines = path.read_text().replace(f"'{FONT}'", f"'{FONT}', Verdana, sans-serif").splitlines()
    path.write_text("".join(f"{line.rstrip()}\n" for line in lines))


def pictures(names: Sequence[str] = ()) -> Iterator[tuple[str, str, Figure]]:
    """Draw pictures, all when none is named, for each background."""
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.use("svg")
    # Text is kept as text: small files, which can be searched and read aloud. The other fonts that
    # `save` names are no wider.
    options = {"svg.fonttype": "none", "font.family": FONT}
    for name in names or ("overview", *CHARTS):
        for theme, colours in THEMES.items():
            salted: Any = options | {"svg.hashsalt": f"bitslab-{name}"}
            with plt.rc_context(salted):
                drawn = (
                    draw_overview(colours)
                    if name == "overview"
                    else draw_chart(CHARTS[name](), colours)
                )
                yield name, theme, drawn
                plt.close(drawn)


def main() -> None:
    """Draw what the command line names."""
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    names = parser.parse_args().names
    unknown = set(names) - {"overview", *CHARTS}
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: known are overview, {', '.join(CHARTS)}")
    FOLDER.mkdir(exist_ok=True)
    for name, theme, figure in pictures(names):
        save(name, theme, figure)
        print(path_of(name, theme).relative_to(ROOT))


if __name__ == "__main__":
    main()
