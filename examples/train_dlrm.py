"""Train DLRM with embedding tables that are compressed, and compare with uncompressed ones."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from common.arguments import above_zero, checked_device, new_file, positive
from common.report import OUTPUT, Steps, describe, make_console, write_json
from dlrm import options as dlrm_options
from dlrm.checkpoint import save
from dlrm.clicks import Clicks, ClicksError
from dlrm.modes import MODES, counted, make_tables, refusal
from dlrm.report import all_equal, draw, print_runs, verdict
from dlrm.tables import initial_weights
from dlrm.training import OPTIMIZERS, Run, Trainer

DESCRIPTION = f"""\
{__doc__}

DLRM (Naumov et al., 2019) predicts clicks from dense features and from categories; of each category
it has an embedding table, and these are nearly all of the model. They are kept in these ways:

  torch     nn.EmbeddingBag: whole tables on the device
  cached    packed rows in host memory, hot ones on the device
            bitslab.integrations.embedding.CachedEmbeddingBag
  ebc       whole tables in TorchRec's EmbeddingBagCollection
  torchrec  packed rows in host memory, hot ones on the device, in a collection like TorchRec's
            bitslab.integrations.torchrec.CompressedEmbeddingBagCollection
  all       one after the other (without TorchRec's where it is not installed)

All start from the same weights and see the same batches, and all must give the same AUC and the
same losses, to the last bit. Without a GPU all of it runs on the CPU, with the hot rows in host
memory.
"""

EPILOG = """\
examples:
  python examples/train_dlrm.py                                # offline: clicks are drawn
  python examples/train_dlrm.py --data train.txt --max-rows 1000000 --embedding cached --pipelined
  python examples/train_dlrm.py --root ml-100k --epochs 5 --embedding torch cached
  python examples/train_dlrm.py --embedding cached --save dlrm.pt     # for serve_dlrm.py

The exit status is 0, 1 when ways differ (last bits may on a GPU, which adds in no fixed order), 2
when the data or an option is refused.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--embedding",
        nargs="+",
        choices=(*MODES, "all"),
        default=["all"],
        metavar="WAY",
        help=f"one or several of {', '.join(MODES)}, or all (default: all)",
    )
    dlrm_options.add_data_options(parser, lines=25_000)
    dlrm_options.add_table_options(parser)
    training = parser.add_argument_group("training").add_argument
    training(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adagrad",
        help="of the tables and the perceptrons (for sparse-adam, these have Adam); others would "
        "also move rows that no batch has named (default: %(default)s)",
    )
    training(
        "--sparse",
        action=argparse.BooleanOptionalAction,
        help="sparse gradients, which name the rows that they are of (default: for sparse-adam)",
    )
    training("--lr", type=above_zero, default=0.04, help="learning rate (default: %(default)s)")
    training("--epochs", type=positive, default=1, help="default: %(default)s")
    training(
        "--batch-size", type=positive, default=512, help="lines of a batch (default: %(default)s)"
    )
    training(
        "--test-share",
        type=dlrm_options.ratio_below_one,
        default=0.1,
        help="share of the lines, the last ones, that are not trained on but tested (default: "
        "%(default)s)",
    )
    training(
        "--bottom",
        type=dlrm_options.widths,
        default=[64],
        metavar="W-W",
        help="widths of the hidden layers below, such as 512-256 (default: 64)",
    )
    training(
        "--top",
        type=dlrm_options.widths,
        default=[64],
        metavar="W-W",
        help="widths of the hidden layers above, such as 512-256 (default: 64)",
    )
    training(
        "--pipelined",
        action="store_true",
        help="fetch the rows of the next batch while one trains; results do not change",
    )
    dlrm_options.add_output_options(parser)
    add(
        "--save",
        type=new_file,
        metavar="FILE",
        help="write what the last way has trained, for serve_dlrm.py or plain torch.load",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    # Torch's warning about sparse gradients, which it makes itself.
    warnings.filterwarnings("ignore", message="Sparse invariant")
    parser = make_parser()
    options = parser.parse_args(arguments)
    device = checked_device(parser, options.device)
    dlrm_options.check_data(parser, options)
    if options.sparse is None:
        options.sparse = options.optimizer == "sparse-adam"
    elif options.optimizer == "sparse-adam" and not options.sparse:
        parser.error("argument --no-sparse: --optimizer sparse-adam takes sparse gradients only")
    modes, left_out = wanted_modes(parser, options)
    try:
        with Steps() as steps:
            clicks = dlrm_options.load_clicks(options, options.test_share, steps)
            runs = [
                train(clicks, mode, options, device, steps, mode == modes[-1]) for mode in modes
            ]
    except ClicksError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    equal = all_equal(runs)
    show(options, facts_of(clicks, options, device, left_out, equal), runs)
    return 0 if equal else 1


def wanted_modes(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> tuple[list[str], dict[str, str]]:
    """Return the ways to train in, and why some of all are left out."""
    reasons = {mode: refusal(mode, sparse=options.sparse, dtype=options.dtype) for mode in MODES}
    if "all" in options.embedding:
        left_out = {mode: reason for mode, reason in reasons.items() if reason}
        return [mode for mode in MODES if not reasons[mode]], left_out
    for mode in options.embedding:
        if reasons[mode]:
            parser.error(f"argument --embedding: {mode}: {reasons[mode]}")
    return list(dict.fromkeys(options.embedding)), {}


def train(
    clicks: Clicks,
    mode: str,
    options: argparse.Namespace,
    device: torch.device,
    steps: Steps,
    saved: bool,
) -> Run:
    """Train in one way, and save the model if requested."""
    begin = time.perf_counter()
    with steps.step(f"{mode}: making tables"):
        counts = counted(clicks) if options.evict == "DATASET" else None
        kept = dlrm_options.table_options(options, sparse=options.sparse, counts=counts)
        weights = initial_weights(kept.width, kept.dtype, options.seed)
        tables = make_tables(mode, clicks.table_rows, weights, device, kept)
        trainer = Trainer(clicks, tables, options, device)
    prepare_seconds = time.perf_counter() - begin
    epochs = []
    for epoch in range(1, options.epochs + 1):
        with steps.step(f"{mode}: epoch {epoch} of {options.epochs}") as report:
            epochs.append(trainer.train_epoch(epoch, report))
    run = Run(mode, prepare_seconds, epochs, tables.memory(), tables.codecs)
    if options.save and saved:
        with steps.step(f"writing {options.save.name}"):
            save(options.save, trainer.model, settings_of(options))
    tables.close()
    return run


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    return dlrm_options.settings_of(
        options,
        *("optimizer", "sparse", "lr", "epochs", "batch_size", "test_share", "bottom", "top"),
        "pipelined",
    )


def facts_of(
    clicks: Clicks,
    options: argparse.Namespace,
    device: torch.device,
    left_out: dict[str, str],
    equal: bool,
) -> dict[str, Any]:
    """Return the values common to all ways."""
    return {
        "dataset": clicks.name,
        "lines": len(clicks),
        "tested_lines": clicks.n_tested,
        "clicked": float(clicks.labels.mean()),
        "tables": clicks.table_rows,
        "device": describe(device),
        "settings": settings_of(options),
        "left_out": left_out,
        "all_equal": equal,
    }


def show(options: argparse.Namespace, summary: dict[str, Any], runs: list[Run]) -> None:
    """Print, draw and write what the options ask for."""
    if options.json != OUTPUT:
        console = make_console()
        rows = summary["tables"].values()
        raw_bytes = runs[0].memory.raw_bytes
        console.print(
            f"{summary['dataset']}: {summary['lines']:,} lines, {summary['clicked']:.1%} clicked; "
            f"{len(rows)} tables of {sum(rows):,} rows by {options.embedding_dim} {options.dtype}, "
            f"{raw_bytes / 1e6:,.2f} MB; on {summary['device']}"
        )
        print_runs(console, runs)
        for mode, reason in summary["left_out"].items():
            console.print(f"left out: {mode}: {reason}")
        if len(runs) > 1:
            console.print(verdict(runs, summary["all_equal"], summary["device"]))
    if options.json:
        write_json(options.json, summary, runs)
    if options.plot:
        draw(options.plot, runs)


if __name__ == "__main__":
    sys.exit(main())
