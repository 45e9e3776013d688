"""Predict a long text from keys and values packed within an error, and by the peers' roundings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common.arguments import (
    DTYPES,
    add_device,
    add_json,
    add_plot,
    checked_device,
    from_zero_to_one,
    positive,
)
from common.report import OUTPUT, Steps, make_console, write_json
from rich.console import Console
from rich.table import Table
from textgen.accuracy import CHUNK_TOKENS, scores
from textgen.compared import Compared, compared, named_caches
from textgen.smollm import ModelMissingError, load_model, load_tokenizer, text_ids

import bitslab

EPILOG = """\
The text is that of the docstrings of Python's standard library, the model SmolLM2-135M-Instruct,
both without a network. Each token behind the prompt is predicted from a history that is packed as
it grows, in blocks of 64 tokens behind a window of 64, and the predictions are compared with the
plain model's: perplexity, the Kullback-Leibler divergence (KL) and how often the most probable
token is the same. "bits" counts all metadata; the ratio is 16 over it. Peers are simulated: they
round as those works do, with a window of 64 and the first 4 tokens raw in all of them.

In a program of your own it is three lines:

  from bitslab.integrations.transformers import KVCompCache    # brings the attention function
  model.set_attn_implementation("bitslab")
  model.generate(..., past_key_values=KVCompCache(model.config, error=0.1))

examples:
  python examples/long_context.py                                   # two minutes on two CPU cores
  python examples/long_context.py --tokens 4608 --error 0.03 0.1 0.16 --plot error.svg
  python examples/long_context.py --device cuda --tokens 8192 --json scores.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    device = checked_device(parser, options.device)
    if options.prompt_tokens % CHUNK_TOKENS or options.prompt_tokens >= options.tokens:
        parser.error(
            f"argument --prompt-tokens: {options.prompt_tokens}, accepted are multiples of "
            f"{CHUNK_TOKENS} below --tokens"
        )
    try:
        with Steps() as steps:
            with steps.step("loading SmolLM2"):
                model = load_model(DTYPES[options.dtype], device)
                # With them comes the attention function.
                caches = named_caches(model.config, errors=options.error, peers=options.peers)
                model.set_attn_implementation("bitslab")
                ids = text_ids(load_tokenizer(), options.tokens).to(device)
            with steps.step("predicting") as report:
                found = scores(
                    model,
                    ids,
                    caches,
                    prompt_tokens=options.prompt_tokens,
                    progress=report,
                )
    except (ModelMissingError, ValueError, bitslab.BitslabError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    rows = compared(found, DTYPES[options.dtype])
    if options.json != OUTPUT:
        print_rows(make_console(), rows, options.prompt_tokens)
    if options.json is not None:
        write_json(options.json, {"prompt_tokens": options.prompt_tokens}, rows)
    if options.plot is not None:
        plot(options.plot, rows)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--tokens",
        type=positive,
        default=1024,
        metavar="N",
        help="of the text, with the prompt (default: %(default)s)",
    )
    add(
        "--prompt-tokens",
        type=positive,
        default=512,
        metavar="N",
        help="of the first forward pass, from which codes are learnt; not scored "
        "(default: %(default)s)",
    )
    add(
        "--error",
        type=from_zero_to_one,
        nargs="*",
        default=[0.1],
        metavar="E",
        help="of the attention's output that KVCompCache may cause, one or several (default: 0.1)",
    )
    add(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the KVComp paper's settings, and the roundings of KIVI and of QuantizedCache too "
        "(default: --peers)",
    )
    add_device(parser)
    add("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    add_plot(parser, "KL over bits, as .svg, .png or .pdf")
    add_json(parser)
    return parser


def print_rows(console: Console, rows: Sequence[Compared], prompt_tokens: int) -> None:
    """Print a table."""
    shown = Table(
        title=f"{rows[0].score.tokens:,} tokens behind a prompt of {prompt_tokens:,}",
        title_justify="left",
    )
    shown.add_column("cache")
    for heading in ("bits", "ratio", "perplexity", "KL to plain", "same top token %"):
        shown.add_column(heading, justify="right")
    for row in rows:
        values = row.as_dict()
        shown.add_row(
            row.cache,
            f"{row.bits:.2f}",
            f"{values['ratio']:.2f}",
            f"{values['perplexity']:.3f}",
            f"{values['KL to plain']:.4f}",
            f"{values['same top token %']:.1f}",
        )
    console.print(shown)


def plot(file: Path, rows: Sequence[Compared]) -> None:
    """Draw the divergence over the bits of a value."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    coded = [row for row in rows[1:] if row.cache.startswith("KVCompCache")]
    others = [row for row in rows[1:] if row not in coded]
    for label, some, style in (("KVCompCache", coded, "o-"), ("others", others, "s")):
        points = sorted((row.bits, row.as_dict()["KL to plain"], row.cache) for row in some)
        if points:
            bits, divergence, names = zip(*points, strict=True)
            axes.plot(bits, divergence, style, label=label)
            for at in points:
                axes.annotate(at[2], (at[0], at[1]), fontsize=7)
    axes.set(xlabel="bits a value, with all metadata", ylabel="KL to the plain model", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
