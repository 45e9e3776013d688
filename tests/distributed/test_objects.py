"""Objects of the collective: copies, pickles, and gradients of gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import bitslab
from bitslab.distributed import CompressedAllToAll, Table


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
@pytest.mark.parametrize("tables", [None, [Table("a", 3, error_bound="adaptive")]], ids=str)
def test_a_copy_goes_on_from_the_same_state_and_shares_nothing(copied, tables):
    exchange = CompressedAllToAll(
        dist.group.WORLD, tables, backward=0.1, error_feedback=4, pieces=2, seed=3, decide_every=5
    )

    def step(of: CompressedAllToAll) -> torch.Tensor:
        rows = torch.arange(18.0).view(6, 3).requires_grad_()
        ids = torch.arange(6)
        if tables is None:
            found = of(rows, received_ids=ids)
        else:
            sizes, given = {"a": [6]}, {"a": rows}
            found = of.exchange_tables(given, sizes, sizes, received_ids={"a": ids})["a"]
        (found * torch.linspace(0, 1, 18).view(6, 3)).sum().backward()
        assert rows.grad is not None
        return rows.grad

    step(exchange)
    module = torch.nn.Module()
    setattr(module, "exchange", exchange)  # noqa: B010 - mypy
    other = copied(exchange) if copied is copy.copy else copied(module).exchange
    assert other.group is exchange.group and other is not exchange
    assert other.state_dict().keys() == exchange.state_dict().keys()
    assert other.iteration == exchange.iteration == 1
    assert torch.equal(step(other), step(exchange))
    step(other)
    assert (other.iteration, exchange.iteration) == (3, 2)


def test_an_object_is_not_pickled():
    with pytest.raises(bitslab.ArgumentTypeError, match="save its state_dict"):
        pickle.dumps(CompressedAllToAll())


def test_gradients_of_gradients_are_refused_and_not_left_out():
    rows = torch.randn(4, 2, requires_grad=True)
    found = CompressedAllToAll()(rows)
    (gradient,) = torch.autograd.grad((found**2).sum(), rows, create_graph=True)
    assert torch.equal(gradient, 2 * rows)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (gradient**2).sum().backward()
