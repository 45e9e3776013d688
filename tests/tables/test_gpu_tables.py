"""Tables and caches on a real GPU: rows over the link and out of slabs, compared with the CPU's."""

from __future__ import annotations

import threading

import pytest
import torch

import bitslab
from bitslab import CompressedTable, SlabCache
from bitslab.engine.memory.host import HostBuffer
from bitslab.engine.transfer.gather import gather_copied_rows
from bitslab.tables.parts import Layout
from tests.helpers import DTYPES, dtype_id, packable, random_bits, same_bits, take

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

TABLES: dict[str, tuple[Layout, str]] = {
    "compact": ("compact", "auto"),
    "in-place": ("inplace", "auto"),
    "raw": ("compact", "raw"),
}


def weights(n=4096, columns=256, dtype=torch.bfloat16):
    return (torch.randn(n, columns) * 0.02).to(dtype)


def pinned(t: torch.Tensor) -> tuple[HostBuffer, torch.Tensor]:
    buffer = HostBuffer.allocate(t.nbytes)
    buffer.tensor.copy_(t.flatten().view(torch.uint8))
    return buffer, buffer.tensor.view(t.shape[0], -1)


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("columns", [1, 7, 64, 333])
def test_tables_give_the_same_rows_on_gpu_and_cpu(kind, dtype, columns):
    x = packable(dtype, (500, columns))
    layout, codec = TABLES[kind]
    with CompressedTable.from_tensor(x, layout, codec) as table:
        assert table.pinned
        ids = torch.randint(-500, 500, (777,))
        for sort in (True, False, None):
            for some in (ids.cuda(), ids.int().cuda()):
                assert same_bits(table.gather(some, sort=sort).cpu(), take(x, ids % 500))
        assert same_bits(table.gather(ids, device="cuda").cpu(), take(x, ids % 500))
        out = torch.zeros(777, columns, device="cuda").to(dtype)
        assert table.gather(ids.cuda(), out=out, sm_budget=2) is out
        assert same_bits(out.cpu(), take(x, ids % 500))


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("row_bytes", [6 << 10, 20 << 10, 64 << 10])
def test_long_rows_are_gathered(kind, row_bytes):
    x = packable(torch.float32, (60, row_bytes // 4))
    layout, codec = TABLES[kind]
    with CompressedTable.from_tensor(x, layout, codec) as table:
        ids = torch.randint(60, (200,), device="cuda")
        assert torch.equal(table.gather(ids).cpu(), x[ids.cpu()])
        cache = SlabCache(table, x.nbytes // 3)
        assert cache.fill(torch.arange(60)) >= 20
        for sort in (None, True):
            assert torch.equal(cache.gather(ids, sort=sort).cpu(), x[ids.cpu()])


@pytest.mark.parametrize(
    "row_bytes", [1, 2, 3, 4, 12, 44, 100, 128, 132, 256, 301, 602, 1028, 2052]
)
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_raw_rows_of_any_size_and_alignment_are_copied(row_bytes, offset):
    buffer, data = pinned(random_bits(torch.uint8, (1, 1000 * row_bytes + offset)))
    rows = data[0, offset:].view(1000, row_bytes)
    for where in (rows, rows.clone().cuda()):
        ids = torch.randint(-1000, 1000, (4097,), device="cuda")
        for sort in (False, True):
            room = torch.full((4097 * row_bytes + 2,), 7, dtype=torch.uint8, device="cuda")
            out = room[1:-1].view(4097, row_bytes)
            gather_copied_rows(where, row_bytes, ids, out, sort=sort)
            assert torch.equal(out.cpu(), rows[ids.cpu() % 1000])
            assert room[0] == 7 and room[-1] == 7
    buffer.close()


@pytest.mark.parametrize("kind", TABLES)
def test_bad_ids_on_the_gpu_leave_the_output_untouched_and_are_reported_later(kind):
    layout, codec = TABLES[kind]
    x = weights()
    with CompressedTable.from_tensor(x, layout, codec) as table:
        for sort in (False, True):
            ids = torch.tensor([1, 2, 4096, 9999], device="cuda")
            out = torch.full((4, 256), 7.0, dtype=x.dtype, device="cuda")
            table.gather(ids, out=out, sort=sort)
            with pytest.raises(bitslab.IndexRangeError, match="index 4096 at position 2"):
                bitslab.raise_pending_errors()
            assert (out == 7).all()


@pytest.mark.parametrize("kind", TABLES)
def test_updates_are_seen_by_the_gpu_and_never_half(kind):
    layout, codec = TABLES[kind]
    columns = 256
    x = (torch.randn(2000, 1) * 0.02).expand(2000, columns).contiguous()
    with CompressedTable.from_tensor(x, layout, codec) as table:
        ids = torch.randint(2000, (3000,), device="cuda")
        cache = SlabCache(table, x.nbytes // 4)
        cache.fill(torch.arange(400))
        for round_ in range(20):
            chosen = torch.randperm(2000)[:300]
            # Rows of one value each: packed, raw, and of different lengths.
            values = torch.randn(300, 1) * 10.0 ** torch.randint(-30, 30, (300, 1))
            rows = values.expand(300, columns).contiguous()
            results = [table.gather(ids), cache.gather(ids)]
            table.update(chosen if round_ % 2 else chosen.cuda(), rows)
            x[chosen] = rows
            for before in results:
                assert (before == before[:, :1]).all()
            assert torch.equal(table.gather(ids).cpu(), x[ids.cpu()])
            assert torch.equal(cache.gather(ids).cpu(), x[ids.cpu()])
            if round_ == 12:
                table.compact()
        assert torch.equal(table.gather(ids.cpu()), x[ids.cpu()])


@pytest.mark.parametrize("cached", [False, True], ids=["table", "cache"])
@pytest.mark.parametrize("kind", TABLES)
def test_gathers_can_be_captured_in_a_graph_and_follow_the_current_stream(kind, cached):
    layout, codec = TABLES[kind]
    x = weights()
    with CompressedTable.from_tensor(x, layout, codec) as table:
        source: CompressedTable | SlabCache = table
        if cached:
            source = cache = SlabCache(table, x.nbytes // 4)
            cache.fill(torch.arange(0, 4096, 3))
        ids = torch.randint(4096, (1000,), device="cuda")
        out = torch.zeros(1000, 256, dtype=x.dtype, device="cuda")
        source.gather(ids, out=out)
        if not cached:
            table.gather(ids, out=out, sort=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            if cached:
                source.gather(ids, out=out)
            else:
                table.gather(ids, out=out, sort=True)
        for _ in range(3):
            ids.copy_(torch.randint(4096, (1000,)))
            out.zero_()
            graph.replay()
            # Gathers outside the graph must not disturb it.
            source.gather(ids[:100])
            torch.cuda.synchronize()
            assert torch.equal(out.cpu(), x[ids.cpu()])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        out.zero_()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            source.gather(ids, out=out)
            copy = out.clone()
        side.synchronize()
        assert torch.equal(copy.cpu(), x[ids.cpu()])


@pytest.mark.parametrize("kind", TABLES)
def test_a_hundred_gathers_neither_wait_nor_allocate(kind, no_waiting, profiled):
    layout, codec = TABLES[kind]
    x = weights(20_000)
    with CompressedTable.from_tensor(x, layout, codec) as table:
        cache = SlabCache(table, x.nbytes // 4)
        cache.fill(torch.arange(0, 20_000, 3))
        batches = [torch.randint(20_000, (5000,), device="cuda") for _ in range(100)]
        out = torch.zeros(5000, 256, dtype=x.dtype, device="cuda")
        u = bitslab.unified(x)

        def run() -> None:
            for ids in batches:
                table.gather(ids, out=out)
                table.gather(ids, out=out, sort=True)
                cache.gather(ids, out=out)
                torch.index_select(u, 0, ids, out=out)

        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with no_waiting():
            run()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        profile = profiled(run)
        names = [event.key for event in profile.key_averages()]
        assert any("copy_rows" in name or "gather_rows" in name for name in names)
        waits = [n for n in names if "Synchronize" in n and "EventSync" not in n]
        # The fixture and the profiler itself synchronise once each, after the work.
        counts = {e.key: e.count for e in profile.key_averages()}
        assert all(counts[name] <= 3 for name in waits), counts
        copies = [n for n in names if n.startswith("cudaMemcpy") and "Async" not in n]
        assert not copies, copies


def test_threads_on_one_and_on_several_streams_get_their_own_rows():
    x = weights(10_000)
    failures: list[str] = []
    with CompressedTable.from_tensor(x) as table:
        here = x.cuda()

        def work(seed: int) -> None:
            stream = torch.cuda.Stream() if seed % 2 else torch.cuda.current_stream()
            generator = torch.Generator("cuda").manual_seed(seed)
            with torch.cuda.stream(stream):
                for _ in range(60):
                    ids = torch.randint(10_000, (3000,), device="cuda", generator=generator)
                    if not torch.equal(table.gather(ids, sort=seed % 3 == 0), here[ids]):
                        failures.append(f"seed {seed}")

        torch.cuda.synchronize()
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_refresh_runs_concurrently_with_readers():
    x = weights(20_000)
    with CompressedTable.from_tensor(x) as table:
        cache = SlabCache(table, x.nbytes // 8)
        here, failures, stop = x.cuda(), [], threading.Event()

        def read(seed: int) -> None:
            generator = torch.Generator("cuda").manual_seed(seed)
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    ids = torch.randint(20_000, (2000,), device="cuda", generator=generator)
                    if not torch.equal(cache.gather(ids), here[ids]):
                        failures.append(seed)

        torch.cuda.synchronize()
        readers = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
        for reader in readers:
            reader.start()
        for _ in range(10):
            assert cache.refresh(torch.randperm(20_000)) > 2500
        stop.set()
        for reader in readers:
            reader.join()
        assert not failures
        stats = cache.stats()
        assert stats["hits"] and stats["misses"]


def test_a_closed_table_waits_for_the_gpu():
    x = weights(20_000)
    ids = torch.randint(20_000, (15_000,), device="cuda")
    for _ in range(5):
        table = CompressedTable.from_tensor(x)
        table.gather(ids)
        torch.cuda._sleep(20_000_000)
        got = table.gather(ids)
        table.close()
        assert torch.equal(got.cpu(), x[ids.cpu()])
        with pytest.raises(bitslab.BitslabError, match="closed"):
            table.gather(ids)


def test_page_locking_refused_still_gives_the_rows(monkeypatch):
    monkeypatch.setattr(
        "bitslab.engine.memory.page_locking.CudaRegistrar.register", lambda *a: "refused here"
    )
    monkeypatch.setattr("bitslab.engine.memory.page_locking._warned_of_refusal", False)
    x = weights()
    with pytest.warns(UserWarning, match="refused to page-lock"):
        table = CompressedTable.from_tensor(x)
    ids = torch.randint(4096, (100,), device="cuda")
    assert not table.pinned
    assert torch.equal(table.gather(ids).cpu(), x[ids.cpu()])
    cache = SlabCache(table, 100_000)
    cache.fill(torch.arange(4096))
    assert torch.equal(cache.gather(ids).cpu(), x[ids.cpu()])


def test_tables_beyond_four_gigabytes():
    n, columns = (5 << 30) // 1024, 512

    def batches():
        for begin in range(0, n, 1 << 18):
            generator = torch.Generator("cuda").manual_seed(begin)
            count = min(1 << 18, n - begin)
            noise = torch.randn(count, columns, device="cuda", generator=generator)
            yield (noise * 0.02).bfloat16()

    ids = torch.randint(n, (20_000,), device="cuda")
    ids[:3] = torch.tensor([0, n - 1, -1])
    for layout, codec in TABLES.values():
        with CompressedTable.from_tensor(batches(), layout, codec, progress=False) as table:
            got = {sort: table.gather(ids, sort=sort) for sort in (False, True)}
            expected = torch.empty_like(got[True])
            wanted = ids % n
            for begin, batch in zip(range(0, n, 1 << 18), batches(), strict=True):
                here = (wanted >= begin) & (wanted < begin + len(batch))
                expected[here] = batch[wanted[here] - begin]
            for rows in got.values():
                assert torch.equal(rows.view(torch.int16), expected.view(torch.int16))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_slabs_on_several_gpus_are_read_over_nvlink():
    x = weights(20_000)
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    with CompressedTable.from_tensor(x) as table:
        cache = SlabCache(table, x.nbytes // 8, devices)
        cache.fill(torch.randperm(20_000))
        for device in devices:
            with torch.cuda.device(device):
                ids = torch.randint(20_000, (9000,), device=device)
                assert torch.equal(cache.gather(ids).cpu(), x[ids.cpu()])
        stats = cache.stats()
        assert stats["local_bytes"] and stats["peer_bytes"] and stats["host_bytes"]


@pytest.mark.parametrize("layout", ["compact", "inplace"])
def test_rare_raw_rows_do_not_hold_the_others_up(layout):
    x = packable(torch.float32, (5000, 1024))
    x[::100] = random_bits(torch.float32, (50, 1024))
    with CompressedTable.from_tensor(x, layout) as table:
        assert 4800 < table.stats()["packed_rows"] < 5000
        ids = torch.randint(-5000, 5000, (9000,), device="cuda")
        cache = SlabCache(table, x.nbytes // 3)
        assert cache.fill(torch.randperm(5000)) > 1500
        for source in (table, cache):
            assert same_bits(source.gather(ids).cpu(), x[ids.cpu()])
        table.update(torch.arange(7, 107), random_bits(torch.float32, (100, 1024)))
        for source in (table, cache):
            assert same_bits(source.gather(ids).cpu(), table.gather(ids.cpu()))


@pytest.mark.parametrize("kind", TABLES)
def test_an_out_that_is_not_contiguous_is_unchanged_when_an_id_is_bad(kind):
    layout, codec = TABLES[kind]
    x = weights()
    with CompressedTable.from_tensor(x, layout, codec) as table:
        out = torch.full((256, 3), 7.0, dtype=x.dtype, device="cuda").t()
        table.gather(torch.tensor([1, 9999, 2], device="cuda"), out=out)
        with pytest.raises(bitslab.IndexRangeError):
            bitslab.raise_pending_errors()
        assert (out == 7).all()
        table.gather(torch.tensor([1, -1, 2], device="cuda"), out=out)
        assert torch.equal(out.cpu(), x[[1, -1, 2]])


def test_ids_from_the_cpu_do_not_make_the_host_wait(no_waiting):
    x = weights(20_000)
    with CompressedTable.from_tensor(x) as table:
        ids = torch.randint(20_000, (5000,))
        out = torch.zeros(5000, 256, dtype=x.dtype, device="cuda")
        for _ in range(2):
            table.gather(ids, out=out)
        torch.cuda.synchronize()
        with no_waiting():
            for _ in range(10):
                table.gather(ids, out=out)
        assert torch.equal(out.cpu(), x[ids])


def test_strided_ids_are_read_as_they_are():
    x = weights()
    pairs = torch.randint(4096, (500, 2), device="cuda")
    one = torch.tensor([17], device="cuda").expand(300)
    u = bitslab.unified(x)
    with CompressedTable.from_tensor(x) as table:
        for ids in (pairs[:, 0], pairs[:, 1], one):
            expected = x[ids.cpu()]
            assert torch.equal(table.gather(ids).cpu(), expected)
            assert torch.equal(u[ids].cpu(), expected)
            assert torch.equal(torch.index_select(u, 0, ids).cpu(), expected)


def test_bad_ids_of_one_do_not_stop_the_updates_of_another():
    x = weights()
    with CompressedTable.from_tensor(x) as table, CompressedTable.from_tensor(x) as other:
        cache = SlabCache(table, x.nbytes // 4)
        cache.fill(torch.arange(500))
        other.gather(torch.tensor([99_999], device="cuda"))
        torch.cuda.synchronize()
        table.update(torch.arange(10), torch.ones(10, 256, dtype=x.dtype))
        cache.refresh(torch.arange(400))
        with pytest.raises(bitslab.IndexRangeError):
            bitslab.raise_pending_errors()
        assert (cache.gather(torch.arange(10, device="cuda")) == 1).all()


def test_a_ring_loses_no_batch_to_a_bad_one():
    x = weights()
    with CompressedTable.from_tensor(x) as table:
        cache = SlabCache(table, x.nbytes // 4)
        cache.fill(torch.arange(4096))
        for source in (table, cache, bitslab.unified(x)):
            batches = [torch.randint(4096, (n,)) for n in (50, 60, 70, 80)]
            batches[1][7] = 5000
            with bitslab.PrefetchRing(source, batches, device="cuda") as ring:
                assert torch.equal(ring.get().cpu(), x[batches[0]])
                with pytest.raises(bitslab.IndexRangeError, match="5000 at position 7"):
                    ring.get()
                for ids in batches[2:]:
                    assert torch.equal(ring.get().cpu(), x[ids])


def test_stats_of_raw_and_packed_tables_give_advice():
    x = weights()
    for codec in ("auto", "raw"):
        with CompressedTable.from_tensor(x, codec=codec) as table:
            table.gather(torch.arange(5, device="cuda"))
            advice = table.stats()["advice"]["cuda:0"]
            assert isinstance(advice["sort"], bool) and advice["reasons"]["sort"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_refresh_runs_concurrently_with_readers_on_another_gpu():
    x = weights(20_000)
    with CompressedTable.from_tensor(x) as table:
        cache = SlabCache(table, x.nbytes // 8, ["cuda:0", "cuda:1"])
        cache.fill(torch.arange(20_000))
        here = x.to("cuda:0")
        junk = []
        for _ in range(30):
            ids = torch.randint(20_000, (9000,), device="cuda:0")
            torch.cuda._sleep(2_000_000)
            got = cache.gather(ids)
            cache.refresh(torch.randperm(20_000))
            junk = [
                torch.full((1 << 18,), -1, dtype=torch.int32, device="cuda:1") for _ in range(8)
            ]
            assert torch.equal(got, here[ids])
        assert junk
