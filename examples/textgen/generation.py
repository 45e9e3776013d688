"""Generating with one way of keeping weights and cache: the tokens, the times, the bytes moved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from common.memory import MemoryPeak
from common.report import Report

from .measure import Clock
from .models import Prompt
from .ways import (
    CacheOptions,
    Size,
    Traffic,
    cache_sizes,
    known_traffic,
    make_cache,
    traffic,
    weight_sizes,
)


@dataclass
class Run:
    """Results of one way to keep weights and cache; times in seconds, memory in bytes.

    Attributes
    ----------
    tokens : list of list of int
        The new tokens of each line.
    up, down : Traffic
        Bytes to the device, and to the host, for each token after the first.
    host_bytes, mapped_bytes, device_bytes : int
        At the peak; on the host, and mapped from files there, beyond what the process had before
        the model was loaded.
    weights, cache : list of Size
        Each layer's; empty where nothing is packed.
    """

    weights_way: str
    cache_way: str
    load_seconds: float = 0.0
    tokens: list[list[int]] = field(default_factory=list)
    prefill_seconds: float = 0.0
    token_seconds: float | None = None
    up: Traffic = field(default_factory=lambda: Traffic())
    down: Traffic = field(default_factory=lambda: Traffic())
    host_bytes: int = 0
    mapped_bytes: int = 0
    device_bytes: int = 0
    weights: list[Size] = field(default_factory=list)
    cache: list[Size] = field(default_factory=list)
    equal: bool | None = None

    @property
    def name(self) -> str:
        return f"{self.weights_way} weights, {self.cache_way} cache"

    def as_dict(self) -> dict[str, Any]:
        n_tokens = sum(map(len, self.tokens))
        return {
            "weights": self.weights_way,
            "cache": self.cache_way,
            "load_seconds": self.load_seconds,
            "tokens": self.tokens,
            "new_tokens": n_tokens,
            "tokens_equal_plain": self.equal,
            "prefill_seconds": self.prefill_seconds,
            "token_seconds": self.token_seconds,
            "up_bytes_per_token": self.up.as_dict(),
            "down_bytes_per_token": self.down.as_dict(),
            "peak_host_bytes": self.host_bytes,
            "peak_mapped_bytes": self.mapped_bytes,
            "peak_device_bytes": self.device_bytes,
            "weight_units": [size.as_dict() for size in self.weights],
            "cache_layers": [size.as_dict() for size in self.cache],
        }


def generate(
    run: Run,
    model: Any,
    prompt: Prompt,
    new_tokens: int,
    device: torch.device,
    options: CacheOptions,
    report: Report | None = None,
) -> None:
    """Generate greedily and write what it took to `run`.

    Parameters
    ----------
    run : Run
        Names the ways; everything but its memory and its load time is written.
    model : PreTrainedModel
        Loaded in the way of the run.
    prompt : Prompt
        On any device.
    new_tokens : int
        To generate for each line.
    device : torch.device
        Where the model computes.
    options : CacheOptions
        For a compressed cache.
    report : callable, optional
        Called with the tokens that are there, and `new_tokens`.
    """
    cache = make_cache(run.cache_way, model, device, options)
    prompt = prompt.to(device)

    marks: list[tuple[Traffic, Traffic]] = []

    def on_token(n: int) -> None:
        # After the prompt's pass, so that what moved since is that of single tokens.
        if n == 1:
            marks.append(traffic(run.weights_way, model, cache))
        if report:
            report(n, new_tokens)

    clock = Clock(on_token)
    with torch.no_grad():
        found = model.generate(
            input_ids=prompt.ids,
            attention_mask=prompt.mask,
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            streamer=clock,
        )
    run.tokens = found[:, prompt.ids.shape[1] :].tolist()
    run.prefill_seconds, run.token_seconds = clock.prefill_seconds, clock.token_seconds
    passes = len(clock.times) - 2
    if passes > 0:
        before, after = marks[0], traffic(run.weights_way, model, cache)
        up, down = known_traffic(run.weights_way, model, run.cache_way, cache)
        run.up = (after[0] - before[0]) / passes + up
        run.down = (after[1] - before[1]) / passes + down
    run.weights = weight_sizes(model)
    run.cache = cache_sizes(cache)


class Measured(MemoryPeak):
    """Measures memory while a run loads its model and generates, and writes it to the run.

    Parameters
    ----------
    run : Run
        The run.
    device : torch.device
        Whose memory counts as device memory.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        super().__init__(device)
        self._run = run

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._run.host_bytes, self._run.mapped_bytes = self.host_bytes, self.mapped_bytes
        self._run.device_bytes = self.device_bytes
