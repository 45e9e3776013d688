"""Which parameters of an optimizer are those of cached rows."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

from bitslab.embedding import CachedRows
from bitslab.embedding.membership import rows_in
from bitslab.errors import ArgumentError


def made() -> CachedRows:
    return CachedRows.from_tensor(torch.randn(20, 4), cache_rows=5, device="cpu")


def others(n: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2)) for _ in range(n)]


def test_a_parameter_that_was_put_in_the_place_of_another_is_found():
    rows, before = made(), others(3)
    optimizer = torch.optim.SGD(before, lr=0.1, momentum=0.9)
    optimizer.step()
    assert rows_in(optimizer) == []
    rows.lookup(torch.tensor([1]), train=True)[0].sum().backward()
    optimizer.param_groups[0]["params"][1] = rows.parameter
    with pytest.raises(ArgumentError, match="momentum"):
        optimizer.step()
    optimizer.param_groups[0]["params"][1] = before[1]
    optimizer.step()
    assert rows_in(optimizer) == []


def test_parameters_that_come_in_another_group_are_found():
    rows = made()
    optimizer = torch.optim.SGD(others(2), lr=0.1)
    optimizer.step()
    optimizer.add_param_group({"params": [rows.parameter], "lr": 0.5})
    [(found, group)] = rows_in(optimizer)
    assert found is rows and group["lr"] == 0.5
    del optimizer.param_groups[1]
    assert rows_in(optimizer) == []


def test_copies_of_an_optimizer_find_their_own_rows():
    rows = made()
    optimizer = torch.optim.SGD([*others(1), rows.parameter], lr=0.1)
    optimizer.step()
    assert [found for found, _ in rows_in(optimizer)] == [rows]
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert rows_in(copied) == []
        assert copied.param_groups[0]["params"][1] is not rows.parameter


def test_a_parameter_that_was_taken_out_is_not_kept_alive():
    rows, [other] = made(), others(1)
    optimizer = torch.optim.SGD([other, rows.parameter], lr=0.1)
    optimizer.step()
    gone = weakref.ref(other)
    optimizer.param_groups[0]["params"][:] = [rows.parameter]
    del other
    gc.collect()
    assert gone() is None
    assert [found for found, _ in rows_in(optimizer)] == [rows]
