"""Caches by handle, in the process that made it; tests/tables/test_ranks.py has two processes."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch

from bitslab import (
    ArgumentError,
    ArgumentTypeError,
    BitslabError,
    CompressedTable,
    InvariantCodec,
    SlabCache,
)
from tests.helpers import same_bits
from tests.tables.kinds import KINDS, make, weights
from tests.tables.support import inode_at, open_files


def filled(table: CompressedTable, **options: Any) -> SlabCache:
    cache = SlabCache(table, 6000, ["cpu", "cpu"], **options)
    cache.fill(torch.arange(0, len(table), 2))
    return cache


@pytest.mark.parametrize("kind", [*KINDS, "raw, packed cache"])
def test_an_attached_cache_has_the_same_slabs(kind):
    x = weights(200)
    table = make(x, kind.split(",")[0])
    cache = filled(table, codec="ibp" if kind not in KINDS else None)
    for attached in (
        SlabCache.attach(table, cache.handle(), "cpu"),
        SlabCache.attach(CompressedTable.attach(table.handle()), cache.handle()),
    ):
        assert same_bits(attached.gather(torch.arange(-200, 200)), torch.cat([x, x]))
        stats = attached.stats()
        assert stats["hits"] == 2 * cache.stats()["cached_rows"] > 0
        for name in ("cached_rows", "codec", "capacity_bytes", "slab_bytes", "map_bytes"):
            assert stats[name] == cache.stats()[name]
        inodes = [
            [inode_at(slab.data_ptr()) for slab in c._snapshot.slabs.words]
            for c in (cache, attached)
        ]
        assert inodes[0] == inodes[1]
        assert attached.codec == cache.codec and attached.devices == (torch.device("cpu"),)


def test_a_shared_cache_and_its_table_are_read_only():
    x = weights(100)
    table = make(x, "raw")
    cache = filled(table)
    attached = SlabCache.attach(table, cache.handle())
    for one in (cache, attached):
        with pytest.raises(BitslabError, match="fill: this cache is shared"):
            one.refresh(torch.arange(10))
    with pytest.raises(BitslabError, match="shared with other processes"):
        table.update(torch.tensor([1]), x[:1])
    with pytest.raises(BitslabError, match="handle: this cache is attached"):
        attached.handle()
    # Memory that other processes have mapped is kept.
    cache.close()
    assert same_bits(attached.gather(torch.arange(100)), x)
    attached.close()
    for use in (attached.handle, cache.handle, lambda: attached.gather(torch.arange(3))):
        with pytest.raises(BitslabError, match="cache: is closed"):
            use()
    assert same_bits(table[:], x)


def test_the_handle_of_a_deleted_cache_is_refused():
    table = make(weights(100), "compact")
    cache = filled(table)
    handle = cache.handle()
    cache.close()
    with pytest.raises(ArgumentError, match="leads to no memory"):
        SlabCache.attach(table, handle)


def test_slabs_leave_no_file_open():
    table = make(weights(100), "compact")
    before = open_files()
    for _ in range(3):
        with filled(table) as cache:
            cache.refresh(torch.arange(50))
            SlabCache.attach(table, cache.handle()).close()
            assert open_files() - before
        table._ownership.read_only = False
    del cache
    assert not open_files() - before


def test_the_table_must_be_the_same():
    x = weights(100)
    table = make(x, "raw")
    handle = filled(table).handle()
    for other in (make(x, "raw"), pickle.loads(pickle.dumps(table))):
        with pytest.raises(ArgumentError, match="of a cache over another table"):
            SlabCache.attach(other, handle)
        other.update(torch.tensor([1]), x[:1])
    with pytest.raises(ArgumentTypeError, match="table: expected a CompressedTable, got Tensor"):
        SlabCache.attach(x, handle)  # type: ignore[arg-type]


def test_a_mapped_table_is_the_same_in_all_processes(tmp_path):
    x = weights(100)
    make(x, "compact").save(tmp_path / "table")
    tables = [CompressedTable.from_file(tmp_path / "table", pin=False) for _ in range(2)]
    cache = filled(tables[0])
    attached = SlabCache.attach(tables[1], cache.handle())
    assert attached.stats()["cached_rows"] == 50
    assert same_bits(attached.gather(torch.arange(100)), x)


BROKEN = {
    "number": lambda state: 5,
    "null": lambda state: None,
    "list": lambda state: [],
    "version": lambda state: state | {"version": 99},
    "no-slabs-key": lambda state: {k: v for k, v in state.items() if k != "slabs"},
    "no-slabs": lambda state: state | {"slabs": []},
    "nine-slabs": lambda state: state | {"slabs": 9 * state["slabs"][:1]},
    "slab": lambda state: state | {"slabs": ["nonsense"]},
    "slab-number": lambda state: state | {"slabs": [7]},
    "gpu-slabs": lambda state: state | {"slabs": [{"gpu": "GPU-1"}]},
    "map": lambda state: state | {"maps": {"entries": "nonsense"}},
    "no-map": lambda state: state | {"maps": {}},
    "no-mapping": lambda state: state | {"maps": 7},
    "not-a-map": lambda state: state | {"maps": {"entries": state["slabs"][0]}},
    "no-clusters": lambda state: state | {"maps": {"entries": state["maps"]["entries"]}},
    "rows": lambda state: state | {"cached_rows": "many"},
    "codec": lambda state: state | {"packer": {"row_shape": [64]}},
    "codec-of-others": lambda state: state | {"packer": state["packer"] | {"row_shape": [32, 2]}},
}


def test_a_handle_of_an_older_version_is_named_as_one():
    x = weights(100)
    table = make(x, "compact")
    state = json.loads(filled(table).handle())
    older = {name: value for name, value in state.items() if name != "codec"} | {"version": 2}
    with pytest.raises(ArgumentError, match="handle: version 2, this bitslab reads 3"):
        SlabCache.attach(table, json.dumps(older), "cpu")


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_handle_that_is_none_is_refused(change):
    x = torch.arange(100 * 64, dtype=torch.int32).view(100, 64) % 1000
    x[::2] <<= 16
    table = make(x, "raw")
    codec = InvariantCodec.fit(x, clusters=2)
    assert codec.clusters == 2
    cache = filled(table, codec=codec)
    state = json.loads(cache.handle())
    with pytest.raises(ArgumentError):
        SlabCache.attach(table, json.dumps(change(state)), "cpu")
    for text in ("", "{", None, 7):
        with pytest.raises(ArgumentError, match="is not from SlabCache.handle"):
            SlabCache.attach(table, text)  # type: ignore[arg-type]
    assert same_bits(SlabCache.attach(table, json.dumps(state)).gather(torch.arange(100)), x)
