"""Tables of benchmarks/results, as docs/make_pictures.py draws them: no figure is typed twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def rows_of(file: str, heading: str) -> list[dict[str, str]]:
    """Return the rows of the table that follows a line of a results file, by column."""
    lines = (RESULTS / file).read_text().splitlines()
    begins = [i for i, line in enumerate(lines) if heading in line]
    if not begins:
        raise LookupError(f"{file} has no line with {heading!r}")
    rest = iter(lines[begins[0] + 1 :])
    header = next((line for line in rest if line.startswith("|")), None)
    if header is None:
        raise LookupError(f"{file}: no table follows {heading!r}")
    names = _cells(header)
    next(rest)  # the rule below the header
    rows = []
    for line in rest:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(names, _cells(line), strict=True)))
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def number(rows: Sequence[dict[str, str]], column: str, **where: str) -> float | None:
    """Return the number in a column of the one row that has these cells; None where it is empty.

    Names of columns have `_` for a blank.
    """
    keys = {name.replace("_", " "): cell for name, cell in where.items()}
    found = [row for row in rows if all(row[name] == cell for name, cell in keys.items())]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows have {keys}")
    text = found[0][column].replace(",", "").rstrip("%x ")
    return float(text) if text else None
