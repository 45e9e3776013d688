"""Packed rows that a GPU writes back into their table by itself, without the host."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
import pytest
import torch

from bitslab import BitslabError, CompressedTable, SlabCache
from bitslab.embedding import store
from bitslab.engine.memory.host import HostBuffer
from bitslab.tables.gpu_writes import GpuWrites
from bitslab.tables.overflow import Overflow
from tests.embedding.on_device import on_simulated_gpu
from tests.embedding.support import OPTIMIZERS, Pair
from tests.helpers import same_bits

N_ROWS, DIM = 60, 24


def made(optimizer: str = "sgd-sparse", cache_rows: int = 8, **options) -> Pair:
    """Rows long enough to be packed one by one."""
    defaults: dict[str, Any] = {"warmup_ratio": 1.0, "exact": True, "codec": "ibp"}
    return Pair(N_ROWS, cache_rows, DIM, optimizer=optimizer, **defaults | options)


def drawn(seed: int, n_batches: int, most: int = 12) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [
        generator.integers(0, N_ROWS, generator.integers(1, most)).tolist()
        for _ in range(n_batches)
    ]


def scale(pair: Pair, ids: list[int], factor: float):
    """Take a step that moves rows to other exponents, so that they no longer fit their places."""
    pair.backward(ids)
    for parameter in (pair.plain, pair.rows.parameter):
        assert parameter.grad is not None
        parameter.grad = parameter.grad * factor
    pair.step()


def writes_of(pair: Pair) -> GpuWrites:
    found = writes_or_none(pair)
    assert found is not None
    return found


def writes_or_none(pair: Pair) -> GpuWrites | None:
    assert pair.rows.exchange is not None
    return pair.rows.exchange._writes


def overflow_of(pair: Pair) -> Overflow:
    found = pair.rows.table._rows.overflow
    assert found is not None
    return found


def rows_in_slots(pair: Pair) -> torch.Tensor:
    assert pair.rows.device_slots is not None
    return pair.rows.device_slots.columns.row_in


def refused(*args, **kwargs):
    raise AssertionError("the host was asked")


@contextlib.contextmanager
def without_the_host():
    """Refuse that the host packs rows into a table, or looks at what a GPU has packed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompressedTable, "update", refused)
        patch.setattr(GpuWrites, "finish", refused)
        yield


@pytest.mark.parametrize("layout", ["compact", "inplace"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_are_those_of_a_plain_parameter(runner, optimizer, layout):
    pair = made(optimizer, layout=layout)
    pair.train(range(11))  # which allocates
    batches = drawn(1, 8)
    with without_the_host():
        for ids in batches:
            pair.train(ids)
            assert pair.rows.owned_by_device
    runner.launched.clear()
    pair.train(batches[0])
    kernels = [kernel for _, kernel in runner.launched]
    lookup = ["claim_slots", "count_slots", "choose_slots", "gather_short_rows", "rewrite_rows"]
    assert kernels == [*lookup, "exchange_rows", "give_slots"]
    pair.check()
    assert pair.rows.stats()["written_back"] > 10
    pair.rows.flush()
    assert same_bits(pair.rows.table.decoded(0, N_ROWS), pair.plain)
    pair.check()


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_outgrow_their_place_are_not_lost(seed):
    pair = made(cache_rows=5)
    most = 0
    with on_simulated_gpu(twins=True):
        for number, ids in enumerate(drawn(seed, 60)):
            scale(pair, ids, (1.0, 1e3, 1e-3, 1e18)[number % 4])
            if number % 9 == 8:
                moved = pair.rows.table.stats()["moved_rows"]
                assert same_bits(pair.rows.whole(), pair.plain)
                assert moved == pair.rows.table.stats()["moved_rows"]
                most = max(most, moved)
    assert most > 5
    pair.check()


def test_rows_go_back_to_their_place_and_leave_room_to_others(runner):
    """As often as they outgrow it, they take no more than there are of them."""
    pair = made(cache_rows=4)
    weight = pair.plain.detach().clone()
    for number in range(12):
        ids = torch.arange(12) + 12 * (number % 3)
        exponents = torch.randint(-30, 30, (12, DIM), generator=pair.generator)
        wanted = weight[ids] if number % 2 else weight[ids] * 10.0**exponents
        pair.backward(ids.tolist())
        for parameter in (pair.plain, pair.rows.parameter):
            at = ids
            if parameter is not pair.plain:
                row_in = rows_in_slots(pair)
                at = torch.tensor([int((row_in == row).nonzero()[0, 0]) for row in ids])
            step = (parameter.data[at] - wanted) * 10
            parameter.grad = torch.sparse_coo_tensor(at[None], step, parameter.shape)
        pair.step()
    pair.train(range(40, 60))
    pair.check()
    overflow = overflow_of(pair)
    assert 0 < overflow.rows and overflow.used <= 36


def test_the_host_hears_of_what_the_device_has_written(runner):
    pair = made(cache_rows=4)
    for ids in drawn(3, 12):
        scale(pair, ids, 1e12)
    pair.train((50, 51, 52, 53), (54, 55, 56, 57))
    held = set(rows_in_slots(pair).tolist())
    left = torch.tensor([row for row in range(N_ROWS) if row not in held])
    table, plain = pair.rows.table, pair.plain.detach()
    assert writes_of(pair)._pending
    assert same_bits(table.gather(left), plain[left])
    assert not writes_of(pair)._pending
    scale(pair, [1, 2, 3], 1e-12)
    pair.train((40, 41, 42))
    moved = table.stats()["moved_rows"]
    assert moved == overflow_of(pair).rows > 0
    assert same_bits(copy.deepcopy(pair.rows).whole(), pair.plain)
    pair.check()


@pytest.mark.parametrize("layout", ["compact", "inplace"])
def test_updates_by_the_host_and_by_the_device_take_turns(runner, layout):
    pair = made(cache_rows=5, layout=layout)
    for number, ids in enumerate(drawn(5, 24)):
        scale(pair, ids, (1e6, 1.0, 1e-6)[number % 3])
        if number % 4 == 3:
            fresh = torch.randn(10, DIM, generator=pair.generator) * 10.0**number
            pair.rows.load(fresh, number)
            pair.plain.data[number : number + 10] = fresh
        if number % 6 == 5:
            pair.check()
    pair.check()


def test_the_overflow_area_grows_before_it_is_full(runner, monkeypatch):
    monkeypatch.setattr("bitslab.tables.overflow.FIRST_BYTES", 0)
    monkeypatch.setattr("bitslab.tables.gpu_writes.BATCHES_AHEAD", 1)
    pair = made(cache_rows=4)
    sizes = []
    for number in range(14):
        scale(pair, list(range(4 * number, 4 * number + 4)), 1e15)
        overflow = overflow_of(pair)
        sizes.append(overflow.capacity)
        assert writes_of(pair)._used <= overflow.capacity
    assert len(set(sizes)) > 3 and sizes == sorted(sizes) and sizes[-1] < N_ROWS + 20
    pair.check()


@pytest.mark.parametrize("cache_rows", [4, 25])
def test_no_step_packs_the_table_again_but_a_flush_does(runner, monkeypatch, cache_rows):
    """That is a pass over all rows, which takes seconds of a large table."""
    monkeypatch.setattr(store, "REPACK_BYTES", 0)
    monkeypatch.setattr("bitslab.tables.overflow.FIRST_BYTES", 0)
    pair, n = made(cache_rows=cache_rows), cache_rows + 1
    with monkeypatch.context() as patch:
        patch.setattr(CompressedTable, "compact", refused)
        for number in range(200 // n):
            scale(pair, [(n * number + k) % N_ROWS for k in range(n)], 1e15)
    moved = pair.rows.table.stats()["moved_rows"]
    assert moved > N_ROWS / 2 and overflow_of(pair).capacity <= N_ROWS
    pair.rows.flush()
    assert pair.rows.table.stats()["moved_rows"] < N_ROWS / 10  # of the last rows written back
    scale(pair, [1, 2, 3], 1e15)
    assert writes_or_none(pair) is not None
    pair.check()


@pytest.mark.parametrize(("tables", "packs"), [(2.0, True), (0.9, False)], ids=["short", "none"])
def test_a_step_packs_the_table_again_where_memory_is_short(runner, monkeypatch, tables, packs):
    """And there is enough for a second table."""
    monkeypatch.setattr(store, "REPACK_BYTES", 0)
    monkeypatch.setattr("bitslab.tables.overflow.FIRST_BYTES", 0)
    pair = made(cache_rows=4)
    moved, was = [], CompressedTable.compact

    def compact(self, *args, **kwargs):
        moved.append(writes_of(pair).outgrown_bytes)
        was(self, *args, **kwargs)

    monkeypatch.setattr(CompressedTable, "compact", compact)
    monkeypatch.setattr(store, "available_bytes", lambda: tables * pair.rows.table.nbytes)
    for number in range(40):
        scale(pair, [(5 * number + k) % N_ROWS for k in range(5)], 1e15)
    assert (1 <= len(moved) < 10) == packs and bool(moved) == packs
    assert all(2 * each > pair.rows.table.nbytes / 2 for each in moved)
    pair.check()


def test_a_flush_packs_the_table_for_rows_that_have_moved_not_for_places(runner, monkeypatch):
    monkeypatch.setattr(CompressedTable, "compact", refused)
    pair = made(cache_rows=20)
    for ids in drawn(3, 4, most=20):
        scale(pair, ids, 1e-12)  # which changes too little to move any
        pair.rows.flush()
    scale(pair, [1], 1e15)
    pair.rows.flush()
    assert overflow_of(pair).capacity > 7 and overflow_of(pair).rows == 1
    pair.check()


@pytest.mark.parametrize("lacks", ["memory", "locking"])
def test_where_memory_for_outgrown_rows_lacks_nothing_is_lost(runner, monkeypatch, lacks):
    monkeypatch.setattr("bitslab.tables.overflow.FIRST_BYTES", 0)
    monkeypatch.setattr("bitslab.tables.gpu_writes.BATCHES_AHEAD", 1)
    pair, most = made(cache_rows=4), 4 * 9 * DIM
    allocate, locked = HostBuffer.allocate, GpuWrites._check_locked

    def refuse(nbytes, **options):
        if nbytes > most:
            raise BitslabError("nbytes: none are available")
        return allocate(nbytes, **options)

    def refuse_lock(self, memory):
        if memory.nbytes > most:
            raise BitslabError("table: could not be page-locked")
        locked(self, memory)

    with monkeypatch.context() as patch:
        if lacks == "memory":
            patch.setattr(HostBuffer, "allocate", refuse)
        else:
            patch.setattr(GpuWrites, "_check_locked", refuse_lock)
        failed = 0
        for number in range(12):
            before = pair.plain.detach().clone()
            try:
                scale(pair, [(3 * number + k) % N_ROWS for k in range(3)], 1e15)
            except BitslabError:
                failed += 1
                pair.plain.data.copy_(before)
                pair.plain.grad = pair.rows.parameter.grad = None
        assert 0 < failed < 12
    pair.check()
    scale(pair, [40, 41, 42], 1e15)
    pair.check()


def test_rows_with_copies_elsewhere_are_packed_by_the_host(runner):
    pair = made(cache_rows=4)
    pair.train((1, 2), (3, 4))
    assert writes_or_none(pair) is not None
    table = pair.rows.table
    cache = SlabCache(table, 8 << 10, ["cpu"])
    cache.fill(torch.arange(20))
    for ids in drawn(7, 10):
        scale(pair, ids, 1e3)
    assert writes_or_none(pair) is None
    pair.train((50, 51, 52, 53), (54, 55, 56, 57))
    pair.rows.flush()
    assert same_bits(cache.gather(torch.arange(N_ROWS)), pair.plain)
    cache.close()
    del cache
    pair.train(*drawn(8, 6))
    assert writes_or_none(pair) is not None
    pair.check()
