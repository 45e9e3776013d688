"""Random operations in random order: a cached module equals a plain one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitslab.integrations.embedding import EvictionStrategy
from tests import pairwise
from tests.integrations.embedding.support import (
    N,
    assert_same,
    bags,
    lookup,
    loss_of,
    singles,
    whole,
)

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "sparse-adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.01),
}
# Often few rows, and among them those that pad: what an action leaves behind shows in the next one
# when both have rows in common.
IDS = st.one_of(
    st.lists(st.integers(0, N - 1), min_size=1, max_size=14),
    st.lists(st.sampled_from([0, 1, N - 2, N - 1]), min_size=1, max_size=4),
).map(torch.tensor)
NAMES = (
    "train train train backward backward backward step read evaluate flush evict prefetch copy "
    "pickle state save-optimizer load reorder zero".split()
)
#: An action, its ids, and a lookup that follows at once, of the same ids or of some of them: drawn
#: apart, one between a backward pass and its step would be too rare to be found.
ACTION = st.tuples(
    st.sampled_from(NAMES), IDS, st.sampled_from([None, "read", "evaluate"]), st.booleans()
)
# Short lists, which hypothesis prefers, end before much has been done.
ACTIONS = st.lists(ACTION, min_size=8, max_size=25)


class Pair:
    """A plain module and a cached one to which the same is done."""

    def __init__(self, make: Any, optimizer: str, options: dict[str, Any]) -> None:
        sparse = options.pop("sparse") or optimizer == "sparse-adam"
        self.modules: list[Any] = list(make(sparse=sparse, **options))
        self.make = OPTIMIZERS[optimizer]
        self.optimizers = [self.make(m.parameters()) for m in self.modules]

    @property
    def ours(self) -> Any:
        return self.modules[1]

    def clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def do(self, action: str, ids: torch.Tensor) -> None:
        if action in ("train", "backward"):
            if action == "train":
                self.clear()
            for module in self.modules:
                loss_of(lookup(module.train(), ids)).backward()
        if action in ("train", "step"):
            for optimizer in self.optimizers:
                optimizer.step()
            self.clear()
        elif action in ("read", "evaluate"):
            with torch.no_grad():
                plain, ours = (lookup(m.train(action == "read"), ids) for m in self.modules)
            assert_same(ours, plain)
        elif action == "flush":
            self.ours.flush()
        elif action == "evict":
            self.clear()
            self.ours.rows.flush(evict=True)
        elif action == "prefetch":
            self.ours.prefetch(ids)
        elif action in ("copy", "pickle"):
            self.replace(pickle.loads(pickle.dumps(self.ours)) if action == "pickle" else None)
        elif action == "state":
            assert_same(self.ours.state_dict()["weight"], whole(self.modules[0]))
        elif action == "save-optimizer":
            self.compare_optimizers()
        elif action == "load":
            state = {"weight": whole(self.modules[0]) * 0.5}
            for module in self.modules:
                module.load_state_dict(state)
        elif action == "reorder":
            self.clear()
            self.ours.rows.warm_up(torch.bincount(ids, minlength=N), 0.5)
        elif action == "zero":
            self.clear()

    def replace(self, twin: Any) -> None:
        """Go on with a copy; torch has gradients copied by neither of the two ways alike."""
        self.clear()
        state = copy.deepcopy(self.optimizers[1].state_dict())
        self.modules[1] = twin or copy.deepcopy(self.ours)
        self.optimizers[1] = self.make(self.ours.parameters())
        self.optimizers[1].load_state_dict(state)

    def compare_optimizers(self) -> None:
        self.ours.attach_optimizer(self.optimizers[1])  # it may have taken no step yet
        plain, ours = (o.state_dict()["state"] for o in self.optimizers)
        assert plain.keys() == ours.keys()
        for key, values in plain.items():
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    assert_same(ours[key][name], value, name)
                else:
                    assert ours[key][name] == value


OPTIONS = st.fixed_dictionaries(
    {
        "sparse": st.booleans(),
        "cache_ratio": st.sampled_from([0.001, 0.1, 0.3, 1.0]),
        "max_norm": st.sampled_from([None, None, 0.2]),
        "padding_idx": st.sampled_from([None, 0, N - 1]),
        "evict_strategy": st.sampled_from(EvictionStrategy),
        "buffer_size": st.sampled_from([0, 3]),
        "cache": st.sampled_from(["rows", "rows", "packed"]),
    }
)


@pytest.mark.parametrize("make", [bags, singles])
@settings(max_examples=100 if pairwise.FULL else 25)
@given(optimizer=st.sampled_from(sorted(OPTIMIZERS)), options=OPTIONS, actions=ACTIONS)
def test_no_sequence_of_calls_tells_them_apart(make, optimizer, options, actions):
    pair = Pair(make, optimizer, dict(options))
    for action, ids, follows, some in actions:
        pair.do(action, ids)
        if follows is not None:
            pair.do(follows, ids[: 1 + len(ids) // 2] if some else ids)
        assert_same(whole(pair.ours), whole(pair.modules[0]), action)
    pair.clear()
    pair.compare_optimizers()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("strategy", EvictionStrategy, ids=lambda s: s.name)
def test_a_long_run_of_everything(strategy):
    generator = torch.Generator().manual_seed(8)
    names = "train train backward step read evaluate flush prefetch state copy evict load".split()
    options = {"cache_ratio": 0.2, "evict_strategy": strategy, "sparse": False}
    pair = Pair(bags, "adagrad", options)
    for number in range(300):
        action = names[int(torch.randint(len(names), (), generator=generator))]
        ids = (torch.rand(9, generator=generator) ** 3 * N).long()
        pair.do(action, ids)
        assert_same(whole(pair.ours), whole(pair.modules[0]), (number, action))
    pair.clear()
    pair.compare_optimizers()
