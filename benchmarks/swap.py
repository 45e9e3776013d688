"""What training keeps for its backward pass: sizes, codecs, the time model, steps, lossy rates.

python benchmarks/swap.py --only ratio     # bytes, on the CPU
python benchmarks/swap.py --only codecs    # rates of codecs of whole tensors
python benchmarks/swap.py --only model     # the time model beside regressions
python benchmarks/swap.py --only train --models vgg16 --seconds-limit 60    # steps that swap
python benchmarks/swap.py --only lossy     # accuracy at lossy rates

On a GPU where there is one. Each part is a script of its own, swap_<part>.py (the codecs are in
blob_codecs.py), whose first lines say what its tables show.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from timing import add_output, print_tables, run_parts

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import swap_llm  # noqa: E402
import swap_lossy  # noqa: E402
import swap_model  # noqa: E402
import swap_ratio  # noqa: E402
import swap_train  # noqa: E402
from cnn.models import MODELS  # noqa: E402

#: What ratio has besides CNNs.
OF_RATIO = (swap_ratio.ZEROS, *swap_llm.MODELS)

Rows = list[dict[str, Any]]
Report = Callable[[str], None]


def codecs(arguments: argparse.Namespace, report: Report) -> dict[str, Rows]:
    """Return rates of the codecs of whole tensors, and of their peers."""
    import blob_codecs

    on_gpu = arguments.device.startswith("cuda")
    size = arguments.mb or (256 if on_gpu else 32)
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    report(f"codecs: tensors of {size} MB")
    rows = blob_codecs.gpu_rows if on_gpu else blob_codecs.cpu_rows
    return {f"whole tensors of {size} MB, {where}: GB/s": rows(size << 20, arguments.repetitions)}


PARTS: dict[str, Callable[[argparse.Namespace, Report], dict[str, Rows]]] = {
    "ratio": swap_ratio.ratio,
    "codecs": codecs,
    "model": swap_model.model,
    "train": swap_train.train,
    "lossy": swap_lossy.lossy,
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (default: all)")
    add(
        "--models",
        nargs="+",
        choices=(*MODELS, *OF_RATIO),
        metavar="MODEL",
        help=f"of ratio and train: {', '.join(MODELS)}; of ratio alone {', '.join(OF_RATIO)} "
        "(default: those of which issue 20 has figures)",
    )
    add(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="of all parts but ratio, which is on the CPU (default: %(default)s)",
    )
    add_output(parser)
    swap_ratio.add_options(parser)
    add = parser.add_argument_group("codecs").add_argument
    add("--mb", type=int, help="size of a tensor (default: 256 on a GPU, 32 on a CPU)")
    add("--repetitions", type=int, default=9, help="default: %(default)s")
    swap_model.add_options(parser)
    swap_train.add_options(parser)
    swap_lossy.add_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    arguments.failed = []  # what raised an error while the rest went on
    print_tables(run_parts(PARTS, arguments), arguments.json, arguments.out)
    return 1 if arguments.failed else 0


if __name__ == "__main__":
    sys.exit(main())
