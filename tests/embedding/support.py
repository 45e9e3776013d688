"""What tests of cached rows share: a plain parameter and cached rows that should not differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bitslab.embedding import CachedRows
from tests.helpers import same_bits

#: Optimizers that are followed, and whether with sparse gradients.
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], bool]] = {
    "sgd": (torch.optim.SGD, False),
    "adagrad": (torch.optim.Adagrad, False),
    "sgd-sparse": (torch.optim.SGD, True),
    "adagrad-sparse": (torch.optim.Adagrad, True),
    "sparse-adam": (torch.optim.SparseAdam, True),
}


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
        """Look other rows up until no earlier row is resident."""
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
    slot_table = rows.slot_table
    slots = slot_table.resident()
    assert np.array_equal(slot_table.slot_of[slot_table.id_of[slots]], slots)
    assert (slot_table.slot_of != -1).sum() == len(slots)
    assert rows.parameter.shape[0] == len(slot_table.id_of)
