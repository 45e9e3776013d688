"""Rows that are all resident, looked up by ids that the host does not read.

The CPU stands for the GPU here, with the GPU's own kernels behind it.
"""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch

from bitslab.embedding import EvictionStrategy, statistics
from bitslab.engine.kernels.cuda.runner import INDEX_ERROR
from bitslab.errors import ArgumentTypeError
from bitslab.integrations.embedding import CachedEmbeddingBag
from tests.embedding.on_device import on_simulated_gpu
from tests.embedding.support import OPTIMIZERS, Pair
from tests.helpers import same_bits

N_ROWS = 40
BATCHES = ((1, 2, 1), (39, 0, 7, 7, 7), range(N_ROWS), (5,), ())


def whole_pair(optimizer: str = "sgd", **options) -> Pair:
    return Pair(N_ROWS, N_ROWS, optimizer=optimizer, **options)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_are_those_of_a_plain_parameter(runner, optimizer):
    pair = whole_pair(optimizer)
    for ids in BATCHES[:4]:
        pair.backward(ids, (3, 1))
        pair.step()
    pair.check()
    pair.rows.flush()
    assert same_bits(pair.rows.table.decoded(0, N_ROWS), pair.plain)
    pair.train((6, 8))
    pair.check()


@pytest.mark.parametrize("optimizer", ["adagrad", "adagrad-sparse"])
def test_a_flush_between_backward_and_step_forgets_nothing(runner, optimizer):
    pair = whole_pair(optimizer)
    pair.backward((1, 2), (2, 3))
    pair.rows.flush()
    pair.step()
    pair.rows.flush()
    assert same_bits(pair.rows.table.decoded(0, N_ROWS), pair.plain)
    pair.check()


def test_a_flush_between_lookup_and_backward_forgets_nothing(runner):
    pair = whole_pair()
    plain, ours = pair.loss((4, 5))
    pair.rows.flush()
    plain.backward()
    ours.backward()
    pair.step()
    pair.rows.flush()
    assert same_bits(pair.rows.table.decoded(0, N_ROWS), pair.plain)


def test_a_second_backward_marks_its_rows_again(runner):
    pair = whole_pair()
    losses = pair.loss((4, 5))
    for retain_graph in (True, False):
        for loss in losses:
            loss.backward(retain_graph=retain_graph)
        pair.step()
        pair.rows.flush()
        assert same_bits(pair.rows.table.decoded(0, N_ROWS), pair.plain)


def test_ids_may_be_written_to_before_backward(runner):
    pair = whole_pair()
    ids = torch.tensor([4, 5])
    weight, index = pair.rows.lookup(ids, train=True)
    ids.fill_(9)
    weight[index].sum().backward()
    grad = pair.rows.parameter.grad
    assert grad is not None and grad.sum(1).nonzero().flatten().tolist() == [4, 5]


def test_what_a_lookup_returns_may_be_written_to(runner):
    pair = whole_pair()
    weight, index = pair.rows.lookup(torch.tensor([4, 5]), train=True)
    others = torch.zeros(7, weight.shape[1])
    index.add_(len(others))
    torch.cat([others, weight])[index].sum().backward()
    grad = pair.rows.parameter.grad
    assert grad is not None and grad.sum(1).nonzero().flatten().tolist() == [4, 5]


def test_a_kept_history_does_not_change(runner):
    pair = whole_pair()
    pair.train((1, 2))
    kept = pair.rows.statistics.hits_history
    pair.train((3,))
    assert kept == [2]
    assert pair.rows.statistics.hits_history == [2, 1]


def test_training_goes_on_after_inference(runner):
    pair = whole_pair("adagrad")
    with torch.inference_mode():
        pair.rows.lookup(torch.tensor([1, 2]), train=True)
    pair.train(*BATCHES[:4])
    pair.check()
    assert pair.rows.statistics.hits_history == [2, 2, 3, 40, 1]


def test_many_lookups_before_a_step(runner):
    pair = whole_pair()
    pair.backward(*[(n, n + 1) for n in range(38)])
    pair.step()
    pair.check()


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_what_was_noted(runner, how):
    pair = whole_pair("adagrad")
    pair.train(*BATCHES[:2])
    made = how(pair.rows)
    assert same_bits(made.whole(), pair.plain)
    assert same_bits(made.table.decoded(0, N_ROWS), pair.plain)
    pair.check()


def test_loaded_rows_take_the_place_of_changed_ones(runner):
    pair = whole_pair()
    pair.train((1, 2, 30))
    fresh = torch.ones(10, 4)
    pair.rows.load(fresh)
    pair.plain.data[:10] = fresh
    pair.check()
    pair.train((1, 31))
    pair.check()


def test_what_is_counted_is_what_the_host_counts():
    found = []
    for way in (on_simulated_gpu, contextlib.nullcontext):
        bag = CachedEmbeddingBag(
            N_ROWS, 4, cache_ratio=1.0, device="cpu", evict_strategy=EvictionStrategy.LFU
        )
        optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
        for i, ids in enumerate(BATCHES):
            with way() if i != 1 else contextlib.nullcontext():
                optimizer.zero_grad()
                bag(torch.tensor(list(ids), dtype=torch.int32), torch.arange(1)).sum().backward()
                optimizer.step()
        with way():
            bag.eval()(torch.tensor([1, 2, 2]), torch.arange(1))
        manager = bag.cache_weight_mgr
        histories = (
            list(manager.num_hits_history),
            list(manager.num_miss_history),
            list(manager.num_write_back_history),
        )
        stats = {name: bag.rows.stats()[name] for name in ("lookups", "hits", "misses")}
        counts = manager.freq_cnter.tolist()
        bag.rows.flush()
        found.append((histories, stats, counts, bag.rows.stats()["written_back"]))
    assert found[0] == found[1]
    assert found[0][0][0] == [2, 3, 40, 1, 0, 2]


def test_histories_are_bounded(runner, monkeypatch):
    monkeypatch.setattr(statistics, "HISTORY", 5)
    monkeypatch.setattr(statistics, "BLOCK", 4)
    rows = whole_pair().rows
    for n in range(1, 30):
        rows.lookup(torch.arange(n), train=True)
    history = rows.statistics.hits_history
    assert 5 <= len(history) <= 10
    assert history == list(range(30 - len(history), 30))
    assert len(rows.statistics.misses_history) == len(history)
    assert rows.statistics.hits == sum(range(30))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("bad", [-1, N_ROWS])
def test_a_bad_id_is_reported(runner, bad, dtype):
    rows = whole_pair().rows
    weight, index = rows.lookup(torch.tensor([[3, 1], [bad, 2]], dtype=dtype), train=True)
    assert runner.mailbox.tolist() == [INDEX_ERROR, 2, bad, N_ROWS]
    assert index.min() >= 0 and index.max() < N_ROWS
    assert same_bits(weight[index[0]], rows.whole()[[3, 1]])


def test_a_lookup_is_one_launch(runner):
    pair = whole_pair()
    pair.train(*BATCHES[:4])
    assert [kernel for _, kernel in runner.launched] == 4 * ["keep_slots"]
    assert not runner.mailbox.any()


def test_what_is_no_tensor_of_ids_is_refused(runner):
    rows = whole_pair().rows
    with pytest.raises(ArgumentTypeError, match="input"):
        rows.lookup(torch.ones(3), train=True)
    with pytest.raises(ArgumentTypeError, match="input"):
        rows.lookup([1, 2], train=True)  # type: ignore[arg-type]
