"""Rows that a GPU fetches by itself for lookups whose ids the host does not read.

The CPU stands for the GPU here, with the GPU's own kernels behind it.
"""

from __future__ import annotations

import contextlib
import copy
import pickle

import numpy as np
import pytest
import torch

from bitslab import SlabCache
from bitslab.embedding import EvictionStrategy, device_slots, ownership
from bitslab.engine.kernels.cuda.runner import INDEX_ERROR
from bitslab.errors import BitslabError
from bitslab.integrations.embedding import CachedEmbeddingBag
from tests.embedding.on_device import (
    CACHE_ROWS,
    N_ROWS,
    check_gpu_map,
    drawn,
    made,
    on_simulated_gpu,
)
from tests.embedding.support import OPTIMIZERS, check_map
from tests.helpers import same_bits

CODECS = {"packed": "ibp", "raw": "raw"}


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_are_those_of_a_plain_parameter(runner, optimizer, codec):
    pair = made(optimizer, codec=codec)
    for number, ids in enumerate(drawn(1, 15)):
        pair.train(ids)
        assert pair.rows.owned_by_device
        if number % 7 == 6:
            check_gpu_map(pair)
            pair.check()
    pair.check()
    pair.rows.flush()
    assert same_bits(pair.rows.table.decoded(0, N_ROWS), pair.plain)
    assert pair.rows.parameter.shape == (CACHE_ROWS, 4)
    pair.check()


@pytest.mark.parametrize("evict", EvictionStrategy)
def test_the_most_used_rows_are_kept(runner, evict):
    counts = list(range(N_ROWS, 0, -1)) if evict is EvictionStrategy.DATASET else None
    pair = made(evict=evict, counts=counts, cache_rows=6)
    for _ in range(6):
        pair.train((20, 21, 22), (20, 21), (30,), (31,), (32,), (33,))
    pair.rows.training.retire_steps()
    resident = set(np.flatnonzero(pair.rows.slot_table.slot_of >= 0).tolist())
    assert len(resident) == 6
    if evict is EvictionStrategy.DATASET:
        assert resident == {0, 1, 2, 20, 21, 33}
    else:
        assert {20, 21} <= resident
    pair.check()
    check_map(pair.rows)


@pytest.mark.drawn(5)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adagrad-sparse", "sparse-adam"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_else_happens_the_steps_are_those_of_a_plain_parameter(optimizer, seed):
    generator = np.random.default_rng(seed)
    evict = list(EvictionStrategy)[seed % 3]
    pair = made(optimizer, evict=evict, cache_rows=(3, 8, 15)[seed % 3], codec="ibp")
    pair.train((1, 2))

    def by(way, *batches):
        with on_simulated_gpu(twins=True) if way else contextlib.nullcontext():
            pair.train(*batches)

    def two_lookups():
        with on_simulated_gpu(twins=True):
            pair.backward(*drawn(int(generator.integers(1 << 30)), 2))
        pair.step()

    def mixed_lookups():
        first, second = drawn(int(generator.integers(1 << 30)), 2)
        with on_simulated_gpu(twins=True):
            one = pair.loss(first)
        other = pair.loss(second)
        for mine, theirs in zip(one, other, strict=True):
            (mine + theirs).backward()
        pair.step()

    def accumulated():
        with on_simulated_gpu(twins=True):
            for ids in drawn(int(generator.integers(1 << 30)), 3):
                pair.backward(ids)
        pair.step()

    def kept_gradients():
        with on_simulated_gpu(twins=True):
            pair.backward((3, 9, 30))
        pair.step(clear=False)
        pair.zero_grad(set_to_none=False)

    def dropped():
        with on_simulated_gpu(twins=True):
            pair.backward((5, 33))
        pair.zero_grad()

    def without_gradient():
        with on_simulated_gpu(twins=True), torch.no_grad():
            pair.rows.lookup(torch.tensor([7, 8, 39]), train=True)

    def evaluated():
        with torch.no_grad():
            pair.loss((1, 38), train=False)

    def loaded():
        fresh = torch.randn(10, 4, generator=pair.generator)
        pair.rows.load(fresh, 12)
        pair.plain.data[12:22] = fresh

    def copied():
        assert same_bits(copy.deepcopy(pair.rows).whole(), pair.plain)

    def fetched():
        with torch.no_grad():
            pair.rows.fetch(torch.tensor([11, 12]))

    what = [
        two_lookups,
        mixed_lookups,
        accumulated,
        kept_gradients,
        dropped,
        without_gradient,
        evaluated,
        loaded,
        copied,
        fetched,
        pair.check,
        lambda: check_gpu_map(pair),
        lambda: pair.rows.flush(),
        lambda: pair.rows.flush(evict=True),
        lambda: pair.rows.warm_up(),
        lambda: pair.rows.stats(),
    ]
    for ids in drawn(seed, 40):
        by(generator.random() < 0.8, ids)
        if generator.random() < 0.5:
            what[generator.integers(len(what))]()
    pair.check()
    check_gpu_map(pair)
    pair.rows.flush()
    assert same_bits(pair.rows.table.decoded(0, N_ROWS), pair.plain)


def test_rows_that_are_there_do_not_move(runner):
    pair = made()
    pair.train(range(7))
    changes = pair.rows.slot_table.changes
    for _ in range(50):
        pair.train((1, 5), (6, 0, 6))
    assert pair.rows.slot_table.changes == changes
    assert pair.rows.parameter.shape[0] == CACHE_ROWS
    pair.check()


def test_what_is_counted_is_what_the_host_counts():
    found = []
    batches = [(1, 2, 1), (30, 0, 31, 31), (1, 30), (2,), ()]
    for way in (on_simulated_gpu, contextlib.nullcontext):
        bag = CachedEmbeddingBag(N_ROWS, 4, cache_ratio=0.25, warmup_ratio=1.0, device="cpu")
        optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
        for ids in batches:
            with way():
                optimizer.zero_grad()
                bag(torch.tensor(ids, dtype=torch.int32), torch.arange(1)).sum().backward()
                optimizer.step()
        manager = bag.cache_weight_mgr
        histories = (manager.num_hits_history, manager.num_miss_history)
        stats = {name: bag.rows.stats()[name] for name in ("lookups", "hits", "misses")}
        bag.rows.flush()
        counts = dict(
            zip(manager.cached_idx_map.tolist(), manager.freq_cnter.tolist(), strict=True)
        )
        counts = {row: n for row, n in counts.items() if n}  # of the others any may leave
        found.append((histories, stats, counts, manager.cuda_cached_weight.shape))
    assert found[0] == found[1]
    assert found[0][0] == ([2, 1, 2, 1, 0], [0, 2, 0, 0, 0])


def waits(monkeypatch) -> list[int]:
    """Return a list that gets an entry for each time the host waits for the GPU."""
    found: list[int] = []
    wait = device_slots.wait_for_all

    def recorded(device):
        found.append(1)
        wait(device)

    monkeypatch.setattr(device_slots, "wait_for_all", recorded)
    return found


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
def test_the_host_never_waits_whatever_misses(runner, monkeypatch, codec):
    pair = made("adagrad", codec=codec)
    pair.train(range(3), range(10, 22))
    waited = waits(monkeypatch)
    pair.train(*drawn(7, 40))
    assert not waited and pair.rows.owned_by_device
    pair.check()


def test_a_lookup_is_a_fixed_number_of_launches(runner):
    pair = made("adagrad", codec="raw")
    pair.train(range(12), range(12))
    runner.launched.clear()
    pair.train((1, 2, 3), range(20, 32), (), (5,), (5, 5))
    names = [kernel for _, kernel in runner.launched]
    lookup = ["claim_slots", "count_slots", "choose_slots", "exchange_rows", "give_slots"]
    assert names == lookup * 4


def test_slots_are_added_for_the_ids_of_lookups_whose_gradient_waits(runner):
    pair = made()
    pair.train((1, 2), (3,))
    assert pair.rows.parameter.shape[0] == CACHE_ROWS
    pair.train(range(12))
    assert pair.rows.parameter.shape[0] == 16  # one more, and a quarter
    for _ in range(3):
        pair.backward(range(12), range(12, 24))
        pair.step()
    assert pair.rows.parameter.shape[0] == 31 and pair.rows.owned_by_device
    pair.train(range(N_ROWS), range(N_ROWS))
    assert pair.rows.parameter.shape[0] == N_ROWS + 1
    pair.check()
    pair.rows.training.retire_steps()
    assert pair.rows.parameter.shape[0] == CACHE_ROWS
    pair.check()


@pytest.mark.parametrize("evict", EvictionStrategy)
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
def test_rows_that_never_leave_do_not(runner, evict, codec):
    pair = made(evict=evict, codec=codec, pinned_ids=(7, 31))
    for ids in drawn(8, 12):
        pair.train(ids)
        check_gpu_map(pair)
        assert (pair.rows.slot_table.slot_of[[7, 31]] >= 0).all()
    pair.check()


def test_rows_that_have_not_changed_are_not_written_back(runner):
    pair = made(codec="raw", cache_rows=5)
    with torch.no_grad():
        for first in range(0, N_ROWS, 4):
            pair.rows.lookup(torch.arange(first, first + 4), train=True)
    assert pair.rows.stats()["written_back"] == 0
    pair.train((1, 2), (5, 6, 7, 8), (9, 10, 11, 12))
    history = pair.rows.statistics.written_back_history
    assert sum(history) == pair.rows.stats()["written_back"] and history[-1] >= 3
    pair.check()


def test_rows_that_are_written_back_are_on_the_host_when_it_looks(runner):
    """They are in the table itself, or wait in the outbox until it is asked for."""
    for codec in CODECS.values():
        pair = made(codec=codec, cache_rows=4, evict=EvictionStrategy.LRU)
        pair.train((1, 2, 3))
        with torch.no_grad():
            for first in (20, 23):
                pair.rows.lookup(torch.arange(first, first + 3), train=True)
        pair.rows.stats()
        ownership.sync_from_device(pair.rows)
        assert same_bits(pair.rows.table.decoded(0, N_ROWS), pair.plain)


def test_a_table_with_copies_elsewhere_is_changed_by_the_host(runner):
    pair = made(codec="raw", cache_rows=4)
    pair.train((1, 2, 3, 4))
    exchange = pair.rows.exchange
    assert exchange is not None and exchange.settle()
    cache = SlabCache(pair.rows.table, 1 << 12, ["cpu"])
    cache.fill(torch.arange(10))
    assert not exchange.settle()
    pair.train(*drawn(11, 6))
    pair.rows.flush()
    assert same_bits(cache.gather(torch.arange(N_ROWS), None, "cpu"), pair.plain)
    pair.check()


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad-sparse"])
def test_gradients_of_the_step_before_are_cleared_after_the_lookup(runner, optimizer):
    pair = made(optimizer)
    for ids in ((1, 2), (30, 31), (1, 32, 33, 34, 35), (1, 30)):
        losses = pair.loss(ids)
        pair.zero_grad()
        for loss in losses:
            loss.backward()
        pair.step(clear=False)
    pair.zero_grad()
    pair.check()


def test_gradients_that_are_not_cleared_are_reported(runner):
    pair = made(cache_rows=2)
    with pytest.raises(BitslabError, match="zero_grad"):
        for first in range(0, N_ROWS, 2):
            pair.backward((first, first + 1))
            for optimizer in pair.optimizers:
                optimizer.step()


def test_a_second_backward_reaches_rows_that_were_kept(runner):
    pair = made()
    losses = pair.loss((4, 5))
    for loss in losses:
        loss.backward(retain_graph=True)
    pair.step()
    pair.rows.flush()
    for loss in losses:
        loss.backward(retain_graph=True)
    pair.step()
    pair.check()


def test_a_second_backward_is_refused_when_its_rows_have_left(runner):
    pair = made(cache_rows=2)
    _, loss = pair.loss((4, 30))
    loss.backward(retain_graph=True)
    pair.optimizers[1].step()
    pair.zero_grad()
    with torch.no_grad():
        for first in range(0, N_ROWS, 2):
            pair.rows.lookup(torch.tensor([first, first + 1]), train=True)
    pair.rows.training.retire_steps()
    with pytest.raises(BitslabError, match="have left the cache"):
        loss.backward()


def test_rows_wait_for_their_gradient_however_long(runner):
    pair = made(cache_rows=2)
    losses = pair.loss((4, 30))
    with torch.no_grad():
        for first in range(0, N_ROWS, 2):
            pair.rows.lookup(torch.tensor([first, first + 1]), train=True)
    for loss in losses:
        loss.backward()
    with torch.no_grad():
        for first in range(0, N_ROWS, 2):
            pair.rows.lookup(torch.tensor([first, first + 1]), train=True)
    pair.step()
    pair.check()


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("optimizer", ["adagrad", "sparse-adam"])
def test_copies_have_everything(runner, how, optimizer):
    pair = made(optimizer)
    pair.train(*drawn(2, 5))
    copied = how(pair.rows)
    assert same_bits(copied.whole(), pair.plain)
    assert same_bits(copied.table.decoded(0, N_ROWS), pair.plain)
    pair.train(*drawn(3, 5))
    pair.check()


def test_training_goes_on_after_inference_mode(runner):
    pair = made("adagrad")
    with torch.inference_mode():
        pair.rows.lookup(torch.tensor([1, 30]), train=True)
    pair.train(*drawn(4, 8))
    pair.check()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("bad", [-1, N_ROWS])
def test_a_bad_id_is_reported(runner, bad, dtype):
    rows = made().rows
    weight, index = rows.lookup(torch.tensor([[3, 31], [bad, 2]], dtype=dtype), train=True)
    assert runner.mailbox.tolist() == [INDEX_ERROR, 2, bad, N_ROWS]
    assert same_bits(weight[index[0]], rows.whole()[[3, 31]])


def test_padding_takes_no_gradient(runner):
    weight = torch.randn(N_ROWS, 4)
    bag = CachedEmbeddingBag.from_pretrained(
        weight, freeze=False, mode="sum", padding_idx=35, cache_ratio=0.1, device="cpu"
    )
    plain = torch.nn.EmbeddingBag.from_pretrained(
        weight.clone(), freeze=False, mode="sum", padding_idx=35
    )
    for module in (bag, plain):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for ids in ((35, 1, 30), (35, 35, 20, 21), (1, 30)):
            optimizer.zero_grad()
            module(torch.tensor(ids), torch.tensor([0, 2])).sum().backward()
            optimizer.step()
    assert bag.rows.owned_by_device
    assert same_bits(bag.weight, plain.weight)


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-sparse", "adagrad-sparse"])
def test_an_earlier_batch_that_did_not_fit_may_be_kept(optimizer):
    pair = made(optimizer)
    kept = pair.loss(range(20))
    for loss in kept:
        loss.backward(retain_graph=True)
    pair.step()
    with on_simulated_gpu():
        pair.train((1, 30, 31), (2, 30, 32))
        for loss in kept:
            loss.backward(retain_graph=True)
        pair.step()
        pair.train((1, 30, 31), (15, 17, 31))
    pair.check()


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-sparse", "adagrad-sparse"])
def test_lookups_of_the_gpu_and_the_host_share_a_backward_pass(optimizer):
    pair = made(optimizer, cache_rows=12)
    early = pair.loss((1, 2, 3))
    for loss in early:
        loss.backward(retain_graph=True)
    pair.step()
    with on_simulated_gpu():
        pair.train((1, 30, 31))
        late = pair.loss((2, 30, 32))
        for one, other in zip(early, late, strict=True):
            (one + other).backward()
        pair.step()
        pair.train((1, 30, 31))
        check_gpu_map(pair)
    pair.check()


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
def test_what_is_on_the_device_is_counted(runner, codec):
    pair = made(codec=codec)
    before = pair.rows.stats()["device_bytes"]
    pair.train((1, 30))
    slots, exchange = pair.rows.device_slots, pair.rows.exchange
    assert slots is not None and exchange is not None
    more = pair.rows.parameter.nbytes + slots.nbytes + exchange.nbytes
    assert pair.rows.stats()["device_bytes"] == more > before


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
def test_a_lookup_of_no_ids_holds_nothing(runner, codec):
    pair = made(codec=codec)
    pair.train((1, 2))
    pair.backward((), (20, 21, 22))
    check_gpu_map(pair)
    pair.step()
    pair.backward(())
    pair.backward((30, 31, 32))
    check_gpu_map(pair)
    pair.step()
    pair.check()


@pytest.mark.parametrize("grad", [True, False], ids=["with-gradient", "without"])
def test_rows_of_a_second_backward_pass_wait_for_its_step(runner, grad):
    pair = made(codec="raw")
    losses = pair.loss((4, 5))
    for loss in losses:
        loss.backward(retain_graph=True)
    pair.step()
    pair.train((6, 7), (8, 9))
    for loss in losses:
        loss.backward(retain_graph=True)
    if grad:
        pair.backward((20, 21, 22))
    else:
        with torch.no_grad():
            pair.rows.lookup(torch.tensor([20, 21, 22]), train=True)
    check_gpu_map(pair)
    pair.step()
    pair.check()


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-sparse", "adagrad-sparse"])
def test_gradients_of_the_hosts_lookups_are_kept_while_the_gpu_has_the_cache(optimizer):
    pair = made(optimizer, cache_rows=12, codec="raw")
    early = pair.loss((1, 2, 3))
    for loss in early:
        loss.backward(retain_graph=True)
    pair.step()
    pair.rows.flush()
    with on_simulated_gpu(twins=True):
        pair.train((30, 31))
        assert pair.rows.owned_by_device
        for loss in early:
            loss.backward(retain_graph=True)
        pair.step()
        pair.check()


def test_gradients_of_the_hosts_lookups_whose_rows_the_gpu_has_evicted_are_refused():
    pair = made(cache_rows=4, codec="raw")
    _, early = pair.loss((1, 2, 3))
    early.backward(retain_graph=True)
    pair.optimizers[1].step()
    pair.zero_grad()
    with on_simulated_gpu(twins=True):
        with torch.no_grad():
            for first in range(10, 40, 3):
                pair.rows.lookup(torch.arange(first, min(first + 3, N_ROWS)), train=True)
        assert pair.rows.owned_by_device
        with pytest.raises(BitslabError, match="have left the cache"):
            early.backward()


def test_gradients_that_are_not_cleared_are_reported_after_the_host_was_asked(runner):
    pair = made(cache_rows=3, codec="raw")
    pair.backward((4, 5))
    pair.step(clear=False)
    with torch.no_grad():
        for first in (20, 22, 24):
            pair.rows.lookup(torch.tensor([first, first + 1]), train=True)
    pair.rows.flush()
    with pytest.raises(BitslabError, match="zero_grad"):
        pair.backward((24, 25))
        pair.step()


def test_rows_that_the_host_has_changed_count_as_held_by_no_lookup():
    pair = made(codec="raw")
    pair.train(range(8))
    with on_simulated_gpu(twins=True):
        pair.backward((1, 2))
        assert pair.rows.owned_by_device and pair.rows.parameter.grad is not None
        pair.rows.parameter.grad.add_(1.0)
        with pytest.raises(BitslabError, match="changed by hand"):
            pair.optimizers[1].step()


def test_slots_behind_the_cache_go_after_rows_were_loaded(runner):
    pair = made(codec="raw")
    pair.train(range(12))
    fresh = torch.randn(10, 4)
    pair.rows.load(fresh, 12)
    pair.plain.data[12:22] = fresh
    pair.rows.flush(evict=True)
    assert pair.rows.parameter.shape[0] == CACHE_ROWS
    pair.check()


@pytest.mark.parametrize("evict", EvictionStrategy)
@pytest.mark.parametrize("cache_rows", [CACHE_ROWS, N_ROWS], ids=["some", "all-resident"])
def test_batches_are_counted_anew_before_32_bits_overflow(runner, monkeypatch, evict, cache_rows):
    monkeypatch.setattr(device_slots, "MOST_BATCHES", 6)
    pair = made(evict=evict, cache_rows=cache_rows)
    made_anew = set()
    for ids in drawn(13, 25):
        pair.train(ids)
        made_anew.add(id(pair.rows.device_slots or pair.rows.device_uses))
    assert len(made_anew) > 1
    pair.check()


def test_a_prefetch_by_the_host_does_nothing_while_the_gpu_has_the_cache(runner):
    pair = made(codec="raw")
    pair.train((1, 2))
    pair.rows.prefetch(torch.tensor([30, 31]))
    assert pair.rows.row_store.prefetched is None


def test_a_backward_pass_after_the_rows_were_closed_is_refused(runner):
    pair = made(codec="raw")
    _, loss = pair.loss((1, 2))
    pair.rows.close()
    with pytest.raises(BitslabError, match="closed"):
        loss.backward()
