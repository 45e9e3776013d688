"""Surveys of edges by the kernel, run on the CPU, are those of the loop."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from bitslab.engine.kernels.cpu.segment_sums import survey_edges
from bitslab.engine.kernels.cuda.survey import MOST_ENTRIES, SurveyKernels
from bitslab.engine.kernels.cuda.typed_gemm import TypedTiles
from bitslab.engine.kernels.edge_survey import EdgeSurvey
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner

CPU = torch.device("cpu")
#: Sources, destinations and kinds.
Sizes = tuple[int, int, int]


def assert_same(found: EdgeSurvey, expected: EdgeSurvey) -> None:
    """Compare all that stands in two surveys."""
    assert found.limits == expected.limits and found.bounds == expected.bounds
    tensors = [
        [getattr(each, name) for name in EdgeSurvey._fields[2:-3]] for each in (found, expected)
    ]
    for these, those in zip(found.pairs, expected.pairs, strict=True):
        assert these.bounds == those.bounds
        tensors[0] += these[:-1]
        tensors[1] += those[:-1]
    for a, b in zip(*tensors, strict=True):
        assert torch.equal(a.cpu(), b)
    if found.tiles is not None:
        spaces = [expected.bounds, *(pairs.bounds for pairs in expected.pairs)]
        for bounds, tiles in zip(spaces, found.tiles, strict=True):
            cut = TypedTiles(bounds, CPU).tiles
            assert torch.equal(TypedTiles(bounds, CPU, tiles=tiles).tiles.cpu(), cut)


def drawn(seed: int, n: int, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ends and kinds of edges."""
    draw = torch.Generator().manual_seed(seed)
    src, dst, kinds = (torch.randint(size, (n,), generator=draw) for size in sizes)
    return torch.stack([src, dst]), kinds


@functools.cache
def kernels() -> SurveyKernels:
    return SurveyKernels(SimtRunner(seed=1))


def assert_surveyed(ends: torch.Tensor, kinds: torch.Tensor, sizes: Sizes) -> None:
    found = kernels().survey_edges(guarded(ends), guarded(kinds), sizes)
    assert found is not None and found.tiles is not None
    assert_same(found, survey_edges(ends, kinds, sizes))


@given(
    st.integers(0, 9),
    st.one_of(st.integers(1, 40), st.integers(1, 1100)),
    st.tuples(st.integers(1, 1500), st.integers(1, 1500), st.integers(1, 300)),
    st.integers(1, 3),
)
@example(0, 1, (1, 1, 1), 1)
@example(1, 1, (9, 3, 40), 1)  # more kinds than edges
@example(2, 33, (300, 200, 1), 1)  # one kind
@example(3, 70, (2, 3, 2), 1)  # many edges of a pair
@example(4, 200, (40, 60, 700), 3)
def test_a_survey_is_that_of_the_loop(seed: int, n: int, sizes: Sizes, copies: int) -> None:
    ends, kinds = drawn(seed, n, sizes)
    assert_surveyed(ends.repeat(1, copies), kinds.repeat(copies), sizes)


@pytest.mark.parametrize(
    ("n", "sizes"),
    [
        (2784, (2255, 1024, 6)),
        (1500, (1, 1, 1)),
        (1100, (7000, 300, 257)),
        (1100, (300, 200, 3000)),  # tiles of more kinds than threads
        (40, (30_000, 2, 9)),
        (30_000, (1500, 1200, 9)),
        (MOST_ENTRIES, (3, 5, 2)),
    ],
    ids=str,
)
def test_a_survey_of_more_edges_than_threads(n: int, sizes: Sizes) -> None:
    assert_surveyed(*drawn(5, n, sizes), sizes)


def test_keys_up_to_the_most_that_fit() -> None:
    most = MOST_ENTRIES
    ends = torch.tensor([[most - 1, 0, most - 1, 5], [0, most - 1, most - 1, most - 1]])
    kinds = torch.tensor([most - 1, 0, most - 1, most - 1])
    assert_surveyed(ends, kinds, (most, most, most))


@given(
    st.integers(1, 80),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([-(1 << 40), -1, 0, 3, 1 << 20, 1 << 40]),
    st.integers(0, 79),
)
@example(40, 0, 7, 20)  # the first number that is too high, of each column
@example(40, 1, 5, 20)
@example(40, 2, 3, 20)
def test_limits_are_those_of_all_columns(n: int, column: int, value: int, at: int) -> None:
    sizes = (7, 5, 3)
    ends, kinds = drawn(n, n, sizes)
    (kinds if column == 2 else ends[column])[at % n] = value
    found = kernels().survey_edges(guarded(ends), guarded(kinds), sizes)
    limits = [int(end) for each in (*ends, kinds) for end in (each.min(), each.max())]
    expected = survey_edges(ends, kinds, sizes)
    assert found is not None and found.limits == expected.limits == limits
    assert found.bounds == expected.bounds
    assert (found.bounds[-1] == 0) == any(
        low < 0 or high >= size
        for low, high, size in zip(limits[::2], limits[1::2], sizes, strict=True)
    )


@pytest.mark.parametrize("which", range(4))
def test_what_does_not_fit_is_not_surveyed(which: int) -> None:
    n_src, n_dst, n_kinds, n = (MOST_ENTRIES + (i == which) for i in range(4))
    ends, kinds = torch.zeros(2, n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
    runner = SimtRunner()
    assert SurveyKernels(runner).survey_edges(ends, kinds, (n_src, n_dst, n_kinds)) is None
    assert not runner.launched


def test_no_edges_are_not_surveyed() -> None:
    runner, none = SimtRunner(), torch.zeros(0, dtype=torch.int64)
    assert SurveyKernels(runner).survey_edges(none.view(2, 0), none, (3, 3, 3)) is None
    assert not runner.launched


def test_a_copy_of_a_survey_is_the_survey() -> None:
    sizes = (20, 30, 4)
    ends, kinds = drawn(0, 50, sizes)
    survey = survey_edges(ends, kinds, sizes)
    copied = survey.cpu()
    assert_same(copied, survey)
