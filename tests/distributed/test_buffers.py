"""Buffers of messages: lent once, kept, bounded, none of them a forked child's."""

from __future__ import annotations

import os
import threading
from typing import Any, cast

import pytest
import torch

from bitslab.distributed.buffers import MOST_AGE, MOST_SPARE, Buffers
from bitslab.distributed.faults import ExchangeError, Faults
from bitslab.distributed.layout import Layout, Rows, sizes_of_tables
from bitslab.distributed.plain import PlainExchange
from bitslab.distributed.stats import Counters

CPU = torch.device("cpu")


def test_a_buffer_that_came_back_is_lent_again() -> None:
    kept = Buffers()
    first, second = kept.take(100_000, CPU), kept.take(100_000, CPU)
    assert len(first) >= 100_000 and first.data_ptr() != second.data_ptr()
    assert kept.nbytes == first.nbytes + second.nbytes and kept.kept_bytes == 0
    kept.give(first)
    assert kept.kept_bytes == first.nbytes and kept.nbytes == first.nbytes + second.nbytes
    assert kept.take(90_000, CPU).data_ptr() == first.data_ptr()
    kept.forget(second)
    assert kept.nbytes == first.nbytes


def test_the_smallest_that_fits_is_lent_and_none_that_is_far_too_large() -> None:
    kept = Buffers()
    sizes = (1 << 20, 1 << 17, 1 << 18)
    taken = [kept.take(n, CPU) for n in sizes]
    kept.give(*taken)
    assert kept.take(1 << 17, CPU).data_ptr() == taken[1].data_ptr()
    assert kept.take((1 << 17) + 1, CPU).data_ptr() == taken[2].data_ptr()
    assert kept.take((1 << 20) // MOST_SPARE - 5000, CPU).data_ptr() != taken[0].data_ptr()
    assert kept.take(1 << 20, CPU).data_ptr() == taken[0].data_ptr()


@pytest.mark.parametrize("most_bytes", [0, 300_000])
def test_what_is_kept_is_bounded(most_bytes: int) -> None:
    kept = Buffers(most_bytes)
    taken = [kept.take(100_000, CPU) for _ in range(5)]
    for data in taken:
        kept.give(data)
        assert kept.kept_bytes <= most_bytes
    assert (kept.kept_bytes > 0) == (most_bytes > 0)


def test_what_nobody_asks_for_goes() -> None:
    kept = Buffers()
    kept.give(kept.take(1 << 24, CPU))
    for _ in range(MOST_AGE + 2):
        kept.give(kept.take(1000, CPU))
    assert kept.nbytes == 4096


@pytest.mark.parametrize("failing", ["take", "cat", "_foreach_copy_"])
def test_buffers_of_a_plain_exchange_that_fails_are_not_counted(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, faults = Buffers(), Faults(lasting=False)
    tables = [Rows(torch.ones(4, n), torch.empty(4, n), [4], [4]) for n in (2, 3)]
    layout = Layout(sizes_of_tables(tables), 0, 1, 0)
    exchange = PlainExchange(
        cast(Any, None), tables, Counters(), faults, buffers=kept, layout=layout
    )
    monkeypatch.setattr(exchange, "_delivered", lambda *args: None)
    left = iter([kept.take] if failing == "take" else [])

    def fail(*args: Any, **options: Any) -> Any:
        for work in left:  # the first buffer is lent
            return work(*args)
        raise MemoryError("none left")

    monkeypatch.setattr(kept if failing == "take" else torch, failing, fail)
    with pytest.raises(MemoryError, match="none left"):
        exchange.run()
    assert kept.nbytes == 0
    # Others may wait in the collective: no later one of this rank is to meet it.
    with pytest.raises(ExchangeError, match="an earlier exchange failed: payload stage: Memory"):
        exchange.run()


def test_what_is_kept_goes_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Buffers()
    kept.give(kept.take(1 << 20, CPU))
    of_torch, short = torch.empty, iter([True])

    def empty(*args: Any, **options: Any) -> Any:
        if next(short, False):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return of_torch(*args, **options)

    monkeypatch.setattr(torch, "empty", empty)
    data = kept.take(1 << 24, CPU)
    assert kept.nbytes == data.nbytes >= 1 << 24 and kept.kept_bytes == 0
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty_of_none())
    with pytest.raises(MemoryError, match="none at all"):
        kept.take(1 << 26, CPU)


def empty_of_none() -> None:
    raise MemoryError("none at all")


def test_threads_never_have_the_same_buffer() -> None:
    kept = Buffers()
    wrong = []

    def work(number: int) -> None:
        for _ in range(200):
            data = kept.take(5000, CPU)
            data.fill_(number)
            if not bool((data == number).all()):
                wrong.append(number)
            kept.give(data)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and kept.nbytes == kept.kept_bytes


def test_a_forked_child_begins_with_none() -> None:
    kept = Buffers()
    data = kept.take(5000, CPU)
    kept.give(kept.take(50_000, CPU))
    with kept._lock:  # as a thread of the parent might have it
        child = os.fork()
        if child == 0:
            found = kept.take(5000, CPU)
            os._exit(int(not (kept.nbytes == found.nbytes and kept.kept_bytes == 0)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert kept.nbytes > data.nbytes
