"""CacheOptions: one set of options for every module that owns a packed table."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bitslab import CompressedTable
from bitslab.embedding import CacheOptions, EvictionStrategy
from bitslab.errors import BitslabError

BAD = {
    "ratio": ({"cache_ratio": 0}, "cache_ratio: 0, accepted"),
    "ratio-type": ({"cache_ratio": True}, "cache_ratio: True, accepted"),
    "cache": ({"cache": "slabs"}, "cache: 'slabs', accepted"),
    "evict": ({"evict": "lru"}, "evict: expected an EvictionStrategy"),
    "warmup": ({"warmup_ratio": 1.5}, "warmup_ratio: 1.5, accepted"),
    "buffer": ({"buffer_rows": -1}, "buffer_rows: -1, accepted"),
    "layout": ({"layout": "rows"}, "layout: 'rows', accepted"),
}


@pytest.mark.parametrize(("options", "says"), BAD.values(), ids=BAD)
def test_bad_options_are_refused_when_they_are_made(options, says):
    with pytest.raises(BitslabError, match=says):
        CacheOptions(**options)


def test_replaced_options_are_checked_too():
    with pytest.raises(BitslabError, match="cache_ratio: 2"):
        dataclasses.replace(CacheOptions(), cache_ratio=2)


@pytest.mark.parametrize("packed", [False, True], ids=["tensor", "table"])
def test_every_option_reaches_the_rows(packed):
    weight = torch.randn(20, 4)
    options = CacheOptions(
        cache_ratio=0.5,
        evict=EvictionStrategy.LRU,
        warmup_ratio=0.5,
        buffer_rows=3,
        codec="raw",
        layout="inplace",
    )
    source = CompressedTable.from_tensor(weight) if packed else weight
    rows = options.pack(source, 20, device="cpu", trainable=False, pinned_ids=[19])
    assert torch.equal(rows.whole(), weight)
    assert (rows.cache_rows, rows.buffer_rows, rows.trainable) == (11, 3, False)
    assert rows.slot_table.evict is EvictionStrategy.LRU
    assert len(rows.slot_table.resident()) == 6  # row 19, and half of the 10 others
    assert rows.slot_table.slot_of[19] >= 0
    if not packed:  # a table is used as it is
        assert (rows.table.codec.name, rows.table.layout) == ("raw", "inplace")
