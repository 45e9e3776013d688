"""Gathers on the threads of torch's OpenMP team, and on others where there is none."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from bitslab.engine.kernels.cpu import prepared
from bitslab.engine.kernels.cpu.prepared import PreparedTable
from bitslab.engine.kernels.cpu.threads import team_of_torch
from tests.engine.kernels.cases import Case, table_of
from tests.engine.kernels.test_fields import case_of

ROWS = 1500


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def some_ids(seed: int, n: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-ROWS, ROWS, n))


@pytest.fixture(scope="module", name="case")
def rows() -> Case:
    return case_of("float32", 64, n_rows=ROWS)


@pytest.fixture(scope="module", name="table")
def prepared_rows(case: Case) -> PreparedTable:
    return PreparedTable(table_of(case, "compact"), case.layout)


@pytest.mark.parametrize("threads", [1, 2, 5], indirect=True)
@pytest.mark.parametrize("with_team", [True, False], ids=["team", "pool"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.usefixtures("threads")
def test_rows_and_words_do_not_depend_on_who_gathers(
    case: Case,
    table: PreparedTable,
    with_team: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not with_team:
        monkeypatch.setattr(prepared, "team_of_torch", lambda: None)
    words = set()
    for n in (0, 1, 300, 9000):
        ids = some_ids(n, n)
        out = torch.empty(n, 256, dtype=torch.uint8)
        bad, read = table.gather(ids.to(dtype), out)
        assert bad == -1
        assert torch.equal(out, case.rows[ids])
        words.add(read)
    assert words == {table.gather(some_ids(n, n), out[:n])[1] for n in (0, 1, 300, 9000)}


def test_torch_that_comes_with_openmp_has_a_team() -> None:
    has_openmp = "OpenMP" in torch.__config__.parallel_info().split("ATen parallel backend:")[1]
    assert (team_of_torch() is not None) == has_openmp


@pytest.mark.parametrize("threads", [4], indirect=True)
@pytest.mark.usefixtures("threads")
def test_first_damaged_row_is_reported_whichever_thread_meets_it(case: Case) -> None:
    storage = table_of(case, "compact")
    assert storage.bases is not None
    storage.bases[[10, 40]] = 2**62
    table = PreparedTable(storage, case.layout)
    ids = torch.zeros(4000, dtype=torch.int64)
    ids[[700, 3500]] = torch.tensor([40 * 32 + 5, 10 * 32 - ROWS])
    out = torch.empty(4000, 256, dtype=torch.uint8)
    assert table.gather(ids, out)[0] == 40 * 32 + 5
    assert table.gather(ids.flip(0), out)[0] == 10 * 32


@pytest.mark.parametrize("threads", [3], indirect=True)
@pytest.mark.usefixtures("threads")
def test_several_threads_gather_at_once(case: Case, table: PreparedTable) -> None:
    wrong = []

    def work(seed: int) -> None:
        ids = some_ids(seed, 2000)
        out = torch.empty(2000, 256, dtype=torch.uint8)
        for _ in range(10):
            out.zero_()
            if table.gather(ids, out)[0] != -1 or not torch.equal(out, case.rows[ids]):
                wrong.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def gather_in_child(table: PreparedTable, ids: torch.Tensor, out: torch.Tensor) -> None:
    assert team_of_torch() is None
    assert table.gather(ids, out)[0] == -1


@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.usefixtures("threads")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_of_a_process_with_a_team_gathers(case: Case, table: PreparedTable) -> None:
    ids = some_ids(0, 3000)
    out = torch.zeros(3000, 256, dtype=torch.uint8)
    assert table.gather(ids, out)[0] == -1
    shared = torch.zeros(3000, 256, dtype=torch.uint8).share_memory_()
    context = multiprocessing.get_context("fork")
    child = context.Process(target=gather_in_child, args=(table, ids, shared))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert torch.equal(shared, case.rows[ids])
