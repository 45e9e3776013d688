"""Write the longest tests of a run as the table in durations.md.

make test ARGS="--durations=200" | tee build/test.log
python tests/durations.py build/test.log "two CPU cores, idle" > tests/durations.md
"""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

LINE = re.compile(r"^([\d.]+)s (call|setup|teardown) +(tests/\S.*)$", re.M)
WORKERS = 2  # of make test
SECONDS = re.compile(r"^=+ .* in ([\d.]+)s.*? =+$", re.M)


def table_of(log: str, machine: str, day: datetime.date) -> str:
    """Return the page for what pytest printed with ``--durations``."""
    found = LINE.findall(log)
    seconds = float(SECONDS.findall(log)[-1])
    of_these = sum(float(s) for s, _, _ in found)
    rows = "\n".join(f"| {s} | {phase} | `{name}` |" for s, phase, name in found)
    return f"""# The longest tests

{day}, {machine}. `make test ARGS="--durations={len(found)}"` took {seconds:.0f} s;
{of_these:.0f} s of the {WORKERS * seconds:.0f} s of its {WORKERS} workers were these {len(found)}.
`tests/durations.py` writes this page again.

| seconds | phase | test |
|---:|---|---|
{rows}
"""


if __name__ == "__main__":
    _, path, machine = sys.argv
    print(table_of(Path(path).read_text(), machine, datetime.date.today()), end="")
