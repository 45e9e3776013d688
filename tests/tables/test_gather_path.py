"""What a gather by id on the CPU goes through: few modules, and inwards only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import PurePath
from types import FrameType
from typing import Any

import pytest
import torch

from bitslab import CompressedTable

KERNELS = ("engine", "kernels", "cpu")
#: Modules of compiled loops, which the profiler sees enter as one call.
COMPILED = {"lookups.py", "gather.py", "item_ranges.py"}
#: In the place of `concurrent.futures`, which is not of the package: tasks of the pool's threads.
TASKS = {"tasks.py"}
ROWS = 4096


def ring_of(parts: tuple[str, ...]) -> int:
    return 1 if parts[0] == "engine" else 2


def core_parts(file: str) -> tuple[str, ...] | None:
    """Return a file's place in the package, or None for files of others."""
    parts = PurePath(file).parts
    for name in ("core", "bitslab"):
        if name in parts[:-1] and "integrations" not in parts:
            inside = parts[len(parts) - parts[::-1].index(name) :]
            if inside[0] in ("engine", "tables"):
                return inside
    return None


def calls_of(work: Callable[[], Any]) -> list[tuple[tuple[str, ...], tuple[str, ...] | None]]:
    """Return the calls of Python functions of the package: the callee, and its caller."""
    calls = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        callee = core_parts(frame.f_code.co_filename)
        if callee is not None:
            back = frame.f_back
            calls.append((callee, None if back is None else core_parts(back.f_code.co_filename)))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


TABLES = {
    "packed": lambda: torch.randn(ROWS, 64).bfloat16(),
    "raw": lambda: torch.randint(-(2**62), 2**62, (ROWS, 8)),
    "narrow rows": lambda: torch.randint(0, 9, (ROWS, 4)),
}


@pytest.mark.parametrize("n_ids", [16, 65536], ids=["few", "many"])
@pytest.mark.parametrize("kind", TABLES)
def test_a_gather_enters_six_modules_and_goes_inwards(kind: str, n_ids: int) -> None:
    table = CompressedTable.from_tensor(TABLES[kind]())
    ids = torch.randint(0, ROWS, (n_ids,))
    table.gather(ids)
    calls = calls_of(lambda: table.gather(ids))
    entered = {callee for callee, _ in calls}
    assert ("tables", "host_table.py") in entered
    assert any(callee[:3] == KERNELS for callee in entered)
    python = {callee for callee in entered if callee[-1] not in COMPILED | TASKS}
    assert len(python) <= 6, sorted(python)
    climbs = [
        (caller, callee)
        for callee, caller in calls
        if caller is not None and ring_of(callee) > ring_of(caller)
    ]
    assert climbs == []
