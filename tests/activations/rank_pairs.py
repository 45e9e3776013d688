"""Scripts that two ranks of gloo run, and what they print at last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.forked import run_forked_together


def seen_by_two_ranks(script: str, folder: Path, *, timeout_s: int = 240) -> list[dict[str, Any]]:
    """Return what each rank printed as JSON in its last line.

    Parameters
    ----------
    script : str
        Of Python; it is given the root of the repository, its rank and the folder.
    folder : Path
        Empty; where the ranks meet.
    timeout_s : int
        Seconds until a rank is ended.
    """
    root = str(Path(__file__).resolve().parents[2])
    done = run_forked_together(
        [["-c", script, root, str(rank), str(folder)] for rank in range(2)], timeout_s=timeout_s
    )
    for each in done:
        assert each.returncode == 0, each.stderr
    return [json.loads(each.stdout.splitlines()[-1]) for each in done]
