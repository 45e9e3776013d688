"""What rounding took from rows' gradients is kept by id, where gradients are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies

from bitslab.distributed.feedback import ErrorFeedback
from tests.gpu import waiting_raises

MOST = 5


class Reference:
    """The same in plain Python."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[int, list[float]]] = {}
        self._time = 0

    def added(self, ids: list[int]) -> list[float]:
        seen, found = set[int](), []
        for i in ids:
            first = i not in seen and i in self.kept
            found.append(self.kept[i][1][0] if first else 0.0)
            seen.add(i)
        return found

    def keep(self, lost: list[float], ids: list[int]) -> None:
        self._time += 1
        sums: dict[int, float] = {}
        for i, value in zip(ids, lost, strict=True):
            if i >= 0:
                sums[i] = sums.get(i, 0.0) + value
        new = sorted(i for i in sums if i not in self.kept)
        for i in sums.keys() & self.kept.keys():
            self.kept[i] = self._time, [sums[i]]
        for i in new:
            if len(self.kept) == MOST:
                by_age = sorted(self.kept, key=lambda n: (self.kept[n][0], -n))
                if self.kept[by_age[0]][0] == self._time:
                    break
                del self.kept[by_age[0]]
            self.kept[i] = self._time, [sums[i]]


def check(steps: list[list[int]], device: str) -> None:
    found, expected = ErrorFeedback(MOST, 1), Reference()
    for number, ids in enumerate(steps):
        if number % 4 == 3:
            again = ErrorFeedback(MOST, 1)
            again.load_state_dict(found.state_dict())
            found = again
        lost = [float(1 << n) for n in range(len(ids))]
        met = found.met(torch.tensor(ids, device=device))
        zeros = torch.zeros(len(ids), 1, device=device)
        assert found.add_to(zeros, met).flatten().tolist() == expected.added(ids)
        found.keep(torch.tensor(lost, device=device)[:, None], met)
        expected.keep(lost, ids)
        assert len(found) == len(expected.kept)
        assert found.state_dict()["ids"].tolist() == sorted(expected.kept)
    assert 0 < found.nbytes <= MOST * (4 + 16)


IDS = strategies.lists(strategies.integers(-2, 9), min_size=1, max_size=9)


@given(steps=strategies.lists(IDS, min_size=1, max_size=8))
def test_rows_that_were_met_last_are_kept(steps: list[list[int]]) -> None:
    check(steps, "cpu")


def test_what_no_row_lost_is_as_it_was() -> None:
    kept = ErrorFeedback(4, 2)
    rows = torch.tensor([[-0.0, float("nan")], [1.0, -0.0]])
    found = kept.add_to(rows, kept.met(torch.tensor([3, 3])))
    assert torch.equal(found.view(torch.int32), rows.view(torch.int32))


@pytest.mark.gpu
def test_the_host_waits_for_nothing_and_finds_the_same_on_a_gpu() -> None:
    check([[1, 1, 2], [3, -1, 4], [5, 6, 7, 8], [1, 2, 5], [9, 9, 9]], "cuda")
    found = {}
    for device in ("cpu", "cuda"):
        kept = ErrorFeedback(1 << 12, 8)
        with waiting_raises():
            for step in range(6):
                ids = torch.arange(100 * step, 100 * step + 300, device=device)
                met = kept.met(ids)
                rows = kept.add_to(torch.ones(300, 8, device=device), met)
                kept.keep(rows, met)
        assert len(kept) == 800
        found[device] = rows.cpu()
    assert torch.equal(found["cpu"], found["cuda"]) and len(found["cpu"].unique()) == 3


@pytest.mark.gpu
def test_what_is_kept_is_counted_whatever_torchs_default_device() -> None:
    kept = ErrorFeedback(8, 4)
    with torch.device("cuda"):
        ids = torch.tensor([3, 5, 3])
        for _ in range(2):
            met = kept.met(ids)
            kept.keep(kept.add_to(torch.ones(3, 4), met), met)
    assert len(kept) == 2


@pytest.mark.gpu
def test_slots_are_used_on_another_stream_behind_the_one_before() -> None:
    kept = ErrorFeedback(64, 4)
    ids = torch.arange(64, device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(400_000_000)
        kept.keep(torch.ones(64, 4, device="cuda"), kept.met(ids))
    with torch.cuda.stream(second):
        found = kept.add_to(torch.ones(64, 4, device="cuda"), kept.met(ids))
    second.synchronize()
    assert bool((found == 2).all())
