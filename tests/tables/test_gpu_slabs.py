"""Slabs on real GPUs: rows packed for a cache alone, and slabs that several processes read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bitslab
from bitslab import CompressedTable, InvariantCodec, SlabCache
from tests.helpers import dtype_id, packable, random_bits, same_bits, take
from tests.tables.kinds import weights

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU


def mixed(dtype: torch.dtype, n: int, columns: int) -> torch.Tensor:
    """Return rows of which every fifth cannot be packed."""
    x = packable(dtype, (n, columns))
    x[::5] = random_bits(dtype, (len(x[::5]), columns))
    return x


@pytest.mark.parametrize("clusters", [1, 2], ids=["one-profile", "clusters"])
@pytest.mark.parametrize("columns", [1, 7, 64, 333, 3000, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_id)
def test_a_raw_table_with_a_packed_cache_gives_its_rows(dtype, columns, clusters):
    x = mixed(dtype, 300, columns)
    if clusters > 1:
        x[::2] = x[::2].view(torch.uint8).roll(1, 1).view(dtype)
    codec = InvariantCodec.fit(x, clusters=clusters)
    with CompressedTable.from_tensor(x, codec="raw") as table:
        capacity = max(64, x.nbytes // 3)
        caches = [SlabCache(table, capacity, [d], codec=codec) for d in ("cuda", "cpu")]
        hot = torch.randperm(300)
        assert caches[0].fill(hot.cuda()) == caches[1].fill(hot)
        slabs = [cache._snapshot.slabs.words[0].cpu() for cache in caches]
        assert torch.equal(slabs[0], slabs[1])
        ids = torch.randint(-300, 300, (777,))
        for cache, some in zip(caches, (ids.cuda(), ids), strict=True):
            for sort in (None, True):
                assert same_bits(cache.gather(some, sort=sort).cpu(), take(x, ids % 300))
        stats = [cache.stats() for cache in caches]
        for name in ("hits", "misses", "local_bytes", "host_bytes", "map_bytes", "codec"):
            assert stats[0][name] == stats[1][name]
        table.update(torch.arange(50), x[50:100])
        x[:50] = x[50:100]
        gathered = caches[0].gather(torch.arange(300, device="cuda"))
        assert same_bits(gathered.cpu(), x)
        assert caches[0].stats()["cached_rows"] == caches[1].stats()["cached_rows"]
        caches[0].refresh(torch.arange(300))
        assert same_bits(caches[0].gather(ids.cuda()).cpu(), take(x, ids % 300))


def test_gathers_of_a_packed_cache_neither_wait_nor_allocate(no_waiting):
    x = (torch.randn(20_000, 256) * 0.02).bfloat16()
    with CompressedTable.from_tensor(x, codec="raw") as table:
        cache = SlabCache(table, x.nbytes // 4, codec="auto")
        assert cache.fill(torch.randperm(20_000)) > 1.2 * 5000
        batches = [torch.randint(20_000, (5000,), device="cuda") for _ in range(20)]
        out = torch.zeros(5000, 256, dtype=x.dtype, device="cuda")
        cache.gather(batches[0], out=out)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with no_waiting():
            for ids in batches:
                cache.gather(ids, out=out)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert torch.equal(out.cpu(), x[batches[-1].cpu()])


RANK = """
import json, sys
root, rank, folder, backend, gpus = sys.argv[1:]
rank = int(rank)
sys.path.insert(0, root)
import torch, torch.distributed as dist
import bitslab
from bitslab import CompressedTable, SlabCache
from bitslab.tables import ranks
from tests.helpers import same_bits
from tests.tables.kinds import weights

device = torch.device("cuda", int(gpus.split(",")[rank]))
torch.cuda.set_device(device)
dist.init_process_group(
    backend, store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2
)
group, x, seen = dist.group.WORLD, weights(20_000), []
for codec, packer in (("auto", None), ("raw", None), ("raw", "auto")):
    table = ranks.share_table(
        lambda: CompressedTable.from_tensor(x, codec=codec, progress=False), group
    )
    def fill(devices):
        cache = SlabCache(table, x.nbytes // 8, devices, codec=packer)
        cache.fill(torch.randperm(20_000))
        return cache
    cache = ranks.share_cache(table, fill, group, device)
    for turn in range(20):
        ids = torch.randint(-20_000, 20_000, (9000,), device=device)
        assert same_bits(cache.gather(ids).cpu(), x[ids.cpu()])
    stats = cache.stats()
    dist.barrier()
    if rank:
        cache.close()
    dist.barrier()  # the slabs belong to rank 0
    cache.close()
    seen.append(stats)
bitslab.raise_pending_errors()
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(seen, file)
dist.destroy_process_group()
"""


def run_ranks(folder: Path, backend: str, gpus: str) -> list[list[dict[str, int]]]:
    """Run two ranks; return the results of each for the three caches."""
    root = str(Path(__file__).parents[2])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, root, str(rank), str(folder), backend, gpus],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_two_processes_read_one_slab_of_one_gpu(tmp_path):
    for caches in zip(*run_ranks(tmp_path, "gloo", "0,0"), strict=True):
        assert (
            caches[0]["slab_bytes"] == caches[1]["slab_bytes"] and len(caches[0]["slab_bytes"]) == 1
        )
        for stats in caches:
            assert stats["local_bytes"] and stats["host_bytes"] and not stats["peer_bytes"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_processes_with_a_gpu_each_read_the_slabs_of_both_gpus(tmp_path, backend):
    for caches in zip(*run_ranks(tmp_path, backend, "1,0"), strict=True):
        for stats in caches:
            assert len(stats["slab_bytes"]) == 2
            assert stats["local_bytes"] and stats["peer_bytes"] and stats["host_bytes"]


def test_a_cache_on_a_gpu_cannot_be_attached_to_from_the_cpu():
    with CompressedTable.from_tensor(weights(1000)) as table:
        cache = SlabCache(table, 10_000)
        cache.fill(torch.arange(1000))
        handle = cache.handle()
        with pytest.raises(bitslab.ArgumentError, match="device: cpu, but the slabs .* on GPUs"):
            SlabCache.attach(table, handle, "cpu")
        state = json.loads(handle)
        state["slabs"][0]["gpu"] = "nonsense"
        with pytest.raises(bitslab.ArgumentError, match="handle: GPU nonsense is none of the"):
            SlabCache.attach(table, json.dumps(state))
