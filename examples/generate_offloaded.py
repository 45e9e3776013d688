"""Generate text with weights that stream compressed and a compressed K/V cache."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from common.arguments import DTYPES
from common.report import OUTPUT, Steps, make_console, write_json
from textgen.generation import Measured, Run, generate
from textgen.models import (
    RANDOM,
    SIZES,
    Prompt,
    random_prompt,
    write_random_model,
    written_prompt,
)
from textgen.options import check_options, make_parser
from textgen.shown import print_layers, print_runs, print_tokens
from textgen.ways import CacheOptions, WeightOptions, load

import bitslab


class ModelError(Exception):
    """A model cannot be had, or cannot be used with these options."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__ or "")
    options = parser.parse_args(arguments)
    device = check_options(parser, options)
    from transformers.utils import logging  # not for --help: it takes seconds

    # Progress is shown by this script, on one line; warnings of the model are shown too.
    logging.disable_progress_bar()
    try:
        with Steps() as steps, ExitStack() as stack:
            path = model_folder(options, device, steps, stack)
            runs, summary, tokenizer = run_all(path, options, device, steps)
    except (ModelError, bitslab.BitslabError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    show(options, summary, runs, tokenizer)
    return 1 if runs[-1].equal is False and not lossy(options) else 0


def model_folder(
    options: argparse.Namespace, device: torch.device, steps: Steps, stack: ExitStack
) -> str:
    """Return where the model is; one with random weights is made first."""
    if options.model not in RANDOM:
        return str(options.model)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bitslab-llm-")))
    positions = options.prompt_tokens + options.new_tokens + 1
    with steps.step(f"making a random {options.model}, {options.size}"):
        write_random_model(
            options.model,
            SIZES[options.size],
            DTYPES[options.dtype],
            positions,
            options.seed,
            folder,
            device,
        )
    return str(folder)


def run_all(
    path: str, options: argparse.Namespace, device: torch.device, steps: Steps
) -> tuple[list[Run], dict[str, Any], Any]:
    """Generate as the options say, with the plain model first if requested."""
    prompt, tokenizer = make_prompt(path, options)
    ways = [(options.weights, options.cache)]
    if options.plain and ways[0] != ("device", "dynamic"):
        ways.insert(0, ("device", "dynamic"))
    weight_options = WeightOptions(
        options.keep,
        None if options.disk is None else str(options.disk),
        options.depth,
        options.sm_budget,
    )
    cache_options = CacheOptions(
        options.window, options.block_tokens, options.offload, options.error
    )
    runs = []
    for weights, cache in ways:
        run = Run(weights, cache)
        with Measured(run, device):
            with steps.step(f"{run.name}: loading") as report:
                model = loaded(path, run, options, device, weight_options, report)
            # The first time kernels are compiled and loaded: on a GPU again for each length.
            warm_up = options.new_tokens if device.type == "cuda" else min(2, options.new_tokens)
            with steps.step(f"{run.name}: warming up") as report:
                unused = Run(weights, cache)
                generate(unused, model, prompt, warm_up, device, cache_options, report)
            with steps.step(f"{run.name}: generating") as report:
                generate(run, model, prompt, options.new_tokens, device, cache_options, report)
        # So that the next one is measured alone.
        del model
        release(device)
        runs.append(run)
    if len(runs) > 1:
        runs[1].equal = runs[0].tokens == runs[1].tokens
    return runs, facts_of(options, prompt, device), tokenizer


def loaded(
    path: str,
    run: Run,
    options: argparse.Namespace,
    device: torch.device,
    weight_options: WeightOptions,
    report: Any,
) -> Any:
    """Load the model in the way of a run, and write how long that took."""
    begin = time.perf_counter()
    try:
        return load(path, DTYPES[options.dtype], run.weights_way, device, weight_options, report)
    except bitslab.BitslabError:
        raise
    except (OSError, ValueError) as error:
        # transformers raises these for a model that is not there, or is of another kind.
        raise ModelError(f"--model {options.model}: {error}") from error
    finally:
        run.load_seconds = time.perf_counter() - begin


def make_prompt(path: str, options: argparse.Namespace) -> tuple[Prompt, Any]:
    """Return the prompt, and the tokenizer where the model has one."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(path)
        tokenizer = None
        if options.model not in RANDOM and (options.prompt or has_tokenizer(path)):
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"--model {options.model}: {error}") from error
    if options.prompt:
        return written_prompt(tokenizer, options.prompt), tokenizer
    vocabulary = config.get_text_config(decoder=True).vocab_size
    return (
        random_prompt(vocabulary, options.batch, options.prompt_tokens, options.seed),
        tokenizer,
    )


def has_tokenizer(path: str) -> bool:
    """Return whether a folder holds a tokenizer; True for a name on the hub."""
    return not os.path.isdir(path) or any(Path(path).glob("tokenizer*"))


def release(device: torch.device) -> None:
    """Free the memory of the last model."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def facts_of(options: argparse.Namespace, prompt: Prompt, device: torch.device) -> dict[str, Any]:
    """Return the values common to all runs."""
    import transformers

    names = (
        *("model", "size", "dtype", "prompt", "new_tokens", "weights", "keep", "depth"),
        *("sm_budget", "cache", "window", "block_tokens", "offload", "seed"),
    )
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "batch": prompt.ids.shape[0],
        "prompt_tokens": prompt.ids.shape[1],
        "versions": {
            "bitslab": bitslab.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "settings": {
            **{name: getattr(options, name) for name in names},
            "disk": None if options.disk is None else str(options.disk),
        },
    }


def show(
    options: argparse.Namespace, summary: dict[str, Any], runs: list[Run], tokenizer: Any
) -> None:
    """Print and write what the options ask for."""
    if options.json != OUTPUT:
        console = make_console()
        size = f" {options.size}" if options.model in RANDOM else ""
        console.print(
            f"{options.model}{size}, {options.dtype}; {summary['batch']} x "
            f"{summary['prompt_tokens']} tokens, {options.new_tokens} new ones; on "
            f"{summary['device']}"
        )
        print_tokens(console, runs[-1], tokenizer)
        print_runs(console, runs)
        print_layers(console, runs[-1])
        if runs[-1].equal is not None:
            n = sum(map(len, runs[-1].tokens))
            if lossy(options):
                same = common(runs[0].tokens, runs[-1].tokens)
                console.print(f"{same:,} of {n:,} tokens are the plain run's, until lines part")
            else:
                verdict = "equal" if runs[-1].equal else "DIFFERENT FROM"
                console.print(f"{n:,} tokens are {verdict} the plain run's")
    if options.json:
        write_json(options.json, summary, runs)


def lossy(options: argparse.Namespace) -> bool:
    """Return whether the cache changes K and V."""
    return bool(options.cache == "kvcomp" and options.error > 0)


def common(plain: list[list[int]], tokens: list[list[int]]) -> int:
    """Return how many tokens of all lines are the same before the first that differs."""
    found = 0
    for line, other in zip(plain, tokens, strict=True):
        pairs = list(zip(line, other, strict=True))
        found += next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return found


if __name__ == "__main__":
    sys.exit(main())
