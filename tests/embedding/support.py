"""What tests of cached rows share: a plain parameter and cached rows that should not differ."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bitslab import CompressedTable, RawCodec
from bitslab.embedding import CachedRows, device_lookup, device_notes, lookups, optimizers
from bitslab.kernels import cpu
from bitslab.kernels.cpu import slots
from bitslab.kernels.cuda.launch import CudaKernels
from bitslab.memory.host import HostBuffer
from tests.helpers import same_bits
from tests.simt.runner import SimtRunner

#: Optimizers that are followed, and whether with sparse gradients.
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], bool]] = {
    "sgd": (torch.optim.SGD, False),
    "adagrad": (torch.optim.Adagrad, False),
    "sgd-sparse": (torch.optim.SGD, True),
    "adagrad-sparse": (torch.optim.Adagrad, True),
    "sparse-adam": (torch.optim.SparseAdam, True),
}


class TwinKernels:
    """The kernels' twins on the CPU in the place of the kernels, for long tests."""

    def slot_finder(self, n_rows, seen, claims, *, slot_of=None, adds=False) -> TwinFinder:
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

    def give(self, ids, to, tally, number, *, uses=None, first=0, told=0):
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
            tally.numpy(),
            count,
            self.claims,
        )
        if told:
            ctypes.c_int64.from_address(told).value = int(count[0])


@contextlib.contextmanager
def told_on_device(*, twins: bool = False) -> Iterator[SimtRunner]:
    """Let lookups in training go the way of ids on a GPU, with its kernels; yield their runner.

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
            kernels.gather_rows(table._rows.storage(), table._rows.layout, ids, out)

    with pytest.MonkeyPatch.context() as patch:
        for module in (device_lookup, device_notes, optimizers):
            patch.setattr(module, "kernels_on", lambda device, tell=True: kernels)
        patch.setattr(
            lookups, "stays_on_gpu", lambda rows, ids, brings: rows.all_resident or brings
        )
        patch.setattr(CompressedTable, "readable_by_gpu", lambda table: True)
        patch.setattr(CompressedTable, "gather_some_on_gpu", gather_some)
        patch.setattr(HostBuffer, "pinned", True)
        yield runner


class Pair:
    """A whole table as a parameter, and the same rows cached, each with an optimizer."""

    def __init__(
        self,
        n_rows: int = 40,
        cache_rows: int = 8,
        dim: int = 4,
        optimizer: str = "sgd",
        seed: int = 0,
        exact: bool = False,
        **options: Any,
    ):
        #: Whether gradients are integers, whose sums do not depend on their order.
        self.exact = exact
        self.generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(n_rows, dim, generator=self.generator)
        self.plain = torch.nn.Parameter(weight.clone())
        self.rows = CachedRows.from_tensor(weight, cache_rows=cache_rows, device="cpu", **options)
        kind, self.sparse = OPTIMIZERS[optimizer]
        self.optimizers = [kind([p], lr=0.1) for p in (self.plain, self.rows.parameter)]

    def loss(self, ids: Iterable[int] | torch.Tensor, train: bool = True):
        """Look ids up in both; return the losses of both, with a factor for each element."""
        ids = ids if isinstance(ids, torch.Tensor) else torch.tensor(list(ids), dtype=torch.int64)
        plain = F.embedding(ids, self.plain, sparse=self.sparse)
        weight, index = self.rows.lookup(ids, train=train, sparse=self.sparse)
        ours = F.embedding(index, weight, sparse=self.sparse)
        assert same_bits(plain, ours)
        factor = torch.randn(plain.shape, generator=self.generator)
        if self.exact:
            factor = factor.mul(8).round()
        return (plain * factor).sum(), (ours * factor).sum()

    def backward(self, *ids: Iterable[int]):
        """Go back through the sum of lookups."""
        losses = [self.loss(each) for each in ids]
        sum(one for one, _ in losses).backward()
        sum(other for _, other in losses).backward()

    def step(self, clear: bool = True):
        for optimizer in self.optimizers:
            optimizer.step()
        if clear:
            self.zero_grad()

    def zero_grad(self, set_to_none: bool = True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def train(self, *batches: Iterable[int]):
        """Take a step for each batch."""
        for ids in batches:
            self.backward(ids)
            self.step()

    def evict(self):
        """Let other rows come until none of before is left."""
        with torch.no_grad():
            for first in range(0, len(self.rows), self.rows.cache_rows):
                last = min(first + self.rows.cache_rows, len(self.rows))
                self.rows.lookup(torch.arange(first, last), train=True)

    def check(self):
        """Compare rows, maps and the state of the optimizers."""
        assert same_bits(self.plain, self.rows.whole())
        check_map(self.rows)
        theirs, ours = (optimizer.state_dict()["state"] for optimizer in self.optimizers)
        assert theirs.keys() == ours.keys()
        for number, state in theirs.items():
            for name, value in state.items():
                found = torch.as_tensor(ours[number][name])
                assert same_bits(found, torch.as_tensor(value)), name


def check_map(rows: CachedRows):
    """Check that ids and slots name each other, and that sizes agree."""
    residents = rows.residents
    slots = residents.resident()
    assert np.array_equal(residents.slot_of[residents.id_of[slots]], slots)
    assert (residents.slot_of != -1).sum() == len(slots)
    assert rows.parameter.shape[0] == len(residents.id_of)
