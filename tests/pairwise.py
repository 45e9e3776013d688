"""Covers of the pairs of a test's parameters, which run in place of all their products.

A test whose parameters do not interact is marked ``pairwise``. Of the product of its parameters it
then runs the cases that hold every value, and every two values of different parameters, at least
once. The seed of hypothesis chooses which cases these are, so that other runs take others, and
``BITSLAB_FULL=1`` (``make test-full``) runs them all. A case that is named on the command line runs
in any case.

A parameter that itself stands for several is taken apart by a function, given under its name. Then
each of its values is in the cover, and each pair of one of its parts and another parameter:

>>> @pytest.mark.pairwise(dtype=lambda dtype: (dtype.itemsize, dtype.is_complex))  # doctest: +SKIP

Of a test that takes long and is marked ``drawn(n)``, n of its cases, or of their cover, run. The
seed chooses them in the same way; they hold as many values of each parameter as n cases can.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

#: Whether all cases of every product run.
FULL = os.environ.get("BITSLAB_FULL") == "1"
#: What chooses the covers of this run; set by `use_seed`.
seed: object = 0

Case = Mapping[str, Hashable]


def cover(
    cases: Sequence[Case],
    seed: object = 0,
    first: Iterable[int] = (),
    alone: Collection[str] = (),
) -> list[int]:
    """Return the positions of cases that hold all values, and all pairs of values, of all cases.

    Parameters
    ----------
    cases : sequence of mapping
        The value of every parameter, case by case; of a product or of a part of one.
    seed : object
        Chooses among cases that add as many pairs; anything with a repr.
    first : iterable of int
        Positions of cases that are in the cover anyway.
    alone : collection of str
        Parameters whose values are covered, but in no pairs.

    Returns
    -------
    list of int
        Rising, the same for the same arguments.
    """
    bit_of: dict[Any, int] = {}
    masks = []
    for case in cases:
        values = sorted(case.items(), key=lambda item: item[0])
        paired = [value for value in values if value[0] not in alone]
        held = [*((value,) for value in values), *combinations(paired, 2)]
        masks.append(sum(1 << bit_of.setdefault(pair, len(bit_of)) for pair in held))
    left = list(range(len(cases)))
    random.Random(repr(seed)).shuffle(left)
    chosen = list(first)
    missing = (1 << len(bit_of)) - 1
    for i in chosen:
        missing &= ~masks[i]
    while missing:
        best = max(left, key=lambda i: (masks[i] & missing).bit_count())
        missing &= ~masks[best]
        chosen.append(best)
        # Those that add nothing now never do again.
        left = [i for i in left if masks[i] & missing]
    return sorted(chosen)


def draw(cases: Sequence[Case], count: int, seed: object = 0) -> list[int]:
    """Return the positions of some cases, with as many of all values as so few can hold.

    Parameters
    ----------
    cases : sequence of mapping
        As for `cover`.
    count : int
        How many are drawn; all of them where there are no more.
    seed : object
        Chooses among them; anything with a repr.

    Returns
    -------
    list of int
        Rising, the same for the same arguments.
    """
    names = {name for case in cases for name in case}
    drawn = cover(cases, seed, alone=names)  # of single values, not of pairs
    generator = random.Random(repr(seed))
    if len(drawn) < count:
        others = sorted(set(range(len(cases))) - set(drawn))
        drawn += generator.sample(others, min(count - len(drawn), len(others)))
    return sorted(generator.sample(drawn, min(count, len(drawn))))


def use_seed(config: pytest.Config) -> None:
    """Let the seed of hypothesis choose the covers of this run, where it is given."""
    global seed
    seed = config.getoption("hypothesis_seed", None) or 0


def keep_covers(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take from `items` the cases of tests marked ``pairwise`` or ``drawn`` that do not run."""
    if FULL:
        return
    dropped: set[pytest.Item] = set()
    for name, cases in _cases_of("pairwise", items):
        taken_apart = next(cases[0].iter_markers("pairwise")).kwargs
        kept = cover([_parameters(case) for case in cases], (seed, name), alone=taken_apart)
        dropped |= set(cases) - {cases[i] for i in kept}
    for name, cases in _cases_of("drawn", [item for item in items if item not in dropped]):
        (count,) = next(cases[0].iter_markers("drawn")).args
        kept = draw([_parameters(case) for case in cases], count, (seed, name))
        dropped |= set(cases) - {cases[i] for i in kept}
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]


def skip_gpu_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip one test marked ``gpu`` of each file, which says so for all of them.

    There are thousands; to skip each and to report it takes ten seconds of the workers.
    """
    reason = "the tests of this file that are marked gpu: torch sees no CUDA GPU on this machine"
    skipped: dict[Path, pytest.Item] = {}
    dropped = []
    for item in items:
        if item.get_closest_marker("gpu"):
            if skipped.setdefault(item.path, item) is not item:
                dropped.append(item)
    for item in skipped.values():
        item.add_marker(pytest.mark.skip(reason=reason))
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        gone = set(dropped)
        items[:] = [item for item in items if item not in gone]


def _cases_of(
    marker: str, items: Iterable[pytest.Item]
) -> Iterable[tuple[str, list[pytest.Function]]]:
    """Return name and cases of each test that has a marker."""
    tests: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker(marker):
            above = item.parent.nodeid if item.parent else ""
            tests.setdefault((above, item.originalname), []).append(item)
    return [(name, cases) for (_, name), cases in tests.items()]


def _parameters(item: pytest.Function) -> dict[str, Hashable]:
    """Return the values of a case's parameters; those that are given together are one.

    A value is known by its address, since not all can be hashed: all cases of a test have the same.
    """
    taken_apart = {k: v for mark in item.iter_markers("pairwise") for k, v in mark.kwargs.items()}
    params = dict(item.callspec.params)
    found: dict[str, Hashable] = {}
    for given in item.iter_markers("parametrize"):
        names = given.args[0] if given.args else given.kwargs["argnames"]
        names = names.split(",") if isinstance(names, str) else list(names)
        values = [params.pop(name.strip()) for name in names]
        if len(names) == 1 and (parts := taken_apart.get(names[0])):
            found |= {f"{names[0]}[{i}]": part for i, part in enumerate(parts(values[0]))}
        found[",".join(names)] = tuple(map(id, values))
    # Those of fixtures and of pytest_generate_tests.
    return found | {name: id(value) for name, value in params.items()}
