"""Predict a long text from keys and values packed within an error, and by the peers' roundings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graphsage.arguments import device_named, positive
from graphsage.options import DTYPES, new_file
from graphsage.report import Steps, make_console, write_json
from rich.console import Console
from rich.table import Table
from textgen.accuracy import CHUNK_TOKENS, Score, scores
from textgen.rounded import PEERS, rounded_cache
from textgen.smollm import ModelMissingError, load_model, load_tokenizer, text_ids
from transformers import DynamicCache

import bitslab
from bitslab.integrations.transformers import KVCompCache

EPILOG = """\
The text is that of the docstrings of Python's standard library, the model SmolLM2-135M-Instruct,
both without a network. Each token behind the prompt is predicted from a history that is packed as
it grows, in blocks of 64 tokens behind a window of 64, and the predictions are compared with the
plain model's: perplexity, the Kullback-Leibler divergence (KL) and how often the most probable
token is the same. "bits" counts all metadata; the ratio is 16 over it.

In a program of your own it is two lines:

  model.set_attn_implementation("bitslab")     # after: import bitslab.integrations.transformers
  model.generate(..., past_key_values=KVCompCache(model.config, error=0.1))

examples:
  python examples/long_context.py                                   # two minutes on two CPU cores
  python examples/long_context.py --tokens 4608 --error 0.03 0.1 0.16 --plot error.svg
  python examples/long_context.py --device cuda --tokens 8192 --json scores.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    device = device_named(parser, options.device)
    if options.prompt_tokens % CHUNK_TOKENS or options.prompt_tokens >= options.tokens:
        parser.error(
            f"argument --prompt-tokens: {options.prompt_tokens}, accepted are multiples of "
            f"{CHUNK_TOKENS} below --tokens"
        )
    try:
        with Steps() as steps:
            with steps.step("loading SmolLM2"):
                model = load_model(DTYPES[options.dtype], device)
                model.set_attn_implementation("bitslab")
                ids = text_ids(load_tokenizer(), options.tokens).to(device)
            with steps.step("predicting") as report:
                found = scores(
                    model,
                    ids,
                    caches_of(model.config, options),
                    prompt_tokens=options.prompt_tokens,
                    progress=report,
                )
    except (ModelMissingError, ValueError, bitslab.BitslabError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    rows = [row_of(name, score) for name, score in found.items()]
    if options.json != Path("-"):
        print_rows(make_console(), rows, options.prompt_tokens)
    if options.json is not None:
        write_json(options.json, {"prompt_tokens": options.prompt_tokens, "rows": rows})
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
        type=float,
        nargs="*",
        default=[0.1],
        metavar="E",
        help="of the attention's output that KVCompCache may cause, one or several (default: 0.1)",
    )
    add(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the roundings of KIVI, of transformers' QuantizedCache and of the KVComp paper too "
        "(default: --peers)",
    )
    add("--device", help="cpu or cuda (default: cuda where there is a GPU)")
    add("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    add("--plot", type=new_file, metavar="FILE", help="draw KL over bits, as .svg, .png or .pdf")
    add(
        "--json",
        type=new_file,
        metavar="FILE",
        help="write all of it as JSON, to a file or - for the output",
    )
    return parser


def caches_of(config: Any, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Return what makes each cache; the plain one first."""
    caches: dict[str, Callable[[], Any]] = {"plain": lambda: DynamicCache(config=config)}
    for error in options.error:
        caches[f"KVCompCache, error {error:g}"] = lambda error=error: KVCompCache(
            config, error=error, window=CHUNK_TOKENS, block_tokens=CHUNK_TOKENS
        )
    if options.peers:
        for name, peer in PEERS.items():
            caches[name] = lambda peer=peer: rounded_cache(config, peer)
    return caches


def row_of(name: str, score: Score) -> dict[str, Any]:
    """Return the row of a cache; `bits` is None where a peer's codes are not counted."""
    bits: float | None = 16.0
    if name in PEERS:
        bits = PEERS[name].bits
    elif score.stats.get("packed_ratio"):
        bits = 16 / score.stats["packed_ratio"]
    return {"cache": name, "bits": bits, **score.row}


def print_rows(console: Console, rows: Sequence[dict[str, Any]], prompt_tokens: int) -> None:
    """Print a table."""
    shown = Table(
        title=f"{rows[0]['tokens']:,} tokens behind a prompt of {prompt_tokens:,}",
        title_justify="left",
    )
    shown.add_column("cache")
    for heading in ("bits", "ratio", "perplexity", "KL to plain", "same top token %"):
        shown.add_column(heading, justify="right")
    for row in rows:
        bits = row["bits"]
        shown.add_row(
            row["cache"],
            "" if bits is None else f"{bits:.2f}",
            "" if bits is None else f"{16 / bits:.2f}",
            f"{row['perplexity']:.3f}",
            f"{row['KL to plain']:.4f}",
            f"{row['same top token %']:.1f}",
        )
    console.print(shown)


def plot(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the divergence over the bits of a value."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for kind, marker in (("KVCompCache", "o"), ("", "s")):
        some = [
            row
            for row in rows
            if row["bits"]
            and row["KL to plain"] > 0
            and row["cache"].startswith(kind or tuple(PEERS))
        ]
        some.sort(key=lambda row: row["bits"])
        style = "-" if kind else "none"
        axes.plot(
            [row["bits"] for row in some],
            [row["KL to plain"] for row in some],
            marker=marker,
            linestyle=style,
            label=kind or "fixed rates",
        )
        for row in some:
            axes.annotate(row["cache"], (row["bits"], row["KL to plain"]), fontsize=7)
    axes.set(xlabel="bits a value, with all metadata", ylabel="KL to the plain model", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
