"""Measure KVCompCache: bytes at an error, predictions, kernels, generation, beside the peers.

python benchmarks/kvcomp.py --only ratio     # bytes of a trained model's K and V, and the error
python benchmarks/kvcomp.py --only accuracy  # what it predicts from packed history
python benchmarks/kvcomp.py --only figures   # the same over scales of K and V, and turning points
python benchmarks/kvcomp.py --only cpu       # encode and decode by the twins, one core
python benchmarks/kvcomp.py --only kernels   # on a GPU: encode, decode, attention to packed tiles
python benchmarks/kvcomp.py --only generate  # on a GPU: prompt, token and memory by cache

ratio and accuracy take SmolLM2-135M-Instruct (Llama, 30 layers, 9 query and 3 K/V heads of 64) on
the docstrings of Python's standard library; ratio also takes MiniLM. Both come from packages, with
no network. All metadata is counted. "error" is norm(o' - o) / norm(o) of softmax(QK)V, of the last
64 queries, the mean over layers; the first 4 tokens and the last 128 are raw for all. KIVI and
QuantizedCache are simulated: they round as those works do. The KVComp paper's settings are run by
this library's own code.

accuracy packs blocks of 64 tokens behind a window of 64, as generation would; each token behind the
prompt is predicted from what is packed by then, 64 in a pass, which decodes it first. On a CPU
1,000 tokens take some minutes a cache. figures does that for scales of K and of V alone, 25 caches
(figures 5 to 7 of the paper; ratio has figure 8); --plot draws them.

kernels takes normal values, and K and V of SmolLM2 with two heads of 64 side by side as one of 128.
Attention stands beside every backend of SDPA, flex_attention, decoding followed by the fastest of
them, and fixed-width fields, which the same kernels read, so that the price of entropy coding is
seen. On a GPU ratio and kernels take about a minute.

kernels and generate need a GPU and are left out without one. generate has models of random weights
in Llama's shape; K and V of such models take more bits than those of trained ones, so that the link
carries more. QuantizedCache is measured where its backends can be imported (optimum.quanto, hqq);
cuDNN's attention is off, since it makes a plan for each new length. Every repetition has a fresh
prompt; figures are medians after one that warms up. "of the host" is the time until a token's last
kernel is queued. Rows go to stderr as they come.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# SmolLM2, its text and what is compared are those of the examples.
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from common.arguments import (  # noqa: E402
    DTYPES,
    add_device,
    checked_device,
    from_zero_to_one,
    positive,
)
from common.report import Steps  # noqa: E402
from kvcomp_figures import CURVES  # noqa: E402
from kvcomp_generate import CASES, LARGE, WAYS  # noqa: E402
from llm_workload import left_out  # noqa: E402
from textgen.accuracy import CHUNK_TOKENS  # noqa: E402
from textgen.smollm import ModelMissingError  # noqa: E402
from timing import add_output, print_tables  # noqa: E402

PARTS = ("ratio", "accuracy", "figures", "cpu", "kernels", "generate")
#: What KVCompCache aims at.
ERRORS = {"ratio": (0.04, 0.055, 0.10, 0.16), "accuracy": (0.037, 0.055, 0.07)}
#: Scales of K and of V: what `error` chooses between (figures 5 to 7 of the paper).
SCALES = ((0.5, 0.5), (1.0, 0.7), (1.5, 1.0), (2.0, 1.2), (2.5, 1.4))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--only", choices=PARTS, nargs="+", help="run one part or several")
    add(
        "--error",
        type=from_zero_to_one,
        nargs="+",
        metavar="E",
        help="ratio, accuracy: errors that KVCompCache aims at; default: 0.04 0.055 0.1 0.16 for\n"
        "ratio, 0.037 0.055 0.07 for accuracy",
    )
    add(
        "--scales",
        type=scales,
        nargs="*",
        metavar="K:V",
        help="ratio, accuracy, generate: explicit scales of K and V; default: five for ratio,\n"
        "none for the others. generate takes one pair, for KVCompCache: the error asks for finer\n"
        "steps of random weights than of a trained model",
    )
    add(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ratio, accuracy: other works too (default: --peers)",
    )
    add(
        "--contexts",
        type=positive,
        nargs="+",
        metavar="N",
        help="ratio: tokens, the first for all rows; default: 2048 4096 8192, on a GPU 16384 and\n"
        "32768 too, for which the model's rotations are slowed down",
    )
    add(
        "--tokens",
        type=positive,
        default=6144,
        metavar="N",
        help="accuracy, figures: of the text, with the prompt; default: %(default)s",
    )
    add(
        "--prompt-tokens",
        type=positive,
        default=2048,
        metavar="N",
        help="accuracy, figures: of the first pass, not scored; default: %(default)s",
    )
    add(
        "--padding",
        type=int,
        default=0,
        metavar="N",
        help="accuracy: tokens of padding before the prompt, as a shorter sequence of a batch\n"
        "has; default: none",
    )
    add(
        "--dtype",
        choices=tuple(DTYPES),
        default="float32",
        help="accuracy, figures: of the model; default: %(default)s",
    )
    add("--curves", choices=tuple(CURVES), nargs="+", default=list(CURVES), help="figures: all")
    add(
        "--gpu-bytes",
        type=positive,
        default=1 << 29,
        metavar="N",
        help="kernels: raw bytes of an input; default: 512 MiB",
    )
    add(
        "--map",
        action="store_true",
        help="kernels: attention of batches of 1 to 64 at contexts of 2k to 128k, with all peers;\n"
        "heads of 64 and more steps; default: what takes some 30 seconds",
    )
    add(
        "--cases",
        choices=(*CASES, *LARGE),
        nargs="+",
        default=list(CASES),
        help="generate: default: all but " + ", ".join(LARGE) + ", which other caches cannot do",
    )
    add("--ways", choices=tuple(WAYS), nargs="+", default=list(WAYS), help="generate: all")
    add("--repetitions", type=positive, default=3, metavar="N", help="default: %(default)s")
    add_device(parser)
    add(
        "--plot",
        type=Path,
        metavar="FOLDER",
        help="figures, ratio: draw figures 5 to 7 and 8 of the paper, as .svg in this folder",
    )
    add(
        "--tables",
        type=Path,
        metavar="FILE",
        help="with --plot: draw what --json has printed before, and measure nothing",
    )
    add_output(parser)
    return parser


def scales(text: str) -> tuple[float, float]:
    """Parse two scales."""
    try:
        key_scale, value_scale = map(float, text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}, accepted are two numbers, K:V") from None
    return key_scale, value_scale


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    """Parse arguments, and check what belongs together."""
    parser = make_parser()
    arguments = parser.parse_args(given)
    arguments.device = checked_device(parser, arguments.device)
    if arguments.tables is not None and arguments.plot is None:
        parser.error("argument --tables: given without --plot, which draws them")
    if arguments.prompt_tokens % CHUNK_TOKENS or arguments.prompt_tokens >= arguments.tokens:
        parser.error(
            f"argument --prompt-tokens: {arguments.prompt_tokens}, accepted are multiples of "
            f"{CHUNK_TOKENS} below --tokens"
        )
    given_scales = arguments.scales or ()
    if "generate" in (arguments.only or PARTS) and len(given_scales) > 1:
        parser.error(f"argument --scales: {len(given_scales)} pairs, generate takes one")
    return arguments


def main(given: list[str] | None = None) -> int:
    """Run the requested parts and print their tables."""
    arguments = parsed(given)
    if arguments.tables is not None:
        draw(json.loads(arguments.tables.read_text()), arguments.plot)
        return 0
    tables: dict[str, list[dict[str, Any]]] = {}
    with Steps() as steps:
        for part in arguments.only or PARTS:
            with steps.step(part) as report:
                try:
                    tables |= run(part, arguments, report)
                except ModelMissingError as error:
                    left_out(part, error)
    print_tables(tables, arguments.json, arguments.out)
    if arguments.plot is not None:
        draw(tables, arguments.plot)
    return 0


def draw(tables: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> None:
    """Draw pictures, and say on stderr where they are."""
    import kvcomp_pictures

    files = kvcomp_pictures.draw(tables, folder)
    for file in files:
        print(f"drawn: {file}", file=sys.stderr)
    if not files:
        print("--plot: no table of figures or of contexts, nothing is drawn", file=sys.stderr)


def run(part: str, arguments: argparse.Namespace, report: Any) -> dict[str, list[dict[str, Any]]]:
    """Run one of PARTS."""
    if arguments.error is None and part in ERRORS:
        arguments = argparse.Namespace(**{**vars(arguments), "error": list(ERRORS[part])})
    if part == "ratio":
        import kvcomp_ratio

        return kvcomp_ratio.run(arguments, SCALES, report)
    if part == "accuracy":
        import kvcomp_accuracy

        return kvcomp_accuracy.run(arguments, report)
    if part == "figures":
        import kvcomp_figures

        return kvcomp_figures.run(arguments, report)
    if part == "cpu":
        import kvcomp_cpu

        return kvcomp_cpu.run(arguments)
    if arguments.device.type != "cuda":
        left_out(part, "it needs a GPU")
        return {}
    if part == "kernels":
        import kvcomp_attend
        import kvcomp_codec

        return kvcomp_codec.run(arguments) | kvcomp_attend.run(arguments)
    import kvcomp_generate

    return kvcomp_generate.run(arguments, report)


if __name__ == "__main__":
    raise SystemExit(main())
