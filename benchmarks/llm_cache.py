"""The K/V cache: on the device, transformers' offloaded one, packed on the host and on the device.

Also with every other layer on the host, and with as many as `offload="auto"` leaves there: what
lies there at the end of a run stands in its row, and its times are with the tokens in which it
measures and moves layers, some 40 of the first ones. Weights are on the device throughout. New
tokens go down to the host in blocks of 64 once they leave the window of 128, so bytes for each
token are only even over several blocks. nvCOMP has no cache for transformers, so it is only in the
part for weights.
"""

from __future__ import annotations

import argparse

from common.report import Steps
from llm_workload import Rows, left_out, line, show, workload
from textgen.generation import Run
from textgen.ways import CacheOptions

from bitslab.kvcache import Offload

#: Name, way, the share of the packed history that is in host memory.
WAYS: tuple[tuple[str, str, Offload], ...] = (
    ("DynamicCache", "dynamic", False),
    ("transformers' offloaded", "offloaded", True),
    ("CompressedCache, host", "compressed", True),
    ("CompressedCache, half on the host", "compressed", 0.5),
    ("CompressedCache, auto", "compressed", "auto"),
    ("CompressedCache, device", "compressed", False),
)


def run(arguments: argparse.Namespace, steps: Steps) -> dict[str, Rows]:
    """Measure generation with each cache."""
    with workload(arguments, steps) as work:
        found: Rows = []
        plain: Run | None = None
        offloaded: float | None = None
        for name, way, host in WAYS:
            if way == "offloaded" and work.device.type == "cpu":
                left_out(name, "it needs a GPU")
                continue
            run = work.measure("device", way, CacheOptions(offload=host))
            plain = plain or run
            row = line(name, run, plain, arguments.batch)
            if way == "offloaded":
                offloaded = run.token_seconds
            elif way == "compressed":
                raw = sum(size.raw_bytes for size in run.cache)
                packed = sum(size.packed_bytes for size in run.cache)
                row["ratio"] = raw / packed if packed else 1.0
                row["packed MB on the host"] = sum(size.host_bytes or 0 for size in run.cache) / 1e6
                if host and offloaded and run.token_seconds:
                    row["times faster than offloaded"] = offloaded / run.token_seconds
            found.append(show(row))
        return {f"K/V cache: {work.title}": found}
