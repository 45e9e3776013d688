"""What an exchange costs the host in calls: on a GPU, most of its time where tables are small.

Of functions of the library, and of C functions that it calls, in the caller's thread and in the
helper's. Times on GPUs are in `benchmarks/all_to_all.py`.
"""

from __future__ import annotations

from pathlib import Path

from tests.distributed.ranks import run_ranks

#: By codec and tables: the most calls forward, and back; with 6 to 9 of each task of a helper.
MOST = {
    "raw 1": (106, 77),
    "raw 26": (593, 716),
    "compressed 1": (329, 299),
    "compressed 26": (1130, 1253),
}


def test_calls_of_an_exchange(tmp_path: Path) -> None:
    for seen in run_ranks("calls", 2, tmp_path):
        for name, (forward, back) in MOST.items():
            found = seen[name], seen[f"{name} back"]
            assert 0 < found[0] <= forward and 0 < found[1] <= back, (name, found)
