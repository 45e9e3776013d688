"""Lookups by ids on a GPU where there is none: the CPU stands in, with the GPU's kernels."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from bitslab import CompressedTable, RawCodec
from bitslab.embedding import device_counters, device_lookup, lookups, optimizers
from bitslab.embedding.training import Training
from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cpu import slots
from bitslab.engine.kernels.cuda import CudaKernels
from bitslab.engine.memory.host import HostBuffer
from tests.embedding.support import Pair, check_map
from tests.simt.runner import SimtRunner

#: Of the tables that `made` makes.
N_ROWS, CACHE_ROWS = 40, 8


class TwinKernels:
    """The kernels' twins on the CPU in the place of the kernels, for long tests."""

    def __init__(self) -> None:
        self.slots = self

    def finder(self, n_rows, seen, claims, *, slot_of=None, adds=False) -> TwinFinder:
        return TwinFinder(n_rows, seen, claims, slot_of, adds)

    def copy_rows(self, rows, row_bytes, ids, out):
        cpu.copy_rows(rows, row_bytes, ids, out.view(len(ids), -1).view(torch.uint8))


class TwinFinder:
    """What `SlotFinder` does, by the twins."""

    def __init__(self, n_rows, seen, claims, slot_of, adds):
        self.n_rows, self.adds = n_rows, adds
        self.slot_of = np.empty(0, np.int32) if slot_of is None else slot_of.numpy()
        self.seen, self.claims = seen.numpy(), claims.numpy()

    def claim(self, ids, wanted=None):
        to = np.empty(0, np.int64) if wanted is None else wanted.numpy()
        slots.claim_slots(ids.numpy(), self.n_rows, self.slot_of, to, self.claims)

    def give(self, ids, to, counts, number, *, uses=None, first=0, miss_count=0):
        count = np.zeros(1, np.int64)
        slots.give_slots(
            ids.numpy(),
            self.n_rows,
            self.slot_of,
            first,
            to[0].numpy(),
            to[1].numpy(),
            self.seen,
            number,
            np.empty(0, np.int64) if uses is None else uses.numpy(),
            self.adds,
            counts.numpy(),
            count,
            self.claims,
        )
        if miss_count:
            ctypes.c_int64.from_address(miss_count).value = int(count[0])


@contextlib.contextmanager
def on_simulated_gpu(*, twins: bool = False) -> Iterator[SimtRunner]:
    """Run training lookups on the code path of ids on a GPU, with its kernels; yield their runner.

    With `twins` the kernels' twins take their place, which need a tenth of the time.
    """
    runner = SimtRunner()
    kernels: Any = TwinKernels() if twins else CudaKernels(runner)

    def gather_some(table: CompressedTable, ids: torch.Tensor, out: torch.Tensor):
        if twins:
            there = ids >= 0
            out[there] = table.gather(ids[there])
        elif isinstance(table.codec, RawCodec):
            kernels.copy_rows(table._parts.raw_rows(), table.row_bytes, ids, out)
        else:
            packed: Any = table._rows.kernels
            kernels.gather_rows(table._rows.storage(), packed.layout, ids, out)

    with pytest.MonkeyPatch.context() as patch:
        for module in (device_lookup, device_counters, optimizers):
            patch.setattr(module, "kernels_on", lambda device, tell=True: kernels)
        patch.setattr(
            lookups, "runs_on_gpu", lambda rows, ids, fetches: rows.all_resident or fetches
        )
        patch.setattr(CompressedTable, "readable_by_gpu", lambda table: True)
        patch.setattr(CompressedTable, "gather_some_on_gpu", gather_some)
        patch.setattr(HostBuffer, "pinned", True)
        summed_as_on_gpu(patch)
        yield runner


def summed_as_on_gpu(patch: pytest.MonkeyPatch):
    """Leave gradients alone in steps where only the GPU knows the slots."""
    patch.setattr(Training, "_on_host", property(lambda own: own._rows.miss_buffer is None))


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
    found = pair.rows.miss_buffer
    if found is not None:
        found.sync(pair.rows)
        assert np.array_equal(found._slot_of.numpy(), pair.rows.slot_table.slot_of)
        ids = np.maximum(found._ids.numpy(), -1)
        ids[pair.rows.slot_table.slot_of[ids] != np.arange(len(ids)) + pair.rows.cache_rows] = -1
        assert np.array_equal(ids, pair.rows.slot_table.id_of[pair.rows.cache_rows :])
    check_map(pair.rows)
