"""Objects of the collective: copies, pickles, and gradients of gradients."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

import bitslab
from bitslab.distributed import CompressedAllToAll, Table, all_to_all_single, autograd
from bitslab.distributed.agreement import TableSizes
from bitslab.distributed.checks import check_backend
from bitslab.distributed.layout import Layout
from bitslab.distributed.rounding import GradientRounder
from bitslab.errors import ArgumentError
from tests.distributed.ranks import world

pytestmark = pytest.mark.usefixtures("group_of_one")


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


def test_a_copy_without_input_receives_where_rows_were_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a group with a backend for a GPU, too, nothing else says where that is."""

    def for_both(group: dist.ProcessGroup) -> torch.device:
        raise ArgumentError("inputs: none on this rank")

    monkeypatch.setattr(autograd, "device_of_group", for_both)
    exchange = CompressedAllToAll(tables=[Table("a", 3)])
    with pytest.raises(ArgumentError, match="none on this rank"):
        exchange.exchange_tables({}, {}, {})
    exchange.exchange_tables({"a": torch.ones(2, 3)}, {"a": [2]}, {"a": [2]})
    planned = CompressedAllToAll(tables=[Table("a", 3)], device="cpu")
    for each in (exchange, copy.deepcopy(exchange), planned, copy.deepcopy(planned)):
        assert each.exchange_tables({}, {}, {}) == {}


@pytest.mark.parametrize(
    ("part", "damaged"),
    [
        ("decision", None),
        ("decision", {"modes": ["plain"]}),
        ("feedback", {"a": {"lost": torch.zeros(1, 7)}}),
        ("tables", {"a": {"class": None, "index": None, "codec": [], "backward_codec": []}}),
    ],
    ids=["no decision", "one way", "other rows", "no codec"],
)
def test_a_damaged_state_is_refused(part, damaged):
    exchange = CompressedAllToAll(tables=[Table("a", 4)], backward=0.1, error_feedback=4)
    state = exchange.state_dict() | {part: damaged}
    with pytest.raises(bitslab.CorruptedDataError, match="state: "):
        exchange.load_state_dict(state)


def test_what_was_lost_is_delivered_once_where_nothing_is_rounded():
    rounder = GradientRounder(0, 8)
    ids = torch.arange(4)
    rows = torch.rand(4, 3)
    none = slice(0)
    found = rounder.rounded("a", rows, ids, 0.4, 0, none)
    for bound in (0.0, torch.tensor(0.0, dtype=torch.float64)):
        again = copy.deepcopy(rounder)
        later = again.rounded("a", torch.zeros(4, 3), ids, bound, 1, none)
        assert torch.allclose(found + later, rows, atol=1e-6)
        assert not again.rounded("a", torch.zeros(4, 3), ids, bound, 2, none).any()


def test_messages_of_four_gibibytes_are_refused_before_they_are_made():
    """Of tables that fit alone, and together do not."""
    rows = (1 << 30) * 14 // 10 // 256
    tables = [TableSizes(name, torch.int64, 32, (0, rows), (0, rows)) for name in "abc"]
    layout = Layout(tables, 0, 2, 0)
    with pytest.raises(bitslab.ArgumentError, match=r"one message to rank 1 .* 3 tables"):
        layout.agreement(1, 0)
    assert layout.agreement(2, 0)
    assert Layout(tables[:2], 0, 2, 0).agreement(1, 0)
    back = [t._replace(send_rows=(0, 0)) for t in tables]
    with pytest.raises(bitslab.ArgumentError, match="one message from rank 1"):
        Layout(back, 0, 2, 0).agreement(1, 0)


@pytest.mark.parametrize(
    ("device", "found"), [("cuda:1", "gloo for tensors on cuda:1"), ("mps", "no backend for tens")]
)
def test_a_group_without_the_backend_that_is_needed_is_refused(device, found):
    group = world()
    with pytest.raises(bitslab.ArgumentError, match=f"group: it has {found}.*expected nccl"):
        check_backend(group, torch.device(device))
    check_backend(group, torch.device(device), "raw")
    check_backend(group, torch.device("cpu"))


@pytest.mark.parametrize(
    "given",
    [{"tables": [Table("a", 4), Table("b", 4, error_bound=0.1)]}, {"backward": 0.1}],
    ids=["table", "gradients"],
)
def test_a_bound_is_refused_where_every_bit_is_kept(given):
    with pytest.raises(bitslab.ArgumentError, match="a bound with codec='raw'"):
        CompressedAllToAll(codec="raw", **given)


# torch's compiler asks each tensor that it meets for it, and hides that but where it is an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_code_calls_exchanges_outside_of_its_graph():
    """Traced, they would leave the group of no more use."""
    exchange = CompressedAllToAll(codec="compressed")
    planned = CompressedAllToAll(tables=[Table("a", 2)], codec="compressed")
    sizes = {"a": [4]}

    def steps(t: torch.Tensor) -> torch.Tensor:
        found = torch.empty_like(t)
        all_to_all_single(found, t * 2, codec="compressed")
        by_table = planned.exchange_tables({"a": t * 3}, sizes, sizes)
        return found + exchange(t * 5) + by_table["a"] * 7

    t = torch.arange(8.0).view(4, 2).requires_grad_()
    compiled = torch.compile(steps, backend="eager")
    for _ in range(2):
        found = compiled(t)
        (gradient,) = torch.autograd.grad(found.sum(), t)
        assert torch.equal(found, 28 * t)
        assert torch.equal(gradient, torch.full((4, 2), 26.0))
    assert exchange.stats()["forward"]["calls"] == exchange.stats()["backward"]["calls"] == 2
    assert torch.equal(exchange(t), t)


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
