"""A model of random weights, prompts, and a loop, for the two parts that generate."""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from common.arguments import DTYPES
from common.report import Steps
from textgen.generation import Measured, Run, generate
from textgen.models import SIZES, Prompt, random_prompt, write_random_model
from textgen.ways import CacheOptions, WeightOptions, load

Row = dict[str, Any]
Rows = list[Row]
#: The ways of WEIGHTS and CACHES that copy everything for each token, and with what they warm up:
#: they compile nothing and learn nothing.
SLOW = frozenset({"offload", "offloaded"})
SLOW_WARM_UP_TOKENS = 3


class Workload:
    """The model and the prompts that all ways generate with.

    Parameters
    ----------
    arguments : argparse.Namespace
        Arguments of llm.py.
    folder : Path
        Where the model is written.
    steps : Steps
        Shows progress on a terminal.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path, steps: Steps) -> None:
        self.arguments = arguments
        self.device: torch.device = arguments.device
        self.dtype = DTYPES[arguments.dtype]
        self.folder = str(folder)
        self.steps = steps
        shape = SIZES[arguments.size]
        self.shape = replace(
            shape,
            layers=arguments.layers or shape.layers,
            kv_heads=arguments.kv_heads or shape.kv_heads,
        )
        positions = arguments.prompt_tokens + arguments.new_tokens + 1
        with steps.step(f"making a random {arguments.model}, {arguments.size}"):
            write_random_model(
                arguments.model, self.shape, self.dtype, positions, 0, folder, self.device
            )
        self._expected: dict[int, list[list[int]]] = {}

    @property
    def title(self) -> str:
        a = self.arguments
        where = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return (
            f"{a.model} {a.size} ({self.shape.layers} layers, {self.shape.kv_heads} K/V heads), "
            f"{a.dtype}, {a.batch} x {a.prompt_tokens} tokens, {a.new_tokens} new ones, on {where}"
        )

    def prompt(self, i: int) -> Prompt:
        """Return the prompts of a repetition, which differ between repetitions."""
        a = self.arguments
        return random_prompt(self.shape.vocabulary, a.batch, a.prompt_tokens, 1000 + i)

    def measure(
        self,
        weights: str,
        cache: str,
        cache_options: CacheOptions | None = None,
        then: Callable[[Any], None] | None = None,
    ) -> Run:
        """Generate in one way, repetition after repetition; times are medians of these.

        `then` is called with the loaded model afterwards; its memory is not counted.
        """
        runs: list[Run] = []
        whole = Run(weights, cache)
        repetitions = self.arguments.repetitions
        with Measured(whole, self.device):
            begin = time.perf_counter()
            with self.steps.step(f"{whole.name}: loading") as report:
                model = load(self.folder, self.dtype, weights, self.device, WeightOptions(), report)
            whole.load_seconds = time.perf_counter() - begin
            for i in range(repetitions + 1):
                run = Run(weights, cache)
                options = cache_options or CacheOptions()
                new_tokens = self._new_tokens(run, i)
                label = f"repetition {i} of {repetitions}" if i else "warming up"
                with self.steps.step(f"{run.name}: {label}") as report:
                    generate(run, model, self.prompt(i), new_tokens, self.device, options, report)
                self._compare(run, i)
                runs.append(run)
        if then:
            then(model)
        del model
        self.free()
        # The first one compiles kernels and learns the order of layers.
        timed = runs[1:]
        return replace(
            timed[-1],
            equal=all(run.equal for run in runs),
            prefill_seconds=statistics.median(run.prefill_seconds for run in timed),
            token_seconds=statistics.median(run.token_seconds or 0 for run in timed),
            load_seconds=whole.load_seconds,
            host_bytes=whole.host_bytes,
            mapped_bytes=whole.mapped_bytes,
            device_bytes=whole.device_bytes,
        )

    def free(self) -> None:
        """Free the memory of a model that has no references left."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _new_tokens(self, run: Run, i: int) -> int:
        """Return the tokens to generate in a repetition; repetition 0 warms up."""
        if not SLOW & {run.weights_way, run.cache_way}:
            return int(self.arguments.new_tokens)
        return int(self.arguments.slow_tokens) if i else SLOW_WARM_UP_TOKENS

    def _compare(self, run: Run, i: int) -> None:
        """Compare with the plain run, which comes first; stop where a way of bitslab differs.

        A run of fewer tokens is compared with as many.
        """
        expected = self._expected.setdefault(i, run.tokens)
        run.equal = run.tokens == [line[: len(run.tokens[0])] for line in expected]
        ours = {"compressed", "packed"} & {run.weights_way, run.cache_way}
        if not run.equal and ours:
            raise SystemExit(f"{run.name}: tokens differ from the plain run's")


@contextlib.contextmanager
def workload(arguments: argparse.Namespace, steps: Steps) -> Iterator[Workload]:
    """Make the model in a folder that is removed afterwards."""
    transformers.utils.logging.disable_progress_bar()
    # cuDNN's attention makes a plan for each new length, so that each token would wait for one.
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with tempfile.TemporaryDirectory(prefix="bitslab-llm-") as folder:
            yield Workload(arguments, Path(folder), steps)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


def line(name: str, run: Run, plain: Run, batch: int) -> Row:
    """Return a row of a table."""
    token = run.token_seconds or float("nan")
    return {
        "way": name,
        "new tokens": len(run.tokens[0]),
        "load s": run.load_seconds,
        "prefill ms": 1e3 * run.prefill_seconds,
        "token ms": 1e3 * token,
        "tokens/s": batch / token,
        "times plain": token / (plain.token_seconds or float("nan")),
        "up MB/token": (run.up.weights + run.up.cache) / 1e6,
        "down MB/token": run.down.cache / 1e6,
        "tokens": "equal" if run.equal else "DIFFER",
        "host peak MB": run.host_bytes / 1e6,
        "device peak MB": run.device_bytes / 1e6,
    }


@torch.no_grad()
def pass_seconds(work: Workload, model: Any) -> float:
    """Return the median time of a pass of one token, a new one for each pass."""
    times = []
    for i in range(2 + 3 * work.arguments.repetitions):
        ids = torch.randint(work.shape.vocabulary, (1, 1), device=work.device)
        wait(work.device)
        begin = time.perf_counter()
        model(input_ids=ids, use_cache=False)
        wait(work.device)
        if i >= 2:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def show(row: Row) -> Row:
    """Print a row at once, since the tables come last; return it."""
    numbers = (f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float))
    print(f"{row['way']}:", ", ".join(numbers), file=sys.stderr)
    return row


def left_out(name: str, reason: object) -> None:
    print(f"left out: {name}: {reason}", file=sys.stderr)
