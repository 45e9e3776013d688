"""Measure what the first use costs on a machine, and what later processes pay.

python benchmarks/first_call.py            # two processes: empty caches, then what the first kept

Each process imports torch and bitslab, compresses a tensor of 10,000 x 1,024 bfloat16 values,
decodes two rows and then all of it, where there is a GPU there too. The caches of Numba and cupy
are in a new folder, so that nothing which is kept on the machine counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from timing import add_output, print_tables

CODE = """
import json, time
marks = [time.perf_counter()]
def mark():
    marks.append(time.perf_counter())
import torch
mark()
import bitslab
mark()
x = torch.randn(10_000, 1024).bfloat16()
if torch.cuda.is_available():
    x = x.cuda()
    torch.cuda.synchronize()
mark()
ct = bitslab.compress(x)
mark()
ct[torch.tensor([7, -1], device=x.device)]
assert torch.equal(ct.decompress(), x)
mark()
device = torch.cuda.get_device_name() if x.is_cuda else "CPU"
print(json.dumps([device, *(b - a for a, b in zip(marks, marks[1:]))]))
"""


def row(which: str, folder: str) -> dict[str, Any]:
    """Run a process; return the seconds of its steps."""
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": f"{folder}/numba",
        "CUPY_CACHE_DIR": f"{folder}/cupy",
        "BITSLAB_CACHE": f"{folder}/bitslab",
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True
    )
    device, torch_s, bitslab_s, _, compress_s, decode_s = json.loads(done.stdout.splitlines()[-1])
    return {
        "process": which,
        "device": device,
        "import torch s": torch_s,
        "import bitslab s": bitslab_s,
        "compress s": compress_s,
        "decode s": decode_s,
    }


def main() -> int:
    """Run both processes and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_output(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(which, folder) for which in ("first", "second")]
    print_tables({"First use of kernels": rows}, arguments.json, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
