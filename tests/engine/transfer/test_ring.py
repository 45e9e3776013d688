"""The prefetch ring on the CPU: order, reuse of buffers, errors, and every way to close it."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import torch

import bitslab
from bitslab import ArgumentError, ArgumentTypeError, BitslabError, InvariantCodec
from bitslab.engine.transfer import fetchers
from bitslab.engine.transfer.fetchers import THREAD_NAME
from bitslab.engine.transfer.ring import PrefetchRing
from tests.forked import run_forked

TABLE = torch.randn(500, 24, generator=torch.Generator().manual_seed(1))
IDS = [torch.arange(n, n + 5) for n in range(8)]


def gather(ids, out=None, device=None):
    assert device == torch.device("cpu")
    return torch.index_select(TABLE, 0, ids, out=out)


class Slow:
    """A source that takes its time and knows when it is inside a gather."""

    def __init__(self, seconds=0.3):
        self.seconds = seconds
        self.entered = threading.Event()
        self.left = 0

    def gather(self, ids, out=None, device=None):
        self.entered.set()
        time.sleep(self.seconds)
        self.left += 1
        return gather(ids, out, device)


class Packed:
    """Rows kept packed by a codec, decoded by the project's own CPU kernels."""

    def __init__(self):
        self.codec = InvariantCodec.fit(TABLE)
        self.packed = self.codec.encode(TABLE)

    def gather(self, ids, out=None, device=None):
        return self.codec.decode(self.packed, ids, out=out)


def ring_threads():
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def assert_soon_no_thread():
    deadline = time.monotonic() + 20
    while ring_threads():
        assert time.monotonic() < deadline, ring_threads()
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert_soon_no_thread()


def within(seconds, work):
    """Run work in a thread and fail, instead of hanging, when it takes too long."""
    result = []
    thread = threading.Thread(target=lambda: result.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"not done within {seconds} s"
    assert result, "it raised"
    return result[0]


# What comes out


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("source", [gather, Packed()], ids=["torch", "packed"])
def test_batches_come_in_order_and_exact(source, depth):
    draw = torch.Generator().manual_seed(depth)
    sizes = torch.randint(0, 300, (200,), generator=draw).tolist()
    batches = [torch.randint(500, (n,), generator=draw) for n in sizes]
    count = 0
    for ids, rows in zip(batches, PrefetchRing(source, iter(batches), depth=depth), strict=True):
        assert torch.equal(rows, TABLE[ids])
        count += 1
    assert count == 200


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_buffers_are_reused_and_grow_only(depth):
    big, rest = torch.arange(400), [torch.arange(n % 90 + 1) for n in range(100)]
    with PrefetchRing(gather, [big, *[big] * depth, *rest], depth=depth) as ring:
        for _ in range(1 + depth):
            ring.get()
        places = {ring.get().data_ptr() for _ in rest}
    assert len(places) == depth


def test_rows_remain_until_the_next_get():
    with PrefetchRing(gather, IDS, depth=3) as ring:
        for ids in IDS:
            rows = ring.get()
            time.sleep(0.01)  # the thread fetches as far ahead as it may
            assert torch.equal(rows, TABLE[ids])


def test_copies_remain_for_ever():
    kept = list(PrefetchRing(gather, IDS, copy=True))
    assert all(torch.equal(rows, TABLE[ids]) for ids, rows in zip(IDS, kept, strict=True))


def test_the_next_batch_is_fetched_while_one_is_used():
    """And got while the one behind it is held up."""
    second, third, held = (threading.Event() for _ in range(3))

    def source(ids, out=None, device=None):
        if ids is IDS[2]:
            third.set()
            assert held.wait(20)
        rows = gather(ids, out, device)
        if ids is IDS[1]:
            second.set()
        return rows

    with PrefetchRing(source, IDS) as ring:
        ring.get()
        assert second.wait(20)  # nobody asks for it
        assert torch.equal(within(20, ring.get), TABLE[IDS[1]])
        assert third.wait(20) and not held.is_set()
        held.set()


def test_key_gives_items_with_rows():
    items = [(ids, f"batch {n}") for n, ids in enumerate(IDS)]
    ring = PrefetchRing(gather, items, key=lambda item: item[0])
    for n, ((ids, name), rows) in enumerate(ring):
        assert name == f"batch {n}"
        assert torch.equal(rows, TABLE[ids])


def test_put_and_get():
    with PrefetchRing(gather, depth=2) as ring:
        for ids in IDS:  # more than there are buffers; never waits
            ring.put(ids)
        for ids in IDS[:4]:
            assert torch.equal(ring.get(), TABLE[ids])
        ring.put(IDS[0])
        for ids in [*IDS[4:], IDS[0]]:
            assert torch.equal(ring.get(), TABLE[ids])
        with pytest.raises(BitslabError, match="no batch is left; put one"):
            ring.get()
        ring.put(IDS[3])
        assert torch.equal(ring.get(), TABLE[IDS[3]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.complex64])
@pytest.mark.parametrize("row_shape", [(), (3,), (2, 3), (0,)])
def test_rows_of_any_shape_and_dtype(row_shape, dtype):
    table = torch.randn(50, *row_shape).to(dtype)
    ids = [torch.tensor([4, 4, 49]), torch.tensor([], dtype=torch.int64), torch.arange(20)]
    rows = list(PrefetchRing(lambda i, out=None, device=None: table[i], ids))
    for each, wanted in zip(rows, ids, strict=True):
        assert torch.equal(each, table[wanted])
        assert each.dtype == dtype


def test_a_view_of_the_source_is_never_written_to():
    table = TABLE.clone()

    def gather_views(ids, out=None, device=None):
        rows = table[: len(ids)]
        return rows if out is None else out.copy_(rows + 1)

    for _ in PrefetchRing(gather_views, IDS):
        pass
    assert torch.equal(table, TABLE)


def test_no_batches():
    assert list(PrefetchRing(gather, [])) == []


def test_stats_count_what_was_got():
    source = Slow(0.02)
    with PrefetchRing(source, IDS, depth=2) as ring:
        for _ in range(3):
            ring.get()
        stats = ring.stats()
    assert stats.pop("wait_seconds") >= 0.02
    assert stats == {"batches": 3, "rows": 15, "raw_bytes": 15 * 24 * 4, "depth": 2}


# Errors


def test_errors_come_at_their_get_and_the_rest_in_order():
    bad = torch.tensor([3, 500])
    with PrefetchRing(gather, [IDS[0], bad, IDS[1], "ids", IDS[2][None], IDS[3]]) as ring:
        assert torch.equal(ring.get(), TABLE[IDS[0]])
        with pytest.raises(IndexError):
            ring.get()
        assert torch.equal(ring.get(), TABLE[IDS[1]])
        with pytest.raises(ArgumentTypeError, match="ids: expected a tensor, got str; say by key="):
            ring.get()
        with pytest.raises(ArgumentError, match=r"ids: shape \[1, 5\]"):
            ring.get()
        assert torch.equal(ring.get(), TABLE[IDS[3]])
        assert ring.stats()["batches"] == 3


def test_an_error_of_the_first_batch():
    with PrefetchRing(gather, [torch.tensor([-501]), IDS[0]]) as ring:
        with pytest.raises(IndexError):
            ring.get()
        assert torch.equal(ring.get(), TABLE[IDS[0]])


def test_errors_of_the_iterable_come_in_their_place():
    class Moody:
        turn = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.turn += 1
            if self.turn % 2 == 0:
                raise OSError(f"turn {self.turn}")
            return IDS[self.turn]

    with PrefetchRing(gather, Moody(), depth=3) as ring:
        for turn in (1, 3, 5):
            assert torch.equal(ring.get(), TABLE[IDS[turn]])
            with pytest.raises(OSError, match=f"turn {turn + 1}"):
                ring.get()


def test_an_iterable_that_fails_for_ever_is_asked_as_far_as_the_ring_goes():
    asked = []

    class Broken:
        def __iter__(self):
            return self

        def __next__(self):
            asked.append(1)
            raise OSError("broken")

    with PrefetchRing(gather, Broken(), depth=3) as ring:
        with pytest.raises(OSError, match="broken"):
            ring.get()
    assert len(asked) == 3


def test_a_generator_that_fails_ends_after_its_error():
    def batches():
        yield IDS[0]
        raise OSError("gone")

    seen = []
    with pytest.raises(OSError, match="gone"):
        for rows in PrefetchRing(gather, batches()):
            seen.append(rows.shape)
    assert len(seen) == 1


def test_even_exits_of_a_source_belong_to_the_consumer():
    def leave(ids, out=None, device=None):
        raise SystemExit(3)

    with PrefetchRing(leave, IDS) as ring, pytest.raises(SystemExit):
        ring.get()


@pytest.mark.parametrize("returned", [torch.zeros(3, 2), None, torch.tensor(1.0)])
def test_a_source_that_returns_something_else(returned):
    results = iter([returned, TABLE[:5], returned, TABLE[:5]])
    with PrefetchRing(lambda *a, **k: next(results), IDS[:4]) as ring:
        for _ in range(2):  # with no buffer yet, and with one
            with pytest.raises(ArgumentError, match=r"source: returned .* for 5 ids"):
                ring.get()
            assert torch.equal(ring.get(), TABLE[:5])


class Rows:
    """A source that does not accept where its rows are wanted."""

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return TABLE[ids]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"source": 5}, ArgumentTypeError, "source: expected an object with gather"),
        ({"depth": 0}, ArgumentError, "depth: 0, accepted are numbers from 1"),
        ({"depth": 2.0}, ArgumentTypeError, "depth: expected an int, got 2.0"),
        ({"depth": True}, ArgumentTypeError, "depth: expected an int, got True"),
        ({"device": "meta"}, ArgumentTypeError, "device: meta, accepted are cpu and cuda"),
        ({"device": "xyz"}, ArgumentError, "device: 'xyz' names no device, accepted are 'cpu'"),
        ({"batches": 5}, ArgumentTypeError, "batches: 5, expected an iterable of tensors of ids"),
        ({"key": 5}, ArgumentTypeError, "key: 5, expected a function that takes an item"),
        (
            {"source": lambda ids, out=None: TABLE[ids]},
            ArgumentTypeError,
            r"source: cannot be called as gather\(ids, out=None, device=None\): .*'device'",
        ),
        (
            {"source": Rows()},
            ArgumentTypeError,
            r"source: cannot be called as gather\(ids, out=None, device=None\): .*'out'",
        ),
        (
            {"source": TABLE.to("meta")},
            ArgumentTypeError,
            "source: meta, accepted are cpu and cuda",
        ),
    ],
    ids=[
        "source: no gather",
        "depth: 0",
        "depth: a float",
        "depth: a bool",
        "device: another kind",
        "device: no name",
        "batches: no iterable",
        "key: no function",
        "source: a function without device",
        "source: a gather without out and device",
        "source: on the meta device",
    ],
)
def test_bad_arguments_leave_no_thread(arguments, error, message):
    with pytest.raises(error, match=message):
        PrefetchRing(**{"source": gather, **arguments})
    assert not ring_threads()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(BitslabError, match="torch sees no CUDA GPU"):
        PrefetchRing(gather, device="cuda")


def test_put_where_batches_were_given():
    with PrefetchRing(gather, IDS) as ring, pytest.raises(ArgumentError, match="put: this ring"):
        ring.put(IDS[0])


# Closing


def test_the_end_of_the_loop_closes():
    ring = PrefetchRing(gather, IDS)
    list(ring)
    assert not ring_threads()
    with pytest.raises(BitslabError, match="get: this ring is closed"):
        ring.get()
    with pytest.raises(BitslabError, match="get: this ring is closed"):
        list(ring)


def test_break_closes():
    ring = PrefetchRing(gather, IDS)
    for _ in ring:
        break
    assert not ring_threads()


def test_an_error_in_the_loop_closes():
    ring = PrefetchRing(gather, IDS)
    with pytest.raises(ZeroDivisionError):
        for _ in ring:
            raise ZeroDivisionError
    gc.collect()
    assert not ring_threads()


def test_with_closes_and_close_twice_does_nothing():
    with PrefetchRing(gather, IDS) as ring:
        ring.get()
    assert not ring_threads()
    ring.close()
    ring.close()
    with pytest.raises(BitslabError, match="put: this ring is closed"):
        ring.put(IDS[0])


def test_a_ring_that_was_never_used_closes():
    PrefetchRing(gather, IDS).close()
    assert not ring_threads()


def test_garbage_collection_closes():
    ring = PrefetchRing(gather, IDS)
    ring.get()
    del ring
    gc.collect()
    assert not ring_threads()


def test_an_error_that_was_raised_keeps_no_ring_alive():
    ring = PrefetchRing(gather, [torch.tensor([500]), IDS[0]])
    with pytest.raises(IndexError):
        ring.get()
    del ring
    gc.collect()
    assert not ring_threads()


def test_close_inside_a_slow_gather_waits_for_it_alone():
    source = Slow(0.5)
    ring = PrefetchRing(source, depth=4)
    for ids in IDS[:4]:
        ring.put(ids)
    assert source.entered.wait(20)
    within(20, ring.close)
    assert source.left == 1  # of four
    assert not ring_threads()


def test_close_gives_up_on_a_gather_that_does_not_end(monkeypatch):
    monkeypatch.setattr(fetchers, "CLOSE_SECONDS", 0.1)
    entered, end = threading.Event(), threading.Event()

    def stuck(ids, out=None, device=None):
        entered.set()
        end.wait(60)
        return gather(ids, out, device)

    ring = PrefetchRing(stuck)
    ring.put(IDS[0])
    assert entered.wait(20)
    within(20, ring.close)
    assert len(ring_threads()) == 1
    end.set()
    assert_soon_no_thread()


def test_a_get_that_waits_while_another_thread_closes_still_gets_its_rows():
    source = Slow(0.3)
    ring = PrefetchRing(source, IDS)

    def close():
        assert source.entered.wait(20)
        ring.close()

    closer = threading.Thread(target=close)
    closer.start()
    assert torch.equal(within(20, ring.get), TABLE[IDS[0]])
    closer.join(20)
    with pytest.raises(BitslabError, match="get: this ring is closed"):
        ring.get()


def test_closed_while_a_batch_is_drawn():
    def batches():
        ring.close()
        yield IDS[0]

    ring = PrefetchRing(gather, batches())
    with pytest.raises(BitslabError, match="closed before the batch was fetched"):
        ring.get()


def test_collected_by_the_rings_own_thread():
    """The last reference may go, and the collector may run, inside the source's gather."""
    rings: list[PrefetchRing] = []
    done = threading.Event()

    def drop(ids, out=None, device=None):
        rings.clear()
        gc.collect()
        done.set()
        return gather(ids, out, device)

    rings.append(PrefetchRing(drop))
    rings[0].put(IDS[0])
    assert done.wait(20)
    assert_soon_no_thread()


@pytest.mark.parametrize("state", ["idle", "inside-a-gather", "never-used"])
def test_the_interpreter_exits_with_an_open_ring(state):
    code = f"""
import time, torch
from bitslab.engine.transfer.ring import PrefetchRing
def gather(ids, out=None, device=None):
    time.sleep({0.5 if state == "inside-a-gather" else 0})
    return torch.zeros(len(ids), 3)
ring = PrefetchRing(gather, [torch.arange(3)] * 9)
{"" if state == "never-used" else "ring.get()"}
print("end")
"""
    done = run_forked(["-c", code], timeout_s=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_gets_an_error_and_can_leave():
    code = """
import os, torch
from bitslab import BitslabError
from bitslab.engine.transfer.ring import PrefetchRing
table = torch.arange(10.0)
def gather(ids, out=None, device=None):
    return table[ids]
ring = PrefetchRing(gather, [torch.arange(3)] * 9)
ring.get()
child = os.fork()
for use in (ring.get, lambda: ring.put(torch.arange(2)), lambda: list(ring)):
    try:
        use()
    except BitslabError as error:
        assert child == 0 and "forked child" in str(error), error
    else:
        assert child != 0
        break
if child == 0:
    ring.close()
    own = PrefetchRing(gather, [torch.tensor([7])])
    assert own.get().tolist() == [7.0]
else:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), ring.get().tolist())
"""
    done = run_forked(["-c", code], timeout_s=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "0 [0.0, 1.0, 2.0]\n"


def test_tables_caches_and_tensors_are_sources():
    x = torch.randn(500, 16).round()
    table = bitslab.CompressedTable.from_tensor(x, pin=False)
    cache = bitslab.SlabCache(table, 4000, devices=["cpu"])
    cache.fill(torch.arange(500))
    batches = [torch.randint(500, (n,)) for n in (40, 7, 90, 90, 0)]
    for source in (table, cache, x, bitslab.unified(x)):
        with PrefetchRing(source, batches) as ring:
            for ids, rows in zip(batches, ring, strict=True):
                assert torch.equal(rows, x[ids])
            assert "PrefetchRing(depth 2" in repr(ring)


def test_a_tensor_elsewhere_than_its_rows_are_wanted_is_refused():
    with pytest.raises(ArgumentTypeError, match="unified"):
        PrefetchRing(torch.zeros(3, 2), [], device="cuda")
