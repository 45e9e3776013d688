"""Measure two versions of this library by the same benchmarks, in turns, and compare them.

python benchmarks/before_after.py v0.1.0 . -- "gather.py --only cpu" "embedding.py --only cpu"
python benchmarks/before_after.py ../before . --rounds 3 --out table.md -- "codec.py --only gpu"

Versions are folders of checkouts or commits of this one. Each runs its own scripts of benchmarks/
in processes of their own, the first one changing from round to round: before, after, after,
before. A figure is the best of the rounds. `change` is how much longer the later version takes, or
how much more memory, in percent (of a rate or a ratio: how much lower it is); `noise` is how far
the rounds of one version differ, the larger of both. A row counts as slower where its change is
above --limit and above the noise; equal figures, sizes mostly, are counted only.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timing import add_output, markdown

ROOT = Path(__file__).resolve().parents[1]
RATES = ("/s", "ratio")  # ends of columns where more is better,
SHARE = " of "  # in the name of a column of shares of what a peer does, where more is better too,
COSTS = (" ms", " us", " s", "MB", "bytes", "B/row", "MB/token")  # and where less is
#: Units of columns that name none, by the words of their table's title.
OF_TITLES = {"million a second": " M/s", "microseconds": " us"}

Tables = dict[str, list[dict[str, Any]]]


class Version:
    """A version of the library, with the packages where Python finds them.

    Parameters
    ----------
    what : str
        A folder, or a commit of this checkout.
    folder : Path
        An empty folder for its copies.
    """

    def __init__(self, what: str, folder: Path) -> None:
        self.root = Path(what).resolve()
        if not self.root.is_dir():
            self.root = folder / "checkout"
            self.root.mkdir(parents=True)
            archive = folder / "checkout.tar"
            command = ["git", "archive", "--format=tar", "-o", str(archive), what]
            subprocess.run(command, cwd=ROOT, check=True)
            shutil.unpack_archive(archive, self.root)
        packages = folder / "packages"
        shutil.copytree(self.root / "core", packages / "bitslab")
        shutil.copytree(self.root / "integrations", packages / "bitslab" / "integrations")
        self._environment = {**os.environ, "PYTHONPATH": str(packages)}

    def run(self, command: Sequence[str]) -> Tables:
        """Run one of its benchmarks and return the tables."""
        script = self.root / "benchmarks" / command[0]
        if not script.exists():  # newer than this version
            script = ROOT / "benchmarks" / command[0]
        done = subprocess.run(
            [sys.executable, str(script), *command[1:], "--json"],
            cwd=self.root,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        tables: Tables = json.loads(done.stdout[done.stdout.index("{") :])
        return tables


class Figure:
    """One number of a table, round by round.

    Parameters
    ----------
    row : str
        What is measured.
    column : str
        Its column, with the unit.
    """

    def __init__(self, row: str, column: str) -> None:
        self.row, self.column = row, column
        self.higher_is_better = column.endswith(RATES) or SHARE in column
        self.rounds: dict[str, list[float]] = {"before": [], "after": []}

    def line(self, limit: float) -> dict[str, Any]:
        """Return its line of the table."""
        best = max if self.higher_is_better else min
        before, after = best(self.rounds["before"]), best(self.rounds["after"])
        costs = (before, after) if self.higher_is_better else (after, before)
        change = 100 * (costs[0] / costs[1] - 1) if costs[1] else 0.0
        noise = max(
            100 * (max(values) / min(values) - 1) if min(values) > 0 else 0.0
            for values in self.rounds.values()
        )
        return {
            "row": self.row,
            "figure": self.column,
            "before": before,
            "after": after,
            "change %": round(change, 1),
            "noise %": round(noise, 1),
            "slower": "yes" if change > max(limit, noise) else "",
        }


def places_of(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, int], int]:
    """Return the place of each row by its first column and how many before it have the same."""
    seen: dict[str, int] = {}
    places = {}
    for index, row in enumerate(rows):
        first = str(next(iter(row.values()), ""))
        places[first, seen.setdefault(first, 0)] = index
        seen[first] += 1
    return places


def table_like(title: str, at: int, tables: Tables) -> list[dict[str, Any]]:
    """Return the table of a title, or the one in its place where titles have changed."""
    if title in tables:
        return tables[title]
    others = list(tables.values())
    return others[at] if at < len(others) else []


def figures_of(before: Sequence[Tables], after: Sequence[Tables]) -> dict[str, list[Figure]]:
    """Pair the numbers of all rounds.

    Tables are paired by their titles, rows by what their first column says, in order where several
    say the same, and columns by their names.
    """
    found: dict[str, list[Figure]] = {}
    for at, (title, rows) in enumerate(after[0].items()):
        figures = found.setdefault(title, [])
        unit = next((unit for words, unit in OF_TITLES.items() if words in title), "")
        for key, index in places_of(rows).items():
            row = rows[index]
            names = {k: v for k, v in row.items() if not k.endswith((*RATES, *COSTS))}
            label = ", ".join(str(v) for v in names.values() if not isinstance(v, float))
            for column, value in row.items():
                named, ratio = column, isinstance(value, float) and SHARE in column
                if isinstance(value, float) and unit and not ratio and " / " not in column:
                    named = column.removesuffix(unit) + unit
                if not isinstance(value, (int, float)):
                    continue
                if not ratio and not named.endswith((*RATES, *COSTS)):
                    continue
                figure = Figure(label, named)
                for side, rounds in (("before", before), ("after", after)):
                    for tables in rounds:
                        there = table_like(title, at, tables)
                        place = places_of(there).get(key)
                        number = None if place is None else there[place].get(column)
                        if isinstance(number, (int, float)):
                            figure.rounds[side].append(float(number))
                if all(figure.rounds.values()):
                    figures.append(figure)
    return found


def in_turns(
    versions: dict[str, Version], command: Sequence[str], rounds: int
) -> tuple[list[Tables], list[Tables]]:
    """Run a benchmark of both versions; return the tables of each round."""
    results: dict[str, list[Tables]] = {side: [] for side in versions}
    for turn in range(rounds):
        for side in list(versions)[:: 1 if turn % 2 == 0 else -1]:
            begin = time.perf_counter()
            results[side].append(versions[side].run(command))
            seconds = time.perf_counter() - begin
            print(f"{shlex.join(command)}: {side}, {seconds:.0f} s", file=sys.stderr, flush=True)
    return results["before"], results["after"]


def main() -> int:
    """Run the benchmarks and print one table each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", help="folder of a checkout, or a commit")
    parser.add_argument("after", help="likewise")
    parser.add_argument("benchmarks", nargs="+", help="scripts, each in quotes with its arguments")
    parser.add_argument("--rounds", type=int, default=2, help="of each version (default: 2)")
    parser.add_argument("--limit", type=float, default=3, help="percent (default: 3)")
    add_output(parser)
    arguments = parser.parse_args()
    text, failed = "", False
    tables: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        versions = {
            side: Version(getattr(arguments, side), Path(folder) / side)
            for side in ("before", "after")
        }
        for benchmark in arguments.benchmarks:
            try:
                before, after = in_turns(versions, shlex.split(benchmark), arguments.rounds)
            except subprocess.CalledProcessError as error:
                print(f"{benchmark}: ended with {error.returncode}", file=sys.stderr, flush=True)
                failed = True
                continue
            for title, figures in figures_of(before, after).items():
                everything = [figure.line(arguments.limit) for figure in figures]
                lines = [line for line in everything if line["before"] != line["after"]]
                slower = sum(line["slower"] == "yes" for line in lines)
                changes = [line["change %"] for line in lines]
                middle = statistics.median(changes) if changes else 0.0
                tables[f"{benchmark}: {title}"] = lines
                heading = f"`{benchmark}`: {title}"
                text += markdown(heading, lines) or f"### {heading}\n"
                text += (
                    f"\n{len(everything)} figures, {len(everything) - len(lines)} of them equal, "
                )
                text += (
                    f"{slower} slower or larger; median change of the others {middle:.1f} %.\n\n"
                )
            if arguments.out:  # what is measured is kept, whatever follows
                arguments.out.write_text(text)
    print(json.dumps(tables, indent=1) if arguments.json else text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
