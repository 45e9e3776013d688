"""Edges surveyed by a real GPU are those of the loop of the CPU."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bitslab.engine.kernels.cpu.segment_sums import survey_edges
from bitslab.engine.kernels.cuda import kernels_on
from bitslab.engine.kernels.edge_survey import EdgeSurvey
from bitslab.relational.graph import HOST_ROWS
from tests.gpu import counted_waits
from tests.simt.test_survey import Sizes, assert_same, drawn

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("n", "sizes"),
    [
        (1, (1, 1, 1)),
        (33, (300, 200, 1)),
        (700, (5, 4, 3)),
        (1024, (1024, 1, 1024)),
        (1025, (1, 1024, 400)),
        (2784, (2255, 1024, 6)),
        (8000, (12_000, 12_000, 30_000)),
        (HOST_ROWS - 2, (1, 1, 9)),
        (30_000, (1500, 1200, 9)),
        (300, (30_000, 2000, HOST_ROWS)),
        (HOST_ROWS, (HOST_ROWS, HOST_ROWS, HOST_ROWS)),
    ],
    ids=str,
)
def test_a_gpu_surveys_what_the_loop_surveys(n: int, sizes: Sizes) -> None:
    kernels = kernels_on(CUDA)
    for seed in range(3):
        ends, kinds = drawn(seed, n, sizes)
        if seed == 1:  # as samplers leave them
            ends[1] = ends[1].sort().values
        if seed == 2:  # many of each
            some = torch.arange(n) % (n // 9 + 1)
            ends, kinds = ends[:, some], kinds[some]
        expected = survey_edges(ends, kinds, sizes)
        given = ends.cuda(), kinds.cuda()
        with counted_waits() as waits:
            found = kernels.survey_edges(*given, sizes)
        assert len(waits) == 1
        assert found is not None and found.block.device.type == "cuda"
        assert_same(found, expected)
        assert_same(found.cpu(), expected)


@pytest.mark.parametrize("value", [-(1 << 40), -1, 5000, 1 << 40])
@pytest.mark.parametrize("column", range(3))
def test_a_gpu_finds_what_is_out_of_range(column: int, value: int) -> None:
    sizes = (4000, 3000, 7)
    ends, kinds = drawn(0, 5000, sizes)
    (kinds if column == 2 else ends[column])[4321] = value
    found = kernels_on(CUDA).survey_edges(ends.cuda(), kinds.cuda(), sizes)
    expected = survey_edges(ends, kinds, sizes)
    assert found is not None and found.limits == expected.limits
    assert found.bounds == expected.bounds


def test_threads_survey_at_once_on_streams_of_their_own() -> None:
    sizes = (2255, 1024, 6)
    given = [drawn(seed, 2784, sizes) for seed in range(4)]
    kernels, together = kernels_on(CUDA), threading.Barrier(len(given))

    def survey(ends: torch.Tensor, kinds: torch.Tensor) -> EdgeSurvey | None:
        with torch.cuda.stream(torch.cuda.Stream()):
            there = ends.cuda(), kinds.cuda()
            together.wait()
            return [kernels.survey_edges(*there, sizes) for _ in range(20)][-1]

    with ThreadPoolExecutor(len(given)) as pool:
        found = list(pool.map(survey, *zip(*given, strict=True)))
    for each, (ends, kinds) in zip(found, given, strict=True):
        assert each is not None
        assert_same(each, survey_edges(ends, kinds, sizes))
