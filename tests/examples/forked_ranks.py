"""Ranks of an example as torchrun starts them, in forks of a process that has its packages."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.forked import IMPORTS, run_forked_together

CODE = """
import os, runpy, sys
os.environ["RANK"] = os.environ["LOCAL_RANK"] = sys.argv.pop(1)
path = sys.argv[0] = sys.argv.pop(1)
sys.path.insert(0, os.path.dirname(path))
runpy.run_path(path, run_name="__main__")
"""


def run_ranks_of(
    script: Path, options: Sequence[str | Path], *, ranks: int = 2, imports: Sequence[str] = IMPORTS
) -> list[subprocess.CompletedProcess[str]]:
    """Run a script on some ranks and return how each ended."""
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return run_forked_together(
        [["-c", CODE, str(rank), script, *options] for rank in range(ranks)],
        imports=imports,
        env={**os.environ, **store, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"},
    )


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
