"""The pipeline: batches in order, errors that travel, nothing under way once it is closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from graphsage.pipeline import Spent, prepared

CPU = torch.device("cpu")


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_come_in_order(ahead: int) -> None:
    threads = set()

    def start() -> Iterator[int]:
        for number in range(6):
            threads.add(threading.get_ident())
            yield number

    spent = Spent()
    assert list(prepared(start, lambda n: n * 10, ahead, spent, CPU)) == [0, 10, 20, 30, 40, 50]
    # One thread samples, whether ahead or not; generators of random numbers depend on it.
    list(prepared(start, lambda n: n, 1, spent, CPU))
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
    assert spent.sampling > 0
    assert spent.waiting > 0


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_no_more_than_asked_is_prepared_ahead(ahead: int) -> None:
    sampled: list[int] = []

    def start() -> Iterator[int]:
        for number in range(9):
            sampled.append(number)
            yield number

    with closing(prepared(start, int, ahead, Spent(), CPU)) as batches:
        next(batches)
        deadline = time.monotonic() + 10
        while len(sampled) < 1 + ahead and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert sampled == list(range(1 + ahead))


def test_times_are_reported() -> None:
    def fetch(batch: int) -> int:
        time.sleep(0.02)
        return batch

    alone, overlapped = Spent(), Spent()
    for ahead, spent in ((0, alone), (1, overlapped)):
        assert list(prepared(lambda: iter(range(4)), fetch, ahead, spent, CPU)) == [0, 1, 2, 3]
        assert spent.fetching >= 4 * 0.02
    assert alone.waiting >= alone.fetching
    assert overlapped.waiting >= 0.02  # for the first


def test_the_next_is_prepared_while_one_is_used() -> None:
    fetched = [threading.Event() for _ in range(4)]

    def fetch(batch: int) -> int:
        fetched[batch].set()
        return batch

    with closing(prepared(lambda: iter(range(4)), fetch, 1, Spent(), CPU)) as batches:
        for batch in batches:
            assert batch == 3 or fetched[batch + 1].wait(20)  # nobody asks for it
    with closing(prepared(lambda: iter(range(4)), fetch, 0, Spent(), CPU)) as batches:
        for event in fetched:
            event.clear()
        assert next(batches) == 0
        assert not fetched[1].wait(0.02)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("where", ["start", "sampling", "fetching"])
def test_errors_travel_to_the_trainer(ahead: int, where: str) -> None:
    class Broken(Exception):
        pass

    def start() -> Iterator[int]:
        if where == "start":
            raise Broken(where)

        def samples() -> Iterator[int]:
            yield 0
            yield 1
            if where == "sampling":
                raise Broken(where)
            yield 2
            yield 3

        return samples()

    def fetch(batch: int) -> int:
        if where == "fetching" and batch == 2:
            raise Broken(where)
        return batch

    came: list[int] = []
    with pytest.raises(Broken, match=where):
        for batch in prepared(start, fetch, ahead, Spent(), CPU):
            came.append(batch)
    assert came == ([] if where == "start" else [0, 1])
    # The thread goes on to serve others.
    assert list(prepared(lambda: iter([7]), int, ahead, Spent(), CPU)) == [7]


def test_closing_waits_for_what_is_under_way_and_drops_the_rest() -> None:
    under_way: list[Any] = []
    ended: list[Any] = []

    def samples() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            ended.append("sampler")

    def fetch(batch: int) -> int:
        under_way.append(batch)
        time.sleep(0.02)
        ended.append(batch)
        return batch

    with closing(prepared(samples, fetch, 3, Spent(), CPU)) as batches:
        assert next(batches) == 0
    began = list(under_way)
    assert ended[-1] == "sampler"
    assert ended[:-1] == began
    time.sleep(0.05)
    assert under_way == began
    assert len(began) <= 4
