"""Setup of the tests of DGL: its backend, and known warnings of DGL itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before DGL is first imported: without it, it looks for a file in the home folder and writes one.
os.environ.setdefault("DGLBACKEND", "pytorch")

IGNORED = [
    # DGL 1.1.3 itself: loaders on a CPU, METIS, and NumPy 2 under what it calls.
    "ignore:Dataloader CPU affinity opt is not enabled",
    "ignore:unclosed file.*proc/self/status:ResourceWarning",
    "ignore:__array_wrap__ must accept context:DeprecationWarning",
    # torch, when a loader forks a worker while threads are running, as they do after a test that
    # made one.
    "ignore:.*multi-threaded, use of fork:DeprecationWarning",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for text in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(text))
