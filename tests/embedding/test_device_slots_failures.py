"""Slots on the device: interruptions, too little memory, and memory that the GPU cannot read."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

from bitslab.embedding import device_lookup, device_slots, parameter_watch
from bitslab.embedding.adapters import Adapters
from bitslab.embedding.optimizers import OptimizerAdapter
from bitslab.embedding.row_exchange import RowExchange
from bitslab.embedding.slots import SlotTable
from bitslab.embedding.training import Training
from bitslab.engine.kernels.cuda.slots import SlotFinder
from tests.embedding.on_device import (
    CACHE_ROWS,
    N_ROWS,
    SimulatedAccess,
    check_gpu_map,
    drawn,
    made,
)

INTERRUPTED = {
    "claim": SlotFinder,
    "choose": SlotFinder,
    "exchange": RowExchange,
    "gather_some": SimulatedAccess,
    "give": SlotFinder,
}


@pytest.mark.pairwise
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("where", INTERRUPTED)
@pytest.mark.parametrize("codec", ["ibp", "raw"])
def test_an_interrupted_lookup_loses_nothing(runner, codec, where, late, monkeypatch):
    if (codec, where) == ("raw", "gather_some"):
        codec = "ibp"
    pair = made("adagrad", codec=codec)
    pair.train((1, 2), (30, 31), range(8), range(8))
    was = getattr(INTERRUPTED[where], where)

    def interrupted(*arguments, **options):
        if late:
            was(*arguments, **options)
        raise KeyboardInterrupt

    for n in range(5):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(INTERRUPTED[where], where, interrupted)
            pair.rows.lookup(torch.tensor([n, 30 + n, N_ROWS - 1 - n]), train=True)
        gc.collect()
        pair.train((n, 32 + n), (3, 30))
        check_gpu_map(pair)
    assert not runner.mailbox.any()
    pair.check()


EXCHANGED = {"move": SlotTable, "drop": SlotTable, "take": SlotTable, "save": Adapters}


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("where", EXCHANGED)
def test_an_interrupted_exchange_loses_nothing(runner, where, late, monkeypatch):
    pair = made("adagrad", cache_rows=4)
    pair.train((1, 2, 5, 6, 7, 8), (30, 31))
    was = getattr(EXCHANGED[where], where)

    def interrupted(*arguments):
        if late:
            was(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(EXCHANGED[where], where, interrupted)
        pair.rows.training.retire_steps()
    pair.train((1, 30), (2, 31, 7, 8))
    check_gpu_map(pair)
    pair.check()


WIDENED = {
    "columns": (device_slots.DeviceSlots, "install"),
    "state": (OptimizerAdapter, "follow"),
    "parameter": (parameter_watch, "set_data"),
    "slot-table": (SlotTable, "grow"),
}


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, torch.OutOfMemoryError], ids=lambda e: e.__name__
)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("where", WIDENED)
def test_an_interrupted_widening_loses_nothing(runner, where, late, error, monkeypatch):
    monkeypatch.setattr(device_lookup, "PAUSE_LOOKUPS", 1)
    pair = made("adagrad")
    pair.train((1, 2), (30, 31))
    owner, name = WIDENED[where]
    was = getattr(owner, name)
    calls = []

    def interrupted(*arguments):
        calls.append(1)
        if late or len(calls) > 1:
            was(*arguments)
        if len(calls) == 1:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with contextlib.suppress(KeyboardInterrupt), torch.no_grad():
            pair.rows.lookup(torch.arange(3, 15), train=True)
    assert calls
    for n in range(5):
        pair.train((n, 32 + n, 3, 4, 5, 30), (3, 30))
    check_gpu_map(pair)
    pair.check()


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_gradients_wait_for_their_step_though_the_host_was_interrupted(runner, late, monkeypatch):
    pair = made(cache_rows=2)
    pair.backward((4, 30))
    sync_slots = Training.sync_slots

    def interrupted(training, *known):
        if late:
            sync_slots(training, *known)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Training, "sync_slots", interrupted)
        pair.rows.flush()
    with torch.no_grad():
        for first in range(0, N_ROWS, 2):
            pair.rows.lookup(torch.tensor([first, first + 1]), train=True)
    pair.step()
    pair.check()


def test_a_table_that_is_packed_anew_where_no_gpu_can_read_it_is_left_to_the_host(
    runner, monkeypatch
):
    pair = made(codec="ibp")
    pair.train((1, 30))
    pair.rows.load(pair.plain.data.clone())
    monkeypatch.setattr(SimulatedAccess, "reads_table", lambda access, table: False)
    monkeypatch.setattr(SimulatedAccess, "gather_some", lambda *arguments: 1 / 0)
    pair.train((2, 33))
    pair.check()


def test_too_little_memory_leaves_the_lookup_to_the_host(runner, monkeypatch):
    pair = made("adagrad")

    def full(data):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device_lookup, "PAUSE_LOOKUPS", 2)
    with monkeypatch.context() as patch:
        patch.setattr(device_lookup, "with_spare", full)
        pair.train(range(12))
        pair.check()
    pair.train((1, 30), (2, 31))
    assert pair.rows.parameter.shape[0] == CACHE_ROWS
    pair.train(*drawn(5, 4), range(12))
    assert pair.rows.parameter.shape[0] > CACHE_ROWS
    pair.check()


def test_memory_that_a_gpu_cannot_read_leaves_the_lookup_to_the_host(runner, monkeypatch):
    monkeypatch.setattr(SimulatedAccess, "reads_memory", lambda access, buffer: False)
    pair = made("adagrad")
    pair.train(*drawn(6, 5))
    assert not pair.rows.owned_by_device
    pair.check()
    pair = made("sgd")
    pair.train((1, 30))
    assert pair.rows.owned_by_device
