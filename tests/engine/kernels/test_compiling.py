"""Processes that compile at the same time, into one new cache, do not spoil it for each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import sys, torch, bitslab
dtype = getattr(torch, sys.argv[1])
x = (torch.randn(300, 64) * 8).to(dtype)
ct = bitslab.compress(x, "ibp", chunk_bytes=dtype.itemsize)
assert torch.equal(ct.decompress().view(torch.uint8), x.view(torch.uint8))
"""


def test_processes_share_a_new_cache(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for _ in range(2):  # into the new cache, then out of it
        running = [
            subprocess.Popen([sys.executable, "-c", CODE, dtype], env=environment)
            for dtype in ("bfloat16", "float32")
        ]
        assert [process.wait(timeout=300) for process in running] == [0, 0]
