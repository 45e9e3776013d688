"""Measure epochs of GraphSAGE or GAT by how features are kept, as Figures 8 and 9 of IBP do.

All ways train in one process on the same batches, epoch by epoch in turn, after one that warms up;
their losses are compared too. `epoch / raw` is the median over the epochs of the time divided by
that of the raw way in the same round. Two settings:

  dgl     a batch is sampled, fetched and trained on before the next (IBP over DGL, Figure 8)
  legion  the next batch is sampled and fetched while one trains (Legion, Figures 8 and 9); its own
          baseline, `raw cache`, has raw rows of the hottest nodes on the GPU

python benchmarks/gnn.py            # what this machine can run; files found through BITSLAB_DATA
python benchmarks/gnn.py --root DIR --batch-size 8192 --scale-up 1000000 --out gnn.md
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

# The scripts that are measured, and what they share.
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import torch  # noqa: E402
from common.arguments import new_file, positive  # noqa: E402
from common.ranks import Ranks  # noqa: E402
from common.report import Steps, same_bits  # noqa: E402
from graphsage.datasets import DatasetError, Graph  # noqa: E402
from graphsage.modes import MODES, PAPER_NAMES, RAW_CACHE, Traffic  # noqa: E402
from graphsage.options import add_options, check_model, rank_device  # noqa: E402
from graphsage.script import Framework, load_graph  # noqa: E402
from graphsage.training import Epoch, Trainer  # noqa: E402
from timing import print_tables  # noqa: E402

Rows = list[dict[str, Any]]
SETTINGS = {"dgl": False, "legion": True}
#: How much faster an epoch of the paper is on average: A100, six datasets, IBP (section 6.2).
PAPER = {"dgl": ("DGL", 1.56), "legion": ("Legion", 1.74)}


def main() -> int:
    """Measure every requested framework, dataset and setting; print one table each."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    # A batch of 1,024 touches most of 100,000 nodes; on a CPU it trains for seconds.
    data = Path(os.environ.get("BITSLAB_DATA", ROOT.parent / "shared" / "data")) / "planetoid"
    parser.set_defaults(
        root=data if data.is_dir() else None,
        batch_size=1024,
        scale_up=500_000 if on_gpu else 100_000,
        max_train=32_768 if on_gpu else 2048,
    )
    add = parser.add_argument
    add(
        "--datasets",
        nargs="+",
        default=["citeseer", "cora"],
        help="names as in the scripts; default: citeseer cora",
    )
    add("--framework", choices=("dgl", "pyg", "both"), help="default: those that are installed")
    add("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: both")
    add(
        "--modes",
        nargs="+",
        choices=(*MODES, RAW_CACHE),
        default=[*MODES, RAW_CACHE],
        help="ways to keep features; raw is always among them (default: all)",
    )
    add("--epochs", type=positive, default=3, help="timed ones of each way (default: %(default)s)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print JSON instead of tables")
    shown.add_argument("--out", type=new_file, help="also write the tables to this Markdown file")
    options = parser.parse_args()
    check_model(parser, options)
    device = rank_device(parser, options.device)
    modes = list(dict.fromkeys(["raw", *options.modes]))
    warnings.filterwarnings("ignore", message="Dataloader CPU affinity")
    warnings.filterwarnings("ignore", message="Sparse (CSR|invariant)")
    frameworks = installed(parser, options.framework)
    tables: dict[str, Rows] = {}
    status = 0
    try:
        with Steps() as steps:
            for dataset in options.datasets:
                options.dataset = dataset
                graph = load_graph(options, frameworks[0].own_loader, steps)
                for framework in frameworks:
                    with closing(Measuring(framework, graph, modes, options, device)) as measuring:
                        for setting in options.settings:
                            status |= not measuring.run(setting, steps)
                            tables[measuring.title(setting)] = measuring.rows(setting)
    except DatasetError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        status = 130
    # What was measured before it stopped may have taken hours.
    if tables:
        print_tables(tables, options.json, options.out)
    return status


def installed(parser: argparse.ArgumentParser, wanted: str | None) -> list[Framework]:
    """Return the frameworks of the options, or all that are installed."""
    found = []
    for name in ("dgl", "pyg"):
        if wanted not in (None, "both", name):
            continue
        try:
            if name == "dgl":
                from train_graphsage_dgl import FRAMEWORK
            else:
                from train_graphsage_pyg import FRAMEWORK
        except ImportError as error:
            if wanted is not None:
                parser.error(f"argument --framework: {name} is not there: {error}")
            continue
        found.append(FRAMEWORK)
    if not found:
        parser.error("argument --framework: neither dgl nor torch-geometric is installed")
    return found


class Measuring:
    """One framework on one graph: a trainer for each way to keep features, all at once."""

    def __init__(
        self,
        framework: Framework,
        graph: Graph,
        modes: list[str],
        options: argparse.Namespace,
        device: torch.device,
    ) -> None:
        self.framework, self.graph, self.modes = framework, graph, modes
        self.options, self.device = options, device
        self.trainers: dict[str, Trainer] = {}
        self.epochs: dict[str, list[Epoch]] = {}

    def run(self, setting: str, steps: Steps) -> bool:
        """Train all ways in turn; return whether their losses were equal (on a GPU: True)."""
        self.options.pipeline = SETTINGS[setting]
        name = f"{self.framework.name}, {self.graph.name}, {setting}"
        for mode in self.modes:
            if mode not in self.trainers:
                with steps.step(f"{name}: preparing {mode}"):
                    self.trainers[mode] = self.framework.trainer(
                        self.graph, mode, self.options, self.device, Ranks()
                    )
        self.epochs = {mode: [] for mode in self.modes}
        losses: dict[str, list[float]] = {mode: [] for mode in self.modes}
        for epoch in range(self.options.epochs + 1):
            # Each round begins with another, so that none is always first.
            turn = epoch % len(self.modes)
            for mode in self.modes[turn:] + self.modes[:turn]:
                with steps.step(f"{name}: epoch {epoch}, {mode}") as report:
                    trained = self.trainers[mode].train_epoch(epoch, report)
                losses[mode] += trained.losses
                if epoch:
                    self.epochs[mode].append(trained)
        # A GPU adds in no fixed order.
        differ = [mode for mode in self.modes if not same_bits(losses[mode], losses["raw"])]
        if self.device.type == "cpu" and differ:
            print(f"{name}: losses differ from raw: {', '.join(differ)}", file=sys.stderr)
            return False
        return True

    def title(self, setting: str) -> str:
        graph, trainer = self.graph, self.trainers["raw"]
        on = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        peer, factor = PAPER[setting]
        model = "GAT, " if self.options.model == "gat" else ""
        return (
            f"{self.framework.name} as {setting}, {model}{graph.name}: {graph.n_nodes:,} nodes of "
            f"{graph.x[0].nbytes:,} bytes, {trainer.n_train // trainer.batch_size} batches of "
            f"{trainer.batch_size:,}, {on} (paper: {factor}x over {peer} on average, A100)"
        )

    def rows(self, setting: str) -> Rows:
        """Return the medians over the epochs of `run`, a row for each way."""
        base = RAW_CACHE if setting == "legion" and RAW_CACHE in self.modes else "raw"
        return [self._row(mode, base) for mode in self.modes]

    def _row(self, mode: str, base: str) -> dict[str, Any]:
        epochs, columns = self.epochs[mode], self.trainers[mode].columns.values()

        def median(name: str) -> float:
            return float(statistics.median(getattr(epoch, name) for epoch in epochs))

        def over(other: str) -> float:
            pairs = zip(epochs, self.epochs[other], strict=True)
            return statistics.median(mine.seconds / its.seconds for mine, its in pairs)

        traffic = sum((epoch.traffic for epoch in epochs), Traffic())
        paper_name = f", {PAPER_NAMES[mode]}" if mode in PAPER_NAMES else ""
        row = {
            "features": mode + paper_name,
            "epoch s": median("seconds"),
            "epoch / raw": over("raw"),
            f"times faster than {base}": 1 / over(base),
            "waiting s": median("waiting_seconds"),
            "training s": median("training_seconds"),
            "sampling s": median("sampling_seconds"),
            "fetching s": median("fetching_seconds"),
            "moved MB": traffic.moved_bytes / len(epochs) / 1e6,
            "rows / moved": traffic.ratio,
            "hit rate": traffic.hit_rate,
            "host MB": sum(column.host_bytes for column in columns) / 1e6,
        }
        return {name: value for name, value in row.items() if value is not None}

    def close(self) -> None:
        """Free the features: the next graph needs the memory."""
        self.trainers.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit(main())
