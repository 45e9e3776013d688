"""One copy of a table for many processes: fork, spawn, attach; forks at bad moments; kills."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from bitslab import ArgumentError, BitslabError, CompressedTable, SlabCache
from tests import spawned
from tests.forked import run_forked
from tests.helpers import random_bits, same_bits
from tests.tables.kinds import KINDS, make, weights
from tests.tables.support import inode_at, open_files


def words_inode(table: CompressedTable) -> int:
    return inode_at(table._parts.tensors["words"].data_ptr())


def resident_anonymous() -> int:
    lines = dict(x.split(":") for x in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) << 10


def look(table: CompressedTable, ids: torch.Tensor) -> tuple[int, bytes, int, str]:
    """Return a worker's view of a table."""
    table.gather(ids[:1])
    before = resident_anonymous()
    rows = [table.gather(ids) for _ in range(3)][0]
    grown = resident_anonymous() - before
    refusal = ""
    try:
        table.update(ids[:1], rows[:1])
    except BitslabError as error:
        refusal = str(error)
    # As bytes: a tensor would be shared through a file of a process that ends.
    return words_inode(table), rows.numpy().tobytes(), grown, refusal


def send(table: CompressedTable, ids: torch.Tensor, pipe: Any) -> None:
    pipe.send(look(table, ids))


def run_in_child(
    method: str, table: CompressedTable, ids: torch.Tensor
) -> tuple[int, bytes, int, str]:
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=send, args=(table, ids, theirs))
    with quiet_fork():
        child.start()
    theirs.close()
    assert ours.poll(60), "the child hangs"
    seen = ours.recv()
    child.join()
    return seen  # type: ignore[no-any-return]


@contextlib.contextmanager
def quiet_fork():
    """Python warns of forks of a process with threads; these tests are about them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        yield


@pytest.mark.drawn(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["fork", spawned.METHOD])
def test_workers_read_the_same_memory(method, kind):
    x = weights(60_000, 64)
    table = make(x, kind)
    ids = torch.arange(0, 60_000, 7)
    inode, rows, grown, refusal = run_in_child(method, table, ids)
    assert inode == words_inode(table)
    assert rows == x[ids].numpy().tobytes()
    # Three results and what a gather itself takes; the table has 15 MB.
    assert grown < 4 * x[ids].nbytes < x.nbytes
    assert ("belongs to process" if method == "fork" else "shared with other") in refusal
    if method != "fork":
        with pytest.raises(BitslabError, match="shared with other processes"):
            table.update(ids[:1], x[:1])
    else:
        table.update(ids[:1], x[1:2])
        assert same_bits(table[0], x[1])


ATTACHED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from bitslab import CompressedTable
from tests.tables.test_table_processes import look
table = CompressedTable.attach(sys.stdin.readline().strip())
inode, rows, grown, refusal = look(table, torch.arange(0, len(table), 7))
print(json.dumps([inode, rows.hex(), grown, refusal, list(table.shape)]))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_an_unrelated_process_attaches_to_the_same_memory(kind):
    x = weights(6000, 64)
    table = make(x, kind)
    ran = run_forked(
        ["-c", ATTACHED, Path(__file__).parents[2]], input=table.handle() + "\n", timeout_s=120
    )
    assert ran.returncode == 0, ran.stderr
    inode, rows, _, refusal, shape = json.loads(ran.stdout)
    assert inode == words_inode(table) and shape == [6000, 64]
    assert rows == x[::7].contiguous().numpy().tobytes().hex()
    assert "shared with other processes" in refusal
    with pytest.raises(BitslabError, match="shared with other processes"):
        table.update(torch.tensor([1]), x[:1])


def test_small_tables_have_no_file_until_one_is_asked_for():
    gc.collect()
    before = open_files()
    tables = [CompressedTable.from_tensor(weights(40, 8), pin=False) for _ in range(50)]
    assert open_files() == before
    rows, address = tables[0][:], tables[0]._parts.tensors["words"].data_ptr()
    tables[0].update(torch.tensor([1]), rows[:1])
    rows[1] = rows[0]
    attached = CompressedTable.attach(tables[0].handle())
    # The same memory, at the same address for all earlier users.
    assert tables[0]._parts.tensors["words"].data_ptr() == address
    assert words_inode(tables[0]) == words_inode(attached) != 0
    assert same_bits(attached[:], rows) and same_bits(tables[0][:], rows)
    assert open_files() > before
    attached.close()
    tables[0].close()
    assert open_files() == before


def test_an_attached_table_lives_on_and_can_be_attached_to():
    x = weights()
    table = make(x, "compact")
    second = CompressedTable.attach(table.handle())
    third = CompressedTable.attach(second.handle())
    handle = table.handle()
    table.close()
    assert same_bits(third[:], x) and same_bits(second[:], x)
    with pytest.raises(ArgumentError, match="leads to no memory"):
        CompressedTable.attach(handle)
    copied = pickle.loads(pickle.dumps(third))
    copied.update(torch.tensor([0]), x[1:2])
    assert same_bits(copied[0], x[1]) and same_bits(third[0], x[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda state: 5,
        lambda state: None,
        lambda state: [],
        lambda state: state | {"version": 99},
        lambda state: {k: v for k, v in state.items() if k != "version"},
        lambda state: {k: v for k, v in state.items() if k != "buffers"},
        lambda state: state | {"buffers": 7},
        lambda state: state | {"buffers": {"words": "nonsense"}},
        lambda state: state | {"buffers": {}},
        lambda state: {k: v for k, v in state.items() if k != "facts"},
        lambda state: state | {"dtypes": {"words": "nonsense"}},
        lambda state: state | {"codec": "nonsense"},
    ],
    ids=[
        "number",
        "null",
        "list",
        "version",
        "no-version",
        "no-buffers",
        "buffers",
        "handle",
        "empty",
        "no-facts",
        "dtype",
        "codec",
    ],
)
def test_a_handle_that_is_none_is_refused(change):
    table = make(weights(), "compact")
    text = json.dumps(change(json.loads(table.handle())))
    with pytest.raises(BitslabError):
        CompressedTable.attach(text)
    for no_text in ("no JSON", "", None, 5):
        with pytest.raises(ArgumentError, match="handle: "):
            CompressedTable.attach(no_text)  # type: ignore[arg-type]


def test_a_table_with_overflow_rows_must_be_compacted_before_it_is_shared():
    x = torch.zeros(100, 64)
    table = make(x, "compact")
    fresh = random_bits(torch.float32, (1, 64))
    table.update(torch.tensor([3]), fresh)
    for share in (table.handle, lambda: pickle.dumps(table)):
        with pytest.raises(BitslabError, match=r"rows have moved; call compact\(\) first"):
            share()
    table.compact()
    assert same_bits(CompressedTable.attach(table.handle())[3], fresh[0])


def test_a_cache_is_not_pickled():
    cache = SlabCache(make(weights(), "compact"), 10_000, ["cpu"])
    with pytest.raises(TypeError, match="make one over the table in each process"):
        pickle.dumps(cache)


# Forks at bad moments


def child_status(work) -> int:
    """Fork, run `work` in the child, and return 0 when it returned True within a minute."""
    with quiet_fork():
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(15)
            torch.set_num_threads(1)  # as in a DataLoader's worker: OpenMP does not survive a fork
            status = 0 if work() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_while_others_gather_update_and_fill_finds_no_lock_held():
    x = weights(2000, 256)
    table = make(x, "compact")
    cache = SlabCache(table, 100_000, ["cpu"])
    still = torch.arange(1000, 2000)  # never updated
    cache.fill(still)  # compiles: a fork in the middle of that is Numba's to survive
    cache.gather(still)
    table.gather(still)
    table.update(still[:5], x[still[:5]])
    stop = threading.Event()

    def gather() -> None:
        while not stop.is_set():
            table.gather(still)
            cache.gather(still)

    def change() -> None:
        generator = torch.Generator().manual_seed(1)
        while not stop.is_set():
            ids = torch.randperm(1000, generator=generator)[:50]
            table.update(ids, x[ids])

    def fill() -> None:
        while not stop.is_set():
            cache.fill(still)

    threads = [threading.Thread(target=work) for work in (gather, gather, change, fill)]
    for thread in threads:
        thread.start()

    def in_child() -> bool:
        return (
            same_bits(table.gather(still), x[still])
            and same_bits(cache.gather(still), x[still])
            and table.stats()["gathers"] == 2
            and cache.stats()["hits"] + cache.stats()["misses"] == 1000
        )

    statuses = [child_status(in_child) for _ in range(12)]
    stop.set()
    for thread in threads:
        thread.join()
    assert statuses == [0] * 12
    assert same_bits(table[:], x)


@pytest.mark.parametrize("moment", ["reading", "writing", "packing", "counting", "filling"])
def test_a_fork_while_a_thread_is_inside_finds_no_reader_inside(moment):
    x = weights()
    table = make(x, "compact")
    cache = SlabCache(table, 10_000, ["cpu"])
    inside, go_on = threading.Event(), threading.Event()
    contexts: dict[str, Any] = {
        "reading": table._lock.reading,
        "writing": table._lock.writing,
        "packing": table.unchanging,
        "counting": lambda: table.counters._lock,
        "filling": lambda: cache._fill_lock,
    }

    def hold() -> None:
        with contexts[moment]():
            inside.set()
            go_on.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(20)

    def in_child() -> bool:
        cache.fill(torch.arange(1000))
        right = same_bits(table[:], x) and same_bits(cache[torch.arange(1000)], x)
        table.stats()
        cache.close()
        table.close()
        return right

    assert child_status(in_child) == 0
    go_on.set()
    holder.join()
    assert same_bits(table[:], x)


# Kills


def gather_for_ever(table: CompressedTable, pipe: Any) -> None:
    ids = torch.randint(len(table), (5000,))
    table.gather(ids)
    pipe.send("inside")
    while True:
        table.gather(ids)


@pytest.mark.parametrize("method", ["fork", spawned.METHOD])
def test_a_worker_that_is_killed_in_a_gather_blocks_no_other_process(method):
    x = weights(20_000, 64)
    table = make(x, "compact")
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    workers = [
        context.Process(target=gather_for_ever, args=(table, theirs), daemon=True) for _ in range(2)
    ]
    with quiet_fork():
        for worker in workers:
            worker.start()
    for _ in workers:
        assert ours.poll(60) and ours.recv() == "inside"
    time.sleep(0.05)
    assert workers[0].pid is not None
    os.kill(workers[0].pid, signal.SIGKILL)
    workers[0].join(20)
    assert workers[0].exitcode == -signal.SIGKILL
    assert same_bits(table[:], x) and workers[1].is_alive()
    inode, rows, *_ = run_in_child(method, table, torch.arange(100))
    assert inode == words_inode(table) and rows == x[:100].numpy().tobytes()
    workers[1].kill()
    workers[1].join(20)
    table.close()


def test_close_waits_for_the_gathers_under_way():
    x = weights(20_000, 64)
    for _ in range(3):
        table = make(x, "compact")
        failures: list[str] = []
        started = threading.Barrier(4)

        def read(table=table, failures=failures, started=started) -> None:
            ids = torch.randint(20_000, (5000,))
            started.wait()
            for _ in range(1000):
                try:
                    got = table.gather(ids)
                except BitslabError as error:
                    if "closed" not in str(error):
                        failures.append(str(error))
                    return
                if not same_bits(got, x[ids]):
                    failures.append("wrong rows")
            failures.append("never closed")

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        started.wait()
        time.sleep(0.02)
        table.close()
        for reader in readers:
            reader.join()
        assert not failures
