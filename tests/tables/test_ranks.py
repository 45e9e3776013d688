"""Tables and caches shared by the ranks of a machine: one run of two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bitslab import ArgumentError, CompressedTable, SlabCache
from bitslab.tables import ranks
from tests.forked import run_forked_together
from tests.tables.kinds import make, weights

RANK = """
import json, sys
root, rank, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sys.path.insert(0, root)
from datetime import timedelta
import torch, torch.distributed as dist
from bitslab import BitslabError, CompressedTable, SlabCache
from bitslab.tables import ranks
from tests.helpers import same_bits
from tests.tables.kinds import make, weights
from tests.tables.support import inode_at

dist.init_process_group(
    "gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2,
    timeout=timedelta(seconds=60),
)
group, seen, built = dist.group.WORLD, {}, []
x = weights(3000, 16)

def error_of(work):
    try:
        work()
    except BitslabError as error:
        return str(error)

def build():
    built.append("table")
    return make(x, "raw")

table = ranks.share_table(build, group)
seen["inode"] = inode_at(table._parts.tensors["words"].data_ptr())
seen["equal"] = same_bits(table[:], x)
seen["update"] = error_of(lambda: table.update(torch.tensor([1]), x[:1]))

def fill(devices):
    built.append([str(device) for device in devices])
    cache = SlabCache(table, 16 << 10, devices, codec="auto")
    cache.fill(torch.arange(0, 3000, 2))
    return cache

cache = ranks.share_cache(table, fill, group, "cpu")
seen["slabs"] = [inode_at(slab.data_ptr()) for slab in cache._snapshot.slabs.words]
seen["cached"] = same_bits(cache.gather(torch.arange(-3000, 3000)), torch.cat([x, x]))
seen["stats"] = cache.stats()
seen["fill"] = error_of(lambda: cache.fill(torch.arange(5)))
seen["handle"] = error_of(cache.handle)
seen["built"] = list(built)

def fails():
    raise ValueError("no such file")
seen["build fails"] = error_of(lambda: ranks.share_table(fails, group))
if rank == 1:
    table = make(x, "raw")  # another one
seen["attach fails"] = error_of(lambda: ranks.share_cache(table, fill, group, "cpu"))

def interrupted():
    raise KeyboardInterrupt
try:
    seen["interrupt"] = error_of(lambda: ranks.share_table(interrupted, group))
except KeyboardInterrupt:
    seen["interrupt"] = "interrupted"

ranks._machine = lambda: (str(rank),)
built.clear()
own = ranks.share_table(build, group)
own.update(torch.tensor([1]), x[:1])
seen["apart"] = [len(built), same_bits(own[1], x[0])]
alone = dist.new_group([0])
seen["not in it"] = error_of(lambda: ranks.share_table(build, alone).close())
seen["no group"] = error_of(lambda: ranks.share_table(build, "world"))
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(seen, file)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict[str, Any]]:
    """Results of each of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    root = str(Path(__file__).parents[2])
    done = run_forked_together(
        [["-c", RANK, root, str(rank), folder] for rank in range(2)], timeout_s=120
    )
    assert [each.returncode for each in done] == [0, 0], "\n".join(each.stderr for each in done)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_ranks_have_one_copy_of_the_table_which_one_built(seen):
    assert seen[0]["inode"] == seen[1]["inode"]
    assert seen[0]["equal"] and seen[1]["equal"]
    assert [rank["built"] for rank in seen] == [["table", ["cpu", "cpu"]], []]
    for rank in seen:
        assert "shared with other processes" in rank["update"]


def test_ranks_read_the_same_slabs(seen):
    assert seen[0]["slabs"] == seen[1]["slabs"] and len(set(seen[0]["slabs"])) == 2
    for rank in seen:
        assert rank["cached"]
        stats = rank["stats"]
        # Each counts its own reads.
        assert stats["hits"] == 2 * stats["cached_rows"] > 2 * 2 * (16 << 10) // 64
        assert stats["hits"] + stats["misses"] == 6000
        assert stats["local_bytes"] == 2 * sum(stats["slab_bytes"])
        assert stats["host_bytes"] == 64 * stats["misses"]
        assert "shared with other processes" in rank["fill"]
    assert seen[0]["stats"] == seen[1]["stats"]
    assert seen[0]["handle"] is None and "is attached" in seen[1]["handle"]


def test_what_fails_on_one_rank_is_reported_on_all(seen):
    for rank in seen:
        assert rank["build fails"] == (
            "share_table: rank 0 of the group failed: ValueError: no such file"
        )
        assert rank["attach fails"].startswith(
            "share_cache: rank 1 of the group failed: ArgumentError: handle: of a cache over "
            "another table"
        )
    assert seen[0]["interrupt"] == "interrupted"
    assert "rank 0 of the group failed: KeyboardInterrupt" in seen[1]["interrupt"]


def test_ranks_on_two_machines_build_for_themselves(seen):
    assert [rank["apart"] for rank in seen] == [[1, True], [1, True]]


def test_a_process_alone_builds():
    x = weights(100, 16)
    table = ranks.share_table(lambda: make(x, "compact"))
    table.update(torch.tensor([1]), x[:1])

    def build(devices: list[torch.device]) -> SlabCache:
        assert devices == [torch.device("cpu")]
        return SlabCache(table, 3000, devices)

    assert ranks.share_cache(table, build, device="cpu").fill(torch.arange(100)) > 0


def test_a_group_that_is_none_or_anothers_is_refused(seen):
    assert [rank["not in it"] for rank in seen] == [None, "group: this process is not in it"]
    for rank in seen:
        assert rank["no group"].startswith("group: 'world' is no process group")

    def build() -> CompressedTable:
        raise AssertionError("must not be built")

    with pytest.raises(ArgumentError, match="group: torch.distributed is not initialised"):
        ranks.share_table(build, "world")
