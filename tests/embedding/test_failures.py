"""What fails midway leaves cached rows as they were: errors, interruptions, forks, threads."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import pickle
import random
import sys
import threading

import pytest
import torch

import bitslab.embedding
from bitslab import BitslabError, CompressedTable
from bitslab.embedding.prefetch import Prefetched
from bitslab.engine.tasks import ThreadTask
from tests import pairwise
from tests.embedding.on_device import on_simulated_gpu
from tests.embedding.support import Pair, check_map
from tests.helpers import same_bits

FOLDER = os.path.dirname(bitslab.embedding.__file__)
#: All the work below runs more lines than these.
FIRST_LINES = 13


class Interruption(BaseException):
    """As KeyboardInterrupt is, at a place of our choice."""


@contextlib.contextmanager
def interrupted_at(number: int, reached: list[bool]):
    """Raise at the n-th line of bitslab.embedding that runs inside."""
    lines = 0

    def trace(frame, event, arg):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            lines += 1
            if lines == number:
                reached.append(True)
                raise Interruption
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    except Interruption:
        pass
    finally:
        sys.settrace(before)
        # Between two lines CPython itself may leave a `with` block without its end.
        torch.set_grad_enabled(True)


def trained(optimizer: str = "adagrad", **options) -> Pair:
    """Return rows in the middle of training, the parameter larger than between steps."""
    pair = Pair(30, 6, optimizer=optimizer, **options)
    pair.train((1, 2, 3, 4), (7, 8, 9), (1, 20, 21), range(10, 22))
    return pair


WORK = {
    "exchange": lambda pair: pair.rows.lookup(torch.tensor([1, 15, 16]), train=True),
    "bypass": lambda pair: pair.rows.lookup(torch.arange(3, 17), train=True),
    "inference": lambda pair: pair.rows.lookup(torch.tensor([1, 28]), train=False),
    "flush": lambda pair: pair.rows.flush(evict=True),
    "warm-up": lambda pair: pair.rows.warm_up(torch.arange(30)),
    "prefetch": lambda pair: pair.rows.prefetch(torch.arange(20)),
}


def interrupt_at_every(step: int, work: str, **options):
    """Interrupt some work at every so many-th line; each time training goes on as ever.

    The seed chooses the first of these lines, so that other runs take others.
    """
    first = 1 + random.Random(repr((pairwise.seed, work, sorted(options)))).randrange(FIRST_LINES)
    number, reached = first, [True]
    while reached:
        reached.clear()
        pair = trained(**options)
        with interrupted_at(number, reached):
            WORK[work](pair)
        assert same_bits(pair.plain, pair.rows.whole())
        pair.train((1, 15, 16), (7, 8), range(10, 20), (20, 25))
        pair.check()
        number += step
    assert number > first + step, "nothing was interrupted"


# Each line would take long.
@pytest.mark.drawn(6)
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("options", [{}, {"cache": "packed"}], ids=["rows", "packed"])
def test_an_interruption_at_any_line_loses_nothing(work, options):
    interrupt_at_every(13 if pairwise.FULL else 31, work, **options)


@pytest.mark.parametrize("work", ["exchange", "inference", "flush", "warm-up"])
def test_an_interruption_at_any_line_loses_nothing_that_a_gpu_has_fetched(work):
    with on_simulated_gpu(twins=True):
        interrupt_at_every(17 if pairwise.FULL else 31, work, exact=True)


@pytest.mark.parametrize("method", ["update", "gather"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adagrad-sparse"])
def test_a_table_that_fails_changes_nothing(monkeypatch, method, optimizer):
    pair = trained(optimizer)
    pair.train((1, 2, 3, 4, 5))

    def fails(*args, **options):
        raise MemoryError

    for ids in ((7, 8, 9), range(20)):
        before = pair.rows.whole()
        with monkeypatch.context() as patch:
            patch.setattr(CompressedTable, method, fails)
            with contextlib.suppress(MemoryError):
                pair.rows.lookup(torch.tensor(list(ids)), train=True)
        assert same_bits(pair.rows.whole(), before)
        check_map(pair.rows)
    pair.train((7, 8, 9), range(20), (1, 2))
    pair.check()


def test_a_step_that_fails_can_be_taken_again(monkeypatch):
    pair = trained()
    pair.backward(range(12))
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.Adagrad, "_init_group", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pair.optimizers[1].step()
    pair.step()
    pair.check()


def test_a_prefetch_that_fails_is_no_error(monkeypatch):
    pair = trained()
    with monkeypatch.context() as patch:
        patch.setattr(CompressedTable, "gather", lambda *args: 1 / 0)
        pair.rows.prefetch(torch.tensor([25, 26]))
        prefetched = pair.rows.row_store.prefetched
        assert isinstance(prefetched, Prefetched)
        assert isinstance(prefetched._rows, ThreadTask)
        assert isinstance(prefetched._rows.exception(), ZeroDivisionError)
    pair.train((25, 26, 27), (1, 2, 3, 4, 5, 6), (25, 26))
    pair.check()


def test_results_do_not_depend_on_what_was_prefetched():
    pair = trained("adagrad-sparse")
    for n in range(30):
        pair.rows.prefetch(torch.tensor([n % 30, (5 * n) % 30, 29, 29]))
        pair.train(((7 * n) % 30, n % 30), [(i + n) % 30 for i in range(9)])
        pair.rows.prefetch(torch.arange(n % 20))
    weight = torch.randn(5, 4)
    pair.rows.prefetch(torch.arange(10))
    pair.plain.data[3:8] = weight
    pair.rows.load(weight, 3)
    pair.evict()
    pair.check()


def child(rows, queue):
    weight, index = rows.lookup(torch.tensor([25, 26]), train=False)
    queue.put(weight[index].detach().numpy())


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_waits_for_no_thread_of_its_parent(monkeypatch):
    pair = trained()
    pair.train((1, 2, 3))  # what did not fit is in the table by now
    go = threading.Event()
    gather = CompressedTable.gather

    def slow(*args):
        go.wait()
        return gather(*args)

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with monkeypatch.context() as patch:
        patch.setattr(CompressedTable, "gather", slow)
        pair.rows.prefetch(torch.tensor([25, 26]))
        # The other thread waits, with what it was about to fetch.
    process = context.Process(target=child, args=(pair.rows, queue))
    process.start()
    try:
        found = torch.from_numpy(queue.get(timeout=30))
    finally:
        go.set()
        process.kill()
        process.join()
    assert same_bits(found, pair.plain.detach()[25:27])


def test_threads_that_look_up_wait_for_each_other():
    pair = Pair(400, 20)
    errors = []

    def work(seed: int):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(60):
            ids = torch.randint(400, (30,), generator=generator)
            weight, index = pair.rows.lookup(ids, train=True)
            if not same_bits(weight[index].detach(), pair.plain.detach()[ids]):
                errors.append(ids)
            if seed % 2:
                pair.rows.prefetch(torch.randint(400, (30,), generator=generator))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors
    check_map(pair.rows)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "sparse-adam"])
def test_a_copy_in_the_middle_of_training_goes_on_alike(how, optimizer):
    pair = trained(optimizer)
    state = (pair.rows, pair.optimizers[1])
    rows, other = copy.deepcopy(state) if how == "deepcopy" else pickle.loads(pickle.dumps(state))
    assert rows.parameter is other.param_groups[0]["params"][0]
    pair.train((1, 2), range(12))  # the copy is not affected
    pair = trained(optimizer)
    pair.rows, pair.optimizers[1] = rows, other
    pair.evict()  # rows move before the copied optimizer takes a step
    pair.train((1, 2), range(12), (3, 20, 21))
    pair.check()


def test_a_new_optimizer_of_a_copy_begins_anew():
    pair = trained("adagrad")
    pair.rows = copy.deepcopy(pair.rows)
    pair.optimizers = [torch.optim.Adagrad([p], lr=0.1) for p in (pair.plain, pair.rows.parameter)]
    pair.train((20, 21), (1, 2), range(12), (7, 8))
    pair.check()


def test_closed_rows_say_so():
    pair = trained()
    pair.rows.close()
    pair.rows.close()
    ids = torch.tensor([1])
    for call in (
        lambda: pair.rows.lookup(ids, train=True),
        lambda: pair.rows.read(ids),
        lambda: pair.rows.prefetch(ids),
        pair.rows.flush,
        pair.rows.whole,
        pair.rows.stats,
        lambda: pair.rows.load(torch.zeros(30, 4)),
        lambda: copy.deepcopy(pair.rows),
    ):
        with pytest.raises(BitslabError, match="closed"):
            call()
