"""Measure the first loads of a small model in a process, packed and plain.

python benchmarks/first_load.py

A process imports transformers and loads a model of 40 MB in bfloat16 (textgen's "small") from the
page cache: twice without bitslab, where weights remain in the mapped file, then with
`BitslabConfig`, which packs them in host memory. What the first of these takes longer is what a
process pays once. Seconds on the clock, and of processors, those of threads that wait for work
included. Kernels are compiled before, by another process, into a cache of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from timing import add_output, print_tables

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from textgen.models import SIZES, write_random_model  # noqa: E402

PLAIN, PACKED = 2, 6  # loads of a process
CODE = f"""
import json, sys, time
import torch, transformers
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from bitslab.integrations.transformers import BitslabConfig
transformers.utils.logging.disable_progress_bar()
times = []
for number in range({PLAIN + PACKED}):
    config = BitslabConfig(progress=False) if number >= {PLAIN} else None
    begin = time.perf_counter(), time.process_time()
    model = AutoModelForCausalLM.from_pretrained(
        sys.argv[1], dtype=torch.bfloat16, quantization_config=config
    )
    times.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    del model
print(json.dumps(times))
"""


def loads(model: Path, caches: Path) -> list[list[float]]:
    """Return seconds, on the clock and of processors, of each load of a process."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(caches)}
    command = [sys.executable, "-c", CODE, str(model)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Run the processes and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=3, help="default: %(default)s")
    add_output(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, caches = Path(folder, "model"), Path(folder, "numba")
        write_random_model("llama", SIZES["small"], torch.bfloat16, 2048, 0, model)
        loads(model, caches)  # compiles
        runs = [loads(model, caches) for _ in range(arguments.processes)]
    rows: list[dict[str, Any]] = []
    for what, numbers in {
        "plain, first": [0],
        "plain, again": range(1, PLAIN),
        "packed, first": [PLAIN],
        "packed, again": range(PLAIN + 1, PLAIN + PACKED),
    }.items():
        clock, processors = (
            statistics.median(run[number][kind] for run in runs for number in numbers)
            for kind in (0, 1)
        )
        rows.append({"load": what, "clock ms": 1e3 * clock, "processor ms": 1e3 * processors})
    print_tables({"Loads of a model of 40 MB in a process": rows}, arguments.json, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
