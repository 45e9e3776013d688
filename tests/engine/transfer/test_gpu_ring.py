"""The prefetch ring on a real GPU: order, overlap, streams, and no wait of the host."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import bitslab
from bitslab import ArgumentError, InvariantCodec
from bitslab.engine.transfer.fetchers import THREAD_NAME, StreamFetcher
from bitslab.engine.transfer.ring import PrefetchRing

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

ROWS = (torch.randn(5000, 128, generator=torch.Generator().manual_seed(1)) / 8).bfloat16()


class Packed:
    """Packed rows in page-locked host memory, read and decoded by the GPU's kernel."""

    def __init__(self):
        self.codec = InvariantCodec.fit(ROWS)
        self.packed = self.codec.encode(ROWS).pin_memory()

    def gather(self, ids, out=None, device=None):
        if out is None:
            out = torch.empty((len(ids), 128), dtype=torch.bfloat16, device=device)
        return self.codec.decode(self.packed, ids, out=out)


class OnDevice:
    """Rows on the GPU; before each gather the stream is kept busy for some cycles."""

    def __init__(self, cycles=0):
        self.rows = ROWS.cuda()
        self.cycles = cycles

    def gather(self, ids, out=None, device=None):
        assert ids.device == self.rows.device == device
        if self.cycles:
            torch.cuda._sleep(self.cycles)
        return torch.index_select(self.rows, 0, ids, out=out)


def random_ids(n, seed=0, size=512):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(5000, (size,), generator=draw) for _ in range(n)]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("where", ["ids-on-cpu", "ids-on-gpu", "ids-in-turn"])
@pytest.mark.parametrize("make", [Packed, OnDevice], ids=["packed", "on-device"])
def test_batches_come_in_order_and_exact(make, where, depth):
    draw = torch.Generator().manual_seed(depth)
    sizes = torch.randint(0, 700, (200,), generator=draw).tolist()
    batches = [torch.randint(5000, (n,), generator=draw) for n in sizes]

    def ids():
        for turn, batch in enumerate(batches):
            on_gpu = where == "ids-on-gpu" or (where == "ids-in-turn" and turn % 2)
            yield batch.cuda() if on_gpu else batch

    sums, count = [], 0
    for rows in PrefetchRing(make(), ids(), depth=depth, device="cuda"):
        sums.append(rows.view(torch.int16).clone())  # by the consumer's stream, with no wait
        count += 1
    assert count == 200
    for batch, found in zip(batches, sums, strict=True):
        assert torch.equal(found.cpu(), ROWS[batch].view(torch.int16))


def test_a_slow_consumer_is_not_overtaken():
    """The stream that consumes is far behind the host; no buffer may be written under it."""
    batches, seen = random_ids(40), []
    consumer = torch.cuda.Stream()
    with torch.cuda.stream(consumer):
        for rows in PrefetchRing(OnDevice(), batches, device="cuda", depth=3):
            torch.cuda._sleep(2_000_000)
            seen.append(rows.clone())
    consumer.synchronize()
    for batch, found in zip(batches, seen, strict=True):
        assert torch.equal(found.cpu(), ROWS[batch])


def test_a_slow_source_is_waited_for():
    batches = random_ids(10)
    seen = [
        rows.clone() for rows in PrefetchRing(OnDevice(5_000_000), batches, device="cuda", depth=3)
    ]
    for batch, found in zip(batches, seen, strict=True):
        assert torch.equal(found.cpu(), ROWS[batch])


def test_a_batch_is_fetched_while_the_one_before_is_used(held_stream):
    class Marked(OnDevice):
        def gather(self, ids, out=None, device=None):
            rows = super().gather(ids, out, device)
            events.append(torch.cuda.Event())
            events[-1].record()
            return rows

    events: list[torch.cuda.Event] = []
    batches = random_ids(4)
    with PrefetchRing(Marked(), batches, device="cuda", depth=2) as ring:
        ring.get()
        with held_stream():  # the consumer is busy with the first batch
            events[1].synchronize()
        assert torch.equal(ring.get().cpu(), ROWS[batches[1]])


def test_the_host_never_waits_and_nothing_is_allocated(run_ahead):
    batches = [ids.pin_memory() for ids in random_ids(80)]
    with PrefetchRing(Packed(), batches, device="cuda", depth=2) as ring:
        places: set[int] = set()
        for _ in range(20):
            ring.get()
        torch.cuda.synchronize()
        made: list[int] = []

        def get_fifty() -> None:  # a stream's queue takes about a thousand launches
            made.append(torch.cuda.memory_stats()["num_device_alloc"])
            places.update(ring.get().data_ptr() for _ in range(50))
            made.append(torch.cuda.memory_stats()["num_device_alloc"])

        run_ahead(get_fifty)
        assert made[0] == made[1]
        assert len(places) == 2


def test_the_waits_of_the_stream_are_counted():
    with PrefetchRing(OnDevice(20_000_000), random_ids(6), device="cuda") as ring:
        for _ in range(6):
            ring.get()
        torch.cuda.synchronize()
        stats = ring.stats()
    assert stats.pop("wait_seconds") > 0
    assert stats == {"batches": 6, "rows": 3072, "raw_bytes": 3072 * 256, "depth": 2}


def test_copies_remain():
    batches = random_ids(9)
    kept = list(PrefetchRing(Packed(), batches, device="cuda", copy=True))
    for batch, rows in zip(batches, kept, strict=True):
        assert torch.equal(rows.cpu(), ROWS[batch])


def test_errors_come_at_their_get_and_the_rest_in_order():
    good = random_ids(3)
    with PrefetchRing(Packed(), [good[0], good[1][None], good[2]], device="cuda") as ring:
        assert torch.equal(ring.get().cpu(), ROWS[good[0]])
        with pytest.raises(ArgumentError, match="ids: shape"):
            ring.get()
        assert torch.equal(ring.get().cpu(), ROWS[good[2]])


def test_bad_ids_that_only_the_gpu_sees_are_reported():
    with PrefetchRing(Packed(), [torch.tensor([0, 5000])], device="cuda") as ring:
        ring.get()
        with pytest.raises(bitslab.IndexRangeError, match="index 5000 at position 1"):
            bitslab.raise_pending_errors("cuda")


def test_close_waits_for_the_gathers_under_way():
    ring = PrefetchRing(OnDevice(100_000_000), random_ids(3), device="cuda")
    ring.get()
    ring.close()
    assert isinstance(ring._fetcher, StreamFetcher)
    assert ring._fetcher._lane.stream.query()
    ring.close()
    with pytest.raises(bitslab.BitslabError, match="get: this ring is closed"):
        ring.get()
    assert THREAD_NAME not in [thread.name for thread in threading.enumerate()]


def test_rows_outlive_the_ring():
    ids = random_ids(1)[0]
    ring = PrefetchRing(OnDevice(), [ids], device="cuda")
    rows = ring.get()
    del ring
    gc.collect()
    assert torch.equal(rows.cpu(), ROWS[ids])


def test_a_gpu_that_is_not_there():
    with pytest.raises(ArgumentError, match="device: cuda:99, but torch sees"):
        PrefetchRing(OnDevice(), device="cuda:99")
