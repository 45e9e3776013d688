"""The window learns what follows what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitslab.engine.transfer import Window

UNITS = list("abcdefgh")


@given(order=st.permutations(UNITS), depth=st.integers(0, 10))
def test_a_cyclic_order_is_learnt_in_one_pass(order, depth):
    window = Window(UNITS)
    for unit in order:
        window.use(unit)
    for turn in range(20):
        window.use(order[turn % 8])
        coming = [order[(turn + k) % 8] for k in range(1, 8)]
        assert window.expected(depth) == coming[:depth]


@given(drawn=st.lists(st.sampled_from(UNITS), min_size=2, max_size=40))
def test_an_order_in_which_units_come_several_times_is_learnt_in_one_pass(drawn):
    order = [drawn[0]]
    pairs = set()
    for unit in drawn[1:]:
        if unit != order[-1] and (order[-1], unit) not in pairs:
            pairs.add((order[-1], unit))
            order.append(unit)
    if order[0] == order[-1] or (order[-1], order[0]) in pairs:
        return  # around the end a pair would come twice
    window = Window(UNITS)
    for unit in order + order[:2]:
        window.use(unit)
    for turn in range(2, 3 * len(order)):
        assert window.expected(1) == order[turn % len(order) :][:1]
        window.use(order[turn % len(order)])


@given(uses=st.lists(st.sampled_from(UNITS), max_size=40), depth=st.integers(0, 10))
def test_any_order_gives_units_once_and_never_the_last_used(uses, depth):
    window = Window(UNITS)
    assert window.expected(depth) == []
    for unit in uses:
        window.use(unit)
        found = window.expected(depth)
        assert len(set(found)) == len(found) <= depth
        assert unit not in found and set(found) <= set(UNITS)


def test_the_order_given_is_expected_at_first():
    window = Window(UNITS)
    window.use("g")
    assert window.expected(3) == ["h", "a", "b"]


def test_a_unit_used_twice_has_no_successor_of_its_own():
    window = Window("ab")
    for unit in "aab":
        window.use(unit)
    assert window.expected(5) == ["a"]


@pytest.mark.parametrize("units", [[], ["a"]], ids=["none", "one"])
def test_few_units(units):
    window = Window(units)
    for unit in units:
        window.use(unit)
    assert window.expected(3) == []


def test_a_unit_that_is_not_known_has_no_successor():
    window = Window("ab")
    window.use("x")
    assert window.expected(2) == []
    window.use("b")
    assert window.expected(2) == ["a"]
