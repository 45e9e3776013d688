"""Covers of pairs hold every pair, in few cases, and stand for the product of marked tests."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import pairwise
from tests.pairwise import cover, draw

pytest_plugins = ["pytester"]


def product_of(sizes: list[int]) -> list[dict[str, int]]:
    names = [f"p{number}" for number in range(len(sizes))]
    return [dict(zip(names, each, strict=True)) for each in product(*map(range, sizes))]


def pairs_in(cases: list[dict[str, Any]]) -> set[Any]:
    return {pair for case in cases for n in (1, 2) for pair in combinations(case.items(), n)}


@given(sizes=st.lists(st.integers(1, 5), max_size=4), data=st.data())
def test_every_pair_of_a_product_or_of_a_part_of_one_is_covered(
    sizes: list[int], data: st.DataObject
) -> None:
    cases = [case for case in product_of(sizes) if data.draw(st.booleans())]
    first = {i for i in range(len(cases)) if data.draw(st.integers(0, 9)) == 0}
    chosen = cover(cases, data.draw(st.integers(0, 9)), first)
    assert chosen == sorted(set(chosen))
    assert first <= set(chosen)
    assert pairs_in([cases[i] for i in chosen]) == pairs_in(cases)


@pytest.mark.parametrize(
    ("sizes", "at_most"), [([10, 6], 60), ([9, 5, 2, 2], 60), ([4, 3, 2, 2, 4, 2], 24), ([13], 13)]
)
def test_covers_are_small(sizes: list[int], at_most: int) -> None:
    assert len(cover(product_of(sizes))) <= at_most


def test_a_seed_always_gives_the_same_cover_and_others_give_others() -> None:
    cases = product_of([5, 4, 3, 2])
    assert cover(cases, 1) == cover(cases, 1)
    taken = [cover(cases, seed) for seed in range(40)]
    assert len(set(map(tuple, taken))) > 30
    assert {i for chosen in taken for i in chosen} == set(range(len(cases)))


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_drawn_cases_hold_as_many_values_as_they_can(sizes: list[int], data: st.DataObject) -> None:
    cases = product_of(sizes)
    count, seed = data.draw(st.integers(1, len(cases) + 2)), data.draw(st.integers(0, 9))
    drawn = draw(cases, count, seed)
    assert drawn == sorted(set(drawn)) == draw(cases, count, seed)
    assert len(drawn) == min(count, len(cases))
    every = {value for case in cases for value in case.items()}
    if count >= sum(sizes):  # each case of a cover of single values adds one
        assert {value for i in drawn for value in cases[i].items()} == every


def test_every_case_is_drawn_by_some_seed() -> None:
    cases = product_of([4, 3])
    assert {i for seed in range(60) for i in draw(cases, 4, seed)} == set(range(12))


MARKED = """
import pytest

@pytest.mark.pairwise(a=lambda a: (a // 4, a // 2 % 2, a % 2))
@pytest.mark.parametrize("a", range(8))
@pytest.mark.parametrize(("b", "c"), [("x", 1), ("y", 2)])
def test_marked(a, b, c): pass

@pytest.mark.parametrize("a", range(8))
@pytest.mark.parametrize("b", range(2))
def test_not_marked(a, b): pass

@pytest.mark.drawn(3)
@pytest.mark.parametrize("a", range(8))
def test_drawn(a): pass

@pytest.mark.drawn(4)
@pytest.mark.pairwise
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", "xyz")
def test_both(a, b): pass
"""
CONFTEST = """
from tests.pairwise import keep_covers

def pytest_configure(config):
    config.addinivalue_line("markers", "pairwise: of the product of parameters, a cover of pairs")
    config.addinivalue_line("markers", "drawn(n): n of the cases")

def pytest_collection_modifyitems(config, items):
    keep_covers(config, items)
"""


@pytest.mark.parametrize("full", [False, True], ids=["cover", "full"])
def test_tests_that_are_marked_run_a_cover(
    full: bool, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairwise, "FULL", full)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(MARKED)
    ran = pytester.inline_run("-p", "no:cacheprovider", "--hypothesis-seed=5")
    passed = [report.nodeid.split("::")[1] for report in ran.listoutcomes()[0]]
    assert sum(name.startswith("test_not_marked") for name in passed) == 16
    drawn = {name for name in passed if name.startswith("test_drawn")}
    assert len(drawn) == (8 if full else 3)
    both = [name[len("test_both[") : -1] for name in passed if name.startswith("test_both")]
    assert len(both) == (12 if full else 4)
    assert {name[0] for name in both} == set("xyz") and {name[-1] for name in both} == set("0123")
    marked = [name for name in passed if name.startswith("test_marked")]
    if full:
        assert len(marked) == 16
        return
    assert 8 <= len(marked) <= 10
    cases = [name[len("test_marked[") : -1].split("-") for name in marked]  # "x-1-6"
    parts = [
        {"b": b, "a0": int(a) // 4, "a1": int(a) // 2 % 2, "a2": int(a) % 2} for b, _, a in cases
    ]
    assert len(pairs_in(parts)) == 8 + 24  # four parameters of two values, and six pairs of them
    assert {a for _, _, a in cases} == set("01234567")


def test_a_case_that_is_named_always_runs(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    file = pytester.makepyfile(MARKED)
    for a in range(8):
        ran = pytester.inline_run(
            f"{file}::test_marked[x-1-{a}]", "-p", "no:cacheprovider", plugins=[]
        )
        ran.assertoutcome(passed=1)


def test_without_a_gpu_one_test_of_each_file_says_that_its_gpu_tests_are_skipped(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest("""
from tests.pairwise import skip_gpu_tests

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU")

def pytest_collection_modifyitems(config, items):
    skip_gpu_tests(config, items)
""")
    code = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("a", range(4))
def test_gpu(a): raise AssertionError("ran")

def test_cpu(): pass
"""
    pytester.makepyfile(test_one=code, test_other=code)
    ran = pytester.inline_run("-p", "no:cacheprovider")
    passed, skipped, failed = ran.listoutcomes()
    assert [report.nodeid for report in passed] == [
        f"test_{name}.py::test_cpu" for name in ("one", "other")
    ]
    assert [report.nodeid for report in skipped] == [
        f"test_{name}.py::test_gpu[0]" for name in ("one", "other")
    ]
    assert not failed
