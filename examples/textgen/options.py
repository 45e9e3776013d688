"""The options of generate_offloaded.py, and their checks."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

# These modules are next to this package.
from common.arguments import (
    DTYPES,
    add_device,
    add_json,
    add_seed,
    checked_device,
    from_zero,
    from_zero_to_one,
    new_file,
    positive,
)

from .models import RANDOM, SIZES
from .ways import CACHES, WEIGHTS, CacheOptions

DESCRIPTION = """\
{summary}

Weights and the cache of keys and values are kept in one of these ways, all but kvcomp without loss:

  --weights
{weights}
  --cache
{caches}

compressed and packed weights are one argument of from_pretrained,
quantization_config=bitslab.integrations.transformers.BitslabConfig(...), and the compressed cache
is one of generate, past_key_values=CompressedCache(model.config). The same prompt is run once with
a plain model and a plain cache, and the tokens must be equal (with kvcomp: they are counted, since
K and V are quantised, and attention reads them packed by the function "bitslab"). On a CPU nothing
crosses a link: reported bytes are those that a link would carry, and packed weights are decoded for
each pass.
"""

EPILOG = """\
examples:
  python examples/generate_offloaded.py                              # offline: random Llama, small
  python examples/generate_offloaded.py --model opt --size medium --batch 4 --prompt-tokens 512
  python examples/generate_offloaded.py --weights packed --cache dynamic       # DFloat11's use
  python examples/generate_offloaded.py --weights offload --cache offloaded    # today's tools
  python examples/generate_offloaded.py --cache kvcomp --weights device --error 0.1
  python examples/generate_offloaded.py --model FOLDER --prompt "The link is" --new-tokens 64

A random model is written to the folder for temporary files (TMPDIR) first, so that it is loaded as
any other: a 7b takes 13 GB there. The exit status is 0, 1 when a token differs from the plain
run's (but with --cache kvcomp), 2 when the model or an option is refused.
"""


def make_parser(summary: str) -> argparse.ArgumentParser:
    """Return the parser of the script."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION.format(
            summary=summary, weights=_listed(WEIGHTS), caches=_listed(CACHES)
        ),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(parser)
    _add_prompt(parser)
    _add_ways(parser)
    add = parser.add_argument
    add(
        "--plain",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the plain model too, and compare (default: --plain); it must fit the device",
    )
    add_device(parser)
    add_seed(parser)
    add_json(parser)
    return parser


def _listed(ways: dict[str, str]) -> str:
    return "\n".join(f"    {name:<10}  {text}" for name, text in ways.items())


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add(
        "--model",
        default="llama",
        metavar="PATH_OR_NAME",
        help=f"a folder or a name on the hub; or, offline, random weights of {', '.join(RANDOM)} "
        "(default: %(default)s)",
    )
    add(
        "--size",
        choices=SIZES,
        default="small",
        help="of a random model (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="bfloat16",
        help="of the weights and of the cache (default: %(default)s)",
    )


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prompt").add_argument
    add(
        "--prompt",
        nargs="+",
        metavar="TEXT",
        help="one text or several, each a line of the batch; for models with a tokenizer",
    )
    add(
        "--prompt-tokens",
        type=positive,
        default=300,
        metavar="N",
        help="without --prompt: tokens drawn for each line (default: %(default)s; the paper: 1920)",
    )
    add(
        "--batch",
        type=positive,
        default=1,
        metavar="N",
        help="without --prompt: lines (default: %(default)s; the paper: 20)",
    )
    add(
        "--new-tokens",
        type=positive,
        default=64,
        metavar="N",
        help="tokens to generate, greedily (default: %(default)s; the paper: 128)",
    )


def _add_ways(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("weights").add_argument
    add("--weights", choices=WEIGHTS, default="compressed", help="default: %(default)s")
    add(
        "--keep",
        type=from_zero_to_one,
        metavar="SHARE",
        help="compressed: share of the raw bytes that is kept raw on the device (default: none)",
    )
    add(
        "--disk",
        type=new_file,
        metavar="FILE",
        help="compressed: keep packed weights in this file in place of host memory",
    )
    add(
        "--depth",
        type=from_zero,
        default=2,
        metavar="N",
        help="layers that are fetched ahead (default: %(default)s)",
    )
    add(
        "--sm-budget",
        type=positive,
        default=64,
        metavar="N",
        help="multiprocessors that decoding may use (default: %(default)s)",
    )
    add = parser.add_argument_group("cache").add_argument
    add("--cache", choices=CACHES, default="compressed", help="default: %(default)s")
    add(
        "--window",
        type=from_zero,
        default=128,
        metavar="N",
        help="packed caches: last tokens that are kept raw on the device (default: %(default)s)",
    )
    add(
        "--block-tokens",
        type=positive,
        default=64,
        metavar="N",
        help="packed caches: tokens that are packed together (default: %(default)s)",
    )
    add(
        "--offload",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="packed caches: the packed history is in host memory (default: --offload)",
    )
    add(
        "--error",
        type=from_zero_to_one,
        default=CacheOptions.error,
        metavar="E",
        help="kvcomp: relative error of attention that each layer aims at, 0 for none, with the "
        "plain run's tokens (default: %(default)s)",
    )


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> torch.device:
    """Return the device, which is there, and refuse what it cannot do."""
    device = checked_device(parser, options.device)
    if device.type == "cpu" and options.cache == "offloaded":
        parser.error(
            "argument --cache: offloaded: transformers' offloaded cache needs a GPU; accepted on a "
            "CPU are dynamic, compressed and kvcomp"
        )
    if options.prompt and options.model in RANDOM:
        parser.error(
            f"argument --prompt: the random {options.model} has no tokenizer; accepted is "
            "--prompt-tokens"
        )
    for name in ("keep", "disk"):
        if getattr(options, name) is not None and options.weights != "compressed":
            parser.error(f"argument --{name}: is for --weights compressed, not {options.weights}")
    if isinstance(options.disk, Path) and options.disk.exists():
        parser.error(f"argument --disk: {options.disk} exists; accepted is a new file")
    return device
