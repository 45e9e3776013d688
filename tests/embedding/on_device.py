"""Lookups by ids on a GPU where there is none: the CPU stands in, with the GPU's kernels."""

from __future__ import annotations

import contextlib
import copy
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from bitslab import RawCodec
from bitslab.embedding import ownership
from bitslab.embedding.device_access import DEVICES, DeviceAccess
from bitslab.embedding.gradients import NONE
from bitslab.engine.codecs.base import rows_as_bytes
from bitslab.engine.kernels.cpu import slots as twin
from bitslab.engine.kernels.cpu.compiling import call
from bitslab.engine.kernels.cuda import CudaKernels
from bitslab.engine.kernels.cuda.slots import TAKEN
from tests.embedding.support import Pair, check_map
from tests.simt.runner import SimtRunner

#: Of the tables that `made` makes.
N_ROWS, CACHE_ROWS = 40, 8


class TwinKernels:
    """The kernels' twins on the CPU in the place of the kernels, for long tests."""

    def __init__(self) -> None:
        self.slots, self.exchange = self, TwinExchange()

    def finder(self, columns, evict) -> TwinFinder:
        return TwinFinder(columns, evict)

    def keeper(self, keys, seen) -> TwinKeeper:
        return TwinKeeper(keys, seen)


class TwinExchange:
    """What `ExchangeKernels` does, by the twin."""

    def described(self, arrays, device):
        return arrays

    def exchange(self, arrays, slots, leaving, wanted, coming, most_units):
        for cached, stored, incoming, by_position in arrays:
            sides = cached, stored, stored if incoming is None else incoming
            call(
                twin.exchange_rows,
                *(bytes_of(cached[:0] if side is None else side) for side in sides),
                by_position,
                *(t.numpy() for t in (slots, leaving, wanted, coming)),
            )


def bytes_of(rows):
    """Return rows as uint8 ``[n, bytes of a row]``."""
    return rows.flatten(1).view(torch.uint8).numpy()


def counts_at(address: int) -> np.ndarray[Any, Any]:
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_int64)), (3,))


def offsets_of(bags):
    """Return what twins take for the offsets of a batch."""
    if bags is None:
        return NONE, False, NONE
    return bags.given.numpy(), bags.include_last, bags.sound.numpy()


class TwinKeeper:
    """What `SlotKeeper` does, by the twin."""

    def __init__(self, keys, seen):
        self.keys, self.seen = keys.numpy(), seen.numpy()

    def keep(self, ids, counts, number, slots, counting, bags=None):
        given = self.keys, self.seen, counting, number, slots.numpy().reshape(-1)
        twin.keep_slots(ids.numpy(), len(self.keys), *given, counts_at(counts), *offsets_of(bags))


class TwinFinder:
    """What `SlotFinder` does, by the twins."""

    def __init__(self, columns, evict):
        self.columns, self.evict, self.turn = columns, evict, 0

    @property
    def claims(self):
        return self.columns.claims[self.turn]

    @property
    def coming(self):
        return self.claims[TAKEN:]

    def claim(self, ids, counts, number, wanted, marked=None, mark=0, bags=None):
        c = self.columns
        twin.claim_slots(
            ids.numpy(),
            c.n_rows,
            array(c.slot_of, np.int32),
            c.seen.numpy(),
            number,
            array(wanted),
            counts_at(counts),
            self.claims.numpy(),
            c.changed.numpy(),
            array(marked),
            mark,
            *offsets_of(bags),
        )

    def choose(self, counts, number, oldest, wanted, victims, leaving):
        c = self.columns
        by_slot = c.row_in.numpy(), c.keys.numpy(), c.seen.numpy()
        pinned, bins = array(c.pinned, np.uint8), c.bins[self.turn].numpy()
        options = self.evict, number, oldest, bins
        twin.count_slots(c.n_rows, *by_slot, pinned, *options, self.claims.numpy())
        twin.choose_slots(
            c.n_rows,
            *by_slot,
            c.since.numpy(),
            c.changed.numpy(),
            pinned,
            array(c.order),
            *options,
            wanted.numpy(),
            victims.numpy(),
            leaving.numpy(),
            counts_at(counts),
            self.claims.numpy(),
        )

    def give(
        self, ids, counts, number, slots, counting, wanted, victims, leaving, kept=None, bags=None
    ):
        c, other = self.columns, 1 - self.turn
        twin.give_slots(
            ids.numpy(),
            c.n_rows,
            array(c.slot_of, np.int32),
            array(c.row_in),
            c.keys.numpy(),
            c.changed.numpy(),
            counting,
            number,
            array(wanted),
            array(victims),
            array(leaving),
            slots.numpy(),
            array(kept),
            counts_at(counts),
            self.claims.numpy(),
            c.claims[other].numpy(),
            c.bins[other].numpy(),
        )
        self.turn = other


def array(tensor, dtype=np.int64):
    return np.empty(0, dtype) if tensor is None else tensor.numpy()


class SimulatedAccess(DeviceAccess):
    """The CPU as a device: its kernels run in a simulator, or their twins do."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def kernels(self, device, *, raise_errors=True):
        return self._kernels

    def reads_memory(self, buffer):
        return True

    def reads_table(self, table):
        return True

    def raw_rows(self, table):
        if not table.takes_gpu_writes:
            return None
        table._rows.dirty = True
        return table._parts.raw_rows()

    def packed_rows(self, table, device):
        if table._parts.raw or not table._may_be_written:
            return None
        gathers = table._gathers
        if not isinstance(self._kernels, TwinKernels):
            kernels = copy.copy(table._rows.kernels)
            kernels._kernels = self._kernels
            gathers._copies._kernels.setdefault(device, kernels)
        return gathers.writes(device)

    def gather_some(self, table, ids, out):
        kernels = self._kernels
        if table._gathers._writes is not None:  # the GPU's metadata, which is the newer one
            storage, packing = table._gathers._copies.get(out.device, table._rows)
            if isinstance(kernels, TwinKernels):
                there, found = ids >= 0, torch.empty_like(out)
                as_bytes = rows_as_bytes(found, table.row_bytes)
                packing.gather(storage, ids[there], as_bytes[: int(there.sum())])
                out[there] = found[: int(there.sum())]
            else:
                packing.gather(storage, ids, out)
        elif isinstance(kernels, TwinKernels):
            there = ids >= 0
            out[there] = table.gather(ids[there])
        elif isinstance(table.codec, RawCodec):
            kernels.copy_rows(table._parts.raw_rows(), table.row_bytes, ids, out)
        else:
            packed: Any = table._rows.kernels
            kernels.gather_rows(table._rows.storage(), packed.layout, ids, out)


@contextlib.contextmanager
def on_simulated_gpu(*, twins: bool = False) -> Iterator[SimtRunner]:
    """Run training lookups on the code path of ids on a GPU, with its kernels; yield their runner.

    With `twins` the kernels' twins take their place, which need a tenth of the time.
    """
    runner = SimtRunner()
    kernels: Any = TwinKernels() if twins else CudaKernels(runner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEVICES, "cpu", SimulatedAccess(kernels))
        yield runner


def made(optimizer: str = "sgd", cache_rows: int = CACHE_ROWS, **options) -> Pair:
    defaults = {"warmup_ratio": 1.0, "exact": True}
    return Pair(N_ROWS, cache_rows, optimizer=optimizer, **defaults | options)


def drawn(seed: int, n_batches: int, most: int = 12) -> list[list[int]]:
    """Draw batches of up to so many ids, small ones more often."""
    generator = np.random.default_rng(seed)
    ids = [generator.geometric(0.12, generator.integers(0, most)) - 1 for _ in range(n_batches)]
    return [np.minimum(batch, N_ROWS - 1).tolist() for batch in ids]


def check_gpu_map(pair: Pair):
    """Compare the GPU's map with the host's, which knows everything."""
    found = pair.rows.device_slots
    if found is not None:
        ownership.sync_from_device(pair.rows)
        c = found.columns
        assert np.array_equal(c.slot_of.numpy(), pair.rows.slot_table.slot_of)
        assert np.array_equal(np.maximum(c.row_in.numpy(), -1), pair.rows.slot_table.id_of)
        assert (c.claims[:, 0] == 0).any() and found.n_slots == len(pair.rows.parameter)
    check_map(pair.rows)
