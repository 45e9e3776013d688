"""Train DLRM with tables divided between ranks, and compare ways to exchange their rows."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from common import ranks
from common.arguments import above_zero, add_json, add_plot, positive
from common.report import OUTPUT, Steps, make_console, write_json
from dlrm import options as dlrm_options
from dlrm.clicks import Clicks, ClicksError
from dlrm.exchanges import WAYS
from dlrm.sharded import (
    ShardedRun,
    ShardedTables,
    ShardedTrainer,
    TorchrecShardedTables,
)
from dlrm.sharded_report import draw, lossless_is_raw, print_runs, print_tables, verdict
from dlrm.tables import initial_weights
from dlrm.torchrec_tables import missing_torchrec

from bitslab.distributed import AdaptiveBound, constant, drop, linear, logarithmic, stepwise

#: What `--decay` accepts: of so many steps, how a bound falls.
DECAYS: dict[str, Callable[[int], Callable[[int], float]]] = {
    "stepwise": stepwise,
    "linear": linear,
    "logarithmic": logarithmic,
    "drop": drop,
    "constant": lambda steps: constant(),
}

DESCRIPTION = f"""\
{__doc__}

Hybrid-parallel training: each embedding table is on one rank, the perceptrons are on all. In every
step ranks send looked-up rows to each other, and their gradients back:

{chr(10).join(f"  {way:<9} {what}" for way, what in WAYS.items())}

All ways start from the same weights and see the same batches. Losses of raw and lossless must be
equal to the last bit. It runs on CPUs, by gloo, or with --device cuda on a GPU for each rank.
"""

EPILOG = """\
examples:
  torchrun --nproc-per-node=2 examples/train_dlrm_distributed.py   # offline: clicks are drawn
  torchrun --nproc-per-node=2 examples/train_dlrm_distributed.py --torchrec --row-ids
  ... --exchange raw adaptive fp16 int8 --plot it.png --root ml-100k --epochs 5

The exit status is 0, 1 when raw and lossless differ without --row-ids, 2 when the data or an option
is refused.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--exchange",
        nargs="+",
        choices=WAYS,
        default=["raw", "lossless", "adaptive"],
        metavar="WAY",
        help=f"one or several of {', '.join(WAYS)} (default: raw lossless adaptive)",
    )
    add(
        "--torchrec",
        action="store_true",
        help="TorchRec's DistributedModelParallel in place of plain torch; what its own codecs "
        "move is computed, not counted",
    )
    add(
        "--row-ids",
        action="store_true",
        help="gradients of copies of a row go back as their sum: fewer bytes, another order of "
        "additions",
    )
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: a GPU for each rank, and NCCL (default: %(default)s)",
    )
    add(
        "--codec",
        choices=("auto", "compressed"),
        default="compressed",
        help="of lossless and adaptive; auto: torch's own all-to-all where that is faster, as "
        "measured (default: %(default)s)",
    )
    add(
        "--bound",
        type=above_zero,
        default=0.03,
        metavar="SHARE",
        help="of adaptive, for tables between the classes, as a share of the range of the rows "
        "(default: %(default)g)",
    )
    add(
        "--decay",
        choices=tuple(DECAYS),
        default="stepwise",
        help="of adaptive: how bounds fall from twice themselves (default: %(default)s)",
    )
    add(
        "--decay-steps",
        type=positive,
        default=20,
        metavar="N",
        help="of adaptive: steps in which bounds fall from twice themselves (default: %(default)s)",
    )
    dlrm_options.add_data_options(parser, lines=25_000)
    training = parser.add_argument_group("training").add_argument
    training(
        "--embedding-dim",
        type=positive,
        default=32,
        metavar="D",
        help="numbers in a row of a table (default: %(default)s)",
    )
    training("--lr", type=above_zero, default=0.04, help="learning rate (default: %(default)s)")
    training("--epochs", type=positive, default=1, help="default: %(default)s")
    training(
        "--batch-size",
        type=positive,
        default=512,
        help="lines of a batch of all ranks (default: %(default)s)",
    )
    training(
        "--test-share",
        type=dlrm_options.ratio_below_one,
        default=0.1,
        help="share of the lines, the last ones, that are tested (default: %(default)s)",
    )
    for name in ("bottom", "top"):
        training(
            f"--{name}",
            type=dlrm_options.widths,
            default=[64],
            metavar="W-W",
            help="widths of hidden layers, such as 512-256 (default: 64)",
        )
    add_plot(parser, "ratio, bound and loss over the steps to this file, such as it.png")
    add_json(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    dlrm_options.check_data(parser, options)
    if options.torchrec and (missing := missing_torchrec()):
        parser.error(f"argument --torchrec: TorchRec does not load ({missing})")
    if options.torchrec and "int8" in options.exchange and options.embedding_dim % 32:
        parser.error(
            f"argument --embedding-dim: {options.embedding_dim}; TorchRec's int8 takes multiples "
            "of 32"
        )
    if options.device == "cuda" and torch.cuda.device_count() < ranks.local_size():
        parser.error(
            f"argument --device: cuda; {torch.cuda.device_count()} GPUs for {ranks.local_size()} "
            "ranks"
        )
    if options.batch_size < ranks.wanted_size():
        parser.error(
            f"argument --batch-size: {options.batch_size}, fewer than {ranks.wanted_size()} ranks"
        )
    if options.torchrec:
        # TorchRec's own, of kernels and of pending changes in torch.
        warnings.simplefilter("ignore")
        logging.getLogger("torchrec").setLevel(logging.ERROR)
    if ranks.wanted_size() == 1:
        store = getattr(dist, "HashStore")()  # noqa: B009 - torch's types do not have it
        backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        device = torch.device("cpu")
        if options.device == "cuda":
            device = torch.device("cuda", ranks.local_rank())
        with ranks.started(device) as together:
            return run(options, together)
    except ClicksError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run(options: argparse.Namespace, together: ranks.Ranks) -> int:
    """Train in each way on this rank; the first one shows what all found."""
    first = together.rank == 0
    with Steps(shown=first) as steps:
        clicks = dlrm_options.load_clicks(options, options.test_share, steps)
        runs = [
            train(clicks, way, options, together, steps) for way in dict.fromkeys(options.exchange)
        ]
    equal = lossless_is_raw(runs)
    if first:
        show(options, facts_of(clicks, options, together, equal), runs)
    return 1 if equal is False and not options.row_ids else 0


def train(
    clicks: Clicks, way: str, options: argparse.Namespace, together: ranks.Ranks, steps: Steps
) -> ShardedRun:
    """Train with one way of exchanging."""
    weights = initial_weights(options.embedding_dim, torch.float32, options.seed)
    bound = None
    if way == "adaptive":
        schedule = DECAYS[options.decay](options.decay_steps)
        bound = AdaptiveBound(options.bound, schedule=schedule)
    kind = TorchrecShardedTables if options.torchrec else ShardedTables
    with steps.step(f"{way}: making tables"):
        tables = kind(clicks.table_rows, weights, options, together, way, bound)
        trainer = ShardedTrainer(clicks, tables, options, together)
    with steps.step(f"{way}: training") as report:
        return trainer.train(way, bound, report)


def facts_of(
    clicks: Clicks, options: argparse.Namespace, together: ranks.Ranks, equal: bool | None
) -> dict[str, Any]:
    """Return the values common to all ways."""
    names = [
        *("torchrec", "device", "codec", "row_ids", "bound", "decay", "decay_steps"),
        *("embedding_dim", "lr", "epochs", "batch_size", "test_share", "bottom", "top"),
        *("scale", "zipf", "seed"),
    ]
    return {
        "dataset": clicks.name,
        "lines": len(clicks),
        "tested_lines": clicks.n_tested,
        "tables": clicks.table_rows,
        "ranks": together.size,
        "settings": {name: getattr(options, name) for name in names},
        "lossless_is_raw": equal,
    }


def show(options: argparse.Namespace, summary: dict[str, Any], runs: list[ShardedRun]) -> None:
    """Print, draw and write what the options ask for."""
    if options.json != OUTPUT:
        console = make_console()
        rows = summary["tables"].values()
        by = "TorchRec" if options.torchrec else "plain torch"
        console.print(
            f"{summary['dataset']}: {summary['lines']:,} lines; {len(rows)} tables of "
            f"{sum(rows):,} rows by {options.embedding_dim} on {summary['ranks']} ranks, by {by}"
        )
        print_runs(console, runs)
        for each in runs:
            if each.way in ("lossless", "adaptive"):
                print_tables(console, each)
        if summary["lossless_is_raw"] is not None:
            console.print(verdict(runs, summary["lossless_is_raw"], options.row_ids))
    if options.json:
        write_json(options.json, summary, runs)
    if options.plot:
        draw(options.plot, runs)


if __name__ == "__main__":
    sys.exit(main())
